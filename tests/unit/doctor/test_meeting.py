"""Hosts that meet, for real: each a process with a loopback address of its own."""

import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import msgspec
import pytest

from clusterkit.doctor.hosts import bundle
from clusterkit.doctor.hosts.checks.ports import MEETING, Met
from clusterkit.doctor.hosts.collect import meeting
from clusterkit.transport import LocalTransport

NOWHERE = "255.255.255.255"
"""No TCP connection goes there; it fails at once."""


@pytest.fixture
def port():
    return LocalTransport().free_port("localhost")


def started(me, port, hosts=3, addresses=None, **changed):
    context = {
        "host": me,
        "head": "h0",
        "hosts": addresses or [[f"h{i}", f"127.0.0.{i + 1}"] for i in range(hosts)],
        "present": [f"h{i}" for i in range(hosts)],
        "port": port,
        "token": "0123",
        "checks": ["head-port", "mesh"],
        "time_factor": 1.0,
    } | changed
    argv, program = bundle.command([MEETING], context, sys.executable, context["time_factor"])
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdin.write(program)
    process.stdin.close()
    process.stdin = None
    return process


def told(process):
    output = bundle.parse(process.communicate(timeout=60)[0].decode(), "h0").outputs["meet"]
    assert output.error is None
    return msgspec.json.decode(output.value, type=Met)


def together(port, hosts=3, **changed):
    processes = [started(f"h{i}", port, hosts, **changed) for i in range(hosts)]
    return [told(process) for process in processes]


def left_on(port):
    """Sockets of this port that the kernel still knows, whatever their state."""
    with open("/proc/net/tcp") as four, open("/proc/net/tcp6") as six:
        lines = [line.split() for line in (*list(four)[1:], *list(six)[1:])]
    return [words[3] for words in lines if any(end.endswith(f":{port:04X}") for end in words[1:3])]


def test_meeting_hosts_reach_head_and_each_other(port):
    head, *others = together(port)
    assert (head.head_error, head.listen_error, head.arrived) == (None, None, ["h0", "h1", "h2"])
    assert head.peer_errors == {"h1": None, "h2": None}
    assert others[0].peer_errors == {"h0": None, "h2": None}
    assert others[1].peer_errors == {"h0": None, "h1": None}


def test_meeting_measures_rate_from_each_host_to_next(port):
    found = together(port)
    for met, following in zip(found, ("h1", "h2", "h0"), strict=True):
        assert list(met.rates) == [following]
        assert met.rates[following] > 0


def test_meeting_measures_no_rate_with_raised_time_factor(port):
    assert [met.rates for met in together(port, time_factor=1.5)] == [{}, {}, {}]


@pytest.mark.parametrize(("pieces", "rate"), [(16, "fast"), (3, "slow"), (0, "none")])
def test_rate_counts_only_bytes_within_payload_time(pieces, rate):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(
            target=lambda: (
                [theirs.sendall(bytes(65536)) for _ in range(pieces)] or theirs.send(b"x")
            )
        )
        sender.start()
        began = time.monotonic()
        found = meeting.rate_of(ours)
        spent = time.monotonic() - began
        sender.join()
    if rate == "fast":
        assert found > 0
    else:
        # All that came, over the whole time that it waited for the rest.
        assert found <= pieces * 65536 * 8e-6 / meeting.PAYLOAD_SECONDS
        assert spent >= meeting.PAYLOAD_SECONDS


def test_rate_raises_connection_error_when_sender_closes():
    ours, theirs = socket.socketpair()
    with ours:
        theirs.sendall(b"x")
        theirs.close()
        with pytest.raises(ConnectionError):
            meeting.rate_of(ours)


def test_meeting_leaves_port_free_at_once(port):
    together(port)
    assert left_on(port) == []
    assert LocalTransport().free_port("localhost", port) == port


def test_meeting_without_mesh_check_tries_only_head(port):
    found = together(port, checks=["head-port"])
    assert [met.head_error for met in found] == [None, None, None]
    assert [met.peer_errors for met in found] == [None, None, None]
    assert found[0].arrived == ["h0", "h1", "h2"]
    assert left_on(port) == []


def test_meeting_of_single_host_reports_only_itself(port):
    (found,) = together(port, hosts=1)
    assert found == Met(head_error=None, listen_error=None, arrived=["h0"], peer_errors=None)


def test_meeting_head_times_out_without_peers(port):
    found = told(started("h0", port, time_factor=0.1))
    assert found.arrived == ["h0"]
    assert found.peer_errors == {}


def test_meeting_host_names_reason_when_head_is_unreachable(port):
    assert told(started("h1", port, time_factor=0.1)).head_error == "connection refused"
    nowhere = [["h0", NOWHERE], ["h1", "127.0.0.2"]]
    said = told(started("h1", port, addresses=nowhere, time_factor=0.1)).head_error
    assert said == "network is unreachable" or "denied" in said
    unknown = [["h0", "no such host.invalid"], ["h1", "127.0.0.2"]]
    said = told(started("h1", port, addresses=unknown, time_factor=0.1)).head_error
    assert said == "its address does not resolve"


def test_meeting_names_unreachable_peer(port):
    hosts = [["h0", "127.0.0.1"], ["h1", "127.0.0.2"], ["h2", NOWHERE]]
    processes = [started(f"h{i}", port, addresses=hosts) for i in range(3)]
    found = [told(process) for process in processes]
    assert found[0].peer_errors["h1"] is None
    assert found[0].peer_errors["h2"] is not None
    assert found[1].peer_errors["h2"] is not None
    assert found[2].peer_errors == {"h0": None, "h1": None}


@contextmanager
def program(port, answer):
    """Something else that listens there."""
    with socket.create_server(("", port)) as server:

        def serve():
            while True:
                try:
                    line, _ = server.accept()
                except OSError:
                    return
                with line:
                    line.recv(1000)
                    line.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.0 400 Bad Request\r\n\r\n", b"", b"\xff\xfe\n", b"[]\n", b'{"token": "other"}\n',
     json.dumps({"x": "y" * 100}).encode()],
)  # fmt: skip
def test_meeting_detects_foreign_program_on_port(port, answer):
    with program(port, answer):
        assert told(started("h0", port)).listen_error == "address already in use"
        assert told(started("h1", port)).head_error == "another program answers there"


def test_meeting_rejects_head_with_other_token(port):
    head = started("h0", port, token="theirs")
    try:
        assert told(started("h1", port, token="ours")).head_error == "another program answers there"
    finally:
        head.kill()
        head.communicate()


def test_meeting_head_ignores_silent_connection(port):
    head = started("h0", port, hosts=2)
    silent = []
    for _ in range(200):
        try:
            silent.append(socket.create_connection(("127.0.0.1", port), timeout=5))
            break
        except ConnectionRefusedError:
            threading.Event().wait(0.05)
    assert silent
    try:
        assert told(started("h1", port, hosts=2)).head_error is None
        assert told(head).arrived == ["h0", "h1"]
    finally:
        silent[0].close()
