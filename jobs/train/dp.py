"""nn.DataParallel, and what it is worth today.

    clusterkit submit jobs/dp.yaml
    python jobs/train/dp.py

One process with one thread per GPU. Before every forward pass the whole model is copied to every
GPU and the batch is cut and handed out; afterwards the outputs are gathered on the first GPU. So it
cannot leave the machine, its threads take turns at Python, and the first GPU does and holds more
than the others. Without GPUs it only calls the module. PyTorch's own advice is to use
DistributedDataParallel (ddp.py). The program shows what each GPU was given and compares the times.
"""

from __future__ import annotations

import argparse
import time

import torch
from flags import Flags
from torch import Tensor, nn

from clusterkit.errors import BadInput
from clusterkit.runtime.arguments import positive
from clusterkit.runtime.distributed import choose_device, read_ranks, run
from clusterkit.runtime.metrics import Reporter

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


def main() -> int:
    args = parse_args()
    ranks = read_ranks()
    if ranks.size > ranks.local_size:
        raise BadInput(
            f"nn.DataParallel is one process, so it cannot use {ranks.size // ranks.local_size} "
            "nodes",
            hint="--nodes 1, or DistributedDataParallel: jobs/ddp-torchrun.yaml",
        )
    if ranks.local_rank > 0:
        return 0  # clusterkit starts one process per GPU; the first one uses them all
    device = choose_device(ranks)
    devices = list(range(torch.cuda.device_count())) if device.type == "cuda" else []
    if len(devices) > args.batch:
        raise BadInput(f"--batch {args.batch}: {len(devices)} GPUs cannot have a sample each")
    print(f"nn.DataParallel: 1 process, {len(devices)} GPUs", flush=True)

    reporter = Reporter(speaks=True)
    bare, bare_time, whole = measure(args, device, None, reporter)
    wrapped, wrapped_time, given = measure(args, device, devices, reporter)
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
    return 0


def measure(
    args: argparse.Namespace, device: torch.device, devices: list[int] | None, reporter: Reporter
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
        reporter.event("start", steps=args.steps, first_step=0)
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
            reporter.event("metrics", step=step, loss=value, step_seconds=times[-1])
    return value, sorted(times)[len(times) // 2], module.seen


def parse_args() -> argparse.Namespace:
    flags = Flags(__doc__)
    flags.add_batch(256)
    flags.add_argument("--steps", type=positive, default=50, help="default: 50")
    flags.add_argument("--seed", type=int, default=0, help="default: 0")
    return flags.parse_args()


if __name__ == "__main__":
    run(main)
