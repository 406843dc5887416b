"""Rank RANK of the first ATTEMPTS attempts fails: by an exception, an exit code, a signal.

With "wait" all ranks of those wait for one from outside.
"""

import os
import signal
import sys
import time

how, rank, attempts = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if how == "wait" and int(os.environ["CLUSTERKIT_ATTEMPT"]) <= attempts:
    print("ready", flush=True)
    time.sleep(600)
if int(os.environ["RANK"]) == rank and int(os.environ["CLUSTERKIT_ATTEMPT"]) <= attempts:
    if how == "exception":
        raise ValueError("boom é")
    if how == "exit":
        print("about to leave", flush=True)
        sys.exit(7)
    os.kill(os.getpid(), signal.SIGKILL)
print("fine", flush=True)
