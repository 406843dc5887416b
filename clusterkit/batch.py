"""Batch arithmetic: global batch = micro batch x accumulation x data-parallel size.

The identity is the one DeepSpeed checks at start (``train_batch_size ==
train_micro_batch_size_per_gpu * gradient_accumulation_steps * world_size``).
All sizes count samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterkit.errors import BadInput, pluralize

DEEPSPEED_KEYS = {
    "global_size": "train_batch_size",
    "micro": "train_micro_batch_size_per_gpu",
    "accumulation": "gradient_accumulation_steps",
}
"""Field of `Batch` to key of a DeepSpeed config."""


@dataclass(frozen=True)
class Batch:
    """Batch sizes for one data-parallel size.

    Attributes:
        global_size: samples that one optimizer step sees, over all ranks.
        micro: samples in one forward pass of one rank.
        accumulation: forward passes of one rank per optimizer step.
        data_parallel: ranks that see different samples.
    """

    global_size: int
    micro: int
    accumulation: int
    data_parallel: int

    def deepspeed(self) -> dict[str, int]:
        """Return the three sizes as keys of a DeepSpeed config."""
        return {key: getattr(self, name) for name, key in DEEPSPEED_KEYS.items()}


def solve(
    *,
    data_parallel: int,
    global_size: int | None = None,
    micro: int | None = None,
    accumulation: int | None = None,
) -> Batch:
    """Calculate the sizes that are missing.

    ``global_size`` alone means no accumulation; ``micro`` alone or with ``accumulation`` gives the
    global size; all three must agree.

    Raises:
        BadInput: a size below 1, nothing given, or sizes that do not divide; the
            message names the nearest sizes that do.
    """
    given = {"global": global_size, "micro": micro, "accumulation": accumulation}
    for name, value in {**given, "data-parallel size": data_parallel}.items():
        if value is not None and value < 1:
            raise BadInput(f"batch: {name} is {value}; it must be at least 1", job="batch")
    if global_size is None:
        if micro is None:
            raise BadInput(
                "batch: give `global` or `micro`", hint="batch: {global: 64, micro: 8}", job="batch"
            )
        steps = accumulation or 1
        return Batch(micro * steps * data_parallel, micro, steps, data_parallel)
    if micro is not None:
        unit, product = "micro x ranks", micro * data_parallel
    else:
        steps = accumulation or 1
        unit, product = ("accumulation x ranks" if accumulation else "ranks"), steps * data_parallel
    if global_size % product:
        message, hint = _does_not_divide(global_size, micro, unit, product, data_parallel)
        raise BadInput(message, hint, job="batch")
    if micro is None:
        return Batch(global_size, global_size // product, accumulation or 1, data_parallel)
    worked_out = global_size // product
    if accumulation is not None and accumulation != worked_out:
        raise BadInput(
            f"batch: global {global_size} = micro {micro} x accumulation {accumulation} x "
            f"{pluralize(data_parallel, 'rank')} does not hold",
            hint="leave accumulation out: "
            f"it is {worked_out} on {pluralize(data_parallel, 'rank')}",
            job="batch",
        )
    return Batch(global_size, micro, worked_out, data_parallel)


def _does_not_divide(
    global_size: int, micro: int | None, unit: str, product: int, ranks: int
) -> tuple[str, str]:
    below, above = global_size // product * product, (global_size // product + 1) * product
    near = f"{below} or {above}" if below else str(above)
    what = (
        f"{unit} = {product} on {pluralize(ranks, 'rank')}" if unit != "ranks" else f"{ranks} ranks"
    )
    message = f"batch: global {global_size} is not a multiple of {what}"
    hints = [f"nearest global sizes that are: {near}"]
    if micro is not None and global_size % ranks == 0:
        fitting = _nearest_divisors(global_size // ranks, micro)
        hints.append(f"or micro {fitting} with global {global_size}")
    if unit == "ranks" or (micro is not None and global_size % micro == 0):
        hints.append(f"or {_nearest_divisors(global_size // (micro or 1), ranks)} ranks")
    return message, "; ".join(hints)


def _nearest_divisors(number: int, near: int) -> str:
    """Name the largest divisor of ``number`` up to ``near``, and the smallest above it."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    divisors = sorted({*small, *(number // d for d in small)})
    below = [d for d in divisors if d <= near]
    above = [d for d in divisors if d > near]
    return " or ".join(map(str, below[-1:] + above[:1]))
