"""Preflight: is every host, or the cluster, fit for the job; if not, which command mends it?

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
    "kubernetes": "clusterkit.doctor.kubernetes",
    "slurm": "clusterkit.backends.slurm.doctor",
}
"""What there is to examine; each is a module with ``CHECKS`` and ``look``."""


def _examiner(name: str) -> Any:
    """The module that examines this kind, imported only here: backends need a subject in every
    command, the checks only where something is examined."""
    return import_module(EXAMINERS[name])


def every_check() -> dict[str, tuple[Check, ...]]:
    """All checks, by what they look at."""
    return {name: _examiner(name).CHECKS for name in EXAMINERS}


def examine(
    subject: Subject,
    transport: Transport,
    *,
    quick: bool = False,
    only: Sequence[str] | None = None,
    progress: Progress = lambda phase, waiting: None,
) -> Report:
    """Look at the subject, and judge what was seen. Nothing there is changed.

    Args:
        subject: hosts, or a cluster; and what they are to be fit for.
        transport: reaches them.
        quick: only the checks that are cheap enough for every submit.
        only: only the checks of these names, quick or not.
        progress: called with the phase and the hosts that have not answered yet.

    Raises:
        BadInput: a name in ``only`` that no check has.
    """
    examiner = _examiner(subject.way)
    checks = chosen(examiner.CHECKS, quick=quick, only=only)
    report: Report = examiner.look(subject, transport, checks, progress)
    return report


def chosen(checks: Sequence[Any], *, quick: bool, only: Sequence[str] | None) -> list[Any]:
    """The checks of these names, or the quick ones, or all.

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
