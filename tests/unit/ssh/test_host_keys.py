"""Host keys, known_hosts and servers that do not answer."""

import base64
import contextlib
import hashlib
import hmac
import socket
import struct
import subprocess
import threading
import time

import paramiko
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterkit.backends.ssh.config import (
    HostUnreachable,
)
from clusterkit.backends.ssh.known_hosts import Certificate, HostKeyProblem, KnownHosts
from clusterkit.backends.ssh.transport import SshTransport
from clusterkit.cluster import Host
from clusterkit.transport import fan_out, in_order
from tests.unit.ssh.sshd import OPENSSH, fingerprint_of, keygen, refusal


@pytest.mark.parametrize("there", [True, False])
def test_unknown_host_key_is_refused_with_ssh_keyscan_hint(sshd, home, there):
    if there:
        (home / "none").write_text("")
    message, hint, kind = refusal(sshd.host(known_hosts=str(home / "none")))
    assert kind is HostKeyProblem
    fingerprint = fingerprint_of(sshd.folder / "host_key.pub")
    missing = "" if there else f", there is no file {home}/none"
    assert message.endswith(
        f"host key verification failed: its key is not known{missing}; it offers ssh-ed25519 "
        f"{fingerprint}"
    )
    assert f"ssh-keyscan -p {sshd.port} 127.0.0.1 >>'{home}/none'" in hint


def test_changed_host_key_is_refused_with_working_remedy(sshd, home):
    other = keygen(home / "other")
    public = " ".join(other.with_name("other.pub").read_text().split()[:2])
    known = home / "known"
    known.write_text(f"[127.0.0.1]:{sshd.port} {public}\n")
    message, hint, kind = refusal(sshd.host(known_hosts=str(known)))
    assert kind is HostKeyProblem
    assert "its host key has changed" in message
    assert fingerprint_of(f"{other}.pub") in message
    assert fingerprint_of(sshd.folder / "host_key.pub") in message
    # The remedy is a command that works.
    remedy = hint[hint.index("ssh-keygen") :]
    done = subprocess.run(["sh", "-c", remedy], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    transport = sshd.transport(known_hosts=str(known))
    assert transport.run("h0", ["echo", "in"]).stdout == "in\n"
    transport.close()


def test_known_hosts_accepts_new_key_beside_old_one(sshd, home):
    other = keygen(home / "other").with_name("other.pub").read_text().split()
    known = home / "known"
    known.write_text(
        f"[127.0.0.1]:{sshd.port} {other[0]} {other[1]}\n" + sshd.known_hosts.read_text()
    )
    transport = sshd.transport(known_hosts=str(known))
    assert transport.run("h0", ["true"]).exit_code == 0
    transport.close()


def test_host_key_of_other_type_is_refused_naming_both_types(other_sshd, home):
    server = other_sshd(host_key=("-t", "rsa", "-b", "2048"))
    other = keygen(home / "other").with_name("other.pub").read_text().split()
    known = home / "known"
    known.write_text(f"[127.0.0.1]:{server.port} {other[0]} {other[1]}\n")
    message, _, kind = refusal(server.host(known_hosts=str(known)))
    assert kind is HostKeyProblem
    assert "known_hosts has a key of type ssh-ed25519, the host offers ssh-rsa" in message


@pytest.mark.parametrize("kind", [("rsa", "-b", "2048"), ("ecdsa",), ("ed25519",)])
def test_connect_accepts_rsa_ecdsa_and_ed25519_host_keys(other_sshd, home, kind):
    server = other_sshd(host_key=("-t", *kind))
    transport = server.transport()
    assert transport.run("h0", ["true"]).exit_code == 0
    transport.close()


def test_connect_negotiates_known_key_among_several_host_keys(other_sshd, home):
    second = keygen(home / "second", "-t", "rsa", "-b", "2048")
    server = other_sshd(f'HostKey "{second}"')
    public = " ".join(second.with_name("second.pub").read_text().split()[:2])
    known = home / "known"
    known.write_text(f"[127.0.0.1]:{server.port} {public}\n")
    transport = server.transport(known_hosts=str(known))
    assert transport.run("h0", ["true"]).exit_code == 0
    transport.close()


def host_line(server, names):
    return f"{names} {' '.join(server.known_hosts.read_text().split()[1:])}\n"


@pytest.mark.parametrize(
    ("line", "in_"),
    [
        ("127.0.0.1", True),  # without a port: for any, as for OpenSSH
        ("[127.0.0.*]:*", True),
        ("*", True),
        ("other,[127.0.0.1]:PORT,more", True),
        ("[127.0.0.1]:1", False),
        ("*,!127.0.0.1,![127.0.0.1]:PORT", False),
        ("*,![127.0.0.1]:PORT", True),  # without its port it is not excluded
        ("@revoked *", False),
        ("@cert-authority *", False),
        ("hashed", True),
    ],
)
def test_known_hosts_patterns_match_as_in_openssh(sshd, home, line, in_):
    known = home / "known hosts"
    known.write_text(
        "# comment\n\nh0 ssh-ed25519 !!!not-base64\nh0\n|1|x|y ssh-ed25519 AAAA\n"
        + host_line(sshd, line.replace("PORT", str(sshd.port)))
    )
    with known.open("ab") as file:
        file.write(b"caf\xe9 ssh-ed25519 AAAA\n")
    if line == "hashed":
        known.write_text(host_line(sshd, f"[127.0.0.1]:{sshd.port}"))
        subprocess.run(["ssh-keygen", "-q", "-H", "-f", known], check=True, capture_output=True)
        assert known.read_text().startswith("|1|")
    theirs = subprocess.run(
        ["ssh", "-F", "none", "-p", str(sshd.port), "-i", sshd.key, "-o", "BatchMode=yes",
         "-o", f'UserKnownHostsFile="{known}"', "-o", "GlobalKnownHostsFile=none",
         "-o", "StrictHostKeyChecking=yes", "127.0.0.1", "true"],
        capture_output=True,
    )  # fmt: skip
    assert (theirs.returncode == 0) is in_, theirs.stderr
    if in_:
        transport = sshd.transport(known_hosts=str(known))
        assert transport.run("h0", ["true"]).exit_code == 0
        transport.close()
        return
    message, _, kind = refusal(sshd.host(known_hosts=str(known)))
    assert kind is HostKeyProblem
    assert ("revoked" in message) == ("revoked" in line)


FOR_IT = ("-h", "-n", "other,127.0.0.1")
ED25519, ECDSA, RSA = ("-t", "ed25519"), ("-t", "ecdsa"), ("-t", "rsa", "-b", "2048")


@pytest.mark.parametrize(
    ("kind", "authority", "options", "line", "refused"),
    [
        (ED25519, ECDSA, FOR_IT, "@cert-authority *", None),
        (RSA, ED25519, FOR_IT, "@cert-authority [127.0.0.1]:PORT", None),
        (ECDSA, RSA, FOR_IT, "@cert-authority 127.0.0.*", None),
        (ED25519, ED25519, ("-h", "-n", "other"), "@cert-authority *",
         "host certificate 'it' is not valid: it is for other, not for 127.0.0.1"),
        (ED25519, RSA, (*FOR_IT, "-V", "20200101:20200102"), "@cert-authority *", "has expired"),
        (ED25519, ED25519, (*FOR_IT, "-V", "+2d:+3d"), "@cert-authority *", "not valid yet"),
        (ED25519, ED25519, (*FOR_IT, "-O", "critical:x@y=z"), "@cert-authority *", "critical"),
        (ED25519, ED25519, FOR_IT, "@cert-authority elsewhere", "is not known; it offers"),
        (ED25519, ED25519, FOR_IT, "other @cert-authority *", "no certificate of an authority"),
        (ED25519, ED25519, FOR_IT, "@cert-authority *\n@revoked *", "has been revoked"),
        (ED25519, ED25519, FOR_IT, "*", "its host key has changed"),
    ],
)  # fmt: skip
def test_host_certificate_is_verified_as_in_openssh(
    other_sshd, home, kind, authority, options, line, refused
):
    keygen(home / "authority", *authority)
    sign = ("-s", home / "authority", "-I", "it", *options)
    server = other_sshd(host_key=kind, sign=sign)
    if line.startswith("other "):
        keygen(home / "other")
        line = line.removeprefix("other ")
        (home / "other.pub").rename(home / "authority.pub")
    key = " ".join((home / "authority.pub").read_text().split()[:2])
    known = home / "known"
    known.write_text("".join(f"{each} {key}\n" for each in line.splitlines()))
    known.write_text(known.read_text().replace("PORT", str(server.port)))
    theirs = subprocess.run(
        [OPENSSH, "-F", "none", "-p", str(server.port), "-i", server.key, "-o", "BatchMode=yes",
         "-o", f'UserKnownHostsFile="{known}"', "-o", "GlobalKnownHostsFile=none",
         "-o", "StrictHostKeyChecking=yes", "127.0.0.1", "true"],
        capture_output=True,
    )  # fmt: skip
    assert (theirs.returncode == 0) is (refused is None), theirs.stderr
    if refused is None:
        with contextlib.closing(server.transport(known_hosts=str(known))) as transport:
            assert transport.run("h0", ["true"]).exit_code == 0
        return
    message, _, problem = refusal(server.host(known_hosts=str(known)))
    assert problem is HostKeyProblem
    assert refused in message


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """The kind and the bytes of a certificate, and its key."""
    folder = tmp_path_factory.mktemp("certificate")
    keygen(folder / "authority", *ECDSA)
    keygen(folder / "key")
    sign = ["ssh-keygen", "-q", "-s", folder / "authority", "-I", "it", *FOR_IT]
    subprocess.run([*sign, folder / "key.pub"], check=True)
    kind, text, *_ = (folder / "key-cert.pub").read_text().split()
    return kind, base64.b64decode(text), paramiko.PKey.from_path(folder / "key")


@settings(max_examples=300)
@given(place=st.integers(0, 1 << 20), bits=st.integers(0, 255), cut=st.integers(0, 9))
def test_tampered_host_certificate_is_invalid(certificate, place, bits, cut):
    kind, blob, key = certificate
    signed = blob.rindex(b"ecdsa-sha2-nistp256") - 8  # two lengths are before it
    changed = bytearray(blob)
    changed[place % signed] ^= bits
    del changed[len(blob) - cut :]
    key.public_blob = paramiko.pkey.PublicBlob(kind, bytes(changed))
    problem = Certificate.of(key).problem("127.0.0.1", time.time())
    assert (problem is None) is (changed == blob)


def test_known_hosts_reads_5000_entries_within_2_s():
    key = base64.b64encode(b"k" * 51).decode()
    lines = []
    for number in range(5000):
        name = f"host{number}.example.org"
        if number % 2:
            salt = number.to_bytes(20, "big")
            digest = hmac.digest(salt, name.encode(), hashlib.sha1)
            name = f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"
        lines.append(f"{name} ssh-ed25519 {key}")
    began = time.process_time()
    known = KnownHosts("\n".join(lines))
    assert [len(known.keys(f"host{n}.example.org")) for n in (0, 1, 4998, 4999, 5000)] == [
        1
    ] * 4 + [0]
    assert time.process_time() - began < 2


def test_closed_port_is_reported_as_refused_connection(home):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        message, hint, _ = refusal(Host(name="h0", address="127.0.0.1", port=port))
    assert message == f"host h0 (127.0.0.1 port {port}) refuses connections on port {port}"
    assert "sshd" in hint


@pytest.mark.parametrize("name", ["no-such-host.invalid", "x" * 64 + ".example.org"])
def test_unresolvable_host_name_hints_ansible_host(home, name):
    message, hint, _ = refusal(Host(name=name))
    assert message == f"host {name}: the name {name} cannot be resolved"
    assert "ansible_host" in hint


def test_silent_service_is_reported_as_no_sshd_answer(home):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(50)
        host = Host(name="h0", address="127.0.0.1", port=silent.getsockname()[1])
        message, _, _ = refusal(host, timeout=0.5)
    assert "takes connections, but no sshd answers within 0.5 s" in message


@pytest.mark.parametrize(
    ("says", "reason", "remedy"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" * 50,
         "not an SSH server, it sent 'HTTP/1.1 400 Bad Request'", "ansible_port"),
        (b"220 mail.example.org ESMTP\r\n", "not an SSH server, it sent '220 mail", "ansible_port"),
        (b"Exceeded MaxStartups\r\n",
         "banner: it dropped 4 connections in a row (Exceeded MaxStartups)", "MaxStartups in"),
        (b"Not allowed at this time\r\n", "in a row (Not allowed", "PerSourcePenalties"),
        (b"", "banner: it dropped 4 connections in a row", "journalctl -u ssh"),
        (None, "it dropped 4 connections in a row", "MaxStartups in"),
        (b"SSH-2.0-it\r\n", "it dropped 4 connections in a row", "MaxStartups in"),
        (b"SSH-1.0-it\r\n", "Incompatible version (1.0 instead of 2.0)", "ssh -v -p"),
    ],
)  # fmt: skip
def test_server_without_ssh_banner_fails_with_reason_and_remedy(home, says, reason, remedy):
    """``says`` before it closes the connection; None: it resets it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = threading.Event()

        def serve():
            while not done.is_set():
                connection, _ = server.accept()
                with connection, contextlib.suppress(OSError):
                    if says is None:
                        linger = struct.pack("ii", 1, 0)
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                        continue
                    connection.sendall(says)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1024):  # closed with unread data, it would be reset
                        pass

        thread = threading.Thread(target=serve)
        thread.start()
        host = Host(name="h0", address="127.0.0.1", port=server.getsockname()[1])
        message, hint, _ = refusal(host, timeout=20)
        done.set()
        socket.create_connection(server.getsockname()).close()
        thread.join()
    assert message.startswith(f"host h0 (127.0.0.1 port {host.port}): the SSH connection failed: ")
    assert reason in message
    assert remedy in hint


def test_fan_out_returns_results_despite_unreachable_host(sshd, home):
    hosts = [sshd.host(name=f"h{n}") for n in range(3)]
    hosts.insert(1, Host(name="away", address="127.0.0.1", port=1, identity=str(sshd.key)))
    transport = SshTransport(hosts, connect_timeout=20)
    told = fan_out([h.name for h in hosts], lambda name: transport.run(name, ["echo", name]).stdout)
    transport.close()
    assert {name: found for name, found in told.items() if isinstance(found, str)} == {
        "h0": "h0\n", "h1": "h1\n", "h2": "h2\n",
    }  # fmt: skip
    with pytest.raises(HostUnreachable, match=r"host away .*refuses connections"):
        in_order(told)
