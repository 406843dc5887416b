"""Our GPT as DeepSpeed's pipeline."""

from __future__ import annotations

import torch
from mesh import Mesh
from model import GPT, cross_entropy
from torch import Tensor, nn
from torch.nn import functional as F


def pipeline_module(model: GPT, mesh: Mesh) -> nn.Module:
    """The model as a sequence. The token embedding stands in it twice: it also makes the logits."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

    def logits(token: _Given, x: Tensor) -> Tensor:
        return F.linear(x, token.module.weight)

    token = {"tied_weight_attr": "module.weight"}
    module: nn.Module = PipelineModule(
        layers=[
            TiedLayerSpec("token", _Given, model.token, **token),
            LayerSpec(_AddPosition, model.position),
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
