"""DeepSpeed ZeRO: optimizer state (1), gradients (2) and parameters (3) divided over the ranks."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clusterkit.agent.eager import deferred_compile
from clusterkit.deepspeed_config import precision
from clusterkit.errors import BadInput
from clusterkit.runtime.checkpoint import file_sizes, more_than_data
from clusterkit.runtime.distributed import World
from clusterkit.runtime.mesh import Mesh
from clusterkit.runtime.strategy import (
    MicroBatch,
    Recipe,
    Strategy,
    count_parameters,
    mean_loss,
    recompute,
    set_learning_rate,
)
from clusterkit.runtime.zero_config import Config, load_config
from clusterkit.runtime.zero_files import read_as_data

__all__ = ["Config", "DeepSpeed", "load_config", "recipe"]  # copied programs call load_config here

_TELLING = ("wall_clock_breakdown", "memory_breakdown", "flops_profiler", "dump_state")


def recipe(config: Config, mesh: Mesh | None = None, *, divided: bool = False) -> Recipe:
    """ZeRO as a config from ``load_config`` describes it.

    Args:
        mesh: with ``tp`` above 1, DeepSpeed's AutoTP cuts the layers; None: all ranks are dp.
        divided: build the model under ``zero.Init``, so that no rank ever holds all of it.

    Raises:
        BadInput: ``divided`` without stage 3, the only one that divides parameters, or a mesh
            that DeepSpeed has no use for.
    """
    dtype = precision(config)
    stage = config["zero_optimization"].get("stage", 0)
    if divided and stage != 3:
        raise BadInput(
            f"--zero-init builds a divided model, and ZeRO-{stage} has whole ones", hint="stage: 3"
        )
    words = ["deepspeed", f"zero-{stage}"]
    if mesh is not None and mesh.pp > 1:
        if stage >= 2:
            raise BadInput(
                f"--mesh pp: ZeRO-{stage} divides {'gradients' if stage == 2 else 'parameters'}, "
                "so they would travel with every micro batch of the pipeline instead of once a "
                "step",
                hint="zero_optimization.stage 1, which divides the optimizer alone",
            )
        if stage == 0 and config["gradient_clipping"] > 0:
            # DeepSpeed 0.19.8 then scales each stage by the norm of its own gradient alone.
            raise BadInput(
                "--mesh pp: DeepSpeed's ZeRO-0 clips every stage of a pipeline by itself",
                hint="zero_optimization.stage 1, or gradient_clipping 0",
            )
        words.append(f"pp={mesh.pp}")
    if mesh is not None and mesh.tp > 1:
        if mesh.pp > 1:
            raise BadInput(
                "--mesh pp and tp: DeepSpeed cuts either layers or stages here",
                hint="--strategy 3d does both",
            )
        if divided:
            raise BadInput("--zero-init and tp: AutoTP cuts whole layers", hint="leave one out")
        config = _with_autotp(config, mesh)
        words.append(f"tp={mesh.tp}")
    if dtype != "fp32":
        words.append(dtype)
    name = " ".join(words)
    building = partial(_zero_init, config) if divided else nullcontext
    kind = DeepSpeed
    if mesh is not None and mesh.pp > 1:
        from clusterkit.runtime.deepspeed_pipeline import DeepSpeedPipeline

        kind = DeepSpeedPipeline
    build = partial(kind, name, config, mesh=mesh)
    return Recipe(name, dtype, build, building, _universal(config))


def _with_autotp(config: Config, mesh: Mesh) -> Config:
    section = dict(config.get("tensor_parallel") or {})
    if section.setdefault("autotp_size", mesh.tp) != mesh.tp:
        raise BadInput(
            f"tensor_parallel.autotp_size is {section['autotp_size']}, --mesh says tp={mesh.tp}",
            hint="leave it out of the DeepSpeed config",
        )
    # DeepSpeed 0.19 checks this number against all ranks, though slices share their samples.
    kept = {key: value for key, value in config.items() if key != "train_batch_size"}
    return kept | {"tensor_parallel": section}


@contextmanager
def _zero_init(config: Config, world: World) -> Iterator[None]:
    deepspeed = _import_deepspeed(world)
    # transformers asks for this object when it makes a model, and holds it by a weak reference.
    transformers = sys.modules.get("transformers.integrations")
    kept = transformers.HfDeepSpeedConfig(config) if transformers else None
    with deepspeed.zero.Init(config_dict_or_path=config):
        yield
    del kept


def _universal(config: Config) -> bool:
    return bool((config.get("checkpoint") or {}).get("load_universal"))


class DeepSpeed(Strategy):
    """Training with a DeepSpeed engine; the config says which ZeRO stage.

    Args:
        name: stage and number format, as ``recipe`` words them.
        model: the same weights on every rank; the engine moves and divides it.
        optimizer: of torch. With the optimizer offloaded from a GPU it is replaced by DeepSpeed's
            AdamW for CPUs, if that can be compiled here.
        mesh: with ``tp`` above 1 AutoTP cuts the layers, as the model's ``autotp_plan`` says.
    """

    def __init__(
        self,
        name: str,
        config: Config,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        *,
        mesh: Mesh | None = None,
    ) -> None:
        zero = config["zero_optimization"]
        self.name = name
        self._mesh = mesh
        if mesh is not None:
            self.replica = mesh.replica(world.rank)
            config = _with_plan(config, model) if mesh.tp > 1 else config
        self.parameters = count_parameters(model)
        self.any_world_size = name == "deepspeed zero-0"
        if zero.get("offload_optimizer", {}).get("device", "none") != "none":
            optimizer = _offloaded(optimizer, world)
            config = {**config, "zero_force_ds_cpu_optimizer": False}
        config = _with_torch_adam(config, world)
        deepspeed = _import_deepspeed(world)
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
        self._world = world
        self._universal = _universal(config)
        self._scheduled = "scheduler" in config
        self._rate: float | None = None
        model = self._divided(model, optimizer)
        with _explained():
            self._engine, *_ = deepspeed.initialize(
                model=model, config=config, dist_init_required=False, **_trained(optimizer, config)
            )

    def _divided(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        """The part of the model that this rank hands to the engine."""
        return model

    def describe(self) -> dict[str, object]:
        return {"mesh": str(self._mesh)} if self._mesh is not None and self._mesh.tp > 1 else {}

    def step(
        self, micro_batches: Sequence[MicroBatch], learning_rate: float
    ) -> tuple[Tensor, float | None]:
        if self._scheduled:
            self._rate = float(self._engine.get_lr()[0])
        else:
            set_learning_rate(self._engine.optimizer, learning_rate)
        loss = self._train(micro_batches)
        norm = self._engine.get_global_grad_norm()
        return loss, None if norm is None else float(norm)

    def _train(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        losses = []
        for tokens, targets in micro_batches:
            loss = self._engine(tokens, targets)
            self._engine.backward(loss)  # divides by the accumulation steps
            self._engine.step()  # updates only after the last of them
            losses.append(loss)
        return mean_loss(losses)

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
        if self._universal:
            if self._world.is_first:
                _convert(folder)
            self._world.barrier()
        groups = self.optimizer().param_groups
        settings = [{key: group[key] for key in group if key != "params"} for group in groups]
        with read_as_data():
            found, _ = self._engine.load_checkpoint(
                str(folder), tag=_CONVERTED if self._universal else "zero"
            )
        if found is None:
            raise RuntimeError("DeepSpeed finds nothing in it")
        if self._universal:
            # In stage 3 DeepSpeed 0.19.8 gives all groups the settings of the first, and all
            # parameters one and the same counter, which each of them then counts up.
            for group, own in zip(self.optimizer().param_groups, settings, strict=True):
                group.update(own)
            for state in self.optimizer().state.values():
                if isinstance(state.get("step"), Tensor):
                    state["step"] = state["step"].clone()

    def own_rate(self) -> float | None:
        return self._rate

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

    def optimizer(self) -> torch.optim.Optimizer:
        # ZeRO wraps the optimizer, once or twice; stage 0 in fp32 does not.
        optimizer = self._engine.optimizer
        while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        return optimizer


def comms_table(summary: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> str:
    """What a comms logger has counted, one line for each operation and message size.

    Args:
        summary: by operation and bytes, from ``deepspeed.comm.log_summary``.
    """
    lines = [f"{'operation':<24}{'bytes':>12}{'count':>8}{'total ms':>12}{'mean ms':>10}"]
    for operation, sizes in sorted(summary.items()):
        for size, entry in sorted(sizes.items()):
            lines.append(
                f"{operation:<24}{size:>12}{entry['count']:>8}"
                f"{entry['total_latency_ms']:>12.2f}{entry['avg_latency_ms']:>10.3f}"
            )
    return "\n".join(lines)


def _trained(optimizer: torch.optim.Optimizer, config: Config) -> dict[str, Any]:
    """Which optimizer: the program's, or the config's over the same groups of parameters."""
    if "optimizer" not in config:
        return {"optimizer": optimizer}
    params = config["optimizer"]["params"]
    decay = params.get("weight_decay")
    groups = [
        {
            "params": group["params"],
            "weight_decay": group["weight_decay"] if decay is None or not group["weight_decay"]
            else decay,
        }
        for group in optimizer.param_groups
    ]  # fmt: skip
    return {"model_parameters": groups}


def _with_torch_adam(config: Config, world: World) -> Config:
    """Spare AdamW its compilation, of minutes and with a compiler, where it is no faster."""
    section = config.get("optimizer")
    if section is None or section["type"].lower() not in ("adam", "adamw"):
        return config
    compiles = world.device.type == "cuda" and shutil.which("nvcc") and shutil.which("ninja")
    params = {"torch_adam": not compiles, **section["params"]}
    return {**config, "optimizer": {**section, "params": params}}


def _with_plan(config: Config, model: nn.Module) -> Config:
    """How to cut the model, where it says so itself and the config does not."""
    section = config["tensor_parallel"]
    if "partition_config" in section or not hasattr(model, "autotp_plan"):
        return config
    plan = model.autotp_plan()  # type: ignore[operator]
    return config | {"tensor_parallel": section | {"partition_config": plan}}


@contextmanager
def _explained() -> Iterator[None]:
    """Within, what DeepSpeed finds wrong with its config is one clear error."""
    from deepspeed.runtime.config import DeepSpeedConfigError
    from pydantic import ValidationError

    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise BadInput(
            f"DeepSpeed config, {error.title}: {place}: {first['msg']}",
            hint="see https://www.deepspeed.ai/docs/config-json/",
        ) from error
    except (DeepSpeedConfigError, AssertionError, ImportError) as error:
        reason = str(error).strip() or type(error).__name__
        raise BadInput(f"DeepSpeed refuses its config: {reason}") from error


_CONVERTED = "universal"


def _convert(folder: Path) -> None:
    """Rewrite a checkpoint so that any number of ranks can load it, beside the original.

    Done once. What has lost a file since is written anew: DeepSpeed would pass some of them over.

    Raises:
        BadInput: DeepSpeed's converter cannot; its last line tells why.
    """
    whole, sizes = folder / _CONVERTED, folder / f"{_CONVERTED}.json"
    with suppress(OSError, ValueError):
        if json.loads(sizes.read_text()) == file_sizes(whole):
            return
    draft = folder / f".{_CONVERTED}.draft"
    for leftover in (whole, draft):
        shutil.rmtree(leftover, ignore_errors=True)
    done = subprocess.run(
        [sys.executable, "-m", "clusterkit.runtime.zero_files", "--inject_missing_state",
         "--input_folder", str(folder / "zero"), "--output_folder", str(draft)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        said = done.stdout.strip().splitlines() or [f"exit code {done.returncode}"]
        reason = more_than_data(done.stdout) or said[-1]
        raise BadInput(f"checkpoint {folder} cannot be made universal: {reason}")
    sizes.write_text(json.dumps(file_sizes(draft)))
    draft.rename(whole)


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


def _offloaded(optimizer: torch.optim.Optimizer, world: World) -> torch.optim.Optimizer:
    if world.device.type == "cpu" or not (shutil.which("c++") and shutil.which("ninja")):
        return optimizer
    _import_deepspeed(world)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    defaults = {name: optimizer.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
    replacement: torch.optim.Optimizer = DeepSpeedCPUAdam(optimizer.param_groups, **defaults)
    return replacement
