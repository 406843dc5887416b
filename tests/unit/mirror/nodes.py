"""Nodes' folders, and who reads them."""

import json
import os
import sys

from clusterkit import agent
from clusterkit.transport import LocalTransport

LOCAL = LocalTransport()


def begin(node_dir, pid=None):
    started = agent.identity(pid or os.getpid())
    (node_dir / "started.json").write_text(json.dumps(started))


def end(node_dir, code=0):
    """As the agent does it: the log is whole before exit.json is there, then it is gone."""
    (node_dir / "exit.json").write_text(json.dumps({"exit_code": code, "at": 1.0}))
    (node_dir / "started.json").write_text(
        json.dumps(agent.identity(os.getpid()) | {"start_ticks": 1})
    )


def opener(node_dir, *, follow):
    def open_stream(view):
        known = view.offsets()
        return LOCAL.open(
            view.host,
            [sys.executable, "-m", "clusterkit.agent", "report", str(node_dir), "--log",
             str(known["log"]), "--ranks", str(known["ranks.jsonl"]),
             *(["--follow"] if follow else [])],
        )  # fmt: skip

    return open_stream
