"""Find a node's agent and ranks in the run's folder, and what a command beside them needs."""

from __future__ import annotations

import contextlib
import os
import pwd
from pathlib import Path

from clusterkit.agent.files import read_json, read_lines
from clusterkit.agent.processes import is_alive
from clusterkit.agent.protocol import AGENT, PEER_TOKEN, Document


class Refused(Exception):
    """What was asked for is not here; the message says why."""


def node_folder(run_dir: str, node: int) -> Path:
    """Return the folder of a node in its newest attempt.

    Raises:
        Refused: it has never started.
    """
    found = [each.parent for each in Path(run_dir).glob(f"attempts/*/node-{node}/started.json")]
    if not found:
        raise Refused("it has not started yet")
    return max(found, key=lambda folder: int(folder.parent.name))


def agent_of(folder: Path) -> Document:
    """Return the ``started.json`` of a node whose agent runs.

    Raises:
        Refused: it does not.
    """
    started = read_json(folder / "started.json") or {}
    if not is_alive(started):
        raise Refused("it has ended: its agent no longer runs")
    return started


def newest_ranks(folder: Path) -> dict[int, Document]:
    """Return the newest line of ``ranks.jsonl`` of each rank."""
    return {int(each["rank"]): each for each in read_lines(folder / "ranks.jsonl")}


def environment(folder: Path, rank: int | None) -> dict[str, str]:
    """Return the variables of a rank of this node, or without one those of its agent.

    They are read from /proc, as they were given to the process: that works with every launcher
    and in every container, since the reader is in the same one and the same user; and a file with
    them would hold the job's secrets.
    """
    process = agent_of(folder)
    if rank is not None:
        process = newest_ranks(folder).get(rank, {})
        if not process:
            raise Refused(f"rank {rank} has not started here")
        if not is_alive(process):
            raise Refused(f"rank {rank} has ended, or runs on a host without an agent (mpirun)")
    try:
        block = Path(f"/proc/{process['pid']}/environ").read_bytes()
    except OSError as error:
        raise Refused(f"cannot read the environment of process {process['pid']}: {error}") from None
    pairs = (os.fsdecode(each).partition("=") for each in block.split(b"\0") if b"=" in each)
    env = {name: value for name, _, value in pairs}
    if rank is not None and env.get("RANK") != str(rank):
        # A kernel that does not let a fork of the fork server show its own (`rank.set_title`).
        env |= {"RANK": str(rank), "LOCAL_RANK": str(sorted(newest_ranks(folder)).index(rank))}
    for name in (PEER_TOKEN, AGENT):
        env.pop(name, None)
    return env


def shell() -> str:
    """Return the user's shell. Not as a login shell: /etc/profile would set another PATH."""
    shells = ["/bin/bash", "/bin/sh"]
    with contextlib.suppress(KeyError):  # a user id without a name, as in many containers
        shells.insert(0, pwd.getpwuid(os.getuid()).pw_shell)
    for path in shells:
        if os.access(path, os.X_OK) and not path.endswith(("/nologin", "/false")):
            return path
    raise Refused("there is no shell here (/bin/bash, /bin/sh): the image has none")
