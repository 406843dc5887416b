"""The program that imports torch once and forks the ranks of a node.

The agent (`server`) has the job's own Python run the text of this module and of `preload`, `rank`,
`program`, `eager` and `standby`, with the job's options and environment. They are no modules there:
nothing of clusterkit stands in ``sys.modules`` or on ``sys.path`` of the program that a fork
becomes. Standard library only, and any Python from 3.9 on.

What goes through the channel, a socket of packets:

* to here: one byte and handles, of a file that holds an order and of the ranks' outputs. The
  order is read when its turn comes and node 0 can be found by name; one that is empty by then was
  taken back.
* from here, JSON: ``{"ready": pid}`` after the imports, ``{"start": .., "number": .., "pid": ..}``
  when a rank begins and ``{"pid": .., "status": ..}`` when it has ended.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import socket
import sys
import time
from typing import Any

Document = dict[str, Any]
_HANDLES = 253  # the most that one message brings; unix(7)
_NAME_TRIES, _NAME_PAUSE = 60, 0.2  # 12 s: another pod's name may come late, or the pod have ended


class Server:
    """Waits for orders; every rank is a fork of it. ``channel``: the socket's handle."""

    def __init__(self, channel: int) -> None:
        self._channel = socket.socket(fileno=channel)
        self._ranks: dict[int, int] = {}  # process ids, by the handle that tells of their end
        self._poll = select.poll()

    def serve(self) -> Document:
        """Fork as ordered; returns in every fork, with its order, and never here."""
        channel = self._channel.fileno()
        os.set_inheritable(channel, False)
        self._poll.register(channel, select.POLLIN)
        while True:
            for handle, _ in self._poll.poll():
                if handle != channel:
                    self._ended(handle)
                elif (order := self._take_order()) is not None:
                    for each in (channel, *self._ranks):
                        os.close(each)
                    self._channel.detach()
                    return order

    def tell(self, message: Document) -> None:
        try:
            self._channel.send(json.dumps(message).encode())
        except OSError:
            os._exit(0)  # nobody is left to serve

    def _take_order(self) -> Document | None:
        """Fork for the next one: None here, and in a fork what it is ordered to be."""
        message, handles, _, _ = socket.recv_fds(self._channel, 1, _HANDLES)
        if not message:
            os._exit(0)  # the agent is gone, or has no more use for this
        file, *outputs = handles
        _await_head(file)
        order = _contents(file)
        os.close(file)
        server = os.getpid()
        for rank, output in zip(order.pop("ranks"), outputs):  # noqa: B905 (3.9)
            pid = os.fork()
            if pid == 0:
                for other in outputs:
                    if other != output:
                        os.close(other)
                return {**order, **rank, "output": output, "server": server}
            with contextlib.suppress(OSError):  # whoever hears of it may signal its group
                os.setpgid(pid, pid)
            handle = os.pidfd_open(pid)
            self._ranks[handle] = pid
            self._poll.register(handle, select.POLLIN)
            self.tell({"start": order["start"], "number": rank["number"], "pid": pid})
        for output in outputs:
            os.close(output)
        return None

    def _ended(self, handle: int) -> None:
        self._poll.unregister(handle)
        os.close(handle)
        pid, status = os.waitpid(self._ranks.pop(handle), 0)
        self.tell({"pid": pid, "status": status})


def _contents(file: int) -> Document:
    """The order that a file holds."""
    order: Document = json.loads(os.pread(file, os.fstat(file).st_size, 0) or b'{"ranks": []}')
    return order


def _await_head(file: int) -> None:
    """Return when node 0's name can be resolved, the order was taken back or time is up.

    A pod's name may come late; or never, if it has ended, and the program need not ask for it.
    """
    for tries in range(_NAME_TRIES):
        name = _contents(file).get("head")
        with contextlib.suppress(OSError):
            if name:
                # As a str it would have modules imported that the program did not ask for.
                socket.getaddrinfo(name.encode(), 0)
            return
        if tries == _NAME_TRIES // 2:
            os.write(2, f"waiting for the name {name} to resolve\n".encode())
        time.sleep(_NAME_PAUSE)
    os.write(2, f"the name {name} does not resolve; going on without it\n".encode())


def run(config: Document, spaces: Document) -> Any:
    """Import and serve; returns in every fork, with the `program.Program` that it is to be.

    Args:
        config: what `server` says of the program; ``channel`` is the socket's handle.
        spaces: what the modules define, by their names.
    """
    began = time.time()
    environment = dict(os.environ)
    if sys.path[:1] == [""]:
        del sys.path[0]  # of ``-c``; the program's own folder is a rank's to add
    gc.disable()  # nothing of an import is garbage
    preload = spaces["preload"]["Preload"](config, spaces["eager"])
    preload()
    gc.freeze()  # a rank's collections leave alone, and do not copy, what all ranks share
    if "idle" in config:
        spaces["standby"]["Standby"](config, preload, spaces, began).wait()
    server = Server(config["channel"])
    server.tell({"ready": os.getpid()})
    order = server.serve()
    gc.enable()
    os.close(config["source"])
    spaces["rank"]["become"](order, config, environment)
    last = preload.record if order["number"] == 0 else lambda code: None
    return spaces["program"]["Program"](order["argv"], config["modules"], last)
