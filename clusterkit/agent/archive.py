"""Build the agent as one file, which any Python runs: ``python -I agent.pyz``."""

from __future__ import annotations

import functools
import io

ARCHIVE = "agent.pyz"
_NOT_SENT = {"archive.py", "__init__.py"}
_MAIN = b"""import sys
from clusterkit.agent.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@functools.cache
def build() -> bytes:
    """Build the archive: the same bytes from the same sources, on every machine."""
    import zipfile  # slow: not at the start of every command
    from importlib import resources

    files = {
        "__main__.py": _MAIN,
        "clusterkit/__init__.py": b"",
        "clusterkit/agent/__init__.py": b"",
    }
    for source in resources.files("clusterkit.agent").iterdir():
        if source.name.endswith(".py") and source.name not in _NOT_SENT:
            files[f"clusterkit/agent/{source.name}"] = source.read_bytes()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as writer:
        for name, content in sorted(files.items()):
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.create_system = 3  # as on Unix
            entry.external_attr = 0o644 << 16
            writer.writestr(entry, content)
    return archive.getvalue()


def as_text() -> bytes:
    """Return the archive as a program for ``python -I -``, which reads it from standard input."""
    return (
        "import os, sys\n"
        "handle = os.memfd_create('agent.pyz')\n"
        f"os.write(handle, {build()!r})\n"
        "sys.path.insert(0, f'/proc/self/fd/{handle}')\n"
        "from clusterkit.agent.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    ).encode()
