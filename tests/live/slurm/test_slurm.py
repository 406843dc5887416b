"""Runs on a real Slurm: its daemons, two nodes, this machine's Python."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterkit import agent, api
from clusterkit.run.status import RunStatus, State
from tests.live import inside, parity
from tests.live.parity import Case
from tests.live.slurm.daemons import Slurm

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[3]
Train = Callable[..., api.Run]
STEPS = 10
FOR_EVER = 6000


def beating(run: api.Run, attempt: int = 1) -> RunStatus:
    """Once an attempt's nodes run, and their ranks."""

    def does(status: RunStatus) -> bool:
        running = [node.state for node in status.nodes] == [State.RUNNING] * 2
        begun = all(_ranks_file(run, node, attempt).exists() for node in (0, 1))
        return status.attempt == attempt and running and begun and beats(run) >= attempt

    status = run.wait(120, until=does)
    assert not status.state.final, status
    return status


def beats(run: api.Run) -> int:
    """How often rank 0 has begun."""
    return sum(line.text.startswith("beat 0 ") for line in run.logs())


def ranks(run: api.Run, node: int, attempt: int = 1) -> list[int]:
    """Process ids of a node's ranks."""
    text = _ranks_file(run, node, attempt).read_text()
    return [json.loads(line)["pid"] for line in text.splitlines()]


def _ranks_file(run: api.Run, node: int, attempt: int) -> Path:
    return run.path / f"attempts/{attempt}/node-{node}/ranks.jsonl"


def test_ddp_on_slurm_matches_losses_of_single_rank(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    expected = parity.measure(parity.REFERENCE, steps=STEPS).losses
    found = parity.measure(Case("ddp", 2, 2, parity.MICRO_2), steps=STEPS, cluster="hpc")
    assert len(found.losses) == STEPS
    assert parity.largest_difference(found.losses, expected) <= parity.TOLERANCE


def test_killed_rank_is_restarted_in_same_slurm_job(slurm: Slurm, train: Train) -> None:
    run = train("tick.py", FOR_EVER, restarts=1)
    beating(run)
    jobs = slurm.jobs()
    os.kill(ranks(run, 1)[0], signal.SIGKILL)
    beating(run, attempt=2)
    assert slurm.jobs() == jobs, (run.status(), [line.text for line in run.logs()][-40:])
    (ended,) = run.status().attempts
    assert ended.failure is not None
    assert (ended.failure.node, ended.failure.rank) == (1, 1)
    status = run.cancel()
    assert [node.state for node in status.nodes] == [State.CANCELLED] * 2
    assert status.nodes[0].reason == "stopped on request"  # node 1 may see node 0 go first


def test_scancel_by_hand_ends_run_as_cancelled(slurm: Slurm, train: Train) -> None:
    run = train("tick.py", FOR_EVER, restarts=3)
    beating(run)
    slurm.run("scancel", f"--name={run.id}")
    status = run.wait(60)
    assert status.state is State.CANCELLED
    assert "was cancelled (scancel)" in (status.nodes[0].reason or "")


def test_queued_run_reports_reason_and_succeeds_without_supervisor(
    slurm: Slurm, train: Train
) -> None:
    other = slurm.run("sbatch", "--parsable", "-N2", "--exclusive", "-o/dev/null",
                      "--wrap", "sleep 600").strip()  # fmt: skip
    run = train("tick.py", 5)
    waiting = run.wait(60, until=lambda status: any(node.reason for node in status.nodes))
    assert waiting.state is State.PENDING
    supervisor = json.loads((run.path / "supervisor.json").read_text())["pid"]
    os.kill(supervisor, signal.SIGKILL)
    agent.wait_gone([supervisor], 10)
    slurm.run("scancel", other)
    status = run.wait(60)
    assert status.state is State.SUCCEEDED
    assert [node.exit_code for node in status.nodes] == [0, 0]


def test_plan_output_can_be_submitted_with_sbatch_and_shows_status(
    slurm: Slurm, clusterkit: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the folder that ``plan -o`` wrote; who looks from elsewhere sees it."""
    job = tmp_path / "hello.yaml"
    job.write_text('name: hello\ncommand: [sh, -c, "echo hello from $RANK of $WORLD_SIZE"]\n')
    out = os.environ["CLUSTERKIT_HOME"] + "/runs/hello-plan"
    words = [str(job), "--cluster", "hpc", "--nodes", "2", "--output", out]
    subprocess.run([*clusterkit, "plan", *words], check=True, capture_output=True)
    assert api.get("hello-plan").status().state is State.PENDING
    slurm.run("sbatch", f"{out}/files/slurm.sh")
    slurm.wait(lambda: slurm.jobs() == [], "the job's end")
    assert api.get("hello-plan").status().state is State.SUCCEEDED
    assert len(list(api.get("hello-plan").logs())) == 2
    logs = [Path(out, f"attempts/1/node-{node}/log").read_text() for node in (0, 1)]
    assert [line.rpartition(" hello")[2].strip() for line in logs] == ["from 0 of 2", "from 1 of 2"]
    home = os.environ["CLUSTERKIT_HOME"]
    monkeypatch.setenv("CLUSTERKIT_HOME", str(tmp_path / "elsewhere"))
    (listed,) = [each for each in api.runs_of("hpc") if each.run == "hello-plan"]
    assert (listed.here, listed.state, listed.nodes_asked) == (False, State.SUCCEEDED, 2)
    assert f"CLUSTERKIT_HOME={home} clusterkit attach hello-plan" in (listed.remark or "")


def test_plan_script_refuses_second_start_and_cancel_spares_other_jobs(
    slurm: Slurm, clusterkit: list[str], tmp_path: Path
) -> None:
    job = tmp_path / "hello.yaml"
    job.write_text('name: hello\ncommand: [sh, -c, "echo began; exec sleep 600"]\n')
    out = os.environ["CLUSTERKIT_HOME"] + "/runs/hello-plan"
    words = [str(job), "--cluster", "hpc", "--output", out]
    subprocess.run([*clusterkit, "plan", *words], check=True, capture_output=True)
    # Another one of the same name, as another user may have it.
    options = ("--job-name=hello-plan", f"--chdir={tmp_path}", "-o/dev/null", "--parsable")
    other = slurm.run("sbatch", *options, "--wrap", "sleep 600").strip()
    slurm.run("sbatch", f"{out}/files/slurm.sh")
    run = api.get("hello-plan")
    slurm.wait(lambda: any(line.text == "began" for line in run.logs()), "the job's start")
    again = subprocess.run(
        ["sbatch", "--wait", "-pwide", f"{out}/files/slurm.sh"], capture_output=True, timeout=120
    )
    assert again.returncode == 75
    assert run.status().state is State.RUNNING
    run.cancel()
    slurm.wait(lambda: len(slurm.jobs()) == 1, "the run's end")
    assert other in slurm.run("squeue", "--noheader", "--format=%i", "--states=running")
    slurm.run("scancel", other)
    slurm.wait(lambda: slurm.jobs() == [], "the other job's end")
    assert run.status().state is State.CANCELLED


def test_doctor_checks_partition_and_compute_node(slurm: Slurm) -> None:
    found = {each.check: each for each in api.doctor(cluster="hpc", nodes=2).findings}
    assert set(found) == {"partition", "admission", "folder", "compute"}
    assert found["partition"].cause == "2 of 2 nodes of partition main can be used"
    assert {name: found[name].level for name in ("admission", "compute")} == {
        "admission": "ok", "compute": "ok",
    }, found  # fmt: skip
    for cluster, nodes in (("closed", 1), ("hpc", 3)):
        assert not api.doctor(cluster=cluster, nodes=nodes, only=["partition"]).ok


def test_job_warned_by_sigusr1_continues_as_next_attempt(slurm: Slurm, train: Train) -> None:
    run = train("tick.py", FOR_EVER)
    beating(run)
    jobs = slurm.jobs()
    # What --signal=B:USR1 does.
    slurm.run("scancel", "--batch", "--signal=USR1", *jobs)
    slurm.let_go(run)
    beating(run, attempt=2)
    assert slurm.jobs() == jobs
    # The agent that is asked first tells the other, which may hear of it from there.
    ends = [json.loads(path.read_text()) for path in run.path.glob("attempts/1/node-*/exit.json")]
    why = "Slurm is about to end the job (time limit, or preemption)"
    assert why in [end["stopped_by"] for end in ends]


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ended_by", ["time limit", "preemption"])
def test_run_resumes_from_checkpoint_after_time_limit_or_preemption(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, ended_by: str
) -> None:
    """Told first, or by SIGTERM, which reaches ranks twice: from Slurm, and from their agents."""
    monkeypatch.chdir(ROOT)
    run = api.submit(
        "jobs/ddp.yaml", cluster="short" if ended_by == "time limit" else "hpc", nodes=2, gpus=1,
        settings=["device=cpu", "checkpoint.every=100000"], more_args=["--steps", "100000"],
    )  # fmt: skip
    if ended_by == "preemption":
        run.wait(120, until=lambda status: len(run.metrics()) > 5)
        slurm.run("sbatch", "-purgent", "-N2", "--exclusive", "-o/dev/null", "--wrap", "true")
    slurm.let_go(run, 200)
    before = [each["step"] for each in run.metrics()]
    run.wait(120, until=lambda status: len(run.metrics()) > len(before) + 5)
    run.cancel()
    steps = [each["step"] for each in run.metrics()]
    assert len(before) > 1
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.thorough
def test_preempted_job_continues_when_nodes_are_free(slurm: Slurm, train: Train) -> None:
    run = train("tick.py", FOR_EVER)
    beating(run)
    slurm.run("sbatch", "-purgent", "-N2", "--exclusive", "-o/dev/null", "--wrap", "true")
    slurm.let_go(run)
    beating(run, attempt=2)


@pytest.mark.thorough
def test_rank_restarts_while_slurm_controller_is_away(slurm: Slurm, train: Train) -> None:
    run = train("tick.py", FOR_EVER, restarts=1)
    beating(run)
    slurm.stop("slurmctld")
    try:
        os.kill(ranks(run, 1)[0], signal.SIGKILL)
        away = run.wait(60, until=lambda status: any("Unable to contact" in (n.reason or "")
                                                     for n in status.nodes))  # fmt: skip
        assert away.state is State.RUNNING
        beating(run, attempt=2)
    finally:
        slurm.start_controller()
        slurm.wait(lambda: slurm.states() != [], "slurmctld")
    assert run.cancel().state is State.CANCELLED


@pytest.mark.thorough
def test_zero3_on_slurm_matches_losses_of_single_rank(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    expected = parity.measure(parity.REFERENCE, steps=STEPS).losses
    found = parity.measure(Case("zero3", 2, 2, parity.MICRO_2), steps=STEPS, cluster="hpc")
    assert len(found.losses) == STEPS
    assert parity.largest_difference(found.losses, expected) <= parity.TOLERANCE


@pytest.mark.thorough
def test_run_on_drained_node_continues_and_restarts_rank(slurm: Slurm, train: Train) -> None:
    run = train("tick.py", FOR_EVER, restarts=1)
    beating(run)
    slurm.run("scontrol", "update", "nodename=n1", "state=drain", "reason=a test")
    try:
        os.kill(ranks(run, 1)[0], signal.SIGKILL)
        beating(run, attempt=2)
        assert run.cancel().state is State.CANCELLED
        slurm.wait(lambda: sorted(slurm.states()) == ["drained", "idle"], "the drained node")
    finally:
        slurm.run("scontrol", "update", "nodename=n1", "state=resume")


@pytest.mark.thorough
def test_run_continues_as_next_attempt_after_slurmd_is_killed(slurm: Slurm, train: Train) -> None:
    run = train("tick.py", FOR_EVER)
    beating(run)
    slurm.stop("n1", signal.SIGKILL)
    try:
        slurm.wait(lambda: any(state.startswith("down") for state in slurm.states()), "its loss")
    finally:
        slurm.start_node(1)
    slurm.let_go(run)
    beating(run, attempt=2)


TWICE = """
import os, pathlib, time
rank = os.environ["RANK"]
begun = pathlib.Path(os.environ["CLUSTERKIT_RUN_DIR"], "begun-" + rank)
again = begun.exists()
begun.touch()
print("rank", rank, "on", os.environ["SLURMD_NODENAME"], flush=True)
time.sleep(0 if again else 600)
"""


def crashed(slurm: Slurm, train: Train, tmp_path: Path, node: int, **job: object) -> api.Run:
    """A run of three nodes that has lost one of them."""
    (tmp_path / "twice.py").write_text(TWICE)
    run = train(str(tmp_path / "twice.py"), cluster="wide", **job)
    begun = 3 - int(job.get("spares", 0))
    run.wait(60, until=lambda status: len(said(run)) == begun
             and [node.state for node in status.nodes] == [State.RUNNING] * 3)  # fmt: skip
    slurm.crash(node)
    return run


def said(run: api.Run) -> set[tuple[int, str]]:
    return {(line.node, line.text) for line in run.logs() if line.text.startswith("rank ")}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("job", "third"),
    [
        ({"nodes": 2, "spares": 1}, set()),
        ({"nodes": "2:3", "on_node_loss": "shrink"}, {(2, "rank 2 on n2")}),
    ],
    ids=["spares", "shrink"],
)
def test_spare_or_shrink_replaces_lost_node_in_same_slurm_job(
    slurm: Slurm, train: Train, tmp_path: Path, job: dict[str, object], third: set[tuple[int, str]]
) -> None:
    """Its rank goes to the third node, as to a spare or as one rank fewer is left."""
    run = crashed(slurm, train, tmp_path, 1, **job)
    try:
        (number,) = slurm.jobs()
        status = run.wait(60)
    finally:
        slurm.repair(1)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 1)
    assert (run.path / "job-1").read_text().strip() == number
    first = {(0, "rank 0 on n0"), (1, "rank 1 on n1")}
    assert said(run) == {*first, (2, "rank 1 on n2"), *third}


@pytest.mark.thorough
def test_slurm_job_is_requeued_after_loss_of_first_node(
    slurm: Slurm, train: Train, tmp_path: Path
) -> None:
    """With the batch script: another node's agent asks for it."""
    run = crashed(slurm, train, tmp_path, 0, nodes=2, spares=1)
    try:
        jobs = slurm.jobs()
        run.wait(60, until=lambda status: any("two minutes" in (node.reason or "")
                                              for node in status.nodes))  # fmt: skip
    finally:
        slurm.repair(0)
    slurm.let_go(run)
    assert slurm.jobs() == jobs
    status = run.wait(60)
    assert (status.state, status.attempt, status.restarts_left) == (State.SUCCEEDED, 2, 0)


@pytest.mark.thorough
def test_cancel_of_one_run_leaves_other_run_running(slurm: Slurm, train: Train) -> None:
    one, other = train("tick.py", FOR_EVER), train("tick.py", FOR_EVER)
    beating(one)
    beating(other)
    assert one.cancel().state is State.CANCELLED
    assert other.status().state is State.RUNNING


def test_exported_sbatch_script_runs_job_on_all_nodes(slurm, own_home, tmp_path):
    """Without clusterkit: `export sbatch`, and Slurm's own command. No rank needs torch."""
    job = tmp_path / "handed.yaml"
    job.write_text(
        "nodes: 2\ngpus_per_node: 2\n"
        "command: [sh, -c, 'echo rank $RANK of $WORLD_SIZE on node $NODE_RANK']\n"
    )
    script = tmp_path / "handed.sh"
    script.write_text(api.plan_as(job, "sbatch", cluster="hpc"))
    done = subprocess.run(
        ["sbatch", "--wait", script], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    logs = sorted((own_home / "runs" / "handed" / "attempts" / "1").glob("node-*/log"))
    said = [line for log in logs for line in log.read_text().splitlines() if "rank " in line]
    assert sorted(line.partition("rank ")[2] for line in said) == [
        f"{rank} of 4 on node {rank // 2}" for rank in range(4)
    ]


def test_commands_inside_slurm_run(slurm: Slurm, train: Train, tmp_path: Path) -> None:
    run = train("tick.py", FOR_EVER)
    beating(run)
    inside.exec_works(run)
    inside.files_are_copied(run, tmp_path)
    inside.port_is_forwarded(run)
    run.cancel()
    inside.refused_after_end(run)
