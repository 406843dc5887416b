"""A real sshd on this machine, and what it is compared with."""

import getpass
import shutil
import subprocess

import pytest

from clusterkit.backends.ssh.config import (
    HostUnreachable,
)
from clusterkit.backends.ssh.transport import SshTransport

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin:/sbin")
ME = getpass.getuser()


def keygen(path, *options):
    subprocess.run(
        ["ssh-keygen", "-q", "-C", "test", "-f", str(path), *(options or ("-t", "ed25519"))]
        + ([] if "-N" in options else ["-N", ""]),
        check=True,
    )
    return path


OPENSSH = shutil.which("ssh")


def refusal(host, timeout=20):
    transport = SshTransport([host], connect_timeout=timeout)
    with pytest.raises(HostUnreachable) as error:
        transport.run(host.name, ["true"])
    transport.close()
    assert error.value.exit_code == 125
    return error.value.message, error.value.hint or "", type(error.value)


def fingerprint_of(path):
    done = subprocess.run(["ssh-keygen", "-lf", path], capture_output=True, text=True, check=True)
    return done.stdout.split()[1]


def configured(home, text):
    (home / ".ssh" / "config").write_text(text)
