"""Distributed data parallel as the tutorials teach it.

    clusterkit submit jobs/tour/ddp-torchrun.yaml         # what you want
    torchrun --nproc-per-node 2 jobs/train/ddp.py         # the same without clusterkit

Two older ways to start it are in jobs/tour/ddp_start.py. Every rank holds the whole model and sees
its own part of the samples. The program checks what it teaches: batch x steps x ranks covers the
samples, each of them is seen, and all ranks end with the same weights.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH = 20


def main() -> None:
    args = parse_args()
    # One write per line, also under `python -u`: ranks that share a pipe would mix their lines.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    # What a launcher says: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
    on_gpu = torch.cuda.is_available() and os.environ.get("CLUSTERKIT_DEVICE") != "cpu"
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    train(args, device)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a process that used gloo sometimes aborts where the interpreter would end it


def train(args: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(args.seed)  # the same samples and the same first weights everywhere
    samples = make_samples(args.samples)
    # Splits the samples between the ranks, in another order each epoch.
    sampler = DistributedSampler(samples, seed=args.seed)
    loader = DataLoader(samples, batch_size=args.batch, sampler=sampler)
    model = nn.Linear(WIDTH, 1).to(device)
    ddp = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=args.learning_rate)
    report("start", steps=args.epochs * len(loader), first_step=0)
    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # without it every epoch has the order of the first
        # GPU: the tutorials' word for a rank, on CPUs too.
        size = min(args.batch, len(sampler))
        print(
            f"GPU:{dist.get_rank()} | Epoch: {epoch} | Batchsize: {size} | Steps: {len(loader)}",
            flush=True,
        )
        seen = torch.zeros(len(samples), dtype=torch.int64, device=device)
        for batch in loader:
            inputs, targets, numbers = (part.to(device) for part in batch)
            loss = nn.functional.mse_loss(ddp(inputs), targets)
            optimizer.zero_grad()
            loss.backward()  # averages the gradients over the ranks
            optimizer.step()
            seen[numbers] += 1
            step += 1
            mean = loss.detach().double()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            report("metrics", step=step, loss=mean.item())
        dist.all_reduce(seen)
        check_samples(seen, args.batch, len(loader), dist.get_world_size())
    weights: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(weights, [parameter.tolist() for parameter in model.parameters()])
    check_weights(weights)


def report(event: str, **fields: object) -> None:
    """Print a line that clusterkit reads: progress, metrics and plots are made of it."""
    if dist.get_rank() == 0:
        print("@clusterkit " + json.dumps({"event": event, **fields}), flush=True)


def make_samples(count: int) -> TensorDataset:
    """Points on a plane, each with its number."""
    inputs = torch.rand(count, WIDTH)
    targets = inputs @ torch.arange(1.0, WIDTH + 1).unsqueeze(1) / WIDTH
    return TensorDataset(inputs, targets, torch.arange(count))


def check_samples(seen: Tensor, batch: int, steps: int, ranks: int) -> None:
    """Make sure that the ranks together saw every sample in this epoch.

    Where the samples cannot be shared evenly the sampler gives some of them twice, so that every
    rank has as many as the others.

    Args:
        seen: how often each sample was seen, by all ranks together.
    """
    samples, places, times = len(seen), batch * steps * ranks, int(seen.sum())
    if int(seen.min()) < 1 or (places == samples and times > samples):
        raise RuntimeError(f"{samples} samples were seen {times} times, and not each as it should")
    equation = f"{batch} x {steps} steps x {ranks} ranks = {places}"
    result = f"{equation} >= {samples} samples, each seen, {times - samples} of them again"
    if places == samples:
        result = f"{equation} samples, each seen once"
    say(f"checked: {result}")


def check_weights(weights: list[list[float]]) -> None:
    """Make sure that all ranks hold the same weights, to the bit."""
    if any(other != weights[0] for other in weights):
        raise RuntimeError("the ranks hold different weights")
    say(f"checked: all {len(weights)} ranks hold the same weights")


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, batch = parser.add_argument, os.environ.get("CLUSTERKIT_MICRO_BATCH") or 32
    add("--batch", type=int, default=batch, metavar="SAMPLES", help="of one rank (default: 32)")
    add("--samples", type=int, default=2048, help="in an epoch (default: 2048)")
    add("--epochs", type=int, default=2, help="default: 2")
    add("--learning-rate", type=float, default=0.05, metavar="RATE", help="default: 0.05")
    add("--seed", type=int, default=0, help="default: 0")
    # torch.distributed.launch adds it; LOCAL_RANK in the environment says the same.
    add("--local-rank", "--local_rank", help=argparse.SUPPRESS)
    if os.environ.get("CLUSTERKIT_ACCUMULATION", "1") != "1":
        parser.error("this program does not accumulate: give batch.global or batch.micro alone")
    args = parser.parse_args()
    if min(args.batch, args.samples, args.epochs) < 1:
        parser.error("--batch, --samples and --epochs begin at 1")
    return args


if __name__ == "__main__":
    main()
