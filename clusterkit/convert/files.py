"""Files of a conversion: read those that the input names, add an entry to a cluster file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clusterkit.errors import BadInput
from clusterkit.files import read_file, reason, write_atomic
from clusterkit.jobfile import yaml_text
from clusterkit.jobfile.yaml_file import read_yaml

_MOST_BYTES = 8 << 20
"""No script or manifest is larger; YAML of this size takes seconds to parse."""


def text_of(path: str | Path) -> str:
    """Read a text file.

    Raises:
        BadInput: it cannot be read, or is no text.
    """
    try:
        return read_file(path, _MOST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not a text file (byte {error.start} is not UTF-8)") from None
    except OSError as error:
        raise BadInput(f"{path}: {reason(error)}") from None


def named(path: str) -> str | None:
    """Read a text file; None if it cannot be read."""
    try:
        return text_of(Path(path).expanduser())
    except BadInput:
        return None


def add_cluster(entry: Mapping[str, Any], path: str | Path) -> None:
    """Add entries to a cluster file; create the file if it does not exist.

    Raises:
        BadInput: the file has another entry of that name, or is written in flow style.
    """
    path = Path(path)
    before = text_of(path) if path.exists() else ""
    if before.strip():
        document = read_yaml(path, depth=1)
        if not isinstance(document.data, dict):
            raise BadInput(f"{path}: a cluster file is a mapping of names to entries")
        entry = {key: value for key, value in entry.items() if document.data.get(key) != value}
        for name in entry:
            if name in document.data:
                where = document.where((name,))
                raise BadInput(
                    f"{where}: cluster {name} is there already",
                    hint="rename it, then convert again",
                )
        if before.lstrip().startswith("{"):
            raise BadInput(f"{path}: written in one line with braces, which cannot be added to")
        before = before.rstrip("\n") + "\n\n"
    if entry:
        write_atomic(path, (before + yaml_text.documents([entry])).encode(), output=True)
