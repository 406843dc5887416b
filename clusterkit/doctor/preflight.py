"""Examines whatever a backend calls its subject, by the checks that are made for its kind."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from clusterkit.doctor.base import Patient, Rule
from clusterkit.doctor.report import Progress, Report
from clusterkit.errors import BadInput
from clusterkit.transport import Transport

WAYS = ("hosts", "kubernetes")
"""What there is to examine; each is a module here with ``CHECKS`` and ``look``."""


def way(name: str) -> Any:
    """The module that examines this kind, imported when it is needed."""
    return import_module(f"clusterkit.doctor.{name}")


def every_check() -> dict[str, tuple[Rule, ...]]:
    """All checks, by what they look at."""
    return {name: way(name).CHECKS for name in WAYS}


def examine(
    subject: Patient,
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
        progress: is told how far it is.

    Raises:
        BadInput: a name in ``only`` that no check has.
    """
    module = way(subject.way)
    checks = chosen(module.CHECKS, quick=quick, only=only)
    report: Report = module.look(subject, transport, checks, progress)
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
            near = difflib.get_close_matches(name, names, 1)
            raise BadInput(
                f"check {name!r} is unknown",
                hint=f"did you mean {near[0]}?" if near else f"one of {', '.join(names)}",
            )
    return [check for check in checks if check.name in only]
