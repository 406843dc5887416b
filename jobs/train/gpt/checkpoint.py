"""Checkpoints that are whole or not there at all, and resuming from them.

A checkpoint is a folder ``step-00000100`` with the strategy's files, the random number states and
``checkpoint.json``, which says what it holds. It is written under another name, made durable and
renamed, so that a crash leaves the previous checkpoint as the newest. All nodes must see the
folder.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoint_files import (
    Checkpoint,
    random_state,
    readable,
    remove,
    seal,
    set_random_state,
    writable,
)
from ranks import BadInput, Ranks
from report import report
from strategy import Strategy
from world import World

_RANDOM = "random.pt"


@dataclass(frozen=True)
class _Writing:
    """A checkpoint that does not count yet; ``files`` tells when this rank has written its own."""

    manifest: Mapping[str, Any]
    draft: Path
    final: Path
    files: Future[Any] | None
    started: float


class Checkpoints:
    """The checkpoints of a run, in one folder; None switches them off.

    ``keep`` is how many of the newest to keep, 0 for all; ``model`` what the program builds: a
    checkpoint of anything else is refused.
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

        ``strategy`` will load it; ``converts``: whatever number of ranks has saved it.
        """
        checkpoint = self._choose()
        if checkpoint is None:
            return None
        checkpoint.check(self._model, strategy, ranks, converts=converts)
        return checkpoint

    def load(self, checkpoint: Checkpoint, strategy: Strategy, world: World) -> None:
        """Restore model, optimizer and random number states on every rank. Collective."""
        seen = world.gather(str(checkpoint.path))
        if len(set(seen)) > 1:
            other = next(rank for rank, path in enumerate(seen) if path != seen[0])
            raise BadInput(
                f"rank 0 resumes from {seen[0]}, rank {other} from {seen[other]}",
                hint="put checkpoint.dir on a disk that all nodes share",
            )
        with readable(checkpoint.path):
            strategy.load(checkpoint.path)
            states = torch.load(checkpoint.path / _RANDOM, weights_only=True)
        if world.rank < len(states):
            set_random_state(states[world.rank])
        if world.is_first:
            report("resumed", step=checkpoint.step, path=str(checkpoint.path))

    def save(
        self, step: int, strategy: Strategy, world: World, notes: Mapping[str, Any] | None = None
    ) -> Path:
        """Write the checkpoint of ``step`` and remove those beyond ``keep``. Collective.

        A strategy that writes in the background may return before the files are there: then
        the checkpoint counts from ``finish`` on. ``notes`` come back in ``Checkpoint.notes``.
        """
        self.finish(world)
        started = time.perf_counter()
        final = self._folder / f"step-{step:08d}"
        draft = self._folder / f".{final.name}.draft"
        with writable(final, draft):
            if world.is_first:
                shutil.rmtree(draft, ignore_errors=True)
                draft.mkdir(parents=True)
            world.barrier()
            files = strategy.save(draft)
            states = world.gather(random_state())
            if world.is_first:
                torch.save(states, draft / _RANDOM)
        manifest = {
            "step": step, "strategy": strategy.name, "world_size": world.size,
            "any_world_size": strategy.any_world_size, "model": self._model,
            "notes": dict(notes or {}), "saved_at": time.time(),
        }  # fmt: skip
        self._writing = _Writing(manifest, draft, final, files, started)
        if files is None:
            self.finish(world)
        return final

    def written(self) -> bool:
        """Whether this rank has written its part of one that waits for ``finish``."""
        writing = self._writing
        return writing is not None and (writing.files is None or writing.files.done())

    def finish(self, world: World) -> None:
        """Wait until all ranks have written, if they do, and let it count. Collective."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        draft, final = writing.draft, writing.final
        with writable(final, draft):
            if writing.files is not None:
                writing.files.result()
                world.barrier()
            if world.is_first:
                seal(draft, final, writing.manifest)
        if world.is_first:
            for checkpoint in self._newest_first()[self._keep :] if self._keep else []:
                remove(checkpoint)
            seconds = time.perf_counter() - writing.started
            report("checkpoint", step=writing.manifest["step"], path=str(final), seconds=seconds)
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
