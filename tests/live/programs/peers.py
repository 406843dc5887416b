"""Rank RANK fails by an exception; the others fail of it, in a barrier."""

import os
import sys

import torch.distributed as dist

dist.init_process_group("gloo")
if int(os.environ["RANK"]) == int(sys.argv[1]):
    raise ValueError("boom é")
dist.barrier()
