"""This rank and the others: who they are, what they tell each other, and how it ends."""

from __future__ import annotations

import io
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist


class Explained(Exception):
    """An error with its remedy; ``run`` prints it as one line and ends with exit code 1."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


class BadInput(Explained):
    """A flag, file or variable that cannot be used."""


class Unavailable(Explained):
    """Something that is needed is missing or does not answer."""


EXIT_STOPPED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Ranks:
    """This process among all processes of the run, as PyTorch counts them."""

    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    size: int = 1
    local_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the one that speaks for the run."""
        return self.rank == 0


def read_ranks(environ: Mapping[str, str] = os.environ) -> Ranks:
    """Learn the ranks from torchrun and its like, Open MPI or Slurm; alone, a world of one."""

    def get(*names: str, default: int | None = None) -> int:
        """The number in the first of the variables that is set."""
        for name in names:
            if value := environ.get(name):
                try:
                    return int(value.partition("(")[0])  # Slurm writes 4(x2): 4 on each of 2 nodes
                except ValueError:
                    raise BadInput(f"{name} is {value!r}; it must be a whole number") from None
        if default is None:
            raise BadInput(f"{names[0]} is not set", "start the ranks with a launcher")
        return default

    if "RANK" in environ:
        rank, size = get("RANK"), get("WORLD_SIZE")
        # The second name is the deepspeed launcher's, the third torchrun's.
        local = get("LOCAL_RANK", default=0), get("LOCAL_WORLD_SIZE", "LOCAL_SIZE", default=1)
        nodes = ("NODE_RANK", "GROUP_RANK", "CROSS_RANK")
    elif "OMPI_COMM_WORLD_RANK" in environ:
        rank, size = get("OMPI_COMM_WORLD_RANK"), get("OMPI_COMM_WORLD_SIZE")
        local = get("OMPI_COMM_WORLD_LOCAL_RANK"), get("OMPI_COMM_WORLD_LOCAL_SIZE")
        nodes = ("NODE_RANK",)  # Open MPI's own NODE_RANK counts processes on a node, not nodes
    elif "SLURM_PROCID" in environ:
        rank, size = get("SLURM_PROCID"), get("SLURM_NTASKS")
        per_node = get("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", default=1)
        local, nodes = (get("SLURM_LOCALID"), per_node), ("SLURM_NODEID",)
    else:
        return Ranks()
    local_rank, local_size = local
    if not 0 <= rank < size or not 0 <= local_rank < local_size:
        raise BadInput(
            f"rank {rank} of {size}, local rank {local_rank} of {local_size}: impossible ranks",
            "look at RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE in the environment",
        )
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if size > 1 and not environ.get(name):
            raise BadInput(f"{name} is not set, and {size} ranks need it to find each other")
    return Ranks(rank, local_rank, get(*nodes, default=rank // local_size), size, local_size)


def choose_device(ranks: Ranks) -> torch.device:
    """The device of this rank: CLUSTERKIT_DEVICE (cpu or cuda), else a GPU when there is one."""
    kind = os.environ.get("CLUSTERKIT_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    if kind != "cuda":
        raise BadInput(f"CLUSTERKIT_DEVICE is {kind!r}; it must be cpu or cuda")
    count = torch.cuda.device_count()
    # Slurm and others may show each rank one GPU of its own.
    own = ranks.local_size == 1 or "," not in os.environ.get("CUDA_VISIBLE_DEVICES", ",")
    index = 0 if count == 1 and own else ranks.local_rank
    if index >= count or (count == 1 and not own):
        raise too_few_gpus(ranks)
    return torch.device("cuda", index)


def too_few_gpus(ranks: Ranks) -> BadInput:
    size, count = ranks.local_size, torch.cuda.device_count()
    there = f"{size} rank{'s' * (size != 1)} on this node"
    return BadInput(
        f"{there}, but torch sees {count} GPU{'s' * (count != 1)}",
        "ask for fewer ranks per node (--gpus), or CLUSTERKIT_DEVICE=cpu",
    )


@dataclass(frozen=True)
class World(Ranks):
    """A rank with its device, inside a process group. Its methods are collective."""

    device: torch.device = field(kw_only=True)
    backend: str = field(kw_only=True)

    def mean(self, *values: torch.Tensor | float) -> list[float]:
        """The mean of each value over the ranks, all in one collective."""
        return self.mean_later(*values)()

    def mean_later(self, *values: torch.Tensor | float) -> Callable[[], list[float]]:
        """`mean`, without waiting for it: it begins here, and what is returned waits."""
        # All that is not on the GPU leaves in one copy of pinned memory: any other copy, and
        # reading a value back, would wait until the GPU's queue is empty.
        gpu = self.device.type == "cuda"
        held = {n: v for n, v in enumerate(values) if torch.is_tensor(v) and v.is_cuda == gpu}
        own = [0.0 if n in held else float(v) for n, v in enumerate(values)]
        sent = torch.tensor(own, dtype=torch.float64)
        if gpu:
            sent = sent.pin_memory().to(self.device, non_blocking=True)
        parts = [held.get(n, part) for n, part in enumerate(sent.unbind())]
        total = torch.stack([part.double().reshape(()) for part in parts])
        work = dist.all_reduce(total, async_op=True) if self.size > 1 else None
        arrived = None
        if gpu:
            if work is not None:
                work.wait()  # holds up the GPU's queue, not this process
            work, total = None, total.to("cpu", non_blocking=True)  # into pinned memory
            arrived = torch.cuda.Event()
            arrived.record()

        def numbers() -> list[float]:
            if work is not None:
                work.wait()
            if arrived is not None:
                arrived.synchronize()
            return [float(value) / self.size for value in total.tolist()]

        return numbers

    def gather(self, value: Any) -> list[Any]:
        """The small picklable ``value`` of every rank, in rank order, on every rank."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


@contextmanager
def distributed(ranks: Ranks, device: torch.device) -> Iterator[World]:
    """Join the process group: NCCL on GPUs, gloo on CPUs; on the way out wait for the others.

    From here on a SIGTERM does not end the process but shows in ``stop_requested``.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    _join(ranks, device, backend)
    # Only now: before, there is nothing to save, and a rank that waits for the others in C++
    # would not see a Python handler.
    signal.signal(signal.SIGTERM, _request_stop)
    yield World(*astuple(ranks), device=device, backend=backend)
    if ranks.size > 1:
        dist.barrier()
    if backend == "nccl":
        dist.destroy_process_group()


def _join(ranks: Ranks, device: torch.device, backend: str) -> None:
    seconds = os.environ.get("CLUSTERKIT_TIMEOUT") or "600"
    try:
        options: dict[str, Any] = {"timeout": timedelta(seconds=float(seconds))}
    except (ValueError, OverflowError):
        raise BadInput(f"CLUSTERKIT_TIMEOUT is {seconds!r}; it must be seconds") from None
    # Libraries (DeepSpeed) read these names whoever started the rank.
    rank, local_rank, node, size, local_size = map(str, astuple(ranks))
    os.environ.update(RANK=rank, LOCAL_RANK=local_rank, NODE_RANK=node)
    os.environ.update(WORLD_SIZE=size, LOCAL_WORLD_SIZE=local_size)
    if backend == "nccl":
        torch.cuda.set_device(device)
        options["device_id"] = device
    if ranks.size == 1:  # needs neither address nor port, so runs on one machine cannot collide
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    try:
        dist.init_process_group(backend, **options)
    except dist.DistError as error:
        if "Duplicate GPU detected" in str(error):  # NCCL, of two ranks that see the same one
            raise too_few_gpus(ranks) from error
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise Unavailable(
            f"rank {ranks.rank} could not meet the other {ranks.size - 1} ranks at {where}: "
            f"{str(error).splitlines()[0]}",
            "is every node up, and does it reach that address and port?",
        ) from error
    global _joined
    _joined = ranks.size > 1


_joined = False

_stop_requested = False


def stop_requested() -> bool:
    """Whether this rank was asked to stop. Ranks learn of it at different moments: put it through
    ``World.mean`` and stop together when that is above 0."""
    return _stop_requested


def _request_stop(signum: int, frame: object) -> None:
    # Others that follow are echoes: Slurm, or a launcher, signals all processes, and the agent its
    # ranks as well. Whoever does not want to wait has SIGKILL.
    global _stop_requested
    _stop_requested = True


def run(main: Callable[[], int]) -> NoReturn:
    """Run ``main`` and end the process with its exit code.

    An `Explained` is one line on stderr; any other exception its traceback, once, and code 1.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # One write per line, even under ``python -u``: ranks whose launcher gives them one pipe
        # would otherwise mix their lines.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    try:
        code = main()
    except Explained as error:
        if int(os.environ.get("LOCAL_RANK") or 0) > 0:
            _let_others_speak()  # ranks that share a node mostly share their mistakes
        hint = f" ({error.hint})" if error.hint else ""
        print(f"error: {error.message}{hint}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except Exception as error:
        code = _show(error)
    sys.stdout.flush()
    sys.stderr.flush()
    if _joined:
        # Ranks sometimes abort (SIGABRT) when the interpreter ends after gloo was used, and a
        # failing rank may wait in NCCL's clean-up for peers that wait for it. Leave at once.
        os._exit(code)
    sys.exit(code)


def _show(error: Exception) -> int:
    """Print the traceback; a rank that only lost a failing one would bury the cause under its."""
    lost_peer = isinstance(error, dist.DistNetworkError | dist.DistBackendError) or (
        isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    )
    if lost_peer and _stop_requested:
        return EXIT_STOPPED
    if lost_peer:
        _let_others_speak()
    sys.excepthook(type(error), error, error.__traceback__)
    return 1


def _let_others_speak() -> None:
    """Give the launcher time to end this rank because of another one, whose message counts."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(1.0)


def random_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"python": random.getstate(), "cpu": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
