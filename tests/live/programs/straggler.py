"""Steps of which rank 1's take longer for a while: it works, or somebody else does beside it."""

import sys
import time

import torch
import torch.distributed as dist


def main(seconds, slow_until):
    dist.init_process_group("gloo")
    rank, total = dist.get_rank(), torch.ones(1)
    began = time.monotonic()
    while True:
        late = rank == 1 and time.monotonic() < began + slow_until
        time.sleep(0.12 if late else 0.02)
        # All leave after the same step.
        total[0] = time.monotonic() - began
        dist.all_reduce(total, dist.ReduceOp.MAX)
        dist.all_reduce(torch.ones(1))
        if total[0] > seconds:
            break
    sys.stdout.flush()


main(float(sys.argv[1]), float(sys.argv[2]))
