"""What is as it was when its own tests last passed: `make test` then leaves these tests out.

`make lab-test` and `make ansible-test` run them and write a digest of what they test into
tests/tested.json, to be committed with the change. It needs no git, so it counts in a fresh clone.

    python -m tests.tested lab|ansible      write the digest
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "tested.json"
PARTS = {
    "lab": ("tests/lab", "tests/live/ssh/test_lab.py"),
    "ansible": ("ansible", "tests/lab", "tests/live/ssh/test_ansible.py"),
}
"""The files and folders that the tests of each are about, with these tests."""


def digest(part: str) -> str:
    """Of the files of a part, by path and content."""
    whole = hashlib.sha256()
    for place in PARTS[part]:
        for path in sorted([ROOT / place, *(ROOT / place).rglob("*")]):
            if path.is_file() and path.suffix != ".pyc":
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                whole.update(f"{path.relative_to(ROOT)} {content}\n".encode())
    return whole.hexdigest()


def unchanged(part: str) -> bool:
    """Whether the digest that was written is that of now."""
    return bool(json.loads(FILE.read_text()).get(part) == digest(part))


def when_changed(part: str) -> pytest.MarkDecorator:
    """Marks tests of a part: thorough as long as it is unchanged."""
    return pytest.mark.thorough if unchanged(part) else pytest.mark.live


def main(part: str) -> int:
    from tests.lab import machine

    if (problem := machine.problem()) is not None:
        print(f"error: {problem.message}\nhint: {problem.hint}", file=sys.stderr)
        return 3
    written = json.loads(FILE.read_text()) | {part: digest(part)}
    FILE.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
