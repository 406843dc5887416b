"""What runs on a host for its checks: these modules are sent as they are, and only read there.

They need nothing but the standard library of Python 3.8, each other and
`clusterkit.hosts.host_probe`. A collector is a function whose argument is the dict of
`clusterkit.doctor.hosts.examine`; it returns values of JSON's types, which the checks judge on the
submitter's side.
"""

from __future__ import annotations

import os
import pwd
import subprocess
from typing import Any


def text_of(path: str) -> str:
    """Return a file's text; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def user_of(uid: int) -> str:
    """Return a user's name, or the number of one without a name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def run(*argv: str, seconds: float = 20) -> dict[str, Any] | None:
    """Run a command; return its ``exit_code``, ``stdout``, ``stderr``, or None if there is no such
    command."""
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds,
            env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        text = f"{argv[0]} did not end within {seconds:g} s"
        return {"exit_code": -1, "stdout": "", "stderr": text}
    except OSError:
        return None
    texts = [text.decode("utf-8", "replace") for text in (done.stdout, done.stderr)]
    return {"exit_code": done.returncode, "stdout": texts[0], "stderr": texts[1][:4096]}
