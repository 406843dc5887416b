"""How a model is spread over the ranks. A training loop knows only this interface.

One subclass per way: ``data_parallel.DDP``, ``zero.DeepSpeed``, ``sharded.Sharded`` (FSDP2, tensor
parallel), ``pipeline.Pipeline``; each module is imported only when its strategy is asked for.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint
from ranks import BadInput
from torch import Tensor, nn
from world import World

MicroBatch = tuple[Tensor, Tensor]
"""Tokens and targets, both (micro batch, context), int64, on the rank's device."""


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Strategy(ABC):
    """A model and its optimizer, ready to train on all ranks together.

    The model is called as ``model(tokens, targets)`` and returns the mean loss, a float32 scalar.
    Every method that is not a property is collective: all ranks call it, in the same order.
    """

    name: str
    """What is written into checkpoints and the start line, such as ``ddp``."""

    parameters: int
    """How many the whole model has."""

    any_world_size: bool
    """Whether a checkpoint saved by N ranks can be loaded by M."""

    _optimizer: torch.optim.Optimizer

    replica: int | None = None
    """Which share of the global batch this rank trains on; None: as many shares as ranks."""

    def describe(self) -> dict[str, object]:
        """What else the ``start`` event tells of it, such as its mesh."""
        return {}

    @abstractmethod
    def step(
        self, micro_batches: Sequence[MicroBatch], learning_rate: float
    ) -> tuple[Tensor, float | None]:
        """Accumulate the gradients of this rank's micro batches, average over ranks, update.

        Returns:
            This rank's mean loss (float64 scalar), and the norm of the averaged gradient before
            clipping, or None where the strategy does not know it.
        """

    @abstractmethod
    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> Tensor:
        """This rank's mean loss (float64 scalar), without a gradient."""

    @abstractmethod
    def save(self, folder: Path) -> Future[Any] | None:
        """Write model and optimizer into ``folder``, which exists.

        Returns:
            None once that is done, or what tells when this rank has written its part.
        """

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Read what ``save`` wrote."""

    def own_rate(self) -> float | None:
        """The learning rate of the last step, where the strategy has a schedule of its own."""
        return None

    def finish(self) -> None:  # noqa: B027
        """After the last step: tell what was counted on the way. Collective."""

    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer at the bottom, whose state this rank holds."""
        return self._optimizer

    def optimizer_parameters(self) -> int:
        """How many parameters' Adam state this rank holds; 0 before the first step.

        Counts the state itself: parameter groups mislead, ZeRO-3 empties them between steps.
        """
        state = self.optimizer().state.values()
        return sum(local(entry["exp_avg"]).numel() for entry in state if "exp_avg" in entry)


@dataclass(frozen=True)
class Recipe:
    """A strategy whose settings were checked, to be built once the ranks have met."""

    name: str
    dtype: str  # fp32, bf16 or fp16
    build: Callable[[nn.Module, torch.optim.Optimizer, World], Strategy]
    # A context to make the model in, so that no rank ever holds all of it.
    building: Callable[[World], AbstractContextManager[Any]] = nullcontext
    converts: bool = False  # whether it can load checkpoints of another number of ranks


def count_parameters(model: nn.Module) -> int:
    """All parameters of a model, shared ones once; divided ones as if they were whole."""
    return sum(math.prod(whole_shape(parameter)) for parameter in model.parameters())


def whole_shape(parameter: Tensor) -> torch.Size:
    """The shape of a parameter before ZeRO-3 has divided it."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def recompute(model: nn.Module, checkpoint: Callable[..., Any] | None = None) -> None:
    """Keep only the inputs of a model's layers, and compute the rest again on the way back.

    Chen et al. 2016, https://arxiv.org/abs/1604.06174. Less memory for one more forward pass.

    Args:
        checkpoint: called as ``checkpoint(layer, x)``; torch's own by default.

    Raises:
        BadInput: the model has no layers that it could do this for.
    """
    inner: Any = getattr(model, "model", None)
    if hasattr(model, "recompute"):
        torch_own = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
        vars(model)["recompute"] = checkpoint or torch_own
    elif hasattr(inner, "gradient_checkpointing_enable"):
        inner.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        raise BadInput(f"activation checkpointing: {type(model).__name__} has no layers for it")


def decayed_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Parameter groups: weight decay on matrices and embeddings, none on biases and norms."""

    def small(parameter: Tensor) -> bool:
        return len(whole_shape(parameter)) < 2

    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if not small(p)], "weight_decay": weight_decay},
        {"params": [p for p in parameters if small(p)], "weight_decay": 0.0},
    ]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def follow(
    optimizer: torch.optim.Optimizer, before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> None:
    """Hand an optimizer that has not stepped yet the parameters that took the place of its own.

    Args:
        before: the model's parameters by name when the optimizer was made.
        after: this rank's, by the same names; those that other ranks hold are missing.
    """
    names = {parameter: name for name, parameter in before.items()}
    for group in optimizer.param_groups:
        here = [after[names[p]] for p in group["params"] if names[p] in after]
        group["params"] = here
        # torch's fused loops over many tensors take no mix of plain and divided ones.
        meshes = {getattr(parameter, "device_mesh", None) for parameter in here}
        if len(meshes) > 1:
            group["foreach"] = False


def autocast(device: torch.device, dtype: str) -> AbstractContextManager[Any]:
    """Within, compute in ``dtype``; float32 is what torch does anyway."""
    return nullcontext() if dtype == "fp32" else torch.autocast(device.type, DTYPES[dtype])


def mean_loss(losses: list[Tensor]) -> Tensor:
    """The mean in float64: the same whatever way the micro batches lie over the ranks."""
    return torch.stack([loss.detach().double() for loss in losses]).mean()


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Use this learning rate for the next step, in every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
