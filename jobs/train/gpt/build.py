"""The model on its ranks and all that trains it: torch's own tools, or a DeepSpeed engine."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import parallelize
import speed
import torch
import torch.distributed as dist
from choices import Batch, Chosen
from mesh import Mesh
from model import GPT
from parameters import buffers, count_parameters, named_parameters, reshard
from torch import Tensor, nn
from world import World


@dataclass(frozen=True, kw_only=True)
class Training:
    """What one rank holds of it."""

    model: nn.Module  # or a stage of it
    total: int  # parameters of the whole model
    optimizer: torch.optim.Optimizer
    save: Callable[..., None]  # into a folder, as `checkpoint.Checkpoints` wants it
    load: Callable[..., None]
    engine: Any = None  # zero.Engine; None: torch's own tools, and what follows
    module: nn.Module  # what is called: the model, or what is around it
    pipe: Any = None  # pipeline.Pipeline, where there are stages
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    computing: Callable[[], Any] = nullcontext  # within, the number format is the chosen one
    scaler: Any = None  # of the loss in fp16

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Any]) -> Tensor:
        """This rank's mean loss on them, without a gradient."""
        if self.engine is not None:
            return self.engine.evaluate(micro_batches)
        self.model.eval()
        with self.computing():
            if self.pipe is not None:
                loss = self.pipe.evaluate(micro_batches)
            else:
                loss = mean(self.model(*micro_batch) for micro_batch in micro_batches)
        self.model.train()
        reshard(self.model)
        return loss


def mean(losses: Any) -> Tensor:
    """In float64: the same whatever way the micro batches lie over the ranks."""
    return torch.stack([loss.double() for loss in losses]).mean()


def build(
    make_model: Callable[[], nn.Module],
    args: argparse.Namespace,
    chosen: Chosen,
    batch: Batch,
    mesh: Mesh,
    world: World,
) -> Training:
    """Collective."""
    torch.manual_seed(args.seed)  # every rank builds the same weights
    if chosen.config is not None:
        return _with_deepspeed(make_model, args, chosen.config, mesh, world)
    import shards

    # Our GPT is cut before it has any memory: a rank never holds what it gives away. Others draw
    # their weights in ways of their own.
    with torch.device("meta") if getattr(make_model, "func", None) is GPT else nullcontext():
        model: Any = make_model()
    whole, total = model, count_parameters(model)
    if args.activation_checkpointing:
        parallelize.recompute(model)
    grid = None if args.strategy == "ddp" else parallelize.device_mesh(mesh, world.device)
    if mesh.pp > 1:
        model = model.stage(mesh.stage(world.rank), mesh.pp)
    module = parallelize.parallelize(model, args, mesh, grid, chosen.dtype, world.device, whole)
    if args.compile:
        speed.compile(model, args.strategy)
    parameters, optimizer = named_parameters(model), speed.adamw(model, args)
    pipe = None
    if mesh.pp > 1:
        from pipeline import Pipeline

        pipe = Pipeline(model, args.schedule, batch.accumulation, mesh, grid, world)
    scaler = torch.amp.GradScaler(world.device.type, enabled=chosen.dtype == "fp16")
    # Collectives of a checkpoint that is written in the background need their own group.
    group = dist.new_group(backend="gloo") if args.checkpoint_async else None
    state = shards.State(parameters, optimizer, buffers(model), scaler)
    return Training(
        model=model, total=total, optimizer=optimizer, module=module, pipe=pipe,
        save=partial(shards.save, state, group), load=partial(shards.load, state),
        parameters=parameters, scaler=scaler,
        computing=partial(parallelize.autocast, args, mesh, world.device, chosen.dtype),
    )  # fmt: skip


def _with_deepspeed(
    make_model: Callable[[], nn.Module],
    args: argparse.Namespace,
    config: dict[str, Any],
    mesh: Mesh,
    world: World,
) -> Training:
    from zero import Engine
    from zero_start import building

    with building(config, world, divided=args.zero_init):
        model = make_model()
    total = count_parameters(model)
    if args.activation_checkpointing:
        parallelize.recompute(model)
    engine = Engine(config, model, partial(speed.adamw, args=args), mesh, world)
    if args.compile:
        engine.engine.compile()
    return Training(
        model=model, total=total, optimizer=engine.optimizer(), module=model, engine=engine,
        save=engine.save, load=engine.load,
    )  # fmt: skip
