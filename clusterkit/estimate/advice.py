"""Compare the strategies for a number of GPUs: which fit, and which one to choose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from clusterkit.errors import pluralize
from clusterkit.estimate.memory import Memory, largest_micro, predict
from clusterkit.estimate.mesh import Mesh
from clusterkit.estimate.setup import Model, Setup
from clusterkit.estimate.units import gib

RECOMPUTE = " recompute"
"""Ends the name of a variant with activation checkpointing that the job does not have."""
MOST_RANKS = 4096
"""The largest number of GPUs that is suggested."""

_WHY = {
    "ddp": "it sends least: one all-reduce of the gradients a step",
    "zero0": "it sends least: one all-reduce of the gradients a step",
    "zero1": "it sends no more than ddp does, and divides the optimizer's state",
    "zero2": "it sends no more than ddp does, and divides gradients and optimizer state",
    "fsdp": "it divides everything, for half as much traffic again as ddp",
    "zero3": "it divides everything, for half as much traffic again as ddp",
    "tp": "it divides every layer inside a node, activations too",
    "pp": "it divides the layers and sends only activations between the stages",
    "3d": "it divides layers, slices and data; the way for models too large for the others",
    "zero2 offload": "the optimizer works in host memory, slowly; nothing without offload fits",
    "zero3 offload": "weights and optimizer lie in host memory, slowly; nothing else fits",
}


CUTS = ("tp", "pp", "3d")
"""Strategies that a trainer has for models that it can cut."""


class Row(Memory, frozen=True, kw_only=True):
    """One strategy; sizes in bytes, of the GPU that needs most."""

    strategy: str
    mesh: str
    own: bool
    """Whether it is the job's own strategy."""
    micro_batch: int
    accumulation: int
    fits: bool | None
    """None if the memory of the GPUs is not known."""
    largest_micro_batch: int | None
    host_fits: bool | None = None


class Advice(Struct, frozen=True, kw_only=True):
    """The strategy to choose, with the reason; None if nothing fits, with what would."""

    strategy: str | None
    reason: str


def label(setup: Setup, own: Setup | None = None) -> str:
    """Return the name of a strategy with its variant.

    Args:
        own: the job's; what it recomputes anyway is no variant.
    """
    name = setup.strategy
    if setup.offload_optimizer:
        name += " offload"
    if setup.strategy == "fsdp" and not setup.reshard:
        name += " no reshard"
    if own is not None and setup.recompute and not own.recompute:
        name += RECOMPUTE
    return name


def alternatives(model: Model, own: Setup, ranks: int) -> Iterator[Setup]:
    """Yield the strategies to compare with the job's own, fastest first."""
    local = own.local_ranks
    data = Mesh(shard=ranks)
    plain = replace(
        own, sequence=False, reshard=True, offload_optimizer=False, offload_parameters=False
    )
    whole = own.micro * own.accumulation * own.mesh.dp

    def on(strategy: str, mesh: Mesh, **changes: Any) -> Setup:
        accumulation = max(1, whole // (own.micro * mesh.dp))
        return replace(plain, strategy=strategy, mesh=mesh, accumulation=accumulation, **changes)

    yield on("ddp", data)
    if ranks > 1:
        yield on("zero1", data)
        yield on("zero2", data)
        yield on("fsdp", data)
        yield on("zero3", data)
        yield from (on(name, mesh) for name, mesh in _cuts(model, ranks, local))
    yield on("zero2", data, offload_optimizer=True)
    yield on("zero3", data, offload_optimizer=True, offload_parameters=True)


def recomputing(setups: Iterable[Setup], *, offload: bool) -> list[Setup]:
    """Return the variants with activation checkpointing of those with or without offload."""
    chosen = [setup for setup in setups if setup.offload_optimizer is offload]
    return [replace(setup, recompute=True) for setup in chosen if not setup.recompute]


def _cuts(model: Model, ranks: int, local: int) -> Iterator[tuple[str, Mesh]]:
    """Yield meshes of tensor parallel ranks inside a node and pipeline stages across nodes."""
    if model.measured:  # what a rank saves of a slice is not known
        return
    slices = [n for n in range(2, local + 1) if local % n == 0 and model.heads % n == 0]
    stages = [n for n in range(2, ranks + 1) if ranks % n == 0 and n <= model.layers]
    if slices:
        yield "tp", Mesh(tp=slices[-1], shard=ranks // slices[-1])
    across = [n for n in stages if n >= ranks // local]
    if across:
        yield "pp", Mesh(pp=across[0], shard=ranks // across[0])
    for tp in reversed(slices):
        fitting = [n for n in stages if ranks % (n * tp) == 0 and ranks // (n * tp) > 1]
        if fitting:
            yield "3d", Mesh(pp=fitting[0], tp=tp, shard=ranks // (fitting[0] * tp))
            return


def row(
    model: Model,
    setup: Setup,
    own: Setup,
    *,
    is_own: bool,
    limit: int | None,
    host_limit: int | None,
) -> Row:
    """Return one row of the table.

    Args:
        own: the job's setup, or what stands in for it.
        is_own: whether this is the row of the job as it is written.
        limit: memory of a GPU in bytes; None: unknown.
        host_limit: memory of a node in bytes; None: unknown.
    """
    memory = predict(model, setup)
    host_fits = None if host_limit is None else memory.host_per_node <= host_limit
    return Row(
        **asdict(memory),
        strategy=label(setup, own),
        mesh=str(setup.mesh),
        own=is_own,
        micro_batch=setup.micro,
        accumulation=setup.accumulation,
        fits=None if limit is None else memory.total <= limit and host_fits is not False,
        largest_micro_batch=None if limit is None else largest_micro(model, setup, limit),
        host_fits=host_fits,
    )


def choose(model: Model, setups: list[Setup], rows: list[Row], limit: int) -> Advice:
    """Choose the fastest strategy that fits, or say what would make one fit."""
    order = list(_WHY)
    pairs = zip(setups, rows, strict=True)
    known = [pair for pair in pairs if pair[1].strategy.removesuffix(RECOMPUTE) in _WHY]

    def preference(pair: tuple[Setup, Row]) -> tuple[bool, bool, bool, int]:
        """Offload last, as it is slow; what another trainer may not have only behind the rest."""
        setup, line = pair
        plain = line.strategy.removesuffix(RECOMPUTE)
        cut = plain in CUTS and not model.divisible
        return setup.offload_optimizer, cut, plain != line.strategy, order.index(plain)

    known.sort(key=preference)
    line = next((line for _, line in known if line.fits), None)
    if line is not None:
        plain = line.strategy.removesuffix(RECOMPUTE)
        where = f" ({line.mesh})" if plain in CUTS else ""
        again = ""
        if plain != line.strategy:
            again = "; activation checkpointing computes each layer's forward pass twice"
        return Advice(
            strategy=line.strategy,
            reason=f"{line.strategy}{where}: {gib(line.total)} of {gib(limit)} GiB"
            f"{_host(line.host_per_node)}, and {_WHY[plain]}{again}",
        )
    smallest = min(rows, key=lambda line: line.total)
    short = (
        f"nothing fits: {smallest.strategy} needs least, {gib(smallest.total)} of {gib(limit)} GiB"
    )
    changes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("a micro batch of 1", {"micro": 1}),
        ("a micro batch of 1 with activation checkpointing", {"micro": 1, "recompute": True}),
    )
    for what, change in changes:
        for setup, other in known:
            needs = predict(model, replace(setup, **change))
            if needs.total <= limit and other.host_fits is not False:
                return Advice(
                    strategy=label(setup),
                    reason=f"{short}; {label(setup)} with {what} would: {gib(needs.total)} GiB"
                    f"{_host(needs.host_per_node)}",
                )
    return Advice(strategy=None, reason=f"{short}; {_gpus_needed(model, setups[0], limit)}")


def _host(size: float) -> str:
    return f" and {gib(size)} GiB of each node's own memory" if size else ""


def _gpus_needed(model: Model, own: Setup, limit: int) -> str:
    """Say how many GPUs would be enough."""
    ranks = 2 * max(1, own.mesh.size)
    while ranks <= MOST_RANKS:
        setup = replace(
            own, strategy="fsdp", mesh=Mesh(shard=ranks), micro=1, accumulation=1, recompute=True,
            reshard=True, offload_optimizer=False, offload_parameters=False,
        )  # fmt: skip
        if predict(model, setup).total <= limit:
            return (
                f"fsdp on {pluralize(ranks, 'GPU')} would, with a micro batch of 1 and "
                "activation checkpointing"
            )
        ranks *= 2
    return f"not even fsdp on {MOST_RANKS:,} GPUs would"
