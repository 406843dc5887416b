"""The node agent: starts one node's launcher, keeps its log, ends all of it.

Standard library only. It is sent to the nodes as one file, ``agent.pyz`` (`archive`), and run there
by the job's own Python, so that a node needs nothing installed. `__main__` has its command line.

``run`` keeps, in the folder that CLUSTERKIT_NODE_DIR names
(``RUN_DIR/attempts/ATTEMPT/node-RANK``):

    started.json   process id, start time in clock ticks, boot id: who may be ended later
    ranks.jsonl    rank and process id of every rank, as they start
    usage.json     what its ranks use now: CPUs, memory, GPU
    log            one line per line of output: ``TIME RANK TEXT``; RANK is ``-`` for the launcher
    exit.json      exit code, time, and why, once everything has ended

This module exports what the rest of clusterkit uses of it.
"""

from clusterkit.agent.clock import PauseAwareClock
from clusterkit.agent.files import next_attempt, write_json
from clusterkit.agent.processes import (
    boot_id,
    descendants,
    identity,
    is_alive,
    processes_of,
    send,
    start_ticks,
    wait_gone,
)
from clusterkit.agent.protocol import (
    COORDINATOR,
    HANG_NOTE,
    HANG_OVER,
    LEFT_NOTE,
    LOCAL_RANK_WORD,
    NODE_FILE,
    OVER_TIME_LIMIT,
    PEER_TOKEN,
    PREEMPTED_EXIT,
    RANK_ENDED,
    RANK_HEADER,
    SLOW_NOTE,
    SLOW_OVER,
    STARTING_AGAIN,
    STOPPED,
    STOPPED_BY_PEERS,
    TIME_LIMIT_EXIT,
)

__all__ = [
    "COORDINATOR", "HANG_NOTE", "HANG_OVER", "LEFT_NOTE", "LOCAL_RANK_WORD", "NODE_FILE",
    "OVER_TIME_LIMIT", "PEER_TOKEN", "PREEMPTED_EXIT", "RANK_ENDED", "RANK_HEADER", "SLOW_NOTE",
    "SLOW_OVER", "STARTING_AGAIN", "STOPPED", "STOPPED_BY_PEERS", "TIME_LIMIT_EXIT",
    "PauseAwareClock", "boot_id", "descendants", "identity", "is_alive", "next_attempt",
    "processes_of", "send", "start_ticks", "wait_gone", "write_json",
]  # fmt: skip
