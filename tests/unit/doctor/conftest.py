"""Made-up hosts and answers, so that every judgement is tested on recorded outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from clusterkit.doctor.base import Finding
from clusterkit.doctor.hosts.base import (
    Answer,
    Collector,
    HostCheck,
    HostSubject,
    Machine,
    Needs,
    Output,
)
from clusterkit.doctor.hosts.checks import CHECKS
from clusterkit.doctor.hosts.examine import judge

PYTHON = "/opt/venv/bin/python"


def make_subject(number: int = 3, *, slots: int | None = None, **fields: Any) -> HostSubject:
    """Hosts h0, h1, ... at 10.0.0.10, 10.0.0.11, ..."""
    return HostSubject(
        **{
            "cluster": "lab",
            "hosts": tuple(
                Machine(name=f"h{i}", address=f"10.0.0.{10 + i}", python=PYTHON, slots=slots)
                for i in range(number)
            ),
            "workdir": "/srv/work",
            "port": 29500,
            "over_ssh": True,
            **fields,
        }
    )


def needs(**fields: Any) -> Needs:
    return Needs(**fields)


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def make_answer(outputs: Mapping[str, Any] | None = None, **fields: Any) -> Answer:
    """A host that answered at once; an `Output` among the outputs stands for itself."""
    return Answer(
        **{
            "sent": 1000.0,
            "received": 1000.2,
            "began": 1000.1,
            "ended": 1000.1,
            "interpreter": PYTHON,
            "outputs": {
                name: value if isinstance(value, Output) else Output(raw(value))
                for name, value in (outputs or {}).items()
            },
            **fields,
        }
    )


def named(name: str) -> HostCheck:
    return next(check for check in CHECKS if check.name == name)


class Judged:
    """Findings of one check, by host."""

    def __init__(self, findings: list[Finding]) -> None:
        self.findings = findings

    def __getitem__(self, host: str) -> Finding:
        """The host's only finding."""
        found = [finding for finding in self.findings if finding.host == host]
        assert len(found) == 1, found
        return found[0]

    def says(self, host: str, level: str, words: str = "", remedy: str | None = None) -> None:
        """The host's only finding is of this level, and these stand in its cause and remedy."""
        found = self[host]
        assert found.level == level
        assert words in found.cause
        assert remedy is None or remedy in (found.remedy or "")

    def all(self, host: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.host == host]

    def levels(self) -> dict[str, list[str]]:
        levels: dict[str, list[str]] = {}
        for finding in self.findings:
            levels.setdefault(finding.host, []).append(finding.level)
        return levels


@pytest.fixture
def judged() -> Callable[..., Judged]:
    """Have a check judge what hosts answered.

    ``judged("shm", subject, h0=..., h1=...)``: each host's value is what the check's first
    collector gave there, an `Output`, or an `Answer` as a whole; hosts that are left out get the
    default.
    """

    def call(name: str, subject: HostSubject, default: Any = None, **by_host: Any) -> Judged:
        check = named(name)
        collectors: tuple[Collector[Any], ...] = check.collectors
        answers = {}
        for machine in subject.hosts:
            value = by_host.get(machine.name, default)
            if isinstance(value, Answer):
                answers[machine.name] = value
            else:
                names = [each.name for each in collectors[:1]]
                answers[machine.name] = make_answer(dict.fromkeys(names, value))
        findings = judge(check, answers, subject)
        for finding in findings:
            assert finding.check == name
            assert finding.host in answers
        return Judged(findings)

    return call
