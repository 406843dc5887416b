"""Training a model that `parallelize` has cut; a checkpoint of it loads on any mesh."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import shards
import torch
import torch.distributed as dist
from mesh import counted
from parallelize import Settings, device_mesh, parallelize, parts, placed_gradient
from ranks import BadInput
from strategy import (
    MicroBatch,
    Recipe,
    Strategy,
    autocast,
    count_parameters,
    follow,
    mean_loss,
    set_learning_rate,
)
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from world import World


def recipe(settings: Settings) -> Recipe:
    """FSDP2, tensor parallel or, with stages in the mesh, a pipeline with these settings."""
    if settings.dtype not in ("fp32", "bf16"):
        raise BadInput(
            f"--dtype {settings.dtype}: --strategy {settings.name} does not scale the loss",
            hint="use bf16 or fp32; ddp and deepspeed can do fp16",
        )
    kind = Sharded
    if settings.schedule == "1f1b" and settings.micro_batches < settings.mesh.pp:
        raise BadInput(
            f"--schedule 1f1b: {counted(settings.micro_batches, 'micro batch')} a step for "
            f"{settings.mesh.pp} stages",
            hint=f"a global batch of {settings.mesh.pp} micro batches or more, or --schedule gpipe",
        )
    if settings.mesh.pp > 1:
        # Only now: its imports are half a second that the others need not pay.
        from pipeline import Pipeline

        kind = Pipeline
    return Recipe(settings.name, settings.dtype, partial(kind, settings))


class Sharded(Strategy):
    """A model divided along ``shard`` and ``tp``, and copied along ``replicate``.

    The model has the same weights on every rank; the optimizer is handed the divided parameters.
    Its hyperparameters come from the program, not from a checkpoint.
    """

    any_world_size = True

    def __init__(
        self, settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer, world: World
    ) -> None:
        _quiet()
        self.name = settings.name
        self.parameters = count_parameters(model)
        self.replica = settings.mesh.replica(world.rank)
        self._settings = settings
        self._world = world
        self._optimizer = optimizer
        self._mesh = device_mesh(settings.mesh, world.device)
        before = dict(model.named_parameters())
        names = {parameter: name for name, parameter in before.items()}
        self._module = self._cut(model)
        # A module keeps its parameters' places when it is divided, so names lead to names.
        known = {name: names[p] for name, p in self._module.named_parameters()}
        parallelize(self._module, settings, self._mesh, world.device)
        self._parameters = {known[name]: p for name, p in self._module.named_parameters()}
        kept = self._module.state_dict().keys()
        self._buffers = {name: b for name, b in self._module.named_buffers() if name in kept}
        follow(optimizer, before, self._parameters)
        # Collectives of a checkpoint written in the background must not mix with those of training.
        self._background = dist.new_group(backend="gloo") if settings.asynchronous else None

    def describe(self) -> dict[str, object]:
        return {"mesh": str(self._settings.mesh)}

    def step(
        self, micro_batches: Sequence[MicroBatch], learning_rate: float
    ) -> tuple[Tensor, float | None]:
        loss = self._backward(micro_batches)
        norm = self._clip_gradients()
        set_learning_rate(self._optimizer, learning_rate)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss, norm

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> Tensor:
        with self._evaluating():
            losses = [self._forward(*micro_batch) for micro_batch in micro_batches]
        return mean_loss(losses)

    def save(self, folder: Path) -> Future[Any] | None:
        return shards.save(folder, self._state(), self._background)

    def load(self, folder: Path) -> None:
        shards.load(folder, self._parameters, self._buffers, self._optimizer)

    def _cut(self, model: nn.Module) -> nn.Module:
        """The part of the model that this rank has layers of."""
        return model

    def _backward(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Gradients of the mean loss of all micro batches, averaged over the replicas."""
        last, losses = len(micro_batches) - 1, []
        for index, (tokens, targets) in enumerate(micro_batches):
            if isinstance(self._module, FSDPModule):
                # The gradients travel once per step, with the last micro batch.
                self._module.set_requires_gradient_sync(index == last)
            loss = self._forward(tokens, targets)
            (loss / len(micro_batches)).backward()
            losses.append(loss)
        return mean_loss(losses)

    def _forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self._autocast():
            loss: Tensor = self._module(tokens, targets)
        return loss

    def _autocast(self) -> AbstractContextManager[Any]:
        """Where FSDP does not gather in bf16 anyway."""
        return autocast(
            self._world.device, "fp32" if self._settings.uses_fsdp else self._settings.dtype
        )

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self._module.eval()
        yield
        self._module.train()
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what only a backward pass would have done

    def _clip_gradients(self) -> float:
        """The norm of the whole gradient, every element counted once; then scaled down to it."""
        device = self._world.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        gradients = []
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                part = placed_gradient(parameter)
                norm = torch.linalg.vector_norm(part, dtype=torch.float32).double()
                total += norm.square().to(device) / self._copies(name, parameter)
                gradients.append(part)
        if self._world.size > 1:
            dist.all_reduce(total)
        norm_of_all = math.sqrt(total.item())
        clip = self._settings.clip
        if 0 < clip < norm_of_all:
            for gradient in gradients:
                gradient.mul_(clip / (norm_of_all + 1e-6))
        return norm_of_all

    def _copies(self, name: str, parameter: Tensor) -> int:
        """How many ranks hold the same elements of a parameter."""
        mesh = self._settings.mesh
        return mesh.dp * mesh.tp // parts(parameter)

    def _state(self) -> dict[str, Tensor]:
        return shards.state(self._parameters, self._buffers, self._optimizer)


def _quiet() -> None:
    # torch 2.13's own FSDP and checkpoints call collectives by names that it has deprecated.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # It warns of changing a layer's output in place, which no model here does.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
