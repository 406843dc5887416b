"""JSON files of a node; how many files a process may have open."""

from __future__ import annotations

import contextlib
import json
import os
import resource
from pathlib import Path

from clusterkit.agent.protocol import Document

_USUAL_FILES = 256


def write_json(path: Path, document: Document) -> None:
    """Write it whole or not at all.

    Raises:
        OSError: there is no space, or no such folder; what was there before is there still.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w") as file:
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def read_json(path: Path) -> Document | None:
    """The object in a file; None if it is not there, or not whole."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def goes_on(exit_json: bytes | None) -> int | None:
    """The attempt that the agent which wrote this ``exit.json`` has begun after that one."""
    with contextlib.suppress(ValueError, AttributeError):
        number = json.loads(exit_json or b"").get("next")
        return number if isinstance(number, int) else None
    return None


def allow_open_files(number: int) -> None:
    """Let this process have so many files open besides the usual ones, if it may. What it starts
    from now on inherits that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _USUAL_FILES + number
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
