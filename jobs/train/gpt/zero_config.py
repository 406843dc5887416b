"""DeepSpeed configs: read, checked and completed before any rank waits for another.

DeepSpeed 0.19 tells of most mistakes by an assertion when the engine starts. `clusterkit submit`
refuses keys that it does not know; what only this run knows is refused here.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mesh import Mesh
from world import BadInput, Unavailable

Config = dict[str, Any]

_BATCH = {
    "global_size": "train_batch_size",
    "micro": "train_micro_batch_size_per_gpu",
    "accumulation": "gradient_accumulation_steps",
}

_INCLUDES = ("/usr/include", "/usr/local/include")


def load_config(
    path: Path | str,
    *,
    batch: Any,
    dtype: str | None = None,
    clip: float | None = None,
    schedule: Mapping[str, float] | None = None,
) -> Config:
    """Read a DeepSpeed config and complete it: what it leaves out, or calls ``auto``.

    ``dtype`` and ``clip`` None: what the config says (fp32, and 1.0 as DeepSpeed does unasked).
    ``schedule`` is what ``auto`` stands for in the optimizer and scheduler sections.
    """
    config = _read(Path(path))
    for name, key in _BATCH.items():
        _fill(config, path, key, getattr(batch, name), "the job's batch")
    if clip is not None:
        _fill(config, path, "gradient_clipping", clip, "--clip")
    config.setdefault("gradient_clipping", 1.0)
    zero = config.setdefault("zero_optimization", {})
    if not isinstance(zero, dict) or zero.get("stage", 0) not in (0, 1, 2, 3):
        raise BadInput(f"{path}: zero_optimization.stage must be 0, 1, 2 or 3, not {zero!r}")
    if dtype is not None and precision(config) != dtype:
        if precision(config) != "fp32":
            raise BadInput(
                f"{path}: {precision(config)} is enabled, but --dtype says {dtype}",
                hint="say it in one place",
            )
        config[dtype] = {**config.get(dtype, {}), "enabled": True}
    _complete_optimizer(config, path, schedule or {})
    _check_offload(config, path)
    _check_monitors(config, path)
    return config


def batch_numbers(path: Path | str) -> dict[str, int]:
    """The batch numbers that a config has, under the names that ``batch.solve`` takes."""
    config, numbers = _read(Path(path)), {}
    for name, key in _BATCH.items():
        value = config.get(key, "auto")
        if value == "auto":
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise BadInput(f"{path}: {key} is {value!r}; it must be a whole number or auto")
        numbers[name] = value
    return numbers


def _read(path: Path) -> Config:
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise BadInput(f"DeepSpeed config {path}: {error.strerror}") from None
    except ValueError as error:
        raise BadInput(f"DeepSpeed config {path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise BadInput(f"DeepSpeed config {path} must be a JSON object")
    return config


def _fill(config: Config, path: Path | str, key: str, value: float, source: str) -> None:
    if config.get(key, "auto") == "auto":
        config[key] = value
    elif config[key] != value:
        raise BadInput(
            f"{path}: {key} is {config[key]!r}, but {source} makes it {value}",
            hint=f"leave {key} out of the DeepSpeed config",
        )


def _complete_optimizer(config: Config, path: Path | str, known: Mapping[str, float]) -> None:
    """Put the program's numbers where the config says ``auto``."""
    values = {
        "optimizer": {"lr": known.get("lr"), "weight_decay": known.get("weight_decay")},
        "scheduler": {
            "warmup_max_lr": known.get("lr"),
            "warmup_num_steps": known.get("warmup"),
            "total_num_steps": known.get("steps"),
        },
    }
    for name, numbers in values.items():
        section = config.get(name)
        if section is None:
            continue
        if not isinstance(section, dict) or not isinstance(section.get("type"), str):
            hint = f'"{name}": {{"type": "...", "params": {{}}}}'
            raise BadInput(f"{path}: {name} must have a type", hint=hint)
        params = section.setdefault("params", {})
        if not isinstance(params, dict):
            raise BadInput(f"{path}: {name}.params must be an object, not {params!r}")
        for key, value in params.items():
            if value == "auto" and numbers.get(key) is None:
                raise BadInput(
                    f"{path}: {name}.params.{key} is auto, and this program does not say what",
                    hint="give a number",
                )
            if value == "auto":
                params[key] = numbers[key]
        if name == "optimizer" and numbers["lr"] is not None:
            if "scheduler" not in config and params.get("lr", numbers["lr"]) != numbers["lr"]:
                raise BadInput(
                    f"{path}: optimizer.params.lr is {params['lr']}, but the program's schedule "
                    f"goes up to {numbers['lr']}",
                    hint="--learning-rate, or a scheduler section in the config",
                )
            params.setdefault("lr", numbers["lr"])


def _check_offload(config: Config, path: Path | str) -> None:
    """NVMe needs a folder and libaio, and DeepSpeed would tell of neither in a sentence."""
    zero = config["zero_optimization"]
    for name in ("offload_optimizer", "offload_param"):
        section = zero.get(name) or {}
        if not isinstance(section, dict) or section.get("device") != "nvme":
            continue
        place = f"{path}: zero_optimization.{name}"
        if zero.get("stage") != 3:
            raise BadInput(f"{place}: only stage 3 can offload to nvme", hint="stage: 3")
        folder = section.get("nvme_path")
        if not folder:
            raise BadInput(f"{place}: nvme needs nvme_path", hint="nvme_path: /local_nvme")
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
            raise BadInput(f"{place}.nvme_path: {folder} is not a folder that can be written")
        if ctypes.util.find_library("aio") is None or not _has_header("libaio.h"):
            raise Unavailable(
                f"{place}: nvme needs libaio with its header, which are not on this node",
                hint="apt-get install libaio-dev, or offload to device: cpu",
            )


def _check_monitors(config: Config, path: Path | str) -> None:
    """Only rank 0 would notice, and the others wait for it."""
    for key, package in (("tensorboard", "tensorboard"), ("wandb", "wandb"), ("comet", "comet_ml")):
        section = config.get(key)
        wanted = isinstance(section, dict) and section.get("enabled")
        if wanted and importlib.util.find_spec(package) is None:
            raise Unavailable(
                f"{path}: {key} is enabled, and the package {package} is not on this node",
                hint=f"pip install {package}, or csv_monitor, which needs none",
            )


def _has_header(name: str) -> bool:
    given = filter(None, os.environ.get("CPATH", "").split(os.pathsep))
    return any(os.path.exists(os.path.join(folder, name)) for folder in (*given, *_INCLUDES))


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
    compiles = device == "cuda" and shutil.which("nvcc") and shutil.which("ninja")
    params = {"torch_adam": not compiles, **section["params"]}
    return {**config, "optimizer": {**section, "params": params}}


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
