"""The command that runs all collectors of one phase on a host, and the parsing of its output."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from clusterkit.doctor.hosts import collect
from clusterkit.doctor.hosts.base import Answer, Collector
from clusterkit.doctor.hosts.collect import runner
from clusterkit.errors import SubmitFailed
from clusterkit.hosts import host_probe
from clusterkit.hosts.python_text import OWN_MODULES_FIRST

# Tries one Python after the other: if the interpreter of the ranks does not work, another one can
# still check the rest of the host.
_TRY_EACH = """program=$(cat)
for python in "$@"; do printf %%s "$program" | "$python" %s - "$python" && exit 0; done
exit 127"""
_OTHERS = ("python3", "/usr/bin/python3")
_SHARED = (host_probe.__name__, collect.__name__, runner.__name__)
"""Modules that are always sent, before those that import them."""
_LOAD = """import types
for name, text in {modules}:
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
"""


def command(
    collectors: Sequence[Collector[Any]],
    context: Mapping[str, Any],
    python: str,
    time_factor: float = 1.0,
) -> tuple[list[str], bytes]:
    """Return the command that runs collectors on a host, and its standard input; it needs POSIX sh
    and some Python there.

    Args:
        collectors: their modules are sent.
        context: the argument of each, of JSON's types.
        python: the interpreter to try first.
        time_factor: multiplies the timeouts of the collectors.
    """
    tasks = [
        {
            "name": each.name,
            "module": each.collect.__module__,
            "timeout": each.timeout * time_factor,
        }
        for each in collectors
    ]
    names = dict.fromkeys((*_SHARED, *(each.collect.__module__ for each in collectors)))
    modules = [(package, "") for package in ("clusterkit", "clusterkit.hosts")]
    modules += [(name, _text(name)) for name in names]
    call = f"sys.modules[{runner.__name__!r}].main(sys.argv[1], {tasks!a}, {dict(context)!a})\n"
    # Its own site-packages are what the interpreter of the ranks is asked for; else they cost time.
    flags = "" if any(each.site_packages for each in collectors) else "-I -S"
    argv = ["/bin/sh", "-c", _TRY_EACH % flags, "sh", *dict.fromkeys((python, *_OTHERS))]
    return argv, (OWN_MODULES_FIRST + _LOAD.format(modules=ascii(modules)) + call).encode()


@cache
def _text(module: str) -> str:
    return Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8")


def timeout(collectors: Sequence[Collector[Any]], time_factor: float = 1.0) -> float:
    """Return seconds within which the command ends on any host that works at all."""
    return (max((each.timeout for each in collectors), default=0) + 15) * time_factor


def parse(stdout: str, host: str) -> Answer:
    """Parse the output of the runner; skip what is incomplete or not its own."""
    lines = [line for line in reversed(stdout.splitlines()) if line.startswith(runner.MARK)]
    for line in lines:
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.json.decode(line[len(runner.MARK) :], type=Answer)
    error = SubmitFailed(f"host {host}: its answer was truncated") if lines else None
    return Answer(error=error)
