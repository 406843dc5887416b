"""DeepSpeed ZeRO: optimizer state (1), gradients (2) and parameters (3) divided over the ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from mesh import Mesh
from ranks import BadInput
from strategy import (
    MicroBatch,
    Recipe,
    Strategy,
    count_parameters,
    mean_loss,
    recompute,
    set_learning_rate,
)
from torch import Tensor, nn
from world import World
from zero_checkpoint import convert, load
from zero_config import Config, precision
from zero_setup import (
    check_mesh,
    comms_table,
    explained,
    import_deepspeed,
    offloaded,
    trained,
    with_autotp,
    with_plan,
    with_torch_adam,
    zero_init,
)

_TELLING = ("wall_clock_breakdown", "memory_breakdown", "flops_profiler", "dump_state")


def recipe(config: Config, mesh: Mesh, *, divided: bool = False) -> Recipe:
    """ZeRO as a config from ``load_config`` describes it.

    With ``tp`` above 1 in the mesh, DeepSpeed's AutoTP cuts the layers. ``divided``: build the
    model under ``zero.Init``, so that no rank ever holds all of it.
    """
    check_mesh(config, mesh, divided=divided)
    dtype = precision(config)
    words = ["deepspeed", f"zero-{config['zero_optimization'].get('stage', 0)}"]
    kind = DeepSpeed
    if mesh.pp > 1:
        from zero_pipeline import DeepSpeedPipeline

        kind = DeepSpeedPipeline
        words.append(f"pp={mesh.pp}")
    if mesh.tp > 1:
        config = with_autotp(config, mesh)
        words.append(f"tp={mesh.tp}")
    if dtype != "fp32":
        words.append(dtype)
    name = " ".join(words)
    building = partial(zero_init, config) if divided else nullcontext
    build = partial(kind, name, config, mesh=mesh)
    return Recipe(name, dtype, build, building, _universal(config))


def _universal(config: Config) -> bool:
    return bool((config.get("checkpoint") or {}).get("load_universal"))


class DeepSpeed(Strategy):
    """Training with a DeepSpeed engine; the config says which ZeRO stage.

    The model has the same weights on every rank; the engine moves and divides it. A torch
    optimizer that is offloaded from a GPU becomes DeepSpeed's AdamW for CPUs, where that compiles.
    """

    def __init__(
        self,
        name: str,
        config: Config,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        *,
        mesh: Mesh,
    ) -> None:
        zero = config["zero_optimization"]
        self.name = name
        self._mesh = mesh
        self.replica = mesh.replica(world.rank)
        config = with_plan(config, model) if mesh.tp > 1 else config
        self.parameters = count_parameters(model)
        self.any_world_size = name == "deepspeed zero-0"
        if zero.get("offload_optimizer", {}).get("device", "none") != "none":
            optimizer = offloaded(optimizer, world)
            config = {**config, "zero_force_ds_cpu_optimizer": False}
        config = with_torch_adam(config, world)
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
        self._world = world
        self._universal = _universal(config)
        self._scheduled = "scheduler" in config
        self._rate: float | None = None
        model = self._divided(model, optimizer)
        with explained():
            self._engine, *_ = deepspeed.initialize(
                model=model, config=config, dist_init_required=False, **trained(optimizer, config)
            )

    def _divided(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        """The part of the model that this rank hands to the engine."""
        return model

    def describe(self) -> dict[str, object]:
        return {"mesh": str(self._mesh)} if self._mesh.tp > 1 else {}

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
                convert(folder)
            self._world.barrier()
        load(self._engine, self.optimizer(), folder, universal=self._universal)

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
