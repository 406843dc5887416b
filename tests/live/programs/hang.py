"""Steps with metrics lines, at one of which rank 1 does what is asked; not in a second attempt."""

import os
import re
import sys
import time

import torch
import torch.distributed as dist

STEPS, AT = 200, 30


def load(step, rank, how):
    """A batch, one would think."""
    if step != AT or os.environ["CLUSTERKIT_ATTEMPT"] != "1" or (rank != 1 and how != "all slow"):
        return
    print("hangs", flush=True)
    if how in ("slow", "all slow"):
        time.sleep(8)
    elif how == "python":
        while True:
            pass
    elif how == "native":
        re.match("(a+)+$", 40 * "a" + "b")  # holds the interpreter's lock
    elif how == "stop":
        os.kill(os.getpid(), 19)


def main(how):
    dist.init_process_group("gloo")
    rank, total = dist.get_rank(), torch.ones(1)
    for step in range(STEPS):
        load(step, rank, how)
        if not (how == "skip" and rank == 1 and step == AT):
            dist.all_reduce(total)
        if rank == 0:
            line = f'"event": "metrics", "step": {step}, "loss": 1.0, "step_seconds": 0.02'
            print(f"@clusterkit {{{line}}}", flush=True)
        time.sleep(0.02)
    if how == "skip" and rank == 1:
        print("hangs", flush=True)
        time.sleep(600)
    sys.stdout.flush()


main(sys.argv[1])
