"""A parameter server over torch RPC: rank 0 keeps the model, the other ranks compute gradients.

    clusterkit submit jobs/tour/rpc.yaml                     # one server, two workers
    clusterkit submit jobs/tour/rpc.yaml -- --asynchronous

Synchronous: the server waits for the gradients of all workers, averages them, makes the step and
sends the new weights to all. At the end it trains alone on the same samples and compares: the
weights must be the same. Asynchronous: each worker gets new weights as soon as the server has used
its gradients; nobody waits, but the gradients are of weights that others have changed meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import warnings

import torch
import torch.distributed.rpc as rpc
from torch import Tensor, nn
from torch.futures import Future

SERVER = "server"
TOLERANCE = 1e-6
Weights = list[Tensor]


class Server:
    """The model and its optimizer. Methods are called by workers, in threads of torch RPC."""

    def __init__(self, args: argparse.Namespace, workers: int) -> None:
        self.model = make_model(args.seed)
        self.optimizer = make_optimizer(self.model, args)
        self.asynchronous = args.asynchronous
        self.workers = workers
        self.lock = threading.Lock()
        self.waiting: list[tuple[Weights, float]] = []
        self.answer: Future[Weights] = Future()
        self.steps = 0

    def push(self, gradients: Weights, loss: float) -> Future[Weights]:
        """Take one worker's gradients; the future holds the new weights."""
        with self.lock:
            self.waiting.append((gradients, loss))
            answer = self.answer
            if self.asynchronous or len(self.waiting) == self.workers:
                self.step()
                self.answer = Future()
                answer.set_result(self.weights())
            return answer

    def step(self) -> None:
        """Average what has come and make a step."""
        everyone, losses = zip(*self.waiting, strict=True)
        for parameter, *parts in zip(self.model.parameters(), *everyone, strict=True):
            parameter.grad = torch.stack(parts).mean(dim=0)
        self.optimizer.step()
        self.waiting, self.steps = [], self.steps + 1
        report("metrics", step=self.steps, loss=sum(losses) / len(losses))

    def weights(self) -> Weights:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


server: Server | None = None
"""In rank 0 only: what the functions below reach."""


def pull() -> Weights:
    """Called by a worker, carried out in the server."""
    assert server is not None
    return server.weights()


@rpc.functions.async_execution  # the answer is sent when the future has a value; no thread waits
def push(gradients: Weights, loss: float) -> Future[Weights]:
    """Called by a worker, carried out in the server."""
    assert server is not None
    return server.push(gradients, loss)


def main() -> None:
    global server
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    args = parse_args(size)
    if rank == 0:
        server = Server(args, size - 1)  # before any worker can ask for it
        updates = args.steps * (size - 1 if args.asynchronous else 1)
        report("start", steps=updates, first_step=0, world_size=size)
    # TensorPipe asks the host name for its address, unless it is told the interface.
    if "GLOO_SOCKET_IFNAME" in os.environ:
        os.environ.setdefault("TP_SOCKET_IFNAME", os.environ["GLOO_SOCKET_IFNAME"])
    warnings.filterwarnings("ignore", "You are using a Backend")  # torch 2.13 about its own code
    name = SERVER if rank == 0 else f"worker-{rank}"
    rpc.init_rpc(name, rank=rank, world_size=size)
    if rank > 0:
        work(args, rank)
    rpc.shutdown()  # waits until nobody has anything left to ask
    if server is not None:
        check(args, server)


def work(args: argparse.Namespace, rank: int) -> None:
    """Compute gradients of this worker's samples and exchange them for new weights."""
    model = make_model(args.seed + rank)  # its own weights are replaced at once
    weights = rpc.rpc_sync(SERVER, pull)
    for step in range(args.steps):
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.data, parameter.grad = weight, None
        loss = loss_of(model, *samples(args, step, rank))
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        weights = rpc.rpc_sync(SERVER, push, (gradients, loss.item()))
    print(f"worker {rank}: {args.steps} x {args.batch} samples", flush=True)


def check(args: argparse.Namespace, server: Server) -> None:
    """Compare with training on all workers' samples in one process."""
    print(f"server: {server.steps} steps, gradients of {server.workers} workers", flush=True)
    if args.asynchronous:
        return  # the order in which workers came decides: there is nothing to compare with
    model = make_model(args.seed)
    optimizer = make_optimizer(model, args)
    for step in range(args.steps):
        parts = [samples(args, step, rank) for rank in range(1, server.workers + 1)]
        inputs, targets = (torch.cat(part) for part in zip(*parts, strict=True))
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        optimizer.step()
    pairs = zip(model.parameters(), server.model.parameters(), strict=True)
    difference = max(float((one - other).detach().abs().max()) for one, other in pairs)
    if not difference <= TOLERANCE:
        raise RuntimeError(f"the weights differ from those of one process by {difference:.1e}")
    print(f"checked: the weights of one process, to within {difference:.1e}", flush=True)


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    # Late gradients act like momentum of their own; both together diverged here.
    momentum = 0.0 if args.asynchronous else 0.9
    return torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=momentum)


def samples(args: argparse.Namespace, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """What worker ``rank`` trains on in ``step``."""
    draw = torch.Generator().manual_seed(hash((args.seed, step, rank)) % 2**63)
    inputs = torch.randn(args.batch, 8, generator=draw)
    return inputs, (inputs.sum(dim=1, keepdim=True) / 4).sin()


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(inputs), targets)


def report(event: str, **fields: object) -> None:
    """Print a line that clusterkit reads: progress, metrics and plots are made of it."""
    print("@clusterkit " + json.dumps({"event": event, **fields}), flush=True)


def parse_args(ranks: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, batch = parser.add_argument, os.environ.get("CLUSTERKIT_MICRO_BATCH") or 32
    add("--batch", type=int, default=batch, metavar="SAMPLES", help="of a worker (default: 32)")
    add("--steps", type=int, default=200, help="of every worker (default: 200)")
    add("--asynchronous", action="store_true", help="do not wait for the other workers")
    add("--learning-rate", type=float, default=0.05, metavar="RATE", help="default: 0.05")
    add("--seed", type=int, default=0, help="default: 0")
    if os.environ.get("CLUSTERKIT_ACCUMULATION", "1") != "1":
        parser.error("this program does not accumulate: give batch.global or batch.micro alone")
    args = parser.parse_args()
    if ranks < 2:
        parser.error("a parameter server needs a worker besides: --nodes 2, or --gpus 2")
    if min(args.batch, args.steps) < 1:
        parser.error("--batch and --steps begin at 1")
    return args


if __name__ == "__main__":
    main()
