"""Distributed data parallel: the whole model on every rank, gradients averaged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from strategy import (
    MicroBatch,
    Recipe,
    Strategy,
    autocast,
    count_parameters,
    mean_loss,
    set_learning_rate,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, get_total_norm
from world import World


def recipe(*, dtype: str, clip: float) -> Recipe:
    """DDP with these settings; see ``DDP`` for their meaning."""
    return Recipe(DDP.name, dtype, partial(DDP, dtype=dtype, clip=clip))


class DDP(Strategy):
    """Data parallel training with torch's own tools.

    Args:
        model: the same weights on every rank (same seed); moved to the world's device.
        optimizer: over the model's parameters.
        dtype: fp32; bf16 and fp16 compute in autocast and keep float32 weights.
        clip: largest gradient norm; 0 for no clipping.
    """

    name = "ddp"
    any_world_size = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        *,
        dtype: str = "fp32",
        clip: float = 0.0,
    ) -> None:
        self.parameters = count_parameters(model)
        self._model = model.to(world.device)
        self._optimizer = optimizer
        self._world = world
        self._dtype = dtype
        self._clip = clip
        self._scaler = torch.amp.GradScaler(world.device.type, enabled=dtype == "fp16")
        self._ddp = DistributedDataParallel(
            model,
            device_ids=[world.device] if world.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )

    def step(
        self, micro_batches: Sequence[MicroBatch], learning_rate: float
    ) -> tuple[Tensor, float | None]:
        last, losses = len(micro_batches) - 1, []
        for index, (tokens, targets) in enumerate(micro_batches):
            # The gradients travel once per step, with the last micro batch.
            with nullcontext() if index == last else self._ddp.no_sync():
                loss = self._forward(self._ddp, tokens, targets)
                self._scaler.scale(loss / len(micro_batches)).backward()
            losses.append(loss)
        self._scaler.unscale_(self._optimizer)
        norm = self._clip_gradients()
        set_learning_rate(self._optimizer, learning_rate)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        return mean_loss(losses), norm

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> Tensor:
        self._model.eval()
        losses = [self._forward(self._model, *micro_batch) for micro_batch in micro_batches]
        self._model.train()
        return mean_loss(losses)

    def save(self, folder: Path) -> None:
        if self._world.is_first:
            state = {
                "model": self._model.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "scaler": self._scaler.state_dict(),
            }
            torch.save(state, folder / "state.pt")

    def load(self, folder: Path) -> None:
        state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])

    def _forward(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        with autocast(self._world.device, self._dtype):
            loss: Tensor = model(tokens, targets)
        return loss

    def _clip_gradients(self) -> float:
        parameters = [p for p in self._model.parameters() if p.grad is not None]
        if self._clip > 0:
            return float(clip_grad_norm_(parameters, self._clip))
        return float(get_total_norm([p.grad for p in parameters if p.grad is not None]))
