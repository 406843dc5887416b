"""Folders: free space of their disks, the working folder, the folder that all hosts share."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import time
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import Level, Verdict, fail, ok, skip, warn, worst
from clusterkit.doctor.hosts.base import Answers, HostSubject, check, script
from clusterkit.doctor.hosts.helpers import level_of, size_text
from clusterkit.doctor.hosts.runner import text_of, user_of

BYTES_WARN = 5 << 30
BYTES_FAIL = 500 << 20
INODES_WARN = 50_000
INODES_FAIL = 1_000


class Disk(Struct):
    """The file system of one folder."""

    path: str
    free: int
    total: int
    inodes_free: int
    inodes: int
    """0: the file system has no fixed number of them."""
    read_only: bool


@script("disks", list[Disk])
def collect_disks(given: dict[str, Any]) -> Any:
    folders = [given["workdir"], os.environ.get("TMPDIR") or "/tmp", "~/.cache"]
    if given["shared"]:
        folders.append(given["shared"])
    disks = {}
    for folder in folders:
        path = os.path.abspath(os.path.expanduser(folder))
        while not os.path.exists(path) and path != "/":
            path = os.path.dirname(path)
        device = os.stat(path).st_dev
        if device in disks:
            continue
        disk = os.statvfs(path)
        disks[device] = {
            "path": path,
            "free": disk.f_bavail * disk.f_frsize,
            "total": disk.f_blocks * disk.f_frsize,
            "inodes_free": disk.f_favail,
            "inodes": disk.f_files,
            "read_only": bool(disk.f_flag & os.ST_RDONLY),
        }
    return list(disks.values())


@check(collect_disks)
def disk(answers: Answers) -> Iterator[Verdict]:
    """The disks of the working folder, /tmp and the home have room, for bytes and for files."""
    for host, disks in answers.read(collect_disks).items():
        for disk in disks:
            if disk.read_only:
                remedy = f"{shell.join(['findmnt', '--target', disk.path])}; sudo dmesg | tail"
                yield fail(host, f"{disk.path} is mounted read-only", remedy)
            elif disk.total:  # some file systems report no size
                yield from _full(host, disk)
        free = ", ".join(f"{disk.path} {size_text(disk.free)}" for disk in disks)
        yield ok(host, f"free: {free}")


def _full(host: str, disk: Disk) -> Iterator[Verdict]:
    space = level_of(disk.free, warn_below=BYTES_WARN, fail_below=BYTES_FAIL)
    files: Level = "ok"
    if disk.inodes:
        files = level_of(disk.inodes_free, warn_below=INODES_WARN, fail_below=INODES_FAIL)
    level = worst((space, files))
    if level == "ok":
        return
    if space == level:
        cause = f"{disk.path} has {size_text(disk.free)} left of {size_text(disk.total)}"
        remedy = f"{shell.join(['df', '-h', disk.path])}; {shell.join(['du', '-xsh', disk.path])}"
    else:
        cause = f"{disk.path} has room for {disk.inodes_free} more files (inodes)"
        remedy = shell.join(["df", "-i", disk.path])
    yield Verdict(host, level, cause, remedy)


# ---------------------------------------------------------------- the working folder


class Workdir(Struct):
    """The result of writing to the working folder."""

    path: str
    exists: bool
    parent: str
    """The nearest folder above it that exists, or it itself."""
    error: str | None
    error_name: str | None
    """ENOSPC, EROFS, EACCES, ..."""
    pipe_error: str | None
    """Why named pipes cannot be made there."""
    user: str


@script("workdir", Workdir)
def collect_workdir(given: dict[str, Any]) -> Any:
    path = os.path.abspath(os.path.expanduser(given["workdir"]))
    parent = path
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    seen: dict[str, Any] = {
        "path": path, "exists": parent == path, "parent": parent, "user": user_of(os.geteuid()),
        "error": None, "error_name": None, "pipe_error": None,
    }  # fmt: skip
    if not os.path.isdir(parent):
        seen["error"] = f"{parent} is not a folder"
        return seen
    if parent != path:
        if not os.access(parent, os.W_OK | os.X_OK):
            seen.update(error=os.strerror(errno.EACCES), error_name="EACCES")
        return seen
    host = given["host"].replace("/", "_")
    name = os.path.join(path, f".clusterkit-doctor-{given['token']}-{host}")
    try:
        handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(handle, b"x" * 4096)
            os.fsync(handle)  # a full disk or quota may show only now
        finally:
            os.close(handle)
            os.unlink(name)
    except OSError as problem:
        seen.update(error=problem.strerror, error_name=errno.errorcode.get(problem.errno or 0))
        return seen
    try:
        os.mkfifo(name)
        os.unlink(name)
    except OSError as problem:
        seen["pipe_error"] = problem.strerror
    return seen


@check(collect_workdir)
def workdir(answers: Answers) -> Iterator[Verdict]:
    """The working folder can be written to by the user, without sudo, and takes named pipes."""
    for host, folder in answers.read(collect_workdir).items():
        if folder.error is not None:
            verb = "written to" if folder.exists else "made"
            cause = f"{folder.path} cannot be {verb} by {folder.user}: {folder.error}"
            yield fail(host, cause, _make_writable(folder))
        elif folder.pipe_error is not None:
            cause = f"{folder.path} takes no named pipes ({folder.pipe_error}), "
            cause += "through which logs of ranks go"
            yield fail(host, cause, "give the cluster entry a `workdir` on a local disk or on NFS")
        yield ok(host, folder.path if folder.exists else f"{folder.path} can be made")


def _make_writable(folder: Workdir) -> str:
    if folder.error_name in ("ENOSPC", "EDQUOT"):
        return shell.join(["df", "-h", folder.path])
    if folder.error_name == "EROFS":
        return shell.join(["findmnt", "--target", folder.path])
    if folder.error_name is None:
        return shell.join(["ls", "-ld", folder.parent])
    return shell.join(["sudo", "install", "-d", "-o", folder.user, folder.path])


# ---------------------------------------------------------------- the shared folder


class Written(Struct):
    """The result of writing the token."""

    error: str | None


class Token(Struct):
    """What another host read of the token that the head wrote."""

    text: str | None
    """None: the file is not there."""
    error: str | None
    file_system: str


@script("shared-write", Written, where="head")
def write_token(given: dict[str, Any]) -> Any:
    prefix = os.path.join(os.path.expanduser(given["shared"]), ".clusterkit-doctor-shared-")
    for old in glob.glob(glob.escape(prefix) + "*"):
        # Left by a doctor that was killed.
        with contextlib.suppress(OSError):
            if os.stat(old).st_mtime < time.time() - 3600:
                os.unlink(old)
    try:
        with open(prefix + given["token"], "x", encoding="ascii") as file:
            file.write(given["token"])
    except OSError as error:
        return {"error": error.strerror}
    return {"error": None}


@script("shared-read", Token, phase=2, where="others", needs_head=True)
def read_token(given: dict[str, Any]) -> Any:
    folder = os.path.expanduser(given["shared"])
    file_system = ""
    longest = -1
    for line in text_of("/proc/self/mounts").splitlines():
        _, point, kind = line.split()[:3]
        inside = point == "/" or (os.path.realpath(folder) + "/").startswith(point + "/")
        if inside and len(point) >= longest:
            longest, file_system = len(point), kind
    seen = {"text": None, "error": None, "file_system": file_system}
    path = os.path.join(folder, ".clusterkit-doctor-shared-" + given["token"])
    try:
        os.listdir(folder)  # makes NFS refresh its cache
        with open(path, encoding="ascii") as file:
            seen["text"] = file.read(100)
    except FileNotFoundError:
        if not os.path.isdir(folder):
            seen["error"] = "No such directory"
    except (OSError, UnicodeDecodeError) as error:
        seen["error"] = getattr(error, "strerror", None) or str(error)
    return seen


@script("shared-remove", type(None), phase=3, where="head")
def remove_token(given: dict[str, Any]) -> Any:
    folder = os.path.expanduser(given["shared"])
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, ".clusterkit-doctor-shared-" + given["token"]))


def _no_shared_folder(subject: HostSubject) -> str | None:
    return None if subject.shared else "the cluster entry names no shared folder"


@check(write_token, read_token, remove_token, quick=False, skip_reason=_no_shared_folder)
def shared(answers: Answers) -> Iterator[Verdict]:
    """A file that one host writes to the shared folder is visible on every other at once."""
    folder = answers.subject.shared or ""
    head = answers.subject.head.name
    mount = f"mountpoint {shell.quote(folder)} || sudo mount {shell.quote(folder)}"
    written = answers.read(write_token)
    if head not in written or written[head].error is not None:
        if head in written:
            yield fail(head, f"{folder} cannot be written to: {written[head].error}", mount)
        reason = f"{head} could not write to it"
        yield from (skip(host, reason) for host in answers.of if host != head)
        return
    yield ok(head, folder)
    for host, found in answers.read(read_token).items():
        if found.error is not None:
            yield fail(host, f"{folder} cannot be read: {found.error}", mount)
        elif found.text is None:
            kind = found.file_system or "of an unknown kind"
            cause = f"{folder} is not shared: what {head} writes is not there (it is {kind})"
            yield fail(host, cause, mount)
        elif found.text == "":
            cause = f"{folder}: what {head} writes is there, but empty for a while"
            yield warn(host, cause, f"sudo mount -o remount,noac {shell.quote(folder)}")
        yield ok(host, folder)
