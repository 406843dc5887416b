"""Examines hosts: one round trip per host and phase, all hosts at once, then the judgements."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

from msgspec.structs import replace as replace_fields

from clusterkit.doctor.base import Finding, skip
from clusterkit.doctor.hosts import bundle
from clusterkit.doctor.hosts.base import Answer, Answers, HostCheck, HostSubject, Machine, Script
from clusterkit.doctor.hosts.checks import CHECKS as CHECKS
from clusterkit.doctor.hosts.checks.network import collect_interfaces, collect_port
from clusterkit.doctor.report import Progress, Report
from clusterkit.errors import ClusterkitError
from clusterkit.transport import Transport

AT_ONCE = 64
"""Hosts that are visited at once, unless they have to meet each other."""
PATIENT_AFTER = 3.0
"""Seconds that a host may take to answer before all are given longer."""


def look(
    subject: HostSubject, transport: Transport, checks: Sequence[HostCheck], progress: Progress
) -> Report:
    """Look at every host, and judge what was seen. Nothing on the hosts is changed."""
    useful = [check for check in checks if check.skip_reason(subject) is None]
    visits = Visits(subject, transport, useful, progress)
    visits.make()
    return Report(
        cluster=subject.cluster,
        hosts=tuple(machine.name for machine in subject.hosts),
        checks=tuple(check.name for check in checks),
        findings=tuple(
            finding for check in checks for finding in judge(check, visits.answers, visits.subject)
        ),
    )


def judge(check: HostCheck, answers: Mapping[str, Answer], subject: HostSubject) -> list[Finding]:
    """What a check says of every host of the subject, in its order."""
    names = [machine.name for machine in subject.hosts]
    if (reason := check.skip_reason(subject)) is not None:
        return [Finding(check.name, host, "skip", reason) for host in names]
    heard = {host: answer for host, answer in answers.items() if answer.began is not None}
    seen = Answers(subject, answers if check.unreachable_too else heard)
    silent = {host: answer.error for host, answer in answers.items() if host not in seen.of}
    judged = [
        *check.judge(seen),
        *(skip(h, "it did not answer" if e else "no Python runs there") for h, e in silent.items()),
    ]
    verdicts = [*seen.unread, *judged]
    faulty = {verdict.host for verdict in verdicts if verdict.level in ("warn", "fail")}
    kept = [each for each in verdicts if each.level != "ok" or each.host not in faulty]
    # In the order of the hosts, and of one host in that of the judge.
    place = {name: number for number, name in enumerate(names)}
    kept.sort(key=lambda verdict: place[verdict.host])
    return [Finding(check.name, *verdict) for verdict in kept]


# ---------------------------------------------------------------- visiting


class Visits:
    """Asks the hosts, phase by phase.

    Attributes:
        subject: with the addresses and the port that the first phase found, where none was given.
        answers: of every host.
    """

    def __init__(
        self,
        subject: HostSubject,
        transport: Transport,
        checks: Sequence[HostCheck],
        progress: Progress,
    ) -> None:
        self.subject = subject
        self.answers: dict[str, Answer] = {}
        self._transport = transport
        self._progress = progress
        # What the second phase has to know is found in the first.
        lacking = any(machine.address is None for machine in subject.hosts)
        wanted: list[Script[Any]] = [collect_interfaces] if lacking else []
        wanted += [collect_port] if subject.port is None else []
        wanted += [script for check in checks for script in check.scripts]
        self._scripts = {script.name: script for script in wanted}
        self._wanted = [check.name for check in checks]
        self._token = secrets.token_hex(8)
        self._patience = 1.0

    def make(self) -> None:
        """All of them."""
        self.answers = self._phase(1, self.subject.hosts)
        self.subject = completed(self.subject, self.answers)
        # Where hosts are slow to begin, they need longer to meet.
        heard = [answer for answer in self.answers.values() if answer.began is not None]
        slowest = max((answer.received - answer.sent for answer in heard), default=0.0)
        self._patience = min(10.0, max(1.0, slowest / PATIENT_AFTER))
        try:
            self._again(2)
        finally:
            self._again(3)  # takes away what the first phase left for the second

    def _again(self, number: int) -> None:
        """Another phase, on the hosts that have answered so far."""
        heard = [host for host in self.subject.hosts if self.answers[host.name].began is not None]
        for host, answer in self._phase(number, heard).items():
            before = self.answers[host]
            self.answers[host] = replace(
                before, outputs={**before.outputs, **answer.outputs}, lost=answer.error
            )

    def _phase(self, number: int, hosts: Sequence[Machine]) -> dict[str, Answer]:
        """Visit hosts side by side, so many at once; the others begin as soon as these end."""
        present = [machine.name for machine in hosts]
        asked = {machine: self._asked(number, machine, present) for machine in hosts}
        visited = [machine for machine in hosts if asked[machine] or number == 1]
        if not visited:
            return {}
        together = "mesh" in self._wanted and number == 2
        answers: dict[str, Answer] = {}
        pool = ThreadPoolExecutor(len(visited) if together else AT_ONCE)
        try:
            pending = {
                pool.submit(self._visit, machine, asked[machine], present): machine.name
                for machine in visited
            }
            self._progress(number, list(pending.values()))
            for future in as_completed(list(pending)):
                answers[pending.pop(future)] = future.result()
                self._progress(number, list(pending.values()))
        finally:
            # All have ended, or Ctrl-C was pressed: then nobody waits for the slow ones.
            pool.shutdown(wait=False, cancel_futures=True)
        return {machine.name: answers[machine.name] for machine in visited}

    def _asked(self, number: int, machine: Machine, present: list[str]) -> list[Script[Any]]:
        return [
            script
            for script in self._scripts.values()
            if script.phase == number
            and script.runs_on(machine.name, self.subject)
            and (self.subject.head.name in present or not script.needs_head)
        ]

    def _visit(
        self, machine: Machine, scripts: Sequence[Script[Any]], present: list[str]
    ) -> Answer:
        argv = bundle.command(
            scripts, self._given(machine, present), machine.python, self._patience
        )
        limit = bundle.limit(scripts, self._patience)
        sent = time.time()
        try:
            done = self._transport.run(machine.name, argv, timeout=limit)
        except ClusterkitError as error:
            return Answer(error=error, sent=sent, received=time.time())
        received = time.time()
        answer = bundle.parse(done.stdout)
        return replace(answer, sent=sent, received=received, stderr=done.stderr[-4096:])

    def _given(self, machine: Machine, present: list[str]) -> dict[str, Any]:
        """What every script may read."""
        subject = self.subject
        return {
            "me": machine.name,
            "head": subject.head.name,
            "hosts": [
                [host.name, host.at]
                for host in subject.hosts
                if host.address is not None or host.name in present
            ],
            "present": present,
            "workdir": subject.workdir,
            "shared": subject.shared,
            "port": subject.port,
            "wanted": self._wanted,
            "token": self._token,
            "patience": self._patience,
        }


def completed(subject: HostSubject, answers: Mapping[str, Answer]) -> HostSubject:
    """The subject with the addresses and the port that hosts have reported, where it has none."""
    seen = Answers(subject, answers)
    interfaces = seen.read(collect_interfaces)
    hosts = []
    for machine in subject.hosts:
        address = machine.address
        if address is None and subject.interface != "auto":
            there = interfaces.get(machine.name, {}).get(subject.interface)
            address = next(iter(there.addresses), None) if there is not None else None
        hosts.append(
            replace_fields(machine, address=address or answers[machine.name].reached_at or None)
        )
    found = seen.read(collect_port).get(subject.head.name)
    port = found.port if subject.port is None and found is not None else subject.port
    return replace_fields(subject, hosts=tuple(hosts), port=port)
