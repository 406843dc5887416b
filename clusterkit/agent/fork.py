"""A node's ranks as forks of one Python, the fork server, which has done their imports."""

from __future__ import annotations

import argparse
import array
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

from clusterkit.agent import server
from clusterkit.agent.processes import processes_of, send
from clusterkit.agent.protocol import (
    RANK_HEADER,
    TRACE_FILE,
    TRACE_SIGNAL,
    WORKER_SOCKET,
    Document,
)
from clusterkit.agent.signals import end_with_parent

_LAST_LEVEL = 2  # of what the server imports, `preload.LEVELS`: nothing
_HANDLES = 200  # that fit into one message; unix(7)


class Fork:
    """Forks the ranks of a node, again and again; see `spawn.Processes`.

    Args:
        options: of ``agent run``. ``fork`` words of ``argv`` are the interpreter and its options.
        folder: the node's.
        output: makes a handle that takes the server's own output.
        ended: takes the id of a process that has ended (0: it never began), and its exit code.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        folder: Path,
        selector: selectors.BaseSelector,
        output: Callable[[], int],
        ended: Callable[[int, int], None],
    ) -> None:
        self._options, self._folder, self._selector = options, folder, selector
        self._python, self._words = options.argv[: options.fork], options.argv[options.fork :]
        self._output, self._told = output, ended
        self.running: dict[int, int] = {}
        self.kept: set[int] = set()
        self.failure: str | None = None
        self._idle: float = options.warm  # of a warm server; 0: none
        self._there = False  # whether there is a server, or was asked for
        self._process: subprocess.Popen[bytes] | None = None  # None: a fork of a warm server
        self._handle = -1  # of the process
        self._ready = False  # whether it has done its imports
        self._starts = 0
        self._orders: list[int] = []  # handles of the files that hold this start's

    def prepare(self) -> None:
        with contextlib.suppress(OSError):  # `start` meets it again
            self._start_server(level=0)

    def start(self) -> None:
        self.failure = None
        if not self._there:
            self._start_server(level=0)
        self._starts += 1
        self.running = dict.fromkeys(range(self._options.nproc), 0)
        self._order()

    def withdraw(self) -> None:
        """Ranks that have not begun do not; one that is just being forked is killed when known."""
        for handle in self._orders:
            os.ftruncate(handle, 0)
        for number in [number for number, pid in self.running.items() if not pid]:
            del self.running[number]
            self._told(0, -signal.SIGTERM)

    def close(self) -> None:
        if self._there:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            self._forget_server()
        self._forget_orders()
        for path in self._folder.glob(WORKER_SOCKET.format(RANK="*")):
            path.unlink()

    # -- the server

    def _start_server(self, level: int) -> None:
        mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output, env = self._output(), self._environment()
        process, self.kept = None, set()
        try:
            if not (self._idle and self._ask(env, other.fileno(), output)):
                process = server.start(
                    self._python, self._words, env, other.fileno(), output, level=level,
                    begin=end_with_parent,
                )  # fmt: skip
        except BaseException:
            mine.close()
            raise
        finally:
            other.close()
            os.close(output)
        self._channel, self._process, self._level = mine, process, level
        self._there, self._ready = True, False
        mine.setblocking(False)
        self._selector.register(mine, selectors.EVENT_READ, self._hear)
        if process is not None:
            self._know(process.pid)
            self._selector.register(self._handle, selectors.EVENT_READ, self._server_ended)

    def _ask(self, env: dict[str, str], channel: int, output: int) -> bool:
        """Whether a fork of a warm server is going to serve; it is no child of this process."""
        from clusterkit.agent import warm

        folder = Path(env["CLUSTERKIT_RUN_DIR"]).parents[1] / "warm"
        try:
            warm.ask(folder, self._idle, self._python, self._words, env, channel, output)
        except (OSError, subprocess.SubprocessError) as error:
            self._be_cold(str(error))
        return self._idle > 0

    def _be_cold(self, why: str) -> None:
        self._idle = 0.0
        output = self._output()
        os.write(output, f"without a warm fork server: {why}\n".encode())
        os.close(output)

    def _know(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # the channel's end is heard of as well
            self._handle, self.kept = os.pidfd_open(pid), {pid}

    def _forget_server(self) -> int:
        """Its exit code, or 1 where nobody here is told."""
        code = 1
        self._selector.unregister(self._channel)
        self._channel.close()
        if self._process is not None:
            code = self._process.wait()
            self._selector.unregister(self._handle)
        if self._handle >= 0:
            os.close(self._handle)
        self._there, self._handle, self.kept = False, -1, set()
        return code

    def _server_ended(self) -> None:
        self._drain()
        code, level = self._forget_server(), self._level + 1
        if self._process is None:
            place = os.environ.get("CLUSTERKIT_NODE_DIR", str(self._folder))  # of this attempt
            send(processes_of(place, "CLUSTERKIT_NODE_DIR"), signal.SIGKILL)
            if not self._ready:
                self._be_cold("it ended")
                code, level = -signal.SIGKILL, 0
        if code < 0 and not self._ready and level <= _LAST_LEVEL:
            # What it imported may have killed it.
            try:
                self._start_server(level)
                if self.running:
                    self._order()
                return
            except OSError:
                pass
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self.failure = f"the Python that forks the ranks ended: {how}"
        lost, self.running = len(self.running), {}
        for _ in range(lost):
            self._told(0, code or 1)  # it is no rank's own end

    def _hear(self) -> None:
        if not self._drain() and self._process is None:
            self._server_ended()

    def _drain(self) -> bool:
        """Hear what the server tells; whether more may come."""
        try:
            while message := self._channel.recv(1 << 16):
                self._heard(json.loads(message))
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def _heard(self, message: Document) -> None:
        if "ready" in message:
            self._ready = True
            if self._process is None:
                self._know(message["ready"])
        elif "number" in message:
            number, pid = message["number"], message["pid"]
            if message["start"] == self._starts and number in self.running:
                self.running[number] = pid
            else:
                send([pid], signal.SIGKILL)
            if all(self.running.values()):
                self._forget_orders()
        else:
            known = {pid: number for number, pid in self.running.items()}
            if message["pid"] in known:
                del self.running[known[message["pid"]]]
                self._told(message["pid"], os.waitstatus_to_exitcode(message["status"]))

    # -- orders

    def _order(self) -> None:
        """Have this start's ranks forked."""
        self._forget_orders()
        numbers = list(self.running)
        for at in range(0, len(numbers), _HANDLES):
            some = numbers[at : at + _HANDLES]
            order = os.memfd_create("clusterkit")
            self._orders.append(order)
            ranks = [{"number": number, "env": self._environment(number)} for number in some]
            document = {
                "start": self._starts, "argv": self._words, "cwd": os.getcwd(), "ranks": ranks,
                "header": RANK_HEADER.decode(), "socket": str(self._folder / WORKER_SOCKET),
                "trace": (TRACE_FILE, TRACE_SIGNAL),
                "head": os.environ.get("MASTER_ADDR") if self._options.nodes > 1 else None,
            }  # fmt: skip
            os.write(order, json.dumps(document).encode())
            pipes = (self._folder / f"pipe-{number}" for number in some)
            handles = [order, *(os.open(pipe, os.O_WRONLY) for pipe in pipes)]
            try:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", handles))
                with contextlib.suppress(BrokenPipeError):  # of its end we are told
                    self._channel.sendmsg([b"."], [rights])
            finally:
                for handle in handles[1:]:
                    os.close(handle)

    def _forget_orders(self) -> None:
        for handle in self._orders:
            os.close(handle)
        self._orders = []

    def _environment(self, number: int | None = None) -> dict[str, str]:
        """A rank's, with all that torchrun sets; of None, what all ranks share."""
        nproc, nodes = self._options.nproc, self._options.nodes
        env = dict(os.environ)
        if folder := os.path.dirname(self._python[0]):
            env["PATH"] = f"{folder}:{env.get('PATH', os.defpath)}"
        env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        env.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        if number is None:
            return env
        node = int(env.get("NODE_RANK", "0"))
        rank, world = str(node * nproc + number), str(nodes * nproc)
        place = env.get("CLUSTERKIT_NODE_DIR", self._folder)  # of this attempt
        return env | {
            "RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": str(number),
            "LOCAL_WORLD_SIZE": str(nproc), "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(nodes), "ROLE_RANK": rank, "ROLE_WORLD_SIZE": world,
            "ROLE_NAME": "default",
            "TORCHELASTIC_RUN_ID": env.get("CLUSTERKIT_RUN_ID", "none"),
            "TORCHELASTIC_RESTART_COUNT": str(self._starts - 1),
            "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCHELASTIC_ERROR_FILE": f"{place}/rank-{rank}-error.json",
        }  # fmt: skip
