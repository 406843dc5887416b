"""A rank that says ten times a second that it lives, until told. It names no framework, so that
none is preloaded for it: for tests that need ranks and no process group."""

import os
import sys
import time

print("ready", os.getpid(), flush=True)
for beat in range(int(sys.argv[1])):
    if os.environ["RANK"] == "0":
        print("beat", beat, os.environ["WORLD_SIZE"], flush=True)
    time.sleep(0.1)
