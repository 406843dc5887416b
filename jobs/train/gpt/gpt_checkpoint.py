"""Checkpoints that are whole or not there at all, and resuming from them.

A checkpoint is a folder ``step-00000100`` with the shards (or DeepSpeed's files), the random
number states and ``checkpoint.json``, which says what it holds. It is written under another name,
made durable and renamed, so that a crash leaves the previous checkpoint as the newest. All nodes
must see the folder. In a bucket (``s3://BUCKET/PREFIX``) ``checkpoint.json`` is written last; each
node keeps a folder of its own for what is on its way there, or back.

    python jobs/train/gpt/gpt_checkpoint.py checkpoints/step-00000200 exported/

writes the weights of one, whole and in fp32, for plain torch or transformers. It works for every
strategy but DeepSpeed's own pipeline and tensor parallelism, on one machine without a launcher:
parts that many ranks saved are put together. One of our own models becomes ``model.pt``, which
``torch.load`` reads and ``GPT.load_state_dict`` takes; a Hugging Face model becomes a folder for
``from_pretrained``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from gpt_metrics import report
from gpt_model import GPT, SIZES, Shape
from gpt_ranks import BadInput, Ranks, World, random_state, read_ranks, run, set_random_state
from gpt_store import (
    Bucket,
    file_sizes,
    hashes,
    is_url,
    read_as_data,
    read_weights,
    readable,
    sync,
    writable,
)
from torch import Tensor, nn

MANIFEST = "checkpoint.json"

_RANDOM = "random.pt"


class Torn(Exception):
    """Why it is not a whole checkpoint."""


@dataclass
class Checkpoints:
    """The checkpoints of a run, in one folder; None switches them off."""

    folder: Path | str | None
    model: Mapping[str, Any]  # what the program builds: a checkpoint of anything else is refused
    strategy: str
    any_world_size: bool = True  # whether what N ranks save can be loaded by M
    converts: bool = False  # whether it can here, whatever has saved it
    every: int = 0  # steps; 0: only at the end
    keep: int = 2  # how many of the newest; 0: all
    resume: str = "auto"  # or never, or a checkpoint's folder

    def __post_init__(self) -> None:
        self.bucket = Bucket(str(self.folder)) if is_url(self.folder) else None
        if self.bucket is not None:
            self.folder = _scratch(self.bucket.url)
        self.folder = Path(self.folder).absolute() if self.folder else None
        self.model = json.loads(json.dumps(dict(self.model)))  # as it will come back, to compare
        # The one that does not count yet: draft, name, manifest, its writer's Future, when it began
        self._writing: tuple[Path, Path, dict[str, Any], Future[Any] | None, float] | None = None

    def due(self, step: int, *, last: bool) -> bool:
        """Whether to save after ``step``."""
        return self.folder is not None and (last or (self.every > 0 and step % self.every == 0))

    def find(self, ranks: Ranks) -> Checkpoint | None:
        """The checkpoint to resume from, or None to start from the beginning."""
        if self.resume == "never":
            return None
        if self.resume == "auto":
            checkpoint = next(iter(self._newest_first(speaks=ranks.is_first)), None)
            if checkpoint is None:
                return None
        else:
            checkpoint = self._named(self.resume)
        checkpoint.check(self.model, self.strategy, ranks.size, converts=self.converts)
        return checkpoint

    def _named(self, name: str) -> Checkpoint:
        try:
            if not is_url(name):
                return Checkpoint.whole(Path(name).absolute())
            folder, _, step = name.rstrip("/").rpartition("/")
            bucket = Bucket(folder)
            return Checkpoint.whole(_scratch(folder) / step, bucket, bucket.sizes())
        except Torn as error:
            raise BadInput(
                f"checkpoint to resume from: {name} is not a complete checkpoint: {error}",
                hint="give a folder such as checkpoints/step-00000100, or auto, or never",
            ) from None

    def load(self, checkpoint: Checkpoint, read: Callable[[Path], None], world: World) -> None:
        """Restore what ``read`` reads, and the random number states, on every rank. Collective."""
        seen = world.gather(checkpoint.where)
        if len(set(seen)) > 1:
            other = next(rank for rank, path in enumerate(seen) if path != seen[0])
            raise BadInput(
                f"rank 0 resumes from {seen[0]}, rank {other} from {seen[other]}",
                hint="put checkpoint.dir on a disk that all nodes share",
            )
        fetches = checkpoint.bucket is not None and world.local_rank == 0
        if fetches:
            checkpoint.fetch()
        world.barrier()
        with readable(checkpoint.path):
            checkpoint.verify(world)
            read(checkpoint.path)
            states = torch.load(checkpoint.path / _RANDOM, weights_only=True)
        if world.rank < len(states):
            set_random_state(states[world.rank])
        world.barrier()
        if fetches:
            shutil.rmtree(checkpoint.path.parent)
        if world.is_first:
            report("resumed", step=checkpoint.step, path=checkpoint.where)

    def save(
        self,
        step: int,
        write: Callable[[Path], Future[Any] | None],
        world: World,
        notes: Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write the checkpoint of ``step`` and remove those beyond ``keep``. Collective.

        ``write`` may return before its files are there: then the checkpoint counts from ``finish``
        on. ``notes`` and ``data`` come back in the ``Checkpoint``.
        """
        self.finish(world)
        started = time.perf_counter()
        final = self.folder / f"step-{step:08d}"
        draft = self.folder / f".{final.name}.draft"
        with writable(final, draft):
            if world.is_first or (self.bucket is not None and world.local_rank == 0):
                shutil.rmtree(draft, ignore_errors=True)
                draft.mkdir(parents=True)
            world.barrier()
            files = write(draft)
            states = world.gather(random_state())
            if world.is_first:
                torch.save(states, draft / _RANDOM)
        manifest = {
            "step": step, "strategy": self.strategy, "world_size": world.size,
            "any_world_size": self.any_world_size, "model": self.model,
            "notes": dict(notes or {}), "data": dict(data or {}), "saved_at": time.time(),
        }  # fmt: skip
        self._writing = draft, final, manifest, files, started
        if files is None:
            self.finish(world)
        return final

    def written(self) -> bool:
        """Whether this rank has written its part of one that waits for ``finish``."""
        return self._writing is not None and (self._writing[3] is None or self._writing[3].done())

    def finish(self, world: World) -> None:
        """Wait until all ranks have written, if they do, and let it count. Collective."""
        if self._writing is None:
            return
        (draft, final, manifest, files, started), self._writing = self._writing, None
        with writable(final, draft):
            if files is not None:
                files.result()
                world.barrier()
            if self.bucket is not None:
                send(self.bucket, draft, final.name, manifest, world)
            else:
                seal(draft, final, manifest, world)
        if world.is_first:
            for checkpoint in self._newest_first()[self.keep :] if self.keep else []:
                checkpoint.remove()
            seconds = time.perf_counter() - started
            where = f"{self.bucket.url}/{final.name}" if self.bucket else str(final)
            report("checkpoint", step=manifest["step"], path=where, seconds=seconds)
        world.barrier()

    def _newest_first(self, *, speaks: bool = False) -> list[Checkpoint]:
        """The complete ones; of others it is said that they are passed over, if it ``speaks``."""
        held = self.bucket.sizes() if self.bucket else None
        if self.folder is None:
            paths = []
        elif held is None:
            paths = sorted(self.folder.glob("step-*"))
        else:
            names = {name.partition("/")[0] for name in held if name.startswith("step-")}
            paths = [self.folder / name for name in sorted(names)]
        complete = []
        for path in paths:
            try:
                complete.append(Checkpoint.whole(path, self.bucket, held))
            except Torn as error:
                if speaks:
                    print(f"checkpoint {path.name} is torn, and passed over: {error}", flush=True)
        return sorted(complete, key=lambda checkpoint: checkpoint.saved_at, reverse=True)


def _scratch(url: str) -> Path:
    """This node's folder for what is on its way to a bucket or back."""
    run = os.environ.get("CLUSTERKIT_RUN_ID") or os.environ.get("MASTER_PORT", "")
    name = hashlib.sha256(f"{url} {run} {os.getuid()}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir(), f"checkpoints-{name}-{read_ranks().node_rank}")


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: where it is, and what its ``checkpoint.json`` says."""

    path: Path
    """Its folder; of one in a bucket where it is put to be read."""
    step: int
    strategy: str
    world_size: int
    any_world_size: bool
    model: Mapping[str, Any]
    notes: Mapping[str, Any]
    saved_at: float
    files: Mapping[str, int] = field(repr=False)
    bucket: Bucket | None = None
    data: Mapping[str, Any] = field(default_factory=dict)  # gpt_data.Batches.state
    hashes: Mapping[str, str] = field(default_factory=dict, repr=False)  # SHA-256 of each file

    @property
    def where(self) -> str:
        return f"{self.bucket.url}/{self.path.name}" if self.bucket else str(self.path)

    @classmethod
    def read(cls, path: Path) -> Checkpoint | None:
        """The checkpoint at ``path``; None if it is not one, or torn."""
        try:
            return cls.whole(path)
        except Torn:
            return None

    @classmethod
    def whole(
        cls, path: Path, bucket: Bucket | None = None, held: Mapping[str, int] | None = None
    ) -> Checkpoint:
        """The checkpoint at ``path``, or of that name in a bucket that holds these files.

        Raises:
            Torn: it is none, or a file is missing or cut.
        """
        try:
            if bucket is None or held is None:
                manifest, sizes = (path / MANIFEST).read_bytes(), file_sizes(path)
            else:
                place = f"{path.name}/"
                sizes = {
                    n.removeprefix(place): size for n, size in held.items() if n.startswith(place)
                }
                if MANIFEST not in sizes:
                    raise FileNotFoundError
                manifest = bucket.read(place + MANIFEST)
            found = cls(path=path, bucket=bucket, **json.loads(manifest))
            wrong = next((file for file, n in found.files.items() if sizes.get(file) != n), None)
        except FileNotFoundError:
            raise Torn(f"{MANIFEST} is missing") from None
        except OSError as error:
            raise Torn(f"{MANIFEST}: {error.strerror}") from None
        except (ValueError, TypeError, AttributeError):
            raise Torn(f"{MANIFEST} is damaged") from None
        if wrong is not None:
            raise Torn(f"{wrong} is missing or cut")
        return found

    def check(self, model: Mapping[str, Any], strategy: str, size: int, *, converts: bool) -> None:
        """Refuse what was saved of another model, or by ranks and a strategy that these cannot
        load; ``converts``: whatever has saved it, any number of ranks can."""
        where, saved_by = f"checkpoint {self.where}", self.strategy
        or_anew = "or train into another checkpoint folder, or set checkpoint.resume to never"
        if dict(self.model) != model:
            there, here = (
                ", ".join(f"{key}={value}" for key, value in each.items())
                for each in (self.model, model)
            )
            raise BadInput(
                f"{where} holds the model {there}, this run trains {here}",
                hint=f"use the same model, {or_anew}",
            )
        if saved_by != strategy:
            raise BadInput(
                f"{where} was saved by {saved_by}, this run uses {strategy}",
                hint=f"use the same strategy, {or_anew}",
            )
        count, can = self.world_size, self.any_world_size or converts
        if count != size and not can:
            convert = "set deepspeed.checkpoint.load_universal to true, "
            convert = convert if saved_by.startswith("deepspeed") else ""
            raise BadInput(
                f"{where} was saved by {count} ranks, now there are {size}; "
                f"{saved_by} divides its state by the number of ranks",
                hint=f"run on {count} ranks, {convert}{or_anew}",
            )

    def fetch(self) -> None:
        """Bring the files of one in a bucket to ``path``."""
        for name in self.files:
            if self.bucket is not None:
                self.bucket.download(f"{self.path.name}/{name}", self.path / name)

    def verify(self, world: World | None = None) -> None:
        """Refuse files that are not as they were written; ranks of a node read some. Collective."""
        names = sorted(self.hashes)
        if world and self.bucket:  # each node has files of its own
            names = names[world.local_rank :: world.local_size]
        elif world:
            names = _share(names, world)
        here = hashes(self.path, names)
        wrong = [name for name, found in here.items() if found != self.hashes[name]]
        for name in (name for each in (world.gather(wrong) if world else [wrong]) for name in each):
            raise ValueError(f"{name} is damaged: its SHA-256 is not the one in {MANIFEST}")

    def remove(self) -> None:
        """Torn from the first file on, so never taken for a checkpoint again."""
        if self.bucket is None:
            (self.path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(self.path, ignore_errors=True)
            return
        for name in (MANIFEST, *self.files):
            self.bucket.remove(f"{self.path.name}/{name}")


def seal(draft: Path, final: Path, manifest: Mapping[str, Any], world: World) -> None:
    """Make the draft durable, then give it its name: from here on it counts. Collective."""
    sizes = world.gather(file_sizes(draft) if world.is_first else None)[0]
    parts = world.gather(hashes(draft, _share(sorted(sizes), world)))
    if not world.is_first:
        return
    manifest = {**manifest, "files": sizes, "hashes": _joined(parts)}
    (draft / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in [*draft.rglob("*"), draft]:
        sync(path)
    if final.exists():  # from an earlier run that began anew
        shutil.rmtree(final)
    draft.rename(final)
    sync(final.parent)


def _share(names: list[str], world: World) -> list[str]:
    """This rank's part of the first node's files, which other nodes see only where they share its
    disk."""
    return names[world.rank :: world.local_size] if world.rank < world.local_size else []


def send(bucket: Bucket, draft: Path, name: str, manifest: Mapping[str, Any], world: World) -> None:
    """Each node sends what its ranks have written; with the last file it counts. Collective."""
    sizes: dict[str, int] = {}
    sums: dict[str, str] = {}
    if world.is_first:  # one of that name, from an earlier run that began anew
        old = [file for file in bucket.sizes() if file.startswith(f"{name}/")]
        for file in sorted(old, key=lambda file: not file.endswith(MANIFEST)):
            bucket.remove(file)
    world.barrier()
    if world.local_rank == 0:
        sizes = file_sizes(draft)
        sums = hashes(draft, sizes)
        for file in sizes:
            bucket.write(f"{name}/{file}", draft / file)
        shutil.rmtree(draft.parent)
    whole = {"files": _joined(world.gather(sizes)), "hashes": _joined(world.gather(sums))}
    if world.is_first:
        bucket.write(f"{name}/{MANIFEST}", json.dumps({**manifest, **whole}, indent=1).encode())


def _joined(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


def export(source: Path, target: Path) -> Path:
    """Write the weights of the checkpoint ``source`` into the folder ``target``.

    Returns:
        The file or folder to load.

    Raises:
        BadInput: no whole checkpoint, or one of a model that is not known here.
    """
    checkpoint = Checkpoint.read(source)
    if checkpoint is None:
        raise BadInput(
            f"{source} is not a complete checkpoint", hint="a folder such as step-00000200"
        )
    with readable(checkpoint.path):
        checkpoint.verify()
        state = weights(checkpoint)
    target.mkdir(parents=True, exist_ok=True)
    if checkpoint.model.keys() >= set(SIZES):
        known = checkpoint.model
        sizes = {field.name: known[field.name] for field in fields(Shape) if field.name in known}
        model = _filled(GPT(Shape(**sizes)), state, source)
        torch.save(model.state_dict(), target / "model.pt")
        return target / "model.pt"
    return _as_hugging_face(checkpoint, state, target)


def weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Every parameter of a checkpoint by its name, whole, in fp32, in host memory."""
    folder = checkpoint.path
    state = _from_zero(folder) if (folder / "zero").exists() else _from_shards(folder)
    return {name: tensor.float() for name, tensor in state.items()}


def _from_shards(folder: Path) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        return read_weights(folder)


def _from_zero(folder: Path) -> dict[str, Tensor]:
    if len(parts := sorted((folder / "zero").glob("mp_rank_*_model_states.pt"))) > 1:
        # zero_to_fp32 puts together what ZeRO divides, and nothing else (DeepSpeed 0.19).
        how = "pipeline" if any((folder / "zero").glob("layer_*")) else "tensor parallelism"
        raise BadInput(
            f"{folder}: DeepSpeed's {how} divided the model into {len(parts)} parts, which cannot "
            "be exported",
            hint="--strategy pp, tp and 3d divide it as well, and their checkpoints can",
        )
    if not any((folder / "zero").glob("*optim_states.pt")):  # stage 0 in fp32
        saved = torch.load(
            folder / "zero" / "mp_rank_00_model_states.pt", map_location="cpu", weights_only=True
        )
        plain: dict[str, Tensor] = saved["module"]
        return plain
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with read_as_data():
        merged: dict[str, Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(folder), "zero")
    return merged


def _filled(model: nn.Module, state: Mapping[str, Tensor], source: Path) -> nn.Module:
    """A model with these weights; of names that share one weight, one is enough.

    Raises:
        BadInput: weights are missing, of other sizes, or too many.
    """
    whole = dict(state)
    names: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(parameter, name)
        if name not in whole and first in whole:
            whole[name] = whole[first]
    try:
        model.load_state_dict(whole)
    except RuntimeError as error:
        reason = str(error).replace("\n\t", " ")
        raise BadInput(f"checkpoint {source}: {reason}") from None
    return model


def _as_hugging_face(checkpoint: Checkpoint, state: Mapping[str, Tensor], target: Path) -> Path:
    from gpt_hugging_face import CausalLM, load_config

    name = str(checkpoint.model.get("name"))
    if "type" not in checkpoint.model:
        raise BadInput(f"checkpoint {checkpoint.path} is of {name}, which is not known here")
    whole = _filled(CausalLM(name, load_config(name), pretrained=False), state, checkpoint.path)
    whole.model.save_pretrained(target)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Export the weights of a checkpoint.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    print(export(args.checkpoint, args.folder))
    return 0


if __name__ == "__main__":
    run(main)
