"""The host's half of `clusterkit.project`: makes a folder equal to the submitter's, from what is
here already and what must come.

Standard library only; its text is sent to the host and run there by the job's Python, with the
conversation on standard input and output:

    host    {"waiting": 10.0}              while somebody else fills the folder
    host    {"missing": [3, 17]}           after the request, a line of JSON and compressed entries
    sender  index, flags, length; data     pieces of each file that is missing
    host    {"done": 2} or {"error": ".."}

A tree is made under another name and renamed when it is whole, so that a run never starts in
half a project. Files that an earlier tree has unchanged are linked, not copied. Beside a tree
``NAME.json`` keeps every file's digest, size and time of change: a file that a program has
changed since is found out and replaced. What programs have written beside the files stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import struct
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

KEEP_TREES = 5
"""How many trees of a project stay, those in use besides."""
HEADER = struct.Struct(">IBQ")
ZIPPED, MORE = 1, 2
"""Flags of a piece: compressed; not the file's last."""
DIGEST_BYTES = 16
WAITING_SECONDS = 10.0
"""How often the sender is told that it has to wait."""
_COUNT = struct.Struct(">Q")
_DRAFT = ".draft-"
"""Begins the names of what is not finished; whoever holds the lock may remove such."""
Record = dict[str, list[Any]]
"""Path to ``[digest, size, mtime_ns]``."""


def digest_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


class Tree:
    """One version of a project on this host."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record_path = path.with_name(f"{path.name}.json")

    def intact(self) -> Record:
        """The files that are as they were made."""
        try:
            record = json.loads(self.record_path.read_bytes())
            return {name: entry for name, entry in record.items() if self._is_as_made(name, entry)}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    def _is_as_made(self, name: str, entry: list[Any]) -> bool:
        try:
            found = os.lstat(f"{self.path}/{name}")
        except OSError:
            return False
        return bool([found.st_size, found.st_mtime_ns] == entry[1:])


def receive(request: dict[str, Any], entries: list[list[Any]], source: BinaryIO) -> int:
    """Make the tree that ``entries`` (path, mode, size, digest, link target or None) describe.

    Returns:
        How many files had to come.
    """
    final = Path(request["path"])
    final.parent.mkdir(parents=True, exist_ok=True)
    with _locked(final.parent):
        _sweep(final.parent)
        try:
            missing = _make(final, entries, source)
        finally:
            _sweep(final.parent)
        os.utime(final)
        _point(final.parent / "current", final.name)
        _prune(final)
    return len(missing)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        began = told = time.monotonic()
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            if time.monotonic() - told > WAITING_SECONDS:
                told = time.monotonic()
                _say({"waiting": told - began})
        yield


def _sweep(folder: Path) -> None:
    """Remove what somebody left who was killed half way."""
    for path in folder.glob(f"{_DRAFT}*"):
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _make(final: Path, entries: list[list[Any]], source: BinaryIO) -> list[int]:
    tree = Tree(final)
    new = not final.is_dir()
    if new:
        into = final.with_name(f"{_DRAFT}tree")
        into.mkdir()
        record, missing = _link_known(entries, into, _known(final))
    else:
        into = final
        record, missing = _unchanged(entries, tree)
    _say({"missing": missing})
    take = _fill if new else _replace
    take(entries, missing, into, source, record)
    draft = final.with_name(f"{_DRAFT}record")
    draft.write_text(json.dumps(record))
    draft.replace(tree.record_path)
    if new:
        _remove(final)  # no folder, whatever it is
        into.rename(final)
    return missing


def _unchanged(entries: list[list[Any]], tree: Tree) -> tuple[Record, list[int]]:
    """What of a tree is still as the entries say, and the numbers of the rest."""
    here = tree.intact()
    record, missing = {}, []
    real = {tree.path: True}

    def is_real(folder: Path) -> bool:
        # Not by way of a link that a program has put in a folder's place.
        if folder not in real:
            real[folder] = is_real(folder.parent) and not folder.is_symlink()
        return real[folder]

    for number, entry in enumerate(entries):
        if not (is_real((tree.path / entry[0]).parent) and _same(here, entry, tree.path)):
            missing.append(number)
        elif entry[4] is None:
            record[entry[0]] = here[entry[0]]
    return record, missing


def _same(here: Record, entry: list[Any], tree: Path) -> bool:
    name, mode, _, digest, target = entry
    try:
        if target is not None:
            return bool(os.readlink(tree / name) == target)
        right = os.lstat(tree / name).st_mode & 0o777 == mode
        return bool(right and name in here and here[name][0] == digest)
    except OSError:
        return False


# Thousands of files at a time: paths are plain strings here, which are far quicker to join.
def _known(final: Path) -> dict[tuple[str, int], tuple[str, list[Any]]]:
    """Digest and mode to an unchanged file of another tree, and its record; the newest first."""
    others = sorted(_trees(final), key=lambda path: path.stat().st_mtime, reverse=True)
    known: dict[tuple[str, int], tuple[str, list[Any]]] = {}
    for other in others[:2]:
        for name, entry in Tree(other).intact().items():
            path = f"{other}/{name}"
            with contextlib.suppress(FileNotFoundError):
                known.setdefault((entry[0], os.lstat(path).st_mode & 0o777), (path, entry))
    return known


def _link_known(
    entries: list[list[Any]], into: Path, known: dict[tuple[str, int], tuple[str, list[Any]]]
) -> tuple[Record, list[int]]:
    """Make what can be made of what is here; gives its record and the numbers of the rest."""
    record: Record = {}
    missing = []
    made = {""}
    for number, (name, mode, _, digest, target) in enumerate(entries):
        path = f"{into}/{name}"
        folder = name.rpartition("/")[0]
        if folder not in made:
            os.makedirs(f"{into}/{folder}", exist_ok=True)
            made.add(folder)
        if target is not None:
            os.symlink(target, path)
            continue
        try:
            old, entry = known[digest, mode]
            os.link(old, path)
            record[name] = entry
        except (KeyError, OSError):
            missing.append(number)
    return record, missing


def _fill(
    entries: list[list[Any]], missing: list[int], into: Path, source: BinaryIO, record: Record
) -> None:
    """Write the files that come into a new tree, whose folders and links are there."""
    for number in missing:
        name, mode, _, digest, _ = entries[number]
        record[name] = _take_file(number, f"{into}/{name}", source, name, mode, digest)


def _replace(
    entries: list[list[Any]], missing: list[int], into: Path, source: BinaryIO, record: Record
) -> None:
    # Under another name first: the old one may be linked from another tree.
    draft = into.with_name(f"{_DRAFT}file")
    for number in missing:
        name, mode, _, digest, target = entries[number]
        if target is not None:
            draft.symlink_to(target)
        else:
            record[name] = _take_file(number, str(draft), source, name, mode, digest)
        path = into / name
        _make_folders(into, path.parent)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        draft.replace(path)


def _take_file(
    number: int, path: str, source: BinaryIO, name: str, mode: int, digest: str
) -> list[Any]:
    """Write one file as its pieces come; gives its record."""
    hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
    flags = MORE
    with open(path, "wb", buffering=0) as file:
        while flags & MORE:
            index, flags, length = HEADER.unpack(_exactly(source, HEADER.size))
            if index != number:
                raise ValueError(f"file {index} came where {number} was due")
            data = _exactly(source, length)
            if flags & ZIPPED:
                data = zlib.decompress(data)
            hashed.update(data)
            while data:
                data = data[file.write(data) :]
        if hashed.hexdigest() != digest:
            raise ValueError(f"{name} changed while it was copied")
        os.fchmod(file.fileno(), mode)
        found = os.fstat(file.fileno())
    return [digest, found.st_size, found.st_mtime_ns]


def _make_folders(root: Path, folder: Path) -> None:
    """Have real folders from ``root`` down, whatever a program has put in their places."""
    current = root
    for part in folder.relative_to(root).parts:
        current = current / part
        if current.is_symlink() or not current.is_dir():
            current.unlink(missing_ok=True)
            current.mkdir()


def _exactly(source: BinaryIO, size: int) -> bytes:
    data = source.read(size)
    if len(data) != size:
        raise EOFError("the sender disconnected")
    return data


def _trees(final: Path) -> list[Path]:
    return [
        path.with_suffix("")
        for path in final.parent.glob("*.json")
        if not path.name.startswith(".")
        and path.stem != final.name
        and path.with_suffix("").is_dir()
    ]


def _point(link: Path, name: str) -> None:
    draft = link.with_name(f"{_DRAFT}link")
    draft.symlink_to(name)
    draft.replace(link)


def _prune(final: Path) -> None:
    """Remove old trees that no process works in."""
    others = sorted(_trees(final), key=lambda path: path.stat().st_mtime, reverse=True)
    old = others[KEEP_TREES - 1 :]
    used = _working_folders() if old else set()
    for path in old:
        if not any(folder == str(path) or folder.startswith(f"{path}/") for folder in used):
            with contextlib.suppress(OSError):  # what a program of root's has left there
                gone = path.rename(path.with_name(f"{_DRAFT}old"))
                path.with_name(f"{path.name}.json").unlink(missing_ok=True)
                _remove(gone)


def _working_folders() -> set[str]:
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/{name}/cwd"))
    return found


def _say(document: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(document).encode() + b"\n")
    sys.stdout.buffer.flush()


def main() -> int:
    source = sys.stdin.buffer
    os.umask(0o077)  # the folders: a copy is its owner's alone
    with contextlib.suppress(BrokenPipeError):  # nobody listens any more
        _converse(source)
    return 0


def _converse(source: BinaryIO) -> None:
    try:
        request = json.loads(source.readline())
        size = _COUNT.unpack(_exactly(source, _COUNT.size))[0]
        entries = json.loads(zlib.decompress(_exactly(source, size)))
        _say({"done": receive(request, entries, source)})
    except BrokenPipeError:
        raise
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        _say({"error": f"{error.strerror or error}{place}"})
    except (ValueError, EOFError, zlib.error) as error:
        _say({"error": str(error)})


if __name__ == "__main__":
    sys.exit(main())
