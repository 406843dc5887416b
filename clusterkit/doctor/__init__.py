"""Preflight: is every host, or the cluster, fit for the job; if not, which command mends it?

report = doctor.examine(subject, transport)
print(report.table())
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from clusterkit.doctor.base import Check, Finding, Machine, Needs, Patient, Subject

if TYPE_CHECKING:
    from clusterkit.doctor.checks import CHECKS
    from clusterkit.doctor.preflight import chosen, every_check, examine
    from clusterkit.doctor.report import Progress, Report, refusal

__all__ = [
    "CHECKS",
    "Check",
    "Finding",
    "Machine",
    "Needs",
    "Patient",
    "Progress",
    "Report",
    "Subject",
    "chosen",
    "every_check",
    "examine",
    "refusal",
]

_LATER = {
    "CHECKS": "checks",
    "Progress": "report",
    "chosen": "preflight",
    "every_check": "preflight",
    "examine": "preflight",
    "Report": "report",
    "refusal": "report",
}


def __getattr__(name: str) -> Any:
    # Backends need a Subject in every command, the checks only where hosts are examined.
    if name not in _LATER:
        raise AttributeError(name)
    return getattr(import_module(f"clusterkit.doctor.{_LATER[name]}"), name)
