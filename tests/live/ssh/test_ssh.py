"""Real runs on real SSH hosts: submitted, watched, broken on purpose, and gone afterwards."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterkit import api, backends
from clusterkit.agent import limits
from clusterkit.backends.ssh import transport as ssh
from clusterkit.backends.ssh.config import HostUnreachable
from clusterkit.backends.ssh.known_hosts import HostKeyProblem
from clusterkit.errors import BadInput, ClusterkitError, SubmitFailed, Unavailable
from clusterkit.run.status import RunStatus, State
from tests.conftest import noted
from tests.lab import Lab
from tests.live import inside, supervisors

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

TICK = """
import os, sys, time
print("hello from", os.environ["RANK"], os.uname().nodename, flush=True)
for number in range(int(sys.argv[1])):
    time.sleep(0.1)
print("done", flush=True)
"""
SOON = 15.0
"""Seconds within which a failed run must have ended: 10 are promised, the machine is shared."""
Submit = Callable[..., api.Run]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of its own, the current folder; a home and a cluster file besides."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "tick.py").write_text(TICK)
    monkeypatch.setenv("CLUSTERKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CLUSTERKIT_CLUSTERS", str(tmp_path / "clusters.yaml"))
    monkeypatch.chdir(project)
    return project


def describe(lab: Lab, **fields: object) -> str:
    """Write the cluster file for a lab; gives the cluster's name."""
    entry = {
        "backend": "ssh", "inventory": str(lab.inventory), "lost_after": 4, "connect_timeout": 5,
        "stop_grace": 2, **fields,
    }  # fmt: skip
    Path(os.environ["CLUSTERKIT_CLUSTERS"]).write_text(json.dumps({"lab": entry}))
    return "lab"


@pytest.fixture
def submit(lab: Lab) -> Iterator[Submit]:
    """``submit(600, nodes=2)``: ranks that tick for so long; ended and removed with the test."""
    started: list[api.Run] = []

    def start(ticks: int = 600, *, settings: tuple[str, ...] = (), **options: object) -> api.Run:
        if not Path(os.environ["CLUSTERKIT_CLUSTERS"]).exists():
            describe(lab)
        Path("job.yaml").write_text(
            f"program: tick.py\nargs: ['{ticks}']\nlauncher: forkserver\nnodes: 2\n"
        )
        run = api.submit(
            "job.yaml", cluster="lab", settings=settings, **{"doctor": False, **options}
        )
        started.append(run)
        return run

    yield start
    lab.repair()
    for run in (run for run in started if run.path.exists()):
        run.cancel()
        for host in lab.hosts:
            assert processes(lab, host.name, run) == []


def on(lab: Lab, host: str, script: str) -> subprocess.CompletedProcess[str]:
    """Run a line of shell on a host."""
    return lab.ssh(host, "sh", "-c", script)


def processes(lab: Lab, host: str, run: api.Run) -> list[str]:
    """Process ids on a host that belong to a run."""
    variable = f"CLUSTERKIT_RUN_DIR={run.plan.run_dir}"
    script = f"grep --files-with-matches -szxF '{variable}' /proc/[0-9]*/environ; true"
    done = on(lab, host, script)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def agent_pid(run: api.Run, node: int) -> int:
    path = run.path / "attempts" / "1" / f"node-{node}" / "started.json"
    return int(json.loads(path.read_text())["pid"])


def rank_pid(run: api.Run, node: int) -> int:
    path = run.path / "attempts" / "1" / f"node-{node}" / "ranks.jsonl"
    return int(json.loads(path.read_text().splitlines()[0])["pid"])


def saying(run: api.Run, text: str, times: int) -> None:
    """Return once ``text`` stands in the run's log so often."""
    found = 0
    for line in run.logs(follow=True):
        found += text in line.text
        if found == times:
            return
    raise AssertionError(f"the run ended: {run.status()}")


def ended(run: api.Run, seconds: float = 60.0) -> tuple[RunStatus, float]:
    """The last status, and after how many seconds it was there."""
    began = time.monotonic()
    return run.wait(seconds), time.monotonic() - began


# ---------------------------------------------------------------- runs that go well


def test_project_that_contains_clusterkit_home_runs(
    submit: Submit, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As when it is started from $HOME: the run's own folder is written while the rest is copied.
    monkeypatch.setenv("CLUSTERKIT_HOME", str(place / ".clusterkit"))
    run = submit(1)
    assert run.wait().state is State.SUCCEEDED
    assert run.plan.trees[0].what.startswith("2 files, ")


def test_ranks_run_on_their_hosts_and_logs_return_their_lines(submit: Submit) -> None:
    run = submit(1)
    status, _ = ended(run)
    assert status.state is State.SUCCEEDED
    assert [(node.node, node.host, node.exit_code) for node in status.nodes] == [
        (0, "h0", 0),
        (1, "h1", 0),
    ]
    lines = {(line.node, line.rank, line.text) for line in run.logs()}
    assert {(0, 0, "hello from 0 h0"), (1, 1, "hello from 1 h1"), (1, 1, "done")} <= lines
    assert [line.text for line in run.logs(rank=1)] == ["hello from 1 h1", "done"]


def test_delete_removes_run_folder_from_hosts(submit: Submit, lab: Lab) -> None:
    run = submit(1)
    ended(run)
    folder = run.plan.run_dir
    assert on(lab, "h1", f"test -d {folder}").returncode == 0
    run.delete()
    assert not run.path.exists()
    for host in lab.hosts:
        assert on(lab, host.name, f"test -e {folder}").returncode == 1


def test_submit_copies_uncommitted_files_but_not_ignored_files(
    submit: Submit, lab: Lab, place: Path
) -> None:
    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *words], check=True, capture_output=True)

    git("init", "-q")
    (place / ".gitignore").write_text("*.bin\n")
    (place / "big.bin").write_bytes(bytes(10))
    (place / "kept.txt").write_text("first")
    git("add", ".")
    git("commit", "-qm", "x")
    (place / "kept.txt").write_text("second, not committed")
    (place / "new.txt").write_text("never added")
    first = submit(1)
    ended(first)
    folder = first.plan.trees[0].path
    shown = on(lab, "h1", f"cd {folder} && cat kept.txt new.txt && ls -A").stdout
    assert "second, not committed" in shown
    assert "never added" in shown
    assert "big.bin" not in shown
    (place / "kept.txt").write_text("third")
    second = submit(1)
    ended(second)
    assert second.plan.trees[0].path != folder
    # The tree of the first run is as it was.
    assert on(lab, "h1", f"cat {folder}/kept.txt").stdout == "second, not committed"
    inode = "stat -c %i " + " ".join(f"{r.plan.trees[0].path}/new.txt" for r in (first, second))
    one, other = on(lab, "h1", inode).stdout.split()
    assert one == other, "a file that had not changed was sent again"


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "mpirun"])
def test_every_launcher_starts_ranks_on_all_hosts(
    submit: Submit, lab: Lab, launcher: str, place: Path
) -> None:
    describe(lab, stop_grace=10, lost_after=30)
    (place / "tick.py").write_text(
        "import os\nprint('rank', *(os.environ[k] for k in "
        "('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'NODE_RANK')), os.uname().nodename, flush=True)\n"
    )
    run = submit(1, gpus=2, settings=(f"launcher={launcher}",))
    status, _ = ended(run, 90)
    assert status.state is State.SUCCEEDED, list(run.logs())
    told = sorted((x.rank, x.text) for x in run.logs() if x.text.startswith("rank "))
    assert told == [
        (0, "rank 0 4 0 0 h0"),
        (1, "rank 1 4 1 0 h0"),
        (2, "rank 2 4 0 1 h1"),
        (3, "rank 3 4 1 1 h1"),
    ]


def test_status_names_failed_rank_of_silent_mpirun(submit: Submit, lab: Lab, place: Path) -> None:
    describe(lab, stop_grace=10, lost_after=30)
    (place / "tick.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '3':\n    sys.exit(7)\ntime.sleep(600)\n"
    )
    quiet = "env={OMPI_MCA_orte_execute_quiet: '1'}"
    run = submit(1, gpus=2, settings=("launcher=mpirun", quiet))
    failure = ended(run, 60)[0].failure
    assert failure is not None
    assert (failure.node, failure.rank, failure.exit_code) == (1, 3, 7)
    assert [line for line in run.logs() if "process" in line.text] == []


def test_elastic_torchrun_uses_both_hosts(submit: Submit, lab: Lab, place: Path) -> None:
    describe(lab, stop_grace=10, lost_after=30)
    (place / "tick.py").write_text(
        "import os\nprint('world', os.environ['WORLD_SIZE'], os.uname().nodename, flush=True)\n"
    )
    run = submit(1, nodes="1:2", settings=("launcher=torchrun",))
    status, _ = ended(run, 90)
    assert status.state is State.SUCCEEDED, list(run.logs())
    told = {line.text for line in run.logs() if line.text.startswith("world ")}
    assert told == {"world 2 h0", "world 2 h1"}


def test_secret_reaches_ranks_but_no_file_or_command_line(
    submit: Submit, lab: Lab, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = f"hunter2-{secrets.token_hex(8)}"
    monkeypatch.setenv("API_TOKEN", token)
    (place / "tick.py").write_text(
        "import os, time\nprint(len(os.environ['API_TOKEN']), flush=True)\ntime.sleep(60)\n"
    )
    run = submit(1, settings=("secrets=[API_TOKEN]",))
    saying(run, str(len(token)), 2)
    hidden = token[:7] + "[" + token[7] + "]" + token[8:]  # so that grep does not find itself
    for host in lab.hosts:
        found = on(
            lab, host.name, f"cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c '{hidden}'"
        ).stdout
        assert found.strip() == "0"
        assert on(lab, host.name, f"grep -rl '{hidden}' /root/clusterkit").stdout == ""
    assert not [
        path for path in run.path.rglob("*") if path.is_file() and token in path.read_text()
    ]


# ---------------------------------------------------------------- runs that are broken on purpose


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


# ---------------------------------------------------------------- hosts that are not fit


def refused(submit: Submit, kind: type[ClusterkitError], **options: object) -> str:
    """What a submit says that is refused; nothing of the run was found."""
    with pytest.raises(kind) as error:
        submit(**options)
    assert api.runs() == []
    return str(error.value)


def test_submit_refuses_host_that_is_down(submit: Submit, lab: Lab) -> None:
    lab.fault("crash", "h1")
    said = refused(submit, HostUnreachable)
    assert "host h1" in said
    assert "is sshd running there?" in said


def test_submit_refuses_changed_host_key_with_both_fingerprints(submit: Submit, lab: Lab) -> None:
    lab.fault("new-host-key", "h1")
    said = refused(submit, HostKeyProblem)
    assert "host h1" in said
    assert "its host key has changed" in said
    assert said.count("SHA256:") == 2
    assert "ssh-keygen -R" in said


def test_submit_refuses_unknown_host_key(submit: Submit, lab: Lab, tmp_path: Path) -> None:
    empty = tmp_path / "known_hosts"
    empty.write_text("")
    hosts = [
        {
            "name": host.name, "address": host.address, "user": "root", "identity": str(lab.key),
            "known_hosts": str(empty), "python": sys.executable,
        }
        for host in lab.hosts
    ]  # fmt: skip
    entry = {"lab": {"backend": "ssh", "hosts": hosts}}
    Path(os.environ["CLUSTERKIT_CLUSTERS"]).write_text(json.dumps(entry))
    said = refused(submit, HostKeyProblem)
    assert "host key verification failed: its key is not known" in said
    assert f"ssh-keyscan {lab.hosts[0].address} >>{empty}" in said


def test_submit_refuses_full_disk_and_leaves_no_partial_copy(submit: Submit, lab: Lab) -> None:
    lab.fault("full-disk", "h1")
    said = refused(submit, SubmitFailed)
    assert "host h1" in said
    assert "No space left on device" in said
    listing = on(lab, "h1", "find /root/clusterkit -name '.*.*' -type d 2>/dev/null").stdout
    assert listing == ""


def test_plan_notes_torch_version_that_differs_between_hosts(submit: Submit, lab: Lab) -> None:
    lab.fault("versions", "h1")
    run = submit(1)
    remarks = [str(note) for note in run.plan.notes if not note.name]
    assert any("the hosts differ in torch" in remark for remark in remarks), remarks
    ended(run)


def test_submit_refuses_missing_python_of_cluster_entry(submit: Submit, lab: Lab) -> None:
    describe(lab, python="/nowhere/python", inventory=str(lab.hostfile))
    said = refused(submit, ClusterkitError)
    assert "/nowhere/python" in said or "host key" in said or "Permission denied" in said


def test_submit_uses_job_python_and_refuses_missing_one(submit: Submit) -> None:
    for doctor in (True, False):
        said = refused(submit, ClusterkitError, settings=["python=/nowhere/python"], doctor=doctor)
        assert "/nowhere/python" in said
    run = submit(2, settings=("python=/usr/bin/python3",))
    assert ended(run)[0].state is State.SUCCEEDED
    assert noted(run.plan, "python") == "/usr/bin/python3"


def test_submit_refuses_more_nodes_than_hosts(submit: Submit) -> None:
    said = refused(submit, BadInput, nodes=3)
    assert "nodes: 3 needed, the cluster has 2 hosts (h0, h1)" in said


def test_include_and_exclude_choose_hosts(submit: Submit) -> None:
    run = submit(1, nodes=1, include="h1")
    assert ended(run)[0].nodes[0].host == "h1"
    run = submit(1, nodes=1, exclude="h0")
    assert ended(run)[0].nodes[0].host == "h1"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda key: key.unlink(), "does not exist"),
        (lambda key: key.chmod(0o644), "can be read by others (mode 0644)"),
        (lambda key: key.write_text("no key\n"), "is not a private key"),
        (
            lambda key: subprocess.run(
                ["ssh-keygen", "-p", "-q", "-N", "secret", "-P", "", "-f", str(key)], check=True
            ),
            "is protected by a passphrase",
        ),
    ],
    ids=["missing", "permissions", "garbage", "passphrase"],
)
def test_submit_explains_unusable_private_key(
    submit: Submit,
    lab: Lab,
    tmp_path: Path,
    spoil: Callable[[Path], object],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    key = tmp_path / "key"
    key.write_bytes(lab.key.read_bytes())
    key.chmod(0o600)
    inventory = tmp_path / "inventory.yaml"
    inventory.write_text(lab.inventory.read_text().replace(str(lab.key), str(key)))
    describe(lab, inventory=str(inventory))
    spoil(key)
    said = refused(submit, Unavailable)
    assert words in said
    assert "host h0" in said


def behind_jump_host(lab: Lab, tmp_path: Path) -> None:
    """Write the cluster file for a lab whose second host is reached through its first.

    User, HostName, IdentityFile, UserKnownHostsFile and ProxyJump, all from ssh_config.
    """
    config = tmp_path / "ssh_config"
    common = (
        f"  User root\n  IdentityFile {lab.key}\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {lab.known_hosts}\n"
    )
    config.write_text(
        f"Host first\n  HostName {lab.hosts[0].address}\n{common}"
        f"Host behind\n  HostName {lab.hosts[1].address}\n  ProxyJump first\n{common}"
    )
    hosts = [
        {"name": name, "ssh_config": str(config), "python": sys.executable}
        for name in ("first", "behind")
    ]
    entry = {"lab": {"backend": "ssh", "hosts": hosts}}
    Path(os.environ["CLUSTERKIT_CLUSTERS"]).write_text(json.dumps(entry))


def test_ssh_config_with_proxy_jump_is_honoured(submit: Submit, lab: Lab, tmp_path: Path) -> None:
    behind_jump_host(lab, tmp_path)
    run = submit(1)
    status, _ = ended(run)
    assert status.state is State.SUCCEEDED
    assert {line.text for line in run.logs()} >= {"hello from 0 h0", "hello from 1 h1"}


def test_run_succeeds_despite_greeting_of_login_shell(submit: Submit, lab: Lab) -> None:
    bashrc = lab.root("h1") / "root" / ".bashrc"
    before = bashrc.read_text()
    bashrc.write_text("echo welcome to h1; echo and mind the step >&2\n")
    try:
        run = submit(1)
        assert ended(run)[0].state is State.SUCCEEDED
    finally:
        bashrc.write_text(before)


def test_transport_reuses_connection_to_host(lab: Lab) -> None:
    describe(lab)
    cluster = api.resolved_cluster("lab")
    transport = backends.transport_for(cluster)
    first = transport.connection("h0")
    for _ in range(5):
        assert transport.run("h0", ["true"], timeout=30).exit_code == 0
    assert transport.connection("h0") is first
    transport.close()
    assert not first.is_active()


def test_commands_inside_run_on_hosts_one_behind_jump_host(
    submit: Submit, lab: Lab, tmp_path: Path
) -> None:
    behind_jump_host(lab, tmp_path)
    run = submit(100_000)
    saying(run, "hello", 2)
    inside.exec_works(run)
    inside.files_are_copied(run, tmp_path)
    inside.port_is_forwarded(run)
    run.cancel()
    inside.refused_after_end(run)
