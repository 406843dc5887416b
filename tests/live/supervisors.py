"""The process that watches over a run here."""

from __future__ import annotations

import json
import os
import signal

from clusterkit import agent, api


def pid_of(run: api.Run) -> int:
    return int(json.loads((run.path / "supervisor.json").read_text())["pid"])


def kill(run: api.Run) -> None:
    """SIGKILL to the supervisor, by its recorded id; it is gone afterwards."""
    pid = pid_of(run)
    os.kill(pid, signal.SIGKILL)
    agent.wait_gone([pid], 60)
