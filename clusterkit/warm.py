"""The setting that fork servers outlive runs on this machine, and the servers that do."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from clusterkit.agent import warm as warm_servers
from clusterkit.agent.files import read_json, write_json
from clusterkit.agent.processes import load
from clusterkit.run.folder import home


class WarmServer(Struct, frozen=True, kw_only=True):
    """A fork server that waits for runs."""

    pid: int
    program: str
    """The program that it has imported for."""
    python: str
    memory_mib: int
    started_at: float
    used_at: float


class Warm(Struct, frozen=True, kw_only=True):
    """Whether runs leave fork servers behind, and which servers wait."""

    on: bool
    idle_seconds: float | None
    """How long a server waits for another run; None: runs leave none."""
    servers: tuple[WarmServer, ...]


def seconds() -> float:
    """Return how long a server waits for another run; 0: runs leave none."""
    return float((read_json(_setting_file()) or {}).get("idle", 0.0))


def turn_on(idle: float) -> None:
    """Have runs leave a fork server from now on, for ``idle`` seconds.

    Raises:
        OSError: the setting cannot be written.
    """
    with warm_servers.locked(_folder()):
        write_json(_setting_file(), {"idle": idle})


def turn_off() -> None:
    """Have runs leave no fork server, and end the waiting ones; runs that they serve continue."""
    if _folder().exists():
        with warm_servers.locked(_folder()):
            _setting_file().unlink(missing_ok=True)
            warm_servers.end(_folder())


def state() -> Warm:
    idle = seconds()
    found = tuple(
        WarmServer(
            pid=each["pid"], program=each["program"], python=each["python"],
            memory_mib=(load(each) or (0.0, 0))[1] >> 20,
            started_at=each["since"], used_at=each["used"],
        )
        for each in warm_servers.servers(_folder())
    )  # fmt: skip
    return Warm(on=idle > 0, idle_seconds=idle or None, servers=found)


def _folder() -> Path:
    return home() / "warm"


def _setting_file() -> Path:
    return _folder() / "on"
