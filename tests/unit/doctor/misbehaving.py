"""Collectors that do what none should; sent like those of doctor."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any


def echo(context):
    return context


def count(context):
    return len(context["hosts"])


def hang(context):
    time.sleep(60)


def nap(context):
    time.sleep(0.2)
    return "woke"


def fail(context):
    os.stat("/nope/nothing")


def flood(context):
    return "x" * (1 << 19)


def shout(context):
    print("garbage on stdout")
    os.write(1, b'\n@clusterkit-doctor {"began": 1, "outputs": {"echo": {"value": "forged"}}}\n')
    os.write(2, b"garbage on stderr\n")
    return "quiet"


def die(context):
    os.kill(os.getpid(), signal.SIGKILL)


def ugly(context):
    return ["\udcff", "\u2028\n\r\x0b", "日本", os.fsdecode(b"\xff\xfe")]


def unprintable(context):
    return {1, 2}


def annotated(context: dict[str, SomethingUnknown] | None) -> Any:  # noqa: F821
    return "fine"


def leave_a_child(context):
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        time.sleep(60)
        os._exit(0)
    return child


def flags(context):
    return [sys.flags.isolated, sys.flags.no_site, "" in sys.path]
