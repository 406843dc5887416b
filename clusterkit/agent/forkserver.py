"""The program that imports torch once and forks the ranks of a node.

The agent (`forkserver_process`) has the job's own Python run the text of this module and of
the others that it names, with the job's options and environment. They are no modules there:
``sys.modules`` and ``sys.path`` of the program that a fork becomes hold nothing of clusterkit.
Standard library only, and any Python from 3.9 on.

Messages on the channel, a socket of packets:

* from the agent: one byte and handles, of a file that holds an order and of the ranks' outputs. The
  order is read once the ones before it are done and node 0's name can be resolved; a file that is
  empty by then was cancelled.
* to the agent, JSON: ``{"ready": pid}`` after the imports, ``{"start": .., "number": .., "pid":
  ..}`` when a rank begins and ``{"pid": .., "status": ..}`` when it has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
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
_HANDLE = 200  # beyond those that the program opens first
_NAME_SECONDS, _NAME_PAUSE = 12.0, 0.2  # another pod's name may come late, or the pod have ended


class Server:
    """Wait for orders; every rank is a fork of this process. ``channel``: the socket's handle."""

    def __init__(self, channel: int) -> None:
        self._channel = socket.socket(fileno=channel)
        self._ranks: dict[int, int] = {}  # process ids, by process handle (pidfd)
        self._poll = select.poll()

    def serve(self) -> Document:
        """Fork as ordered; return in every fork, with its order, and never in this process."""
        channel = self._channel.fileno()
        os.set_inheritable(channel, False)
        self._poll.register(channel, select.POLLIN)
        while True:
            for handle, _ in self._poll.poll():
                if handle != channel:
                    self._rank_ended(handle)
                elif (order := self._fork_ranks()) is not None:
                    for each in (channel, *self._ranks):
                        os.close(each)
                    self._channel.detach()
                    return order

    def report(self, message: Document) -> None:
        try:
            self._channel.send(json.dumps(message).encode())
        except OSError:
            os._exit(0)  # the agent is gone

    def _fork_ranks(self) -> Document | None:
        """Fork for the next order; return None in this process, and in a fork the rank's order."""
        message, handles, _, _ = socket.recv_fds(self._channel, 1, _HANDLES)
        if not message:
            os._exit(0)  # the agent is gone, or has closed the channel
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
            with contextlib.suppress(OSError):  # the agent may signal its group once it knows it
                os.setpgid(pid, pid)
            handle = os.pidfd_open(pid)
            self._ranks[handle] = pid
            self._poll.register(handle, select.POLLIN)
            self.report({"start": order["start"], "number": rank["number"], "pid": pid})
        for output in outputs:
            os.close(output)
        return None

    def _rank_ended(self, handle: int) -> None:
        self._poll.unregister(handle)
        os.close(handle)
        pid, status = os.waitpid(self._ranks.pop(handle), 0)
        self.report({"pid": pid, "status": status})


def _contents(file: int) -> Document:
    order: Document = json.loads(os.pread(file, os.fstat(file).st_size, 0) or b'{"ranks": []}')
    return order


def _await_head(file: int) -> None:
    """Wait until node 0's name can be resolved, the order was cancelled or time is up.

    A pod's name may come late; or never, if it has ended, and not every program needs it.
    """
    deadline, told = time.monotonic() + _NAME_SECONDS, False
    while time.monotonic() < deadline:  # one try may take as long as the name servers' timeouts
        name = _contents(file).get("head")
        with contextlib.suppress(OSError):
            if name:
                # A str would have the idna codec imported, which the program did not ask for.
                socket.getaddrinfo(name.encode(), 0)
            return
        if not told and time.monotonic() > deadline - _NAME_SECONDS / 2:
            told = True
            os.write(2, f"waiting for the name {name} to resolve\n".encode())
        time.sleep(_NAME_PAUSE)
    os.write(2, f"the name {name} does not resolve; going on without it\n".encode())


def run(config: Document, spaces: Document) -> Any:
    """Import and serve; return in every fork, with the `program.Program` that it is to run.

    Args:
        config: as `forkserver_process.start` makes it; ``channel`` is the socket's handle.
        spaces: what the modules define, by their names.
    """
    environment, own_first = dict(os.environ), list(sys.path)
    gc.disable()  # nothing of an import is garbage
    preload = spaces["preload"]["Preload"](config, spaces)
    sys.path[:] = config["path"]
    preload()
    sys.path[:] = own_first
    gc.freeze()  # collections in ranks do not touch, and so copy, what all ranks share
    server = Server(config["channel"])
    server.report({"ready": os.getpid()})
    order = server.serve()
    sys.path[:] = config["path"]
    if config["hidden"]:
        config["server's"] = dict(sys.modules)  # they live on for what runs here
        sys.modules.clear()
        sys.modules.update(config["hidden"])
    gc.enable()
    os.close(config["source"])
    rank, reads = spaces["rank"], spaces["influences"]
    # Only the first rank of a node tells: as its agent, not as the program.
    tells = fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, _HANDLE) if order["number"] == 0 else -1
    rank["become"](order, config, environment)

    def tell(text: str) -> None:
        if tells >= 0:
            os.write(tells, f"{order['remark']}{text}\n".encode())

    spaces["first_import"]["FirstImports"](
        preload.groups, spaces["module_files"]["is_of_python"],
        {"torch": reads["READ_BY_TORCH"], "torch._dynamo": reads["READ_BY_DYNAMO"]}, tell,
        lambda: rank["start_worker_server"](order["socket"].format(**order["env"])),
    )  # fmt: skip
    shadowed = spaces["module_files"]["shadowed"]
    return spaces["program"]["Program"](order["argv"], config["modules"], shadowed)
