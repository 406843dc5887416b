"""The manifests of ``k8s/``, written anew from ``jobs/``, or checked against them.

python -m tests.manifests              rewrite them
python -m tests.manifests --check      exit 1 and name the files that are stale
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from clusterkit import loader
from clusterkit.backends.kubernetes import by_hand

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "k8s"
JOBS = ("ddp", "elastic", "zero2")


def wanted() -> dict[Path, str]:
    """Every file with the text that it must have."""
    jobs = {name: loader.load_job(ROOT / "jobs" / f"{name}.yaml") for name in JOBS}
    return {FOLDER / name: text for name, text in by_hand.manifests(jobs).items()}


def stale() -> list[Path]:
    """Files that are not as they must be, and those that nothing generates."""
    files = wanted()
    there = {path for path in FOLDER.rglob("*") if path.is_file()}
    return sorted(
        path
        for path in there | set(files)
        if path not in files or not path.is_file() or path.read_text() != files[path]
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="manifests", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    if options.check:
        found = stale()
        for path in found:
            print(f"{path.relative_to(ROOT)} is stale: make manifests", file=sys.stderr)
        return 1 if found else 0
    for path, text in wanted().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
