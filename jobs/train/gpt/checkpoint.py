"""Checkpoints that are whole or not there at all, and resuming from them.

A checkpoint is a folder ``step-00000100`` with the shards (or DeepSpeed's files), the random
number states and ``checkpoint.json``, which says what it holds. It is written under another name,
made durable and renamed, so that a crash leaves the previous checkpoint as the newest. All nodes
must see the folder. In a bucket (``s3://BUCKET/PREFIX``) ``checkpoint.json`` is written last; each
node keeps a folder of its own for what is on its way there, or back.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bucket import Bucket, is_url
from checkpoint_files import readable, writable
from ranks import BadInput, Ranks, read_ranks
from report import report
from stored import Checkpoint, Torn, seal, send
from world import World, random_state, set_random_state

_RANDOM = "random.pt"


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
            elif world.is_first:
                seal(draft, final, manifest)
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
