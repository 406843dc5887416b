"""Read and write JSON files; raise the limit of open files."""

from __future__ import annotations

import contextlib
import json
import os
import resource
from pathlib import Path

from clusterkit.agent.protocol import Document

_USUAL_FILES = 256


def write_json(path: Path, document: Document, *, durable: bool = True) -> None:
    """Write a JSON file atomically; ``durable``: what it says survives a crash of the machine.

    Raises:
        OSError: there is no space, or no such folder; an older file is unchanged.
    """
    # In a folder that hosts share, process ids are not unique.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(8).hex()}")
    try:
        with temporary.open("x") as file:
            json.dump(document, file)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def read_text(path: str | Path) -> str:
    """Return a file's text; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return Path(path).read_text(errors="replace")
    return ""


def read_json(path: Path) -> Document | None:
    """Return the object in a file; None if the file is missing or incomplete."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def read_lines(path: Path) -> list[Document]:
    """Return the objects in the lines of a file; none if it is missing."""
    found = []
    with contextlib.suppress(OSError):
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return [each for each in found if isinstance(each, dict)]


def next_attempt(exit_json: bytes | None) -> int | None:
    """Return the attempt that a node's agent began after this ``exit.json``; None: it ended."""
    with contextlib.suppress(ValueError, AttributeError):
        number = json.loads(exit_json or b"").get("next")
        return number if isinstance(number, int) else None
    return None


def allow_open_files(number: int) -> None:
    """Raise this process's limit of open files by ``number`` beyond the usual ones, as far as it
    may. Processes that it starts inherit the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _USUAL_FILES + number
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
