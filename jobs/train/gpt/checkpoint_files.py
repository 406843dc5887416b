"""What `checkpoint` does to files: whole or not there at all, and errors in one line."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import BadInput, Explained, Ranks

_MANIFEST = "checkpoint.json"


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

    def check(
        self, model: Mapping[str, Any], strategy: str | None, ranks: Ranks, *, converts: bool
    ) -> None:
        """Refuse what was saved of another model, or that this run cannot load."""
        where = f"checkpoint {self.path}"
        or_anew = "or train into another checkpoint folder, or set checkpoint.resume to never"
        if dict(self.model) != model:
            raise BadInput(
                f"{where} holds the model {_describe(self.model)}, "
                f"this run trains {_describe(model)}",
                hint=f"use the same model, {or_anew}",
            )
        if strategy is not None and self.strategy != strategy:
            raise BadInput(
                f"{where} was saved by {self.strategy}, this run uses {strategy}",
                hint=f"use the same strategy, {or_anew}",
            )
        if self.world_size != ranks.size and not (self.any_world_size or converts):
            convert = (
                "set deepspeed.checkpoint.load_universal to true, "
                if self.strategy.startswith("deepspeed")
                else ""
            )
            raise BadInput(
                f"{where} was saved by {self.world_size} ranks, now there are {ranks.size}; "
                f"{self.strategy} divides its state by the number of ranks",
                hint=f"run on {self.world_size} ranks, {convert}{or_anew}",
            )


@contextmanager
def writable(final: Path, draft: Path) -> Iterator[None]:
    """Within, a disk that does not take the files is one clear error, and leaves no draft."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch.save tells of a short write by a RuntimeError of its zip writer.
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise
        reason = "not all of it was taken" if isinstance(error, RuntimeError) else error.strerror
        shutil.rmtree(draft, ignore_errors=True)
        raise Explained(
            f"cannot write checkpoint {final}: {reason or error}",
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


def seal(draft: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    """Make the draft durable, then give it its name: from here on it counts."""
    manifest = {**manifest, "files": file_sizes(draft)}
    (draft / _MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in [*draft.rglob("*"), draft]:
        _sync(path)
    if final.exists():  # from an earlier run that began anew
        shutil.rmtree(final)
    draft.rename(final)
    _sync(final.parent)


def remove(checkpoint: Checkpoint) -> None:
    """Torn from the first file on, so never taken for a checkpoint again."""
    (checkpoint.path / _MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint.path, ignore_errors=True)


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


def random_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"python": random.getstate(), "cpu": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _describe(model: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in model.items())
