"""The port at which a run's nodes watch each other: who is heard there, and who is not."""

import contextlib
import hashlib
import hmac
import io
import json
import os
import queue
import selectors
import socket
import threading
import time

import pytest

from clusterkit.agent import clock, limits
from clusterkit.agent.client import Client
from clusterkit.agent.connections import Line, Listener
from clusterkit.agent.member import RestartPolicy
from clusterkit.agent.messages import EndLauncher, Finish, Log, Pause, Start, Warn
from clusterkit.agent.peer import Peer

TOKEN = b"0123456789abcdef"
RUN = {"run": "r", "attempt": "1"}
HELLO = {**RUN, "node": 1, **Peer(1, 30.0, 0.0, 0.0).report()}
ENDED = {**HELLO, "running": False, "exit_code": 7, "sequence": 2}
DEEP = b"[" * 5000
WAIT = 60


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name in ("PEER_SECONDS", "PEER_GONE_SECONDS", "PEER_AGAIN_SECONDS"):
        monkeypatch.setattr(limits, name, 0.1)


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


class Watched:
    """What a node of two does."""

    wait = 0.0

    def __init__(self, port, node=0, lost_after=30.0):
        self.said = queue.SimpleQueue()
        self.thread = Client(
            ("127.0.0.1", port), node=node, terms=RestartPolicy(2, lost_after, self.wait), run=RUN,
            token=TOKEN, on_order=self.take,
        )  # fmt: skip
        self.thread.start()

    def take(self, order):
        if not isinstance(order, Log):
            self.said.put(order)

    def hears(self):
        return self.said.get(timeout=WAIT)

    def end(self, code=0):
        self.thread.launcher_ended(code)
        self.thread.close()
        self.thread.join(WAIT)
        assert not self.thread.is_alive()


class Rejoining(Watched):
    """The same where lost nodes come back."""

    wait = 60.0

    def __init__(self, port, **options):
        super().__init__(port, **options)
        assert isinstance(self.hears(), Start)


def connect(port):
    deadline = time.monotonic() + WAIT
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), WAIT)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline


def proof(key, sender, number, text):
    """The HMAC of a line: the sender is 1 where it has accepted the connection."""
    return hmac.new(key, b"%d %d " % (sender, number) + text, hashlib.sha256).hexdigest().encode()


class Wire(contextlib.AbstractContextManager):
    """A node's connection, or a stranger's, written anew from what `Line` documents."""

    def __init__(self, connection, token=TOKEN, accepted=0):
        self.socket, self.accepted = connection, accepted
        self.lines = connection.makefile("rb")
        own = os.urandom(16).hex().encode()
        connection.sendall(own + b"\n")
        other = self.lines.readline().strip()
        nonces = (own, other) if accepted else (other, own)
        self.key = hmac.new(token, b" ".join(nonces), hashlib.sha256).digest()
        self.sent = self.taken = 0

    def __exit__(self, *_):
        self.lines.close()
        self.socket.close()

    def signed(self, line):
        text = line if isinstance(line, bytes) else json.dumps(line).encode()
        self.sent += 1
        return proof(self.key, self.accepted, self.sent, text) + b" " + text + b"\n"

    def say(self, *lines):
        say(self.socket, *(self.signed(line)[:-1] for line in lines))

    def hear(self):
        shown, _, text = self.lines.readline().strip().partition(b" ")
        self.taken += 1
        assert shown == proof(self.key, 1 - self.accepted, self.taken, text)
        return json.loads(text)


@contextlib.contextmanager
def serving(listener, on_message):
    """Have a thread serve it; yields how many unidentified connections there were each time."""
    counts, ended = [], threading.Event()

    def serve():
        while not ended.is_set():
            listener.receive(0.01, on_message)
            counts.append(len(listener._unidentified))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield counts
    finally:
        ended.set()
        thread.join(WAIT)


def wait_until(true):
    deadline = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def say(connection, *lines):
    data = b"".join(
        (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines
    )
    with contextlib.suppress(OSError):  # closed meanwhile
        connection.sendall(data)


def closed(connection):
    """Whether the other side closes it, whatever it says before."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(4096):
            pass
    return True


STRANGERS = [
    (DEEP,),
    (b"x" * 100_000,),
    (b"x" * 40,),
    (b"",),
    (HELLO, ENDED),
    (TOKEN, HELLO, ENDED),
    (b"0" * 32, HELLO, ENDED),
    (b"0" * 32, b"0" * 64 + b" " + json.dumps(HELLO).encode(), ENDED),
]
"""What a program that does not know the token sends."""
NODES = [
    (DEEP,),
    (b"no JSON",),
    ([1],),
    ({**RUN, "agent": "a"},),
    *(({**RUN, "node": node}, ENDED)
      for node in ("zz", "1", None, True, 1.0, -1, 2, 99, [], {})),
    ({**HELLO, "run": "another"}, ENDED),
    ({**HELLO, "attempt": "2"}, ENDED),
]  # fmt: skip
"""What a node of another run sends, or no node."""


@pytest.mark.parametrize("kind", [Watched, Rejoining])
def test_watch_port_rejects_strangers_and_still_hears_nodes(port, kind):
    there = kind(port)
    for lines in STRANGERS:
        with connect(port) as stranger:
            say(stranger, *lines)
            assert closed(stranger), lines
    for lines in NODES:
        with Wire(connect(port)) as stranger:
            stranger.say(*lines)
            assert closed(stranger.socket), lines
    for token in (b"", b"wrong", TOKEN[:-1], TOKEN + b"\r"):
        with Wire(connect(port), token) as stranger:
            stranger.say(HELLO, ENDED)
            assert closed(stranger.socket), token
    assert there.thread.is_alive()
    assert there.said.empty()
    # And a node is heard still.
    with Wire(connect(port)) as one:
        one.say(HELLO, ENDED)
        # In the other kind it may have failed of an older node 0.
        stopped = Finish(stop=True, reason="node 1 failed")
        expected = stopped if kind is Watched else EndLauncher("node 1 failed")
        if kind is Rejoining:
            assert isinstance(there.hears(), Pause)  # how long that may take
        assert there.hears() == expected
    there.end()


def test_watch_port_rejects_replayed_reordered_or_altered_lines(port):
    """What somebody between two nodes may do: repeat, swap, change, take from another one."""
    there = Watched(port)
    spied = []
    with Wire(connect(port)) as one:
        hello, ended = one.signed(HELLO), one.signed(ENDED)
        spied = [hello, ended]
        say(one.socket, hello[:-1])
        mirrored = one.lines.readline()
    for lines in (
        lambda wire: spied,  # of another connection
        lambda wire: [wire.signed(HELLO), mirrored],
        lambda wire: [first := wire.signed(HELLO), first],
        lambda wire: [wire.signed(HELLO), wire.signed(ENDED)][::-1],
        lambda wire: [wire.signed(ENDED).replace(b'"exit_code": 7', b'"exit_code": 0')],
    ):
        with Wire(connect(port)) as stranger:
            say(stranger.socket, b"".join(lines(stranger))[:-1])
            assert closed(stranger.socket)
    assert there.said.get(timeout=WAIT) == Finish(
        stop=True, reason="the launcher of node 1 is gone"
    )
    assert there.said.empty()
    there.end()


STOP = {"action": "stop", "coordinator": "c", "sequence": 1, "text": "an attacker's words"}


@pytest.mark.parametrize(
    "attack",
    [
        lambda nonce: (STOP,),
        lambda nonce: (b"0" * 32, STOP),
        lambda nonce: (nonce, STOP),
        lambda nonce: (b"0" * 32, b"0" * 64 + b" " + json.dumps(STOP).encode()),
    ],
)
def test_impostor_on_node_0_port_gets_no_token_and_is_ignored(port, attack, monkeypatch):
    monkeypatch.setattr(limits, "PEER_MEET_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", port)) as server:
        there = Watched(port, node=1)
        heard = b""
        connection, _ = server.accept()
        with connection, connection.makefile("rb") as lines:
            nonce = lines.readline()
            say(connection, *attack(nonce.strip()))
            heard += nonce + lines.read()
        assert TOKEN not in heard
        order = there.hears()
    assert isinstance(order, Warn)
    assert order.text.startswith("the other nodes are not watched: node 0 cannot be reached")


def test_listener_of_single_machine_run_binds_loopback_only(port):
    def listens(address, at):
        with contextlib.closing(Listener((address, 0), RUN, TOKEN, 2)) as listener:
            try:
                socket.create_connection((at, listener.port), WAIT).close()
            except ConnectionRefusedError:
                return False
            return True

    assert listens("127.0.0.1", "127.0.0.1")
    assert not listens("127.0.0.1", "127.0.0.2")
    assert listens("gpu1", "127.0.0.2")
    if socket.has_dualstack_ipv6():
        assert listens("gpu1", "::1")
        assert listens("::1", "::1")


def test_listener_closes_silent_connections(monkeypatch):
    monkeypatch.setattr(limits, "HELLO_SECONDS", 0.0)
    with contextlib.closing(Listener(("", 0), RUN, TOKEN, 2)) as listener:
        silent = connect(listener._server.getsockname()[1])
        with silent:
            silent.settimeout(0.01)
            while True:
                listener.receive(0.01, lambda *_: None)
                with contextlib.suppress(TimeoutError):
                    if silent.recv(64) == b"":  # after its nonce
                        break


def test_listener_limits_unidentified_connections_and_still_admits_node(monkeypatch):
    monkeypatch.setattr(limits, "UNIDENTIFIED", 3)
    heard = []
    with (
        contextlib.closing(Listener(("", 0), RUN, TOKEN, 2)) as listener,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(20):
            stack.enter_context(connect(listener.port))
        with serving(listener, lambda line, message: heard.append((line.node, message))) as most:
            stack.enter_context(Wire(connect(listener.port))).say(HELLO)
            wait_until(lambda: heard)
        assert max(most) <= 3
        assert heard == [(1, HELLO)]
        assert len(listener.selector.get_map()) <= 1 + 3 + 1


def test_line_sends_buffered_messages_later_and_closes_when_overfull():
    here, there = socket.socketpair()
    with here, there, selectors.DefaultSelector() as selector:
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        line = Line(here, selector, TOKEN, accepted=False)
        sent = [{"n": number, "text": "x" * 100} for number in range(200)]
        for message in sent[:100]:
            line.write(message)
        wire = Wire(there, accepted=1)
        line.receive(selectors.EVENT_READ)  # its nonce
        for message in sent[100:]:
            line.write(message)
        assert line._unsent
        received = b""
        while received.count(b"\n") < len(sent):
            received += there.recv(1 << 16)
            for key, events in selector.select(0):
                key.data.receive(events)
        wire.lines = io.BytesIO(received)
        assert [wire.hear() for _ in sent] == sent
        assert not line.closed
        for _ in range(2000):
            line.write(sent[0])
        assert line.closed  # nobody reads: that much is not kept
        line.write(sent[0])


def test_listener_close_sends_last_message_first(monkeypatch):
    monkeypatch.setattr(limits, "PEER_SECONDS", float(WAIT))
    listener = Listener(("", 0), RUN, TOKEN, 2)
    heard = []
    with serving(listener, lambda line, message: heard.append(line)):
        one = Wire(connect(listener.port))
        one.say(HELLO)
        wait_until(lambda: heard)
    with one:
        (line,) = heard
        line._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        while not line._unsent:
            line.write({"text": "x" * 1000})
        line.write({"stop": "why"})
        received = []
        reader = threading.Thread(target=lambda: received.extend(one.lines))
        reader.start()
        listener.close()
        reader.join(WAIT)
    assert json.loads(received[-1].partition(b" ")[2]) == {"stop": "why"}


def test_line_flush_sends_message_written_before_handshake():
    here, there = socket.socketpair()
    with here, there, selectors.DefaultSelector() as selector:
        line = Line(here, selector, TOKEN, accepted=False)
        line.write({"failed": 1})
        flushing = threading.Thread(target=line.flush, args=(WAIT,))
        flushing.start()
        assert Wire(there, accepted=1).hear() == {"failed": 1}
        flushing.join(WAIT)
        assert not flushing.is_alive()


def test_other_program_on_node_0_port_yields_only_warning(port, monkeypatch):
    monkeypatch.setattr(limits, "PEER_MEET_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", port)) as other:
        there = Watched(port, node=1, lost_after=0.2)
        connection, _ = other.accept()
        with connection:
            order = there.hears()
    assert order == Warn(
        "the other nodes are not watched: node 0 cannot be reached: another program listens there"
    )


def test_foreign_protocol_on_node_0_port_does_not_block_node_start(port):
    with socket.create_server(("127.0.0.1", port)) as other:
        threading.Thread(target=_answer, args=(other,), daemon=True).start()
        there = Rejoining(port, node=1)
        there.end()


def _answer(server):
    with contextlib.suppress(OSError):
        while True:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.parametrize("wait", [0.0, 60.0])
def test_taken_watch_port_of_node_0_yields_warning(port, wait, monkeypatch):
    monkeypatch.setattr(Watched, "wait", wait)
    with socket.create_server(("", port)):
        there = Watched(port)
        words = f"the other nodes are not watched: port {port}: Address already in use"
        assert there.hears() == Warn(words)
        assert [there.hears() for _ in range(2 if wait else 1)][-1] == Finish(stop=False)


def test_node_0_learns_failure_of_other_node(port):
    first, second = Watched(port), Watched(port, node=1)
    deadline = time.monotonic() + WAIT
    while not second.thread.peer.state.coordinator:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    second.end(3)
    assert first.hears() == Finish(stop=True, reason="node 1 failed")
    assert second.said.empty()


@pytest.mark.parametrize("kind", [Watched, Rejoining])
def test_pause_of_node_0_does_not_count_as_silence(port, kind, monkeypatch):
    """As when all machines of a host are suspended: nobody has spoken, and nobody could hear."""
    pause = [0.0]
    paused = clock.PauseAwareClock(lambda: time.monotonic() + pause[0])
    monkeypatch.setattr(clock, "awake", paused)
    there = kind(port)
    with Wire(connect(port)) as one:
        one.say(HELLO)
        assert one.hear()
        pause[0] = 1000.0
        turned = paused()
        while paused() < turned + 1.0:
            assert one.hear()["action"] != "stop"  # a sign of life: it looks around
    assert there.said.empty()
    there.end()
