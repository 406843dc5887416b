"""Local runs that are cancelled, or whose submitter is killed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from clusterkit import agent, api, backends
from clusterkit.errors import RunNotFound
from clusterkit.run.folder import RunFolder
from clusterkit.run.status import State
from clusterkit.transport import LocalTransport
from tests.live import supervisors
from tests.live.local import PROGRAMS, SOON, Submit, agent_pid, all_ready, kill, rank_pid

START_FEW = (
    "from clusterkit import api; print(api.submit(['sleep', '600'], gpus=40, "
    "settings=['launcher=forkserver']).id)"
)
pytestmark = pytest.mark.live


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("launcher", ["torchrun", "forkserver"])
def test_cancel_ends_all_processes_and_is_repeatable(submit: Submit, launcher: str) -> None:
    run = submit("tick.py", 6000, nodes=2, launcher=launcher)
    all_ready(run, 2)
    assert run.cancel().state is State.CANCELLED
    assert agent.processes_of(str(run.path)) == []
    again = run.cancel()
    assert (again.state, again.exit_code) == (State.CANCELLED, 130)


def test_cancelled_program_that_exits_with_0_is_cancelled(submit: Submit, tmp_path: Path) -> None:
    program = tmp_path / "polite.py"
    program.write_text(
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "print('ready', flush=True)\ntime.sleep(600)\n"
    )
    run = submit(str(program))
    all_ready(run, 1)
    status = run.cancel()
    assert (status.state, status.exit_code) == (State.CANCELLED, 130)


@pytest.mark.parametrize(
    "launcher", ["torchrun", pytest.param("deepspeed", marks=pytest.mark.thorough), "forkserver"]
)
def test_ranks_can_save_during_stop_grace_after_cancel(
    submit: Submit, tmp_path: Path, launcher: str
) -> None:
    program = tmp_path / "saver.py"
    program.write_text(
        "import os, pathlib, signal, time\n"
        "def save(*_):\n"
        # deepspeed's launcher asks each rank again, one after the other: the second only once the
        # first has ended, which began another 6 s for a rank that was a moment later.
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    time.sleep(6)\n"
        "    pathlib.Path('saved-' + os.environ['RANK']).touch()\n"
        "    os._exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(1)\n"
    )
    run = submit(str(program), gpus=2, launcher=launcher)
    all_ready(run, 2)
    assert run.cancel().state is State.CANCELLED
    assert agent.processes_of(str(run.path)) == []
    workdir = Path(json.loads((run.path / "job.json").read_text())["workdir"])
    assert sorted(path.name for path in workdir.glob("saved-*")) == ["saved-0", "saved-1"]
    for path in workdir.glob("saved-*"):
        path.unlink()


def test_node_that_cannot_start_all_ranks_leaves_no_process(submit: Submit) -> None:
    begin = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); {START_FEW}"
    done = subprocess.run([sys.executable, "-c", begin], capture_output=True, text=True)
    run = api.get(done.stdout.strip())
    status = run.wait(SOON)
    assert status.failure is not None
    assert status.failure.cause == "Too many open files"
    assert agent.processes_of(str(run.path)) == []


def test_log_following_ends_when_run_folder_is_deleted(submit: Submit) -> None:
    run = submit("tick.py", 6000)
    all_ready(run, 1)
    supervisors.kill(run)
    backends.backend("local").cancel(RunFolder(run.path).handle(), LocalTransport())
    lines = run.logs(follow=True)
    next(lines)
    shutil.rmtree(run.path)
    assert {line.text.split()[0] for line in lines} <= {"ready", "beat"}
    with pytest.raises(RunNotFound, match="is deleted"):
        run.wait(SOON)


def test_cancel_right_after_submit_ends_run_as_cancelled(submit: Submit) -> None:
    run = submit("tick.py", 6000, nodes=2)
    assert run.cancel().state is State.CANCELLED


def test_cancel_kills_rank_that_ignores_sigterm(submit: Submit, tmp_path: Path) -> None:
    program = tmp_path / "stubborn.py"
    program.write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ready', flush=True)\ntime.sleep(600)\n"
    )
    clusters = tmp_path / "clusters.yaml"
    clusters.write_text("here: {backend: local, stop_grace: 0.5}\n")
    run = submit(str(program), cluster="here", clusters_file=clusters)
    all_ready(run, 1)
    assert run.cancel().state is State.CANCELLED


def test_run_of_killed_supervisor_reports_running_and_can_be_cancelled(
    submit: Submit,
) -> None:
    run = submit("tick.py", 6000, nodes=2)
    all_ready(run, 2)
    supervisors.kill(run)
    status = run.status()
    assert status.state is State.RUNNING
    assert status.remark is not None
    assert "its supervisor is gone" in status.remark
    assert run.cancel().state is State.CANCELLED


def test_status_of_run_without_supervisor_names_failed_rank(submit: Submit) -> None:
    run = submit("beat.py", 6000, nodes=2)
    all_ready(run, 2)
    supervisors.kill(run)
    kill(rank_pid(run, 1))
    status = run.wait(SOON)
    assert status.state is State.FAILED
    assert status.failure is not None
    assert status.failure.rank == 1


@pytest.mark.parametrize("nodes", [1, 2])
def test_killed_rank_is_restarted_by_same_agents_without_supervisor(
    submit: Submit, nodes: int
) -> None:
    run = submit("fail.py", "wait", nodes - 1, 1, nodes=nodes, restarts=2)
    all_ready(run, nodes)
    supervisors.kill(run)
    kill(rank_pid(run, nodes - 1))
    status = run.wait(SOON)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 2)
    for node in range(nodes):
        assert agent_pid(run, node, attempt=2) == agent_pid(run, node)
    assert {line.attempt for line in run.logs()} == {1, 2}


def test_attach_learns_of_restart_that_agents_made_without_supervisor(submit: Submit) -> None:
    run = submit("fail.py", "wait", 1, 2, nodes=2, restarts=2)
    all_ready(run, 2)
    supervisors.kill(run)
    kill(rank_pid(run, 1))
    until(lambda: run.status().attempt == 2)
    assert "its nodes restart failed ranks (1 restart left)" in (run.status().remark or "")
    assert run.attach()
    assert any((line.attempt, line.rank) == (2, 1) for line in run.logs(follow=True))
    kill(rank_pid(run, 1, attempt=2))
    status = run.wait(SOON)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 3)
    assert [attempt.failure and attempt.failure.rank for attempt in status.attempts] == [1, 1]


def test_concurrent_attach_restarts_run_failed_without_supervisor_once(
    submit: Submit, tmp_path: Path
) -> None:
    program = tmp_path / "once.py"
    program.write_text(
        "import os, time\nprint('ready', flush=True)\n"
        "time.sleep(600 if os.environ['CLUSTERKIT_ATTEMPT'] == '1' else 0)\n"
    )
    run = submit(str(program), restarts=1)
    all_ready(run, 1)
    supervisors.kill(run)
    kill(agent_pid(run, 0))
    assert run.wait(SOON).state is State.FAILED
    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(lambda _: run.attach(), range(4))) == 1
    status = run.wait(SOON)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 2)
    assert not run.attach()


def test_run_survives_submit_killed_by_sigkill(clusterkit: list[str]) -> None:
    submitter = subprocess.Popen(
        [*clusterkit, "submit", "--nodes", "2", "--set", "launcher=forkserver", "--",
         "python", str(PROGRAMS / "tick.py"), "6000"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert submitter.stdout is not None
    with submitter.stdout:
        run = api.get(submitter.stdout.readline().strip())
        submitter.kill()
        submitter.wait()
    all_ready(run, 2)
    assert run.status().state is State.RUNNING
    done = subprocess.run(
        [*clusterkit, "cancel", run.id, "--json"], capture_output=True, text=True, timeout=SOON
    )
    assert json.loads(done.stdout)["state"] == "CANCELLED"
    assert agent.processes_of(str(run.path)) == []


def test_submit_that_follows_ends_when_run_is_cancelled_elsewhere(clusterkit: list[str]) -> None:
    submitter = subprocess.Popen(
        [*clusterkit, "submit", "--set", "launcher=forkserver", "--",
         "python", str(PROGRAMS / "tick.py"), "6000"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert submitter.stdout is not None
    with submitter.stdout:
        run = api.get(submitter.stdout.readline().strip())
        all_ready(run, 1)
        run.cancel()
        assert submitter.wait(SOON) == 130
