"""Set a rank up, and let it go: environment, device, process group, stop signal, clean ending.

A program reads like this; what can be wrong with its input is found before the ranks meet.

    def main() -> int:
        ranks = read_ranks()
        device = choose_device(ranks)
        ...  # read and check the input
        with distributed(ranks, device) as world:
            ...  # train
        return 0

    if __name__ == "__main__":
        run(main)
"""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from clusterkit.agent.eager import defer_dynamo
from clusterkit.errors import BadInput, ClusterkitError, Unavailable

EXIT_STOPPED = 128 + signal.SIGTERM

_TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Ranks:
    """This process among all processes of the run, as PyTorch counts them."""

    rank: int
    local_rank: int
    node_rank: int
    size: int
    local_size: int

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the one that speaks for the run."""
        return self.rank == 0


@dataclass(frozen=True)
class World(Ranks):
    """A rank with its device, inside a process group. Its methods are collective."""

    device: torch.device
    backend: str

    def mean(self, *values: torch.Tensor | float) -> list[float]:
        """The mean of each value over the ranks, all in one collective."""
        total = torch.stack(
            [torch.as_tensor(v, dtype=torch.float64, device=self.device) for v in values]
        )
        if self.size > 1:
            dist.all_reduce(total)
        return [float(value) / self.size for value in total.tolist()]

    def gather(self, value: Any) -> list[Any]:
        """The small picklable ``value`` of every rank, in rank order, on every rank."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier()


def read_ranks(environ: Mapping[str, str] = os.environ) -> Ranks:
    """Learn the ranks from a launcher, Open MPI or Slurm; a lone process is a world of one.

    Raises:
        BadInput: a variable is missing or no number; the message names it.
    """

    def get(*names: str, default: int | None = None) -> int:
        """The number in the first of the variables that is set."""
        for name in names:
            if value := environ.get(name):
                try:
                    return int(value.partition("(")[0])  # Slurm writes 4(x2): 4 on each of 2 nodes
                except ValueError:
                    raise BadInput(f"{name} is {value!r}; it must be a whole number") from None
        if default is None:
            raise BadInput(f"{names[0]} is not set", hint="start the ranks with a launcher")
        return default

    if "RANK" in environ:
        rank, size = get("RANK"), get("WORLD_SIZE")
        local_rank = get("LOCAL_RANK", default=0)
        # The second and third names are torchrun's and the deepspeed launcher's own.
        local_size = get("LOCAL_WORLD_SIZE", "LOCAL_SIZE", default=1)
        node_of_rank = rank // max(local_size, 1)
        node_rank = get("NODE_RANK", "GROUP_RANK", "CROSS_RANK", default=node_of_rank)
    elif "OMPI_COMM_WORLD_RANK" in environ:
        rank, size = get("OMPI_COMM_WORLD_RANK"), get("OMPI_COMM_WORLD_SIZE")
        local_rank = get("OMPI_COMM_WORLD_LOCAL_RANK")
        local_size = get("OMPI_COMM_WORLD_LOCAL_SIZE")
        # Open MPI's own NODE_RANK counts processes on a node, not nodes.
        node_rank = get("NODE_RANK", default=rank // max(local_size, 1))
    elif "SLURM_PROCID" in environ:
        rank, size = get("SLURM_PROCID"), get("SLURM_NTASKS")
        local_rank, node_rank = get("SLURM_LOCALID"), get("SLURM_NODEID", default=0)
        local_size = get("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", default=1)
    else:
        return Ranks(rank=0, local_rank=0, node_rank=0, size=1, local_size=1)
    if not 0 <= rank < size or not 0 <= local_rank < local_size:
        raise BadInput(
            f"rank {rank} of {size}, local rank {local_rank} of {local_size}: impossible ranks",
            hint="look at RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE in the environment",
        )
    if size > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not environ.get(name):
                raise BadInput(
                    f"{name} is not set, and {size} ranks need it to find each other",
                    hint="export it before the ranks start; `clusterkit submit` does",
                )
    return Ranks(rank, local_rank, node_rank, size, local_size)


def choose_device(ranks: Ranks) -> torch.device:
    """The device of this rank: CLUSTERKIT_DEVICE (cpu or cuda), else a GPU when there is one.

    Raises:
        BadInput: CLUSTERKIT_DEVICE is something else, or there are fewer GPUs than ranks.
    """
    kind = os.environ.get("CLUSTERKIT_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    if kind != "cuda":
        raise BadInput(f"CLUSTERKIT_DEVICE is {kind!r}; it must be cpu or cuda")
    count = torch.cuda.device_count()
    # Slurm and others may show each rank one GPU of its own.
    index = 0 if count == 1 else ranks.local_rank
    shared = count == 1 < ranks.local_size and "CUDA_VISIBLE_DEVICES" not in os.environ
    if index >= count or shared:
        raise BadInput(
            f"{ranks.local_size} ranks on this node, but torch sees {count} GPUs",
            hint="ask for fewer ranks per node (--gpus), or CLUSTERKIT_DEVICE=cpu",
        )
    return torch.device("cuda", index)


@contextmanager
def distributed(ranks: Ranks, device: torch.device) -> Iterator[World]:
    """Join the process group: NCCL on GPUs, gloo on CPUs; on the way out wait for the others.

    From here on a SIGTERM does not end the process but shows in ``stop_requested``.

    Raises:
        BadInput: CLUSTERKIT_TIMEOUT is no number of seconds.
        Unavailable: the other ranks did not come within CLUSTERKIT_TIMEOUT seconds (600).
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    _join(ranks, device, backend)
    # Only now: before, there is nothing to save, and a rank that waits for the others in C++
    # would not see a Python handler.
    signal.signal(signal.SIGTERM, _request_stop)
    yield World(**vars(ranks), device=device, backend=backend)
    if ranks.size > 1:
        dist.barrier()
    if backend == "nccl":
        dist.destroy_process_group()


def stop_requested() -> bool:
    """Whether this rank was asked to stop (SIGTERM).

    Ranks learn of it at different moments: put it through ``World.mean`` and stop together when
    that is above 0, or those who go on wait for those who left.
    """
    return _stop_requested


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run a program's ``main`` and end the process with its exit code.

    An error that clusterkit can explain is one line on stderr and its own exit code; any other
    exception shows its traceback, once, and the exit code is 1.
    """
    defer_dynamo()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # One write per line, even under ``python -u``, which writes a line's end by itself: ranks
        # whose launcher gives them one pipe would otherwise mix their lines.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    code: int | str | None
    try:
        code = main()
    except ClusterkitError as error:
        # Once per node: ranks that share a node mostly share their mistakes.
        if int(os.environ.get("LOCAL_RANK") or 0) > 0:
            _let_others_speak()
        hint = f" ({error.hint})" if error.hint else ""
        print(f"error: {error.message}{hint}", file=sys.stderr)
        code = error.exit_code
    except SystemExit as leaving:
        code = leaving.code
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except Exception as error:
        code = _show(error)
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if _joined:
        # Ranks sometimes abort (SIGABRT) when the interpreter ends after gloo was used, and a
        # failing rank may wait in NCCL's clean-up for peers that wait for it. Leave at once.
        os._exit(code or 0)
    sys.exit(code)


_joined = False
_stop_requested = False


def _request_stop(signum: int, frame: object) -> None:
    global _stop_requested
    _stop_requested = True
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the second one means it


def _show(error: Exception) -> int:
    """Print the traceback and return the exit code.

    A rank that only lost contact to a failing one would bury the cause under its own traceback.
    """
    lost_peer = isinstance(error, dist.DistNetworkError | dist.DistBackendError) or (
        isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    )
    if lost_peer and _stop_requested:
        return EXIT_STOPPED
    if lost_peer:
        _let_others_speak()
    if error.__traceback__ is not None:
        error = error.with_traceback(error.__traceback__.tb_next)  # without the call in run()
    sys.excepthook(type(error), error, error.__traceback__)
    return 1


def _let_others_speak() -> None:
    """Give the launcher time to end this rank because of another one, whose message counts."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(1.0)


def _join(ranks: Ranks, device: torch.device, backend: str) -> None:
    global _joined
    seconds = os.environ.get("CLUSTERKIT_TIMEOUT") or str(_TIMEOUT_SECONDS)
    try:
        timeout = timedelta(seconds=float(seconds))
    except (ValueError, OverflowError):
        raise BadInput(f"CLUSTERKIT_TIMEOUT is {seconds!r}; it must be seconds") from None
    # Libraries (DeepSpeed) read these names whoever started the rank.
    names = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ |= dict(zip(names, map(str, astuple(ranks)), strict=True))
    options: dict[str, Any] = {}
    if backend == "nccl":
        torch.cuda.set_device(device)
        options["device_id"] = device
    if ranks.size == 1:
        # Needs neither address nor port, so runs on one machine cannot collide.
        store = dist.HashStore()  # type: ignore[attr-defined]
        options |= {"store": store, "rank": 0, "world_size": 1}
    try:
        dist.init_process_group(backend, timeout=timeout, **options)
    except dist.DistError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise Unavailable(
            f"rank {ranks.rank} could not meet the other {ranks.size - 1} ranks at {where}: "
            f"{str(error).splitlines()[0]}",
            hint="is every node up, and does it reach that address and port?",
        ) from error
    _joined = ranks.size > 1
