"""The Pythons that are there, for the tests on others than that of .venv.

    python3 -m tests.pythons newest|others

prints the newest, or all others, one a line, as `3.13 /usr/bin/python3.13`; nothing where there is
none. Standard library only: the Makefile asks the Python that makes .venv.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

CLAIMED = ("3.14", "3.13", "3.12", "3.11")
"""As CONTRIBUTING.md and pyproject.toml say."""
_ASK = "import ensurepip, ssl, sys, venv; print('%d.%d' % sys.version_info[:2])"


def main(which: str) -> int:
    own = "{}.{}".format(*sys.version_info[:2])
    found = {version: path for version in CLAIMED if (path := find(version))}
    newest = max([own, *found])
    for version, path in found.items():
        if version != own and which in ("others", "newest" if version == newest else ""):
            print(version, path)
    return 0


def find(version: str) -> str | None:
    """Return the Python of this version that can make environments: of PATH, or of pyenv."""
    return next((path for path in _candidates(version) if _version(path) == version), None)


def _candidates(version: str) -> Iterator[str]:
    for folder in os.get_exec_path():
        yield os.path.join(folder, f"python{version}")
        yield os.path.join(folder, "python3")
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for path in sorted(pyenv.glob(f"versions/{version}.*/bin/python3"), reverse=True):
        yield str(path)


@functools.cache
def _version(path: str) -> str | None:
    """Return its version; None if it is none, cannot make environments, or does not start (a shim
    of pyenv for a version that is not the chosen one)."""
    if not os.access(path, os.X_OK):
        return None
    done = subprocess.run([path, "-c", _ASK], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
