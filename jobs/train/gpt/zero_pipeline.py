"""DeepSpeed's own pipeline: ``PipelineModule`` with 1F1B, data parallel with ZeRO-0 or ZeRO-1.

Its engine runs a whole step at once, micro batches, gradients of shared weights and the update, so
a step of ours is one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from mesh import Mesh
from model import GPT, cross_entropy
from pipeline import bubble
from strategy import MicroBatch, follow
from torch import Tensor, nn
from torch.nn import functional as F
from zero import DeepSpeed


class DeepSpeedPipeline(DeepSpeed):
    """A GPT, cut into stages by DeepSpeed."""

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

    def _divided(self, model: GPT, optimizer: torch.optim.Optimizer) -> nn.Module:
        from deepspeed.pipe import PipelineModule
        from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

        names = {parameter: name for name, parameter in model.named_parameters()}
        stage: nn.Module = PipelineModule(
            layers=pipeline_layers(model),
            topology=PipeDataParallelTopology(num_pp=self._mesh.pp, num_dp=self._mesh.dp),
            loss_fn=cross_entropy,
            # Every block as heavy as every other; what stands at the ends weighs nothing.
            partition_method="type:Block",
        )
        follow(optimizer, dict(model.named_parameters()), {names[p]: p for p in stage.parameters()})
        return stage


def pipeline_layers(model: GPT) -> list[Any]:
    """The model as a sequence. The token embedding stands in it twice: it also makes the logits."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    def logits(token: Given, x: Tensor) -> Tensor:
        return F.linear(x, token.module.weight)

    token = {"tied_weight_attr": "module.weight"}
    return [
        TiedLayerSpec("token", Given, model.token, **token),
        LayerSpec(AddPosition, model.position),
        *model.blocks.values(),
        model.norm,
        TiedLayerSpec("token", Given, model.token, forward_fn=logits, **token),
    ]


class Given(nn.Module):
    """A module that was made before, for those who want a class to make one of."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


class AddPosition(Given):
    """Adds the vectors of the positions: (batch, length, width) to the same."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return x + self.module(places)
