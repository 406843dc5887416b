"""The system: platform, clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from clusterkit.doctor.base import Level, Verdict, ok
from clusterkit.doctor.hosts.base import Answer, Answers, Collector, check
from clusterkit.doctor.hosts.collect import system as collect
from clusterkit.doctor.hosts.helpers import install_packages, most_common


class System(Struct):
    """The platform that programs are built for."""

    machine: str
    kernel: str
    """Major and minor number."""
    system: str
    libc: str


_PARTS: dict[str, tuple[str, Level, str]] = {
    "machine": ("a processor of kind", "fail", "leave the host out, or install the same system"),
    "libc": ("the C library", "warn", "uname -a"),
    "system": ("the system", "warn", "uname -a"),
    "kernel": ("the kernel", "warn", "uname -a"),
}
"""Field of `System`: its name in messages, level of a difference, remedy."""


SYSTEM = Collector(collect.system, System)


@check(SYSTEM)
def system(answers: Answers) -> Iterator[Verdict]:
    """Processor, system, C library and kernel are the same everywhere."""
    seen = answers.read(SYSTEM)
    usual = {key: most_common((getattr(each, key) for each in seen.values()), "") for key in _PARTS}
    for host, found in seen.items():
        for key, (name, level, remedy) in _PARTS.items():
            if (own := getattr(found, key)) != usual[key]:
                cause = f"{name} {own}, but {usual[key]} on the other hosts"
                yield Verdict(host, level, cause, remedy)
        yield ok(host, f"{found.system}, kernel {found.kernel}, {found.machine}")


# ---------------------------------------------------------------- clock

CLOCK_WARN = 0.5
CLOCK_FAIL = 5.0
CLOCK_ELASTIC = 2.0
"""Seconds. Which rank failed first is decided by time, 2 s before the others are ended; and a node
of an elastic job counts as lost when its last message seems 3 s old."""

Span = tuple[float, float]


def offset(answer: Answer) -> Span | None:
    """Return the least and the most that the host's clock can be ahead of ours, in seconds.

    The host read its clock at the beginning and at the end of its work, both after we sent
    and before we received. So the difference lies between ``ended - received`` and
    ``began - sent``, however long the work took. None: the host did not answer.
    """
    if answer.began is None:
        return None
    last = answer.began if answer.ended is None else answer.ended
    low, high = last - answer.received, answer.began - answer.sent
    return min(low, high), max(low, high)


def agreed(spans: Iterable[Span]) -> float:
    """Return the offset that most clocks can have; of several, the one nearest to our own clock.

    Our own clock is a third reading: between two hosts that differ it decides which one is wrong.
    """
    voters = [*spans, (0.0, 0.0)]
    candidates = {end for span in voters for end in span}
    return min(
        candidates,
        key=lambda value: (-sum(low <= value <= high for low, high in voters), abs(value)),
    )


def _set_clock(installer: str) -> str:
    # Debian's package starts the service; that of Fedora and its kin does not.
    start = "sudo systemctl enable --now chronyd && " if installer == "dnf" else ""
    return f"{install_packages(installer, ['chrony'])} && {start}sudo chronyc makestep"


@check()
def clock(answers: Answers) -> Iterator[Verdict]:
    """The clocks of all hosts agree."""
    offsets = {host: span for host, answer in answers.of.items() if (span := offset(answer))}
    right = agreed(offsets.values())
    limit = CLOCK_ELASTIC if answers.subject.needs.elastic else CLOCK_FAIL
    for host, (low, high) in offsets.items():
        off = max(low - right, 0.0) or min(high - right, 0.0)  # at least
        if abs(off) > CLOCK_WARN:
            cause = (
                f"its clock is at least {_duration(abs(off))} {'ahead' if off > 0 else 'behind'}"
            )
            level: Level = "fail" if abs(off) > limit else "warn"
            if len(answers.subject.hosts) == 1:
                level = "warn"  # it differs from the submitter's clock alone
            else:
                cause += ": logs of the nodes are merged by time"
            yield Verdict(host, level, cause, _set_clock(answers.of[host].installer))
        yield ok(host, "agrees")


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
