"""Whether fork servers outlive runs on this machine, and those that do."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from clusterkit.agent import warm as agents
from clusterkit.agent.files import read_json, write_json
from clusterkit.agent.processes import load
from clusterkit.run.folder import home


class WarmServer(Struct, frozen=True, kw_only=True):
    """A fork server that waits for runs."""

    pid: int
    program: str
    """What it has imported for."""
    python: str
    memory_mib: int
    started_at: float
    used_at: float


class Warm(Struct, frozen=True, kw_only=True):
    """Whether runs leave them behind, and which there are."""

    on: bool
    idle_seconds: float | None
    """How long one waits for another run, where that is on."""
    servers: tuple[WarmServer, ...]


def seconds() -> float:
    """How long one waits; 0: runs leave none."""
    return float((read_json(_setting()) or {}).get("idle", 0.0))


def turn_on(idle: float) -> None:
    """Have runs leave one from now on.

    Raises:
        OSError: that cannot be noted.
    """
    with agents.locked(_folder()):
        write_json(_setting(), {"idle": idle})


def turn_off() -> None:
    """Have runs leave none, and end those that are there; what they serve goes on."""
    if _folder().exists():
        with agents.locked(_folder()):
            _setting().unlink(missing_ok=True)
            agents.end(_folder())


def state() -> Warm:
    idle = seconds()
    found = tuple(
        WarmServer(
            pid=each["pid"], program=each["program"], python=each["python"],
            memory_mib=(load(each) or (0.0, 0))[1] >> 20,
            started_at=each["since"], used_at=each["used"],
        )
        for each in agents.servers(_folder())
    )  # fmt: skip
    return Warm(on=idle > 0, idle_seconds=idle or None, servers=found)


def _folder() -> Path:
    return home() / "warm"


def _setting() -> Path:
    return _folder() / "on"
