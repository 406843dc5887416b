"""Examine hosts: one round trip per host and phase, all hosts at once, then the judges."""

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
from clusterkit.doctor.hosts.base import Answer, Answers, Collector, HostCheck, HostSubject, Machine
from clusterkit.doctor.hosts.checks import CHECKS as CHECKS
from clusterkit.doctor.hosts.checks.interface import INTERFACES
from clusterkit.doctor.hosts.checks.ports import PORT
from clusterkit.doctor.report import Progress, Report
from clusterkit.errors import ClusterkitError
from clusterkit.transport import Transport

AT_ONCE = 64
"""Hosts that are visited at once; all of them if they have to connect to each other."""
SLOW_AFTER = 3.0
"""Seconds that the slowest host may take to answer before the timeouts of all are extended."""


def run_checks(
    subject: HostSubject, transport: Transport, checks: Sequence[HostCheck], progress: Progress
) -> Report:
    """Run the checks on every host, without changing anything there."""
    applicable = [check for check in checks if check.skip_reason(subject) is None]
    visits = Visits(subject, transport, applicable, progress)
    visits.run()
    return Report(
        cluster=subject.cluster,
        hosts=tuple(machine.name for machine in subject.hosts),
        checks=tuple(check.name for check in checks),
        findings=tuple(
            finding for check in checks for finding in judge(check, visits.answers, visits.subject)
        ),
    )


def judge(check: HostCheck, answers: Mapping[str, Answer], subject: HostSubject) -> list[Finding]:
    """Return the findings of a check, in the order of the subject's hosts."""
    names = [machine.name for machine in subject.hosts]
    if (reason := check.skip_reason(subject)) is not None:
        return [Finding(check.name, host, "skip", reason) for host in names]
    answered = {host: answer for host, answer in answers.items() if answer.began is not None}
    seen = Answers(subject, answers if check.unreachable_too else answered)
    judged = list(check.judge(seen))
    verdicts = [*seen.unread, *judged]
    for host, answer in answers.items():
        if host not in seen.of:
            reason = "it did not answer" if answer.error else "no Python runs on it"
            verdicts.append(skip(host, reason))
    faulty = {verdict.host for verdict in verdicts if verdict.level in ("warn", "fail")}
    kept = [each for each in verdicts if each.level != "ok" or each.host not in faulty]
    order = {name: number for number, name in enumerate(names)}
    kept.sort(key=lambda verdict: order[verdict.host])
    return [Finding(check.name, *verdict) for verdict in kept]


# ---------------------------------------------------------------- visiting


class Visits:
    """The round trips to the hosts, phase by phase.

    Attributes:
        subject: with the addresses and the port that the first phase found, where none was given.
        answers: by host.
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
        # The second phase needs addresses and port, which the first can find.
        no_address = any(machine.address is None for machine in subject.hosts)
        collectors: list[Collector[Any]] = [INTERFACES] if no_address else []
        collectors += [PORT] if subject.port is None else []
        collectors += [collector for check in checks for collector in check.collectors]
        self._collectors = {collector.name: collector for collector in collectors}
        self._checks = [check.name for check in checks]
        self._token = secrets.token_hex(8)
        self._time_factor = 1.0

    def run(self) -> None:
        self.answers = self._phase(1, self.subject.hosts)
        self.subject = completed(self.subject, self.answers)
        # Hosts that are slow to answer need longer to connect to each other.
        answered = [answer for answer in self.answers.values() if answer.began is not None]
        slowest = max((answer.received - answer.sent for answer in answered), default=0.0)
        self._time_factor = min(10.0, max(1.0, slowest / SLOW_AFTER))
        try:
            self._later_phase(2)
        finally:
            self._later_phase(3)  # removes what the first phase left for the second

    def _later_phase(self, number: int) -> None:
        answered = [
            each for each in self.subject.hosts if self.answers[each.name].began is not None
        ]
        for host, answer in self._phase(number, answered).items():
            before = self.answers[host]
            self.answers[host] = replace(
                before, outputs={**before.outputs, **answer.outputs}, lost=answer.error
            )

    def _phase(self, number: int, hosts: Sequence[Machine]) -> dict[str, Answer]:
        """Run the collectors of a phase on the hosts that have any, and all hosts in the first."""
        present = [machine.name for machine in hosts]
        collectors = {machine: self._asked(number, machine.name, present) for machine in hosts}
        visited = [machine for machine in hosts if collectors[machine] or number == 1]
        if not visited:
            return {}
        together = "mesh" in self._checks and number == 2
        answers: dict[str, Answer] = {}
        pool = ThreadPoolExecutor(len(visited) if together else AT_ONCE)
        try:
            pending = {
                pool.submit(self._visit, machine, collectors[machine], present): machine.name
                for machine in visited
            }
            self._progress(number, list(pending.values()))
            for future in as_completed(list(pending)):
                answers[pending.pop(future)] = future.result()
                self._progress(number, list(pending.values()))
        finally:
            # After Ctrl-C this does not wait for slow hosts.
            pool.shutdown(wait=False, cancel_futures=True)
        return {machine.name: answers[machine.name] for machine in visited}

    def _asked(self, number: int, host: str, present: list[str]) -> list[Collector[Any]]:
        return [
            each
            for each in self._collectors.values()
            if each.phase == number
            and each.runs_on(host, self.subject)
            and (self.subject.head.name in present or not each.needs_head)
        ]

    def _visit(
        self, machine: Machine, collectors: Sequence[Collector[Any]], present: list[str]
    ) -> Answer:
        context = self._context(machine, present)
        argv, stdin = bundle.command(collectors, context, machine.python, self._time_factor)
        timeout = bundle.timeout(collectors, self._time_factor)
        sent = time.time()
        try:
            done = self._transport.run(machine.name, argv, timeout=timeout, stdin=stdin)
        except ClusterkitError as error:
            return Answer(error=error, sent=sent, received=time.time())
        received = time.time()
        answer = bundle.parse(done.stdout, machine.name)
        return replace(answer, sent=sent, received=received, stderr=done.stderr[-4096:])

    def _context(self, machine: Machine, present: list[str]) -> dict[str, Any]:
        """Return the argument of every collector on this host."""
        subject = self.subject
        return {
            "host": machine.name,
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
            "checks": self._checks,
            "cuda_home": subject.needs.cuda_home,
            "token": self._token,
            "time_factor": self._time_factor,
        }


def completed(subject: HostSubject, answers: Mapping[str, Answer]) -> HostSubject:
    """Fill in the addresses and the port that hosts have reported, where the subject has none."""
    seen = Answers(subject, answers)
    interfaces = seen.read(INTERFACES)
    hosts = []
    for machine in subject.hosts:
        address = machine.address
        if address is None and subject.interface != "auto":
            interface = interfaces.get(machine.name, {}).get(subject.interface)
            address = next(iter(interface.addresses), None) if interface is not None else None
        hosts.append(
            replace_fields(machine, address=address or answers[machine.name].reached_at or None)
        )
    found = seen.read(PORT).get(subject.head.name)
    port = found.port if subject.port is None and found is not None else subject.port
    return replace_fields(subject, hosts=tuple(hosts), port=port)
