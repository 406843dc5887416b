"""All scripts of one phase as one command for a host, and its output taken apart again."""

from __future__ import annotations

import base64
import inspect
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from clusterkit.doctor.hosts import runner
from clusterkit.doctor.hosts.base import Answer, Output, Script
from clusterkit.host_probe import PORTS, addresses, free_port, refusal, versions

# Tried in turn until one does its work: where the interpreter of the ranks does not run, any
# other still finds out what is right and wrong with the rest of the host.
_FIRST_THAT_WORKS = """program=$1; shift
for python in "$@"; do "$python" %s -c "$program" "$python" && exit 0; done
exit 127"""
_OTHERS = ("python3", "/usr/bin/python3")


class _Line(Output, frozen=True):
    """One line of the driver: that it began, what a script gave, or that it ended."""

    name: str | None = None
    began: float | None = None
    ended: float | None = None
    interpreter: str = ""
    reached_at: str = ""


def command(
    scripts: Sequence[Script[Any]], given: Mapping[str, Any], python: str, patience: float = 1.0
) -> list[str]:
    """The command that runs scripts on a host; it needs POSIX sh and some Python there.

    Args:
        scripts: whose texts are sent.
        given: what each is called with; JSON must hold it.
        python: the interpreter to try first.
        patience: by what factor scripts may take longer than their limit.
    """
    tasks = [
        {
            "name": script.name,
            "function": script.collect.__name__,
            "source": script.source,
            "limit": script.timeout * patience,
            "in_process": script.in_process,
        }
        for script in scripts
    ]
    program = f"{runner_text()}\nmain({tasks!r}, {dict(given)!r}, sys.argv[1])\n"
    packed = base64.b64encode(zlib.compress(program.encode())).decode()
    # The empty entry would let a json.py in the current folder shadow Python's own.
    unpack = (
        "import sys; sys.path[:] = [p for p in sys.path if p]; import base64, zlib; "
        f'exec(compile(zlib.decompress(base64.b64decode("{packed}")), "doctor", "exec"))'
    )
    pythons = dict.fromkeys((python, *_OTHERS))
    # What is installed for it is of interest in the first phase alone, and looking costs time.
    flags = "-S" if all(script.phase > 1 for script in scripts) else ""
    return ["/bin/sh", "-c", _FIRST_THAT_WORKS % flags, "sh", unpack, *pythons]


@cache
def runner_text() -> str:
    """The driver, and what others ask hosts as well."""
    text = Path(runner.__file__).read_text(encoding="utf-8") + f"\nPORTS = {PORTS}\n"
    functions = (versions, refusal, free_port, addresses)
    text += "\n".join(inspect.getsource(each) for each in functions)
    names = ", ".join(f"{each.__name__}={each.__name__}" for each in functions)
    return f"{text}\nHELPERS.update({names})\n"


def limit(scripts: Sequence[Script[Any]], patience: float = 1.0) -> float:
    """Seconds after which the command has ended on a host that works at all."""
    return (max((script.timeout for script in scripts), default=0) + 15) * patience


def parse(stdout: str) -> Answer:
    """Take the driver's output apart; what is torn or foreign is passed over."""
    outputs: dict[str, Output] = {}
    first, last = _Line(), _Line()
    for text in stdout.splitlines():
        before, _, document = text.partition(runner.MARK)
        try:
            line = msgspec.json.decode(document, type=_Line)
        except msgspec.MsgspecError:
            continue
        if before:
            continue
        if line.began is not None:  # an interpreter that did not get further may come before
            first, last, outputs = line, _Line(), {}
        elif line.ended is not None:
            last = line
        elif line.name is not None:
            outputs[line.name] = line
    return Answer(
        outputs=outputs,
        began=first.began,
        ended=last.ended,
        interpreter=first.interpreter,
        reached_at=first.reached_at,
    )
