"""One checkpoint: whether it is whole, its files, on a disk or in a bucket, and their errors."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from bucket import Bucket
from ranks import BadInput, Explained

MANIFEST = "checkpoint.json"


class Torn(Exception):
    """Why it is not a whole checkpoint."""


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

    def fetch(self) -> None:
        """Bring the files of one in a bucket to ``path``."""
        for name in self.files:
            if self.bucket is not None:
                self.bucket.download(f"{self.path.name}/{name}", self.path / name)

    def remove(self) -> None:
        """Torn from the first file on, so never taken for a checkpoint again."""
        if self.bucket is None:
            (self.path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(self.path, ignore_errors=True)
            return
        for name in (MANIFEST, *self.files):
            self.bucket.remove(f"{self.path.name}/{name}")


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


def seal(draft: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    """Make the draft durable, then give it its name: from here on it counts."""
    manifest = {**manifest, "files": file_sizes(draft)}
    (draft / MANIFEST).write_text(json.dumps(manifest, indent=1))
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
