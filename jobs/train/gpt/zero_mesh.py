"""What a DeepSpeed config means on a mesh of ranks, and what it then must say."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

import torch
from mesh import Mesh
from ranks import BadInput

Config = dict[str, Any]


def precision(config: Mapping[str, Any]) -> str:
    """The number format that a config asks for: fp32, bf16 or fp16."""
    on = [name for name in ("bf16", "fp16") if (config.get(name) or {}).get("enabled")]
    return on[0] if on else "fp32"


def name(config: Config, mesh: Mesh) -> str:
    """What a checkpoint depends on, such as ``deepspeed zero-1 tp=2 bf16``."""
    words = ["deepspeed", f"zero-{config['zero_optimization'].get('stage', 0)}"]
    words += [f"{key}={size}" for key, size in (("pp", mesh.pp), ("tp", mesh.tp)) if size > 1]
    dtype = precision(config)
    return " ".join(words + [dtype] * (dtype != "fp32"))


def universal(config: Config) -> bool:
    """Whether checkpoints of another number of ranks are converted and loaded."""
    return bool((config.get("checkpoint") or {}).get("load_universal"))


def on_mesh(config: Config, mesh: Mesh, *, divided: bool = False) -> Config:
    """The config for a mesh; what a ZeRO stage and a mesh cannot be together is refused.

    With ``tp`` in the mesh, DeepSpeed's AutoTP cuts the layers. ``divided``: the model is built
    under ``zero.Init``, so that no rank ever holds all of it.
    """
    stage = config["zero_optimization"].get("stage", 0)
    if divided and stage != 3:
        raise BadInput(
            f"--zero-init builds a divided model, and ZeRO-{stage} has whole ones", hint="stage: 3"
        )
    if mesh.pp > 1 and stage >= 2:
        raise BadInput(
            f"--mesh pp: ZeRO-{stage} divides {'gradients' if stage == 2 else 'parameters'}, "
            "so they would travel with every micro batch of the pipeline instead of once a step",
            hint="zero_optimization.stage 1, which divides the optimizer alone",
        )
    if mesh.pp > 1 and stage == 0 and config["gradient_clipping"] > 0:
        # DeepSpeed 0.19.8 then scales each stage by the norm of its own gradient alone.
        raise BadInput(
            "--mesh pp: DeepSpeed's ZeRO-0 clips every stage of a pipeline by itself",
            hint="zero_optimization.stage 1, or gradient_clipping 0",
        )
    if mesh.pp > 1 and mesh.tp > 1:
        raise BadInput(
            "--mesh pp and tp: DeepSpeed cuts either layers or stages here",
            hint="--strategy 3d does both",
        )
    if mesh.tp > 1 and divided:
        raise BadInput("--zero-init and tp: AutoTP cuts whole layers", hint="leave one out")
    if mesh.tp == 1:
        return config
    section = dict(config.get("tensor_parallel") or {})
    if section.setdefault("autotp_size", mesh.tp) != mesh.tp:
        raise BadInput(
            f"tensor_parallel.autotp_size is {section['autotp_size']}, --mesh says tp={mesh.tp}",
            hint="leave it out of the DeepSpeed config",
        )
    # DeepSpeed 0.19 checks this number against all ranks, though slices share their samples.
    kept = {key: value for key, value in config.items() if key != "train_batch_size"}
    return kept | {"tensor_parallel": section}


def with_torch_adam(config: Config, device: str) -> Config:
    """Spare AdamW its compilation, of minutes and with a compiler, where it is no faster."""
    section = config.get("optimizer")
    if section is None or section["type"].lower() not in ("adam", "adamw"):
        return config
    params = {"torch_adam": not (device == "cuda" and _compiles()), **section["params"]}
    return {**config, "optimizer": {**section, "params": params}}


def _compiles() -> bool:
    """Whether the nvcc that DeepSpeed takes is of the CUDA that torch is built for."""
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is None or shutil.which("ninja") is None or torch.version.cuda is None:
        return False
    try:
        nvcc = [f"{CUDA_HOME}/bin/nvcc", "--version"]
        said = subprocess.run(nvcc, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    release = re.search(r"release ([0-9]+\.[0-9]+)", said)
    return release is not None and release[1] == ".".join(torch.version.cuda.split(".")[:2])


def with_plan(config: Config, own: bool) -> Config:
    """How AutoTP cuts our GPT, if the config does not say; it looks at other models itself.

    The vocabulary stays whole: AutoTP slices no embedding.
    """
    section = config["tensor_parallel"]
    if "partition_config" in section or not own:
        return config
    rows = {"patterns": [r".*\.output\.weight$"], "partition_type": "row"}
    columns = {
        "patterns": [r".*\.heads_in\.weight$", r".*\.expand\.weight$"],
        "partition_type": "column",
    }
    plan = {"use_default_specs": False, "layer_specs": [rows, columns]}
    return config | {"tensor_parallel": section | {"partition_config": plan}}
