"""Folders: their disks, whether they can be written to, whether hosts share them."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import time
from typing import Any

from clusterkit.doctor.hosts.collect import text_of, user_of


def disks(context: dict[str, Any]) -> list[dict[str, Any]]:
    folders = [context["workdir"], os.environ.get("TMPDIR") or "/tmp", "~/.cache"]
    if context["shared"]:
        folders.append(context["shared"])
    found = {}
    for folder in folders:
        path = os.path.abspath(os.path.expanduser(folder))
        while not os.path.exists(path) and path != "/":
            path = os.path.dirname(path)
        device = os.stat(path).st_dev
        if device in found:
            continue
        disk = os.statvfs(path)
        found[device] = {
            "path": path,
            "free": disk.f_bavail * disk.f_frsize,
            "total": disk.f_blocks * disk.f_frsize,
            "inodes_free": disk.f_favail,
            "inodes": disk.f_files,
            "read_only": bool(disk.f_flag & os.ST_RDONLY),
        }
    return list(found.values())


def workdir(context: dict[str, Any]) -> dict[str, Any]:
    path = os.path.abspath(os.path.expanduser(context["workdir"]))
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
    host = context["host"].replace("/", "_")
    name = os.path.join(path, f".clusterkit-doctor-{context['token']}-{host}")
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


def _token(context: dict[str, Any]) -> str:
    """Return the path of the file that the head writes and the other hosts read."""
    return os.path.expanduser(f"{context['shared']}/.clusterkit-doctor-shared-{context['token']}")


def shared_write(context: dict[str, Any]) -> dict[str, Any]:
    path = _token(context)
    for old in glob.glob(glob.escape(path[: -len(context["token"])]) + "*"):
        # Left by a doctor that was killed.
        with contextlib.suppress(OSError):
            if os.stat(old).st_mtime < time.time() - 3600:
                os.unlink(old)
    try:
        with open(path, "x", encoding="ascii") as file:
            file.write(context["token"])
    except OSError as error:
        return {"error": error.strerror}
    return {"error": None}


def shared_read(context: dict[str, Any]) -> dict[str, Any]:
    path = _token(context)
    folder = os.path.dirname(path)
    file_system = ""
    longest = -1
    for line in text_of("/proc/self/mounts").splitlines():
        _, point, kind = line.split()[:3]
        inside = point == "/" or (os.path.realpath(folder) + "/").startswith(point + "/")
        if inside and len(point) >= longest:
            longest, file_system = len(point), kind
    seen = {"text": None, "error": None, "file_system": file_system}
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


def shared_remove(context: dict[str, Any]) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_token(context))
