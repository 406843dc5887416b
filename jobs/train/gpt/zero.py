"""The DeepSpeed engine: ZeRO divides optimizer state (1), gradients (2) and parameters (3).

With ``tp`` in the mesh AutoTP cuts the layers, with ``pp`` DeepSpeed's ``PipelineModule`` the model
into stages. zero_config.py checks the config, zero_checkpoint.py reads its files.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from mesh import Mesh
from model import GPT
from parallelize import recompute
from ranks import BadInput
from torch import Tensor, nn
from torch.optim import Optimizer
from world import World
from zero_checkpoint import convert, load
from zero_mesh import Config, precision, universal, with_plan, with_torch_adam
from zero_pipeline import pipeline_module
from zero_start import explained, import_deepspeed

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
        with explained():
            self.engine, *_ = deepspeed.initialize(
                model=model, config=config, dist_init_required=False, **_trained(optimizer, config)
            )

    def step(
        self, micro_batches: Sequence[Any], learning_rate: float
    ) -> tuple[Tensor, Tensor | float | None, float]:
        """Train on this rank's micro batches: its mean loss, the norm of the whole gradient (None:
        ZeRO-0 does not tell), and the learning rate, which may be of the config's own schedule.
        Both numbers stay on the GPU, which reading them would wait for."""
        if self._scheduled:
            learning_rate = float(self.engine.get_lr()[0])
        else:
            for group in self.engine.optimizer.param_groups:
                group["lr"] = learning_rate
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
        return loss, self.engine.get_global_grad_norm(), learning_rate

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
