"""DeepSpeed itself: imported without its surprises, and told what this program knows better."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from mesh import Mesh
from model import GPT
from ranks import BadInput
from torch import nn
from world import World
from zero_config import Config


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


def offloaded(optimizer: torch.optim.Optimizer, world: World) -> torch.optim.Optimizer:
    if world.device.type == "cpu" or not (shutil.which("c++") and shutil.which("ninja")):
        return optimizer
    import_deepspeed(world)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    defaults = {name: optimizer.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
    replacement: torch.optim.Optimizer = DeepSpeedCPUAdam(optimizer.param_groups, **defaults)
    return replacement


@contextmanager
def zero_init(config: Config, world: World) -> Iterator[None]:
    deepspeed = import_deepspeed(world)
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


def trained(optimizer: torch.optim.Optimizer, config: Config) -> dict[str, Any]:
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


def with_torch_adam(config: Config, world: World) -> Config:
    """Spare AdamW its compilation, of minutes and with a compiler, where it is no faster."""
    section = config.get("optimizer")
    if section is None or section["type"].lower() not in ("adam", "adamw"):
        return config
    compiles = world.device.type == "cuda" and shutil.which("nvcc") and shutil.which("ninja")
    params = {"torch_adam": not compiles, **section["params"]}
    return {**config, "optimizer": {**section, "params": params}}


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


def check_mesh(config: Config, mesh: Mesh, *, divided: bool) -> None:
    """Refuse what a ZeRO stage and a mesh cannot be together."""
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


def with_autotp(config: Config, mesh: Mesh) -> Config:
    """Let AutoTP cut the layers over ``tp``."""
    section = dict(config.get("tensor_parallel") or {})
    if section.setdefault("autotp_size", mesh.tp) != mesh.tp:
        raise BadInput(
            f"tensor_parallel.autotp_size is {section['autotp_size']}, --mesh says tp={mesh.tp}",
            hint="leave it out of the DeepSpeed config",
        )
    # DeepSpeed 0.19 checks this number against all ranks, though slices share their samples.
    kept = {key: value for key, value in config.items() if key != "train_batch_size"}
    return kept | {"tensor_parallel": section}


def with_plan(config: Config, model: nn.Module) -> Config:
    """How AutoTP cuts our GPT, if the config does not say; it looks at other models itself.

    The vocabulary stays whole: AutoTP slices no embedding.
    """
    section = config["tensor_parallel"]
    if "partition_config" in section or not isinstance(model, GPT):
        return config
    rows = {"patterns": [r".*\.output\.weight$"], "partition_type": "row"}
    columns = {
        "patterns": [r".*\.heads_in\.weight$", r".*\.expand\.weight$"],
        "partition_type": "column",
    }
    plan = {"use_default_specs": False, "layer_specs": [rows, columns]}
    return config | {"tensor_parallel": section | {"partition_config": plan}}
