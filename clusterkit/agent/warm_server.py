"""A fork server that outlives runs (`warm`): each run is served by a fork of it.

Run as text, like `forkserver`. It serves no run itself, so none leaves anything in it. It ends when
it had no request for long enough. Before it forks it checks whether any file that it has imported
has changed on disk; then it starts itself anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
from typing import Any

Document = dict[str, Any]
_PR_SET_CHILD_SUBREAPER = 36
_NEW_SECONDS = 1.0  # before its own start; a file written since may have been another when imported


class WarmServer:
    """Wait for runs.

    Args:
        config: of the server: ``channel``, the handle of the socket that takes requests; ``idle``,
            seconds; ``files``, the prefix of this server's files.
        preload: a `preload.Preload`, which has done its imports.
        spaces: what these modules define.
        began: when this process did, by the system's clock.
    """

    def __init__(self, config: Document, preload: Any, spaces: Document, began: float) -> None:
        self._config, self._preload, self._spaces = config, preload, spaces
        self._socket = socket.socket(fileno=config["channel"])
        os.set_inheritable(config["channel"], False)
        self._forks: list[int] = []  # their process handles (pidfd)
        self._checked = len(sys.argv) > 2  # it has just started anew for the next request
        self._stamps = {path: _stamp(path) for path in self._files()}
        newest = max((stamp[0] for stamp in self._stamps.values() if stamp), default=0)
        self._unsure = newest > (began - _NEW_SECONDS) * 1e9
        self._imports_stamp = _stamp(preload.record.path)

    def wait(self) -> None:
        """Return in every fork, with the run's channel in ``config["channel"]``."""
        own = self._socket.fileno()
        poll = select.poll()
        poll.register(own, select.POLLIN)
        while True:
            ready = poll.poll(self._config["idle"] * 1000)
            if not (self._reap() or ready):
                for kind in ("json", "log", "sock"):  # the socket last: requests may still come
                    with contextlib.suppress(OSError):
                        os.unlink(f"{self._config['files']}.{kind}")
                while poll.poll(0):
                    if not self._fork():
                        return
                os._exit(0)
            for handle, _ in ready:
                if handle == own:
                    if not self._checked and self._changed():
                        self._preload.restart(0, "checked")
                    self._checked = False
                    if (fork := self._fork()) == 0:
                        return
                    poll.register(fork, select.POLLIN)
                else:
                    poll.unregister(handle)
                    self._forks.remove(handle)
                    os.close(handle)
                    if self._changed():  # now, so that the next run need not wait for it
                        self._preload.restart(0)

    def _reap(self) -> bool:
        """Return whether forks live, also those of before it started itself anew."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            return True
        return False

    def _fork(self) -> int:
        """Fork for the next request; return 0 in the fork, and its handle in this process."""
        message, handles, _, _ = socket.recv_fds(self._socket, 1 << 16, 2)
        if pid := os.fork():
            for handle in handles:
                os.close(handle)
            self._forks.append(os.pidfd_open(pid))
            return self._forks[-1]
        channel, output = handles
        os.setpgid(0, 0)
        # What a rank leaves behind stays below this process, where the agent looks for it.
        self._spaces["rank"]["libc"].prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for number in (1, 2):
            os.dup2(output, number)
        for handle in (output, *self._forks):
            os.close(handle)
        self._socket.close()
        title = [*self._config["argv"], "-c", self._config["text"], "0"]
        if not self._spaces["rank"]["set_title"](title, json.loads(message)):
            os._exit(0)  # `agent stop` could not find it, or its ranks, by the run's folder
        self._config["channel"] = channel
        return 0

    def _changed(self) -> bool:
        """Return whether imports would give something else by now."""
        return (
            self._unsure
            or _stamp(self._preload.record.path) != self._imports_stamp
            or any(_stamp(path) != stamp for path, stamp in self._stamps.items())
        )

    def _files(self) -> set[str]:
        """Return every file that this process is made of, and the folders of packages."""
        found = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
        with open("/proc/self/maps") as maps:
            found |= {line.partition("/")[1] + line.partition("/")[2].strip() for line in maps}
        found |= {path for path in sys.path if os.path.isfile(path)}
        found.add(os.path.join(sys.prefix, "pyvenv.cfg"))
        for folder in self._spaces["preload"]["site_folders"]():
            found.add(folder)
            with contextlib.suppress(OSError):
                found |= {entry.path for entry in os.scandir(folder) if entry.path[-4:] == ".pth"}
        return found - {""}


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
