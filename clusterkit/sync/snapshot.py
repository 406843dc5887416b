"""Which files of a folder are the project, for hosts that do not see it: a snapshot of them.

In a git checkout these are the tracked files and those that are new and not ignored, as they are
now, uncommitted changes included. In any other folder it is every file but those that no program
needs (`_NEVER`). CLUSTERKIT_HOME is never a part of it: a run's folder is written while the project
is copied.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import msgspec

import clusterkit
from clusterkit.cluster import Project
from clusterkit.errors import BadInput, RunFolderError, pluralize
from clusterkit.run.folder import home
from clusterkit.sync import receiver

MOST_BYTES = 2 << 30
"""A larger project is refused: it probably contains a data set that should be ignored."""
_TICK_NS = 50_000_000  # more than a tick of the kernel's clock, by which files are stamped
_NEVER = frozenset({
    ".git", ".hg", ".svn", "__pycache__", ".venv", "venv", "node_modules", ".mypy_cache",
    ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints", ".tox", ".cache",
})  # fmt: skip
# A git hook sets these, for example: they name another checkout than the one that is asked about.
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
    """Which files these are, in words."""

    @cached_property
    def digest(self) -> str:
        return receiver.digest_of(self.listing)

    @cached_property
    def listing(self) -> bytes:
        """The entries in JSON, as the receiver reads them."""
        return json.dumps(self.entries).encode()

    @cached_property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries)

    def facts(self) -> Project:
        """Return what a plan needs to know of it."""
        found = Project(
            root=str(self.root), digest=self.digest, files=len(self.entries), bytes=self.size,
            how=self.how,
        )  # fmt: skip
        own = os.path.expanduser("~")  # stays "~" for a user without one
        if os.path.isabs(own) and Path(own).resolve().is_relative_to(self.root.resolve()):
            remark = (
                f"the project is {self.root}, a home folder: all of it is copied to the hosts, "
                f"keys and histories too ({summary(found)}); start from the job's own folder"
            )
            return msgspec.structs.replace(found, remark=remark)
        return found


def take(workdir: Path, program: str | None = None) -> Snapshot:
    """Take a snapshot of the project that ``workdir`` belongs to: its git checkout, or itself.

    Args:
        workdir: where the ranks start.
        program: a file that must be part of it, relative to ``workdir``.

    Raises:
        BadInput: the program is outside or ignored; there is far too much data; the folder cannot
            be copied, such as ``/``.
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
        if (workdir / program).is_dir():
            program = os.path.join(program, "__main__.py")
        _check_program(found, workdir, program, in_git=in_git)
    return found


def _runs(root: Path) -> Path:
    """Return CLUSTERKIT_HOME as a path from the project's folder.

    Raises:
        BadInput: the folder is itself CLUSTERKIT_HOME, or the root of the file system.
    """
    below = Path(os.path.relpath(os.path.realpath(home()), os.path.realpath(root)))
    if below == Path() or os.path.realpath(root) == "/":
        kind = "CLUSTERKIT_HOME" if below == Path() else "the whole machine"
        raise BadInput(
            f"the project is {root}, {kind}: it cannot be copied to the hosts",
            hint="start from the job's own folder",
        )
    return below


def _root(workdir: Path, top: Path) -> Path:
    """Return the checkout's folder as a part of ``workdir``, which may lead there through a link.

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
    paths = {entry.path for entry in found.entries}
    above = [str(folder) for folder in Path(inside).parents]
    real = os.path.relpath(os.path.realpath(found.root / inside), os.path.realpath(found.root))
    # Either itself, or by way of a link to a folder, both in the project.
    if inside in paths or (real in paths and any(folder in paths for folder in above)):
        return
    if inside.startswith("../"):
        reason = f"lies outside of {found.root}, the folder that the hosts get"
        hint = "sync: false in the cluster entry, where the hosts have it under this path"
    elif Path(inside).is_relative_to(_runs(found.root)):
        reason = "lies in CLUSTERKIT_HOME, which is not copied to the hosts"
        hint = "put it into the project's folder"
    elif in_git:
        reason = "is ignored by git and would not be copied to the hosts"
        hint = f"git -C {found.root} check-ignore -v {inside} says by which rule"
    else:
        reason = "lies in a folder that is not copied to the hosts"
        hint = f"none of these is: {', '.join(sorted(_NEVER))}"
    raise BadInput(f"program: {program} {reason}", hint=hint, job="program")


def own_package() -> Snapshot:
    """Take a snapshot of clusterkit itself, for hosts whose Python does not have it."""
    package = Path(str(resources.files(clusterkit)))
    names = _all_files(package, Path("jobs"))  # a wheel has the examples there
    ours = [f"{package.name}/{name}" for name in names if name.endswith((".py", ".json"))]
    return Snapshot(package.parent, _entries(package.parent, ours), "clusterkit's own package")


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Return what git prints; None: no git, no checkout, or "no" as its answer.

    Raises:
        BadInput: git refuses to read the checkout, which is another user's.
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
        text = " ".join(done.stderr.decode(errors="replace").split())
        raise BadInput(
            f"git does not read {folder}: {text.partition(' To add')[0].removeprefix('fatal: ')}",
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


def _all_files(root: Path, excluded: Path) -> list[str]:
    names, excluded_folder = [], str(root / excluded)

    def refuse(error: OSError) -> None:
        raise _unreadable(error.filename, error) from None

    for folder, below, files in os.walk(root, onerror=refuse):
        links = [name for name in below if os.path.islink(os.path.join(folder, name))]
        below[:] = [
            name
            for name in below
            if name not in _NEVER
            and name not in links
            and os.path.join(folder, name) != excluded_folder
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
    if (total := sum(status.st_size for status in files.values())) > MOST_BYTES:
        biggest = max(files, key=lambda name: files[name].st_size)
        raise BadInput(
            f"the project {root} is {total >> 20} MiB: too much to copy to every host "
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
"""Digests by device, inode, size and times: a submit reads the project twice, again to copy it."""


def _digest(path: str, status: os.stat_result) -> str:
    size, changed = status.st_size, status.st_ctime_ns
    known = (status.st_dev, status.st_ino, size, status.st_mtime_ns, changed)
    if (digest := _digests.get(known)) is None:
        hashed = hashlib.blake2b(digest_size=receiver.DIGEST_BYTES)
        # `hashlib.file_digest` makes a large buffer for every file.
        with open(path, "rb", buffering=0) as file:
            while data := file.read(min(size + 1, receiver.PIECE_BYTES)):
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


def summary(project: Project) -> str:
    """Return a project's size in words: ``312 files, 4.2 MB``."""
    return f"{pluralize(project.files, 'file')}, {project.bytes / 1e6:.1f} MB"
