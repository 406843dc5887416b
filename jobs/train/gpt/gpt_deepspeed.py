"""The DeepSpeed engine: ZeRO divides optimizer state (1), gradients (2) and parameters (3).

With ``tp`` in the mesh AutoTP cuts the layers, with ``pp`` DeepSpeed's ``PipelineModule`` the model
into stages. Its config is read, checked and completed before any rank waits for another: DeepSpeed
0.19 tells of most mistakes by an assertion when the engine starts.
"""

from __future__ import annotations

import argparse
import ctypes.util
import importlib.util
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from gpt_metrics import comms_table
from gpt_model import GPT
from gpt_optimizer import adamw
from gpt_parallelize import count_parameters, recompute
from gpt_ranks import BadInput, Unavailable, World
from gpt_settings import Mesh
from gpt_store import convert, load_zero
from torch import Tensor, nn
from torch.optim import Optimizer

Config = dict[str, Any]
_TELLING = ("wall_clock_breakdown", "memory_breakdown", "flops_profiler", "dump_state")
_BATCH = {
    "global_size": "train_batch_size",
    "micro": "train_micro_batch_size_per_gpu",
    "accumulation": "gradient_accumulation_steps",
}
_INCLUDES = ("/usr/include", "/usr/local/include")


class Engine:
    """What train.Training is, with a DeepSpeed engine."""

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        args: argparse.Namespace,
        config: Config,
        mesh: Mesh,
        world: World,
    ) -> None:
        deepspeed = import_deepspeed(world)
        with building(deepspeed, config, divided=args.zero_init):
            self.model = model = make_model()
        self.total = count_parameters(model)
        if args.activation_checkpointing:
            recompute(model)
        dtype, accelerator = precision(config), deepspeed.accelerator.get_accelerator()
        if dtype != "fp32" and not getattr(accelerator, f"is_{dtype}_supported")():
            raise BadInput(
                f"DeepSpeed has no {dtype} on this {world.device.type}",
                hint="use fp32, or --strategy ddp",
            )
        if any(config.get(key) for key in _TELLING):
            logging.getLogger("DeepSpeed").setLevel(logging.INFO)
        if "activation_checkpointing" in config:
            deepspeed.checkpointing.configure(mpu_=None, deepspeed_config=config)
            recompute(model, deepspeed.checkpointing.non_reentrant_checkpoint)
        self._comm = deepspeed.comm if (config.get("comms_logger") or {}).get("enabled") else None
        self._world, self._pipeline = world, mesh.pp > 1
        self._universal, self._scheduled = universal(config), "scheduler" in config
        if mesh.tp > 1:
            config = with_plan(config, isinstance(model, GPT))
        if self._pipeline:
            from gpt_pipeline import pipeline_module

            model = pipeline_module(model, mesh)
        optimizer = adamw(model, args)
        offload = config["zero_optimization"].get("offload_optimizer", {})
        if offload.get("device", "none") != "none":
            optimizer = _offloaded(optimizer, world)
            config = {**config, "zero_force_ds_cpu_optimizer": False}
        config = with_torch_adam(config, world.device.type)
        with explained():
            self.engine, *_ = deepspeed.initialize(
                model=model, config=config, dist_init_required=False, **_trained(optimizer, config)
            )
        self.optimizer = self._torch_optimizer()
        if args.compile:
            self.engine.compile()

    def step(
        self, micro_batches: Sequence[Any], rate: float
    ) -> tuple[Tensor, Tensor | float, float]:
        """As `train.Training.step`; the norm is NaN where DeepSpeed does not tell it (ZeRO-0), and
        the learning rate may be of the config's own schedule."""
        if self._scheduled:
            rate = float(self.engine.get_lr()[0])
        else:
            for group in self.engine.optimizer.param_groups:
                group["lr"] = rate
        if self._pipeline:  # a whole step, and the mean over all ranks
            loss = self.engine.train_batch(iter(micro_batches)).detach().double().mean()
        else:
            losses = []
            for micro_batch in micro_batches:
                loss = self.engine(*micro_batch)
                self.engine.backward(loss)  # divides by the accumulation steps
                self.engine.step()  # updates only after the last of them
                losses.append(loss.detach().double())
            loss = torch.stack(losses).mean()
        norm = self.engine.get_global_grad_norm()
        return loss, math.nan if norm is None else norm, rate

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Any]) -> Tensor:
        """This rank's mean loss, without a gradient."""
        if self._pipeline:
            loss: Tensor = self.engine.eval_batch(iter(micro_batches))
            return loss.detach().double().mean()
        self.engine.eval()
        losses = [self.engine(*micro_batch).double() for micro_batch in micro_batches]
        self.engine.train()
        return torch.stack(losses).mean()

    def save(self, folder: Path) -> None:
        # The folder is complete only when ours says so; DeepSpeed's `latest` would say it earlier.
        self.engine.save_checkpoint(str(folder), tag="zero", save_latest=False)

    def load(self, folder: Path) -> None:
        if self._universal:
            if self._world.is_first:
                convert(folder)
            self._world.barrier()
        load_zero(self.engine, self.optimizer, folder, universal=self._universal)

    def _torch_optimizer(self) -> Optimizer:
        """The torch optimizer at the bottom: ZeRO wraps it, once or twice; stage 0 does not."""
        optimizer = self.engine.optimizer
        while not isinstance(optimizer, Optimizer) or hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        return optimizer

    def finish(self) -> None:
        """Print what the comms logger has counted; under clusterkit also into the run's folder."""
        if self._comm is None:
            return
        counted = self._comm.log_summary(return_dict=True)
        if self._world.is_first:
            text = comms_table(counted["summary"])
            print(text, flush=True)
            if folder := os.environ.get("CLUSTERKIT_RUN_DIR"):
                (Path(folder) / "comms.txt").write_text(text + "\n")


def _offloaded(optimizer: Optimizer, world: World) -> Optimizer:
    """DeepSpeed's AdamW for CPUs, for what is offloaded from a GPU, where that compiles."""
    if world.device.type == "cpu" or not (shutil.which("c++") and shutil.which("ninja")):
        return optimizer
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    defaults = {name: optimizer.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
    replacement: Optimizer = DeepSpeedCPUAdam(optimizer.param_groups, **defaults)
    return replacement


def _trained(optimizer: Optimizer, config: Config) -> dict[str, Any]:
    """Which optimizer: the program's, or the config's over the same groups of parameters."""
    if "optimizer" not in config:
        return {"optimizer": optimizer}
    decay = config["optimizer"]["params"].get("weight_decay")
    groups = []
    for group in optimizer.param_groups:
        own = group["weight_decay"]
        own = own if decay is None or not own else decay
        groups.append({"params": group["params"], "weight_decay": own})
    return {"model_parameters": groups}


def import_deepspeed(world: World) -> Any:
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
    # It imports its Muon optimizer to compare a class, and that calls torch.compile: 3 s.
    compile_now, torch.compile = torch.compile, lambda function=None, **_: function or (lambda f: f)
    with suppress(ImportError):
        import deepspeed.runtime.zero.muon.muon_optimizer
    torch.compile = compile_now
    # DeepSpeed calls collectives by names that torch 2.13 has renamed.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # Its pipeline broadcasts losses that it has no further use for.
    warnings.filterwarnings("ignore", "c10d::broadcast_: an autograd kernel was not", UserWarning)
    logging.getLogger("DeepSpeed").setLevel(os.environ.get("LOGLEVEL", "WARNING").upper())
    if world.device.type == "cpu" and os.environ.get("CLUSTERKIT_DEEPSPEED_SHM") != "1":
        # DeepSpeed compiles a shared-memory collective at start when a compiler is there: a
        # minute, and a lock that a killed run leaves for ever. Gloo does without it.
        deepspeed.ops.__compatible_ops__ = {}
    # Its parts ask DeepSpeed's own module for the number of ranks, before the engine is there.
    deepspeed.init_distributed(dist_backend=world.backend, dist_init_required=False)
    return deepspeed


@contextmanager
def building(deepspeed: Any, config: Config, *, divided: bool) -> Iterator[None]:
    """Within, a model may be divided while it is made, so that no rank ever holds all of it."""
    if not divided:
        yield
        return
    # transformers asks for this object when it makes a model, and holds it by a weak reference.
    transformers = sys.modules.get("transformers.integrations")
    kept = transformers.HfDeepSpeedConfig(config) if transformers else None
    with deepspeed.zero.Init(config_dict_or_path=config):
        yield
    del kept


@contextmanager
def explained() -> Iterator[None]:
    """Within, what DeepSpeed finds wrong with its config is one clear error."""
    from deepspeed.runtime.config import DeepSpeedConfigError

    try:
        yield
    except (DeepSpeedConfigError, AssertionError, ImportError) as error:
        reason = str(error).strip() or type(error).__name__
        raise BadInput(f"DeepSpeed refuses its config: {reason}") from error
    except ValueError as error:
        if not hasattr(error, "errors"):
            raise
        first = error.errors()[0]  # of pydantic
        place = ".".join(map(str, first["loc"]))
        raise BadInput(
            f"DeepSpeed config, {error.title}: {place}: {first['msg']}",
            hint="see https://www.deepspeed.ai/docs/config-json/",
        ) from error


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


def strategy_name(config: Config, mesh: Mesh) -> str:
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
        "patterns": [rf".*\.{name}\.weight$" for name in ("heads_in", "expand", "gate")],
        "partition_type": "column",
    }
    plan = {"use_default_specs": False, "layer_specs": [rows, columns]}
    return config | {"tensor_parallel": section | {"partition_config": plan}}
