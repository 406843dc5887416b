"""This process among all of the run: its rank, its device, and what it cannot use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch


class Explained(Exception):
    """An error with its remedy; ``run`` prints it as one line and ends with exit code 1."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


class BadInput(Explained):
    """A flag, file or variable that cannot be used."""


class Unavailable(Explained):
    """Something that is needed is missing or does not answer."""


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
