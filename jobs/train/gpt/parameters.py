"""A model's parameters and gradients, of which each rank may hold only its part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from mesh import Mesh
from model import SHARED
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, get_total_norm


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


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> int:
    """How many parameters' Adam state this rank holds; 0 before the first step.

    Counts the state itself: parameter groups mislead, ZeRO-3 empties them between steps.
    """
    state = optimizer.state.values()
    return sum(local(entry["exp_avg"]).numel() for entry in state if "exp_avg" in entry)


def clip_gradients(parameters: Mapping[str, Tensor], clip: float, mesh: Mesh) -> Tensor:
    """The norm of the whole gradient; then scaled down to ``clip``, unless that is 0."""
    here = {name: p for name, p in parameters.items() if p.grad is not None}
    if mesh.pp * mesh.tp == 1 and not any(hasattr(p, "placements") for p in here.values()):
        if clip > 0:
            return clip_grad_norm_(here.values(), clip)
        return get_total_norm([p.grad for p in here.values() if p.grad is not None])
    # Every rank adds its own parts, each divided by the number of ranks that hold the same.
    gradients = [placed_gradient(parameter) for parameter in here.values()]
    shared = SHARED.values()  # held by the first stage and the last
    copies = [
        mesh.dp * mesh.tp // _parts(parameter) * (2 if mesh.pp > 1 and name in shared else 1)
        for name, parameter in here.items()
    ]
    total = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
    for gradient, count in zip(gradients, copies, strict=True):
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32).double()
        total += norm.square() / count
    total = total.to("cuda" if dist.get_backend() == "nccl" else "cpu")  # offloaded or not
    if mesh.size > 1:
        dist.all_reduce(total)
    norm = total.sqrt()
    if clip > 0:
        factor = (clip / (norm + 1e-6)).clamp(max=1.0).to(gradients[0].device)
        for gradient in gradients:
            gradient.mul_(factor)
    return norm


def _parts(parameter: Any) -> int:
    """Over how many ranks the elements of a parameter are divided."""
    if not hasattr(parameter, "placements"):
        return 1
    # Not `is_shard`: what FSDP makes of a sliced parameter is a shard that says it is none.
    along = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in along if not placement.is_replicate())
