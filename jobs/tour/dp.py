"""nn.DataParallel, and what it is worth today.

    clusterkit submit jobs/tour/dp.yaml
    python jobs/tour/dp.py

One process with one thread per GPU. Before every forward pass the whole model is copied to every
GPU and the batch is cut and handed out; afterwards the outputs are gathered on the first GPU. So it
cannot leave the machine, its threads take turns at Python, and the first GPU does and holds more
than the others. Without GPUs it only calls the module. PyTorch's own advice is to use
DistributedDataParallel (jobs/train/ddp.py). The program shows what each GPU was given and compares
the times.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import torch
from torch import Tensor, nn

WIDTH = 512


class Classifier(nn.Module):
    """Two layers. ``seen`` collects the batch size of every forward pass; copies share the list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
        self.seen: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.append(len(inputs))
        outputs: Tensor = self.layers(inputs)
        return outputs


def main() -> None:
    on_gpu = torch.cuda.is_available() and os.environ.get("CLUSTERKIT_DEVICE") != "cpu"
    devices = list(range(torch.cuda.device_count())) if on_gpu else []
    args = parse_args(len(devices))
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return  # clusterkit starts one process per GPU; the first one uses them all
    print(f"nn.DataParallel: 1 process, {len(devices)} GPUs", flush=True)

    device = torch.device("cuda" if on_gpu else "cpu")
    bare, bare_time, whole = measure(args, device, None)
    wrapped, wrapped_time, given = measure(args, device, devices)
    if sum(given) != sum(whole):
        raise RuntimeError(f"the copies saw batches of {given}, the whole is {whole}")
    # On several GPUs the sums are made in another order.
    if abs(bare - wrapped) > (1e-3 if devices else 0.0):
        raise RuntimeError(f"the losses differ: {bare} and {wrapped}")
    parts = given[: len(given) // args.steps]
    print(f"a batch of {args.batch} was computed as {parts}", flush=True)
    for name, loss, seconds in (
        ("the bare module", bare, bare_time),
        ("nn.DataParallel", wrapped, wrapped_time),
    ):
        print(f"{name}  loss {loss:.6f}  {1000 * seconds:.2f} ms a step", flush=True)
    if not devices:
        print("without GPUs nothing was divided: use ddp.py", flush=True)


def measure(
    args: argparse.Namespace, device: torch.device, devices: list[int] | None
) -> tuple[float, float, list[int]]:
    """Train from the same start, as it is (``devices`` None) or wrapped.

    Returns:
        The last loss, the median seconds of a step, the batch sizes that the copies saw.
    """
    torch.manual_seed(args.seed)
    module = Classifier().to(device)
    model = module if devices is None else nn.DataParallel(module, devices or None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = torch.randn(args.batch, WIDTH, device=device)
    targets = inputs[:, :10].argmax(dim=1)
    if devices is not None:
        report("start", steps=args.steps, first_step=0)
    times, value = [], 0.0
    for step in range(1, args.steps + 1):
        started = time.perf_counter()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.item()  # waits for the GPU
        times.append(time.perf_counter() - started)
        if devices is not None:
            report("metrics", step=step, loss=value, step_seconds=times[-1])
    return value, sorted(times)[len(times) // 2], module.seen


def report(event: str, **fields: object) -> None:
    """Print a line that clusterkit reads: progress, metrics and plots are made of it."""
    print("@clusterkit " + json.dumps({"event": event, **fields}), flush=True)


def parse_args(gpus: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, batch = parser.add_argument, os.environ.get("CLUSTERKIT_MICRO_BATCH") or 256
    add("--batch", type=int, default=batch, metavar="SAMPLES", help="of a step (default: 256)")
    add("--steps", type=int, default=50, help="default: 50")
    add("--seed", type=int, default=0, help="default: 0")
    args = parser.parse_args()
    ranks, local = (os.environ.get(name) or 1 for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if (nodes := int(ranks) // int(local)) > 1:
        parser.error(f"nn.DataParallel is one process, so it cannot use {nodes} nodes: --nodes 1, "
                     "or DistributedDataParallel: jobs/tour/ddp-torchrun.yaml")  # fmt: skip
    if os.environ.get("CLUSTERKIT_ACCUMULATION", "1") != "1":
        parser.error("this program does not accumulate: give batch.global or batch.micro alone")
    if args.batch < max(gpus, 1) or args.steps < 1:
        parser.error(f"--batch {args.batch} --steps {args.steps}: {gpus} GPUs need a sample each")
    return args


if __name__ == "__main__":
    main()
