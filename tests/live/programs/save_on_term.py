import argparse
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, i):
        time.sleep(0.05)
        return torch.full((2,), float(i))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--context", default="fork")
    p.add_argument("--out", required=True)
    p.add_argument(
        "--late", action="store_true", help="install the handler after the loader has begun"
    )
    a = p.parse_args()
    stop = []

    def ask(signum, frame):
        stop.append(signum)

    if not a.late:
        signal.signal(signal.SIGTERM, ask)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    loader = DataLoader(Slow(), batch_size=4, num_workers=2, multiprocessing_context=a.context)
    for step, batch in enumerate(loader):
        if a.late and step == 0:
            signal.signal(signal.SIGTERM, ask)
        t = torch.tensor([float(bool(stop)), batch.sum().item()])
        dist.all_reduce(t)
        if step % 5 == 0 and rank == 0:
            print("step", step, flush=True)
        if t[0] > 0:
            Path(a.out, f"saved-{rank}-{step}").write_text("x")
            print("saved on rank", rank, "at step", step, flush=True)
            dist.barrier()
            sys.exit(143)


if __name__ == "__main__":
    main()
