"""Checkpoints that are whole or not there at all, and resuming from them.

A checkpoint is a folder ``step-00000100`` with the strategy's files, the random number states and
``checkpoint.json``, which says what it holds. It is written under another name, made durable and
renamed, so that a crash leaves the previous checkpoint as the newest. All nodes must see the
folder.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from clusterkit.errors import BadInput, ClusterkitError
from clusterkit.runtime.distributed import Ranks, World
from clusterkit.runtime.metrics import report
from clusterkit.runtime.strategy import Strategy

_MANIFEST = "checkpoint.json"
_RANDOM = "random.pt"


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


@dataclass(frozen=True)
class _Writing:
    """A checkpoint that does not count yet; ``files`` tells when this rank has written its own."""

    checkpoint: Checkpoint
    final: Path
    files: Future[Any] | None
    started: float


class Checkpoints:
    """The checkpoints of a run, in one folder.

    Args:
        folder: where they lie; None switches checkpoints off.
        every: steps between two; 0 for one at the end only.
        keep: how many of the newest to keep; 0 for all.
        resume: ``auto`` (the newest, if there is one), ``never``, or the path of one.
        model: what the program builds. A checkpoint of anything else is refused.
    """

    def __init__(
        self,
        folder: Path | str | None,
        *,
        every: int = 0,
        keep: int = 2,
        resume: str = "auto",
        model: Mapping[str, Any],
    ) -> None:
        self._folder = Path(folder).absolute() if folder else None
        self._every = every
        self._keep = keep
        self._resume = resume
        # As it will come back from JSON, for comparing.
        self._model: dict[str, Any] = json.loads(json.dumps(dict(model)))
        self._writing: _Writing | None = None

    def due(self, step: int, *, last: bool) -> bool:
        """Whether to save after ``step``."""
        if self._folder is None:
            return False
        return last or (self._every > 0 and step % self._every == 0)

    def find(
        self, ranks: Ranks, *, strategy: str | None = None, converts: bool = False
    ) -> Checkpoint | None:
        """The checkpoint to resume from, or None to start from the beginning.

        Args:
            strategy: the name of the one that will load it.
            converts: whether that one can load what another number of ranks saved, in any case.

        Raises:
            BadInput: the path to resume from is no complete checkpoint, or the checkpoint holds
                another model, was saved by another strategy, or by a number of ranks that this
                run has not, and the strategy cannot do without.
        """
        checkpoint = self._choose()
        if checkpoint is None:
            return None
        where = f"checkpoint {checkpoint.path}"
        or_anew = "or train into another checkpoint folder, or set checkpoint.resume to never"
        if dict(checkpoint.model) != self._model:
            raise BadInput(
                f"{where} holds the model {_describe(checkpoint.model)}, "
                f"this run trains {_describe(self._model)}",
                hint=f"use the same model, {or_anew}",
            )
        if strategy is not None and checkpoint.strategy != strategy:
            raise BadInput(
                f"{where} was saved by {checkpoint.strategy}, this run uses {strategy}",
                hint=f"use the same strategy, {or_anew}",
            )
        if checkpoint.world_size != ranks.size and not (checkpoint.any_world_size or converts):
            convert = (
                "set deepspeed.checkpoint.load_universal to true, "
                if checkpoint.strategy.startswith("deepspeed")
                else ""
            )
            raise BadInput(
                f"{where} was saved by {checkpoint.world_size} ranks, now there are {ranks.size}; "
                f"{checkpoint.strategy} divides its state by the number of ranks",
                hint=f"run on {checkpoint.world_size} ranks, {convert}{or_anew}",
            )
        return checkpoint

    def load(self, checkpoint: Checkpoint, strategy: Strategy, world: World) -> None:
        """Restore model, optimizer and random number states on every rank. Collective.

        Raises:
            BadInput: the ranks do not all see this checkpoint.
        """
        seen = world.gather(str(checkpoint.path))
        if len(set(seen)) > 1:
            other = next(rank for rank, path in enumerate(seen) if path != seen[0])
            raise BadInput(
                f"rank 0 resumes from {seen[0]}, rank {other} from {seen[other]}",
                hint="put checkpoint.dir on a disk that all nodes share",
            )
        with readable(checkpoint):
            strategy.load(checkpoint.path)
            states = torch.load(checkpoint.path / _RANDOM, weights_only=True)
        if world.rank < len(states):
            _set_random_state(states[world.rank])
        if world.is_first:
            report("resumed", step=checkpoint.step, path=str(checkpoint.path))

    def save(
        self, step: int, strategy: Strategy, world: World, notes: Mapping[str, Any] | None = None
    ) -> Path:
        """Write the checkpoint of ``step`` and remove those beyond ``keep``. Collective.

        A strategy that writes in the background may return before the files are there: then
        the checkpoint counts from ``finish`` on.

        Args:
            notes: anything JSON can hold; comes back in ``Checkpoint.notes``.

        Raises:
            ClusterkitError: it cannot be written; earlier ones are as they were.
        """
        if self._folder is None:
            raise ValueError("checkpoints are switched off: no folder was given")
        self.finish(world)
        started = time.perf_counter()
        final = self._folder / f"step-{step:08d}"
        draft = self._folder / f".{final.name}.draft"
        with _explained(final, draft):
            if world.is_first:
                shutil.rmtree(draft, ignore_errors=True)
                draft.mkdir(parents=True)
            world.barrier()
            files = strategy.save(draft)
            states = world.gather(_random_state())
            if world.is_first:
                torch.save(states, draft / _RANDOM)
        checkpoint = Checkpoint(
            path=draft,
            step=step,
            strategy=strategy.name,
            world_size=world.size,
            any_world_size=strategy.any_world_size,
            model=self._model,
            notes=dict(notes or {}),
            saved_at=time.time(),
            files={},
        )
        self._writing = _Writing(checkpoint, final, files, started)
        if files is None:
            self.finish(world)
        return final

    def written(self) -> bool:
        """Whether this rank has written its part of a checkpoint that waits for ``finish``."""
        writing = self._writing
        return writing is not None and (writing.files is None or writing.files.done())

    def finish(self, world: World) -> None:
        """Wait until all ranks have written, and let the checkpoint count. Collective.

        Does nothing when no checkpoint is being written.

        Raises:
            ClusterkitError: as ``save``.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        draft, final = writing.checkpoint.path, writing.final
        with _explained(final, draft):
            if writing.files is not None:
                writing.files.result()
                world.barrier()
            if world.is_first:
                _seal(replace(writing.checkpoint, files=file_sizes(draft)), final)
        if world.is_first:
            for checkpoint in self._newest_first()[self._keep :] if self._keep else []:
                # Torn from the first file on, so never taken for a checkpoint again.
                (checkpoint.path / _MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(checkpoint.path, ignore_errors=True)
            seconds = time.perf_counter() - writing.started
            report("checkpoint", step=writing.checkpoint.step, path=str(final), seconds=seconds)
        world.barrier()

    def _choose(self) -> Checkpoint | None:
        if self._resume == "never":
            return None
        if self._resume != "auto":
            checkpoint = Checkpoint.read(Path(self._resume).absolute())
            if checkpoint is None:
                raise BadInput(
                    f"checkpoint to resume from: {self._resume} is not a complete checkpoint",
                    hint="give a folder such as checkpoints/step-00000100, or auto, or never",
                )
            return checkpoint
        return next(iter(self._newest_first()), None)

    def _newest_first(self) -> list[Checkpoint]:
        """The complete ones."""
        paths = self._folder.glob("step-*") if self._folder else []
        complete = filter(None, map(Checkpoint.read, paths))
        return sorted(complete, key=lambda checkpoint: checkpoint.saved_at, reverse=True)


@contextmanager
def _explained(final: Path, draft: Path) -> Iterator[None]:
    """Within, a disk that does not take the files is one clear error, and leaves no draft."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch.save tells of a short write by a RuntimeError of its zip writer.
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise
        reason = "not all of it was taken" if isinstance(error, RuntimeError) else error.strerror
        shutil.rmtree(draft, ignore_errors=True)
        raise ClusterkitError(
            f"cannot write checkpoint {final}: {reason or error}",
            hint="make room on that disk, set checkpoint.dir to another, or lower checkpoint.keep",
        ) from error


@contextmanager
def readable(checkpoint: Checkpoint) -> Iterator[None]:
    """Within, files that cannot be read, or hold something else, are one clear error."""
    try:
        yield
    except (ClusterkitError, dist.DistError):
        raise  # clear enough already; a lost rank, not a bad file
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as error:
        if "gloo/transport" in str(error):
            raise
        # torch says in the first line what failed, in the second why.
        reason = " ".join(str(error).split("\n", 2)[:2]).replace("\t", "").strip()
        reason = more_than_data(str(error)) or reason or type(error).__name__
        raise BadInput(
            f"checkpoint {checkpoint.path} cannot be read: {reason}",
            hint="resume from an earlier one (checkpoint.resume: FOLDER), or from none (never)",
        ) from error


def more_than_data(said: str) -> str | None:
    """The reason in torch's words about a file that names a class or a function; else None."""
    named = re.search(r"GLOBAL (\S+)", said)
    if named is None:
        return None
    return f"it holds {named[1]}, which is neither a tensor nor a plain value and might run code"


def _seal(checkpoint: Checkpoint, final: Path) -> None:
    """Make the draft durable, then give it its name: from here on it counts."""
    draft = checkpoint.path
    manifest = {key: value for key, value in asdict(checkpoint).items() if key != "path"}
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


def _describe(model: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in model.items())


def _random_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"python": random.getstate(), "cpu": torch.get_rng_state(), "cuda": cuda}


def _set_random_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
