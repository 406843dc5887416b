"""Distributed data parallel as the tutorials teach it.

    clusterkit submit jobs/ddp-torchrun.yaml              # what you want
    torchrun --nproc-per-node 2 jobs/train/ddp.py         # the same without clusterkit

Two older ways to start it are in ddp_start.py. Every rank holds the whole model and sees its own
part of the samples. The program checks what it teaches: batch x steps x ranks covers the samples,
each of them is seen, and all ranks end with the same weights.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from flags import Flags
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from clusterkit.runtime.arguments import positive
from clusterkit.runtime.distributed import (
    EXIT_STOPPED,
    World,
    choose_device,
    distributed,
    read_ranks,
    run,
    stop_requested,
)
from clusterkit.runtime.metrics import Reporter

WIDTH = 20


def main() -> int:
    args = parse_args()
    ranks = read_ranks()
    device = choose_device(ranks)
    reporter = Reporter(speaks=ranks.is_first)
    reporter.phase("rendezvous")
    with distributed(ranks, device) as world:
        return train(args, world, reporter)


def train(args: argparse.Namespace, world: World, reporter: Reporter) -> int:
    """What every rank does. Returns the exit code."""
    reporter.phase("build")
    torch.manual_seed(args.seed)  # the same samples and the same first weights everywhere
    samples = make_samples(args.samples)
    # Splits the samples between the ranks, in another order each epoch.
    sampler = DistributedSampler(samples, world.size, world.rank, seed=args.seed)
    loader = DataLoader(samples, batch_size=args.batch, sampler=sampler)
    on_gpu = world.device.type == "cuda"
    model = nn.Linear(WIDTH, 1).to(world.device)
    ddp = DistributedDataParallel(model, device_ids=[world.device] if on_gpu else None)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=args.learning_rate)
    reporter.event("start", steps=args.epochs * len(loader), first_step=0)
    reporter.phase("training")
    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # without it every epoch has the order of the first
        # GPU: the tutorials' word for a rank, on CPUs too.
        size = min(args.batch, len(sampler))
        print(
            f"GPU:{world.rank} | Epoch: {epoch} | Batchsize: {size} | Steps: {len(loader)}",
            flush=True,
        )
        seen = torch.zeros(len(samples), dtype=torch.int64, device=world.device)
        for batch in loader:
            inputs, targets, numbers = (part.to(world.device) for part in batch)
            loss = nn.functional.mse_loss(ddp(inputs), targets)
            optimizer.zero_grad()
            loss.backward()  # averages the gradients over the ranks
            optimizer.step()
            seen[numbers] += 1
            step += 1
            mean, stop = world.mean(loss.detach(), stop_requested())
            reporter.event("metrics", step=step, loss=mean)
            if stop > 0:
                return EXIT_STOPPED
        check_samples(seen, args.batch, len(loader), world)
    check_weights(model, world)
    reporter.phase(None)
    return 0


def make_samples(count: int) -> TensorDataset:
    """Points on a plane, each with its number."""
    inputs = torch.rand(count, WIDTH)
    targets = inputs @ torch.arange(1.0, WIDTH + 1).unsqueeze(1) / WIDTH
    return TensorDataset(inputs, targets, torch.arange(count))


def check_samples(seen: Tensor, batch: int, steps: int, world: World) -> None:
    """Make sure that the ranks together saw every sample in this epoch. Collective.

    Where the samples cannot be shared evenly the sampler gives some of them twice, so that every
    rank has as many as the others.

    Args:
        seen: how often this rank saw each sample.
    """
    if world.size > 1:
        dist.all_reduce(seen)
    samples, places, times = len(seen), batch * steps * world.size, int(seen.sum())
    if int(seen.min()) < 1 or (places == samples and times > samples):
        raise RuntimeError(f"{samples} samples were seen {times} times, and not each as it should")
    if world.is_first:
        equation = f"{batch} x {steps} steps x {world.size} ranks = {places}"
        result = f"{equation} >= {samples} samples, each seen, {times - samples} of them again"
        if places == samples:
            result = f"{equation} samples, each seen once"
        print(f"checked: {result}", flush=True)


def check_weights(model: nn.Module, world: World) -> None:
    """Make sure that all ranks hold the same weights, to the bit. Collective."""
    first, *others = world.gather([parameter.tolist() for parameter in model.parameters()])
    if any(weights != first for weights in others):
        raise RuntimeError("the ranks hold different weights")
    if world.is_first:
        print(f"checked: all {world.size} ranks hold the same weights", flush=True)


def parse_args() -> argparse.Namespace:
    flags = Flags(__doc__)
    flags.add_batch(32)
    add = flags.add_argument
    add("--samples", type=positive, default=2048, help="in an epoch (default: 2048)")
    add("--epochs", type=positive, default=2, help="default: 2")
    add("--learning-rate", type=float, default=0.05, metavar="RATE", help="default: 0.05")
    add("--seed", type=int, default=0, help="default: 0")
    # torch.distributed.launch adds it; LOCAL_RANK in the environment says the same.
    add("--local-rank", "--local_rank", help=argparse.SUPPRESS)
    return flags.parse_args()


if __name__ == "__main__":
    run(main)
