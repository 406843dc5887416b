"""Keys, agents and certificates with which a user logs in."""

import base64
import contextlib
import hashlib
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from clusterkit.backends.ssh.config import (
    resolve,
)
from clusterkit.cluster import Host
from clusterkit.errors import Unavailable
from tests.unit.ssh.sshd import ME, configured, fingerprint_of, keygen, refusal


def test_connect_refuses_missing_identity_file(sshd, home):
    message, hint, _ = refusal(sshd.host(identity=str(home / "gone")))
    assert message == (f"host h0 (127.0.0.1 port {sshd.port}): key {home}/gone does not exist")
    assert "ssh-keygen" in hint


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o777])
def test_connect_refuses_key_readable_by_others(sshd, home, mode):
    key = home / "my key"
    shutil.copy(sshd.key, key)
    key.chmod(mode)
    message, hint, _ = refusal(sshd.host(identity=str(key)))
    assert message.endswith(f"key {key} can be read by others (mode {mode:04o})")
    assert hint == f"chmod 600 '{key}'"


@pytest.mark.parametrize(
    "kind",
    [
        ("-t", "ed25519"),
        ("-t", "rsa", "-b", "2048", "-m", "PEM"),
        ("-t", "ecdsa", "-m", "PKCS8"),
    ],
    ids=lambda kind: "-".join(kind).replace("--", ""),
)
def test_connect_refuses_passphrase_protected_key_with_ssh_add_hint(sshd, home, kind):
    key = keygen(home / "locked", *kind, "-N", "open sesame")
    message, hint, _ = refusal(sshd.host(identity=str(key)))
    assert message.endswith(f"key {key} is protected by a passphrase")
    assert hint.startswith(f"ssh-add '{key}'")


@pytest.mark.parametrize("data", [b"", b"garbage\n", b"\xff\xfe\x00", "the .pub file"])
def test_connect_refuses_file_that_is_not_private_key(sshd, home, data):
    key = home / "key"
    key.write_bytes(sshd.key.with_name("id.pub").read_bytes() if isinstance(data, str) else data)
    key.chmod(0o600)
    message, hint, _ = refusal(sshd.host(identity=str(key)))
    assert message.endswith(f"{key} is not a private key")
    assert ".pub" in hint


def test_connect_refuses_directory_as_identity_file(sshd, home):
    folder = home / "keys"
    folder.mkdir(mode=0o700)
    message, _, _ = refusal(sshd.host(identity=str(folder)))
    assert message.endswith(f"key {folder}: is a directory")


def test_permission_denied_names_key_and_hints_ssh_copy_id(sshd, home):
    key = keygen(home / "stranger")
    message, hint, _ = refusal(sshd.host(identity=str(key)))
    assert f"refuses user {ME}: Permission denied: tried {key}" in message
    assert f"ssh-copy-id -i '{key}' -p {sshd.port} {ME}@127.0.0.1" in hint


def test_permission_denied_for_unknown_user_hints_ansible_user(sshd, home):
    message, hint, _ = refusal(sshd.host(user="nobody-of-this-name"))
    assert "refuses user nobody-of-this-name: Permission denied" in message
    assert "ansible_user" in hint


def test_resolve_requires_host_user_when_uid_has_no_name(home, nameless):
    with pytest.raises(Unavailable, match="no user name: uid") as told:
        resolve(Host(name="h1"))
    assert "LOGNAME" in (told.value.hint or "")
    assert resolve(Host(name="h1", user="me")).user == "me"


def test_ssh_copy_id_hint_quotes_user_of_ssh_config(sshd, home):
    (home / ".ssh" / "config").write_text("Host *\n  User me;reboot\n")
    _, hint, _ = refusal(sshd.host(user=None))
    assert f"-p {sshd.port} 'me;reboot@127.0.0.1'" in hint


def test_permission_denied_without_any_key_hints_ssh_copy_id(sshd, home):
    message, hint, _ = refusal(sshd.host(identity=None))
    assert "Permission denied: no key to try" in message
    assert "ssh-copy-id" in hint


def test_connect_tries_default_identity_files(sshd, home):
    shutil.copy(sshd.key, home / ".ssh" / "id_ed25519")
    transport = sshd.transport(identity=None)
    assert transport.run("h0", ["echo", "in"]).stdout == "in\n"
    transport.close()


def test_permission_denied_names_unusable_default_identities(sshd, home):
    shutil.copy(sshd.key, home / ".ssh" / "id_ed25519")
    (home / ".ssh" / "id_ed25519").chmod(0o644)
    keygen(home / ".ssh" / "id_rsa", "-t", "rsa", "-b", "2048", "-N", "secret")
    message, _, _ = refusal(sshd.host(identity=None))
    assert "id_ed25519 can be read by others" in message
    assert "id_rsa is protected by a passphrase" in message


@pytest.fixture
def agent(monkeypatch, home, tmp_path):
    """An SSH agent: ``agent(key)`` gives it a key."""
    # Socket paths are short.
    path = Path(f"/tmp/clusterkit-agent-{os.getpid()}-{random.randrange(1 << 32):08x}")
    process = subprocess.Popen(
        ["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(path))

    def add(key):
        subprocess.run(["ssh-add", "-q", str(key)], check=True)

    yield add
    process.terminate()
    process.wait()
    path.unlink(missing_ok=True)


def test_connect_tries_ssh_agent_keys(sshd, agent):
    agent(sshd.key)
    transport = sshd.transport(identity=None)
    assert transport.run("h0", ["echo", "in"]).stdout == "in\n"
    transport.close()


def test_connect_uses_agent_for_passphrase_protected_key(other_sshd, agent, home):
    server = other_sshd()
    locked = home / "locked"
    shutil.copy(server.key, locked)
    agent(locked)
    shutil.copy(server.key.with_name("id.pub"), home / "locked.pub")
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", locked], check=True)
    transport = server.transport(identity=str(locked))
    assert transport.run("h0", ["echo", "in"]).stdout == "in\n"
    transport.close()


def test_connect_uses_identity_agent_of_ssh_config(sshd, agent, home, monkeypatch):
    agent(sshd.key)
    path = os.environ["SSH_AUTH_SOCK"]
    monkeypatch.setenv("SSH_AUTH_SOCK", str(home / "another"))
    configured(home, f"IdentityAgent {path}\n")
    with contextlib.closing(sshd.transport(identity=None)) as transport:
        assert transport.run("h0", ["echo", "in"]).stdout == "in\n"
    monkeypatch.setenv("SSH_AUTH_SOCK", path)
    configured(home, "IdentityAgent none\n")
    assert "Permission denied: no key to try" in refusal(sshd.host(identity=None))[0]


def test_public_identity_file_selects_agent_key(sshd, agent, home):
    agent(keygen(home / "other"))
    agent(sshd.key)
    shutil.copy(sshd.key.with_name("id.pub"), home / "mine.pub")
    configured(home, f'IdentitiesOnly yes\nIdentityFile "{home}/mine.pub"\n')
    with contextlib.closing(sshd.transport(identity=None)) as transport:
        assert transport.run("h0", ["echo", "in"]).stdout == "in\n"
    shutil.copy(home / "other.pub", home / "mine.pub")
    message = refusal(sshd.host(identity=None))[0]
    assert message.count("the agent's") == 1
    assert fingerprint_of(home / "other.pub") in message


def string(data):
    return len(data).to_bytes(4, "big") + data


class SecurityKey:
    """A key of kind sk-ssh-ed25519, and an agent that holds it."""

    KIND = b"sk-ssh-ed25519@openssh.com"

    def __init__(self, folder):
        self.key = Ed25519PrivateKey.generate()
        public = self.key.public_key().public_bytes_raw()
        self.blob = string(self.KIND) + string(public) + string(b"ssh:")
        self.line = f"{self.KIND.decode()} {base64.b64encode(self.blob).decode()} mine\n"
        self.file = folder / "id_ed25519_sk"
        private = bytes(8) + self.blob + b"\1" + string(b"handle") + string(b"") + string(b"mine")
        private += bytes(range(1, 9 - len(private) % 8)) if len(private) % 8 else b""
        body = b"openssh-key-v1\0" + string(b"none") * 2 + string(b"") + b"\0\0\0\1"
        body = base64.encodebytes(body + string(self.blob) + string(private)).decode()
        name = "OPENSSH PRIVATE KEY"
        self.file.write_text(f"-----BEGIN {name}-----\n{body}-----END {name}-----\n")
        self.file.chmod(0o600)

    def sign(self, data):
        state = b"\1" + (7).to_bytes(4, "big")  # touched, and how often
        signed = hashlib.sha256(b"ssh:").digest() + state + hashlib.sha256(data).digest()
        return string(self.KIND) + string(self.key.sign(signed)) + state

    def serve(self, listener):
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as requests:
            while size := requests.read(4):
                request = requests.read(int.from_bytes(size, "big"))
                if request[0] == 11:
                    answer = b"\x0c\0\0\0\1" + string(self.blob) + string(b"mine")
                else:  # a byte, the key, what to sign, flags
                    data = request[1 + 4 + len(self.blob) + 4 : -4]
                    answer = b"\x0e" + string(self.sign(data))
                connection.sendall(string(answer))


def test_security_key_is_used_only_through_agent(other_sshd, home, monkeypatch):
    server = other_sshd()
    key = SecurityKey(home / ".ssh")
    (server.folder / "authorized").write_text(key.line)
    message, _, _ = refusal(server.host(identity=None))
    assert "can only be used through an SSH agent (sk-ssh-ed25519 private keys" in message
    message, hint, _ = refusal(server.host(identity=str(key.file)))
    assert f"key {key.file} can only be used through an SSH agent" in message
    assert hint == f"ssh-add '{key.file}' adds it to your SSH agent"
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(home)
        listener.bind("agent")
        listener.listen()
        thread = threading.Thread(target=key.serve, args=[listener])
        thread.start()
        monkeypatch.setenv("SSH_AUTH_SOCK", "agent")
        with contextlib.closing(server.transport(identity=str(key.file))) as transport:
            assert transport.run("h0", ["echo", "in"]).stdout == "in\n"
        thread.join()


@pytest.mark.parametrize("held_by", ["file", "agent"])
def test_connect_uses_certificate_file_of_ssh_config(other_sshd, home, agent, held_by):
    authority = keygen(home / "authority")
    server = other_sshd(f'TrustedUserCAKeys "{authority}.pub"')
    (server.folder / "authorized").write_text("")
    key = keygen(home / ".ssh" / "id_ed25519")
    sign = ["ssh-keygen", "-q", "-s", authority, "-I", "me", "-n", ME, f"{key}.pub"]
    subprocess.run(sign, check=True)
    (home / ".ssh" / "id_ed25519-cert.pub").rename(home / "certificate")
    if held_by == "agent":
        agent(key)
        key.unlink()
    assert "Permission denied" in refusal(server.host(identity=None))[0]
    configured(home, f'CertificateFile "{home}/certificate"\n')
    with contextlib.closing(server.transport(identity=None)) as transport:
        assert transport.run("h0", ["echo", "in"]).stdout == "in\n"
    keygen(home / "other")  # a certificate of another key is of no use to this one
    sign[-1] = f"{home}/other.pub"
    subprocess.run(sign, check=True)
    configured(home, f'CertificateFile "{home}/other-cert.pub"\n')
    assert "other-cert.pub" not in refusal(server.host(identity=None))[0]


def test_permission_denied_names_open_control_path_connection(sshd, home):
    shared = home / "shared"
    configured(home, f'ControlPath "{shared}"\n')
    assert "holds open" not in refusal(sshd.host(identity=None))[0]
    shared.touch()
    assert f"ssh holds open at {shared}" in refusal(sshd.host(identity=None))[0]


def test_connect_does_not_forward_ssh_agent(sshd, agent):
    agent(sshd.key)
    transport = sshd.transport()
    code = "import os; print('SSH_AUTH_SOCK' in os.environ)"
    assert transport.run("h0", [sys.executable, "-S", "-c", code]).stdout == "False\n"
    transport.close()


def test_connect_ignores_missing_agent_socket(sshd, home, monkeypatch):
    monkeypatch.setenv("SSH_AUTH_SOCK", str(home / "gone"))
    transport = sshd.transport()
    assert transport.run("h0", ["true"]).exit_code == 0
    transport.close()
