"""Torch's own ways to divide a model over a device mesh: FSDP2, tensor parallel, or both.

FSDP2 (``fully_shard``) cuts every parameter over the ranks of the ``shard`` dimension, gathers a
layer just before it is needed, and copies the result over ``replicate`` (HSDP). Tensor parallel
cuts every layer over the ranks of ``tp``, which all see the same samples. Parameters become
DTensors, which know where their parts lie, so a checkpoint loads on any mesh.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from clusterkit.errors import BadInput, counted
from clusterkit.runtime.distributed import World
from clusterkit.runtime.mesh import Mesh
from clusterkit.runtime.strategy import (
    DTYPES,
    MicroBatch,
    Recipe,
    Strategy,
    autocast,
    count_parameters,
    follow,
    local,
    mean_loss,
    set_learning_rate,
)

_SHARDS = "shards"


@dataclass(frozen=True)
class Settings:
    """How to divide and to train."""

    name: str  # of the strategy
    mesh: Mesh
    dtype: str = "fp32"  # or bf16, to compute and gather in; the weights stay float32
    clip: float = 0.0  # largest gradient norm; 0 for no clipping
    # Free a layer's gathered parameters after its forward pass (ZeRO-3) instead of after its
    # backward pass (more memory, one all-gather less).
    reshard: bool = True
    offload: bool = False  # keep shards, gradients and optimizer in the memory of the host
    sequence: bool = False  # divide activations between the sliced layers along the sequence
    asynchronous: bool = False  # go on training while a checkpoint is being written
    schedule: str = "1f1b"  # of the pipeline; or gpipe
    micro_batches: int = 1  # of the pipeline, in each step


def recipe(settings: Settings) -> Recipe:
    """FSDP2, tensor parallel or, with stages in the mesh, a pipeline with these settings.

    Raises:
        BadInput: fp16, which needs a loss scale that all ranks agree on; fewer micro batches than
            stages with 1F1B.
    """
    if settings.dtype not in ("fp32", "bf16"):
        raise BadInput(
            f"--dtype {settings.dtype}: --strategy {settings.name} does not scale the loss",
            hint="use bf16 or fp32; ddp and deepspeed can do fp16",
        )
    kind = Sharded
    if settings.schedule == "1f1b" and settings.micro_batches < settings.mesh.pp:
        raise BadInput(
            f"--schedule 1f1b: {counted(settings.micro_batches, 'micro batch')} a step for "
            f"{settings.mesh.pp} stages",
            hint=f"a global batch of {settings.mesh.pp} micro batches or more, or --schedule gpipe",
        )
    if settings.mesh.pp > 1:
        # Only now: its imports are half a second that the others need not pay.
        from clusterkit.runtime.pipeline import Pipeline

        kind = Pipeline
    return Recipe(settings.name, settings.dtype, partial(kind, settings))


class Sharded(Strategy):
    """A model divided along ``shard`` and ``tp``, and copied along ``replicate``.

    Args:
        model: the same weights on every rank. For tensor parallel it must have ``tensor_plan``.
        optimizer: over the model's parameters; it is handed the divided ones. Its hyperparameters
            come from the program, not from a checkpoint.
    """

    any_world_size = True

    def __init__(
        self, settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer, world: World
    ) -> None:
        _quiet()
        self.name = settings.name
        self.parameters = count_parameters(model)
        self.replica = settings.mesh.replica(world.rank)
        self._settings = settings
        self._world = world
        self._optimizer = optimizer
        shape = settings.mesh
        self._mesh = init_device_mesh(
            world.device.type,
            (shape.pp, shape.replicate, shape.shard, shape.tp),
            mesh_dim_names=("pp", "replicate", "shard", "tp"),
        )
        before = dict(model.named_parameters())
        names = {parameter: name for name, parameter in before.items()}
        self._module = self._cut(model)
        # A module keeps its parameters' places when it is divided, so names lead to names.
        known = {name: names[p] for name, p in self._module.named_parameters()}
        if shape.tp > 1:
            self._slice()
        if self._uses_fsdp:
            self._shard()
        else:
            self._module.to(world.device)
        self._parameters = {known[name]: p for name, p in self._module.named_parameters()}
        kept = self._module.state_dict().keys()
        self._buffers = {name: b for name, b in self._module.named_buffers() if name in kept}
        follow(optimizer, before, self._parameters)
        # Collectives of a checkpoint written in the background must not mix with those of training.
        self._background = dist.new_group(backend="gloo") if settings.asynchronous else None

    def describe(self) -> dict[str, object]:
        return {"mesh": str(self._settings.mesh)}

    def step(
        self, micro_batches: Sequence[MicroBatch], learning_rate: float
    ) -> tuple[Tensor, float | None]:
        loss = self._backward(micro_batches)
        norm = self._clip_gradients()
        set_learning_rate(self._optimizer, learning_rate)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss, norm

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> Tensor:
        with self._evaluating():
            losses = [self._forward(*micro_batch) for micro_batch in micro_batches]
        return mean_loss(losses)

    def save(self, folder: Path) -> Future[Any] | None:
        from torch.distributed.checkpoint.state_dict_saver import async_save, save

        path, state = folder / _SHARDS, self._state()
        if self._background is None:
            save(state, checkpoint_id=path)
            return None
        # DCP copies what lies on a GPU; what is in host memory already it would share with us.
        state = {
            key: value.clone() if value.device.type == "cpu" else value
            for key, value in state.items()
        }
        writing = async_save(state, checkpoint_id=path, process_group=self._background)
        assert isinstance(writing, Future)
        return writing

    def load(self, folder: Path) -> None:
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        from clusterkit.runtime.shard_files import Reader

        try:
            reader = Reader(folder / _SHARDS)
            held = reader.sizes()
            self._check_holds(folder, held)
            self._expect_optimizer(held)
            load(self._state(), storage_reader=reader)
        except CheckpointException as error:  # a BaseException
            reason = next(iter(error.failures.values()))[0]
            raise RuntimeError(str(reason).splitlines()[0]) from error

    # ---- dividing

    @property
    def _uses_fsdp(self) -> bool:
        return self._settings.mesh.dp > 1 or self._settings.name == "fsdp"

    def _cut(self, model: nn.Module) -> nn.Module:
        """The part of the model that this rank has layers of."""
        return model

    def _slice(self) -> None:
        from torch.distributed.tensor.parallel import parallelize_module

        plan = self._module.tensor_plan(sequence=self._settings.sequence)  # type: ignore[operator]
        # Every rank has the same weights already: nothing to send.
        parallelize_module(self._module, self._mesh["tp"], plan, src_data_rank=None)
        if hasattr(self._module, "tie"):
            self._module.tie()  # type: ignore[operator]

    def _shard(self) -> None:
        settings = self._settings
        hybrid = settings.mesh.replicate > 1
        reduced = settings.dtype != "fp32"
        offload = CPUOffloadPolicy(pin_memory=self._world.device.type == "cuda")
        options: dict[str, Any] = {
            "mesh": self._mesh["replicate", "shard"] if hybrid else self._mesh["shard"],
            "reshard_after_forward": settings.reshard,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=DTYPES[settings.dtype] if reduced else None,
                reduce_dtype=torch.float32 if reduced else None,
            ),
            "offload_policy": offload if settings.offload else OffloadPolicy(),
        }
        for layer in layers(self._module):
            fully_shard(layer, **options)
        fully_shard(self._module, **options)

    # ---- training

    def _backward(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Gradients of the mean loss of all micro batches, averaged over the replicas."""
        last, losses = len(micro_batches) - 1, []
        for index, (tokens, targets) in enumerate(micro_batches):
            if isinstance(self._module, FSDPModule):
                # The gradients travel once per step, with the last micro batch.
                self._module.set_requires_gradient_sync(index == last)
            loss = self._forward(tokens, targets)
            (loss / len(micro_batches)).backward()  # type: ignore[no-untyped-call]
            losses.append(loss)
        return mean_loss(losses)

    def _forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self._autocast():
            loss: Tensor = self._module(tokens, targets)
        return loss

    def _autocast(self) -> AbstractContextManager[Any]:
        """Where FSDP does not gather in bf16 anyway."""
        return autocast(self._world.device, "fp32" if self._uses_fsdp else self._settings.dtype)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self._module.eval()
        yield
        self._module.train()
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what only a backward pass would have done

    def _clip_gradients(self) -> float:
        """The norm of the whole gradient, every element counted once; then scaled down to it."""
        device = self._world.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        gradients = []
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                part = placed_gradient(parameter)
                norm = torch.linalg.vector_norm(part, dtype=torch.float32).double()
                total += norm.square().to(device) / self._copies(name, parameter)
                gradients.append(part)
        if self._world.size > 1:
            dist.all_reduce(total)
        norm_of_all = math.sqrt(total.item())
        clip = self._settings.clip
        if 0 < clip < norm_of_all:
            for gradient in gradients:
                gradient.mul_(clip / (norm_of_all + 1e-6))
        return norm_of_all

    def _copies(self, name: str, parameter: Tensor) -> int:
        """How many ranks hold the same elements of a parameter."""
        mesh = self._settings.mesh
        return mesh.dp * mesh.tp // _parts(parameter)

    # ---- checkpoints

    def _state(self) -> dict[str, Tensor]:
        """What a checkpoint holds, under names that no mesh changes."""
        state = {f"model/{name}": p.detach() for name, p in self._parameters.items()}
        state |= {f"buffer/{name}": buffer for name, buffer in self._buffers.items()}
        for name, parameter in self._parameters.items():
            for entry, value in self._optimizer.state.get(parameter, {}).items():
                state[f"optimizer/{name}/{entry}"] = value
        return state

    def _expect_optimizer(self, held: Mapping[str, Any]) -> None:
        """Make room for the optimizer state that a checkpoint has."""
        for name, parameter in self._parameters.items():
            prefix = f"optimizer/{name}/"
            for key in (key for key in held if key.startswith(prefix)):
                entry = held[key]
                alike = entry.size == parameter.shape
                self._optimizer.state[parameter][key.removeprefix(prefix)] = (
                    torch.zeros_like(parameter.detach())
                    if alike
                    else torch.zeros(entry.size, dtype=entry.properties.dtype)
                )

    def _check_holds(self, folder: Path, held: Mapping[str, Any]) -> None:
        for name, parameter in self._parameters.items():
            entry = held.get(f"model/{name}")
            if entry is None or entry.size != parameter.shape:
                there = "no such parameter" if entry is None else list(entry.size)
                raise BadInput(
                    f"checkpoint {folder} is of another model: {name} is {list(parameter.shape)} "
                    f"here and {there} there",
                    hint="use the model that was saved, or another checkpoint folder",
                )


def layers(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of a model: the members of its largest list of modules."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.ModuleDict) and len(m)]
    if not lists:
        return []
    largest = max(lists, key=count_parameters)
    return list(largest.children())


def placed_gradient(parameter: Tensor) -> Tensor:
    """This rank's part of a gradient, summed where torch has left the sum open.

    The weight of a norm that saw a slice of the sequence, and a sliced embedding, have such
    gradients.
    """
    gradient: Any = parameter.grad
    assert gradient is not None
    if isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
        parameter.grad = gradient
    return local(gradient)


def _parts(parameter: Tensor) -> int:
    """Over how many ranks the elements of a parameter are divided."""
    if not isinstance(parameter, DTensor):
        return 1
    # Not `is_shard`: what FSDP makes of a sliced parameter is a shard that says it is none.
    along = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in along if not placement.is_replicate())


def _quiet() -> None:
    # torch 2.13's own FSDP and checkpoints call collectives by names that it has deprecated.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # It warns of changing a layer's output in place, which no model here does.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
