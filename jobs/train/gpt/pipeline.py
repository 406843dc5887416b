"""Pipeline parallel: each group of ranks holds some of the layers, micro batches flow through.

GPipe runs all forward passes, then all backward passes; 1F1B begins a micro batch's backward pass
as soon as it can, so a stage keeps the activations of as many micro batches as stages follow it
and not of all. Both leave ranks idle for the same part of a step, `bubble`.

Within a stage, data and tensor parallel as in `sharded`. Over the data dimension FSDP2 shards the
optimizer state and the float32 weights as ZeRO-1 does, gathers once a step and sends gradients
once a step. ZeroRedundancyOptimizer, torch's ZeRO-1, broadcasts plain tensors and knows no
DTensors, so it could not be combined with tensor parallel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from model import cross_entropy
from parallelize import Settings, placed_gradient
from sharded import Sharded
from strategy import MicroBatch, mean_loss
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from world import World

_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def bubble(stages: int, micro_batches: int) -> float:
    """The part of a step in which a rank waits: (p - 1) / (m + p - 1).

    Huang et al. 2019 (GPipe), https://arxiv.org/abs/1811.06965, section 2.3. It takes all stages
    to be equally long and sending to be free.
    """
    return (stages - 1) / (micro_batches + stages - 1)


class Pipeline(Sharded):
    """A model with ``stage(index, stages)``, cut into as many stages as the mesh has."""

    def __init__(
        self, settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer, world: World
    ) -> None:
        stages = settings.mesh.pp
        self._stage = settings.mesh.stage(world.rank)
        holders = [{p for p in model.stage(index, stages).parameters()} for index in range(stages)]
        whole = {name: p for name, p in model.named_parameters()}
        super().__init__(settings, model, optimizer, world)
        self._group = self._mesh["pp"].get_group()
        self._holders = {
            name: [index for index, held in enumerate(holders) if parameter in held]
            for name, parameter in whole.items()
        }
        self._shared_groups = self._make_shared_groups()
        part = PipelineStage(self._module, self._stage, stages, world.device, group=self._group)
        self._schedule = _SCHEDULES[settings.schedule](
            part, settings.micro_batches, loss_fn=self._loss, scale_grads=False
        )

    def describe(self) -> dict[str, object]:
        stages, micro_batches = self._settings.mesh.pp, self._settings.micro_batches
        return super().describe() | {
            "schedule": self._settings.schedule,
            "micro_batches": micro_batches,
            "bubble": bubble(stages, micro_batches),
        }

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> Tensor:
        with self._evaluating():
            return self._run(self._schedule.eval, list(micro_batches))

    def _cut(self, model: nn.Module) -> nn.Module:
        stage: nn.Module = model.stage(self._stage, self._settings.mesh.pp)
        return stage

    def _backward(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        loss = self._run(self._schedule.step, micro_batches)
        self._add_shared_gradients()
        return loss

    def _run(self, schedule: Any, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """The mean loss, which the last stage knows, on every stage."""
        tokens = torch.cat([tokens for tokens, _ in micro_batches])
        targets = torch.cat([targets for _, targets in micro_batches])
        last = self._settings.mesh.pp - 1
        losses: list[Tensor] = []
        with self._autocast():
            schedule(
                *([tokens] if self._stage == 0 else []),
                **({"target": targets, "losses": losses} if self._stage == last else {}),
                return_outputs=False,
            )
        mean = torch.zeros((), dtype=torch.float64, device=self._world.device)
        if losses:
            mean = mean_loss(losses) * len(micro_batches)
        dist.broadcast(mean, group=self._group, group_src=last)
        return mean

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The micro batch's part of the step's mean loss."""
        return cross_entropy(logits, targets) / self._settings.micro_batches

    def _make_shared_groups(self) -> dict[str, Any]:
        """Parameters that several stages use, with the process group of the ranks that do.

        A group is made by all ranks, also by those that are not in it.
        """
        mesh = self._settings.mesh
        groups = {}
        for name, stages in self._holders.items():
            if len(stages) == 1:
                continue
            for inner in range(mesh.dp * mesh.tp):
                ranks = [stage * mesh.dp * mesh.tp + inner for stage in stages]
                group = dist.new_group(ranks)
                if self._world.rank in ranks:
                    groups[name] = group
        return groups

    def _add_shared_gradients(self) -> None:
        """The gradient of a shared weight is the sum over the stages that use it."""
        for name, group in self._shared_groups.items():
            dist.all_reduce(placed_gradient(self._parameters[name]), group=group)

    def _copies(self, name: str, parameter: Tensor) -> int:
        return super()._copies(name, parameter) * len(self._holders[name])
