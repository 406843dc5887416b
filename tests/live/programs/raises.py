"""Rank 1 raises; the others wait for it in a collective."""

import datetime
import os
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
print("begin", os.environ["RANK"], flush=True)
if dist.get_rank() == int(sys.argv[1]):
    raise ValueError("always")
dist.all_reduce(torch.ones(1))
