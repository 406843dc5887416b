"""A fork server that outlives runs (`warm`): what serves a run is a fork of it.

Run as text, like `forkserver`. It serves no run itself, so none leaves anything in it. It ends when
nobody has asked for it long enough. Before it is used it looks whether anything that it has
imported is another on disk by now; then it begins anew.
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


class Standby:
    """Waits for runs.

    Args:
        config: of the server: ``channel``, the handle of the socket that takes requests; ``idle``,
            seconds; ``files``, how the names begin of those that tell of this process.
        preload: a `preload.Preload`, which has done its imports.
        spaces: what these modules define.
        began: when this process did, by the system's clock.
    """

    def __init__(self, config: Document, preload: Any, spaces: Document, began: float) -> None:
        self._config, self._preload, self._spaces = config, preload, spaces
        self._socket = socket.socket(fileno=config["channel"])
        os.set_inheritable(config["channel"], False)
        self._handles: list[int] = []  # they tell of the ends of its forks
        self._asked = len(sys.argv) > 2  # whether somebody waits for what was just imported
        self._seen = {path: _stamp(path) for path in self._files()}
        newest = max((stamp[0] for stamp in self._seen.values() if stamp), default=0)
        self._unsure = newest > (began - _NEW_SECONDS) * 1e9
        self._list = _stamp(preload.memory)

    def wait(self) -> None:
        """Return in every fork, which has ``config["channel"]`` of its run's."""
        own = self._socket.fileno()
        poll = select.poll()
        poll.register(own, select.POLLIN)
        while True:
            ready = poll.poll(self._config["idle"] * 1000)
            if not (self._reap() or ready):
                for kind in ("json", "log", "sock"):  # the last one: until then it can be asked
                    with contextlib.suppress(OSError):
                        os.unlink(f"{self._config['files']}.{kind}")
                while poll.poll(0):
                    if not self._take():
                        return
                os._exit(0)
            for handle, _ in ready:
                if handle == own:
                    if not self._asked and self._changed():
                        self._preload.again(0, "asked")
                    self._asked = False
                    if (fork := self._take()) == 0:
                        return
                    poll.register(fork, select.POLLIN)
                else:
                    poll.unregister(handle)
                    self._handles.remove(handle)
                    os.close(handle)
                    if self._changed():  # the next run need not wait for it
                        self._preload.again(0)

    def _reap(self) -> bool:
        """Whether forks live; also those of before it began anew."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            return True
        return False

    def _take(self) -> int:
        """Fork for the next request: 0 in the fork, and here the handle that tells of its end."""
        message, handles, _, _ = socket.recv_fds(self._socket, 1 << 16, 2)
        if pid := os.fork():
            for handle in handles:
                os.close(handle)
            self._handles.append(os.pidfd_open(pid))
            return self._handles[-1]
        channel, output = handles
        os.setpgid(0, 0)
        # What a rank leaves behind stays below this process, where the agent looks for it.
        self._spaces["rank"]["libc"].prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for number in (1, 2):
            os.dup2(output, number)
        for handle in (output, *self._handles):
            os.close(handle)
        self._socket.close()
        title = [*self._config["argv"], "-c", self._config["text"], "0"]
        if not self._spaces["rank"]["set_title"](title, json.loads(message)):
            os._exit(0)  # nobody could find it, or its ranks, by the run's name
        self._config["channel"] = channel
        return 0

    def _changed(self) -> bool:
        """Whether what would be imported now is something else."""
        return (
            self._unsure
            or _stamp(self._preload.memory) != self._list
            or any(_stamp(path) != stamp for path, stamp in self._seen.items())
        )

    def _files(self) -> set[str]:
        """Every file that this process is made of, and the folders where packages come and go."""
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
