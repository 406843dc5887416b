"""JSON files of a node."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from clusterkit.agent.protocol import Document


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
