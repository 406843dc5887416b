"""Hosts over SSH that only speak: all in one process, no ranks, no sshd, no files.

``python -m tests.bench.fake_hosts SOCKET`` is that process. It answers what the ssh backend asks of
a host: `start`, ``agent report --follow`` in the frames of `clusterkit.agent.report`, and ``agent
stop``. `FakeTransport` reaches it; a command is a connection to its socket, as a channel is over
SSH.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from clusterkit.agent import limits
from clusterkit.errors import SubmitFailed
from clusterkit.transport import Completed, Environment, Put, Stream, Transport

STOP_SECONDS = 0.5
"""What ``agent stop`` takes on a host where a rank ends when it is asked to: its Python starts, it
waits, the agent writes its files."""
LINE = "step {} loss 3.1415926 of a rank that prints one line a second, as many programs do"


# ---------------------------------------------------------------- this side


class FakeStream(Stream):
    """A command on a host; see `clusterkit.transport.Stream`."""

    def __init__(self, address: str, host: str, argv: Sequence[str]) -> None:
        self._host = host
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address)
        self._socket.sendall(json.dumps({"host": host, "argv": list(argv)}).encode() + b"\n")

    def write(self, data: bytes) -> None:
        pass  # what a real host would read: an agent, which these have

    def close_input(self) -> None:
        pass

    def read(self, timeout: float | None = None) -> bytes:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(None if timeout is None else timeout * 1000):
            raise SubmitFailed(f"host {self._host} no longer answers")
        return self._socket.recv(1 << 20)

    @property
    def stderr(self) -> str:
        return ""

    def exit_code(self, timeout: float | None = None) -> int:
        return 0

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class FakeTransport(Transport):
    """Reaches the fake hosts that listen at this address."""

    def __init__(self, address: str) -> None:
        self._address = address

    def run(
        self,
        host: str,
        argv: Sequence[str],
        *,
        env: Environment = None,
        timeout: float | None = None,
        stdin: bytes = b"",
    ) -> Completed:
        with self.open(host, argv) as stream:
            said = b"".join(iter(lambda: stream.read(timeout), b""))
        return Completed(tuple(argv), 0, said.decode(), "")

    def open(
        self, host: str, argv: Sequence[str], *, env: Environment = None, own_group: bool = False
    ) -> Stream:
        return FakeStream(self._address, host, argv)

    def start(self, host: str, argv: Sequence[str], *, env: Environment = None) -> None:
        self.run(host, ["start", *argv])

    def put_all(self, host: str, files: Sequence[Put]) -> None:
        pass

    def free_port(self, host: str, wanted: int | None = None) -> int:
        return wanted or 29500

    def close(self) -> None:
        pass


# ---------------------------------------------------------------- the hosts


def _frame(header: dict[str, Any], data: bytes = b"") -> bytes:
    return json.dumps({**header, "bytes": len(data)}).encode() + b"\n" + data


class _Host:
    """One host, with one node on it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.begun = self.ended = False
        self.log = b""
        self.news = asyncio.Event()
        self.started = json.dumps(
            {"pid": 4711, "start_ticks": 99, "boot_id": "b" * 36, "at": 1.0, "host": name}
        ).encode()

    def tell(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    async def report(self, out: asyncio.StreamWriter, offset: int, follow: bool) -> None:
        """As `clusterkit.agent.report.report`, told of news instead of looking for them."""
        sent = False
        while True:
            news, ended = self.news, self.ended
            if self.begun and not sent:
                out.write(_frame({"file": "started.json"}, self.started))
                sent = True
            if 0 <= offset < len(self.log):
                out.write(_frame({"file": "log"}, self.log[offset:]))
                offset = len(self.log)
            if ended:
                exit_json = {
                    "exit_code": 143, "at": time.time(), "reason": "stopped on request",
                    "processes": [], "oom_kills": 0, "remarks": [], "causes": [],
                }  # fmt: skip
                out.write(_frame({"file": "exit.json"}, json.dumps(exit_json).encode()))
            alive = self.begun and not ended
            out.write(_frame({"begun": self.begun, "alive": alive, "ended": ended}))
            await out.drain()
            if ended or not follow:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), limits.HEARTBEAT_SECONDS)

    async def stop(self) -> None:
        if self.begun and not self.ended:
            await asyncio.sleep(STOP_SECONDS)
            self.ended = True
            self.tell()


class _Hosts:
    """All of them."""

    def __init__(self) -> None:
        self._hosts: dict[str, _Host] = {}
        self._printing: asyncio.Task[None] | None = None
        self.asked: dict[str, int] = {}

    async def serve(self, reader: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        request = json.loads(await reader.readline())
        argv: list[str] = request["argv"]
        host = self._hosts.setdefault(request["host"], _Host(request["host"]))
        with contextlib.suppress(ConnectionError):
            if argv[0] == "start":
                host.begun = True
                host.tell()
            elif argv[0] == "print":
                self._print(float(argv[1]))
            elif "report" in argv:
                offset = int(argv[argv.index("--log") + 1])
                await host.report(out, offset, "--follow" in argv)
            elif "stop" in argv:
                await host.stop()
            out.close()
            await out.wait_closed()

    def _print(self, rate: float) -> None:
        """Have every node print so many lines a second from now on; 0: none."""
        if self._printing is not None:
            self._printing.cancel()
            self._printing = None
        if rate:
            self._printing = asyncio.create_task(self._lines(rate))

    async def _lines(self, rate: float) -> None:
        """One node after the other, evenly over the time."""
        due, number = time.monotonic(), 0
        while True:
            hosts = [host for host in self._hosts.values() if host.begun]
            for host in hosts:
                due += 1 / rate / len(hosts)
                if (left := due - time.monotonic()) > 0:
                    await asyncio.sleep(left)
                now = time.time()
                stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
                micros = f"{now % 1:.6f}"[2:]
                rank = host.name.removeprefix("h")
                host.log += f"{stamp}.{micros}Z {rank} {LINE.format(number)}\n".encode()
                host.tell()
            number += 1


async def main(address: str) -> None:
    server = await asyncio.start_unix_server(_Hosts().serve, address, backlog=4096)
    print("listening", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
