"""DeepSpeed ZeRO: optimizer state (1), gradients (2) and parameters (3) divided over the ranks."""

from __future__ import annotations

import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clusterkit.batch import Batch
from clusterkit.errors import BadInput
from clusterkit.runtime.distributed import World
from clusterkit.runtime.eager import deferred_compile
from clusterkit.runtime.strategy import (
    MicroBatch,
    Recipe,
    Strategy,
    count_parameters,
    mean_loss,
    set_learning_rate,
)

Config = dict[str, Any]


def load_config(
    path: Path | str, *, batch: Batch, dtype: str | None = None, clip: float | None = None
) -> Config:
    """Read a DeepSpeed config and complete it for this run.

    Args:
        path: a JSON file. Batch numbers it leaves out, or calls ``auto``, are filled in.
        batch: the sizes for the actual number of ranks.
        dtype: ``fp32``, ``bf16``, ``fp16``, or None for what the config says (fp32 if nothing).
        clip: largest gradient norm, 0 for no clipping, or None for what the config says (1.0 if
            nothing, as DeepSpeed 0.19 does unasked).

    Raises:
        BadInput: not a JSON object, or it contradicts the arguments; the message names the key.
    """
    config = _read(Path(path))
    for key, number in batch.deepspeed().items():
        _settle(config, path, key, number, "the job's batch")
    if clip is not None:
        _settle(config, path, "gradient_clipping", clip, "--clip")
    config.setdefault("gradient_clipping", 1.0)
    for section in ("optimizer", "scheduler"):
        if section in config:
            raise BadInput(
                f"{path}: `{section}` clashes with the program, which brings its own {section}",
                hint="remove it and use --learning-rate, --weight-decay, --warmup",
            )
    zero = config.setdefault("zero_optimization", {})
    if not isinstance(zero, dict) or zero.get("stage", 0) not in (0, 1, 2, 3):
        raise BadInput(f"{path}: zero_optimization.stage must be 0, 1, 2 or 3, not {zero!r}")
    if dtype is not None and config_dtype(config) != dtype:
        if config_dtype(config) != "fp32":
            raise BadInput(
                f"{path}: {config_dtype(config)} is enabled, but --dtype says {dtype}",
                hint="say it in one place",
            )
        config[dtype] = {**config.get(dtype, {}), "enabled": True}
    return config


def config_dtype(config: Config) -> str:
    """The number format that a DeepSpeed config asks for: fp32, bf16 or fp16."""
    for name in ("bf16", "fp16"):
        if isinstance(config.get(name), dict) and config[name].get("enabled"):
            return name
    return "fp32"


def recipe(config: Config) -> Recipe:
    """ZeRO as a config from ``load_config`` describes it."""
    dtype = config_dtype(config)
    name = f"deepspeed zero-{config['zero_optimization'].get('stage', 0)}"
    name = name if dtype == "fp32" else f"{name} {dtype}"
    return Recipe(name, dtype, partial(DeepSpeed, name, config))


class DeepSpeed(Strategy):
    """Training with a DeepSpeed engine; the config says which ZeRO stage.

    Args:
        name: stage and number format, as ``recipe`` words them.
        config: from ``load_config``.
        model: the same weights on every rank; the engine moves and divides it.
        optimizer: a torch optimizer over the model's parameters. With the optimizer offloaded
            from a GPU it is replaced by DeepSpeed's AdamW for CPUs, if that can be compiled here.
    """

    def __init__(
        self,
        name: str,
        config: Config,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
    ) -> None:
        zero = config["zero_optimization"]
        self.name = name
        self.parameters = count_parameters(model)
        self.any_world_size = name == "deepspeed zero-0"
        if zero.get("offload_optimizer", {}).get("device", "none") != "none":
            optimizer = _offloaded(optimizer, world)
            config = {**config, "zero_force_ds_cpu_optimizer": False}
        deepspeed = _import_deepspeed(world)
        _check_dtype(deepspeed, config_dtype(config), world)
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )

    def step(
        self, micro_batches: Sequence[MicroBatch], learning_rate: float
    ) -> tuple[Tensor, float | None]:
        set_learning_rate(self._engine.optimizer, learning_rate)
        losses = []
        for tokens, targets in micro_batches:
            loss = self._engine(tokens, targets)
            self._engine.backward(loss)  # divides by the accumulation steps
            self._engine.step()  # updates only after the last of them
            losses.append(loss)
        norm = self._engine.get_global_grad_norm()
        return mean_loss(losses), None if norm is None else float(norm)

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> Tensor:
        self._engine.eval()
        losses = [self._engine(tokens, targets) for tokens, targets in micro_batches]
        self._engine.train()
        return mean_loss(losses)

    def save(self, folder: Path) -> None:
        # The folder is complete only when ours says so; DeepSpeed's `latest` would say it earlier.
        self._engine.save_checkpoint(str(folder), tag="zero", save_latest=False)

    def load(self, folder: Path) -> None:
        self._engine.load_checkpoint(str(folder), tag="zero")

    def optimizer(self) -> torch.optim.Optimizer:
        # ZeRO wraps the optimizer, once or twice; stage 0 in fp32 does not.
        optimizer = self._engine.optimizer
        while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        return optimizer


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


def _settle(config: Config, path: Path | str, key: str, value: float, source: str) -> None:
    if config.get(key, "auto") == "auto":
        config[key] = value
    elif config[key] != value:
        raise BadInput(
            f"{path}: {key} is {config[key]!r}, but {source} makes it {value}",
            hint=f"leave {key} out of the DeepSpeed config",
        )


def _import_deepspeed(world: World) -> Any:
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)  # spares a search and a warning
    if world.device.index is not None:
        # DeepSpeed takes this for the number of the GPU; where a rank sees only one, it is not.
        os.environ["LOCAL_RANK"] = str(world.device.index)
    try:
        import deepspeed
        import deepspeed.ops
    except ImportError as error:
        raise BadInput(
            f"--strategy deepspeed needs DeepSpeed: {error}", hint="pip install deepspeed"
        ) from None
    with suppress(ImportError), deferred_compile():
        import deepspeed.runtime.zero.muon.muon_optimizer
    # DeepSpeed calls collectives by names that torch 2.13 has renamed.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(os.environ.get("LOGLEVEL", "WARNING").upper())
    if world.device.type == "cpu" and os.environ.get("CLUSTERKIT_DEEPSPEED_SHM") != "1":
        # DeepSpeed compiles a shared-memory collective at start when a compiler is there: a
        # minute, and a lock that a killed run leaves for ever. Gloo does without it.
        deepspeed.ops.__compatible_ops__ = {}
    return deepspeed


def _check_dtype(deepspeed: Any, dtype: str, world: World) -> None:
    accelerator = deepspeed.accelerator.get_accelerator()
    if dtype != "fp32" and not getattr(accelerator, f"is_{dtype}_supported")():
        raise BadInput(
            f"DeepSpeed has no {dtype} on this {world.device.type}",
            hint="use fp32, or --strategy ddp",
        )


def _offloaded(optimizer: torch.optim.Optimizer, world: World) -> torch.optim.Optimizer:
    if world.device.type == "cpu" or not (shutil.which("c++") and shutil.which("ninja")):
        return optimizer
    _import_deepspeed(world)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    defaults = {name: optimizer.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
    replacement: torch.optim.Optimizer = DeepSpeedCPUAdam(optimizer.param_groups, **defaults)
    return replacement
