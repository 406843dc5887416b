"""Program text for the interpreter of a job, which may run in any folder and environment."""

from clusterkit.agent.forkserver_process import OWN_MODULES_FIRST

__all__ = ["OWN_MODULES_FIRST", "program"]


def program(source: bytes) -> bytes:
    """Return the source of a module as a program that imports Python's own modules alone, where
    others of their names are in its way."""
    run = f"exec(compile({source.decode()!r}, '<clusterkit>', 'exec'))\n"
    return (OWN_MODULES_FIRST + run).encode()
