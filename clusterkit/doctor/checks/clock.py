"""Do the clocks agree?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from clusterkit.doctor.base import Level, Verdict, ok
from clusterkit.doctor.check import Answer, Answers, Check

WARN = 0.5
FAIL = 5.0
ELASTIC = 2.0
"""Seconds. Which rank failed first is judged by time, with 2 s before the others are ended; and a
node of an elastic job counts as dead when its last word seems 3 s old."""


Span = tuple[float, float]


def offset(answer: Answer) -> Span | None:
    """The host's clock minus ours, in seconds: the least and the most that it can be.

    The host looked at its clock when it began and when it ended to answer, both after we sent
    and before we received. So the difference lies between ``ended - received`` and
    ``began - sent``: the time that the answer took itself does not count.
    """
    if answer.began is None:
        return None
    last = answer.began if answer.ended is None else answer.ended
    low, high = last - answer.received, answer.began - answer.sent
    return min(low, high), max(low, high)


def agreed(spans: Iterable[Span]) -> float:
    """The offset that most clocks can have; of several the one nearest to our own clock.

    Our own clock has a vote: between two hosts that differ it says which one is wrong.
    """
    voters = [*spans, (0.0, 0.0)]
    candidates = {end for span in voters for end in span}
    return min(
        candidates,
        key=lambda value: (-sum(low <= value <= high for low, high in voters), abs(value)),
    )


def judge(answers: Answers) -> Iterator[Verdict]:
    offsets = {host: span for host, answer in answers.of.items() if (span := offset(answer))}
    right = agreed(offsets.values())
    limit = ELASTIC if answers.subject.needs.elastic else FAIL
    for host, (low, high) in offsets.items():
        # How far it is off at least.
        off = max(low - right, 0.0) or min(high - right, 0.0)
        if abs(off) <= WARN:
            yield ok(host, "agrees")
            continue
        level: Level = "fail" if abs(off) > limit else "warn"
        cause = f"its clock is at least {_duration(abs(off))} {'ahead' if off > 0 else 'behind'}"
        if len(answers.subject.hosts) == 1:
            level = "warn"  # nobody to disagree with but the submitter
        else:
            cause += ": logs of the nodes are merged by time"
        mend = "sudo apt-get install -y chrony && sudo chronyc makestep"
        yield Verdict(host, level, cause, mend)


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


CHECK = Check("clock", "The clocks of all hosts agree.", judge)
