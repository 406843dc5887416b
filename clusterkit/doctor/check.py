"""What a check of hosts is made of: what it collects on a host, and how that is judged.

`Script.collect` is a function of the standard library alone; its text is sent to the host, where it
only reads (`clusterkit.doctor.driver` runs it). `Check.judge` is a pure function of what all hosts
answered. Its verdicts say what is wrong and which command mends it. Where there are no hosts to run
anything on, something else is looked at (`clusterkit.doctor.kubernetes`); findings are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Struct

from clusterkit.doctor.base import HostSubject, Machine, Rule, Verdict, fail, warn
from clusterkit.doctor.words import shortened
from clusterkit.errors import ClusterkitError

T = TypeVar("T")


@dataclass(frozen=True)
class Script(Generic[T]):
    """A function that runs on hosts and looks at something.

    Attributes:
        name: unlike any other script's.
        collect: called with what `clusterkit.doctor.hosts` gives every script. Its text is what
            is sent: it imports what it needs, from the standard library alone, finds there what
            `driver.HELPERS` names, and must be understood by Python 3.8.
        kind: type of what it gives, as JSON.
        limit: seconds after which it is ended.
        phase: 1, 2 or 3; the hosts begin a phase together, when the one before has ended.
        where: on all hosts, on the head, or on the others.
        with_head: only where the head answers.
        safe: reads nothing that may hang, such as a mounted folder: needs no process of its own.
        whole_module: send the text of the function's module, not of the function alone.
    """

    name: str
    collect: Callable[[dict[str, Any]], Any]
    kind: type[T]
    limit: float = 10.0
    phase: int = 1
    where: Literal["all", "head", "others"] = "all"
    with_head: bool = False
    safe: bool = False
    whole_module: bool = False

    @cached_property
    def source(self) -> str:
        import inspect

        if self.whole_module and (module := inspect.getmodule(self.collect)) is not None:
            return inspect.getsource(module)
        text = inspect.getsource(self.collect)
        return text[text.index("def ") :]  # without what decorates it

    def runs_on(self, host: str, subject: HostSubject) -> bool:
        return self.where == "all" or (self.where == "head") == (host == subject.head.name)


def script(
    name: str, kind: type[T], **options: Any
) -> Callable[[Callable[[dict[str, Any]], Any]], Script[T]]:
    """Make a `Script` of the function that collects, with its other attributes as options."""
    return lambda collect: Script(name, collect, kind, **options)


class Output(Struct, frozen=True):
    """What one script gave: a JSON document, or why it gave none."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    error: str | None = None
    timed_out: str | None = None
    """The state of its process (see proc(5)) when its time was over."""


@dataclass(frozen=True)
class Answer:
    """What one host answered.

    Attributes:
        error: why it could not be reached; all else is empty then.
        lost: why it did not answer a later time.
        sent, received: our clock around the first round trip, Unix seconds.
        began, ended: the host's clock when it began and ended to answer; None: no interpreter
            ran there, or the answer was cut short.
        interpreter: which one ran; the one of the ranks unless that does not work.
        reached_at: under which of its addresses SSH reached it.
        stderr: what interpreters that do not work, and shells, complained.
        outputs: by name of the script.
    """

    error: ClusterkitError | None = None
    lost: ClusterkitError | None = None
    sent: float = 0.0
    received: float = 0.0
    began: float | None = None
    ended: float | None = None
    interpreter: str = ""
    reached_at: str = ""
    stderr: str = ""
    outputs: Mapping[str, Output] = field(default_factory=dict)


# ---------------------------------------------------------------- judging


@dataclass
class Answers:
    """What hosts answered, as the judge of one check sees it.

    Attributes:
        of: each host's answer, in the subject's order.
        unread: verdicts on hosts of which something could not be read; they stand before the
            judge's own.
    """

    subject: HostSubject
    of: Mapping[str, Answer]
    unread: list[Verdict] = field(default_factory=list)

    @cached_property
    def machines(self) -> dict[str, Machine]:
        return {machine.name: machine for machine in self.subject.hosts}

    def read(
        self, script: Script[T], among: Collection[str] | None = None, *, quiet: bool = False
    ) -> dict[str, T]:
        """What a script collected, by host; what could not be had becomes a verdict.

        Args:
            among: only these hosts.
            quiet: without a verdict.
        """
        seen: dict[str, T] = {}
        for host, answer in self.of.items():
            if not script.runs_on(host, self.subject) or (among is not None and host not in among):
                continue
            output = answer.outputs.get(script.name)
            verdict = _unread(host, answer, output, script.limit)
            if output is not None and verdict is None:
                try:
                    seen[host] = msgspec.json.decode(output.value, type=script.kind)
                except msgspec.MsgspecError as error:
                    verdict = warn(host, f"answered with something unreadable: {error}", None)
            if verdict is not None and not quiet:
                self.unread.append(verdict)
        return seen


def _unread(host: str, answer: Answer, output: Output | None, limit: float) -> Verdict | None:
    """Why a script gave nothing, if it did not."""
    if output is None and answer.lost is not None:
        return fail(host, answer.lost.message, None)
    if output is None:
        complaint = shortened(answer.stderr.strip().rpartition("\n")[2])
        cause = "no answer: the host's output was cut short"
        return warn(host, f"{cause}: {complaint}" if complaint else cause, None)
    if output.timed_out == "D":
        cause = f"no answer within {limit:g} s: a disk or a mount does not answer"
        return fail(host, cause, None)
    if output.timed_out is not None:
        cause = f"no answer within {limit:g} s: the host is slow, or it hangs"
        return warn(host, cause, None)
    if output.error is not None:
        return warn(host, f"the check could not run: {output.error}", None)
    return None


def alone(subject: HostSubject) -> str | None:
    return "one host has no others" if len(subject.hosts) == 1 else None


def without_ssh(subject: HostSubject) -> str | None:
    return None if subject.over_ssh else "not reached over SSH"


Judge = Callable[[Answers], Iterator[Verdict]]


@dataclass(frozen=True)
class Check(Rule):
    """One thing that has to be right on every host.

    Attributes:
        judge: pure; is given the hosts that answered. About a host that it does not concern it
            says nothing; an ``ok`` beside a fault of the same host does not count.
        scripts: what it needs from the hosts.
        silent_too: judges hosts that did not answer as well.
        pointless: the reason why the check says nothing of this subject, or None.
    """

    judge: Judge
    quick: bool = True
    scripts: tuple[Script[Any], ...] = ()
    silent_too: bool = False
    pointless: Callable[[HostSubject], str | None] = lambda subject: None


def check(*scripts: Script[Any], **options: Any) -> Callable[[Judge], Check]:
    """Make a `Check` of the function that judges; the check's other attributes are options."""
    return lambda judge: Check(judge, scripts=scripts, **options)
