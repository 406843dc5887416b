"""The ranks as a grid: pipeline stages x copies of the data x slices of every layer.

Rank order is pipeline, data, tensor from the slowest to the fastest, so that the ranks that talk
most (tensor parallel: several times in every layer) sit on one node, as in Megatron-LM
(Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ranks import BadInput

_TAKES = {
    "ddp": ("dp",),
    "deepspeed": ("pp", "dp", "tp"),
    "fsdp": ("replicate", "shard", "dp"),
    "tp": ("dp", "tp"),
    "pp": ("pp", "dp"),
    "3d": ("pp", "dp", "tp"),
}
STRATEGIES = tuple(_TAKES)


@dataclass(frozen=True)
class Mesh:
    """How many ranks along each dimension."""

    pp: int = 1  # pipeline stages, each with a run of the layers
    replicate: int = 1  # groups of ranks that each hold a whole copy of the (sharded) state
    shard: int = 1  # ranks that share one copy between them
    tp: int = 1  # ranks that each compute a slice of every layer, on the same samples

    @property
    def dp(self) -> int:
        """Ranks that train on different samples."""
        return self.replicate * self.shard

    @property
    def size(self) -> int:
        """All ranks."""
        return self.pp * self.dp * self.tp

    def replica(self, rank: int) -> int:
        """Which of the ``dp`` shares of the global batch a rank trains on."""
        return rank // self.tp % self.dp

    def stage(self, rank: int) -> int:
        """Which pipeline stage a rank holds."""
        return rank // (self.tp * self.dp)

    def facts(self, strategy: str, schedule: str, micro_batches: int) -> dict[str, Any]:
        """What a start line tells of it."""
        if self.pp > 1:
            schedule = "1f1b" if strategy == "deepspeed" else schedule
            return {"mesh": str(self), "schedule": schedule, "micro_batches": micro_batches,
                    "bubble": bubble(self.pp, micro_batches)}  # fmt: skip
        plain = strategy == "ddp" or (strategy == "deepspeed" and self.tp == 1)
        return {} if plain else {"mesh": str(self)}

    def __str__(self) -> str:
        shape = {"pp": self.pp, "replicate": self.replicate, "shard": self.shard, "tp": self.tp}
        if self.replicate == 1:
            shape = {"pp": self.pp, "dp": self.dp, "tp": self.tp}
        return ",".join(f"{name}={size}" for name, size in shape.items() if size > 1) or "dp=1"


def bubble(stages: int, micro_batches: int) -> float:
    """The part of a step in which a rank of a pipeline waits: (p - 1) / (m + p - 1).

    Huang et al. 2019 (GPipe), https://arxiv.org/abs/1811.06965, section 2.3. It takes all stages
    to be equally long and sending to be free.
    """
    return (stages - 1) / (micro_batches + stages - 1)


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def choose(strategy: str, text: str | None, *, ranks: int, local_ranks: int) -> Mesh:
    """The mesh that ``--mesh`` describes; what it leaves out follows from the number of ranks.

    Without ``text``, tensor parallel takes the ranks of a node, pipeline parallel all ranks.
    """
    sizes = _parse(strategy, text or "")
    if not sizes and strategy == "3d":
        raise BadInput("--strategy 3d needs a mesh", hint="on 8 ranks: --mesh pp=2,dp=2,tp=2")
    if not sizes and strategy == "tp":
        sizes = {"tp": local_ranks}
    if not sizes and strategy == "pp":
        sizes = {"pp": ranks}
    given = math.prod(sizes.values())
    rest = "shard" if strategy == "fsdp" and "dp" not in sizes else "dp"
    if rest not in sizes and ranks % given == 0:
        sizes[rest] = ranks // given
    if math.prod(sizes.values()) != ranks:
        words = text or ",".join(f"{name}={size}" for name, size in sizes.items())
        product = " x ".join(f"{name} {size}" for name, size in sizes.items())
        there = f"there {'is' if ranks == 1 else 'are'} {counted(ranks, 'rank')}"
        raise BadInput(
            f"--mesh {words}: {product} is {math.prod(sizes.values())} ranks, and {there}",
            hint=f"sizes whose product is {ranks}, or leave one out and it is worked out",
        )
    sizes["shard"] = sizes.get("shard", 1) * sizes.pop("dp", 1)
    mesh = Mesh(**sizes)
    # A strategy named after a dimension of 1 would only do another's work under its name.
    if {"tp": mesh.tp, "pp": mesh.pp, "3d": mesh.pp * mesh.tp}.get(strategy) == 1:
        what = "pp=1,tp=1" if strategy == "3d" else f"{strategy}=1"
        raise BadInput(
            f"--strategy {strategy} with {what} divides nothing",
            hint="more ranks, or --strategy ddp or fsdp",
        )
    return mesh


def check_model(strategy: str, mesh: Mesh, model: Mapping[str, Any], *, sequence: bool) -> None:
    """Refuse a model that cannot be divided like this; our own is described by ``Shape``."""
    if mesh.pp == 1 and mesh.tp == 1:
        return
    name = model.get("name", "this model")
    if strategy == "deepspeed" and mesh.pp == 1 and "heads" not in model:
        return  # AutoTP looks for itself
    if "layers" not in model or "heads" not in model:
        raise BadInput(
            f"--strategy {strategy} cannot cut {name}: it does not know its layers",
            hint="--strategy fsdp or deepspeed divide any model",
        )
    layers, heads = int(model["layers"]), int(model["heads"])
    if mesh.pp > layers:
        raise BadInput(
            f"--mesh pp={mesh.pp}: {name} has {counted(layers, 'layer')}, and a stage needs one "
            "at least",
            hint=f"--mesh pp={layers} at most",
        )
    if heads % mesh.tp:
        fits = [n for n in range(2, heads + 1) if heads % n == 0]
        raise BadInput(
            f"--mesh tp={mesh.tp}: the {heads} attention heads of {name} do not divide by it",
            hint=f"tp can be {', '.join(map(str, fits)) or 'nothing but 1'}",
        )
    if sequence and int(model["context"]) % mesh.tp:
        raise BadInput(
            f"--sequence-parallel: {model['context']} tokens do not divide by tp={mesh.tp}",
            hint="a --context that does",
        )


def warnings(strategy: str, mesh: Mesh, *, local_ranks: int) -> list[str]:
    """What is allowed and probably a mistake, in a sentence each."""
    said = []
    if mesh.tp > 1 and local_ranks % mesh.tp:
        said.append(
            f"tp={mesh.tp} reaches over nodes of {counted(local_ranks, 'rank')}: tensor parallel "
            "waits for the network four times in every layer; keep it inside a node"
        )
    if strategy == "3d":
        idle = [name for name in ("pp", "dp", "tp") if getattr(mesh, name) == 1]
        if idle:
            same = {"pp": "; --strategy tp says the same", "tp": "; --strategy pp says the same"}
            said.append(
                f"{' and '.join(f'{name}=1' for name in idle)} in a 3d mesh divides nothing"
                f"{same.get(idle[0], '')}"
            )
    if strategy == "fsdp" and mesh.shard == 1:
        said.append(
            f"fsdp with shard=1 on {counted(mesh.size, 'rank')} shards nothing; "
            "--strategy ddp does the same with less work"
        )
    return said


def _parse(strategy: str, text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for word in filter(None, text.replace(" ", "").split(",")):
        name, _, number = word.partition("=")
        if name not in _TAKES[strategy]:
            raise BadInput(
                f"--mesh {text}: --strategy {strategy} has no dimension {name!r}",
                hint=f"it has {', '.join(_TAKES[strategy])}",
            )
        if name in sizes:
            raise BadInput(f"--mesh {text}: {name} is there twice")
        if not (number.isascii() and number.isdigit()) or int(number) < 1:
            raise BadInput(
                f"--mesh {text}: {name} is {number!r}; it must be a whole number above 0",
                hint=f"--mesh {name}=2",
            )
        sizes[name] = int(number)
    if "dp" in sizes and {"replicate", "shard"} & sizes.keys():
        raise BadInput(
            f"--mesh {text}: dp is replicate x shard, so give either it or them",
            hint="--mesh replicate=2,shard=4",
        )
    return sizes
