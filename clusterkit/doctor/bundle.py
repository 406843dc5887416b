"""All scripts of one phase as one command for a host, and its output taken apart again."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from clusterkit.doctor import driver
from clusterkit.doctor.base import Output, Script

# Tried in turn until one does its work: where the interpreter of the ranks does not run, any
# other still tells what is right and wrong with the rest of the host.
_FIRST_THAT_WORKS = """program=$1; shift
for python in "$@"; do "$python" -c "$program" "$python" && exit 0; done
exit 127"""
_OTHERS = ("python3", "/usr/bin/python3")


class _Line(Struct):
    """One line of the driver."""

    name: str | None = None
    value: msgspec.Raw = msgspec.Raw(b"null")
    error: str | None = None
    timed_out: str | None = None
    began: float | None = None
    ended: float | None = None
    interpreter: str = ""
    reached_at: str = ""


class Reply(Struct, frozen=True, kw_only=True):
    """What the driver on one host said in one phase."""

    outputs: dict[str, Output]
    began: float | None
    ended: float | None
    interpreter: str
    reached_at: str


def command(
    scripts: Sequence[Script], given: Mapping[str, Any], python: str, patience: float = 1.0
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
            "limit": script.limit * patience,
            "safe": script.safe,
        }
        for script in scripts
    ]
    program = f"{_driver()}\nmain({tasks!r}, {dict(given)!r}, sys.argv[1])\n"
    packed = base64.b64encode(zlib.compress(program.encode())).decode()
    # The empty entry would let a json.py in the current folder shadow Python's own.
    unpack = (
        "import sys; sys.path[:] = [p for p in sys.path if p]; import base64, zlib; "
        f'exec(compile(zlib.decompress(base64.b64decode("{packed}")), "doctor", "exec"))'
    )
    pythons = dict.fromkeys((python, *_OTHERS))
    return ["/bin/sh", "-c", _FIRST_THAT_WORKS, "sh", unpack, *pythons]


@cache
def _driver() -> str:
    return Path(driver.__file__).read_text(encoding="utf-8")


def limit(scripts: Sequence[Script], patience: float = 1.0) -> float:
    """Seconds after which the command has ended on a host that works at all."""
    return (max((script.limit for script in scripts), default=0) + 15) * patience


def parse(stdout: str) -> Reply:
    """Take the driver's output apart; what is torn or foreign is passed over."""
    outputs: dict[str, Output] = {}
    first = _Line()
    ended = None
    for line in stdout.splitlines():
        mark, _, text = line.partition(driver.MARK)
        try:
            said = msgspec.json.decode(text, type=_Line)
        except msgspec.MsgspecError:
            continue
        if mark:
            continue
        if said.began is not None:
            first, ended, outputs = said, None, {}
        elif said.ended is not None:
            ended = said.ended
        elif said.name is not None:
            outputs[said.name] = Output(said.value, said.error, said.timed_out)
    return Reply(
        outputs=outputs,
        began=first.began,
        ended=ended,
        interpreter=first.interpreter,
        reached_at=first.reached_at,
    )
