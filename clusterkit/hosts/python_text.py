"""Program text for the interpreter of a job, which may run in any folder and environment."""

# The folder that it runs in, and those of PYTHONPATH, may have a json.py that is not Python's.
OWN_MODULES_FIRST = """import os, sys
sys.path[:] = sorted(
    filter(None, sys.path),
    key=lambda folder: not folder.startswith(os.path.dirname(os.__file__)) or "-packages" in folder,
)
"""


def program(source: bytes | str) -> bytes:
    """Return the source of a module as a program that imports Python's own modules alone, where
    others of their names are in its way."""
    text = source if isinstance(source, str) else source.decode()
    return f"{OWN_MODULES_FIRST}exec(compile({text!r}, '<clusterkit>', 'exec'))\n".encode()
