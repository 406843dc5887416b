"""Whether the lab is as it was when its own tests last passed: `make test` then leaves them out.

`make lab-test` runs them and writes the digest of what they test beside this file, to be committed
with the change. It needs no git, so it counts in a fresh clone too.

    python -m tests.lab.tested      write the digest
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parent / "live" / "ssh" / "test_lab.py"
FILE = HERE / "tested.sha256"


def digest() -> str:
    """Of the lab's files and its tests, by name and content."""
    files = [TESTS, *(path for path in HERE.iterdir() if path.suffix in (".py", ".sh"))]
    whole = hashlib.sha256()
    for path in sorted(files):
        whole.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


def unchanged() -> bool:
    """Whether the written digest is that of now."""
    return FILE.exists() and FILE.read_text().strip() == digest()


def main() -> int:
    from tests.lab import machine

    if (problem := machine.problem()) is not None:
        print(f"error: {problem.message}\nhint: {problem.hint}", file=sys.stderr)
        return 3
    FILE.write_text(digest() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
