"""Local runs that fail, restart and shrink."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from clusterkit import agent, api
from clusterkit.run.status import State
from clusterkit.spec import BatchSpec
from tests.live.local import (
    PROGRAMS,
    SOON,
    Submit,
    agent_pid,
    all_ready,
    kill,
    needs_mpirun,
    rank_pid,
)

QUIET = {"OMPI_MCA_orte_execute_quiet": "1"}
"""Has mpirun keep to itself which rank failed; now and then it does so unasked."""
pytestmark = pytest.mark.live


# ---------------------------------------------------------------- failures


EXCEPTION = ("exception", 1, "ValueError: boom é")
EXIT = ("exit", 7, "exit code 7; last output: about to leave")


@pytest.mark.parametrize(
    ("launcher", "how", "code", "cause"),
    [
        ("torchrun", *EXCEPTION), ("forkserver", *EXCEPTION), ("forkserver", *EXIT),
        ("deepspeed", *EXIT), ("mpirun", *EXIT),
        # An exception is the rank's to report, whatever has started it.
        pytest.param("deepspeed", *EXCEPTION, marks=pytest.mark.thorough),
        pytest.param("mpirun", *EXCEPTION, marks=pytest.mark.thorough),
        pytest.param("torchrun", *EXIT, marks=pytest.mark.thorough),
    ],
)  # fmt: skip
def test_status_names_failed_rank_and_returns_its_exit_code(
    submit: Submit, launcher: str, how: str, code: int, cause: str
) -> None:
    if launcher == "mpirun":
        needs_mpirun()
    # Each deepspeed imports itself for 6 s: `make thorough` has two.
    nodes = 1 if launcher == "deepspeed" else 2
    options = {"nodes": nodes, "gpus": 4 // nodes, "launcher": launcher}
    run = submit("fail.py", how, 3, 99, env=QUIET, **options)
    status = run.wait(SOON)
    assert status.state is State.FAILED
    assert status.failure is not None
    assert (status.failure.node, status.failure.rank) == (nodes - 1, 3)
    assert status.failure.cause.startswith(cause)
    assert status.exit_code == status.failure.exit_code == code


def test_submit_blames_rank_that_failed_first_with_one_traceback(
    clusterkit: list[str],
) -> None:
    done = subprocess.run(
        [*clusterkit, "submit", "--nodes", "2", "--set", "launcher=forkserver", "--",
         "python", str(PROGRAMS / "peers.py"), "1"],
        capture_output=True, text=True, timeout=SOON,
    )  # fmt: skip
    assert done.returncode == 1
    assert "rank 1 on node 1 failed first: ValueError: boom é (exit code 1)" in done.stderr
    assert done.stderr.count("Traceback (most recent call last)") == 1


@pytest.mark.parametrize(
    "launcher", ["torchrun", pytest.param("deepspeed", marks=pytest.mark.thorough), "forkserver"]
)
def test_killed_rank_fails_run_with_exit_code_137(submit: Submit, launcher: str) -> None:
    run = submit("beat.py", 6000, nodes=2, launcher=launcher)
    all_ready(run, 2)
    kill(rank_pid(run, 1))
    status = run.wait(SOON)
    assert status.state is State.FAILED
    assert status.failure is not None
    assert (status.failure.node, status.failure.rank) == (1, 1)
    # What else runs on this machine may be out of memory at the time: then that is the guess.
    assert "SIGKILL" in status.failure.cause
    assert status.exit_code == status.failure.exit_code == 137


def test_status_names_rank_killed_under_mpirun(submit: Submit) -> None:
    """Under the other launchers the test above says it."""
    needs_mpirun()
    run = submit("fail.py", "signal", 3, 99, nodes=2, gpus=2, launcher="mpirun", env=QUIET)
    status = run.wait(SOON)
    assert status.failure is not None
    assert (status.failure.node, status.failure.rank, status.exit_code) == (1, 3, 137)
    # What else runs on this machine may be out of memory at the time: then that is the guess.
    assert "SIGKILL" in status.failure.cause


@pytest.mark.parametrize("launcher", ["torchrun", "forkserver"])
def test_killed_agent_fails_run(submit: Submit, launcher: str) -> None:
    run = submit("tick.py", 6000, nodes=2, launcher=launcher)
    all_ready(run, 2)
    kill(agent_pid(run, 1))
    status = run.wait(SOON)
    assert status.state is State.FAILED
    assert status.nodes[1].reason is not None
    assert status.nodes[1].reason.startswith("SIGKILL: the agent was killed from outside")


def test_killed_torchrun_launcher_fails_run(submit: Submit) -> None:
    run = submit("tick.py", 6000, nodes=2, launcher="torchrun")
    all_ready(run, 2)
    (launcher,) = (pid for pid in agent.descendants(agent_pid(run, 1)) if pid != rank_pid(run, 1))
    kill(launcher)
    status = run.wait(SOON)
    assert status.state is State.FAILED
    assert status.nodes[1].exit_code == 137


def test_missing_program_fails_run_with_exit_code_127(submit: Submit, tmp_path: Path) -> None:
    script = tmp_path / "go"  # one that is missing itself is refused before the start
    script.write_text("#!/no/such/program\n")
    script.chmod(0o755)
    run = api.submit([str(script)], settings=["launcher=forkserver"])
    status = run.wait(SOON)
    assert status.failure is not None
    assert status.exit_code == 127
    assert str(script) in status.failure.cause


# ---------------------------------------------------------------- restarts


def test_failed_run_restarts_and_records_event(submit: Submit) -> None:
    run = submit("fail.py", "exception", 1, 1, nodes=2, restarts=2)
    status = run.wait(SOON)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 2)
    (event,) = run.events()
    assert event.text == (
        "attempt 1 failed: rank 1 on node 1: ValueError: boom é; starting again, 1 restart left"
    )
    assert {line.attempt for line in run.logs()} == {1, 2}


def test_run_fails_when_restarts_are_used_up(submit: Submit) -> None:
    run = submit("fail.py", "exit", 0, 99, restarts=2, retry_on=(7,))
    status = run.wait(SOON)
    assert (status.state, status.attempt, status.exit_code) == (State.FAILED, 3, 7)


def test_run_that_fails_at_start_twice_is_not_restarted_again(submit: Submit) -> None:
    run = submit("fail.py", "exit", 0, 99, restarts=9)
    status = run.wait(SOON)
    assert (status.state, status.attempt, status.exit_code) == (State.FAILED, 2, 7)


@pytest.mark.thorough
def test_shrink_continues_with_remaining_nodes(submit: Submit, tmp_path: Path) -> None:
    program = tmp_path / "world.py"
    program.write_text(
        "import os, time\nprint('ready', *map(os.environ.get, ('RANK', 'WORLD_SIZE',"
        "'GROUP_RANK', 'GROUP_WORLD_SIZE', 'CLUSTERKIT_GLOBAL_BATCH')), flush=True)\n"
        "time.sleep(600 if os.environ['WORLD_SIZE'] == '3' else 0)\n"
    )
    batch = BatchSpec(global_size=12)
    run = submit(str(program), nodes="2:3", on_node_loss="shrink", batch=batch)
    all_ready(run, 3)
    kill(agent_pid(run, 1))
    status = run.wait(SOON)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 1)
    said = {(line.node, line.text) for line in run.logs() if line.text.startswith("ready")}
    assert {words for words in said if words[1].split()[2] == "2"} == {
        (0, "ready 0 2 0 2 12"), (2, "ready 1 2 1 2 12"),
    }  # fmt: skip
    assert run.events()[-1].text == "1 of 3 elastic nodes failed"


SAVES = """
import os, pathlib, signal, sys, time
def save(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
begun, world = pathlib.Path(os.environ["CLUSTERKIT_NODE_DIR"], "begun"), os.environ["WORLD_SIZE"]
print("ready", os.environ["RANK"], world, flush=True)
again = world == "3" and begun.exists()
begun.touch()
while not again:
    time.sleep(0.05)
"""


@pytest.mark.thorough
def test_lost_node_is_restarted_and_rejoins_elastic_run(submit: Submit, tmp_path: Path) -> None:
    program = tmp_path / "saves.py"
    program.write_text(SAVES)
    clusters = tmp_path / "clusters.yaml"
    clusters.write_text("few: {backend: local, stop_grace: 1}\n")
    few = {"cluster": "few", "clusters_file": clusters}
    run = submit(str(program), nodes="2:3", on_node_loss="shrink", **few)
    all_ready(run, 3)
    kill(agent_pid(run, 1))
    status = run.wait(2 * SOON)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 1)
    assert [node.state for node in status.nodes] == [State.SUCCEEDED] * 3
    said = [(line.node, line.text) for line in run.logs() if line.text.startswith("ready")]
    assert sorted(said[-3:]) == [(n, f"ready {n} 3") for n in range(3)]
    # On a busy machine it may be back before the others have missed it.
    if smaller := said[3:-3]:
        assert sorted(smaller) == [(0, "ready 0 2"), (2, "ready 1 2")]
        text = [line.text for line in run.logs() if line.node == 0]
        came = text.index("node 1 can join; the ranks save their work and end")
        assert text[came:].index("saved") < text[came:].index("ready 0 3")
    assert [event.text for event in run.events()] == [
        "node 1 was started again, to join the others"
    ]
    assert not (run.path / "token").exists()


# ---------------------------------------------------------------- elastic


@pytest.mark.thorough  # in test_programs.py one goes on and has its node back
def test_elastic_torchrun_continues_without_lost_node(submit: Submit) -> None:
    run = submit("beat.py", 40, nodes="1:2", launcher="torchrun")
    all_ready(run, 2)
    for pid in (agent_pid(run, 1), rank_pid(run, 1)):
        kill(pid)
    alone = next(line for line in run.logs(follow=True, node=0) if line.text == "beat 39 1")
    assert alone.rank == 0
    status = run.wait(SOON)
    assert status.state is State.SUCCEEDED
    assert [node.state for node in status.nodes] == [State.SUCCEEDED, State.FAILED]


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_exception_in_rank_ends_elastic_run_without_restart(submit: Submit, rank: int) -> None:
    run = submit("raises.py", rank, nodes="1:2", launcher="torchrun")
    status = run.wait(4 * SOON)
    assert status.state is State.FAILED
    assert status.failure is not None
    assert "ValueError: always" in status.failure.cause
    assert len([line for line in run.logs() if line.text.startswith("begin")]) == 2
