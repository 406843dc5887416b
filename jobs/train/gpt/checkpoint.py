"""Checkpoints that are whole or not there at all, and resuming from them.

A checkpoint is a folder ``step-00000100`` with the shards (or DeepSpeed's files), the random
number states and ``checkpoint.json``, which says what it holds. It is written under another name,
made durable and renamed, so that a crash leaves the previous checkpoint as the newest. All nodes
must see the folder.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import BadInput, Explained, Ranks
from report import report
from world import World

_MANIFEST, _RANDOM = "checkpoint.json", "random.pt"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk: ``path`` and what its ``checkpoint.json`` says."""

    path: Path
    step: int
    strategy: str
    world_size: int
    any_world_size: bool
    model: Mapping[str, Any]
    notes: Mapping[str, Any]
    saved_at: float
    files: Mapping[str, int] = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> Checkpoint | None:
        """The checkpoint at ``path``; None if it is not one, or torn: a file missing or cut."""
        try:
            manifest = json.loads((path / _MANIFEST).read_text())
            checkpoint = cls(path=path, **manifest)
            whole = all((path / f).stat().st_size == n for f, n in checkpoint.files.items())
        except (OSError, ValueError, TypeError, AttributeError):
            return None
        return checkpoint if whole else None


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
            checkpoint = next(iter(self._newest_first()), None)
            if checkpoint is None:
                return None
        elif (checkpoint := Checkpoint.read(Path(self.resume).absolute())) is None:
            raise BadInput(
                f"checkpoint to resume from: {self.resume} is not a complete checkpoint",
                hint="give a folder such as checkpoints/step-00000100, or auto, or never",
            )
        self._check(checkpoint, ranks)
        return checkpoint

    def _check(self, checkpoint: Checkpoint, ranks: Ranks) -> None:
        """Refuse what was saved of another model, or that this run cannot load."""
        where, saved_by = f"checkpoint {checkpoint.path}", checkpoint.strategy
        or_anew = "or train into another checkpoint folder, or set checkpoint.resume to never"
        if dict(checkpoint.model) != self.model:
            there, here = (
                ", ".join(f"{key}={value}" for key, value in model.items())
                for model in (checkpoint.model, self.model)
            )
            raise BadInput(
                f"{where} holds the model {there}, this run trains {here}",
                hint=f"use the same model, {or_anew}",
            )
        if saved_by != self.strategy:
            raise BadInput(
                f"{where} was saved by {saved_by}, this run uses {self.strategy}",
                hint=f"use the same strategy, {or_anew}",
            )
        count, can = checkpoint.world_size, checkpoint.any_world_size or self.converts
        if count != ranks.size and not can:
            convert = "set deepspeed.checkpoint.load_universal to true, "
            convert = convert if saved_by.startswith("deepspeed") else ""
            raise BadInput(
                f"{where} was saved by {count} ranks, now there are {ranks.size}; "
                f"{saved_by} divides its state by the number of ranks",
                hint=f"run on {count} ranks, {convert}{or_anew}",
            )

    def load(self, checkpoint: Checkpoint, read: Callable[[Path], None], world: World) -> None:
        """Restore what ``read`` reads, and the random number states, on every rank. Collective."""
        seen = world.gather(str(checkpoint.path))
        if len(set(seen)) > 1:
            other = next(rank for rank, path in enumerate(seen) if path != seen[0])
            raise BadInput(
                f"rank 0 resumes from {seen[0]}, rank {other} from {seen[other]}",
                hint="put checkpoint.dir on a disk that all nodes share",
            )
        with readable(checkpoint.path):
            read(checkpoint.path)
            states = torch.load(checkpoint.path / _RANDOM, weights_only=True)
        if world.rank < len(states):
            _set_random_state(states[world.rank])
        if world.is_first:
            report("resumed", step=checkpoint.step, path=str(checkpoint.path))

    def save(
        self,
        step: int,
        write: Callable[[Path], Future[Any] | None],
        world: World,
        notes: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write the checkpoint of ``step`` and remove those beyond ``keep``. Collective.

        ``write`` may return before its files are there: then the checkpoint counts from ``finish``
        on. ``notes`` come back in ``Checkpoint.notes``.
        """
        self.finish(world)
        started = time.perf_counter()
        final = self.folder / f"step-{step:08d}"
        draft = self.folder / f".{final.name}.draft"
        with _writable(final, draft):
            if world.is_first:
                shutil.rmtree(draft, ignore_errors=True)
                draft.mkdir(parents=True)
            world.barrier()
            files = write(draft)
            states = world.gather(_random_state())
            if world.is_first:
                torch.save(states, draft / _RANDOM)
        manifest = {
            "step": step, "strategy": self.strategy, "world_size": world.size,
            "any_world_size": self.any_world_size, "model": self.model,
            "notes": dict(notes or {}), "saved_at": time.time(),
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
        with _writable(final, draft):
            if files is not None:
                files.result()
                world.barrier()
            if world.is_first:
                _seal(draft, final, manifest)
        if world.is_first:
            for checkpoint in self._newest_first()[self.keep :] if self.keep else []:
                # Torn from the first file on, so never taken for a checkpoint again.
                (checkpoint.path / _MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(checkpoint.path, ignore_errors=True)
            seconds = time.perf_counter() - started
            report("checkpoint", step=manifest["step"], path=str(final), seconds=seconds)
        world.barrier()

    def _newest_first(self) -> list[Checkpoint]:
        """The complete ones."""
        paths = self.folder.glob("step-*") if self.folder else []
        complete = filter(None, map(Checkpoint.read, paths))
        return sorted(complete, key=lambda checkpoint: checkpoint.saved_at, reverse=True)


@contextmanager
def _writable(final: Path, draft: Path) -> Iterator[None]:
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


def _seal(draft: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    """Make the draft durable, then give it its name: from here on it counts."""
    manifest = {**manifest, "files": file_sizes(draft)}
    (draft / _MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in [*draft.rglob("*"), draft]:
        _sync(path)
    if final.exists():  # from an earlier run that began anew
        shutil.rmtree(final)
    draft.rename(final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file below a folder, by its path from there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def _random_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"python": random.getstate(), "cpu": torch.get_rng_state(), "cuda": cuda}


def _set_random_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
