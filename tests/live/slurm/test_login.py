"""A login node over SSH: an sshd of the test's own, beside the daemons of Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clusterkit import agent, api
from clusterkit.errors import RunNotFound
from clusterkit.run.status import State
from tests import own_ssh
from tests.live.slurm.daemons import Slurm, _free_ports

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
TICK = """
import os, sys, time
print("hello from", os.environ["RANK"], os.getcwd(), flush=True)
for number in range(int(sys.argv[1])):
    time.sleep(0.1)
"""
Submit = Callable[[int], api.Run]


class Login:
    """An sshd whose sessions reach Slurm, and the SSH configuration that leads there."""

    def __init__(self, folder: Path, slurm: Slurm) -> None:
        self.folder = folder
        (port,) = _free_ports(1)
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name],
                           check=True)  # fmt: skip
        key = (folder / "host.pub").read_text()
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {key}")
        self.ssh_config = (
            f"Host hpc-login\n  HostName 127.0.0.1\n  Port {port}\n  User root\n"
            f"  IdentityFile {folder}/user\n  UserKnownHostsFile {folder}/known_hosts\n"
        )
        (folder / "sshd_config").write_text(
            f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile none\n"
            f"AuthorizedKeysFile {folder}/user.pub\nStrictModes no\nPermitRootLogin yes\n"
            f"UsePAM no\nSetEnv SLURM_CONF={slurm.env['SLURM_CONF']}\n"
        )
        self.port = port
        self.start()

    def start(self) -> None:
        sshd = shutil.which("sshd", path="/usr/sbin:/usr/bin")
        assert sshd is not None
        with (self.folder / "sshd.log").open("ab") as log:
            self.sshd = subprocess.Popen(
                [sshd, "-D", "-e", "-f", self.folder / "sshd_config"], stderr=log
            )
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 5).close()
                return
            except OSError:
                assert time.monotonic() < deadline, (self.folder / "sshd.log").read_text()
                time.sleep(0.02)

    def stop(self) -> None:
        """Nobody can log in any more, and whoever has is cut off."""
        sessions = agent.descendants(self.sshd.pid)
        self.sshd.terminate()
        self.sshd.wait(20)
        agent.send(sessions, signal.SIGKILL)


@pytest.fixture
def login(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Login]:
    """A laptop whose SSH configuration knows ``hpc-login``, and a project of its own."""
    if shutil.which("sshd", path="/usr/sbin:/usr/bin") is None:
        pytest.skip("sshd is not installed (apt-get install openssh-server)")
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in slurm.env:
        monkeypatch.delenv(name)
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    entry = {
        "backend": "slurm", "cpus": 2, "stop_grace": 5, "ssh": "hpc-login",
        "python": sys.executable, "workdir": str(tmp_path / "shared"),
    }  # fmt: skip
    Path(os.environ["CLUSTERKIT_CLUSTERS"]).write_text(json.dumps({"hpc": entry}))
    project = tmp_path / "project"
    project.mkdir()
    (project / "tick.py").write_text(TICK)
    monkeypatch.chdir(project)
    made = Login(tmp_path, slurm)
    own_ssh.configure(tmp_path, made.ssh_config, monkeypatch)
    yield made
    made.stop()


@pytest.fixture
def submit(login: Login) -> Iterator[Submit]:
    """``submit(600)``: ranks that tick for so long, on two nodes; ended with the test."""
    started: list[api.Run] = []

    def start(ticks: int) -> api.Run:
        Path("job.yaml").write_text(f"program: tick.py\nargs: ['{ticks}']\nnodes: 2\nrestarts: 1\n")
        started.append(api.submit("job.yaml", cluster="hpc"))
        return started[-1]

    yield start
    for run in started:
        with contextlib.suppress(RunNotFound):  # its test has removed it
            run.cancel()


def said(run: api.Run) -> list[str]:
    return sorted(line.text for line in run.logs() if "hello" in line.text)


def test_run_through_login_node_copies_project_and_fetches_results(
    login: Login, slurm: Slurm, submit: Submit, tmp_path: Path
) -> None:
    run = submit(5)
    status = run.wait(120)
    assert status.state is State.SUCCEEDED, (status, (run.path / "supervisor.log").read_text())
    assert [node.exit_code for node in status.nodes] == [0, 0]
    (project,) = (tmp_path / "shared/projects/project").glob("[0-9a-f]*[0-9a-f]")
    assert said(run) == [f"hello from {rank} {project}" for rank in (0, 1)]
    there = tmp_path / "shared/runs" / run.id
    for name in ("attempts/1/node-1/log", "attempts/1/node-0/exit.json", "job-1"):
        assert (run.path / name).read_bytes() == (there / name).read_bytes()
    run.delete()
    assert not there.exists()


@pytest.mark.thorough
def test_run_survives_unreachable_login_node_and_can_be_cancelled(
    login: Login, slurm: Slurm, submit: Submit
) -> None:
    run = submit(6000)
    run.wait(120, until=lambda status: len(said(run)) == 2)
    login.stop()
    away = run.wait(60, until=lambda status: any(node.reason for node in status.nodes))
    assert away.state is State.RUNNING
    login.start()
    back = run.wait(60, until=lambda status: not any(node.reason for node in status.nodes))
    assert back.state is State.RUNNING
    assert run.cancel().state is State.CANCELLED
    ended = run.wait(60)
    assert [node.state for node in ended.nodes] == [State.CANCELLED] * 2
    assert ended.nodes[0].reason == "stopped on request"
