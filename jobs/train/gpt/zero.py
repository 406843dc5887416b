"""The DeepSpeed engine: ZeRO divides optimizer state (1), gradients (2) and parameters (3).

With ``tp`` in the mesh AutoTP cuts the layers, with ``pp`` DeepSpeed's ``PipelineModule`` the model
into stages. zero_config.py checks the config, zero_checkpoint.py reads its files.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from mesh import Mesh
from model import GPT, cross_entropy
from parallelize import recompute
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from world import BadInput, World
from zero_checkpoint import convert, load
from zero_config import Config, precision, universal, with_plan, with_torch_adam

_TELLING = ("wall_clock_breakdown", "memory_breakdown", "flops_profiler", "dump_state")


class Engine:
    """Training with a DeepSpeed engine; ``make_optimizer`` makes one for a module's parameters."""

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        make_optimizer: Callable[[nn.Module], Optimizer],
        mesh: Mesh,
        world: World,
    ) -> None:
        deepspeed = import_deepspeed(world)
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
            model = pipeline_module(model, mesh)
        optimizer = make_optimizer(model)
        offload = config["zero_optimization"].get("offload_optimizer", {})
        if offload.get("device", "none") != "none":
            optimizer = _offloaded(optimizer, world)
            config = {**config, "zero_force_ds_cpu_optimizer": False}
        config = with_torch_adam(config, world.device.type)
        with _explained():
            self.engine, *_ = deepspeed.initialize(
                model=model, config=config, dist_init_required=False, **_trained(optimizer, config)
            )

    def step(
        self, micro_batches: Sequence[Any], learning_rate: float
    ) -> tuple[Tensor, float | None, float]:
        """Train on this rank's micro batches: its mean loss, the norm of the whole gradient (None:
        ZeRO-0 does not tell), and the learning rate, which may be of the config's own schedule."""
        if self._scheduled:
            learning_rate = float(self.engine.get_lr()[0])
        else:
            for group in self.engine.optimizer.param_groups:
                group["lr"] = learning_rate
        if self._pipeline:  # a whole step, and the mean over all ranks
            loss = self.engine.train_batch(iter(micro_batches)).detach().double().mean()
        else:
            losses = []
            for tokens, targets in micro_batches:
                loss = self.engine(tokens, targets)
                self.engine.backward(loss)  # divides by the accumulation steps
                self.engine.step()  # updates only after the last of them
                losses.append(loss.detach().double())
            loss = torch.stack(losses).mean()
        norm = self.engine.get_global_grad_norm()
        return loss, None if norm is None else float(norm), learning_rate

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Any]) -> Tensor:
        """This rank's mean loss, without a gradient."""
        if self._pipeline:
            loss: Tensor = self.engine.eval_batch(iter(micro_batches))
            return loss.detach().double().mean()
        self.engine.eval()
        losses = [self.engine(tokens, targets).double() for tokens, targets in micro_batches]
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
        load(self.engine, self.optimizer(), folder, universal=self._universal)

    def optimizer(self) -> Optimizer:
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


def comms_table(summary: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> str:
    """What a comms logger has counted, one line for each operation and message size."""
    lines = [f"{'operation':<24}{'bytes':>12}{'count':>8}{'total ms':>12}{'mean ms':>10}"]
    for operation, sizes in sorted(summary.items()):
        for size, entry in sorted(sizes.items()):
            lines.append(
                f"{operation:<24}{size:>12}{entry['count']:>8}"
                f"{entry['total_latency_ms']:>12.2f}{entry['avg_latency_ms']:>10.3f}"
            )
    return "\n".join(lines)


# ---------------------------------------------------------------- DeepSpeed without its surprises


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
def building(config: Config, world: World, *, divided: bool) -> Iterator[None]:
    """Within, a model may be divided while it is made, so that no rank ever holds all of it."""
    deepspeed = import_deepspeed(world)
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
def _explained() -> Iterator[None]:
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


# ---------------------------------------------------------------- its pipeline


def pipeline_module(model: GPT, mesh: Mesh) -> nn.Module:
    """The model as a sequence. The token embedding stands in it twice: it also makes the logits."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

    def logits(token: _Given, x: Tensor) -> Tensor:
        return F.linear(x, token.module.weight)

    token = {"tied_weight_attr": "module.weight"}
    module: nn.Module = PipelineModule(
        layers=[
            TiedLayerSpec("token", _Given, model.token, **token),
            LayerSpec(_AddPosition, model.position),
            *model.blocks.values(),
            model.norm,
            TiedLayerSpec("token", _Given, model.token, forward_fn=logits, **token),
        ],
        topology=PipeDataParallelTopology(num_pp=mesh.pp, num_dp=mesh.dp),
        loss_fn=cross_entropy,
        # Every block as heavy as every other; what stands at the ends weighs nothing.
        partition_method="type:Block",
    )
    return module


class _Given(nn.Module):
    """A module that was made before, for those who want a class to make one of."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


class _AddPosition(_Given):
    """Adds the vectors of the positions: (batch, length, width) to the same."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.module(torch.arange(x.shape[1], device=x.device))
