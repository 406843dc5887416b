"""Rank 0 works alone for a while, in another process, and the others wait in a barrier."""

import datetime
import subprocess
import sys

import torch.distributed as dist

alone, timeout = sys.argv[1:]
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=float(timeout)))
dist.barrier()
if dist.get_rank() == 0:
    subprocess.run(["sleep", alone], check=True)
dist.barrier()
print("prepared", dist.get_rank(), flush=True)
