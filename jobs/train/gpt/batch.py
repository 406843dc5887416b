"""Batch sizes, in samples: global = micro x accumulation x ranks that see different samples."""

from __future__ import annotations

from dataclasses import dataclass

from ranks import BadInput


@dataclass(frozen=True)
class Batch:
    """The three sizes for one data-parallel size."""

    global_size: int  # of one optimizer step, over all ranks
    micro: int  # of one forward pass of one rank
    accumulation: int  # forward passes of one rank in a step
    data_parallel: int


def solve(
    *,
    data_parallel: int,
    global_size: int | None = None,
    micro: int | None = None,
    accumulation: int | None = None,
) -> Batch:
    """Work out the sizes that are missing; ``global_size`` alone means no accumulation."""
    for size in (global_size, micro, accumulation):
        if size is not None and size < 1:
            raise BadInput(f"batch: a size is {size}; it must be at least 1")
    if global_size is None:
        steps = accumulation or 1
        if micro is None:
            raise BadInput("batch: give the global or the micro batch")
        return Batch(micro * steps * data_parallel, micro, steps, data_parallel)
    ranks = f"{data_parallel} rank{'s' * (data_parallel > 1)}"
    steps = accumulation or 1
    product = (steps if micro is None else micro) * data_parallel
    if global_size % product:
        factor = "" if micro is None and steps == 1 else f"{micro or steps} x "
        below, above = (global_size // product + n for n in (0, 1))
        near = f"{below * product} or {above * product}" if below else f"{above * product}"
        raise BadInput(f"batch: global {global_size} is not a multiple of {factor}{ranks}", near)
    if micro is None:
        return Batch(global_size, global_size // product, steps, data_parallel)
    if accumulation not in (None, global_size // product):
        raise BadInput(
            f"batch: global {global_size} = micro {micro} x accumulation {accumulation} x {ranks} "
            "does not hold",
            hint=f"leave accumulation out: it is {global_size // product} on {ranks}",
        )
    return Batch(global_size, micro, global_size // product, data_parallel)
