"""The project's folder on its way to hosts that do not see it: which files, and how they get there.

In a git checkout these are the tracked files and those that are new and not ignored, as they lie
there now, uncommitted changes included. Of another folder it is every file but those that no
program needs (`_NEVER`). CLUSTERKIT_HOME is never a part of it: a run's own folder is written while
the project is copied. Only what a host does not have is sent; see `clusterkit.sync.receiver`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import clusterkit
from clusterkit.cluster import Project
from clusterkit.errors import BadInput, RunFolderError, SubmitFailed, counted
from clusterkit.plan import Tree
from clusterkit.run.folder import home
from clusterkit.sync import receiver
from clusterkit.sync.relay import Relay
from clusterkit.transport import Stream, Transport

MOST_BYTES = 2 << 30
"""A larger project is refused: it is a data set that somebody forgot to ignore."""
QUIET_SECONDS = 120.0
CACHED_BYTES = 1 << 28
"""A project up to this size is read and compressed once for all hosts."""
_TICK_NS = 50_000_000
PIECE_BYTES = receiver.PIECE_BYTES
_NEVER = frozenset({
    ".git", ".hg", ".svn", "__pycache__", ".venv", "venv", "node_modules", ".mypy_cache",
    ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints", ".tox", ".cache",
})  # fmt: skip
_BOOT = "import sys;exec(compile(sys.stdin.buffer.read({}),'receiver','exec'))"
_SAMPLE_BYTES = 1 << 14
BATCH_BYTES = 1 << 18
"""Pieces are written together until they are so many bytes."""
# A git hook's, for example: they name another checkout than the one that is asked about.
_OF_A_CHECKOUT = frozenset({
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_COMMON_DIR", "GIT_NAMESPACE",
})  # fmt: skip


class Entry(NamedTuple):
    """One file or symbolic link, by its path below the root."""

    path: str
    mode: int
    size: int
    digest: str
    target: str | None = None


@dataclass(frozen=True)
class Snapshot:
    """A folder's files as they are now."""

    root: Path
    entries: tuple[Entry, ...]
    how: str
    _kept: dict[tuple[int, bool], list[tuple[int, bytes]]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """The pieces of files that were read for one host, for the other hosts."""
    _reading: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @cached_property
    def digest(self) -> str:
        return receiver.digest_of(self._listing)

    @cached_property
    def _listing(self) -> bytes:
        return json.dumps(self.entries).encode()

    @cached_property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries)

    def facts(self) -> Project:
        """What a plan needs to know of it."""
        found = Project(
            root=str(self.root), digest=self.digest, files=len(self.entries), bytes=self.size,
            how=self.how,
        )  # fmt: skip
        own = os.path.expanduser("~")  # stays "~" for a user without one
        if os.path.isabs(own) and Path(own).resolve().is_relative_to(self.root.resolve()):
            remark = (
                f"the project is {self.root}, a home folder: all of it is copied to the hosts, "
                f"keys and histories too ({words(found)}); start from the job's own folder"
            )
            return msgspec.structs.replace(found, remark=remark)
        return found

    def packed(self) -> bytes:
        """The list of entries, as `clusterkit.sync.receiver` reads it."""
        zipped = zlib.compress(self._listing, 1)
        return receiver.COUNT.pack(len(zipped)) + zipped

    def payload(self, missing: Sequence[int], zipped: bool = True) -> Iterator[tuple[int, bytes]]:
        """What to send for the entries that a host misses: a piece's bytes of file, and the piece.

        Args:
            zipped: compress what becomes smaller by that.

        Raises:
            SubmitFailed: a file cannot be read any more.
        """
        for number in missing:
            if self.entries[number].target is None:
                yield from self._file(number, zipped)

    def _file(self, number: int, zipped: bool) -> Iterable[tuple[int, bytes]]:
        if self.size > CACHED_BYTES:
            return self._pieces(number, zipped)
        with self._reading:
            if (number, zipped) not in self._kept:
                self._kept[number, zipped] = list(self._pieces(number, zipped))
            return self._kept[number, zipped]

    def _pieces(self, number: int, zipped: bool) -> Iterator[tuple[int, bytes]]:
        entry = self.entries[number]
        left = entry.size  # what has been appended since is of no concern
        more = receiver.MORE
        try:
            with (self.root / entry.path).open("rb") as file:
                while more:
                    data = file.read(min(left, PIECE_BYTES))
                    left = left - len(data) if data else 0
                    more = receiver.MORE if left else 0
                    packed = _smaller(data) if zipped else data
                    flags = more if packed is data else more | receiver.ZIPPED
                    yield len(data), receiver.HEADER.pack(number, flags, len(packed)) + packed
        except OSError as error:
            raise SubmitFailed(
                f"{self.root / entry.path}: {(error.strerror or 'unreadable').lower()} "
                "while it was copied",
                hint="submit again",
            ) from None


def _smaller(data: bytes) -> bytes:
    """The data compressed, or itself where that hardly helps."""
    sample = data[:_SAMPLE_BYTES]
    if len(data) <= 512 or len(packed := zlib.compress(sample, 1)) >= 0.8 * len(sample):
        return data
    return packed if len(sample) == len(data) else zlib.compress(data, 1)


def snapshot(workdir: Path, program: str | None = None) -> Snapshot:
    """The project that ``workdir`` belongs to: its git checkout, or the folder itself.

    Args:
        workdir: where the ranks start.
        program: a file that must be part of it, relative to ``workdir``.

    Raises:
        BadInput: the program lies outside or is ignored; far too much data; no project's folder.
    """
    workdir = workdir.absolute()
    top = _git(workdir, "rev-parse", "--show-toplevel")
    in_git = top is not None and _git(workdir, "check-ignore", "-q", ".") is None
    if top is not None and in_git:
        root = _root(workdir, Path(os.fsdecode(top.rstrip(b"\n"))))
        runs = _runs(root)
        names = [name for name in _git_files(root) if not Path(name).is_relative_to(runs)]
        found = Snapshot(root, _entries(root, names), "tracked or new, not ignored")
    else:
        names = _all_files(workdir, _runs(workdir))
        found = Snapshot(workdir, _entries(workdir, names), "all but caches")
    if program is not None:
        _check_program(found, workdir, program, in_git=in_git)
    return found


def _runs(root: Path) -> Path:
    """CLUSTERKIT_HOME as a path from the project's folder.

    Raises:
        BadInput: the folder is itself CLUSTERKIT_HOME, or the root of the file system.
    """
    below = Path(os.path.relpath(os.path.realpath(home()), os.path.realpath(root)))
    if below == Path() or os.path.realpath(root) == "/":
        what = "CLUSTERKIT_HOME" if below == Path() else "the whole machine"
        raise BadInput(
            f"the project is {root}, {what}: it cannot be copied to the hosts",
            hint="start from the job's own folder",
        )
    return below


def _root(workdir: Path, top: Path) -> Path:
    """The checkout's folder as a part of ``workdir``, which may lead there through a link.

    Raises:
        BadInput: a link leads into the middle of it.
    """
    below = Path(os.path.relpath(os.path.realpath(workdir), os.path.realpath(top)))
    root = Path(os.path.normpath(os.path.join(workdir, *[".."] * len(below.parts))))
    if not os.path.samefile(root, top):
        raise BadInput(
            f"workdir: {workdir} is a symbolic link into the checkout {top}",
            hint=f"start from {os.path.realpath(workdir)}",
            job="workdir",
        )
    return root


def _check_program(found: Snapshot, workdir: Path, program: str, *, in_git: bool) -> None:
    inside = os.path.relpath((workdir / program).absolute(), found.root)
    there = {entry.path for entry in found.entries}
    above = [str(folder) for folder in Path(inside).parents]
    real = os.path.relpath(os.path.realpath(found.root / inside), os.path.realpath(found.root))
    # Either itself, or by way of a link to a folder, both in the project.
    if inside in there or (real in there and any(folder in there for folder in above)):
        return
    if inside.startswith("../"):
        why = f"lies outside of {found.root}, the folder that the hosts get"
        hint = "sync: false in the cluster entry, where the hosts have it under this path"
    elif Path(inside).is_relative_to(_runs(found.root)):
        why = "lies in CLUSTERKIT_HOME, which is not copied to the hosts"
        hint = "put it into the project's folder"
    elif in_git:
        why = "is ignored by git and would not be copied to the hosts"
        hint = f"git -C {found.root} check-ignore -v {inside} says by which rule"
    else:
        why = "lies in a folder that is not copied to the hosts"
        hint = f"none of these is: {', '.join(sorted(_NEVER))}"
    raise BadInput(f"program: {program} {why}", hint=hint, job="program")


def own_package() -> Snapshot:
    """clusterkit itself, for hosts whose Python does not have it."""
    package = Path(str(resources.files(clusterkit)))
    names = _all_files(package, Path("jobs"))  # which a wheel has there
    ours = [f"{package.name}/{name}" for name in names if name.endswith((".py", ".json"))]
    return Snapshot(package.parent, _entries(package.parent, ours), "clusterkit's own package")


def _git(folder: Path, *arguments: str) -> bytes | None:
    """What git says; None: no git, no checkout, or "no" as its answer.

    Raises:
        BadInput: there is a checkout that git does not want to read.
    """
    env = {name: value for name, value in os.environ.items() if name not in _OF_A_CHECKOUT}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True,
            stdin=subprocess.DEVNULL, env=env | {"LC_ALL": "C"},
        )  # fmt: skip
    except OSError:
        return None
    if b"dubious ownership" in done.stderr or b"unsafe repository" in done.stderr:
        said = " ".join(done.stderr.decode(errors="replace").split())
        raise BadInput(
            f"git does not read {folder}: {said.partition(' To add')[0].removeprefix('fatal: ')}",
            hint=f"git config --global --add safe.directory {folder}",
        )
    return done.stdout if done.returncode == 0 else None


def _git_files(root: Path) -> list[str]:
    listing = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listing is None:
        raise BadInput(f"git ls-files fails in {root}", hint="git status there says why")
    names: dict[str, None] = {}
    for raw in listing.split(b"\0"):
        name = os.fsdecode(raw).rstrip("/")
        path = f"{root}/{name}"
        if name in ("", "."):
            continue
        if not os.path.isdir(path) or os.path.islink(path):
            names[name] = None
        elif os.path.exists(f"{path}/.git"):
            # A submodule that is checked out, or a checkout within the checkout.
            names |= dict.fromkeys(f"{name}/{below}" for below in _git_files(Path(path)))
    return sorted(names)


def _all_files(root: Path, without: Path | None = None) -> list[str]:
    names = []
    left_out = without and str(root / without)

    def refuse(error: OSError) -> None:
        raise _unreadable(error.filename, error) from None

    for folder, below, files in os.walk(root, onerror=refuse):
        links = [name for name in below if os.path.islink(os.path.join(folder, name))]
        below[:] = [
            name
            for name in below
            if name not in _NEVER and name not in links and os.path.join(folder, name) != left_out
        ]
        inside = os.path.relpath(folder, root)
        names += [
            name if inside == "." else f"{inside}/{name}"
            for name in [*files, *links]
            if not name.endswith(".pyc") and name != ".git"
        ]
    return sorted(names)


def _entries(root: Path, names: Sequence[str]) -> tuple[Entry, ...]:
    files: dict[str, os.stat_result] = {}
    for name in names:
        try:
            files[name] = os.lstat(f"{root}/{name}")  # a string: thousands of them are quicker
        except (FileNotFoundError, NotADirectoryError):
            continue  # tracked, and deleted
        except OSError as error:
            raise _unreadable(root / name, error) from None
    # Far too much data is refused before all of it is read.
    if (whole := sum(status.st_size for status in files.values())) > MOST_BYTES:
        biggest = max(files, key=lambda name: files[name].st_size)
        raise BadInput(
            f"the project {root} is {whole >> 20} MiB: too much to copy to every host "
            f"(the biggest file is {biggest}, {files[biggest].st_size >> 20} MiB)",
            hint="put data into .gitignore and on the hosts, or set sync: false",
        )
    found = []
    for name, status in files.items():
        try:
            if stat.S_ISLNK(status.st_mode):
                found.append(Entry(name, 0o777, 0, "", os.readlink(root / name)))
            elif stat.S_ISREG(status.st_mode):
                mode = 0o755 if status.st_mode & 0o100 else 0o644
                digest = _digest(f"{root}/{name}", status)
                found.append(Entry(name, mode, status.st_size, digest))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise _unreadable(root / name, error) from None
    return tuple(found)


_digests: dict[tuple[int, int, int, int, int], str] = {}
"""Of files that this process has read: a submit reads the project twice, again as it copies."""


def _digest(path: str, status: os.stat_result) -> str:
    size, changed = status.st_size, status.st_ctime_ns
    known = (status.st_dev, status.st_ino, size, status.st_mtime_ns, changed)
    if (digest := _digests.get(known)) is None:
        hashed = hashlib.blake2b(digest_size=receiver.DIGEST_BYTES)
        # `hashlib.file_digest` makes a large buffer for every file.
        with open(path, "rb", buffering=0) as file:
            while data := file.read(min(size + 1, PIECE_BYTES)):
                hashed.update(data)
        digest = hashed.hexdigest()
        # The kernel's clock ticks: what was written within the last tick may be written again.
        if time.time_ns() - changed > _TICK_NS:
            _digests[known] = digest
    return digest


def _unreadable(path: str | Path, error: OSError) -> RunFolderError:
    return RunFolderError(
        f"{path}: {(error.strerror or 'unreadable').lower()}",
        hint="it belongs to the project that is copied to the hosts; ignore it, or fix it",
    )


# ---------------------------------------------------------------- sending


def send(
    found: Snapshot,
    tree: Tree,
    host: str,
    python: str,
    transport: Transport,
    progress: Callable[[str, int, int], None] = lambda host, done, whole: None,
    relay: Relay | None = None,
) -> int:
    """Have a host's folder ``tree.path`` hold exactly this snapshot.

    Args:
        progress: gets the host, bytes sent and bytes to send.
        relay: of the hosts that get the same folder; None: all of it comes from here.

    Returns:
        Files that had to be sent.

    Raises:
        SubmitFailed: no space, no permission, or the folder changes while it is copied.
        Unavailable: the host cannot be reached.
    """
    text = Path(receiver.__file__).read_bytes()
    # File names are bytes to both sides, whatever the locale there; no installed package is needed.
    argv = [python, "-I", "-S", "-X", "utf8", "-c", _BOOT.format(len(text))]
    with contextlib.ExitStack() as kept, contextlib.ExitStack() as slot:
        stream = kept.enter_context(transport.open(host, argv))
        request = json.dumps({"path": tree.path, "relay": relay and relay.token}).encode() + b"\n"
        stream.write(text + request + found.packed())
        answers = _answers(stream, host)
        answer = next(answers)
        missing = answer.get("missing", [])
        whole = sum(found.entries[number].size for number in missing)

        def answer_to(numbers: Sequence[int]) -> dict[str, Any]:
            for done, pieces in _together(found.payload(numbers, zipped=not stream.near)):
                stream.write(pieces)
                progress(host, done, whole)
            return next(answers)

        sender = None
        if "error" not in answer:
            progress(host, 0, whole)
            if relay is not None and missing:
                sender = slot.enter_context(relay.sender(whole))
                stream.write(json.dumps({"from": sender}).encode() + b"\n")
            answer = next(answers) if sender else answer_to(missing)
            if relay is not None and "missing" in answer:
                relay.drop(sender)
                answer = answer_to(answer["missing"])
        if "error" in answer:
            hint = "make room there, or choose another `workdir` that this user may write to"
            if "changed while" in str(answer["error"]):
                hint = "submit again"
            raise SubmitFailed(
                f"host {host}: cannot copy {found.root} to {tree.path}: {answer['error']}", hint
            )
        progress(host, whole, whole)
        if relay is not None and relay.worthwhile(whole):
            stream.write(b"\n")
            if (port := next(answers).get("port")) is not None:
                relay.add(host, port, kept.pop_all())
        return len(missing)


def _together(pieces: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Small pieces as one: each write is a packet at least, and costs as such."""
    waiting: list[bytes] = []
    size = room = 0
    for length, piece in pieces:
        waiting.append(piece)
        size += length
        room += len(piece)
        if room >= BATCH_BYTES:
            yield size, b"".join(waiting)
            waiting, size, room = [], 0, 0
    if waiting:
        yield size, b"".join(waiting)


def _answers(stream: Stream, host: str) -> Iterator[dict[str, Any]]:
    """What the host says, except that it has to wait for its turn."""
    rest = b""
    while True:
        while b"\n" not in rest:
            data = stream.read(QUIET_SECONDS)
            if not data:
                said = stream.stderr.strip().rpartition("\n")[2]
                raise SubmitFailed(f"host {host}: copying the project was interrupted: {said}")
            rest += data
        line, _, rest = rest.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            raise SubmitFailed(
                f"host {host}: copying the project was interrupted: {line[:200]!r}"
            ) from None
        if "waiting" not in answer:
            yield answer


def words(project: Project) -> str:
    """``312 files, 4.2 MB``"""
    return f"{counted(project.files, 'file')}, {project.bytes / 1e6:.1f} MB"
