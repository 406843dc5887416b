"""Start the agent of a node, once nothing is left of one that was here before."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from clusterkit.agent.ending import end_left_of
from clusterkit.agent.files import read_json
from clusterkit.agent.node import Node
from clusterkit.agent.processes import is_alive
from clusterkit.agent.protocol import AGENT
from clusterkit.agent.signals import adopt_orphans


def run_node(options: argparse.Namespace) -> int:
    """Run one node by the options of ``agent run``; return the agent's exit code."""
    folder = Path(os.environ["CLUSTERKIT_NODE_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    previous = read_json(folder / "started.json")  # of an agent that was here before
    if previous and is_alive(previous):
        print(f"this node already runs as process {previous['pid']}", file=sys.stderr)
        return 75
    before = any(folder.parents[1].glob(f"*/{folder.name}/started.json"))
    if before and (stuck := end_left_of(folder, options.grace)):
        print("; ".join(stuck), file=sys.stderr)
        return 75
    adopt_orphans()
    os.environ[AGENT] = os.urandom(8).hex()
    return Node(options, folder, returns=previous is not None).run()
