"""Torch's sharded checkpoints (DCP): written by all ranks together, read on any mesh, as data only.

Every tensor stands under a name that no mesh changes. ``get_state_dict`` of torch would do for most
of this, but it names a weight that two stages of a pipeline share twice, and adds objects that are
pickled. Here is nothing but tensors, and of ``.metadata``, which is a pickle, nothing is taken but
the places and sizes of tensors.
"""

from __future__ import annotations

import enum
import pickle
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ranks import BadInput
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata

_FOLDER = "shards"

# BytesStorageMetadata is left out on purpose: torch unpickles what it describes. Ours are tensors.
_NAMES = {
    metadata.__name__: (
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    filesystem.__name__: ("_StorageInfo",),
    "torch": ("Size", *(key for key, value in vars(torch).items() if type(value) is torch.dtype)),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),  # Python 3.13
}


class Reader(filesystem.FileSystemReader):
    """Reads the shards of a checkpoint; metadata that hold more than tensors are refused."""

    def __init__(self, checkpoint: Path) -> None:
        self.folder = checkpoint / _FOLDER
        super().__init__(self.folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        with (self.folder / ".metadata").open("rb") as file:
            found: metadata.Metadata = _Unpickler(file).load()
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found

    def sizes(self) -> Mapping[str, metadata.TensorStorageMetadata]:
        """What is held, by name."""
        held: dict[str, Any] = self.read_metadata().state_dict_metadata
        return held


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name} is not metadata of tensors")
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Any:
    """An enum's member, which Python 3.11.0 to 3.11.3 (Debian 12's) pickles as a ``getattr``."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind[name]
    raise pickle.UnpicklingError("GLOBAL builtins.getattr is not metadata of tensors")


@dataclass(frozen=True)
class State:
    """What a checkpoint holds of a rank: tensors by names that no mesh changes."""

    parameters: Mapping[str, Tensor]
    optimizer: torch.optim.Optimizer
    buffers: Mapping[str, Tensor]
    scaler: torch.amp.GradScaler  # of fp16

    def tensors(self) -> dict[str, Tensor]:
        held = {f"model/{name}": p.detach() for name, p in self.parameters.items()}
        held |= {f"buffer/{name}": buffer for name, buffer in self.buffers.items()}
        held |= {f"scaler/{k}": torch.tensor(v) for k, v in self.scaler.state_dict().items()}
        for name, parameter in self.parameters.items():
            for entry, value in self.optimizer.state.get(parameter, {}).items():
                held[f"optimizer/{name}/{entry}"] = value
        return held


def save(state: State, background: Any, folder: Path) -> Future[Any] | None:
    """Write; with a process group for it, in the background. Collective."""
    from torch.distributed.checkpoint import state_dict_saver

    path, held = folder / _FOLDER, state.tensors()
    if background is None:
        state_dict_saver.save(held, checkpoint_id=path)
        return None
    # DCP copies what lies on a GPU; what is in host memory already it would share with us.
    held = {k: value.clone() if value.device.type == "cpu" else value for k, value in held.items()}
    return state_dict_saver.async_save(held, checkpoint_id=path, process_group=background)


def load(state: State, folder: Path) -> None:
    """Read into these, whatever mesh they were saved from. Collective."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        reader = Reader(folder)
        held: Mapping[str, Any] = reader.sizes()
        for name, parameter in state.parameters.items():
            entry = held.get(f"model/{name}")
            if entry is None or entry.size != parameter.shape:
                there = "no such parameter" if entry is None else list(entry.size)
                raise BadInput(
                    f"checkpoint {folder} is of another model: {name} is {list(parameter.shape)} "
                    f"here and {there} there",
                    hint="use the model that was saved, or another checkpoint folder",
                )
            # The optimizer has no state before its first step: make room for what was saved.
            prefix = f"optimizer/{name}/"
            for key in (key for key in held if key.startswith(prefix)):
                state.optimizer.state[parameter][key.removeprefix(prefix)] = (
                    torch.zeros_like(parameter.detach())
                    if held[key].size == parameter.shape
                    else torch.zeros(
                        held[key].size,
                        dtype=held[key].properties.dtype,
                        device=parameter.device if state.optimizer.defaults["fused"] else "cpu",
                    )
                )
        tensors = state.tensors()
        load(tensors, storage_reader=reader)
        scaling = {k.removeprefix("scaler/"): v for k, v in tensors.items() if k[:7] == "scaler/"}
        if scaling:
            state.scaler.load_state_dict({key: value.item() for key, value in scaling.items()})
    except CheckpointException as error:  # a BaseException
        reason = next(iter(error.failures.values()))[0]
        raise RuntimeError(str(reason).splitlines()[0]) from error


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Parameters and buffers, whole, in host memory, without a process group."""
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = Reader(folder)
    held = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in reader.sizes().items()
        if key.startswith(("model/", "buffer/"))
    }
    load(held, storage_reader=reader, no_dist=True)
    return {key.partition("/")[2]: tensor for key, tensor in held.items()}
