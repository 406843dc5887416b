"""AdamW, its learning rate, and the norm of gradients of which each rank may hold only a part."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from gpt_model import SHARED
from gpt_parallelize import local, placed_gradient, whole_shape
from gpt_settings import Mesh
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm


def adamw(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices and embeddings, none on biases and norms."""
    groups: dict[Any, dict[str, Any]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            decay = 0.0 if len(whole_shape(parameter)) < 2 else args.weight_decay
            # torch's loops over many tensors take no mix of plain ones and those of two meshes.
            key = decay, getattr(parameter, "device_mesh", None)
            group = groups.setdefault(key, {"params": [], "weight_decay": decay})
            group["params"].append(parameter)
    rate, betas = args.learning_rate, (0.9, 0.95)
    # Fused: one kernel for all tensors, on GPUs and on CPUs.
    return torch.optim.AdamW([*groups.values()], lr=rate, betas=betas, fused=True)


def scheduled(step: int, args: argparse.Namespace) -> float:
    """The learning rate of a step: linear warm-up, then half a cosine down to a tenth."""
    peak, warmup, steps = float(args.learning_rate), int(args.warmup), int(args.steps)
    if step <= warmup:
        return peak * step / warmup
    done = (step - warmup) / (steps - warmup)
    return peak * (0.55 + 0.45 * math.cos(math.pi * done))


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
