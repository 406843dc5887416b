"""An ordinary script: joins a process group, then all-reduces ten times a second until told."""

import os
import sys
import time

import torch
import torch.distributed as dist

beats = int(sys.argv[1])
dist.init_process_group("gloo")
print("ready", os.getpid(), flush=True)
for beat in range(beats):
    total = torch.ones(1)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print("beat", beat, int(total), flush=True)
    time.sleep(0.1)
dist.barrier()
sys.stdout.flush()
os._exit(0)
