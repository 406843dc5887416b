"""Torch's sharded checkpoints, read as data: their ``.metadata`` is a pickle."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

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
