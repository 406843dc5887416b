"""Times in seconds, and sizes. Used as ``limits.NAME``, so that a test can change them."""

# Ranks and launchers
RANKS_GRACE = 0.5  # for other ranks to fail by themselves once one has failed
LAUNCHER_GRACE = 1.0  # for a launcher without ranks: torchrun's exit barrier ignores signals
LEFTOVER_GRACE = 3.0  # for processes that outlive their launcher
ECHO_SECONDS = 10.0  # for a rank to fail that others have failed of: it may clean up first
KILL_SECONDS = 30.0  # for SIGKILL to end a process; one that waits for a device does not end
ENDING_SECONDS = 0.25  # between looks at processes that are to end
LOOK_SECONDS = 2.0  # between checks for stopped ranks (SIGSTOP)
RECENT_SECONDS = 60.0  # for which a pause of the agent itself may be why the run ends
# Before a thread that failed starts again; shorter than PEER_GONE_SECONDS.
WORKER_PAUSE, WORKER_LONGEST_PAUSE = 0.5, 4.0
WORKER_REPORTS = 3  # failures of a thread that the run shows

# A node's log and files
LONGEST_LINE = 1 << 16
RESERVE_BYTES = 8192  # kept free for exit.json, for when logs have filled the disk
RANK_ENDS = 8  # ranks that failed, and that did not, whose own reports of their end are kept
LAST_WORDS_BYTES = 4096  # of a termination message: Kubernetes accepts no longer one

# `report`
REPORT_SECONDS = 0.1  # between checks for new data
HEARTBEAT_SECONDS = 2.0  # between two frames without new data
REPORT_BYTES = 1 << 18  # of a file in one frame

# What ranks use (`usage`)
USAGE_SECONDS = 5.0  # between measurements
USAGE_NODES = 50  # whose usage the supervisor receives in one second, in a run of any size

# Connections and rounds (`connections`, `peer`, `membership`)
PEER_SECONDS = 2.0  # between heartbeats; to connect; to send the last messages
PEER_GONE_SECONDS = 5.0  # for a node to reconnect
PEER_MEET_SECONDS = 120.0  # for node 0 to become reachable
TURN_SECONDS = 0.05  # at least, between two decisions of node 0 about what is due
PEER_AGAIN_SECONDS = 0.5  # between attempts to reach node 0
JOIN_SECONDS = 10.0  # of a round at least, before it ends for a node that joins
END_SECONDS = 600.0  # for all launchers to end between two rounds
SOON_SECONDS = 30.0  # a restart after a round that failed earlier is delayed
START_SECONDS = 120.0  # a round that failed earlier, without a step, has failed at its start
FREE_RESTARTS, FREE_SECONDS = 10, 600.0  # after so many losses in a row within that: failures
LONGEST_PAUSE = 30.0  # of these delays; the first restart has none, the second one of 1 s
FIRST_SECONDS = 1.0  # for node 0 to direct a lost node's successor, before that starts by itself
GAP_SECONDS = 5.0  # longer than a step of any loop that uses a `clock.PauseAwareClock`
HELLO_SECONDS = 5.0  # for a new connection to identify its node
UNIDENTIFIED = 64  # connections that may be open and have not identified their node
LINE_BYTES = 1 << 15  # the longest line between nodes; a longer one ends the connection
UNSENT_BYTES = 1 << 16  # buffered for a node that does not read, before it is disconnected

# Ranks that hang (`hangs`, `rank_state`)
STILL_LOOK_SECONDS = 1.0  # between checks of which ranks have moved
STILL_SECONDS, STILL_STEPS = 5.0, 5  # a standstill is reported after the longer of these
STILL_FIRST_SECONDS = 30.0  # the same before the first step, in a checkpoint, in an evaluation
STILL_AGAIN_SECONDS = 2.0  # between queries of ranks that do not move; for them to answer
STILL_ALONE_SECONDS = 30.0  # between these queries where no rank waits for another one, at most
HANG_RECENT = 15.0  # after a hang was withdrawn, a rank that timed out may have failed of it
TIMEOUT_GRACE = 30.0  # after a process group's timeout, for torch to end its ranks by itself
LONGEST_PACE = 60.0  # of a step, assumed where no program reports it
ANSWER_SECONDS = 1.0  # for a rank to report where it is
DUMP_SECONDS = 60.0  # from the first to the last rank that writes its flight recording
RANKS_A_LINE = 6  # ranks' records in one message between nodes
REASON_LENGTH = 4096  # of a hang's reason that is sent: JSON takes up to 6 bytes a character

# Ranks that neither run nor end although others have ended (`left`)
LEFT_SECONDS = 60.0  # for which that is so before it is reported
BUSY_CPUS = 0.05  # that a process uses at least whose main thread waits for its other threads

# Ranks that are slower than the others (`stragglers`)
ARRIVALS_SECONDS = 15.0  # between queries of when ranks entered collectives
ARRIVALS_LEAST, ARRIVALS_MOST = 8, 64  # collectives in an answer
DRIFT = 2e-4  # between two clocks, as a share of the time
LATE_SECONDS = 0.001  # by which a rank may be later than the others
SLOW_REPORTS = 3  # consecutive judgements with the same slow rank, before it is reported
SLOW_SHARE = (
    0.2  # of the time that the others wait for a rank: it is slow; from half of it: unclear
)

# Commands beside the ranks (`inside`, `stack`)
INSIDE_SILENCE = 120.0  # of whoever asked for a command, before it counts as gone
INSIDE_GRACE = 5.0  # from SIGTERM to SIGKILL of what it leaves
STACK_THREADS = 32  # ranks that are asked at a time
