"""The record of the newest attempt that a supervisor has begun, which a full disk takes as well."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import msgspec
from msgspec import Struct

from clusterkit.errors import RunFolderError
from clusterkit.run.status import RunStatus

_NAME = re.compile(r"attempt-(\d+)\.(starting|started)\Z")


class Begun(Struct, frozen=True):
    """The newest attempt that a supervisor has begun to start."""

    attempt: int
    whole: bool
    """Whether all of its nodes were started."""

    @classmethod
    def read(cls, folder: Path) -> Begun | None:
        """Return what a run's folder says; None: nothing has begun, or from another machine."""
        with contextlib.suppress(OSError):
            for found in filter(None, map(_NAME.match, os.listdir(folder))):
                return cls(int(found[1]), found[2] == "started")
        return None

    def record(self, folder: Path) -> None:
        """Write it into the name of an empty file, by renaming that.

        A rename needs neither a block nor an inode, which a full disk, or a user over quota, does
        not have. A new file needs an inode, a byte overwritten in place a block of btrfs or ZFS.

        Raises:
            RunFolderError: it cannot be renamed either: the file system is read-only, or gone.
        """
        path = folder / f"attempt-{self.attempt}.{'started' if self.whole else 'starting'}"
        try:
            before = [name for name in os.listdir(folder) if _NAME.match(name)]
            if before:
                (folder / before[0]).rename(path)
            else:
                path.touch(0o644)
            if self.attempt > 1 and not self.whole:  # a power cut does not take it back
                handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)
        except OSError as error:
            raise RunFolderError(
                f"attempt {self.attempt} cannot be recorded in {folder}: {error.strerror}",
                hint="an attempt that is not on record could be started twice",
            ) from error


def since(saved: RunStatus, begun: Begun | None) -> RunStatus:
    """Return a record that may be older than ``begun``: on a full disk it could not follow."""
    if begun is None or begun.attempt <= saved.attempt or saved.state.final:
        return saved
    return msgspec.structs.replace(saved, attempt=begun.attempt, running_since=None)
