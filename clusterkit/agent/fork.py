"""A node's ranks as forks of one Python, the fork server, which has imported what they import."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
from typing import Any

from clusterkit.agent import forkserver_process, limits, numa, recorder
from clusterkit.agent.forkserver_process import Target
from clusterkit.agent.launcher import Launcher
from clusterkit.agent.processes import send
from clusterkit.agent.protocol import (
    LOCAL_RANK_WORD,
    RANK_HEADER,
    REMARK,
    TRACE_FILE,
    TRACE_SIGNAL,
    WORKER_SOCKET,
    Document,
)
from clusterkit.agent.signals import die_with_parent

_HANDLES = 200  # that go into one message; unix(7) allows 253


class _Server:
    """A running fork server."""

    def __init__(
        self, channel: socket.socket, process: subprocess.Popen[bytes], level: int
    ) -> None:
        self.channel, self.process, self.level = channel, process, level
        self.ready = False  # whether it has done its imports
        self.handle = os.pidfd_open(process.pid)


class ForkLauncher(Launcher):
    """Ranks that are forked from a server, which is kept from one start to the next.

    ``options.fork`` words of ``options.argv`` are the interpreter and its options.
    """

    owns_ranks = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        argv, words = self._options.argv, self._options.fork
        self._python, self._program = argv[:words], argv[words:]
        self._server: _Server | None = None
        self._starts = 0
        self._orders: list[int] = []  # handles of the files that hold this start's
        self._binding = numa.Binding()

    def prepare(self) -> None:
        super().prepare()
        with contextlib.suppress(OSError):  # `start` runs into it again
            self._start_server(level=0)

    def _start_processes(self) -> None:
        if self._server is None:
            self._start_server(level=0)
        self._starts += 1
        self._bind()
        self.running = dict.fromkeys(range(self._options.nproc), 0)
        self._order_ranks()

    def _bind(self) -> None:
        """Choose the CPUs of this start's ranks, and tell it once."""
        if self._options.bind == "none":
            return
        binding = numa.near_gpus(self._options.nproc, os.environ, os.sched_getaffinity(0))
        if binding.remark and binding != self._binding:
            self._log.line(binding.remark)
        self._binding = binding

    def _cancel_pending(self) -> None:
        """A rank that is just being forked is killed once its process id is known."""
        for handle in self._orders:
            os.ftruncate(handle, 0)
        for number in [number for number, pid in self.running.items() if not pid]:
            del self.running[number]
            self._ended(0, -signal.SIGTERM)

    def _end_kept(self) -> None:
        if self._server is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._server.handle, signal.SIGKILL)
            self._close_server(self._server)
        self._close_orders()
        for path in self._folder.glob(WORKER_SOCKET.format(RANK="*")):
            path.unlink()

    # -- the server

    def _start_server(self, level: int) -> None:
        channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output = self._new_output()
        target = Target(self._python, self._program, self._environment(), self._options.preload)
        try:
            process = forkserver_process.start(
                target, other.fileno(), output, level=level, preexec=die_with_parent
            )
        except BaseException:
            channel.close()
            raise
        finally:
            other.close()
            os.close(output)
        channel.setblocking(False)
        self._server = _Server(channel, process, level)
        self._selector.register(channel, selectors.EVENT_READ, self._receive)
        self.kept = {process.pid}
        self._selector.register(self._server.handle, selectors.EVENT_READ, self._server_ended)

    def _close_server(self, ended: _Server) -> int:
        """Return its exit code."""
        self._selector.unregister(ended.channel)
        ended.channel.close()
        code = 1
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may wait for a device
            code = ended.process.wait(limits.KILL_SECONDS)
        self._selector.unregister(ended.handle)
        os.close(ended.handle)
        self._server, self.kept = None, set()
        return code

    def _server_ended(self) -> None:
        ended = self._server
        assert ended is not None
        self._receive_all(ended)
        code, level = self._close_server(ended), ended.level + 1
        if code < 0 and not ended.ready and level <= 1:
            os.write(
                output := self._new_output(),
                b"preload: the import ended Python; starting again without preloading\n",
            )
            os.close(output)
            try:
                self._start_server(level)
                if self.running:
                    self._order_ranks()
                return
            except OSError:
                pass
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self.failure = f"the Python that forks the ranks ended: {how}"
        lost, self.running = len(self.running), {}
        for _ in range(lost):
            self._ended(0, code or 1)  # it is no rank's own end

    def _receive(self) -> None:
        sender = self._server  # None: its end was handled a moment ago
        if sender is not None:
            self._receive_all(sender)

    def _receive_all(self, sender: _Server) -> None:
        with contextlib.suppress(OSError):
            while message := sender.channel.recv(1 << 16):
                self._handle(sender, json.loads(message))

    def _handle(self, sender: _Server, message: Document) -> None:
        if "ready" in message:
            sender.ready = True
        elif "number" in message:
            number, pid = message["number"], message["pid"]
            if message["start"] == self._starts and number in self.running:
                self.running[number] = pid
            else:
                send([pid], signal.SIGKILL)
            if all(self.running.values()):
                self._close_orders()
        else:
            known = {pid: number for number, pid in self.running.items()}
            if message["pid"] in known:
                del self.running[known[message["pid"]]]
                self._ended(message["pid"], os.waitstatus_to_exitcode(message["status"]))

    # -- orders

    def _order_ranks(self) -> None:
        """Have this start's ranks forked."""
        assert self._server is not None
        self._close_orders()
        numbers = list(self.running)
        for first in range(0, len(numbers), _HANDLES):
            some = numbers[first : first + _HANDLES]
            order = os.memfd_create("clusterkit")
            self._orders.append(order)
            ranks = [self._rank(number) for number in some]
            document = {
                "start": self._starts, "cwd": os.getcwd(), "ranks": ranks,
                "header": RANK_HEADER.decode(), "remark": REMARK.decode(),
                "socket": str(self._folder / WORKER_SOCKET),
                "trace": (TRACE_FILE, TRACE_SIGNAL),
                "head": os.environ.get("MASTER_ADDR") if self._options.nodes > 1 else None,
            }  # fmt: skip
            os.write(order, json.dumps(document).encode())
            pipes = (self._folder / f"pipe-{number}" for number in some)
            handles = [order, *(os.open(pipe, os.O_WRONLY) for pipe in pipes)]
            try:
                with contextlib.suppress(BrokenPipeError):  # the server's end is noticed anyway
                    socket.send_fds(self._server.channel, [b"."], handles)
            finally:
                for handle in handles[1:]:
                    os.close(handle)

    def _rank(self, number: int) -> Document:
        words = [word.replace(LOCAL_RANK_WORD, str(number)) for word in self._program]
        cpus = self._binding.cpus[number] if self._binding.cpus else []
        return {
            "number": number, "env": self._rank_environment(number), "argv": words, "cpus": cpus,
        }  # fmt: skip

    def _close_orders(self) -> None:
        for handle in self._orders:
            os.close(handle)
        self._orders = []

    def _environment(self) -> dict[str, str]:
        """Return what the environments of all ranks share."""
        env = dict(os.environ)
        if folder := os.path.dirname(self._python[0]):
            env["PATH"] = f"{folder}:{env.get('PATH', os.defpath)}"
        env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        # This attempt's folder.
        return env | recorder.settings(env, env.get("CLUSTERKIT_NODE_DIR", str(self._folder)))

    def _rank_environment(self, local_rank: int) -> dict[str, str]:
        """Return a rank's environment, with all that torchrun sets."""
        env, nproc, nodes = self._environment(), self._options.nproc, self._options.nodes
        node = int(env.get("NODE_RANK", "0"))
        rank, world = str(node * nproc + local_rank), str(nodes * nproc)
        folder = env.get("CLUSTERKIT_NODE_DIR", self._folder)  # of this attempt
        return env | {
            "RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(nproc), "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(nodes), "ROLE_RANK": rank, "ROLE_WORLD_SIZE": world,
            "ROLE_NAME": "default",
            "TORCHELASTIC_RUN_ID": env.get("CLUSTERKIT_RUN_ID", "none"),
            "TORCHELASTIC_RESTART_COUNT": str(int(env.get("CLUSTERKIT_ATTEMPT", "1")) - 1),
            "TORCHELASTIC_MAX_RESTARTS": env.get("TORCHELASTIC_MAX_RESTARTS", "0"),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCHELASTIC_ERROR_FILE": f"{folder}/rank-{rank}-error.json",
        }  # fmt: skip
