"""How a model is spread over the ranks. A training loop knows only this interface.

One subclass per way: ``ddp.DDP``, ``deepspeed.DeepSpeed``; each module is imported only when its
strategy is asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from clusterkit.runtime.distributed import World

MicroBatch = tuple[Tensor, Tensor]
"""Tokens and targets, both (micro batch, context), int64, on the rank's device."""


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
    def save(self, folder: Path) -> None:
        """Write model and optimizer into ``folder``, which exists."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Read what ``save`` wrote."""

    @abstractmethod
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer at the bottom, whose state this rank holds."""

    def optimizer_parameters(self) -> int:
        """How many parameters' Adam state this rank holds; 0 before the first step.

        Counts the state itself: parameter groups mislead, ZeRO-3 empties them between steps.
        """
        state = self.optimizer().state.values()
        return sum(entry["exp_avg"].numel() for entry in state if "exp_avg" in entry)


@dataclass(frozen=True)
class Recipe:
    """A strategy whose settings were checked, to be built once the ranks have met.

    Attributes:
        name: the strategy's name.
        dtype: fp32, bf16 or fp16.
        build: makes the strategy from a model and its optimizer.
    """

    name: str
    dtype: str
    build: Callable[[nn.Module, torch.optim.Optimizer, World], Strategy]


def count_parameters(model: nn.Module) -> int:
    """All parameters of a model that is not divided yet; shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def decayed_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Parameter groups: weight decay on matrices and embeddings, none on biases and norms."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def mean_loss(losses: list[Tensor]) -> Tensor:
    """The mean in float64: the same whatever way the micro batches lie over the ranks."""
    return torch.stack([loss.detach().double() for loss in losses]).mean()


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Use this learning rate for the next step, in every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
