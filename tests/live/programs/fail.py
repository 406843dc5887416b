"""Rank RANK of the first ATTEMPTS attempts fails: by an exception, an exit code, a signal.

With "wait" all ranks of those wait for one from outside.
"""

import os
import signal
import sys
import time

how, rank, attempts = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
mine = int(os.environ["RANK"]) == rank and int(os.environ["CLUSTERKIT_ATTEMPT"]) <= attempts
if not mine and how == "peers":
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
if mine and how == "peers":
    import torch.distributed as dist

    dist.init_process_group("gloo")
    raise ValueError("boom é")
if mine and how == "exception":
    raise ValueError("boom é")
if mine and how == "exit":
    print("about to leave", flush=True)
    sys.exit(7)
if mine and how == "signal":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "wait" and int(os.environ["CLUSTERKIT_ATTEMPT"]) <= attempts:
    print("ready", flush=True)
    time.sleep(600)
print("fine", flush=True)
