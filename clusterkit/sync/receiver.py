"""The host's half of `clusterkit.sync.project`: make a folder equal to the submitter's.

Standard library only; its text is sent to the host and run there by the job's Python, with the
conversation on standard input and output:

    host    {"waiting": 10.0}              while somebody else fills the folder
    host    {"missing": [3, 17]}           after the request, a line of JSON and compressed entries
    sender  index, flags, length; data     pieces of each file that is missing
    host    {"done": 2} or {"error": ".."}

If the request holds a token under ``relay``, a line of JSON comes before the pieces: ``{}``, or
``{"from": [address, port]}`` of a host that has the tree. That one sends the same pieces over TCP;
what it does not send is ``missing`` once more. After ``done`` a line from the sender asks this host
for ``{"port": ..}``, where it serves others, who show the token, until its input ends.

A tree is made under another name and renamed when it is whole, so that a run never starts in
half a project. Files that an earlier tree has unchanged are linked, not copied. Beside a tree
``NAME.json`` keeps every file's digest, size and time of change: a file that a program has
changed since is found out and replaced. What programs have written beside the files stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import shutil
import socket
import struct
import sys
import threading
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
PIECE_BYTES = 1 << 22
"""A file goes in pieces of this size, so that nobody holds all of it in memory."""
WAITING_SECONDS = 10.0
"""How often the sender hears that it has to wait."""
COUNT = struct.Struct(">Q")
"""Comes before the list of entries: its bytes."""
PEER_SECONDS = 10.0
"""For a host to accept another one's connection, or to send it something."""
_DRAFT = ".draft-"
"""Begins the names of what is not finished; whoever holds the lock may remove such."""
Entry = list[Any]
"""One file or link: ``[path, mode, size, digest, link target or None]``."""
Record = dict[str, list[Any]]
"""Path to ``[digest, size, mtime_ns]``."""


def digest_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def _record_of(tree: Path) -> Path:
    return tree.with_name(f"{tree.name}.json")


def _intact(tree: Path, digests: set[str]) -> dict[str, tuple[list[Any], int]]:
    """The files of a tree with one of these digests that are as they were made: record, mode."""
    intact = {}
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        for name, entry in json.loads(_record_of(tree).read_bytes()).items():
            with contextlib.suppress(OSError):
                if entry[0] in digests:
                    found = os.lstat(f"{tree}/{name}")
                    if [found.st_size, found.st_mtime_ns] == entry[1:]:
                        intact[name] = entry, found.st_mode & 0o777
    return intact


def receive(request: dict[str, Any], entries: list[Entry], source: BinaryIO) -> int:
    """Make the tree that ``entries`` describe; return how many files had to come."""
    final = Path(request["path"])
    final.parent.mkdir(parents=True, exist_ok=True)
    with _locked(final.parent):
        _sweep(final.parent)
        try:
            missing = _make(final, entries, source, request.get("relay"))
        finally:
            _sweep(final.parent)
        os.utime(final)
        _point(final.parent / "current", final.name)
        _prune(final)
    return len(missing)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        began = spoken = time.monotonic()
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            if time.monotonic() - spoken > WAITING_SECONDS:
                spoken = time.monotonic()
                _say({"waiting": spoken - began})
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


def _make(final: Path, entries: list[Entry], source: BinaryIO, token: str | None) -> list[int]:
    new = not final.is_dir()
    if new:
        into = final.with_name(f"{_DRAFT}tree")
        into.mkdir()
        record, missing = _link_known(entries, into, _known(final, entries))
    else:
        into = final
        record, missing = _unchanged(entries, final)
    _say({"missing": missing})
    peer = _peer(source, missing, token) if missing and token else None
    draft = final.with_name(f"{_DRAFT}file")
    for at, number in enumerate(missing):
        name, _, _, _, target = entries[number]
        # In a tree that is there under another name first: the old file may be linked from others.
        place = f"{into}/{name}" if new else str(draft)
        if target is None:
            if peer is not None:
                try:
                    record[name] = _take_file(number, entries[number], place, peer)
                except (OSError, ValueError, EOFError, zlib.error):
                    peer = None
                    _say({"missing": missing[at:]})
            if peer is None:
                record[name] = _take_file(number, entries[number], place, source)
        else:
            os.symlink(target, place)
        if not new:
            path = into / name
            _make_folders(into, path.parent)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            draft.replace(path)
    draft.write_text(json.dumps(record))
    draft.replace(_record_of(final))
    if new:
        _remove(final)  # no folder, whatever it is
        into.rename(final)
    return missing


def _unchanged(entries: list[Entry], tree: Path) -> tuple[Record, list[int]]:
    """What of a tree is still as the entries say, and the numbers of the rest."""
    here = _intact(tree, {entry[3] for entry in entries})
    record, missing = {}, []
    real = {tree: True}

    def is_real(folder: Path) -> bool:
        # Not by way of a link that a program has put in a folder's place.
        if folder not in real:
            real[folder] = is_real(folder.parent) and not folder.is_symlink()
        return real[folder]

    def is_same(name: str, mode: int, digest: str, target: str | None) -> bool:
        path = tree / name
        try:
            if target is not None:
                return is_real(path.parent) and os.readlink(path) == target
            return is_real(path.parent) and here[name][0][0] == digest and here[name][1] == mode
        except (OSError, KeyError):
            return False

    for number, (name, mode, _, digest, target) in enumerate(entries):
        if not is_same(name, mode, digest, target):
            missing.append(number)
        elif target is None:
            record[name] = here[name][0]
    return record, missing


# Thousands of files at a time: paths are plain strings here, which are far quicker to join.
def _known(final: Path, entries: list[Entry]) -> dict[tuple[str, int], tuple[str, list[Any]]]:
    """Digest and mode of entries to an unchanged file of the two trees made last, and its record:
    of the older one what the newer one has not."""
    known: dict[tuple[str, int], tuple[str, list[Any]]] = {}
    wanted = {entry[3] for entry in entries}
    for other in _other_trees(final)[:2]:
        for name, (entry, mode) in _intact(other, wanted).items():
            known.setdefault((entry[0], mode), (f"{other}/{name}", entry))
        wanted -= {digest for digest, _ in known}
    return known


def _link_known(
    entries: list[Entry], into: Path, known: dict[tuple[str, int], tuple[str, list[Any]]]
) -> tuple[Record, list[int]]:
    """Make what can be made of what is here; return its record and the numbers of the rest."""
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


def _take_file(number: int, entry: Entry, path: str, source: BinaryIO | _Peer) -> list[Any]:
    """Write one file as its pieces come; return its record."""
    name, mode, _, digest, _ = entry
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


class _Peer:
    """What another host sends; the sender hears now and then that it comes."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rb")
        self._began = self._spoken = time.monotonic()

    def read(self, size: int) -> bytes:
        if (now := time.monotonic()) - self._spoken > WAITING_SECONDS:
            self._spoken = now
            _say({"waiting": now - self._began})
        return self._file.read(size)


def _peer(source: BinaryIO, missing: list[int], token: str) -> _Peer | None:
    """The host that the sender names to take the files from; None: the sender sends them."""
    if (address := json.loads(source.readline()).get("from")) is not None:
        try:
            connection = socket.create_connection(tuple(address), PEER_SECONDS)
            wanted = json.dumps({"token": token, "missing": missing})
            connection.sendall(wanted.encode() + b"\n")
            return _Peer(connection)
        except OSError:
            _say({"missing": missing})
    return None


def _serve(tree: Path, entries: list[Entry], token: str, source: BinaryIO) -> None:
    """Send files of the tree to the hosts that ask, until the sender says no more."""
    with socket.create_server(("", 0), backlog=64) as listening:

        def accept() -> None:
            while True:
                connection = listening.accept()[0]
                threading.Thread(target=_pass_on, args=(connection, tree, entries, token)).start()

        threading.Thread(target=accept, daemon=True).start()
        _say({"port": listening.getsockname()[1]})
        source.read()
        os._exit(0)  # whoever is still being sent something turns to the sender


def _pass_on(connection: socket.socket, tree: Path, entries: list[Entry], token: str) -> None:
    # A file that a program has changed since does not have its digest: the other host sees that.
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError), connection:
        connection.settimeout(PEER_SECONDS)
        with connection.makefile("rb") as asked, connection.makefile("wb", PIECE_BYTES) as out:
            wanted = json.loads(asked.readline())
            if not hmac.compare_digest(wanted["token"], token):
                return
            for number in wanted["missing"]:
                name, _, left, _, target = entries[number]
                if target is None:
                    with open(tree / name, "rb") as file:
                        more = MORE
                        while more:
                            data = file.read(min(left, PIECE_BYTES))
                            left -= len(data)
                            more = MORE if left and data else 0
                            out.write(HEADER.pack(number, more, len(data)) + data)


def _make_folders(root: Path, folder: Path) -> None:
    """Have real folders from ``root`` down, whatever a program has put in their places."""
    current = root
    for part in folder.relative_to(root).parts:
        current = current / part
        if current.is_symlink() or not current.is_dir():
            current.unlink(missing_ok=True)
            current.mkdir()


def _exactly(source: BinaryIO | _Peer, size: int) -> bytes:
    data = source.read(size)
    if len(data) != size:
        raise EOFError("the sender disconnected")
    return data


def _other_trees(final: Path) -> list[Path]:
    """The other trees beside this one, the one made last first."""
    trees = [
        path.with_suffix("")
        for path in final.parent.glob("*.json")
        if not path.name.startswith(".")
        and path.stem != final.name
        and path.with_suffix("").is_dir()
    ]
    return sorted(trees, key=lambda path: path.stat().st_mtime, reverse=True)


def _point(link: Path, name: str) -> None:
    draft = link.with_name(f"{_DRAFT}link")
    draft.symlink_to(name)
    draft.replace(link)


def _prune(final: Path) -> None:
    """Remove old trees that no process works in."""
    old = _other_trees(final)[KEEP_TREES - 1 :]
    used = _working_folders() if old else set()
    for path in old:
        if not any(folder == str(path) or folder.startswith(f"{path}/") for folder in used):
            with contextlib.suppress(OSError):  # what a program of root's has left there
                gone = path.rename(path.with_name(f"{_DRAFT}old"))
                _record_of(path).unlink(missing_ok=True)
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
    try:
        request = json.loads(source.readline())
        size = COUNT.unpack(_exactly(source, COUNT.size))[0]
        entries = json.loads(zlib.decompress(_exactly(source, size)))
        answer: dict[str, Any] = {"done": receive(request, entries, source)}
        if request.get("relay"):
            _say(answer)
            if source.readline():
                _serve(Path(request["path"]), entries, request["relay"], source)
            return 0
    except BrokenPipeError:
        return 0  # nobody listens any more
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        answer = {"error": f"{error.strerror or error}{place}"}
    except (ValueError, EOFError, zlib.error) as error:
        answer = {"error": str(error)}
    with contextlib.suppress(BrokenPipeError):
        _say(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
