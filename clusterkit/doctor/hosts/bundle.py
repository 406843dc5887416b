"""The command that runs all scripts of one phase on a host, and the parsing of its output."""

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
from clusterkit.hosts.host_probe import (
    PORTS,
    ROOT,
    addresses,
    bind_error,
    free_port,
    gpus_on_pci,
    versions,
)

# Tries one Python after the other: if the interpreter of the ranks does not work, another one can
# still check the rest of the host.
_TRY_EACH = """program=$1; shift
for python in "$@"; do "$python" %s -c "$program" "$python" && exit 0; done
exit 127"""
_OTHERS = ("python3", "/usr/bin/python3")


class _Line(Output, frozen=True):
    """One line of the runner: its start, the result of a script, or its end."""

    name: str | None = None
    began: float | None = None
    ended: float | None = None
    interpreter: str = ""
    reached_at: str = ""
    installer: str = ""


def command(
    scripts: Sequence[Script[Any]], given: Mapping[str, Any], python: str, time_factor: float = 1.0
) -> list[str]:
    """Return the command that runs scripts on a host; it needs POSIX sh and some Python there.

    Args:
        scripts: their texts are sent.
        given: the argument of each, of JSON's types.
        python: the interpreter to try first.
        time_factor: multiplies the timeouts of the scripts.
    """
    tasks = [
        {
            "name": script.name,
            "function": script.collect.__name__,
            "source": script.source,
            "timeout": script.timeout * time_factor,
            "in_process": script.in_process,
        }
        for script in scripts
    ]
    program = f"{runner_text()}\nmain({tasks!r}, {dict(given)!r}, sys.argv[1])\n"
    packed = base64.b64encode(zlib.compress(program.encode())).decode()
    # With the empty entry a json.py in the current folder would shadow Python's own.
    unpack = (
        "import sys; sys.path[:] = [p for p in sys.path if p]; import base64, zlib; "
        f'exec(compile(zlib.decompress(base64.b64decode("{packed}")), "doctor", "exec"))'
    )
    pythons = dict.fromkeys((python, *_OTHERS))
    # Only the first phase looks at installed packages; site-packages cost start-up time.
    flags = "-S" if all(script.phase > 1 for script in scripts) else ""
    return ["/bin/sh", "-c", _TRY_EACH % flags, "sh", unpack, *pythons]


@cache
def runner_text() -> str:
    """Return the text of the runner, with the functions of `host_probe` that scripts use."""
    text = (
        Path(runner.__file__).read_text(encoding="utf-8") + f"\nPORTS, ROOT = {PORTS}, {ROOT!r}\n"
    )
    functions = (versions, bind_error, free_port, addresses, gpus_on_pci)
    text += "\n".join(inspect.getsource(each) for each in functions)
    names = ", ".join(["ROOT=ROOT", *(f"{each.__name__}={each.__name__}" for each in functions)])
    return f"{text}\nHELPERS.update({names})\n"


def timeout(scripts: Sequence[Script[Any]], time_factor: float = 1.0) -> float:
    """Return seconds within which the command ends on any host that works at all."""
    return (max((script.timeout for script in scripts), default=0) + 15) * time_factor


def parse(stdout: str) -> Answer:
    """Parse the output of the runner; skip what is incomplete or not its own."""
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
        if line.began is not None:  # a previous interpreter may have stopped after this line
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
        installer=first.installer,
    )
