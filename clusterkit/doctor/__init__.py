"""Preflight checks of hosts and clusters, with the command that fixes each fault.

report = doctor.examine(subject, transport)
print(report.table())
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from clusterkit.doctor.base import Check, Finding, Subject
from clusterkit.doctor.report import Progress, Report, refusal
from clusterkit.errors import BadInput, did_you_mean

if TYPE_CHECKING:
    from clusterkit.transport import Transport

__all__ = [
    "Finding", "Progress", "Report", "Subject", "chosen", "every_check", "examine", "refusal",
]  # fmt: skip

EXAMINERS = {
    "hosts": "clusterkit.doctor.hosts.examine",
    "kubernetes": "clusterkit.backends.kubernetes.doctor",
    "slurm": "clusterkit.backends.slurm.doctor",
}
"""Kind of subject to the module that examines it, with ``CHECKS`` and ``run_checks``."""


def _examiner(name: str) -> Any:
    # Imported here: backends build subjects in every command, checks are seldom needed.
    return import_module(EXAMINERS[name])


def every_check() -> dict[str, tuple[Check, ...]]:
    """Return all checks, by kind of subject."""
    return {name: _examiner(name).CHECKS for name in EXAMINERS}


def examine(
    subject: Subject,
    transport: Transport,
    *,
    quick: bool = False,
    only: Sequence[str] | None = None,
    progress: Progress = lambda phase, waiting: None,
) -> Report:
    """Run the checks on the subject, without changing anything there.

    Args:
        subject: hosts or a cluster, with the requirements of the job.
        transport: reaches them.
        quick: only the checks that are cheap enough for every submit.
        only: only the checks of these names, quick or not.
        progress: called with the phase and the hosts that have not answered yet.

    Raises:
        BadInput: a name in ``only`` that no check has.
    """
    examiner = _examiner(subject.kind)
    checks = chosen(examiner.CHECKS, quick=quick, only=only)
    report: Report = examiner.run_checks(subject, transport, checks, progress)
    return report


def chosen(checks: Sequence[Any], *, quick: bool, only: Sequence[str] | None) -> list[Any]:
    """Return the checks of these names, or the quick ones, or all.

    Raises:
        BadInput: a name that no check has.
    """
    if only is None:
        return [check for check in checks if check.quick or not quick]
    names = [check.name for check in checks]
    if not only:
        raise BadInput("no check was named", hint=f"one of {', '.join(names)}")
    for name in only:
        if name not in names:
            hint = did_you_mean(name, names) or f"one of {', '.join(names)}"
            raise BadInput(f"check {name!r} is unknown", hint=hint)
    return [check for check in checks if check.name in only]
