"""Fixtures of the tests beside this file."""

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from clusterkit.backends.ssh.transport import SshTransport
from clusterkit.cluster import Host
from tests.unit.ssh.sshd import ME, OPENSSH, SSHD, keygen


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
