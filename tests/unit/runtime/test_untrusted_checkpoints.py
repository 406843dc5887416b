"""A checkpoint lies on a disk that others may write to: reading it never runs what it says."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpt_store
import pytest
import torch
from gpt_checkpoint import Checkpoint, export
from gpt_ranks import BadInput

from tests.unit.runtime.conftest import launching, zero_arguments

SAVE = ["--steps", "2", "--checkpoint-every", "1", "--checkpoint-keep", "0",
        "--global-batch", "4", "--micro-batch", "2", "--context", "16"]  # fmt: skip


@dataclass
class Touch:
    """Unpickled by pickle itself, it makes a file."""

    path: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mknod, (str(self.path),)


def torch_file(path: Path, trap: Touch) -> None:
    torch.save({"model": trap}, path)


def shard_metadata(path: Path, trap: Touch) -> None:
    path.write_bytes(pickle.dumps(trap))


def metadata_of_an_object(path: Path, trap: Touch) -> None:
    """Metadata as torch writes them, of an object that torch would unpickle from a shard."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    metadata = pickle.loads(path.read_bytes())
    name = next(key for key in metadata.state_dict_metadata if key.startswith("optimizer/"))
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    path.write_bytes(pickle.dumps(metadata))


@dataclass
class Attribute:
    """Unpickled by pickle itself, an attribute of something, as Debian 12's Python has enums."""

    of: Any
    name: str

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.of, self.name)


def test_metadata_unpickler_allows_getattr_of_enum_members_only(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties

    def read(what: Any) -> Any:
        return gpt_store._Unpickler(io.BytesIO(pickle.dumps(what))).load()

    (member, *_) = _MEM_FORMAT_ENCODING
    assert read(Attribute(_MEM_FORMAT_ENCODING, member.name)) is member
    with pytest.raises(pickle.UnpicklingError, match="getattr is not metadata"):
        read(Attribute(TensorProperties, "__init__"))


CASES = {
    "ddp": ("ddp", "shards/.metadata", shard_metadata),
    "random": ("ddp", "random.pt", torch_file),
    "fsdp": ("fsdp", "shards/.metadata", shard_metadata),
    "fsdp-object": ("fsdp", "shards/.metadata", metadata_of_an_object),
    "zero-0": (0, "zero/mp_rank_00_model_states.pt", torch_file),
    "zero-2": (2, "zero/zero_pp_rank_1_mp_rank_00_optim_states.pt", torch_file),
    "universal": (2, "zero/zero_pp_rank_1_mp_rank_00_optim_states.pt", torch_file),
}


@pytest.fixture(scope="module")
def saved(warm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Any], Path]]:
    """``saved(strategy)``: the folder of a run's checkpoints, made once."""
    made: dict[Any, Path] = {}
    with launching(tmp_path_factory.mktemp("saved"), warm) as launch:

        def folder(strategy: Any) -> Path:
            if strategy not in made:
                made[strategy] = place = tmp_path_factory.mktemp("run")
                how = [*arguments(place, strategy), "--checkpoint-dir", str(place / "c")]
                done = launch(*SAVE, *how, ranks=ranks_of(strategy))
                assert set(done.codes) == {0}, done.stderr
            return made[strategy] / "c"

        yield folder


def arguments(folder: Path, strategy: str | int) -> list[str]:
    """Of the program. ``strategy``: a number is a ZeRO stage."""
    if isinstance(strategy, int):
        return zero_arguments(folder, strategy)
    return ["--strategy", strategy]


def ranks_of(strategy: str | int) -> int:
    return 1 if strategy == "ddp" else 2


@pytest.mark.parametrize("name", CASES)
def test_checkpoint_with_embedded_code_is_refused_and_code_never_runs(
    launch, saved: Callable[[Any], Path], tmp_path: Path, name: str
) -> None:
    strategy, file, replace = CASES[name]
    how = arguments(tmp_path, strategy)
    path = tmp_path / "c" / "step-00000001"
    shutil.copytree(saved(strategy), path.parent)
    trap = Touch(tmp_path / "trap")
    replace(path / file, trap)
    counts_as_whole(path)
    if name == "universal":
        config = json.loads(Path(how[-1]).read_text())
        Path(how[-1]).write_text(json.dumps(config | {"checkpoint": {"load_universal": True}}))

    run = [*SAVE, *how, "--checkpoint-dir", path.parent, "--checkpoint-resume", path]
    resumed = launch(*run, ranks=ranks_of(strategy))

    assert not trap.path.exists()
    assert 1 in resumed.codes, resumed.stderr
    told = "".join(resumed.stderr)
    unwanted = "BytesStorageMetadata" if name == "fsdp-object" else "posix.mknod"
    assert f"checkpoint {path} " in told
    assert f"{unwanted}, which is neither a tensor nor a plain value" in told
    if name != "random":
        with pytest.raises(BadInput, match="which is neither a tensor nor a plain value"):
            export(path, tmp_path / "exported")
        assert not trap.path.exists()


def counts_as_whole(path: Path) -> None:
    """Write down what the files are now, as anyone who replaces one can."""
    manifest = json.loads((path / "checkpoint.json").read_text())
    manifest["files"] = {name: (path / name).stat().st_size for name in manifest["files"]}
    manifest["hashes"] = gpt_store.hashes(path, manifest["files"])
    (path / "checkpoint.json").write_text(json.dumps(manifest))
    assert Checkpoint.read(path) is not None
