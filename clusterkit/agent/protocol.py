"""What agents, scripts of a plan and the readers of a node's files agree on."""

from __future__ import annotations

import signal
from typing import Any

Document = dict[str, Any]  # A JSON object: a message between nodes, or a file of a node

GROWING_FILES = ("log", "ranks.jsonl")
WHOLE_FILES = ("started.json", "agent.log", "usage.json", "exit.json")
"""Of a node's folder, what readers on other machines get; the last one last."""
RANK_HEADER = b"@clusterkit-rank"
"""Begins a pipe's line that names the rank and process id of whoever writes from there on."""
RANK_ENDED = b"@clusterkit-rank-ended"
"""Begins a rank's last line where the agent is not its parent: rank and exit code follow."""
WORKER_SOCKET = "rank-{RANK}.sock"
"""In a node's folder: where torch in a rank answers how that stands (torch's ``_WorkerServer``)."""
TRACE_FILE = "clusterkit-trace"
"""Name of the file in memory where a rank's faulthandler writes on TRACE_SIGNAL."""
TRACE_SIGNAL = signal.SIGRTMAX - 7  # of which no program, nor the C library, is known to make use
STILL, GOES_ON = "stands still: ", "the ranks go on"
"""Begin the lines of a node's log by which it says that nothing moves, and that it does again."""
SLOW, EVEN = "slow: ", "no rank is slower than the others any more"
"""The same for ranks that the others wait for again and again."""
NODE_FILE = b"@clusterkit-file"
"""Begins a line that an agent prints where its output is all that leaves the node: the name of a
file of the node and what it holds. After an ``exit.json`` come the lines of the next attempt."""
PEER_TOKEN = "CLUSTERKIT_PEER_TOKEN"
"""Environment variable with the secret by which the nodes of a run know each other."""
STOPPED = "stopped on request"  # why a node ended that was asked to by a signal
STOPPED_BY_PEERS = "stopped: "  # how the reason begins of a node that ended because another did
SPARE = f"{STOPPED_BY_PEERS}no node was lost whose place it could take"
"""Why a node ended that was there for that."""
LATE = "it was stopped at its time_limit"  # why a node ended that was over it
LATE_EXIT = 124
"""Exit code of such a node: that of timeout(1)."""
LAUNCHER_WAITED = "its ranks had ended; its launcher waited for those of the other nodes"
"""Why a node's launcher was stopped whose ranks have done their work."""
AGAIN = "starting again"
"""Ends the line by which a node's log says that its launcher is started once more."""
LEFT = 143
"""Exit code of an agent whose node was taken away, and of no other whose node can come back."""
