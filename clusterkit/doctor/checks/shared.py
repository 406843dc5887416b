"""Is the shared folder really shared?"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor.base import Answers, Check, Finding, Script, Subject, read

NAME = "shared"
_PREFIX = ".clusterkit-doctor-shared-"


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
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
            for line in file:
                _, point, name = line.split()[:3]
                inside = point == "/" or (os.path.realpath(folder) + "/").startswith(point + "/")
                if inside and len(point) >= longest:
                    longest, kind = len(point), name
    except (OSError, ValueError):
        pass
    seen = {"text": None, "error": None, "kind": kind}
    try:
        os.listdir(folder)  # makes NFS look again
        with open(
            os.path.join(folder, ".clusterkit-doctor-shared-" + given["token"]), encoding="ascii"
        ) as file:
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

    with contextlib.suppress(FileNotFoundError):
        os.unlink(
            os.path.join(
                os.path.expanduser(given["shared"]),
                ".clusterkit-doctor-shared-" + given["token"],
            )
        )


WRITE = Script("shared-write", collect_write, where="head")
READ = Script("shared-read", collect_read, phase=2, where="others", with_head=True)
REMOVE = Script("shared-remove", collect_remove, phase=3, where="head")


def judge(answers: Answers, subject: Subject) -> list[Finding]:
    folder = subject.shared or ""
    head = subject.head.name
    written, findings = read(NAME, WRITE, answers, subject, Written)
    if head not in written or written[head].error is not None:
        if head in written:
            cause = f"{folder} cannot be written to: {written[head].error}"
            findings.append(Finding(NAME, head, "fail", cause, _mount(folder)))
        reason = f"{head} could not write to it"
        return [
            *findings,
            *(Finding(NAME, host, "skip", reason) for host in answers if host != head),
        ]
    findings.append(Finding(NAME, head, "ok", folder))
    seen, unread = read(NAME, READ, answers, subject, Found)
    findings += unread
    for host, found in seen.items():
        if found.error is not None:
            cause = f"{folder} cannot be read: {found.error}"
            findings.append(Finding(NAME, host, "fail", cause, _mount(folder)))
        elif found.text is None:
            kind = found.kind or "of an unknown kind"
            cause = f"{folder} is not shared: what {head} writes is not there (it is {kind})"
            findings.append(Finding(NAME, host, "fail", cause, _mount(folder)))
        elif found.text == "":
            cause = f"{folder}: what {head} writes is there, but empty for a while"
            mend = f"sudo mount -o remount,noac {shell.quote(folder)}"
            findings.append(Finding(NAME, host, "warn", cause, mend))
        else:
            findings.append(Finding(NAME, host, "ok", folder))
    return findings


def _mount(folder: str) -> str:
    return f"mountpoint {shell.quote(folder)} || sudo mount {shell.quote(folder)}"


CHECK = Check(
    NAME,
    "What one host writes to the shared folder, every other reads there at once.",
    judge,
    (WRITE, READ, REMOVE),
    quick=False,
    pointless=lambda subject: (
        None if subject.shared else "the cluster entry names no shared folder"
    ),
)
