"""Recorded /proc and /sys of GPU hosts: lines of PATH TEXT in tests/data/gpu/sysfs."""

from __future__ import annotations

import re
from pathlib import Path

RECORDED = Path(__file__).parent / "data" / "gpu" / "sysfs"


def lay_out(root: Path, host: str, *changes: tuple[str, str]) -> str:
    """Write a host's files below a folder, and return the folder as scripts take it.

    Args:
        changes: a pattern of whole lines and what replaces them; empty: the lines are not there.
    """
    text = (RECORDED / f"{host}.txt").read_text()
    for pattern, replacement in changes:
        text, count = re.subn(f"^{pattern}\n", replacement and f"{replacement}\n", text, flags=re.M)
        assert count, pattern
    for line in text.splitlines():
        name, _, words = line.partition(" ")
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"{words}\n")
    return f"{root}/"
