"""DeepSpeed's own pipeline: ``PipelineModule`` with 1F1B, data parallel with ZeRO-0 or ZeRO-1.

Its engine runs a whole step at once, micro batches, gradients of shared weights and the update, so
a step of ours is one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clusterkit.runtime.deepspeed import DeepSpeed
from clusterkit.runtime.gpt import cross_entropy
from clusterkit.runtime.mesh import Mesh
from clusterkit.runtime.pipeline import bubble
from clusterkit.runtime.strategy import MicroBatch, follow


class DeepSpeedPipeline(DeepSpeed):
    """A model with ``pipeline_layers``, cut into stages by DeepSpeed."""

    _mesh: Mesh

    def describe(self) -> dict[str, object]:
        count = self._engine.micro_batches
        return {
            "mesh": str(self._mesh),
            "schedule": "1f1b",
            "micro_batches": count,
            "bubble": bubble(self._mesh.pp, count),
        }

    def _train(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        loss: Tensor = self._engine.train_batch(iter(micro_batches))  # the mean over replicas too
        return loss.detach().double().mean()

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> Tensor:
        loss: Tensor = self._engine.eval_batch(iter(micro_batches))
        return loss.detach().double().mean()

    def _divided(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        from deepspeed.pipe import PipelineModule
        from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

        names = {parameter: name for name, parameter in model.named_parameters()}
        layers: list[Any] = model.pipeline_layers()  # type: ignore[operator]
        stage: nn.Module = PipelineModule(
            layers=layers,
            topology=PipeDataParallelTopology(num_pp=self._mesh.pp, num_dp=self._mesh.dp),
            loss_fn=cross_entropy,
            # Every block as heavy as every other; what stands at the ends weighs nothing.
            partition_method="type:Block",
        )
        follow(optimizer, dict(model.named_parameters()), {names[p]: p for p in stage.parameters()})
        return stage
