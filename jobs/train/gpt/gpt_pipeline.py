"""Pipeline parallel: each group of ranks holds some of the layers, micro batches flow through.

GPipe runs all forward passes, then all backward passes; 1F1B begins a micro batch's backward pass
as soon as it can, so a stage keeps the activations of as many micro batches as stages follow it
and not of all. Both leave ranks idle for the same part of a step, `gpt_settings.bubble`.

Within a stage, data and tensor parallel as in gpt_parallelize.py. Over the data dimension FSDP2
shards the optimizer state and the float32 weights as ZeRO-1 does, gathers once a step and sends
gradients once a step. ZeroRedundancyOptimizer, torch's ZeRO-1, broadcasts plain tensors and knows
no DTensors, so it could not be combined with tensor parallel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from gpt_model import GPT, SHARED, cross_entropy
from gpt_parallelize import placed_gradient
from gpt_ranks import World
from gpt_settings import Mesh
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F


class Pipeline:
    """The stages of all ranks together: a whole step of micro batches at a time."""

    def __init__(
        self,
        stage: nn.Module,
        schedule: str,
        micro_batches: int,
        mesh: Mesh,
        grid: Any,
        world: World,
    ) -> None:
        self._mesh, self._world, self._micro_batches = mesh, world, micro_batches
        self._index = mesh.stage(world.rank)
        self._group = grid["pp"].get_group()
        part = PipelineStage(stage, self._index, mesh.pp, world.device, group=self._group)
        kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
        self._schedule: Any = kind(part, micro_batches, loss_fn=self._loss, scale_grads=False)

    def backward(self, micro_batches: Sequence[Any], parameters: Mapping[str, Tensor]) -> Tensor:
        """Gradients of the mean loss of all micro batches; returns it."""
        loss = self._run(self._schedule.step, micro_batches)
        if self._index in (0, self._mesh.pp - 1):
            for name in SHARED.values():
                self._add_other_end(placed_gradient(parameters[name]))
        return loss

    def evaluate(self, micro_batches: Sequence[Any]) -> Tensor:
        return self._run(self._schedule.eval, micro_batches)

    def _run(self, schedule: Any, micro_batches: Sequence[Any]) -> Tensor:
        """The mean loss, which the last stage knows, on every stage."""
        tokens = torch.cat([tokens for tokens, _ in micro_batches])
        targets = torch.cat([targets for _, targets in micro_batches])
        losses: list[Tensor] = []
        last = self._mesh.pp - 1
        schedule(
            *([tokens] if self._index == 0 else []),
            **({"target": targets, "losses": losses} if self._index == last else {}),
            return_outputs=False,
        )
        mean = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for loss in losses:
            mean += loss.detach().double()
        dist.broadcast(mean, group=self._group, group_src=last)
        return mean

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The micro batch's part of the step's mean loss."""
        return cross_entropy(logits, targets) / self._micro_batches

    def _add_other_end(self, gradient: Tensor) -> None:
        """Add the gradient of the first or the last stage for a weight that both use.

        They send it to each other: a process group of the two, for every place in a stage, is made
        by all ranks, one after the other.
        """
        other, theirs = self._mesh.pp - 1 - self._index, torch.empty_like(gradient)
        ways = ((dist.isend, gradient), (dist.irecv, theirs))
        both = [dist.P2POp(op, part, group=self._group, group_peer=other) for op, part in ways]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        gradient += theirs


def pipeline_module(model: GPT, mesh: Mesh) -> nn.Module:
    """DeepSpeed's pipeline of our GPT, a sequence: the token embedding stands in it twice, as it
    also makes the logits."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

    def logits(token: _Given, x: Tensor) -> Tensor:
        return F.linear(x, token.module.weight)

    token = {"tied_weight_attr": "module.weight"}
    module: nn.Module = PipelineModule(
        layers=[
            TiedLayerSpec("token", _Given, model.token, **token),
            *([] if model.position is None else [LayerSpec(_AddPosition, model.position)]),
            *model.blocks.values(),
            model.norm,
            TiedLayerSpec("token", _Given, model.token, forward_fn=logits, **token),
        ],
        topology=PipeDataParallelTopology(num_pp=mesh.pp, num_dp=mesh.dp),
        loss_fn=cross_entropy,
        # Every block as heavy as every other; what stands at the ends weighs nothing.
        partition_method="type:Block",
    )
    return module


class _Given(nn.Module):
    """A module that was made before, for those who want a class to make one of."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


class _AddPosition(_Given):
    """Adds the vectors of the positions: (batch, length, width) to the same."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.module(torch.arange(x.shape[1], device=x.device))
