"""One checkpoint: whether it is whole, its files, on a disk or in a bucket, and their errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bucket import Bucket
from checkpoint_files import file_sizes, sync
from ranks import BadInput
from world import World

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
    data: Mapping[str, Any] = field(default_factory=dict)  # gpt_data.Batches.state

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

    def remove(self) -> None:
        """Torn from the first file on, so never taken for a checkpoint again."""
        if self.bucket is None:
            (self.path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(self.path, ignore_errors=True)
            return
        for name in (MANIFEST, *self.files):
            self.bucket.remove(f"{self.path.name}/{name}")


def seal(draft: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    """Make the draft durable, then give it its name: from here on it counts."""
    manifest = {**manifest, "files": file_sizes(draft)}
    (draft / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in [*draft.rglob("*"), draft]:
        sync(path)
    if final.exists():  # from an earlier run that began anew
        shutil.rmtree(final)
    draft.rename(final)
    sync(final.parent)


def send(bucket: Bucket, draft: Path, name: str, manifest: Mapping[str, Any], world: World) -> None:
    """Each node sends what its ranks have written; with the last file it counts. Collective."""
    sizes: dict[str, int] = {}
    if world.is_first:  # one of that name, from an earlier run that began anew
        old = [file for file in bucket.sizes() if file.startswith(f"{name}/")]
        for file in sorted(old, key=lambda file: not file.endswith(MANIFEST)):
            bucket.remove(file)
    world.barrier()
    if world.local_rank == 0:
        sizes = file_sizes(draft)
        for file in sizes:
            bucket.upload(draft / file, f"{name}/{file}")
        shutil.rmtree(draft.parent)
    whole = {"files": {file: n for each in world.gather(sizes) for file, n in each.items()}}
    if world.is_first:
        bucket.write(f"{name}/{MANIFEST}", json.dumps({**manifest, **whole}, indent=1).encode())
