"""Times in seconds, and sizes. Used as ``limits.NAME``, so that a test can change them."""

# Ranks and launchers
RANKS_GRACE = 0.5  # that other ranks have to fail by themselves once one has failed
LAUNCHER_GRACE = 1.0  # for a launcher without ranks: torchrun's exit barrier hears no signal
LEFTOVER_GRACE = 3.0  # for processes that outlive their launcher
LOOK_SECONDS = 2.0  # between two looks whether ranks were stopped (SIGSTOP)
RECENT_SECONDS = 60.0  # for which a stop of the agent itself may be why the run ends

# A node's log and files
LONGEST_LINE = 1 << 16
RESERVE_BYTES = 8192  # kept free for exit.json: a disk full of logs must not hide how it ended
RANK_ENDS = 8  # how many ranks' own words of their end are kept; the first one matters
LAST_WORDS_BYTES = 4096  # what Kubernetes takes of a container's last words

# `report`
REPORT_SECONDS = 0.1  # between two looks for news
HEARTBEAT_SECONDS = 2.0  # between two frames although there is no news
REPORT_BYTES = 1 << 18  # of a file in one frame

# What ranks use (`usage`)
USAGE_SECONDS = 5.0  # between two looks
USAGE_NODES = 50  # that tell the supervisor of it in one second, however many there are

# Nodes that watch each other
PEER_SECONDS = 2.0  # between two signs of life; for a connection; for last words
PEER_GONE_SECONDS = 5.0  # that a node whose connection was closed has to connect again
PEER_MEET_SECONDS = 120.0  # that node 0 may take to be there
TURN_SECONDS = 0.05  # at least, between two decisions of node 0 about what is due
PEER_AGAIN_SECONDS = 0.5  # before a node 0 that is not there is sought again
JOIN_SECONDS = 10.0  # that a round lasts at least, before it ends for a node that joins
END_SECONDS = 600.0  # that launchers may take to end, all told, between two rounds
SOON_SECONDS = 30.0  # whatever fails earlier after its start is started again after a pause
LONGEST_PAUSE = 30.0  # of these pauses; the first restart has none, the second one of 1 s
FIRST_SECONDS = 1.0  # that a lost node's successor waits for node 0's word before it starts
GAP_SECONDS = 5.0  # longer than a step of any loop that uses a `clock.Awake`
HELLO_SECONDS = 5.0  # that a connection has to say which node it is
UNIDENTIFIED = 64  # connections that may be open and have not said it yet
LINE_BYTES = 4096  # the longest line between nodes
UNSENT_BYTES = 1 << 16  # that may wait for a node that does not read, before it is closed

# Ranks that stand still (`hangs`, `rank_state`)
STILL_LOOK_SECONDS = 1.0  # between two looks at which ranks have moved
STILL_SECONDS, STILL_STEPS = 5.0, 5  # after the longer of these a standstill is told of
STILL_FIRST_SECONDS = 30.0  # the same before the first step, in a checkpoint, in an evaluation
STILL_AGAIN_SECONDS = 2.0  # between two looks at ranks that stand still; for them to answer
STILL_ALONE_SECONDS = 30.0  # the same where no rank waits for another one
HANG_SECONDS, HANG_STEPS = 120.0, 20  # after the longer of these a hang ends the round
HANG_FACTOR = 10  # times as long before the first step, and where a rank does other work
LONGEST_PACE = 60.0  # that a step is taken to last where no program says how long one does
ANSWER_SECONDS = 1.0  # that a rank has to say where it is
RANKS_A_LINE = 6  # ranks' records in one message between nodes

# Ranks that are slower than the others (`stragglers`)
ARRIVALS_SECONDS = 15.0  # between two reports of when ranks came to collectives
ARRIVALS_LEAST, ARRIVALS_MOST = 8, 64  # collectives of a report
DRIFT = 2e-4  # of the time, that two clocks may differ by
LATE_SECONDS = 0.001  # that a rank may come after the others
SLOW_REPORTS = 3  # in a row that say the same of a rank, before people are told
SLOW_SHARE = 0.2  # of the time that the others wait for a rank: it is slow. Half of it: who knows
