"""Can the working folder be written to, by this user, without sudo?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import Verdict, fail, ok
from clusterkit.doctor.check import Answers, Check, Script
from clusterkit.doctor.driver import user_of


class Seen(Struct):
    """What came of writing there."""

    path: str
    there: bool
    parent: str
    """The nearest folder above it that exists, or it itself."""
    error: str | None
    kind: str | None
    """The error's name: ENOSPC, EROFS, EACCES, ..."""
    pipes: str | None
    """Why named pipes cannot be made there, or None."""
    user: str


def collect(given: dict[str, Any]) -> Any:
    import errno
    import os

    path = os.path.abspath(os.path.expanduser(given["workdir"]))
    parent = path
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    seen: dict[str, Any] = {
        "path": path, "there": parent == path, "parent": parent, "user": user_of(os.geteuid()),
        "error": None, "kind": None, "pipes": None,
    }  # fmt: skip
    if not os.path.isdir(parent):
        seen["error"] = f"{parent} is not a folder"
        return seen
    if parent != path:
        if not os.access(parent, os.W_OK | os.X_OK):
            seen.update(error=os.strerror(errno.EACCES), kind="EACCES")
        return seen
    me = given["me"].replace("/", "_")
    name = os.path.join(path, f".clusterkit-doctor-{given['token']}-{me}")
    try:
        handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(handle, b"x" * 4096)
            os.fsync(handle)  # a full disk or quota may show only now
        finally:
            os.close(handle)
            os.unlink(name)
    except OSError as problem:
        seen.update(error=problem.strerror, kind=errno.errorcode.get(problem.errno or 0))
        return seen
    try:
        os.mkfifo(name)
        os.unlink(name)
    except OSError as problem:
        seen["pipes"] = problem.strerror
    return seen


WORKDIR = Script("workdir", collect, Seen)


def judge(answers: Answers) -> Iterator[Verdict]:
    for host, folder in answers.read(WORKDIR).items():
        if folder.error is not None:
            verb = "written to" if folder.there else "made"
            cause = f"{folder.path} cannot be {verb} by {folder.user}: {folder.error}"
            yield fail(host, cause, _mend(folder))
        elif folder.pipes is not None:
            cause = (
                f"{folder.path} takes no named pipes ({folder.pipes}), through which logs of "
                "ranks go"
            )
            yield fail(host, cause, "give the cluster entry a `workdir` on a local disk or on NFS")
        else:
            yield ok(host, folder.path if folder.there else f"{folder.path} can be made")


def _mend(folder: Seen) -> str:
    if folder.kind in ("ENOSPC", "EDQUOT"):
        return shell.join(["df", "-h", folder.path])
    if folder.kind == "EROFS":
        return shell.join(["findmnt", "--target", folder.path])
    if folder.kind is None:
        return shell.join(["ls", "-ld", folder.parent])
    return shell.join(["sudo", "install", "-d", "-o", folder.user, folder.path])


CHECK = Check(
    "workdir",
    "The working folder can be written to by the user, without sudo, and takes named pipes.",
    judge,
    (WORKDIR,),
)
