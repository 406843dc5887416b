"""DeepSpeed configs: read, checked and completed before any rank waits for another.

DeepSpeed 0.19 tells of most mistakes by an assertion when the engine starts. `clusterkit submit`
refuses keys that it does not know; what only this run knows is refused here.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ranks import BadInput, Unavailable
from zero_mesh import Config, precision

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
