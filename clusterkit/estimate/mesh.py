"""The mesh of ranks that ``--mesh`` of jobs/train/gpt describes (see its gpt_settings.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from clusterkit.errors import BadInput

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
    """The number of ranks along each dimension."""

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
        """The number of ranks."""
        return self.pp * self.dp * self.tp

    def __str__(self) -> str:
        shape = {"pp": self.pp, "replicate": self.replicate, "shard": self.shard, "tp": self.tp}
        if self.replicate == 1:
            shape = {"pp": self.pp, "dp": self.dp, "tp": self.tp}
        return ",".join(f"{name}={size}" for name, size in shape.items() if size > 1) or "dp=1"


def choose(strategy: str, text: str | None, *, ranks: int, local_ranks: int) -> Mesh:
    """Parse ``--mesh``; a dimension that is not given follows from the number of ranks.

    Raises:
        BadInput: not of that form, or the sizes do not multiply to the number of ranks.
    """
    sizes: dict[str, int] = {}
    for word in filter(None, (text or "").replace(" ", "").split(",")):
        name, _, number = word.partition("=")
        if name not in _TAKES[strategy] or not number.isdecimal() or int(number) < 1:
            takes = ", ".join(f"{dimension}=N" for dimension in _TAKES[strategy])
            raise BadInput(f"--mesh {text}: {word}: --strategy {strategy} takes {takes}")
        sizes[name] = int(number)
    if not sizes and strategy == "3d":
        raise BadInput("--strategy 3d needs --mesh", hint="on 8 ranks: --mesh pp=2,dp=2,tp=2")
    if not sizes and strategy in ("tp", "pp"):
        sizes = {strategy: local_ranks if strategy == "tp" else ranks}
    given = math.prod(sizes.values())
    rest = "shard" if strategy == "fsdp" and "dp" not in sizes else "dp"
    if rest not in sizes and ranks % given == 0:
        sizes[rest] = ranks // given
    if math.prod(sizes.values()) != ranks:
        raise BadInput(
            f"--mesh {text}: {' x '.join(f'{name} {size}' for name, size in sizes.items())} is "
            f"{math.prod(sizes.values())} ranks, not {ranks}"
        )
    mesh = Mesh(
        pp=sizes.get("pp", 1),
        replicate=sizes.get("replicate", 1),
        shard=sizes.get("shard", 1) * sizes.get("dp", 1),
        tp=sizes.get("tp", 1),
    )
    if {"tp": mesh.tp, "pp": mesh.pp, "3d": mesh.pp * mesh.tp}.get(strategy) == 1:
        raise BadInput(f"--strategy {strategy} on mesh {mesh} divides nothing", hint="more ranks")
    return mesh
