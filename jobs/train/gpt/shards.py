"""Torch's sharded checkpoints (DCP), written by all ranks together and read as data.

Every tensor stands under a name that no mesh changes. Their ``.metadata`` is a pickle, of which
nothing is taken but the places and sizes of tensors.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from ranks import BadInput
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.optim import Optimizer

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
    """Reads the shards in a folder.

    Raises:
        pickle.UnpicklingError: the metadata hold more than the places and sizes of tensors.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        with (self._folder / ".metadata").open("rb") as file:
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
        if name not in _NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name} is not metadata of tensors")
        return super().find_class(module, name)


def state(
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    optimizer: Optimizer,
) -> dict[str, Tensor]:
    """What a checkpoint holds."""
    held = {f"model/{name}": p.detach() for name, p in parameters.items()}
    held |= {f"buffer/{name}": buffer for name, buffer in buffers.items()}
    for name, parameter in parameters.items():
        for entry, value in optimizer.state.get(parameter, {}).items():
            held[f"optimizer/{name}/{entry}"] = value
    return held


def save(folder: Path, held: dict[str, Tensor], background: Any) -> Future[Any] | None:
    """Write; with a process group for it, in the background. Collective."""
    from torch.distributed.checkpoint import state_dict_saver

    path = folder / _FOLDER
    if background is None:
        state_dict_saver.save(held, checkpoint_id=path)
        return None
    # DCP copies what lies on a GPU; what is in host memory already it would share with us.
    held = {k: value.clone() if value.device.type == "cpu" else value for k, value in held.items()}
    return state_dict_saver.async_save(held, checkpoint_id=path, process_group=background)


def load(
    folder: Path,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    optimizer: Optimizer,
) -> None:
    """Read into these, whatever mesh they were saved from. Collective."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        reader = Reader(folder / _FOLDER)
        held = reader.sizes()
        _check_holds(folder, held, parameters)
        _expect_optimizer(held, parameters, optimizer)
        load(state(parameters, buffers, optimizer), storage_reader=reader)
    except CheckpointException as error:  # a BaseException
        reason = next(iter(error.failures.values()))[0]
        raise RuntimeError(str(reason).splitlines()[0]) from error


def _expect_optimizer(
    held: Mapping[str, Any], parameters: Mapping[str, Tensor], optimizer: Optimizer
) -> None:
    """Make room for the optimizer state that a checkpoint has."""
    for name, parameter in parameters.items():
        prefix = f"optimizer/{name}/"
        for key in (key for key in held if key.startswith(prefix)):
            entry = held[key]
            alike = entry.size == parameter.shape
            optimizer.state[parameter][key.removeprefix(prefix)] = (
                torch.zeros_like(parameter.detach())
                if alike
                else torch.zeros(entry.size, dtype=entry.properties.dtype)
            )


def _check_holds(folder: Path, held: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        entry = held.get(f"model/{name}")
        if entry is None or entry.size != parameter.shape:
            there = "no such parameter" if entry is None else list(entry.size)
            raise BadInput(
                f"checkpoint {folder} is of another model: {name} is {list(parameter.shape)} "
                f"here and {there} there",
                hint="use the model that was saved, or another checkpoint folder",
            )
