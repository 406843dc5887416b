"""Runs on all hosts at once: each connects to the head's port, then to every other host.

The head listens on the rendezvous port, as rank 0 will. Every other host sends its name there and
gets the token back. For the check ``mesh`` each host also listens on a port that the kernel
chooses, as the ranks of gloo and NCCL do. The head sends the list of these ports to all hosts;
every host connects to all of them and sends a megabyte to the next host, so that each link is
measured both ways.

Whoever closes a connection resets it, so that no port stays in TIME_WAIT afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import json
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

ARRIVAL_SECONDS = 6.0
"""Seconds that hosts have to reach the head; they do not all start at the same moment."""
CONNECT_SECONDS = 2.0
END_SECONDS = 13.0
"""Seconds after which every host stops. ``time_factor`` multiplies all three."""

PAYLOAD_BYTES = 1 << 20
"""Bytes sent to the next host."""
PAYLOAD_SECONDS = 1.0
"""Seconds after which the receiver computes the rate, even if not all bytes have come."""
SLOW = 10.0
"""Mbit/s: no network of a cluster is slower, and a busy host still receives faster."""


def meet(context: dict[str, Any]) -> dict[str, Any]:
    """Run this host's part; return the fields of `clusterkit.doctor.hosts.checks.ports.Met`."""
    meeting = Meeting(context)
    try:
        return meeting.run()
    finally:
        meeting.close()


class Meeting:
    """One host's part."""

    def __init__(self, context: dict[str, Any]) -> None:
        self.began = time.monotonic()
        self.context = context
        self.host, self.present = context["host"], context["present"]
        self.is_head = self.host == context["head"]
        self.addresses = dict(context["hosts"])
        self.token = context["token"]
        self.mesh = "mesh" in context["checks"] and len(self.present) > 1
        self.servers: list[socket.socket] = []
        self.result: dict[str, Any] = {
            "head_error": None, "listen_error": None, "arrived": [], "peer_errors": None,
            "rates": {},
        }  # fmt: skip
        self.changed = threading.Condition()
        # On the head, guarded by `changed`: hosts that arrived, with their ports; that finished.
        self.arrived: dict[str, int] = {}
        self.done: dict[str, bool] = {}

    def run(self) -> dict[str, Any]:
        port = self.listen(0, self.answer_peer) if self.mesh else 0
        if self.is_head:
            try:
                self.listen(self.context["port"], self.serve_host)
            except OSError as error:
                self.result["listen_error"] = reason(error)
                return self.result
        self.result["head_error"] = self.visit_head(port)
        if self.is_head:
            self.wait_for(lambda: len(self.arrived) >= len(self.present), ARRIVAL_SECONDS + 1)
            self.result["arrived"] = sorted(self.arrived)
        return self.result

    def listen(self, port: int, answer: Callable[[socket.socket], None]) -> int:
        """Answer every connection to a port in a thread; return the port.

        Raises:
            OSError: nothing can listen there.
        """
        server = listening(port)
        self.servers.append(server)
        serve_all(server, answer, self.left(END_SECONDS))
        return int(server.getsockname()[1])

    def close(self) -> None:
        """Stop listening, so that the ports are free at once."""
        for server in self.servers:
            # close() alone would wait for the thread that accepts.
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()

    def left(self, deadline: float) -> float:
        """Return the seconds from now to a deadline, which counts from the beginning."""
        deadline *= self.context["time_factor"]
        return max(0.05, self.began + deadline - time.monotonic())

    # ---------------------------------------------------------- every host

    def visit_head(self, port: int) -> str | None:
        """Connect to the head, again and again for `ARRIVAL_SECONDS`; return why that failed."""
        failure = ""
        while self.left(ARRIVAL_SECONDS) > 0.1:
            address = self.addresses[self.context["head"]]
            try:
                line = connected(address, self.context["port"], self.left(ARRIVAL_SECONDS))
            except OSError as error:
                # The first error counts: the last attempt has hardly any time.
                failure = failure or reason(error)
                threading.Event().wait(0.05)
                continue
            with line:
                try:
                    self.exchange(line, port)
                    return None
                except (ConnectionError, ValueError):
                    return "another program answers there"
                except OSError as error:
                    failure = failure or reason(error)
        return failure or "timed out"

    def exchange(self, line: socket.socket, port: int) -> None:
        """Send name and port to the head; for the mesh, receive all ports and try them."""
        file = line.makefile("rwb")
        send(file, {"host": self.host, "port": port, "token": self.token})
        if receive(file).get("token") != self.token:
            raise ValueError("not our head")
        if not self.mesh:
            return
        line.settimeout(self.left(ARRIVAL_SECONDS + 4))
        from concurrent.futures import ThreadPoolExecutor

        # Whatever fails from here on is no fault of the connection to the head.
        with contextlib.suppress(OSError, ValueError, KeyError):
            ports = receive(file)["ports"]
            with ThreadPoolExecutor(64) as pool:
                attempts = {
                    name: pool.submit(self.connect, name, ports[name])
                    for name in ports
                    if name != self.host
                }
                errors = {name: each.result() for name, each in attempts.items()}
            self.result["peer_errors"] = errors
            ring = sorted(ports)
            following = ring[(ring.index(self.host) + 1) % len(ring)]
            # On slow hosts the rate would be that of the host, not of the link.
            if self.context["time_factor"] == 1 and errors.get(following, "itself") is None:
                self.result["rates"] = self.measure(following, ports[following])
            send(file, {"done": True})
            # Others may still be about to connect to this host.
            line.settimeout(self.left(END_SECONDS))
            file.readline()

    def connect(self, name: str, port: int) -> str | None:
        """Return why another host cannot be reached, or None."""
        try:
            timeout = CONNECT_SECONDS * self.context["time_factor"]
            with connected(self.addresses[name], port, timeout) as line:
                file = line.makefile("rwb")
                send(file, {"token": self.token})
                if receive(file) != {"token": self.token, "host": name}:
                    return "another host answers at its address"
        except OSError as error:
            return reason(error)
        except ValueError:
            return "another program answers at its address"
        return None

    def measure(self, name: str, port: int) -> dict[str, float]:
        """Return another host and the better of two rates; nothing if it reports none."""
        rates: list[float] = []
        with contextlib.suppress(OSError, ValueError, KeyError):
            while len(rates) < 2 and max(rates, default=0.0) < SLOW:
                try:
                    rates.append(self.send_payload(name, port))
                except socket.timeout:  # noqa: UP041 (TimeoutError only since Python 3.10)
                    rates.append(0.0)  # not even a piece of it could be sent
        return {name: max(rates)} if rates else {}

    def send_payload(self, name: str, port: int) -> float:
        """Send another host a megabyte; return the Mbit/s that it reports."""
        with connected(self.addresses[name], port, CONNECT_SECONDS) as line:
            file = line.makefile("rwb")
            send(file, {"token": self.token, "payload": True})
            receive(file)
            rest = memoryview(bytes(PAYLOAD_BYTES))
            # It reports before all has come, if that takes too long.
            while rest and not select.select([line], [], [], 0)[0]:
                rest = rest[line.send(rest[:65536]) :]
            return float(receive(file)["rate"])

    def answer_peer(self, line: socket.socket) -> None:
        file = line.makefile("rwb")
        request = receive(file)
        if request.get("token") == self.token:
            send(file, {"token": self.token, "host": self.host})
            if "payload" in request:
                send(file, {"rate": rate_of(line)})
            file.readline()

    # ---------------------------------------------------------- the head

    def serve_host(self, line: socket.socket) -> None:
        """Answer one host, and keep the connection until that host has finished."""
        file = line.makefile("rwb")
        request = receive(file)
        if request.get("token") != self.token:
            return
        send(file, {"token": self.token})
        if not self.mesh:
            # It closes the connection once it has read the answer; then the head may stop, too.
            with contextlib.suppress(OSError):
                file.readline()
        self.record(self.arrived, request["host"], request["port"])
        if not self.mesh:
            return
        self.wait_for(lambda: len(self.arrived) >= len(self.present), ARRIVAL_SECONDS)
        try:
            send(file, {"ports": self.arrived})
            line.settimeout(self.left(END_SECONDS))
            file.readline()
        finally:
            self.record(self.done, request["host"], True)
        self.wait_for(lambda: set(self.done) >= set(self.arrived), END_SECONDS)

    def record(self, register: dict[str, Any], name: str, value: Any) -> None:
        with self.changed:
            register[name] = value
            self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool], deadline: float) -> None:
        with self.changed:
            self.changed.wait_for(condition, self.left(deadline))


# -------------------------------------------------------------- sockets


def listening(port: int) -> socket.socket:
    """Listen on all addresses, IPv4 and, where there is IPv6, IPv6."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=512, dualstack_ipv6=True
        )
    return socket.create_server(("", port), backlog=512)


def serve_all(server: socket.socket, answer: Any, timeout: float) -> None:
    """Accept connections until the server is closed, each in a thread of its own."""

    def one(line: socket.socket) -> None:
        line.settimeout(timeout)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with line, contextlib.suppress(OSError, ValueError, KeyError):
            answer(line)

    def loop() -> None:
        while True:
            try:
                line, _ = server.accept()
            except OSError:
                if server.fileno() < 0:
                    return
                continue
            threading.Thread(target=one, args=(line,), daemon=True).start()

    threading.Thread(target=loop, daemon=True).start()


def rate_of(line: socket.socket) -> float:
    """Return the Mbit/s at which a payload comes, or the part of it that comes in time."""
    came, first, now = 0, len(line.recv(65536)), time.monotonic()
    began, end = now, now + PAYLOAD_SECONDS
    while first + came < PAYLOAD_BYTES and now < end:
        line.settimeout(end - now)
        with contextlib.suppress(socket.timeout):
            chunk = line.recv(65536)
            if not chunk:
                raise ConnectionError("the sender closed the connection")
            came += len(chunk)
        now = time.monotonic()
    line.settimeout(CONNECT_SECONDS)
    return came * 8e-6 / max(now - began, 1e-6)


def connected(address: str, port: int, timeout: float) -> socket.socket:
    """Open a connection that is reset when it is closed."""
    line = socket.create_connection((address, port), timeout)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return line


def send(file: Any, document: dict[str, Any]) -> None:
    file.write(json.dumps(document).encode() + b"\n")
    file.flush()


def receive(file: Any) -> dict[str, Any]:
    """Read one line.

    Raises:
        ValueError: it holds no JSON object.
    """
    line = file.readline(1 << 20)
    document = json.loads(line.decode()) if line else None
    if not isinstance(document, dict):
        raise ValueError("not an object")
    return document


def reason(error: OSError) -> str:
    """Return an error in words that are the same on every host."""
    if isinstance(error, socket.timeout):
        return "timed out"
    if isinstance(error, socket.gaierror):
        return "its address does not resolve"
    return {
        errno.ECONNREFUSED: "connection refused",
        errno.ETIMEDOUT: "timed out",
        errno.EHOSTUNREACH: "no route to host",
        errno.ENETUNREACH: "network is unreachable",
        errno.EADDRINUSE: "address already in use",
        errno.EACCES: "permission denied",
    }.get(error.errno or 0, str(error))
