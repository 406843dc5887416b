"""How a model is cut over a device mesh by torch's own tools: FSDP2, HSDP, tensor, sequence.

FSDP2 (``fully_shard``) cuts every parameter over the ranks of the ``shard`` dimension, gathers a
layer just before it is needed, and copies the result over ``replicate`` (HSDP). Tensor parallel
cuts every layer over the ranks of ``tp``, which all see the same samples. Parameters become
DTensors, which know where their parts lie. The stages of a pipeline are `model.GPT.stage`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from mesh import Mesh
from strategy import DTYPES, count_parameters, local
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Settings:
    """How to divide and to train."""

    name: str  # of the strategy
    mesh: Mesh
    dtype: str = "fp32"  # or bf16, to compute and gather in; the weights stay float32
    clip: float = 0.0  # largest gradient norm; 0 for no clipping
    # Free a layer's gathered parameters after its forward pass (ZeRO-3) instead of after its
    # backward pass (more memory, one all-gather less).
    reshard: bool = True
    offload: bool = False  # keep shards, gradients and optimizer in the memory of the host
    sequence: bool = False  # divide activations between the sliced layers along the sequence
    asynchronous: bool = False  # go on training while a checkpoint is being written
    schedule: str = "1f1b"  # of the pipeline; or gpipe
    micro_batches: int = 1  # of the pipeline, in each step

    @property
    def uses_fsdp(self) -> bool:
        return self.mesh.dp > 1 or self.name == "fsdp"


def device_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """All ranks, the dimension of the most talk innermost."""
    sizes = (mesh.pp, mesh.replicate, mesh.shard, mesh.tp)
    return init_device_mesh(device.type, sizes, mesh_dim_names=("pp", "replicate", "shard", "tp"))


def parallelize(module: nn.Module, settings: Settings, mesh: DeviceMesh, device: torch.device):
    """Cut a model, or a stage of one, in place."""
    if settings.mesh.tp > 1:
        slice_layers(module, mesh["tp"], sequence=settings.sequence)
    if settings.uses_fsdp:
        shard(module, settings, mesh, device)
    else:
        module.to(device)


def shard(module: nn.Module, settings: Settings, mesh: DeviceMesh, device: torch.device) -> None:
    """FSDP2 over ``shard``; copied over ``replicate``, if that is above 1."""
    hybrid, reduced = settings.mesh.replicate > 1, settings.dtype != "fp32"
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    options: dict[str, Any] = {
        "mesh": mesh["replicate", "shard"] if hybrid else mesh["shard"],
        "reshard_after_forward": settings.reshard,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=DTYPES[settings.dtype] if reduced else None,
            reduce_dtype=torch.float32 if reduced else None,
        ),
        "offload_policy": offload if settings.offload else OffloadPolicy(),
    }
    for layer in layers(module):
        fully_shard(layer, **options)
    fully_shard(module, **options)


def slice_layers(module: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Tensor parallel over a mesh of one dimension."""
    from torch.distributed.tensor.parallel import parallelize_module

    # Every rank has the same weights already: nothing to send.
    parallelize_module(module, mesh, tensor_plan(module, sequence=sequence), src_data_rank=None)
    if hasattr(module, "tie"):
        module.tie()


def tensor_plan(module: Any, *, sequence: bool) -> dict[str, Any]:
    """Which layer of a GPT, or of a stage of one, is sliced which way.

    Megatron's cut (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3): the
    first matrix of attention and of the perceptron is cut by rows of its output, the second by
    its input, so that only the sum after the second one travels. The vocabulary is cut in the
    embedding and in the output layer. With ``sequence`` (Korthikanti et al. 2022,
    https://arxiv.org/abs/2205.05198) the norms between them see a slice of the sequence.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleInputOutput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
    )

    between = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {}
    for name in module.blocks:
        block = f"blocks.{name}"
        plan |= {
            f"{block}.attention.heads_in": ColwiseParallel(input_layouts=between),
            f"{block}.attention.output": RowwiseParallel(output_layouts=between),
            f"{block}.expand": ColwiseParallel(input_layouts=between),
            f"{block}.output": RowwiseParallel(output_layouts=between),
        }
        if sequence:
            plan[f"{block}.attention_norm"] = SequenceParallel(use_local_output=True)
            plan[f"{block}.perceptron_norm"] = SequenceParallel(use_local_output=True)
    if sequence:
        names = list(module.blocks)
        whole, sliced = Replicate(), Shard(1)
        if len(names) == 1:
            plan[f"blocks.{names[0]}"] = PrepareModuleInputOutput(
                input_layouts=whole, desired_input_layouts=sliced, use_local_input=True,
                output_layouts=sliced, desired_output_layouts=whole,
            )  # fmt: skip
        else:
            plan[f"blocks.{names[0]}"] = PrepareModuleInput(
                input_layouts=whole, desired_input_layouts=sliced, use_local_output=True
            )
            plan[f"blocks.{names[-1]}"] = PrepareModuleOutput(
                output_layouts=sliced, desired_output_layouts=whole
            )
    if module.token is not None:
        plan["token"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    if module.head is not None:
        plan["head"] = ColwiseParallel(output_layouts=Replicate())
    return plan


def layers(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of a model: the members of its largest list of modules."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.ModuleDict) and len(m)]
    if not lists:
        return []
    largest = max(lists, key=count_parameters)
    return list(largest.children())


def placed_gradient(parameter: Tensor) -> Tensor:
    """This rank's part of a gradient, summed where torch has left the sum open.

    The weight of a norm that saw a slice of the sequence, and a sliced embedding, have such
    gradients.
    """
    gradient: Any = parameter.grad
    assert gradient is not None
    if isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
        parameter.grad = gradient
    return local(gradient)


def parts(parameter: Tensor) -> int:
    """Over how many ranks the elements of a parameter are divided."""
    if not isinstance(parameter, DTensor):
        return 1
    # Not `is_shard`: what FSDP makes of a sliced parameter is a shard that says it is none.
    along = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in along if not placement.is_replicate())
