"""What makes a step fast, and says how fast it was: fused AdamW, torch.compile, MFU, a profile."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from parallelize import layers
from parameters import whole_shape
from ranks import Unavailable
from torch import nn
from world import World

PEAKS = {
    # GB300 and GB200 NVL72, HGX B200: 5, 5 and 4.5 petaFLOPS of a GPU with sparsity
    "NVIDIA GB300": 2500e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA B200": 2250e12,
    # H200, H100, GH200: 1,979 (SXM, Grace Hopper), 1,671 (NVL) and 1,513 (PCIe) with sparsity
    "NVIDIA H200": 989.4e12,
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA GH200 120GB": 989.4e12,
    "NVIDIA GH200 480GB": 989.4e12,
    "NVIDIA GH200 144G HBM3e": 989.4e12,
    # A100, A800, A30, A40, A10: these print the dense figure first
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A800-SXM4-80GB": 312e12,
    "NVIDIA A800 80GB PCIe": 312e12,
    "NVIDIA A30": 165e12,
    "NVIDIA A40": 149.7e12,
    "NVIDIA A10": 125e12,
    # L40S and L40 (dense first), L4 (242 with sparsity)
    "NVIDIA L40S": 362.05e12,
    "NVIDIA L40": 181.05e12,
    "NVIDIA L4": 121e12,
    # Whitepapers of RTX Blackwell, Ada and GA102: "BF16 Tensor TFLOPS with FP32 Accumulate"
    "NVIDIA GeForce RTX 5090": 209.5e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA RTX A6000": 154.8e12,
}
"""Dense bf16 and fp16 FLOP/s by the whole name that torch and nvidia-smi give a GPU: of a part of
it, "L4" would be an L40S, and a MIG slice or a laptop's chip a whole card. The names are those of
NVIDIA's driver (github.com/NVIDIA/open-gpu-kernel-modules, README.md), the figures those of
NVIDIA's data sheets, most of which print twice as much, "with sparsity"."""


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


def compile(model: nn.Module, strategy: str) -> None:
    """torch.compile in place, so that no name changes: the whole model where every rank has all of
    it, else layer by layer, between which FSDP gathers and pipelines send."""
    for module in [model] if strategy == "ddp" else layers(model):
        vars(module)["forward"] = torch.compile(module.forward)


def check_compiler(device: torch.device) -> None:
    """torch.compile writes C++ on CPUs; on GPUs it is Triton that does, and needs a C compiler."""
    cpu = device.type == "cpu"
    names = (
        (os.environ.get("CXX"), "g++", "clang++") if cpu else (os.environ.get("CC"), "gcc", "cc")
    )
    if not any(name and shutil.which(name) for name in names):
        raise Unavailable(
            f"--compile needs a {'C++' if cpu else 'C'} compiler, and there is none on this node",
            hint=f"apt-get install {'g++' if cpu else 'gcc'}, or leave --compile out",
        )
    if not cpu and importlib.util.find_spec("triton") is None:
        raise Unavailable("--compile needs Triton on a GPU", hint="pip install triton")


class Meter:
    """What the GPUs did of what they could: nothing on CPUs. Made by all ranks together."""

    def __init__(
        self, facts: Mapping[str, Any], parameters: int, context: int, dtype: str, world: World
    ) -> None:
        self._gpu = world.device.type == "cuda"
        self._most = None  # tokens per second
        if self._gpu and dtype != "fp32":
            names = world.gather(torch.cuda.get_device_name(world.device))
            if all(name in PEAKS for name in names):
                most = sum(PEAKS[name] for name in names)
                self._most = most / flops_per_token(facts, parameters, context)

    def measured(self, tokens_per_second: float) -> dict[str, float]:
        """For the metrics line: MFU, of 1, and the most memory that was ever allocated on this
        rank's GPU, in bytes."""
        if not self._gpu:
            return {}
        memory = {"peak_memory": torch.cuda.max_memory_allocated()}
        return memory if self._most is None else {"mfu": tokens_per_second / self._most, **memory}


def flops_per_token(facts: Mapping[str, Any], parameters: int, context: int) -> float:
    """Of the forward and the backward pass: 6 N + 12 L H Q T.

    Chowdhery et al. 2022 (PaLM), https://arxiv.org/abs/2204.02311, appendix B. N: parameters,
    without position embeddings, which multiply nothing; L layers of H Q = width over T tokens. What
    is computed twice (activation checkpointing) counts once. Where the layers are not known: 6 N.
    """
    layers, width = facts.get("layers", 0), facts.get("width", 0)
    return 6.0 * (parameters - facts.get("context", 0) * width) + 12.0 * layers * width * context


def profiler(folder: str | None, rank: int) -> Any:
    """A context whose ``step`` ends a step: traces the fourth to the sixth into ``folder``.

    Open the files in https://ui.perfetto.dev or chrome://tracing.
    """
    if folder is None:
        return nullcontext()
    Path(folder).mkdir(parents=True, exist_ok=True)
    file = str(Path(folder, f"rank-{rank}.json"))
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=2, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda trace: trace.export_chrome_trace(file),
    )
