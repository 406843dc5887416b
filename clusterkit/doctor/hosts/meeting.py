"""Runs on all hosts at once: they meet at the head's port, then each connects to every other.

It is sent as text and needs nothing but the standard library of Python 3.8. The head listens on
the rendezvous port, as rank 0 will. Every other host says its name there and gets the token
back. With ``mesh`` each host listens on a port of the kernel's choice as well, as the ranks of
gloo and NCCL do; the head sends everyone these ports, everyone tries them all, and sends the next
host a megabyte, so that each link carries one each way.

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

MEET = 6.0
"""Seconds that hosts have to find the head; they do not all start at the same moment."""
DIAL = 2.0
END = 13.0
"""Seconds after which every host goes home. All of them are longer where hosts are slow."""

POUR = 1 << 20
"""Bytes for the next host; and seconds after which it counts what has come."""
POUR_SECONDS = 1.0
SLOW = 10.0
"""Mbit/s: no network of a cluster is slower, and a busy host still takes in more."""


def meet(given: dict[str, Any]) -> dict[str, Any]:
    """What one host saw.

    Returns:
        ``head``: why the head could not be reached, or None; ``listening``: (head) why the port
        could not be had, or None; ``came``: (head) hosts that came; ``peers``: host to why it
        could not be reached, or None; null where the hosts did not get that far; ``rates``: the
        next host, to the Mbit/s at which it took a megabyte.
    """
    meeting = Meeting(given)
    try:
        return meeting.run()
    finally:
        meeting.close()


class Meeting:
    """One host's part."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.began = time.monotonic()
        self.patience: float = given["patience"]
        self.me = given["me"]
        self.head = given["head"]
        self.present = given["present"]
        self.addresses = dict(given["hosts"])
        self.port = given["port"]
        self.token = given["token"]
        self.mesh = "mesh" in given["wanted"] and len(self.present) > 1
        self.servers: list[socket.socket] = []
        self.came: dict[str, int] = {}
        self.done: dict[str, bool] = {}
        self.turn = threading.Condition()

    def run(self) -> dict[str, Any]:
        seen: dict[str, Any] = {
            "head": None, "listening": None, "came": [], "peers": None, "rates": {},
        }  # fmt: skip
        number = self.open(0, self.greet) if self.mesh else 0
        if self.me == self.head:
            try:
                self.open(self.port, self.serve)
            except OSError as error:
                seen["listening"] = in_words(error)
                return seen
        seen["head"] = self.visit(number, seen)
        if self.me == self.head:
            self.wait(lambda: len(self.came) >= len(self.present), MEET + 1)
            seen["came"] = sorted(self.came)
        return seen

    def open(self, port: int, answer: Callable[[socket.socket], None]) -> int:
        """Listen, and answer whoever comes; gives the port.

        Raises:
            OSError: it cannot be had.
        """
        server = listening(port)
        self.servers.append(server)
        serve_all(server, answer, self.left(END))
        return int(server.getsockname()[1])

    def close(self) -> None:
        """Listen no more: the next one may have the port at once."""
        for server in self.servers:
            # Closing alone would wait for the thread that accepts.
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()

    def left(self, moment: float) -> float:
        """Seconds from now to a moment of the meeting."""
        return max(0.05, self.began + moment * self.patience - time.monotonic())

    # ---------------------------------------------------------- everyone

    def visit(self, number: int, seen: dict[str, Any]) -> str | None:
        """Say hello at the head; with a mesh, get the ports of all and try them."""
        why = ""
        while self.left(MEET) > 0.1:
            try:
                line = connected(self.addresses[self.head], self.port, self.left(MEET))
            except OSError as error:
                # The last try has no time left: the errors of the others say more.
                why = why or in_words(error)
                threading.Event().wait(0.05)
                continue
            with line:
                try:
                    self.talk(line, number, seen)
                    return None
                except (ConnectionError, ValueError):
                    return "another program answers there"
                except OSError as error:
                    why = why or in_words(error)
        return why or "timed out"

    def talk(self, line: socket.socket, number: int, seen: dict[str, Any]) -> None:
        file = line.makefile("rwb")
        send(file, {"me": self.me, "port": number, "token": self.token})
        if receive(file).get("token") != self.token:
            raise ValueError("not our head")
        if not self.mesh:
            return
        line.settimeout(self.left(MEET + 4))
        from concurrent.futures import ThreadPoolExecutor

        try:
            ports = receive(file)["ports"]
            others = [name for name in ports if name != self.me]
            with ThreadPoolExecutor(64) as pool:
                dials = {name: pool.submit(self.dial, name, ports[name]) for name in others}
                seen["peers"] = {name: dial.result() for name, dial in dials.items()}
            ring = sorted(ports)
            following = ring[(ring.index(self.me) + 1) % len(ring)]
            # Hosts that are slow to answer would measure themselves.
            if self.patience == 1 and seen["peers"].get(following, "it is us") is None:
                seen["rates"] = self.measured(following, ports[following])
            send(file, {"done": True})
            # The others may still be about to connect to us.
            line.settimeout(self.left(END))
            file.readline()
        except (OSError, ValueError, KeyError):
            pass

    def dial(self, name: str, port: int) -> str | None:
        """Why another host cannot be reached, or None."""
        try:
            with connected(self.addresses[name], port, DIAL * self.patience) as line:
                file = line.makefile("rwb")
                send(file, {"token": self.token})
                if receive(file) != {"token": self.token, "me": name}:
                    return "another host answers at its address"
        except OSError as error:
            return in_words(error)
        except ValueError:
            return "another program answers at its address"
        return None

    def measured(self, name: str, port: int) -> dict[str, float]:
        """The next host and the better of two rates; nothing where it does not say."""
        rates: list[float] = []
        with contextlib.suppress(OSError, ValueError, KeyError):
            while len(rates) < 2 and max(rates, default=0.0) < SLOW:
                try:
                    rates.append(self.pour(name, port))
                except socket.timeout:  # noqa: UP041 (TimeoutError only since Python 3.10)
                    rates.append(0.0)  # not even a piece of it got away
        return {name: max(rates)} if rates else {}

    def pour(self, name: str, port: int) -> float:
        """Send another host a megabyte; gives the Mbit/s that it saw."""
        with connected(self.addresses[name], port, DIAL) as line:
            file = line.makefile("rwb")
            send(file, {"token": self.token, "pour": True})
            receive(file)
            rest = memoryview(bytes(POUR))
            # It answers before all has come, if that takes too long.
            while rest and not select.select([line], [], [], 0)[0]:
                rest = rest[line.send(rest[:65536]) :]
            return float(receive(file)["rate"])

    def greet(self, line: socket.socket) -> None:
        """Answer one peer."""
        file = line.makefile("rwb")
        hello = receive(file)
        if hello.get("token") == self.token:
            send(file, {"token": self.token, "me": self.me})
            if "pour" in hello:
                send(file, {"rate": rate_of(line)})
            file.readline()

    # ---------------------------------------------------------- the head

    def serve(self, line: socket.socket) -> None:
        """Serve one host from its hello to its end."""
        file = line.makefile("rwb")
        hello = receive(file)
        if hello.get("token") != self.token:
            return
        send(file, {"token": self.token})
        if not self.mesh:
            # Only when it has gone has it read our answer; then we may go, too.
            with contextlib.suppress(OSError):
                file.readline()
            self.record(self.came, hello["me"], hello["port"])
            return
        self.record(self.came, hello["me"], hello["port"])
        self.wait(lambda: len(self.came) >= len(self.present), MEET)
        try:
            send(file, {"ports": self.came})
            line.settimeout(self.left(END))
            file.readline()
        finally:
            self.record(self.done, hello["me"], True)
        self.wait(lambda: set(self.done) >= set(self.came), END)

    def record(self, register: dict[str, Any], name: str, value: Any) -> None:
        with self.turn:
            register[name] = value
            self.turn.notify_all()

    def wait(self, condition: Callable[[], bool], moment: float) -> None:
        with self.turn:
            self.turn.wait_for(condition, self.left(moment))


# -------------------------------------------------------------- sockets


def listening(port: int) -> socket.socket:
    """A listening socket on all addresses, of both families where there are two."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=512, dualstack_ipv6=True
        )
    return socket.create_server(("", port), backlog=512)


def serve_all(server: socket.socket, answer: Any, timeout: float) -> None:
    """Accept connections for ever, each in a thread of its own."""

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
    """Mbit/s at which ``POUR`` bytes come, or as many as do in ``POUR_SECONDS``."""
    came, first, now = 0, len(line.recv(65536)), time.monotonic()
    began, end = now, now + POUR_SECONDS
    while first + came < POUR and now < end:
        line.settimeout(end - now)
        with contextlib.suppress(socket.timeout):
            chunk = line.recv(65536)
            if not chunk:
                raise ConnectionError("it went away")
            came += len(chunk)
        now = time.monotonic()
    line.settimeout(DIAL)
    return came * 8e-6 / max(now - began, 1e-6)


def connected(address: str, port: int, timeout: float) -> socket.socket:
    """A connection that is reset when it is closed."""
    line = socket.create_connection((address, port), timeout)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return line


def send(file: Any, document: dict[str, Any]) -> None:
    file.write(json.dumps(document).encode() + b"\n")
    file.flush()


def receive(file: Any) -> dict[str, Any]:
    """One line's object.

    Raises:
        ValueError: it is none.
    """
    line = file.readline(1 << 20)
    document = json.loads(line.decode()) if line else None
    if not isinstance(document, dict):
        raise ValueError("not an object")
    return document


def in_words(error: OSError) -> str:
    """An error in a word or two, the same on every host."""
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
