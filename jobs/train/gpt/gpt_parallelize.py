"""How a model is cut over the ranks by torch's own tools, on one DeviceMesh.

In the order in which it happens: tensor parallel cuts every layer over the ranks of ``tp``, which
all see the same samples; activation checkpointing and torch.compile go around what is left of a
layer; FSDP2 (``fully_shard``) cuts every parameter over the ranks of ``shard``, gathers a layer
just before it is needed, and copies the result over ``replicate`` (HSDP), or DDP copies the model.
Parameters become DTensors, which know where their parts lie. Stages are in gpt_pipeline.py, ZeRO in
gpt_deepspeed.py.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from gpt_model import SHARED
from gpt_ranks import BadInput
from gpt_settings import Mesh
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def parallelize(
    model: nn.Module,
    args: argparse.Namespace,
    mesh: Mesh,
    grid: Any,
    dtype: str,
    device: torch.device,
    whole: nn.Module,
) -> nn.Module:
    """A model, or a stage of the ``whole`` one, on its device and cut as ``args`` say; ``grid`` is
    the mesh's."""
    empty = any(parameter.is_meta for parameter in model.parameters())
    place = partial(materialize, model, whole) if empty else model.to
    if args.strategy != "ddp":
        # torch 2.13's own FSDP and checkpoints call collectives by names that it has deprecated.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        # It warns of changing a layer's output in place, which no model here does.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    if mesh.tp > 1:
        slice_layers(model, grid["tp"], sequence=args.sequence_parallel)
    if args.activation_checkpointing:
        recompute(model)
    if args.compile:
        compile(model, args.strategy)
    if uses_fsdp(args, mesh):
        shard(model, args, mesh, grid, dtype)
    if empty or not uses_fsdp(args, mesh):
        place(torch.device("cpu") if args.offload else device)
    if args.strategy == "ddp" and mesh.size > 1:
        gpus = [device] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=gpus, gradient_as_bucket_view=True)
    return model


def device_mesh(mesh: Mesh, device: torch.device) -> Any:
    """All ranks, the dimension of the most talk innermost."""
    from torch.distributed.device_mesh import init_device_mesh

    sizes = (mesh.pp, mesh.replicate, mesh.shard, mesh.tp)
    return init_device_mesh(device.type, sizes, mesh_dim_names=("pp", "replicate", "shard", "tp"))


def slice_layers(model: Any, grid: Any, *, sequence: bool) -> None:
    """Tensor parallel over a mesh of one dimension."""
    from torch.distributed.tensor.parallel import parallelize_module

    # Every rank has the same weights already: nothing to send.
    parallelize_module(model, grid, tensor_plan(model, sequence=sequence), src_data_rank=None)
    if hasattr(model, "tie"):
        model.tie()


def tensor_plan(model: Any, *, sequence: bool) -> dict[str, Any]:
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
    for name in model.blocks:
        block = f"blocks.{name}"
        plan |= {
            f"{block}.attention.heads_in": ColwiseParallel(input_layouts=between),
            f"{block}.attention.output": RowwiseParallel(output_layouts=between),
            f"{block}.expand": ColwiseParallel(input_layouts=between),
            f"{block}.output": RowwiseParallel(output_layouts=between),
        }
        if model.shape.llama:
            plan[f"{block}.gate"] = ColwiseParallel(input_layouts=between)
        if sequence:
            plan[f"{block}.attention_norm"] = SequenceParallel(use_local_output=True)
            plan[f"{block}.perceptron_norm"] = SequenceParallel(use_local_output=True)
    if sequence:
        names = list(model.blocks)
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
    if model.token is not None:
        plan["token"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    if model.head is not None:
        plan["head"] = ColwiseParallel(output_layouts=Replicate())
    return plan


def recompute(model: nn.Module, checkpoint: Callable[..., Any] | None = None) -> None:
    """Keep only the inputs of a model's layers, and compute the rest again on the way back.

    Chen et al. 2016, https://arxiv.org/abs/1604.06174. Less memory for one more forward pass.
    ``checkpoint`` is called as ``checkpoint(layer, x)``; torch's own by default.
    """
    inner: Any = getattr(model, "model", None)
    if hasattr(model, "recompute"):
        torch_own = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
        vars(model)["recompute"] = checkpoint or torch_own
    elif hasattr(inner, "gradient_checkpointing_enable"):
        inner.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        raise BadInput(f"activation checkpointing: {type(model).__name__} has no layers for it")


def compile(model: nn.Module, strategy: str) -> None:
    """torch.compile in place, so that no name changes: the whole model where every rank has all of
    it, else layer by layer, between which FSDP gathers and pipelines send."""
    for module in [model] if strategy == "ddp" else layers(model):
        vars(module)["forward"] = torch.compile(module.forward)


def uses_fsdp(args: argparse.Namespace, mesh: Mesh) -> bool:
    return args.strategy == "fsdp" or (args.strategy != "ddp" and mesh.dp > 1)


def shard(model: nn.Module, args: argparse.Namespace, mesh: Mesh, grid: Any, dtype: str) -> None:
    """FSDP2 over ``shard``; copied over ``replicate``, if that is above 1."""
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    low, on_gpu, reshard = DTYPES[dtype], grid.device_type == "cuda", args.reshard_after_forward
    options: dict[str, Any] = {
        "mesh": grid["replicate", "shard"] if mesh.replicate > 1 else grid["shard"],
        # Free a layer's gathered parameters after its forward pass (ZeRO-3), or only after its
        # backward pass (more memory, one all-gather less). A pipeline would gather them again for
        # every micro batch.
        "reshard_after_forward": mesh.pp == 1 if reshard is None else reshard,
        "mp_policy": MixedPrecisionPolicy()
        if dtype == "fp32"
        else MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if args.offload else OffloadPolicy(),
    }
    for layer in layers(model):
        fully_shard(layer, **options)
    fully_shard(model, **options)


def layers(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of a model: the members of its largest list of modules."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.ModuleDict) and len(m)]
    return list(max(lists, key=count_parameters).children()) if lists else []


def autocast(
    args: argparse.Namespace, mesh: Mesh, device: torch.device, dtype: str
) -> AbstractContextManager[Any]:
    """Within, compute in ``dtype``: float32 is what torch does anyway, FSDP gathers in it."""
    if dtype == "fp32" or uses_fsdp(args, mesh):
        return nullcontext()
    return torch.autocast(device.type, DTYPES[dtype])


def whole_shape(parameter: Tensor) -> torch.Size:
    """The shape of a parameter before ZeRO-3 has divided it."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def count_parameters(model: nn.Module) -> int:
    """All parameters of a model, shared ones once; divided ones as if they were whole."""
    return sum(math.prod(whole_shape(parameter)) for parameter in model.parameters())


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@torch.no_grad()
def materialize(model: Any, whole: Any, device: torch.device) -> None:
    """Give a model that was made and cut without memory (``meta``) the weights of one with it.

    Every parameter of ``whole``, of which ``model`` may be a stage, is drawn whole on the CPU in
    the order in which it was made, so that the numbers are the same, and a rank keeps its part.
    """
    model.to_empty(device=device)
    if hasattr(model, "tie") and model.head.weight is not model.token.weight:
        model.tie()
    for place, module in whole.named_modules():
        own = dict(module.named_parameters(recurse=False))
        for name, parameter in own.items():
            drawn = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
            module.register_parameter(name, drawn)
        if own:
            module.reset_parameters()
        for name, parameter in own.items():
            drawn = getattr(module, name)
            module.register_parameter(name, parameter)
            called = f"{place}.{name}"
            if called in SHARED:
                continue  # it has the other's numbers
            others = [whole.get_parameter(n) for n, first in SHARED.items() if first == called]
            for held in (parameter, *others):
                if held.device.type != "meta":
                    local(held).copy_(_part(drawn, held))


def _part(tensor: Tensor, like: Any) -> Tensor:
    """Of a whole tensor what this rank holds of ``like``."""
    if not hasattr(like, "placements"):
        return tensor
    # Where two have cut the same dimension, the inner one was first: tensor parallel, then FSDP.
    mesh = like.device_mesh
    cuts = [*zip(like.placements, mesh.shape, mesh.get_coordinate(), strict=True)]
    for placement, size, number in reversed(cuts):
        if not placement.is_replicate():
            length = tensor.shape[placement.dim]
            each = -(-length // size)
            first = min(number * each, length)
            tensor = tensor.narrow(placement.dim, first, min(each, length - first))
    return tensor


def send_gradients(model: Any, now: bool) -> None:
    """Whether the next backward pass averages the gradients, which once a step suffices."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = now
    elif hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(now)


def reshard(model: nn.Module) -> None:
    """Free what FSDP has gathered, which only a backward pass would do."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def placed_gradient(parameter: Tensor) -> Tensor:
    """This rank's part of a gradient, summed where torch has left the sum open.

    The weight of a norm that saw a slice of the sequence, and a sliced embedding, have such
    gradients.
    """
    gradient: Any = parameter.grad
    placements = getattr(parameter, "placements", None)
    if placements is not None and gradient.placements != placements:
        gradient = gradient.redistribute(placements=placements)
        parameter.grad = gradient
    return local(gradient)


def named_parameters(model: nn.Module) -> dict[str, Tensor]:
    """This rank's parameters by names that no mesh changes."""
    # In the last stage of a pipeline the output layer alone holds the weight that it shares.
    return {SHARED.get(name, name): p for name, p in model.named_parameters()}


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds besides parameters."""
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}
