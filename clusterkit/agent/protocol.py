"""Names and texts that agents, generated scripts and readers of a node's files share."""

from __future__ import annotations

import signal
import struct
from collections.abc import Iterator
from typing import Any

Document = dict[str, Any]  # A JSON object: a message between nodes, or a file of a node

GROWING_FILES = ("log", "ranks.jsonl")
WHOLE_FILES = ("started.json", "agent.log", "usage.json", "exit.json")
"""The files of a node's folder that are sent to other machines; exit.json is sent last."""
LOCAL_RANK_WORD = "${clusterkit.local_rank}"
"""Text in the ranks' arguments that stands for the local rank."""
RANK_HEADER = b"@clusterkit-rank"
"""Begins a line in a pipe with the rank and process id of the writer of the lines after it."""
RANK_ENDED = b"@clusterkit-rank-ended"
"""Begins the last line of a rank that is no child of the agent: rank and exit code follow."""
REMARK = b"@clusterkit-remark "
"""Begins a line of the fork server's that `clusterkit status` shows as well."""
WORKER_SOCKET = "rank-{RANK}.sock"
"""The socket, in a node's folder, of torch's worker server (``_WorkerServer``) in a rank."""
DUMP_FILE = "nccl_trace_rank_"
"""Begins the names, in a node's folder, of the flight recordings
that NCCL's watchdog writes when it ends ranks."""
TRACE_FILE = "clusterkit-trace"
"""Name of the file in memory to which a rank's faulthandler writes on TRACE_SIGNAL."""
TRACE_SIGNAL = signal.SIGRTMAX - 7  # no program is known to use it, nor does the C library
HANG_NOTE, HANG_OVER = "hang: ", "the ranks go on"
"""Begin the lines of a node's log that report a hang, and its end."""
HANG = "hang: "
"""Begins the reason of a node whose launcher was ended because ranks hang."""
SLOW_NOTE, SLOW_OVER = "slow: ", "no rank is slower than the others any more"
"""The same for ranks that are slower than the others."""
LEFT_NOTE = "not ended: "
"""Begins the line that reports ranks that neither run nor end although others have ended."""
NODE_FILE = b"@clusterkit-file"
"""Begins a line with the name and contents of a node's file, printed by an agent whose output is
all that leaves the node. The lines after an ``exit.json`` belong to the next attempt."""
PEER_TOKEN = "CLUSTERKIT_PEER_TOKEN"
"""Environment variable with the secret that the nodes of a run authenticate with."""
COORDINATOR = "CLUSTERKIT_COORDINATOR"
"""Environment variable with the address and port at which node 0's agent listens; by it agents know
that the run has other nodes."""
AGENT = "CLUSTERKIT_AGENT"
"""Environment variable of ranks and launchers with a name of the agent that started them: another
agent of the same node may be starting already when a guard looks for what the first one left."""
STOPPED = "stopped on request"
"""The reason of a node whose agent was signalled to end."""
STOPPED_BY_PEERS = "stopped: "
"""Begins the reason of a node that ended because another one did."""
SPARE_NOT_NEEDED = f"{STOPPED_BY_PEERS}no node was lost whose place it could take"
"""The reason of a spare that ended with the run."""
OVER_TIME_LIMIT = "it was stopped at its time_limit"
"""The reason of a node that ended at the job's time limit."""
TIME_LIMIT_EXIT = 124
"""Exit code of such a node: that of timeout(1)."""
LAUNCHER_WAITED = "its ranks had ended; its launcher waited for those of the other nodes"
"""Why a launcher was stopped although the ranks of its node had finished."""
STARTING_AGAIN = "starting again"
"""Ends the line of a node's log that announces another start of its launcher."""
PREEMPTED_EXIT = 143
"""Exit code of an agent whose node was preempted; where nodes can come back, of no other."""
INSIDE_BEGIN = b"@clusterkit-inside\n"
"""What ``agent.pyz inside`` writes first: a login shell may have printed something before."""
INSIDE_WINDOW = 1 << 20
"""Bytes of input that may be under way to a command, or of its output from it."""
_HEAD = struct.Struct(">cI")  # of a frame: its kind, and the length of its data


def frame(kind: bytes, data: bytes = b"") -> bytes:
    """Return a frame of `inside`. A newline ends it, because Slurm passes on whole lines.

    Args:
        kind: to the node i (input), e (its end), s (a signal), w (size of the window), p (nothing:
            a ping); from it o (output), r (error output), a (bytes of input that were taken), x
            (exit code), ! (a refusal).
    """
    return _HEAD.pack(kind, len(data)) + data + b"\n"


def take_frames(received: bytearray) -> Iterator[tuple[bytes, bytes]]:
    """Yield kind and data of each frame that is whole, and remove it from what was received."""
    while len(received) >= _HEAD.size:
        kind, size = _HEAD.unpack_from(received)
        end = _HEAD.size + size
        if len(received) <= end:
            return
        data = bytes(received[_HEAD.size : end])
        del received[: end + 1]
        yield kind, data
