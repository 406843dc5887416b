"""Preflight: is every host fit for the job, and if not, which command mends it?

report = doctor.examine(subject, transport)
print(report.table())
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from clusterkit.doctor.base import Check, Finding, Machine, Needs, Subject

if TYPE_CHECKING:
    from clusterkit.doctor.checks import CHECKS
    from clusterkit.doctor.preflight import Progress, chosen, examine
    from clusterkit.doctor.report import Report, refusal

__all__ = [
    "CHECKS",
    "Check",
    "Finding",
    "Machine",
    "Needs",
    "Progress",
    "Report",
    "Subject",
    "chosen",
    "examine",
    "refusal",
]

_LATER = {
    "CHECKS": "checks",
    "Progress": "preflight",
    "chosen": "preflight",
    "examine": "preflight",
    "Report": "report",
    "refusal": "report",
}


def __getattr__(name: str) -> Any:
    # Backends need a Subject in every command, the checks only where hosts are examined.
    if name not in _LATER:
        raise AttributeError(name)
    return getattr(import_module(f"clusterkit.doctor.{_LATER[name]}"), name)
