"""Jump hosts and proxy commands."""

import contextlib
import sys
import threading

import pytest

from clusterkit.backends.ssh import transport as ssh_transport
from clusterkit.backends.ssh.config import (
    HostUnreachable,
    jump_host,
    resolve,
)
from clusterkit.backends.ssh.transport import SshTransport
from clusterkit.cluster import Host
from clusterkit.errors import BadInput, Unavailable
from clusterkit.transport import fan_out
from tests.unit.ssh.sshd import ME, configured, refusal


def test_jump_host_connects_closes_inner_first_and_reports_failures(
    sshd, other_sshd, home, monkeypatch
):
    behind = other_sshd()
    with behind.known_hosts.open("a") as file:
        file.write(sshd.known_hosts.read_text())
    with (sshd.folder / "authorized").open("a") as file:
        file.write(behind.key.with_name("id.pub").read_text())
    transport = behind.transport(jump=f"{ME}@127.0.0.1:{sshd.port}")
    done = transport.run("h0", ["sh", "-c", "echo $SSH_CONNECTION"])
    assert done.stdout.split()[3] == str(behind.port)
    outer, inner = transport._connections.values()
    ended = []
    monkeypatch.setattr("clusterkit.backends.ssh.transport.close_now", ended.append)
    transport.close()
    assert ended == [inner, outer]
    for connection in ended:
        connection.close()
    message, _, _ = refusal(behind.host(jump=f"{ME}@127.0.0.1:1"))
    assert message == "host 127.0.0.1 (127.0.0.1 port 1) refuses connections on port 1"
    message, _, _ = refusal(behind.host(port=1, jump=f"{ME}@127.0.0.1:{sshd.port}"))
    assert "jump host" in message
    assert "cannot reach it" in message


def test_jump_host_chain_of_ssh_config_connects_and_refuses_loops(sshd, other_sshd, home):
    gate, behind = other_sshd(), other_sshd()
    with behind.known_hosts.open("a") as known:
        known.write(sshd.known_hosts.read_text() + gate.known_hosts.read_text())
    for server in (sshd, gate):
        with (server.folder / "authorized").open("a") as file:
            file.write(behind.key.with_name("id.pub").read_text())
    configured(
        home,
        f"Host inner\n  HostName 127.0.0.1\n  Port {gate.port}\n  ProxyJump outer\n"
        f"Host outer\n  HostName 127.0.0.1\n  Port {sshd.port}\n",
    )
    with contextlib.closing(behind.transport(jump="inner")) as transport:
        assert transport.run("h0", ["echo", "in"]).stdout == "in\n"
        assert list(transport._connections) == [">outer", ">outer>inner", "h0"]
    configured(home, "Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n")
    message, _, _ = refusal(behind.host(jump="a"))
    assert message.endswith("its jump hosts are reached through each other")
    configured(home, "Host *\n  ProxyJump gate\n")
    with pytest.raises(Unavailable, match="jumphost loop via gate"):
        SshTransport([Host(name="h0")]).run("h0", ["true"])


def test_stalled_jump_host_is_tried_once_for_all_hosts_behind(home, monkeypatch):
    hosts = [Host(name=f"h{number}", jump="gate") for number in range(16)]
    tried, all_wait = [], threading.Event()

    def stalls(target, timeout, through=None):
        tried.append(target.host.name)
        all_wait.wait(60)
        raise HostUnreachable("host gate does not answer within 10 s")

    monkeypatch.setattr(ssh_transport, "connect", stalls)
    transport = SshTransport(hosts)
    waiting = threading.Semaphore(0)

    class Locks(dict):
        def setdefault(self, key, lock):
            if key == ">gate":  # the thread has noted when it asked
                waiting.release()
            return super().setdefault(key, lock)

    transport._locks = Locks()

    def release():
        for _ in hosts:
            waiting.acquire()
        all_wait.set()

    threading.Thread(target=release).start()
    found = fan_out([host.name for host in hosts], lambda host: transport.run(host, ["true"]))
    assert {error.message for error in found.values()} == {"host gate does not answer within 10 s"}
    assert tried == ["gate"]
    with pytest.raises(HostUnreachable):  # asked later: it is tried again
        transport.run("h0", ["true"])
    assert tried == ["gate", "gate"]


def test_drop_of_old_connection_keeps_newer_connection(sshd, home):
    transport = sshd.transport()
    old = transport.connection("h0")
    transport.drop("h0", old)
    new = transport.connection("h0")
    transport.drop("h0", old)  # by a thread that still had the old one
    assert transport.connection("h0") is new
    assert new.is_active()
    transport.close()


def test_changed_ssh_config_is_read_again(home, monkeypatch):
    monkeypatch.setattr("clusterkit.backends.ssh.config.CONFIG_SECONDS", 1e-6)
    for port in (2201, 2202):
        (home / ".ssh/config").write_text(f"Host gate\n  Port {port}\n")
        assert resolve(Host(name="gate")).port == port


@pytest.mark.parametrize(
    ("hop", "expected"),
    [
        ("gate", ("gate", None, None)),
        ("me@gate", ("gate", "me", None)),
        ("me@gate:2222", ("gate", "me", 2222)),
        ("[2001:db8::1]:2222", ("2001:db8::1", None, 2222)),
        ("a@b@gate", ("gate", "a@b", None)),
        ("2001:db8::1", ("2001:db8::1", None, None)),
        ("ssh://me@gate:2222", ("gate", "me", 2222)),
    ],
)
def test_jump_host_accepts_ssh_destination_forms_and_checks_port(hop, expected):
    host = jump_host(hop, Host(name="h0", identity="/k"))
    assert (host.name, host.user, host.port) == expected
    assert host.identity == "/k"
    with pytest.raises(BadInput, match="'gate:99999': not a port"):
        jump_host("me@gate:99999", host)


RELAY = """
import os, socket, sys, threading
there = socket.create_connection((sys.argv[1], int(sys.argv[2])))
def back():
    while data := there.recv(65536):
        os.write(1, data)
threading.Thread(target=back, daemon=True).start()
while data := os.read(0, 65536):
    there.sendall(data)
"""
"""What nc does: copies both ways."""


def test_connect_uses_proxy_command_of_ssh_config(sshd, home):
    script = home / "relay.py"
    script.write_text(RELAY)
    configured(
        home, f"Host h0\n  HostName 127.0.0.1\n  ProxyCommand {sys.executable} '{script}' %h %p\n"
    )
    transport = sshd.transport(address=None)
    assert transport.run("h0", ["echo", "in"], timeout=60).stdout == "in\n"
    transport.close()


def test_missing_proxy_command_fails_naming_command(sshd, home, capfd):
    configured(home, "Host *\n  ProxyCommand /nope/nc %h %p\n")
    message, _, _ = refusal(sshd.host())
    assert f"the SSH connection through '/nope/nc 127.0.0.1 {sshd.port}' failed" in message
    assert "/nope/nc: not found" in capfd.readouterr().err


def test_killed_proxy_command_ends_connection_and_next_run_reconnects(sshd, home, tmp_path):
    script = tmp_path / "relay.py"
    script.write_text(RELAY)
    configured(home, f"Host *\n  ProxyCommand {sys.executable} {script} %h %p\n")
    transport = sshd.transport()
    with transport.open("h0", ["sleep", "60"]) as stream:
        proxy = transport.connection("h0").sock._process
        proxy.kill()
        assert stream.read(60) == b""
        with pytest.raises(HostUnreachable, match="connection was lost"):
            stream.exit_code(60)
    assert transport.run("h0", ["echo", "again"]).stdout == "again\n"
    second = transport.connection("h0").sock._process
    transport.close()
    assert proxy.returncode is not None
    assert second.returncode is not None
