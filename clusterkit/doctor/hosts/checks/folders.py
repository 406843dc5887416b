"""Folders: free space of their disks, the working folder, the folder that all hosts share."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import Level, Verdict, fail, ok, skip, warn, worst
from clusterkit.doctor.hosts.base import Answers, Collector, HostSubject, check
from clusterkit.doctor.hosts.collect import folders as collect
from clusterkit.doctor.hosts.helpers import level_of, size_text

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


DISKS = Collector(collect.disks, list[Disk])


@check(DISKS)
def disk(answers: Answers) -> Iterator[Verdict]:
    """The disks of the working folder, /tmp and the home have room, for bytes and for files."""
    for host, disks in answers.read(DISKS).items():
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


WORKDIR = Collector(collect.workdir, Workdir)


@check(WORKDIR)
def workdir(answers: Answers) -> Iterator[Verdict]:
    """The working folder can be written to by the user, without sudo, and takes named pipes."""
    for host, folder in answers.read(WORKDIR).items():
        if folder.error is not None:
            verb = "written to" if folder.exists else "made"
            cause = f"{folder.path} cannot be {verb} by {folder.user}: {folder.error}"
            yield fail(host, cause, _make_writable(folder))
        elif folder.pipe_error is not None:
            cause = f"{folder.path} does not support named pipes ({folder.pipe_error}), "
            cause += "which carry the ranks' logs"
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


WRITE = Collector(collect.shared_write, Written, where="head")
READ = Collector(collect.shared_read, Token, phase=2, where="others", needs_head=True)
REMOVE = Collector(collect.shared_remove, type(None), phase=3, where="head")


def _no_shared_folder(subject: HostSubject) -> str | None:
    return None if subject.shared else "the cluster entry has no shared folder"


@check(WRITE, READ, REMOVE, quick=False, skip_reason=_no_shared_folder)
def shared(answers: Answers) -> Iterator[Verdict]:
    """A file that one host writes to the shared folder is visible on every other at once."""
    folder = answers.subject.shared or ""
    head = answers.subject.head.name
    mount = f"mountpoint {shell.quote(folder)} || sudo mount {shell.quote(folder)}"
    written = answers.read(WRITE)
    if head not in written or written[head].error is not None:
        if head in written:
            yield fail(head, f"{folder} cannot be written to: {written[head].error}", mount)
        reason = f"{head} could not write to it"
        yield from (skip(host, reason) for host in answers.of if host != head)
        return
    yield ok(head, folder)
    for host, found in answers.read(READ).items():
        if found.error is not None:
            yield fail(host, f"{folder} cannot be read: {found.error}", mount)
        elif found.text is None:
            kind = found.file_system or "of an unknown kind"
            cause = f"{folder} is not shared: files that {head} writes do not appear (it is {kind})"
            yield fail(host, cause, mount)
        elif found.text == "":
            cause = f"{folder}: what {head} writes appears empty for a while"
            yield warn(host, cause, f"sudo mount -o remount,noac {shell.quote(folder)}")
        yield ok(host, folder)
