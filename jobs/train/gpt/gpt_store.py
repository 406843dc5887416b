"""The files of checkpoints: torch's shards and DeepSpeed's, on a disk or in an S3 bucket.

Shards (DCP) are written by all ranks together and read on any mesh. Every tensor stands under a
name that no mesh changes. ``get_state_dict`` of torch would do for most of this, but it names a
weight that two stages of a pipeline share twice, and adds objects that are pickled.

All are read as data only: a class or function that a file names is refused. Shards hold nothing but
tensors, and of ``.metadata``, which is a pickle, nothing is taken but the places and sizes of them.

    python gpt_store.py --input_folder FOLDER --output_folder FOLDER

is DeepSpeed's own ``ds_to_universal``, reading so.
"""

from __future__ import annotations

import enum
import hashlib
import importlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from gpt_ranks import BadInput, Explained, Unavailable
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata


@contextmanager
def writable(final: Path, draft: Path) -> Iterator[None]:
    """Within, a disk that does not take the files is one clear error, and leaves no draft."""
    try:
        yield
    except BaseException as error:
        # DCP's error, a BaseException, holds those of all ranks: the first one counts.
        first = next(iter(getattr(error, "failures", {}).values()), (error,))[0]
        # torch.save tells of a short write by a RuntimeError of its zip writer.
        short = isinstance(first, RuntimeError) and "inline_container" in str(first)
        if not (short or isinstance(first, OSError)):
            raise
        reason = "not all of it was taken" if short else first.strerror
        shutil.rmtree(draft, ignore_errors=True)
        raise Explained(
            f"cannot write checkpoint {final}: {reason or first}",
            hint="make room on that disk, set checkpoint.dir to another, or lower checkpoint.keep",
        ) from error


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Within, files that cannot be read, or hold something else, are one clear error."""
    try:
        yield
    except (Explained, dist.DistError):
        raise  # clear enough already; a lost rank, not a bad file
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as error:
        if "gloo/transport" in str(error):
            raise
        # torch says in the first line what failed, in the second why.
        reason = " ".join(str(error).split("\n", 2)[:2]).replace("\t", "").strip()
        reason = more_than_data(str(error)) or reason or type(error).__name__
        raise BadInput(
            f"checkpoint {path} cannot be read: {reason}",
            hint="resume from an earlier one (checkpoint.resume: FOLDER), or from none (never)",
        ) from error


def more_than_data(said: str) -> str | None:
    """The reason in torch's words about a file that names a class or a function; else None."""
    named = re.search(r"GLOBAL (\S+)", said)
    if named is None:
        return None
    return f"it holds {named[1]}, which is neither a tensor nor a plain value and might run code"


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hashes(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of files below a folder, by their paths from there."""
    found = {}
    for name in names:
        with (folder / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def file_sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file below a folder, by its path from there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


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


def save_shards(state: State, background: Any, folder: Path) -> Future[Any] | None:
    """Write; with a process group for it, in the background. Collective."""
    from torch.distributed.checkpoint import state_dict_saver

    path, held = folder / _FOLDER, state.tensors()
    if background is None:
        state_dict_saver.save(held, checkpoint_id=path)
        return None
    # DCP copies what lies on a GPU; what is in host memory already it would share with us.
    held = {k: value.clone() if value.device.type == "cpu" else value for k, value in held.items()}
    return state_dict_saver.async_save(held, checkpoint_id=path, process_group=background)


def load_shards(state: State, folder: Path) -> None:
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


PART = 64 << 20
"""Bytes of a part in which a larger file is sent."""
_RETRY: Any = {"max_retries": 3, "retry_timeout": timedelta(seconds=60)}
_WORDS = {
    "NoSuchBucket": "there is no such bucket",
    "AccessDenied": "these credentials may not do that",
    "InvalidAccessKeyId": "AWS_ACCESS_KEY_ID is not known there",
    "XAdminUserNotFound": "AWS_ACCESS_KEY_ID is not known there",  # versitygw's
    "SignatureDoesNotMatch": "AWS_SECRET_ACCESS_KEY is wrong",
}


def is_url(folder: object) -> bool:
    return "://" in str(folder)


class Bucket:
    """What lies in an S3 bucket below a prefix, ``s3://BUCKET/PREFIX``, by obstore.

        AWS_ACCESS_KEY_ID  AWS_SECRET_ACCESS_KEY  AWS_SESSION_TOKEN    who asks
        AWS_ENDPOINT_URL                                               a server not Amazon's
        AWS_REGION                                                     us-east-1 if there is none

    Its methods raise BadInput if the server refuses, and Unavailable if it does not answer.
    """

    def __init__(self, url: str, environ: Mapping[str, str] = os.environ) -> None:
        parts = urlsplit(url)
        if parts.scheme != "s3" or not parts.netloc:
            raise BadInput(f"checkpoint folder {url}: only s3://BUCKET/PREFIX is known")
        self.url, given = url.rstrip("/"), environ.get
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            if name not in environ:
                names = "secrets: [AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY]"
                raise BadInput(f"{url}: {name} is not set", f"{names} in the job")
        try:
            obstore = importlib.import_module("obstore")
        except ImportError:
            hint = "pip install 'clusterkit[s3]', or obstore alone"
            raise BadInput(f"{url}: a bucket needs the package obstore", hint) from None
        region = given("AWS_REGION") or given("AWS_DEFAULT_REGION") or "us-east-1"
        server = given("AWS_ENDPOINT_URL_S3") or given("AWS_ENDPOINT_URL")
        self._server = server or f"https://s3.{region}.amazonaws.com"
        if not re.match(r"https?://[^/]", self._server):
            raise BadInput(f"AWS_ENDPOINT_URL is {server!r}", "give http://HOST:PORT or https://")
        token = given("AWS_SESSION_TOKEN")
        self._obstore, self._store = obstore, obstore.store.S3Store(
            parts.netloc, prefix=parts.path.strip("/") or None, region=region,
            endpoint=self._server, access_key_id=given("AWS_ACCESS_KEY_ID"),
            secret_access_key=given("AWS_SECRET_ACCESS_KEY"),
            client_options={"allow_http": True, "timeout": "600s"}, retry_config=_RETRY,
            **({"session_token": token} if token else {}),
        )  # fmt: skip

    def sizes(self) -> dict[str, int]:
        """Of all files, by their names below the prefix."""
        with self._explained():
            return {
                each["path"]: each["size"] for each in self._obstore.list(self._store).collect()
            }

    def read(self, name: str) -> bytes:
        with self._explained():
            return bytes(self._obstore.get(self._store, name).bytes())

    def write(self, name: str, data: bytes | Path) -> None:
        """Bytes, or a file; one that is large goes in parts, and is there when all are."""
        with self._explained():
            self._obstore.put(self._store, name, data, chunk_size=PART, max_concurrency=2)

    def remove(self, name: str) -> None:
        with self._explained():
            self._obstore.delete(self._store, name)

    def download(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._explained(), path.open("wb") as file:
            for chunk in self._obstore.get(self._store, name).stream():
                file.write(chunk)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except self._obstore.exceptions.BaseError as error:
            said = str(error)
            for refused in (r"<Code>(\w+)</Code>", r"status code: (\d+ [\w ]+)"):
                if found := re.search(refused, said):
                    why = _WORDS.get(found[1], f"the server says {found[1]}")
                    raise BadInput(f"{self.url}: {why}") from None
            # The cause is the innermost of what it prints below its own sentence.
            why = [said.splitlines()[0], *re.findall(r'(?:message|error): "([^"]+)"', said)][-1]
            raise Unavailable(
                f"{self.url}: {self._server} does not answer: {why}",
                hint="AWS_ENDPOINT_URL says where the server is",
            ) from None


_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


@contextmanager
def read_as_data() -> Iterator[None]:
    """Within, ``torch.load`` takes tensors, plain values and DeepSpeed's own few classes.

    DeepSpeed 0.19.8 says ``weights_only=False`` wherever it loads; torch's variable outranks that.
    """
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        with torch.serialization.safe_globals(_classes()):
            yield
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before


def _classes() -> list[Any]:
    """What DeepSpeed 0.19.8 writes into its files beside tensors; none does anything when made."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


CONVERTED = "universal"


def convert(folder: Path) -> None:
    """Rewrite a checkpoint so that any number of ranks can load it, beside the original.

    Done once. What has lost a file since is written anew: DeepSpeed would pass some of them over.
    """
    whole, sizes = folder / CONVERTED, folder / f"{CONVERTED}.json"
    with suppress(OSError, ValueError):
        if json.loads(sizes.read_text()) == file_sizes(whole):
            return
    draft = folder / f".{CONVERTED}.draft"
    for leftover in (whole, draft):
        shutil.rmtree(leftover, ignore_errors=True)
    done = subprocess.run(
        [sys.executable, __file__, "--inject_missing_state",
         "--input_folder", str(folder / "zero"), "--output_folder", str(draft)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        said = done.stdout.strip().splitlines() or [f"exit code {done.returncode}"]
        reason = more_than_data(done.stdout) or said[-1]
        raise BadInput(f"checkpoint {folder} cannot be made universal: {reason}")
    sizes.write_text(json.dumps(file_sizes(draft)))
    draft.rename(whole)


def load_zero(
    engine: Any, optimizer: torch.optim.Optimizer, folder: Path, *, universal: bool
) -> None:
    """Read what the engine, or ``convert``, wrote into a checkpoint's folder. Collective."""
    groups = optimizer.param_groups
    settings = [{key: group[key] for key in group if key != "params"} for group in groups]
    with read_as_data():
        found, _ = engine.load_checkpoint(str(folder), tag=CONVERTED if universal else "zero")
    if found is None:
        raise RuntimeError("DeepSpeed finds nothing in it")
    if universal:
        # In stage 3 DeepSpeed 0.19.8 gives all groups the settings of the first, and all
        # parameters one and the same counter, which each of them then counts up.
        for group, own in zip(optimizer.param_groups, settings, strict=True):
            group.update(own)
        for state in optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()


# The converter's pool has these processes too; by `fork` or, since Python 3.14, by importing this.
if __name__ in ("__main__", "__mp_main__"):
    torch.serialization.add_safe_globals(_classes())

if __name__ == "__main__":
    from deepspeed.checkpoint.ds_to_universal import main, parse_arguments

    with read_as_data():
        main(parse_arguments())
