"""Terminals and Ctrl-C; ports, and several submits at once."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import msgspec
import pytest

from clusterkit import agent, api, backends
from clusterkit.cluster import LocalCluster
from clusterkit.errors import PortTaken
from clusterkit.run.folder import RunFolder
from clusterkit.run.status import State
from clusterkit.transport import LocalTransport
from tests.conftest import noted
from tests.live.local import PROGRAMS, SOON, Submit, all_ready

pytestmark = pytest.mark.live


# ---------------------------------------------------------------- terminals and Ctrl-C


class Terminal:
    """A command in a pseudo-terminal."""

    def __init__(self, argv: list[str]) -> None:
        self.pid, self.handle = pty.fork()
        if self.pid == 0:
            os.execv(argv[0], argv)
        self.text = ""

    def read_until(self, words: str) -> None:
        deadline = time.monotonic() + SOON
        while words not in self.text:
            assert time.monotonic() < deadline, self.text
            try:
                self.text += os.read(self.handle, 4096).decode(errors="replace")
            except OSError:
                pytest.fail(f"ended without {words!r}: {self.text}")

    def type(self, text: str) -> None:
        os.write(self.handle, text.encode())

    def exit_code(self) -> int:
        while True:
            try:
                if not os.read(self.handle, 4096):
                    break
            except OSError:
                break
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.handle)
        return code


def beating(clusterkit: list[str], *options: str) -> list[str]:
    return [
        *clusterkit, "submit", "--set", "launcher=forkserver", *options, "--",
        "python", str(PROGRAMS / "tick.py"), "6000",
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    ("answer", "code", "state"), [("d\r", 0, State.RUNNING), ("c\r", 130, State.CANCELLED)]
)
def test_ctrl_c_in_terminal_offers_detach_or_cancel(
    clusterkit: list[str], answer: str, code: int, state: State
) -> None:
    terminal = Terminal(beating(clusterkit))
    terminal.read_until("beat 3")
    terminal.type("\x03")
    terminal.read_until("detach from it, or cancel it?")
    terminal.type(answer)
    assert terminal.exit_code() == code
    run = api.get("last")
    assert run.status().state is state
    run.cancel()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_detached_run_continues_after_terminal_closes(clusterkit: list[str]) -> None:
    terminal = Terminal(beating(clusterkit, "--detach"))
    terminal.read_until("follows it")
    assert terminal.exit_code() == 0
    run = api.get("last")
    all_ready(run, 1)
    assert run.status().state is State.RUNNING
    run.cancel()


def test_ctrl_c_without_terminal_cancels_run(clusterkit: list[str]) -> None:
    submitter = subprocess.Popen(
        beating(clusterkit), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert submitter.stdout is not None
    run = api.get(submitter.stdout.readline().strip())
    all_ready(run, 1)
    submitter.send_signal(signal.SIGINT)
    submitter.communicate(timeout=SOON)
    assert submitter.returncode == 130
    assert run.status().state is State.CANCELLED


@pytest.mark.parametrize(
    "phase",
    ["clusterkit.jobfile.loader.job_from_command", "clusterkit.jobfile.loader.read_cluster",
     "clusterkit.backends.local.backend.LocalBackend.probe",
     "clusterkit.backends.local.backend.LocalBackend.plan",
     "clusterkit.run.folder.RunFolder.save_plan", "clusterkit.lifecycle.supervise.spawn"],
)  # fmt: skip
def test_ctrl_c_before_start_leaves_no_run_folder(
    monkeypatch: pytest.MonkeyPatch, own_home: Path, phase: str
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(phase, interrupted)
    with pytest.raises(KeyboardInterrupt):
        api.submit(["python", str(PROGRAMS / "environment.py")], settings=["launcher=forkserver"])
    assert list((own_home / "runs").glob("*") if own_home.exists() else []) == []


def test_ctrl_c_during_supervisor_start_leaves_no_run_or_process(
    monkeypatch: pytest.MonkeyPatch, own_home: Path
) -> None:
    from clusterkit.lifecycle import supervise

    spawn = supervise.spawn
    folders = []

    def spawn_then_interrupted(folder: RunFolder, lock: IO[bytes], **_: object) -> None:
        spawn(folder, lock)
        folders.append(folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(supervise, "spawn", spawn_then_interrupted)
    with pytest.raises(KeyboardInterrupt):
        api.submit(["python", str(PROGRAMS / "tick.py"), "6000"], settings=["launcher=forkserver"])
    assert list((own_home / "runs").iterdir()) == []
    assert agent.processes_of(str(folders[0].path)) == []


# ---------------------------------------------------------------- ports, and several at once


def test_port_taken_after_planning_is_replaced_and_recorded(submit: Submit) -> None:
    facts = backends.backend("local").probe(LocalCluster(), LocalTransport())
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        taken = squatter.getsockname()[1]
        run = submit("beat.py", 2, nodes=2, facts=msgspec.structs.replace(facts, port=taken))
        assert run.wait(SOON).state is State.SUCCEEDED
    (event,) = run.events()
    assert event.text == f"port {taken} was taken meanwhile; {run.plan.port} chosen instead"
    assert run.plan.port != taken
    assert noted(run.plan, "master_port") == str(run.plan.port)


def test_submit_refuses_occupied_port_of_cluster_entry(tmp_path: Path, own_home: Path) -> None:
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        taken = squatter.getsockname()[1]
        clusters = tmp_path / "clusters.yaml"
        clusters.write_text(f"here: {{backend: local, port: {taken}}}\n")
        with pytest.raises(PortTaken, match=f"port {taken} on 127.0.0.1 is in use"):
            api.submit(
                ["python", str(PROGRAMS / "environment.py")], cluster="here",
                clusters_file=clusters,
            )  # fmt: skip
    assert not own_home.exists()


def test_concurrent_submits_get_different_run_ids_and_ports(submit: Submit) -> None:
    with ThreadPoolExecutor() as pool:
        runs = list(pool.map(lambda _: submit("tick.py", 2, nodes=2), range(4)))
    assert len({run.id for run in runs}) == 4
    assert [run.wait(SOON).state for run in runs] == [State.SUCCEEDED] * 4
    assert len({run.plan.port for run in runs}) == 4
