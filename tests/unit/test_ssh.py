"""SSH, spoken with a real sshd on this machine; and OpenSSH's files, as OpenSSH reads them."""

import ast
import base64
import contextlib
import getpass
import hashlib
import hmac
import json
import os
import pwd
import random
import re
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import paramiko
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterkit import api
from clusterkit.backends.ssh import inventory
from clusterkit.backends.ssh import transport as ssh_transport
from clusterkit.backends.ssh.config import (
    HostUnreachable,
    LoginRefused,
    jump_host,
    resolve,
)
from clusterkit.backends.ssh.known_hosts import Certificate, HostKeyProblem, KnownHosts
from clusterkit.backends.ssh.transport import SshTransport
from clusterkit.cluster import Host
from clusterkit.errors import BadInput, SubmitFailed, Unavailable
from clusterkit.run.status import State
from clusterkit.transport import PORTS, Put, Transport, fan_out, in_order

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin:/sbin")
ME = getpass.getuser()
needs_sshd = pytest.mark.skipif(SSHD is None, reason="sshd is not installed")


def keygen(path, *options):
    subprocess.run(
        ["ssh-keygen", "-q", "-C", "test", "-f", str(path), *(options or ("-t", "ed25519"))]
        + ([] if "-N" in options else ["-N", ""]),
        check=True,
    )
    return path


# ---------------------------------------------------------------- sshd


@dataclass
class Sshd:
    """A running sshd, and who may come in."""

    folder: Path
    port: int
    process: subprocess.Popen

    @property
    def key(self):
        return self.folder / "id"

    @property
    def known_hosts(self):
        return self.folder / "known_hosts"

    def host(self, **fields):
        given = {
            "name": "h0", "address": "127.0.0.1", "port": self.port, "user": ME,
            "identity": str(self.key), "known_hosts": str(self.known_hosts),
        }  # fmt: skip
        return Host(**(given | fields))

    def transport(self, **fields):
        return SshTransport([self.host(**fields)], python=sys.executable, connect_timeout=20)

    def end(self):
        self.process.kill()
        self.process.wait()


def start_sshd(folder, *lines, host_key=("-t", "ed25519"), port=None, sign=None):
    """sshd on a loopback port, with keys and files of its own.

    ``sign``: what ssh-keygen needs to make a certificate for the host.
    """
    folder.mkdir(parents=True)
    for name, options in (("host_key", host_key), ("id", ("-t", "ed25519"))):
        keygen(folder / name, *options)
    if sign:
        subprocess.run(["ssh-keygen", "-q", *sign, folder / "host_key.pub"], check=True)
        lines = (*lines, f'HostCertificate "{folder}/host_key-cert.pub"')
    shutil.copy(folder / "id.pub", folder / "authorized")
    (folder / "config").write_text(
        "\n".join([
            "ListenAddress 127.0.0.1", f'HostKey "{folder}/host_key"', "PidFile none",
            f'AuthorizedKeysFile "{folder}/authorized"', "StrictModes no", "UsePAM no",
            "PasswordAuthentication no", "KbdInteractiveAuthentication no", "UseDNS no",
            # Not root's own .bashrc: it may take its time.
            f'SetEnv HOME="{folder}"', "PermitRootLogin yes", "MaxStartups 500",
            "LogLevel ERROR", *lines, "",
        ])
    )  # fmt: skip
    if port is None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    command = [SSHD, "-D", "-e", "-f", str(folder / "config"), "-p", str(port)]
    if os.getuid() == 0:
        # As root it wants /run/sshd, which is not there where no sshd has been started yet.
        inner = 'mount -t tmpfs none /run && mkdir -m 755 /run/sshd && exec "$@"'
        command = [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            inner,
            "sh",
            *command,
        ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    deadline = time.monotonic() + 30
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as s:
            if s.recv(4) == b"SSH-":
                break
        said = (folder / "log").read_text()
        assert process.poll() is None, said
        assert time.monotonic() < deadline, said
        time.sleep(0.02)
    public = " ".join((folder / "host_key.pub").read_text().split()[:2])
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {public}\n")
    return Sshd(folder, port, process)


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    if SSHD is None:
        pytest.skip("sshd is not installed")
    server = start_sshd(tmp_path_factory.mktemp("sshd") / "a folder")
    yield server
    server.end()


@pytest.fixture
def other_sshd(tmp_path):
    """``other_sshd("Line", host_key=...)`` starts another; all are ended with the test."""
    if SSHD is None:
        pytest.skip("sshd is not installed")
    started = []

    def start(*lines, **options):
        started.append(start_sshd(tmp_path / f"sshd{len(started)}", *lines, **options))
        return started[-1]

    yield start
    for server in started:
        server.end()


OPENSSH = shutil.which("ssh")
WRAPPER = """#!/bin/sh
# OpenSSH takes the home folder from the user database: this gives it the test's.
file='{home}'/.ssh/config; [ -e "$file" ] || file=none
out=$({ssh} -F "$file" "$@"); code=$?
printf '%s\\n' "$out" | sed 's#{real}/#{home}/#g'
exit $code
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home folder: nothing of the user's own keys and configuration counts."""
    folder = tmp_path / "home of mine"
    (folder / ".ssh").mkdir(parents=True)
    user = list(pwd.getpwuid(os.getuid()))
    (program := folder / "bin" / "ssh").parent.mkdir()
    program.write_text(WRAPPER.format(home=folder, ssh=OPENSSH, real=user[5]))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    user[5] = str(folder)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: pwd.struct_passwd(user))
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setattr("clusterkit.backends.ssh.config.CONFIG_SECONDS", 1e-6)
    return folder


@pytest.fixture(scope="module")
def shared(sshd):
    """One connection for all tests that need nothing special."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSH_AUTH_SOCK", raising=False)
        transport = sshd.transport()
        yield transport
        transport.close()


# ---------------------------------------------------------------- commands


def test_run_returns_exit_code_stdout_and_stderr(shared):
    done = shared.run("h0", ["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (done.exit_code, done.stdout, done.stderr) == (3, "out\n", "err\n")


def test_run_passes_arguments_and_environment_unchanged(shared, ugly_values):
    code = "import os, sys; print(ascii((sys.argv[1:], {k: os.environ[k] for k in %r})))"
    words = [*ugly_values.values(), "", "-n", "'", "$(id)"]
    done = shared.run(
        "h0", [sys.executable, "-S", "-c", code % sorted(ugly_values), *words], env=ugly_values
    )
    assert ast.literal_eval(done.stdout) == (words, ugly_values)


def test_run_passes_stdin_byte_for_byte(shared):
    data = bytes(range(256)) * 5000
    code = "import sys, hashlib; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())"
    done = shared.run("h0", [sys.executable, "-S", "-c", code], stdin=data)
    assert done.stdout.strip() == hashlib.sha256(data).hexdigest()


def test_run_does_not_hang_when_command_ignores_stdin(shared):
    assert shared.run("h0", ["true"], stdin=b"x" * (8 << 20), timeout=60).exit_code == 0


def test_run_collects_large_output_of_stdout_and_stderr(shared):
    script = "i=0; while [ $i -lt 3000 ]; do echo $i; echo $i >&2; i=$((i+1)); done"
    done = shared.run("h0", ["sh", "-c", script], timeout=120)
    lines = "".join(f"{number}\n" for number in range(3000))
    assert (done.stdout, done.stderr) == (lines, lines)


def test_run_environment_secret_appears_in_no_remote_cmdline(shared):
    code = (
        "import glob, os\nfound = 0\nfor path in glob.glob('/proc/[0-9]*/cmdline'):\n"
        "    try: found += os.environb[b'TOKEN'] in open(path, 'rb').read()\n"
        "    except OSError: pass\nprint(found, len(os.environ['TOKEN']))"
    )
    secret = os.urandom(20).hex()
    done = shared.run("h0", [sys.executable, "-S", "-c", code], env={"TOKEN": secret})
    assert done.stdout == "0 40\n"


def test_run_of_missing_command_exits_127_and_names_path(shared):
    done = shared.run("h0", ["/nope/no such"])
    assert done.exit_code == 127
    assert "/nope/no such" in done.stderr


def test_run_fails_when_command_exceeds_timeout(shared):
    with pytest.raises(SubmitFailed, match=r"sleep on host h0 did not end within 0\.2 s"):
        shared.run("h0", ["sleep", "30"], timeout=0.2)


def test_run_of_killed_command_keeps_output_and_exits_255(shared):
    done = shared.run("h0", ["sh", "-c", "echo before; kill -9 $$"])
    assert (done.stdout, done.exit_code) == ("before\n", 255)


def test_started_command_outlives_connection_in_own_session(sshd, tmp_path):
    fifo = tmp_path / "fi fo"
    os.mkfifo(fifo)
    transport = sshd.transport()
    script = 'echo "$A $(cut -d" " -f6 /proc/$$/stat)" >"$0"; cat "$0" >/dev/null; sleep 60'
    transport.start("h0", ["sh", "-c", script, str(fifo)], env={"A": "it's"})
    transport.close()
    value, session = fifo.read_text().split()
    assert value == "it's"
    assert int(session) != os.getsid(0)
    assert Path(f"/proc/{session}").exists()
    os.killpg(int(session), signal.SIGKILL)


def test_start_of_missing_command_fails_naming_path(shared):
    with pytest.raises(SubmitFailed, match=r"cannot start /nope on host h0: /nope: not found"):
        shared.start("h0", ["/nope"])


def test_run_ignores_login_shell_banner(other_sshd, home):
    server = other_sshd('ForceCommand echo "Welcome to h0"; eval "$SSH_ORIGINAL_COMMAND"')
    transport = server.transport()
    assert transport.run("h0", ["echo", "out"]).stdout == "out\n"
    transport.close()


@pytest.mark.parametrize(
    ("login", "why"),
    [
        ("exit 1", "it ended with 1"),  # /bin/false
        ("echo not available; exit 1", "it ended with 1: not available"),  # /sbin/nologin
        ("read x; {}", "a start file of the login shell (.bashrc, .profile) reads standard input"),
        ("cat >/dev/null; {}", "a start file of the login shell (.bashrc, .profile) reads"),
    ],
)
def test_login_shell_that_runs_no_commands_is_refused_with_cause(
    other_sshd, home, tmp_path, login, why
):
    command = login.format('eval "$SSH_ORIGINAL_COMMAND"')
    transport = other_sshd(f"ForceCommand {command}").transport()
    # What follows a script that has lost its head must not be run.
    harm = f"touch {tmp_path}/harm\n".encode() * 20
    for call in (
        lambda: transport.run("h0", ["cat"], stdin=harm),
        lambda: transport.put("h0", str(tmp_path / "f"), harm),
        lambda: transport.start("h0", ["true"]),
    ):
        with pytest.raises(LoginRefused) as error:
            call()
        message = error.value.message
        assert message.startswith("host h0: the login shell does not run commands: ")
        assert why in message
    assert not (tmp_path / "harm").exists()
    transport.close()


def test_timeout_of_blocked_login_shell_hints_at_start_files(other_sshd, home):
    transport = other_sshd("ForceCommand sleep 60").transport()
    with pytest.raises(SubmitFailed, match="true on host h0 did not end within 2 s") as error:
        transport.run("h0", ["true"], timeout=2)
    assert "a start file of the login shell (.bashrc" in error.value.hint
    transport.close()


def test_open_stream_writes_reads_and_returns_exit_code(shared):
    with shared.open("h0", ["sh", "-c", "read a; echo got $a; cat; exit 4"]) as stream:
        stream.write(b"first\n")
        assert stream.read(60) == b"got first\n"
        stream.write(b"\0second")
        assert stream.read(60) == b"\0second"
        with pytest.raises(SubmitFailed, match="host h0 no longer answers"):
            stream.read(0.1)
        stream.close_input()
        assert stream.read(60) == b""
        assert stream.exit_code(60) == 4


def test_stream_write_fails_when_host_stalls(shared, monkeypatch):
    monkeypatch.setattr(ssh_transport, "WRITE_SECONDS", 0.5)
    with (
        shared.open("h0", ["sleep", "60"]) as stream,
        pytest.raises(SubmitFailed, match="host h0 no longer answers"),
    ):
        stream.write(bytes(1 << 26))


def test_concurrent_commands_share_one_connection(sshd):
    transport = sshd.transport()
    results = fan_out(
        [f"{n}" for n in range(8)],
        lambda n: transport.run("h0", ["sh", "-c", f"echo {n} $PPID; sleep 0.2"]).stdout,
    )
    assert {n: text.split()[0] for n, text in results.items()} == {n: n for n in results}
    assert len(transport._connections) == 1
    transport.close()


def test_closed_transport_reconnects_on_next_run(sshd):
    transport = sshd.transport()
    for _ in range(2):
        assert transport.run("h0", ["echo", "hi"]).stdout == "hi\n"
        transport.close()


def test_connection_made_during_close_is_closed(sshd, monkeypatch):
    transport = sshd.transport()
    made = []

    def slowly(*args):
        made.append(connect(*args))
        transport.close()
        return made[0]

    connect = ssh_transport.connect
    monkeypatch.setattr(ssh_transport, "connect", slowly)
    with pytest.raises(HostUnreachable, match="the transport was closed"):
        transport.run("h0", ["true"])
    assert not made[0].is_active()
    assert transport._connections == {}


def test_run_reconnects_after_connection_broke(sshd):
    transport = sshd.transport()
    transport.run("h0", ["true"])
    transport.connection("h0").close()
    assert transport.run("h0", ["echo", "again"]).stdout == "again\n"
    transport.close()


def test_stream_reports_connection_lost_during_command(other_sshd, home):
    server = other_sshd()
    transport = server.transport()
    with transport.open("h0", ["sh", "-c", "echo $PPID; sleep 60"]) as stream:
        serving = int(stream.read(60))
        os.kill(serving, signal.SIGKILL)
        assert stream.read(60) == b""
        with pytest.raises(HostUnreachable, match="host h0: the connection was lost"):
            stream.exit_code(60)
    transport.close()


def test_run_beyond_max_sessions_fails_with_hint(other_sshd, home):
    transport = other_sshd("MaxSessions 1").transport()
    with (
        transport.open("h0", ["sleep", "60"]),
        pytest.raises(HostUnreachable, match="h0 refuses another session") as error,
    ):
        transport.run("h0", ["true"])
    assert "MaxSessions" in (error.value.hint or "")
    transport.close()


# ---------------------------------------------------------------- files


def test_put_all_writes_any_name_content_and_mode(shared, weird_tmp_path):
    folder = weird_tmp_path / "new" / "er"
    files = [
        Put(str(folder / "plain"), b"a\n"),
        Put(str(folder / "nul"), bytes(range(256)) * 300, 0o755),
        Put(str(folder / "empty"), b""),
        Put(str(folder / "a\nb 'c' $(id) -n"), b"x", 0o600),
        Put(str(folder / "-rf"), b"y"),
    ]
    shared.put_all("h0", files)
    for file in files:
        path = Path(file.path)
        assert path.read_bytes() == file.data
        assert stat.S_IMODE(path.stat().st_mode) == file.mode
    assert len(os.listdir(folder)) == len(files)
    # Secret or not, what a run keeps on a host is its owner's alone.
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


def test_concurrent_put_all_into_shared_folder_leaves_whole_files(sshd, home, tmp_path):
    hosts = [f"h{number}" for number in range(6)]
    transport = SshTransport([sshd.host(name=name) for name in hosts], connect_timeout=20)
    files = [
        Put(str(tmp_path / "run/files" / name), os.urandom(1 << 16), mode)
        for name, mode in (("agent.pyz", 0o644), ("node.sh", 0o755))
    ]
    for _ in range(5):
        in_order(fan_out(hosts, lambda host: transport.put_all(host, files)))
    transport.close()
    assert {Path(file.path).read_bytes() for file in files} == {file.data for file in files}
    assert sorted(os.listdir(tmp_path / "run/files")) == ["agent.pyz", "node.sh"]


def test_put_replaces_file_atomically(shared, tmp_path):
    (tmp_path / "f").write_bytes(b"old and long")
    with (tmp_path / "f").open("rb") as reader:
        shared.put("h0", str(tmp_path / "f"), b"new")
        assert reader.read() == b"old and long"
    assert (tmp_path / "f").read_bytes() == b"new"


def test_put_to_unwritable_path_fails_with_workdir_hint(shared, tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(SubmitFailed, match=r"host h0: cannot write below .*f: ") as error:
        shared.put("h0", str(tmp_path / "f" / "g"), b"x")
    assert "workdir" in (error.value.hint or "")


@pytest.fixture
def small_disk(tmp_path, sshd):
    """A disk of 64 KiB, seen from the sshd too: it was started before."""
    if os.getuid() != 0:
        pytest.skip("mounting needs root")
    place = tmp_path / "small"
    place.mkdir()
    there = ["nsenter", "--mount", "--target", str(sshd.process.pid)]
    subprocess.run([*there, "mount", "-t", "tmpfs", "-o", "size=64k", "none", place], check=True)
    yield place
    subprocess.run([*there, "umount", place], check=True)


def test_put_on_full_disk_keeps_old_file_and_no_leftovers(shared, small_disk):
    shared.put("h0", str(small_disk / "f"), b"fits")
    with pytest.raises(SubmitFailed, match=r"host h0: cannot write below .*: .*No space left"):
        shared.put("h0", str(small_disk / "f"), os.urandom(200_000))
    assert shared.run("h0", ["cat", str(small_disk / "f")]).stdout == "fits"
    assert shared.run("h0", ["ls", "-A", str(small_disk)]).stdout == "f\n"


def test_free_port_avoids_taken_port(shared):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        taken = server.getsockname()[1]
        port = shared.free_port("h0", taken)
        assert port != taken
        assert port in PORTS
    assert shared.free_port("h0", port) == port


def test_free_port_fails_naming_missing_remote_python(sshd):
    transport = sshd.transport(python="/nope/python")
    with pytest.raises(SubmitFailed, match=r"host h0: no free TCP port found: .*/nope/python"):
        transport.free_port("h0")
    transport.close()


# ---------------------------------------------------------------- who may come in


def refusal(host, timeout=20):
    transport = SshTransport([host], connect_timeout=timeout)
    with pytest.raises(HostUnreachable) as error:
        transport.run(host.name, ["true"])
    transport.close()
    assert error.value.exit_code == 125
    return error.value.message, error.value.hint or "", type(error.value)


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


# ---------------------------------------------------------------- who answers


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


def fingerprint_of(path):
    done = subprocess.run(["ssh-keygen", "-lf", path], capture_output=True, text=True, check=True)
    return done.stdout.split()[1]


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


# ---------------------------------------------------------------- ways through


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


def configured(home, text):
    (home / ".ssh" / "config").write_text(text)


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


# ---------------------------------------------------------------- configurations

CONFIG = """
Include conf.d/*.conf
Host alias
    HostName real.example.org
    Port 2222
    User trainer
    IdentityFile ~/.ssh/first-%u
    IdentityFile "~/.ssh/with space"
    IdentitiesOnly yes
    UserKnownHostsFile ~/.ssh/known_one "~/known two"
    HostKeyAlias the-alias
Host *.example.org !not.example.org
    User glob
    ProxyJump me@gate:22
Host noproxy
    ProxyJump none
Match host matched*
    User matched
Match host asked exec "true"
    User exec
Match host asked2 exec "false"
    User none
Host *
    User everyone
    Port 22
"""
INCLUDED = "Host included\n  Port 4444\n  User from-include\n"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("alias", ("real.example.org", 2222, "trainer", None)),
        ("a.example.org", ("a.example.org", 22, "glob", "me@gate:22")),
        ("not.example.org", ("not.example.org", 22, "everyone", None)),
        ("matched1", ("matched1", 22, "matched", None)),
        ("plain", ("plain", 22, "everyone", None)),
        ("included", ("included", 4444, "from-include", None)),
        ("asked", ("asked", 22, "exec", None)),
        ("asked2", ("asked2", 22, "everyone", None)),
        ("noproxy", ("noproxy", 22, "everyone", None)),
    ],
)
def test_resolve_applies_ssh_config_of_host(home, name, expected):
    (home / "one.conf").write_text(INCLUDED)
    configured(home, CONFIG.replace("conf.d/*.conf", f'"{home}/one.conf"'))
    ours = resolve(Host(name=name))
    assert (ours.address, ours.port, ours.user, ours.jump) == expected
    if name == "alias":
        assert ours.identities == (f"{home}/.ssh/first-{ME}", f"{home}/.ssh/with space")
        assert ours.default_identities == ()
        assert ours.identities_only
        assert ours.known_hosts[:2] == (f"{home}/.ssh/known_one", f"{home}/known two")
        assert ours.key_name == "the-alias"


DIFFERENCES = {
    "a comment behind a value": "Port 2201 # comment\n",
    "an unknown criterion": "Match tagged prod\n  User none\nMatch all\n  Port 1\n",
    "Include inside Host": "Host other\n  Include INCLUDED\nHost *\n  Port 2202\n",
    "ProxyCommand before ProxyJump": "ProxyCommand nc %h %p\nProxyJump gate\n",
    "Match user before User": f"Match user {ME}\n  Port 2203\nHost *\n  User later\n",
}
"""Where the parser that clusterkit had read otherwise than OpenSSH."""
WORDS = st.sampled_from(["a", "gpu1", "gpu*", "*", "!gpu1", "*.example.org", "me"])
OPTIONS = st.one_of(
    st.builds("{}{}{}{}".format, st.sampled_from(["Port", "port", "PORT"]),
              st.sampled_from([" ", "=", " = ", "\t"]), st.integers(1, 65535),
              st.sampled_from(["", " ", " # comment"])),
    st.builds("User {}".format, st.sampled_from(["me", '"you"', "root", "a.b"])),
    st.builds("HostName {}".format, st.sampled_from(["%h.example.org", "10.0.0.1", '"x"', "%h%%"])),
    st.sampled_from(["ProxyJump gate", "ProxyJump me@gate:2222,b", "ProxyJump none",
                     "ProxyCommand nc %h %p %r %n %%", "ProxyCommand none", "IdentitiesOnly yes",
                     "HostKeyAlias alias", "Include INCLUDED", "include=INCLUDED GONE",
                     "# a comment", ""]),
    st.builds('IdentityFile "~/.ssh/{}"'.format, st.sampled_from(["a", "b c", "%r@%h", "%n"])),
    st.sampled_from(["UserKnownHostsFile /k /l", 'UserKnownHostsFile "/k l" /m',
                     "UserKnownHostsFile /dev/null", "UserKnownHostsFile none"]),
)  # fmt: skip
BLOCKS = st.one_of(
    st.builds("Host {}".format, st.lists(WORDS, min_size=1, max_size=3).map(" ".join)),
    st.builds("Match {} {}".format,
              st.sampled_from(["user", "!user", "host", "originalhost", "localuser"]),
              st.sampled_from(["me", "root", "gpu1", "gpu*,!gpu1", "*"])),
    st.sampled_from(["Match all", 'Match exec "true"', 'Match exec "false" user me',
                     "Match final", "Match canonical all", "Match tagged x",
                     "Match frobnicate"]),
)  # fmt: skip
CONFIGS = st.lists(st.one_of(OPTIONS, OPTIONS, BLOCKS), max_size=12).map("\n".join)


def told_by_openssh(arguments):
    done = subprocess.run([OPENSSH, "-G", *arguments], capture_output=True, text=True)
    found = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key, []).append(value)
    return None if done.returncode else found


@pytest.mark.parametrize("text", DIFFERENCES.values(), ids=list(DIFFERENCES))
def test_resolve_agrees_with_openssh_on_known_parser_differences(tmp_path, text):
    compare_with_openssh(tmp_path, text, "Host *\nPort 9\n", None, None)


@settings(max_examples=100)
@given(text=CONFIGS, included=CONFIGS.filter(lambda text: "nclude" not in text),
       user=st.sampled_from([None, "me"]), port=st.sampled_from([None, 2200]))  # fmt: skip
def test_resolve_agrees_with_openssh_on_any_ssh_config(
    tmp_path_factory, text, included, user, port
):
    compare_with_openssh(tmp_path_factory.mktemp("config"), text, included, user, port)


def compare_with_openssh(folder, text, included, user, port):
    (folder / "included").write_text(included)
    text = text.replace("INCLUDED", f"{folder}/included").replace("GONE", f"{folder}/gone")
    (file := folder / "config").write_text(text)
    options = ["-F", str(file), *(["-l", user] if user else [])]
    options += ["-p", str(port)] if port else []
    theirs = told_by_openssh([*options, "gpu1"])
    host = Host(name="gpu1", ssh_config=str(file), user=user, port=port)
    if theirs is None:
        with pytest.raises(Unavailable):
            resolve(host)
        return
    ours = resolve(host)
    tokens = {"%h": ours.address, "%p": f"{ours.port}", "%r": ours.user, "%n": "gpu1", "%%": "%"}

    def filled(value):
        return re.sub("%.", lambda match: tokens[match[0]], value)

    assert [ours.address, f"{ours.port}", ours.user] == [
        theirs[key][0] for key in ("hostname", "port", "user")
    ]
    assert ours.jump == next(iter(theirs.get("proxyjump", [None])))
    command = theirs.get("proxycommand", ["none"])[0]
    assert ours.proxy_command == (None if command == "none" else filled(command))
    home = pwd.getpwuid(os.getuid()).pw_dir  # as ssh has it, whatever HOME says
    keys = [filled(re.sub("^~", home, path)) for path in theirs["identityfile"] if path != "none"]
    assert list(ours.identities or ours.default_identities) == keys
    assert ours.identities_only == (theirs["identitiesonly"] == ["yes"])
    known = " ".join(ours.known_hosts)
    if theirs["userknownhostsfile"] not in (["/dev/null"], ["none"]):
        assert known.startswith(theirs["userknownhostsfile"][0])
    if "hostkeyalias" in theirs:
        assert ours.key_name == theirs["hostkeyalias"][0]


def test_resolve_refuses_recursive_include(home):
    configured(home, "Include config\n")
    with pytest.raises(Unavailable, match="Too many recursive configuration includes"):
        resolve(Host(name="h0"))


def test_inventory_settings_override_ssh_config(home):
    configured(home, CONFIG)
    target = resolve(
        Host(name="h0", address="alias", port=1, user="me", identity="/k", known_hosts="/a b/known",
             jump="gate")
    )  # fmt: skip
    assert target.address == "real.example.org"
    assert (target.port, target.user, target.jump) == (1, "me", "gate")
    assert target.identities == ("/k",)
    assert target.known_hosts[0] == "/a b/known"
    assert str(target) == "host h0 (real.example.org port 1)"


def test_resolve_without_ssh_config_uses_openssh_defaults(home):
    target = resolve(Host(name="h0"))
    assert (target.address, target.port, target.user) == ("h0", 22, ME)
    assert target.known_hosts == (
        f"{home}/.ssh/known_hosts", f"{home}/.ssh/known_hosts2",
        "/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2",
    )  # fmt: skip
    assert str(target) == "host h0"
    assert resolve(Host(name="h1", port=2200)).key_name == "[h1]:2200"


def test_resolve_takes_home_from_user_database_not_environment(home, tmp_path, monkeypatch):
    """As for ssh: HOME does not count."""
    configured(home, "Host h0\n  IdentityFile ~/.ssh/mine\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    target = resolve(Host(name="h0"))
    assert target.identities == (f"{home}/.ssh/mine",)
    assert target.known_hosts[0] == f"{home}/.ssh/known_hosts"


@pytest.mark.parametrize("why", ["`ssh` is not in PATH", "refuses uid"])
def test_resolve_refuses_ssh_config_when_openssh_cannot_run(home, monkeypatch, request, why):
    if "PATH" in why:
        monkeypatch.setenv("PATH", str(home))
    else:
        request.getfixturevalue("nameless")
    target = resolve(Host(name="h0", user="me"))
    assert (target.address, target.port, target.user) == ("h0", 22, "me")
    assert target.default_identities[0] == f"{home}/.ssh/id_ed25519"
    assert target.known_hosts[0] == f"{home}/.ssh/known_hosts"
    configured(home, "Host h0\n  Port 2222\n")
    with pytest.raises(
        Unavailable, match=f"config: only OpenSSH's .* can read it, .*{why}"
    ) as told:
        resolve(Host(name="h0", user="me"))
    assert "openssh-client" in (told.value.hint or "")
    assert resolve(Host(name="h0", user="me", ssh_config=os.devnull)).port == 22


def test_resolve_keeps_known_hosts_when_ssh_config_disables_checking(home):
    configured(home, "UserKnownHostsFile /dev/null\nStrictHostKeyChecking no\n")
    assert resolve(Host(name="h0")).known_hosts[0] == f"{home}/.ssh/known_hosts"


def test_inventory_jump_none_disables_proxy_jump(home):
    configured(home, "Host *\n  ProxyJump gate\n")
    assert resolve(Host(name="h0")).jump == "gate"
    assert resolve(Host(name="h0", jump="none")).jump is None


def test_proxy_command_receives_inventory_port_and_user(home):
    configured(home, "Host *\n  ProxyCommand nc %h %p %r\n  User other\n")
    target = resolve(Host(name="h0", address="10.0.0.1", port=2222, user="me"))
    assert target.proxy_command == "nc 10.0.0.1 2222 me"
    assert resolve(Host(name="h0", jump="gate")).proxy_command is None


@pytest.mark.parametrize(
    "text",
    [
        *("Port abc\n", "Port 70000\n", "Port 0\n", "Port ²\n", "Port -1\n", "nonsense\n"),
        *("Match\n User x\n", "Match frobnicate\n User x\n", "Nonsense yes\n"),
        b"\xff\xfe",
    ],
)
def test_resolve_refuses_invalid_ssh_config(home, text):
    path = home / ".ssh" / "config"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(Unavailable) as error:
        resolve(Host(name="h0"))
    assert "config" in f"{error.value}"


def test_resolve_uses_ssh_config_file_of_inventory(home, tmp_path):
    mine = tmp_path / "my config"
    mine.write_text("Host h0\n  User me\n")
    configured(home, "Host h0\n  User other\n")
    assert resolve(Host(name="h0", ssh_config=str(mine))).user == "me"
    assert resolve(Host(name="h0", ssh_config=os.devnull)).user == ME
    with pytest.raises(Unavailable, match="gone: No such file or directory"):
        resolve(Host(name="h0", ssh_config=str(tmp_path / "gone")))


def test_inventory_variables_alone_connect_to_host(sshd, home, tmp_path):
    """From an inventory's words to a connection, a folder with spaces included."""
    folder = tmp_path / "my inventory"
    folder.mkdir()
    shutil.copy(sshd.key, folder / "id")
    shutil.copy(sshd.known_hosts, folder / "known hosts")
    path = folder / "inventory.yaml"
    path.write_text(
        f"""
all:
  vars:
    ansible_user: {ME}
    ansible_ssh_private_key_file: "{{{{ inventory_dir }}}}/id"
    ansible_ssh_common_args: -o UserKnownHostsFile='"{folder}/known hosts"' -o IdentitiesOnly=yes
  hosts:
    h0: {{ansible_host: 127.0.0.1, ansible_port: {sshd.port}}}
"""
    )
    transport = SshTransport(inventory.read_hosts(path, "all"), connect_timeout=20)
    assert transport.run("h0", ["echo", "in"]).stdout == "in\n"
    transport.close()


def test_ssh_run_succeeds_in_workdir_with_spaces(sshd, home, tmp_path, cwd, write_job, no_gpus):
    name = write_job('launcher: forkserver\ngpus_per_node: 2\nenv: {ODD: "it\'s $HOME"}\n')
    (cwd / "train.py").write_text(
        "import os\nfrom helper import x\n"
        "print(os.environ['RANK'], os.environ['ODD'], os.getcwd(), x)\n"
    )
    (cwd / "helper.py").write_text("x = 'uncommitted'\n")
    work = tmp_path / "my work's folder"
    host = {
        "name": "h0", "address": "127.0.0.1", "port": sshd.port, "identity": str(sshd.key),
        "known_hosts": str(sshd.known_hosts),
    }  # fmt: skip
    entry = {"backend": "ssh", "hosts": [host], "workdir": str(work), "python": sys.executable}
    (cwd / "clusters.yaml").write_text(json.dumps({"lab": entry}))
    run = api.submit(name, cluster="lab")
    try:
        status = run.wait(120)
    finally:
        run.cancel()
    assert status.state is State.SUCCEEDED, status
    (tree,) = run.plan.trees[:1]
    assert tree.path.startswith(f"{work}/projects/")
    assert sorted(line.text for line in run.logs()) == [
        f"{rank} it's $HOME {tree.path} uncommitted" for rank in range(2)
    ]
    assert (work / "runs" / run.id / "files" / "node.sh").is_file()


# ---------------------------------------------------------------- the protocol


def test_ssh_transport_matches_protocol_method_signatures():
    import inspect

    wanted = {name for name in vars(Transport) if not name.startswith("_")}
    for name in wanted:
        ours = inspect.signature(getattr(SshTransport, name))
        assert ours == inspect.signature(getattr(Transport, name)), name


USED = """
import contextlib, logging, sys
{first}
def state():
    kept = {{m: dict(vars(sys.modules[m])) for m in sorted(sys.modules)
            if m.partition(".")[0] in ("paramiko", "invoke")}}
    return kept | {{"logging": {{
        name: (logger.propagate, logger.level, *logger.handlers)
        for name in ("paramiko", "paramiko.transport") for logger in [logging.getLogger(name)]
    }}}}
before = state()
from clusterkit.cluster import Host
from clusterkit.backends.ssh.transport import SshTransport, resolve
assert resolve(Host(name="asked")).user == "exec"
host = Host(**{host!r})
transport = SshTransport([host], python=sys.executable, connect_timeout=20)
with contextlib.closing(transport):
    assert transport.run("h0", ["echo", "hello"]).stdout == "hello\\n"
import paramiko.config, invoke
assert paramiko.config.invoke is invoke
after = state()
print([(name, key) for name in before for key in before[name] | after[name]
       if before[name].get(key) != after[name].get(key)])
"""


@needs_sshd
@pytest.mark.parametrize("first", ["import paramiko.config, invoke", ""])
def test_ssh_transport_leaves_paramiko_and_logging_unchanged(sshd, home, first):
    configured(home, CONFIG)
    host = {key: value for key, value in msgspec.structs.asdict(sshd.host()).items() if value}
    code = USED.format(first=first, host=host)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_paramiko_thread_traceback_is_not_printed(home):
    """A server that is none: paramiko's own thread logs a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"""
import contextlib
from clusterkit.cluster import Host
from clusterkit.backends.ssh.transport import HostUnreachable, SshTransport
host = Host(name="h0", address="127.0.0.1", port={server.getsockname()[1]})
with contextlib.closing(SshTransport([host], python="python3", connect_timeout=20)) as transport:
    try:
        transport.run("h0", ["true"])
    except HostUnreachable:
        print("refused")
"""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)
        with process, server.accept()[0] as connection:
            connection.sendall(b"SSH-1.0-none\r\n")
            assert process.communicate() == ("refused\n", "")
