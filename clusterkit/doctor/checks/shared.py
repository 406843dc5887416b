"""Is the shared folder really shared?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import Verdict, fail, ok, skip, warn
from clusterkit.doctor.check import Answers, Check, Script
from clusterkit.doctor.driver import text_of


class Written(Struct):
    """What came of writing the token."""

    error: str | None


class Found(Struct):
    """What another host read; ``text`` is None where there was nothing."""

    text: str | None
    error: str | None
    kind: str
    """Type of the file system."""


def collect_write(given: dict[str, Any]) -> Any:
    import contextlib
    import glob
    import os
    import time

    folder = os.path.expanduser(given["shared"])
    prefix = os.path.join(folder, ".clusterkit-doctor-shared-")
    for old in glob.glob(glob.escape(prefix) + "*"):
        # Left by an examination that was killed.
        with contextlib.suppress(OSError):
            if os.stat(old).st_mtime < time.time() - 3600:
                os.unlink(old)
    try:
        with open(prefix + given["token"], "x", encoding="ascii") as file:
            file.write(given["token"])
    except OSError as error:
        return {"error": error.strerror}
    return {"error": None}


def collect_read(given: dict[str, Any]) -> Any:
    import os

    folder = os.path.expanduser(given["shared"])
    kind = ""
    longest = -1
    for line in text_of("/proc/self/mounts").splitlines():
        _, point, name = line.split()[:3]
        inside = point == "/" or (os.path.realpath(folder) + "/").startswith(point + "/")
        if inside and len(point) >= longest:
            longest, kind = len(point), name
    seen = {"text": None, "error": None, "kind": kind}
    path = os.path.join(folder, ".clusterkit-doctor-shared-" + given["token"])
    try:
        os.listdir(folder)  # makes NFS look again
        with open(path, encoding="ascii") as file:
            seen["text"] = file.read(100)
    except FileNotFoundError:
        if not os.path.isdir(folder):
            seen["error"] = "No such directory"
    except (OSError, UnicodeDecodeError) as error:
        seen["error"] = getattr(error, "strerror", None) or str(error)
    return seen


def collect_remove(given: dict[str, Any]) -> Any:
    import contextlib
    import os

    folder = os.path.expanduser(given["shared"])
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, ".clusterkit-doctor-shared-" + given["token"]))


WRITE = Script("shared-write", collect_write, Written, where="head")
READ = Script("shared-read", collect_read, Found, phase=2, where="others", with_head=True)
REMOVE = Script("shared-remove", collect_remove, type(None), phase=3, where="head")


def judge(answers: Answers) -> Iterator[Verdict]:
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
            kind = found.kind or "of an unknown kind"
            cause = f"{folder} is not shared: what {head} writes is not there (it is {kind})"
            yield fail(host, cause, mount)
        elif found.text == "":
            cause = f"{folder}: what {head} writes is there, but empty for a while"
            yield warn(host, cause, f"sudo mount -o remount,noac {shell.quote(folder)}")
        else:
            yield ok(host, folder)


CHECK = Check(
    "shared",
    "What one host writes to the shared folder, every other reads there at once.",
    judge,
    (WRITE, READ, REMOVE),
    quick=False,
    pointless=lambda subject: (
        None if subject.shared else "the cluster entry names no shared folder"
    ),
)
