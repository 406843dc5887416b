"""Runs on SSH hosts that are broken on purpose."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from clusterkit import api
from clusterkit.agent import limits
from clusterkit.backends.ssh import transport as ssh
from clusterkit.run.status import State
from tests.lab import Lab
from tests.live import supervisors
from tests.live.ssh.runs.running import Submit, describe, ended, on, processes, saying

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
SOON = 15.0
"""Seconds within which a failed run must have ended: 10 are promised, the machine is shared."""


def agent_pid(run: api.Run, node: int) -> int:
    path = run.path / "attempts" / "1" / f"node-{node}" / "started.json"
    return int(json.loads(path.read_text())["pid"])


def rank_pid(run: api.Run, node: int) -> int:
    path = run.path / "attempts" / "1" / f"node-{node}" / "ranks.jsonl"
    return int(json.loads(path.read_text().splitlines()[0])["pid"])


def test_killed_rank_is_named_and_ends_other_ranks(submit: Submit, lab: Lab) -> None:
    run = submit()
    saying(run, "hello", 2)
    on(lab, "h1", f"kill -9 {rank_pid(run, 1)}")
    status, seconds = ended(run)
    assert (status.state, status.exit_code) == (State.FAILED, 137)
    assert status.failure is not None
    assert (status.failure.node, status.failure.rank) == (1, 1)
    assert "SIGKILL" in status.failure.cause
    assert seconds < SOON
    assert processes(lab, "h0", run) == []


def test_killed_agent_is_named_and_ends_all_ranks(submit: Submit, lab: Lab) -> None:
    run = submit()
    saying(run, "hello", 2)
    on(lab, "h1", f"kill -9 {agent_pid(run, 1)}")
    status, seconds = ended(run)
    assert status.state is State.FAILED
    assert status.failure is not None
    assert status.failure.node == 1
    assert "SIGKILL: the agent was killed from outside" in status.failure.cause
    assert seconds < SOON
    for host in lab.hosts:
        assert processes(lab, host.name, run) == []


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("crash", "refuses connections"),
        ("cut", "answer"),
        pytest.param("freeze", "answer", marks=pytest.mark.thorough),
    ],
)
def test_lost_host_is_named_and_cleaned_by_cancel_after_its_return(
    submit: Submit, lab: Lab, fault: str, words: str
) -> None:
    run = submit()
    saying(run, "hello", 2)
    lab.fault(fault, "h1")
    status, _ = ended(run, 90)
    assert status.state is State.FAILED
    assert status.failure is not None
    assert status.failure.node == 1
    assert "host h1" in status.failure.cause
    assert re.search(words, status.failure.cause)
    assert "no answer for" in status.failure.cause
    assert "--exclude h1" in (status.failure.hint or "")
    assert processes(lab, "h0", run) == []
    assert f"clusterkit cancel {run.id}" in (status.remark or "")
    lab.repair()
    again = run.cancel()
    assert (again.state, again.remark) == (State.FAILED, None)
    assert processes(lab, "h1", run) == []


ALONE = """
import os, time
port, world = f"{int(os.environ['MASTER_PORT']) + 1:04X}", os.environ["WORLD_SIZE"]
def met():
    rows = [line.split() for line in open("/proc/net/tcp")]
    return any(row[3] == "01" and port in (row[1][-4:], row[2][-4:]) for row in rows[1:])
while world == "2" and not met():  # a node that the others never saw is not one that they lose
    time.sleep(0.05)
print("world", world, flush=True)
time.sleep(600 if world == "2" else 0)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("fault", ["crash", "cut"])
def test_shrink_continues_on_remaining_host(
    submit: Submit, lab: Lab, place: Path, fault: str
) -> None:
    (place / "tick.py").write_text(ALONE)
    run = submit(1, nodes="1:2", settings=("on_node_loss=shrink",))
    saying(run, "world 2", 2)
    lab.fault(fault, "h1")
    status, _ = ended(run, 90)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 1)
    assert [line.node for line in run.logs() if line.text == "world 1"] == [0]
    assert run.events()[-1].text == "1 of 2 elastic nodes failed"
    lab.repair()
    assert processes(lab, "h1", run) == []  # it has ended its ranks by itself


JOINS = ALONE.replace(
    'time.sleep(600 if world == "2" else 0)',
    'begun = os.environ["CLUSTERKIT_NODE_DIR"] + "/begun"\n'
    'again = world == "2" and os.path.exists(begun)\nopen(begun, "w").close()\n'
    "time.sleep(0 if again else 600)",
)


@pytest.mark.thorough
@pytest.mark.parametrize("fault", ["crash", "cut"])
def test_shrunk_run_takes_returned_host_back(
    submit: Submit, lab: Lab, place: Path, fault: str
) -> None:
    (place / "tick.py").write_text(JOINS)
    run = submit(1, nodes="1:2", settings=("on_node_loss=shrink",))
    saying(run, "world 2", 2)
    lab.fault(fault, "h1")
    saying(run, "world 1", 1)
    lab.repair()
    status, _ = ended(run, 90)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 1)
    assert [node.state for node in status.nodes] == [State.SUCCEEDED] * 2
    said = [(line.node, line.text) for line in run.logs() if line.text.startswith("world")]
    assert sorted(said[:2]) == sorted(said[3:]) == [(0, "world 2"), (1, "world 2")]
    assert said[2] == (0, "world 1")
    assert run.events()[-1].text == "node 1 was started again, to join the others"
    assert all(processes(lab, host.name, run) == [] for host in lab.hosts)


TWICE = """
import os, pathlib, time
folder, host = pathlib.Path(os.environ["CLUSTERKIT_NODE_DIR"]), os.uname().nodename
print("rank", os.environ["RANK"], "on", host, flush=True)
again = host == "h2" or (folder / "begun").exists()
(folder / "begun").touch()
time.sleep(0 if again else 600)
"""


@pytest.mark.thorough
def test_spare_host_takes_rank_of_killed_agent(submit: Submit, lab4: Lab, place: Path) -> None:
    describe(lab4, stop_grace=1)
    (place / "tick.py").write_text(TWICE)
    run = submit(1, settings=("spares=1",))
    saying(run, "rank", 2)
    deadline = time.monotonic() + 60
    while [node.reason for node in run.status().nodes] != [None, None, "a spare"]:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    on(lab4, "h1", f"kill -9 {agent_pid(run, 1)}")
    status, _ = ended(run, 90)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 1)
    said = {(line.node, line.text) for line in run.logs() if line.text.startswith("rank")}
    assert said == {(0, "rank 0 on h0"), (1, "rank 1 on h1"), (2, "rank 1 on h2")}
    assert all(processes(lab4, host.name, run) == [] for host in lab4.hosts)


SECOND = """
import os, time
print("rank", os.environ["RANK"], "on", os.uname().nodename, flush=True)
time.sleep(600 if os.environ["CLUSTERKIT_ATTEMPT"] == "1" else 0)
"""


@pytest.mark.thorough
def test_loss_of_node_0_host_restarts_on_spare_without_using_restart(
    submit: Submit, lab4: Lab, place: Path
) -> None:
    describe(lab4, stop_grace=1)
    (place / "tick.py").write_text(SECOND)
    run = submit(1, settings=("spares=1",))
    saying(run, "rank", 2)
    lab4.fault("crash", "h0")
    status, _ = ended(run, 120)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 2)
    assert "starting again on h1, h2, which uses no restart" in [e.text for e in run.events()]
    said = {(line.node, line.text) for line in run.logs() if line.text.startswith("rank")}
    assert said == {
        (0, "rank 0 on h0"), (1, "rank 1 on h1"), (0, "rank 0 on h1"), (1, "rank 1 on h2"),
    }  # fmt: skip


def test_run_survives_network_cut_shorter_than_lost_after(submit: Submit, lab: Lab) -> None:
    describe(lab, lost_after=60)
    run = submit(100)
    saying(run, "hello", 2)
    lab.fault("cut", "h1")
    deadline = time.monotonic() + 60
    while not any(node.reason for node in run.status().nodes):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    lab.fault("heal", "h1")
    status, _ = ended(run, 90)
    assert status.state is State.SUCCEEDED
    assert [line.text for line in run.logs(rank=1)] == ["hello from 1 h1", "done"]


def test_run_survives_sshd_restart(submit: Submit, lab: Lab) -> None:
    run = submit(60)
    saying(run, "hello", 2)
    lab.fault("restart-sshd", "h1")
    status, _ = ended(run)
    assert status.state is State.SUCCEEDED
    assert "done" in [line.text for line in run.logs(rank=1)]


def test_run_survives_killed_supervisor_and_can_be_attached(submit: Submit) -> None:
    run = submit(100)
    saying(run, "hello", 2)
    supervisors.kill(run)
    status = run.status()
    assert status.state is State.RUNNING
    assert f"clusterkit attach {run.id}" in (status.remark or "")
    api.attach(run.id)
    assert run.status().remark is None
    status, _ = ended(run)
    assert status.state is State.SUCCEEDED
    assert [line.text for line in run.logs(rank=1)] == ["hello from 1 h1", "done"]


@pytest.mark.parametrize("ticks", [50, 150])
def test_run_survives_supervisor_paused_longer_than_lost_after(
    submit: Submit, lab: Lab, ticks: int
) -> None:
    """Neither a run that has ended meanwhile nor one that still runs."""
    run = submit(ticks)
    saying(run, "hello", 2)
    os.kill(supervisors.pid_of(run), signal.SIGSTOP)
    time.sleep(12)  # three times `lost_after`
    if ticks == 50:
        for host in lab.hosts:
            on(
                lab,
                host.name,
                f"until [ -e {run.plan.run_dir}/attempts/1/*/exit.json ]; do :; done",
            )
    os.kill(supervisors.pid_of(run), signal.SIGCONT)
    status, _ = ended(run)
    assert status.state is State.SUCCEEDED, status
    assert run.events() == []
    assert [line.text for line in run.logs(rank=1)] == ["hello from 1 h1", "done"]


def ended_by_its_second_attempt(submit: Submit, place: Path) -> api.Run:
    """A run with one restart whose ranks are up; those of the first attempt do not end."""
    (place / "tick.py").write_text(
        "import os, time\nprint('hello', flush=True)\n"
        "time.sleep(600 if os.environ['CLUSTERKIT_ATTEMPT'] == '1' else 0)\n"
    )
    run = submit(1, settings=("restarts=1",))
    saying(run, "hello", 2)
    return run


def test_attach_restarts_run_that_failed_without_supervisor(
    submit: Submit, lab: Lab, place: Path
) -> None:
    run = ended_by_its_second_attempt(submit, place)
    time.sleep(2 * limits.PEER_SECONDS)  # until the nodes have met
    supervisors.kill(run)
    on(lab, "h1", f"kill -9 {agent_pid(run, 1)}")
    status, _ = ended(run)
    assert status.state is State.FAILED
    assert f"run `clusterkit attach {run.id}` to" in (status.remark or "")
    api.attach(run.id)
    status, _ = ended(run)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 2)
    assert [attempt.failure.node for attempt in status.attempts if attempt.failure] == [1]


def test_killed_rank_is_restarted_without_supervisor(submit: Submit, lab: Lab, place: Path) -> None:
    run = ended_by_its_second_attempt(submit, place)
    supervisors.kill(run)
    on(lab, "h1", f"kill -9 {rank_pid(run, 1)}")
    status, _ = ended(run)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 2)
    said = [(line.attempt, line.node) for line in run.logs() if line.text == "hello"]
    assert sorted(said) == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_status_and_logs_are_complete_after_run_without_supervisor(submit: Submit) -> None:
    """Nobody watches while it ends; later everything is there."""
    run = submit(20)
    saying(run, "hello", 2)
    supervisors.kill(run)
    deadline = time.monotonic() + 60
    while not (status := run.status()).state.final:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert status.state is State.SUCCEEDED
    assert [line.text for line in run.logs(rank=1)] == ["hello from 1 h1", "done"]


@pytest.mark.parametrize(
    ("killed", "node"),
    [
        ("rank", 0),
        ("agent", 1),
        pytest.param("rank", 1, marks=pytest.mark.thorough),
        pytest.param("agent", 0, marks=pytest.mark.thorough),
    ],
)
def test_failure_of_one_node_ends_other_node_without_supervisor(
    submit: Submit, lab: Lab, killed: str, node: int
) -> None:
    run = submit()
    saying(run, "hello", 2)
    time.sleep(2 * limits.PEER_SECONDS)  # until the nodes have met
    supervisors.kill(run)
    pid = rank_pid(run, node) if killed == "rank" else agent_pid(run, node)
    on(lab, f"h{node}", f"kill -9 {pid}")
    began = time.monotonic()
    while not (status := run.status()).state.final:
        assert time.monotonic() - began < 30
        time.sleep(0.2)
    assert status.state is State.FAILED
    assert status.failure is not None
    assert status.failure.node == node
    assert "stopped: " in (status.nodes[1 - node].reason or "")
    for host in lab.hosts:
        assert processes(lab, host.name, run) == []


METRIC = '@clusterkit {"event": "metrics", "step": 1, "loss": 2.0}'


def all_hosts_gone(lab: Lab) -> None:
    for host in lab.hosts:
        lab.fault("crash", host.name)


def test_logs_and_metrics_of_finished_run_need_no_host(
    submit: Submit, lab: Lab, place: Path
) -> None:
    with (place / "tick.py").open("a") as program:
        program.write(f"print({METRIC!r})\n")
    run = submit(1)
    assert ended(run)[0].state is State.SUCCEEDED
    assert on(lab, "h0", f"stat -c %a {run.plan.run_dir}").stdout == "700\n"
    all_hosts_gone(lab)
    for rank in (0, 1):
        texts = [line.text for line in run.logs(rank=rank)]
        assert texts == [f"hello from {rank} h{rank}", "done", METRIC]
    assert api.metrics(run) == [{"step": 1, "loss": 2.0}] * 2


def test_following_run_without_supervisor_needs_one_login_per_host(
    submit: Submit, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = submit(60)
    saying(run, "hello", 2)
    supervisors.kill(run)
    logins = []

    def counted(target: ssh.Target, *args: Any, **options: Any) -> Any:
        logins.append(target.host.name)
        return connect(target, *args, **options)

    connect = ssh.connect
    monkeypatch.setattr(ssh, "connect", counted)
    lines = [line.text for line in run.logs(follow=True)]
    assert (lines.count("done"), len(lines)) == (2, 4)
    assert sorted(logins) == ["h0", "h1"]
    # What has been brought here is not asked for again.
    all_hosts_gone(lab)
    assert [line.text for line in run.logs()] == lines
    assert run.status().state is State.SUCCEEDED


def test_cancel_command_ends_run_without_supervisor(submit: Submit, lab: Lab) -> None:
    run = submit()
    saying(run, "hello", 2)
    supervisors.kill(run)
    done = subprocess.run(
        [sys.executable, "-m", "clusterkit", "cancel", run.id], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"{run.id} CANCELLED\n")
    for host in lab.hosts:
        assert processes(lab, host.name, run) == []


def test_failed_run_with_restarts_succeeds_in_second_attempt(submit: Submit, place: Path) -> None:
    (place / "tick.py").write_text(
        "import os, sys\nfirst = os.environ['CLUSTERKIT_ATTEMPT'] == '1'\n"
        "sys.exit(first and os.environ['RANK'] == '1')\n"
    )
    status, _ = ended(submit(1, settings=("restarts=1",)))
    assert (status.state, status.attempt) == (State.SUCCEEDED, 2)
