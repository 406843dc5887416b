"""The port at which a run's nodes watch each other: who is heard there, and who is not."""

import contextlib
import json
import queue
import selectors
import socket
import threading
import time

import pytest

from clusterkit.agent import clock, limits
from clusterkit.agent.client import Client
from clusterkit.agent.connections import Line, Listener
from clusterkit.agent.member import Terms
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
            ("127.0.0.1", port), node=node, terms=Terms(2, lost_after, self.wait), run=RUN,
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
    (b"",),
    (HELLO, ENDED),
    (b"wrong", HELLO, ENDED),
    (TOKEN[:-1], HELLO, ENDED),
    (TOKEN + b"\r", HELLO, ENDED),
    (TOKEN, DEEP),
    (TOKEN, b"no JSON"),
    (TOKEN, [1]),
    (TOKEN, {**RUN, "agent": "a"}),
    *((TOKEN, {**RUN, "node": node}, ENDED)
      for node in ("zz", "1", None, True, 1.0, -1, 2, 99, [], {})),
    (TOKEN, {**HELLO, "run": "another"}, ENDED),
    (TOKEN, {**HELLO, "attempt": "2"}, ENDED),
]  # fmt: skip


@pytest.mark.parametrize("kind", [Watched, Rejoining])
def test_whoever_is_no_node_is_turned_away_and_changes_nothing(port, kind):
    there = kind(port)
    for lines in STRANGERS:
        with connect(port) as stranger:
            say(stranger, *lines)
            assert closed(stranger), lines
    assert there.thread.is_alive()
    assert there.said.empty()
    # And a node is heard still.
    with connect(port) as one:
        say(one, TOKEN, HELLO, ENDED)
        # In the other kind it may have failed of an older node 0.
        stopped = Finish(stop=True, reason="node 1 failed")
        expected = stopped if kind is Watched else EndLauncher("node 1 failed")
        if kind is Rejoining:
            assert isinstance(there.hears(), Pause)  # how long that may take
        assert there.hears() == expected
    there.end()


def test_a_node_that_says_what_cannot_be_read_loses_its_connection_alone(port):
    there = Watched(port)
    with connect(port) as one:
        say(one, TOKEN, HELLO, DEEP[:4000])
        assert closed(one)
        with connect(port) as again:
            say(again, TOKEN, HELLO, {**ENDED, "exit_code": "x"})
            assert closed(again)
    assert there.hears() == Finish(stop=True, reason="the launcher of node 1 is gone")


def test_connections_that_say_nothing_are_closed(monkeypatch):
    monkeypatch.setattr(limits, "HELLO_SECONDS", 0.0)
    with contextlib.closing(Listener(0, RUN, TOKEN, 2)) as listener:
        silent = connect(listener._server.getsockname()[1])
        with silent:
            silent.settimeout(0.01)
            while True:
                listener.receive(0.01, lambda *_: None)
                with contextlib.suppress(TimeoutError):
                    assert silent.recv(1) == b""
                    break


def test_no_more_than_so_many_unidentified_are_kept_and_a_node_still_comes_in(monkeypatch):
    monkeypatch.setattr(limits, "UNIDENTIFIED", 3)
    heard = []
    with (
        contextlib.closing(Listener(0, RUN, TOKEN, 2)) as listener,
        contextlib.ExitStack() as stack,
    ):
        port = listener._server.getsockname()[1]
        for _ in range(20):
            stack.enter_context(connect(port))
        one = stack.enter_context(connect(port))
        say(one, TOKEN, HELLO)
        while not heard:
            listener.receive(1.0, lambda line, message: heard.append((line.node, message)))
            assert len(listener._unidentified) <= 3
        assert heard == [(1, HELLO)]
        assert len(listener.selector.get_map()) <= 1 + 3 + 1


def test_what_a_full_buffer_does_not_take_is_sent_later():
    here, there = socket.socketpair()
    with here, there, selectors.DefaultSelector() as selector:
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        line = Line(here, selector)
        sent = [{"n": number, "text": "x" * 100} for number in range(200)]
        for message in sent:
            line.write(message)
        assert line._unsent
        received = b""
        while received.count(b"\n") < len(sent):
            received += there.recv(1 << 16)
            for key, events in selector.select(0):
                key.data.receive(events)
        assert [json.loads(text) for text in received.splitlines()] == sent
        assert not line.closed
        for _ in range(2000):
            line.write(sent[0])
        assert line.closed  # nobody reads: that much is not kept
        line.write(sent[0])


def test_what_was_said_last_is_sent_before_the_connection_ends(monkeypatch):
    monkeypatch.setattr(limits, "PEER_SECONDS", float(WAIT))
    listener = Listener(0, RUN, TOKEN, 2)
    with connect(listener._server.getsockname()[1]) as one:
        heard = []
        say(one, TOKEN, HELLO)
        while not heard:
            listener.receive(1.0, lambda line, message: heard.append(line))
        (line,) = heard
        line._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        while not line._unsent:
            line.write({"text": "x" * 1000})
        line.write({"stop": "why"})
        received = []
        reader = threading.Thread(target=lambda: received.extend(one.makefile("rb")))
        reader.start()
        listener.close()
        reader.join(WAIT)
    assert json.loads(received[-1]) == {"stop": "why"}


def test_a_program_that_holds_node_0_s_port_is_nobody_s_failure(port, monkeypatch):
    monkeypatch.setattr(limits, "PEER_MEET_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", port)) as other:
        there = Watched(port, node=1, lost_after=0.2)
        connection, _ = other.accept()
        with connection:
            order = there.hears()
    assert order == Warn(
        "the other nodes are not watched: node 0 cannot be reached: another program listens there"
    )


def test_one_that_answers_in_another_language_does_not_keep_a_node_from_starting(port):
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
def test_a_port_that_is_taken_is_told(port, wait, monkeypatch):
    monkeypatch.setattr(Watched, "wait", wait)
    with socket.create_server(("", port)):
        there = Watched(port)
        words = f"the other nodes are not watched: port {port}: Address already in use"
        assert there.hears() == Warn(words)
        assert [there.hears() for _ in range(2 if wait else 1)][-1] == Finish(stop=False)


def test_node_0_and_another_meet(port):
    first, second = Watched(port), Watched(port, node=1)
    deadline = time.monotonic() + WAIT
    while not second.thread.peer.state.coordinator:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    second.end(3)
    assert first.hears() == Finish(stop=True, reason="node 1 failed")
    assert second.said.empty()


@pytest.mark.parametrize("kind", [Watched, Rejoining])
def test_a_pause_of_node_0_is_nobody_s_silence(port, kind, monkeypatch):
    """As when all machines of a host are suspended: nobody has spoken, and nobody could hear."""
    pause = [0.0]
    paused = clock.Awake(lambda: time.monotonic() + pause[0])
    monkeypatch.setattr(clock, "awake", paused)
    there = kind(port)
    with connect(port) as one, one.makefile("rb") as lines:
        say(one, TOKEN, HELLO)
        assert lines.readline()
        pause[0] = 1000.0
        turned = paused()
        while paused() < turned + 1.0:
            assert (
                json.loads(lines.readline())["action"] != "stop"
            )  # a sign of life: it looks around
    assert there.said.empty()
    there.end()
