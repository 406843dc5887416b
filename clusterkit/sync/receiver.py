"""Make a folder on a host equal to the submitter's; the other half is `clusterkit.sync.upload`.

Standard library only; its text is sent to the host and run there by the job's Python. Messages on
its standard input and output:

    sender  {"path": "/dir"}, entries      a line of JSON, and the compressed list of files
    host    {"waiting": 10.0}              while another process fills the folder
    host    {"missing": [3, 17]}           indices of the entries that have to be sent
    sender  index, flags, length; data     pieces of each file that is missing
    host    {"done": 2} or {"error": ".."}

``done`` comes with ``used_by`` where runs keep old trees; the sender answers with a line that has
those of them under ``ended`` that need none any more.

If the request holds a token under ``relay``, a line of JSON comes before the pieces: ``{}``, or
``{"from": [address, port]}`` of a host that has the tree. That host sends the same pieces over TCP;
what it does not send is reported as ``missing`` once more. After ``done`` a line from the sender
asks this host for ``{"port": ..}``, where it serves hosts that send the token until its input ends.

A tree is made under another name and renamed when it is complete, so that a run never starts in
half a project. Files that an earlier tree has unchanged are linked, not copied. ``NAME.json``
beside a tree keeps every file's digest, size and modification time: a file that a program has
changed since is found and replaced. Other files that programs have written there are kept.

The folder may be one that many hosts see (NFS), whose locks need not exclude other hosts: drafts
have names of their own, and a tree that another host has made first is the one that counts.
``NAME.runs`` beside a tree holds a link to the folder of each run that was submitted with it. A
tree stays while such a run is there: it may wait in a queue, or run on another host.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
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
"""How many trees of a project are kept, besides those in use."""
HEADER = struct.Struct(">IBQ")
ZIPPED, MORE = 1, 2
"""Flags of a piece: compressed; not the file's last."""
DIGEST_BYTES = 16
PIECE_BYTES = 1 << 22
"""A file is sent in pieces of this size, so that no process holds all of it in memory."""
WAITING_SECONDS = 10.0
"""Between two messages that the sender has to wait."""
COUNT = struct.Struct(">Q")
"""The number of bytes of the list of entries, before it."""
PEER_SECONDS = 10.0
"""For a host to accept another one's connection, or to send it something."""
_HOST = re.sub("[^A-Za-z0-9-]", "-", os.uname().nodename)[:64]
_DRAFT = ".draft-"
_OWN = f"{_DRAFT}{_HOST}.{os.getpid()}.{secrets.token_hex(8)}."
"""Beginning of the names of this process's unfinished files."""
STALE_SECONDS = 86400.0
"""Age at which another host's unfinished files, and links to runs that are not there, are old."""
Entry = list[Any]
"""One file or link: ``[path, mode, size, digest, link target or None]``."""
Record = dict[str, list[Any]]
"""Path to ``[digest, size, mtime_ns]``."""


def digest_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def _record_of(tree: Path) -> Path:
    return tree.with_name(f"{tree.name}.json")


def _intact(tree: Path, digests: set[str]) -> dict[str, tuple[list[Any], int]]:
    """Return record and mode of a tree's unchanged files that have one of these digests."""
    intact = {}
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        for name, entry in json.loads(_record_of(tree).read_bytes()).items():
            with contextlib.suppress(OSError):
                if entry[0] in digests:
                    found = os.lstat(f"{tree}/{name}")
                    if [found.st_size, found.st_mtime_ns] == entry[1:]:
                        intact[name] = entry, found.st_mode & 0o777
    return intact


def receive(request: dict[str, Any], entries: list[Entry], source: BinaryIO) -> dict[str, Any]:
    """Make the tree that ``entries`` describe; return the last answer to the sender."""
    final = Path(request["path"])
    final.parent.mkdir(parents=True, exist_ok=True)
    with _locked(final.parent):
        _sweep(final.parent)
        if run := request.get("run"):
            link = _runs_of(final) / os.path.basename(run)
            link.parent.mkdir(exist_ok=True)
            with contextlib.suppress(FileExistsError):
                link.symlink_to(run)
        try:
            missing = _make(final, entries, source, request.get("relay"))
        finally:
            _sweep(final.parent)
        os.utime(final)
        _replace_link(final.parent / "current", final.name)
        users = _prune(final)
    return {"done": len(missing), "used_by": sorted(users)}


def forget(final: Path, ended: list[str]) -> None:
    """Prune again, without the links to runs that have ended."""
    with _locked(final.parent):
        for tree in _other_trees(final):
            for run in ended:
                (_runs_of(tree) / os.path.basename(run)).unlink(missing_ok=True)
        _prune(final)


class _Waiting:
    """Report to the sender now and then that it has to wait."""

    def __init__(self) -> None:
        self._began = self._reported = time.monotonic()

    def report(self) -> None:
        """Send the seconds since the beginning, if WAITING_SECONDS have passed."""
        if (now := time.monotonic()) - self._reported > WAITING_SECONDS:
            self._reported = now
            _send({"waiting": now - self._began})


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        waiting = _Waiting()
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:  # the file system has no locks
                break
            waiting.report()
        yield


def _sweep(folder: Path) -> None:
    """Remove what this process, and those that were killed, have left unfinished."""
    for path in folder.glob(f"{_DRAFT}*"):
        host, pid = [*path.name.removeprefix(_DRAFT).split("."), ""][:2]
        gone = host == _HOST and not os.path.exists(f"/proc/{pid}")
        if gone or path.name.startswith(_OWN) or _is_stale(path):
            _remove(path)


def _is_stale(path: Path) -> bool:
    try:
        return time.time() - path.lstat().st_mtime > STALE_SECONDS
    except OSError:
        return False


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _make(final: Path, entries: list[Entry], source: BinaryIO, token: str | None) -> list[int]:
    new = not final.is_dir()
    if new:
        into = final.with_name(f"{_OWN}tree")
        into.mkdir()
        record, missing = _link_known(entries, into, _known(final, entries))
    else:
        into = final
        record, missing = _unchanged(entries, final)
    _send({"missing": missing})
    peer = _peer(source, missing, token) if missing and token else None
    draft = final.with_name(f"{_OWN}file")
    for position, number in enumerate(missing):
        name, _, _, _, target = entries[number]
        # In an existing tree under another name first: other trees may have links to the old file.
        path = f"{into}/{name}" if new else str(draft)
        if target is None:
            if peer is not None:
                try:
                    record[name] = _receive_file(number, entries[number], path, peer)
                except (OSError, ValueError, EOFError, zlib.error):
                    peer = None
                    _send({"missing": missing[position:]})
            if peer is None:
                record[name] = _receive_file(number, entries[number], path, source)
        else:
            os.symlink(target, path)
        if not new:
            final_path = into / name
            _make_folders(into, final_path.parent)
            if final_path.is_dir() and not final_path.is_symlink():
                shutil.rmtree(final_path)
            draft.replace(final_path)
    draft.write_text(json.dumps(record))
    if not new or _publish(into, final):
        draft.replace(_record_of(final))
    return missing


def _publish(into: Path, final: Path) -> bool:
    """Rename a complete tree. Return False if another host has made the same tree meanwhile."""
    try:
        if not final.is_dir():
            final.unlink(missing_ok=True)  # whatever it is
        into.rename(final)
    except OSError:
        if not final.is_dir():
            raise
        return False
    return True


def _unchanged(entries: list[Entry], tree: Path) -> tuple[Record, list[int]]:
    """Return the record of a tree's files that are as the entries say, and the rest's indices."""
    intact = _intact(tree, {entry[3] for entry in entries})
    record, missing = {}, []
    real = {tree: True}

    def is_real(folder: Path) -> bool:
        # A program may have put a link in a folder's place.
        if folder not in real:
            real[folder] = is_real(folder.parent) and not folder.is_symlink()
        return real[folder]

    def is_same(name: str, mode: int, digest: str, target: str | None) -> bool:
        path = tree / name
        try:
            if target is not None:
                return is_real(path.parent) and os.readlink(path) == target
            return is_real(path.parent) and intact[name][0][0] == digest and intact[name][1] == mode
        except (OSError, KeyError):
            return False

    for number, (name, mode, _, digest, target) in enumerate(entries):
        if not is_same(name, mode, digest, target):
            missing.append(number)
        elif target is None:
            record[name] = intact[name][0]
    return record, missing


# Thousands of files at a time: paths are plain strings here, which are far quicker to join.
def _known(final: Path, entries: list[Entry]) -> dict[tuple[str, int], tuple[str, list[Any]]]:
    """Return an unchanged file, and its record, for the digests and modes of entries.

    Only the two newest of the other trees are searched.
    """
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
    """Link the files that this host has; return their record and the indices of the rest."""
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


def _receive_file(number: int, entry: Entry, path: str, source: BinaryIO | _Peer) -> list[Any]:
    """Write one file as its pieces arrive; return its record."""
    name, mode, _, digest, _ = entry
    hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
    flags = MORE
    with open(path, "wb", buffering=0) as file:
        while flags & MORE:
            index, flags, length = HEADER.unpack(_read_exactly(source, HEADER.size))
            if index != number:
                raise ValueError(f"file {index} came where {number} was due")
            data = _read_exactly(source, length)
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
    """The pieces that another host sends; reports to the sender that it has to wait."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rb")
        self._waiting = _Waiting()

    def read(self, size: int) -> bytes:
        self._waiting.report()
        return self._file.read(size)


def _peer(source: BinaryIO, missing: list[int], token: str) -> _Peer | None:
    """Connect to the host that the sender names; None: the sender itself sends the files."""
    if (address := json.loads(source.readline()).get("from")) is not None:
        try:
            connection = socket.create_connection(tuple(address), PEER_SECONDS)
            connection.sendall(f"{token}\n{json.dumps(missing)}\n".encode())
            return _Peer(connection)
        except OSError:
            _send({"missing": missing})
    return None


def _serve(tree: Path, entries: list[Entry], token: str, source: BinaryIO) -> None:
    """Send files of the tree to the hosts that ask, until the sender closes the input."""
    with socket.create_server(("", 0), backlog=64) as listening:

        def accept() -> None:
            while True:
                connection = listening.accept()[0]
                threading.Thread(target=_pass_on, args=(connection, tree, entries, token)).start()

        threading.Thread(target=accept, daemon=True).start()
        _send({"port": listening.getsockname()[1]})
        source.read()
        os._exit(0)  # a host that is still receiving asks the sender for the rest


def _pass_on(connection: socket.socket, tree: Path, entries: list[Entry], token: str) -> None:
    # A file that a program has changed since does not match its digest: the other host checks that.
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError), connection:
        connection.settimeout(PEER_SECONDS)
        with connection.makefile("rb") as asked, connection.makefile("wb", PIECE_BYTES) as out:
            # Any program can connect: read no more than a token's length of what it sends.
            if not hmac.compare_digest(asked.readline(len(token) + 1), f"{token}\n".encode()):
                return
            for number in json.loads(asked.readline()):
                name, _, size, _, target = entries[number]
                if target is None:
                    for data, more in read_pieces(tree / name, size):
                        out.write(HEADER.pack(number, more, len(data)) + data)


def read_pieces(path: Path, size: int) -> Iterator[tuple[bytes, int]]:
    """Yield the first ``size`` bytes of a file in pieces, one at least, each with MORE or 0.

    Raises:
        OSError: the file cannot be read.
    """
    more = MORE
    with path.open("rb") as file:
        while more:
            data = file.read(min(size, PIECE_BYTES))
            size -= len(data)
            more = MORE if size and data else 0
            yield data, more


def _make_folders(root: Path, folder: Path) -> None:
    """Make the folders from ``root`` down, in place of links or files that a program has put."""
    current = root
    for part in folder.relative_to(root).parts:
        current = current / part
        if current.is_symlink() or not current.is_dir():
            current.unlink(missing_ok=True)
            current.mkdir()


def _read_exactly(source: BinaryIO | _Peer, size: int) -> bytes:
    data = source.read(size)
    if len(data) != size:
        raise EOFError("the sender disconnected")
    return data


def _other_trees(final: Path) -> list[Path]:
    """Return the other trees beside this one, newest first."""
    trees = [
        path.with_suffix("")
        for path in final.parent.glob("*.json")
        if not path.name.startswith(".")
        and path.stem != final.name
        and path.with_suffix("").is_dir()
    ]
    return sorted(trees, key=lambda path: path.stat().st_mtime, reverse=True)


def _replace_link(link: Path, name: str) -> None:
    draft = link.with_name(f"{_OWN}link")
    draft.symlink_to(name)
    draft.replace(link)


def _runs_of(tree: Path) -> Path:
    return tree.with_name(f"{tree.name}.runs")


def _prune(final: Path) -> set[str]:
    """Remove old trees that are no process's working folder and no run's. Return these runs."""
    old = _other_trees(final)[KEEP_TREES - 1 :]
    used = _working_folders() if old else set()
    runs: set[str] = set()
    for path in old:
        # A run's folder is made after its project; `rm` removes it.
        links = _runs_of(path).glob("*")
        users = {link.name for link in links if link.exists() or not _is_stale(link)}
        runs |= users
        if users or any(f"{folder}/".startswith(f"{path}/") for folder in used):
            continue
        with contextlib.suppress(OSError):  # files that a program has left as root
            gone = path.rename(path.with_name(f"{_OWN}old"))
            _record_of(path).unlink(missing_ok=True)
            _remove(gone)
            _remove(_runs_of(path))
    return runs


def _working_folders() -> set[str]:
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/{name}/cwd"))
    return found


def _send(document: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(document).encode() + b"\n")
    sys.stdout.buffer.flush()


def main() -> int:
    source = sys.stdin.buffer
    os.umask(0o077)  # the folders: a copy is its owner's alone
    try:
        request = json.loads(source.readline())
        size = COUNT.unpack(_read_exactly(source, COUNT.size))[0]
        entries = json.loads(zlib.decompress(_read_exactly(source, size)))
        answer = receive(request, entries, source)
        if answer["used_by"]:
            _send(answer)
            forget(Path(request["path"]), json.loads(source.readline() or b"{}").get("ended", []))
        del answer["used_by"]
        if request.get("relay"):
            _send(answer)
            if source.readline():
                _serve(Path(request["path"]), entries, request["relay"], source)
            return 0
    except BrokenPipeError:
        return 0  # the sender is gone
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        answer = {"error": f"{error.strerror or error}{place}"}
    except (ValueError, EOFError, zlib.error) as error:
        answer = {"error": str(error)}
    with contextlib.suppress(BrokenPipeError):
        _send(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
