"""What a job of Slurm means for its nodes."""

import json
import shutil
from pathlib import Path

import pytest

from clusterkit import backends
from clusterkit.backends.slurm import observe, queue
from clusterkit.run import folder as run_folder
from tests.unit.slurm.commands import RUN_DIR, Slurm, job


@pytest.fixture
def seen(plan, tmp_path):
    """An attempt with these files, and this job: its state, and each node's state and reason."""

    def look(squeue, *nodes, attempt=1, patient=False, sacct="error: no accounting", **files):
        made = plan()
        squeue = squeue.replace(RUN_DIR, made.run_dir)
        folder = run_folder.RunFolder(Path(made.run_dir))
        for name, text in {"run_json": "{}", **files}.items():
            path = folder.path / name.replace("run_json", "run.json").replace("_", "-")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for node, written in enumerate(nodes):
            path = folder.node_dir(attempt, node)
            shutil.rmtree(path, ignore_errors=True)  # of an earlier call
            path.mkdir(parents=True)
            for name, document in (written or {}).items():
                (path / f"{name}.json").write_text(json.dumps(document))
        handle = run_folder.RunHandle(folder, made, attempt)
        if patient:
            transport = Slurm(squeue=squeue, sacct=sacct)
            taken = observe.read(handle)
            number = observe.newest(handle, transport)
            return observe.observation(handle, taken, number, files_delayed=True)
        return backends.backend("slurm").status(handle, Slurm(squeue=squeue, sacct=sacct))

    return look


RUNS = {"started": {"pid": 1, "host": "gpu-3"}}


@pytest.mark.parametrize(
    ("sacct", "state", "reason"),
    [
        ("TIMEOUT\n", "FAILED", "TIMEOUT: job 7 reached its Slurm time limit"),
        ("NODE_FAIL\nOUT_OF_MEMORY\n", "FAILED",
         "OUT_OF_MEMORY: job 7 used more than its memory limit"),
        ("CANCELLED by 1000\n", "CANCELLED", "CANCELLED: job 7 was cancelled (scancel)"),
        ("error: Slurm accounting storage is disabled", "FAILED", "its agent ended without"),
        ("RUNNING\n", "FAILED", "its agent ended without"),
    ],
)  # fmt: skip
def test_ended_job_missing_from_squeue_is_read_from_sacct(seen, sacct, state, reason):
    found = seen("", RUNS, RUNS, sacct=sacct, job_1="7\n")
    assert {node.state.value for node in found.nodes} == {state}
    assert all(node.reason.startswith(reason) for node in found.nodes)


def test_completing_job_is_queued_only_until_all_agents_have_ended(seen):
    assert not seen(job("COMPLETING"), DONE, DONE).queued
    # An agent that was killed may have left ranks, which Slurm still ends.
    assert seen(job("COMPLETING"), DONE, RUNS).queued


def test_slurm_warning_is_reason_of_stopped_nodes(seen):
    words = f"{queue.WARNED} (time limit, or preemption)"
    ended = {"exit": {"exit_code": 143, "reason": "stopped on request", "stopped_by": words,
                      "at": 1.0, "processes": []}}  # fmt: skip
    found = seen(job("TIMEOUT"), {**RUNS, **ended}, {**RUNS, **ended}, stop_7="x")
    assert [node.reason for node in found.nodes] == [words, words]


DONE = {**RUNS, "exit": {"exit_code": 0, "at": 1.0, "reason": None}}
ENDED = {**RUNS, "exit": {"exit_code": 143, "at": 1.0, "reason": "stopped on request"}}
CRASHED = {**RUNS, "exit": {"exit_code": 7, "at": 1.0, "reason": None}}


def states(found):
    return found.state.value, [node.state.value for node in found.nodes], found.nodes[1].reason


def test_node_is_running_once_its_agent_has_started(seen):
    found = seen(job(), RUNS, None)
    assert states(found) == ("RUNNING", ["RUNNING", "PENDING"], None)
    assert found.nodes[0].host == "gpu-3"


def test_pending_job_shows_slurm_reason_and_is_queued(seen):
    reason = "Priority: jobs with a higher priority go first (job 7)"
    found = seen(job("PENDING", reason="Priority"), None, None)
    assert states(found) == ("PENDING", ["PENDING"] * 2, reason)
    assert found.next_attempt is None
    assert found.queued
    assert seen(job(), None, None).queued  # its agents are about to begin
    assert not seen("", None, None).queued


def test_requeued_job_continues_as_next_attempt(seen):
    assert seen(job("PENDING", reason="BeginTime"), ENDED, RUNS).next_attempt == 2
    assert seen(job(), ENDED, ENDED, **{"attempts/1/next": "2\n"}).next_attempt == 2


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("TIMEOUT", "job 7 reached its Slurm time limit"),
        ("PREEMPTED", "Slurm preempted job 7 for another one"),
        ("OUT_OF_MEMORY", "job 7 used more than its memory limit"),
    ],
)
def test_job_ended_by_slurm_fails_with_slurm_reason(seen, state, words):
    reason = f"{state}: {words}"
    assert states(seen(job(state), RUNS, ENDED)) == ("FAILED", ["FAILED"] * 2, reason)
    assert seen(job(state), RUNS, ENDED).causes[0].words == reason


@pytest.mark.parametrize(
    "who", ["SIGTERM from process 9 (slurmstepd: [7.0])", queue.WARNED, queue.NODE_0_LOST]
)
def test_nodes_stopped_by_slurm_are_running_until_job_has_ended(seen, who):
    """Its job may wait again: who takes the run for failed meanwhile would cancel that."""
    exit_by_slurm = {"exit_code": 143, "at": 1.0, "reason": f"stopped by {who}"}
    nodes = ({**RUNS, "exit": exit_by_slurm}, CRASHED)
    for state in ("COMPLETING", "RUNNING"):
        found = seen(job(state), *nodes)
        assert states(found) == ("RUNNING", ["RUNNING"] * 2, "Slurm is stopping its job")
    assert seen(job("PENDING", reason="BeginTime"), *nodes).next_attempt == 2
    assert states(seen(job("NODE_FAIL"), *nodes))[0] == "FAILED"
    assert states(seen("", *nodes))[0] == "FAILED"
    ours = seen(job("COMPLETING"), *nodes, stop_7="cancelled")
    assert states(ours)[1] == ["FAILED"] * 2


@pytest.mark.parametrize("lost", [0, 1])
def test_requeued_job_names_node_without_exit_record_as_cause(seen, lost):
    """Slurm ends the agents of the others then, who say so."""
    why = "stopped by SIGTERM from process 9 of user 0 (slurmstepd: [7.0])"
    told = {"exit_code": 1, "at": 1.0, "reason": "stopped on request", "causes": [why]}
    nodes = [{**RUNS, "exit": told}] * 2
    nodes[lost] = RUNS
    first = seen(job("PENDING", reason="BeginTime"), *nodes).causes[0]
    assert (first.node, first.words) == (lost, "Slurm requeued its job")


def test_failed_rank_keeps_its_own_reason_in_failed_job(seen):
    assert states(seen(job("FAILED"), ENDED, CRASHED)) == ("FAILED", ["CANCELLED", "FAILED"], None)


def test_scancel_by_user_cancels_run_but_own_scancel_does_not(seen):
    found = seen(job("CANCELLED"), ENDED, ENDED)
    assert states(found)[:2] == ("CANCELLED", ["CANCELLED"] * 2)
    folder = run_folder.home() / "runs/demo-1"
    assert (folder / "cancelled").exists()
    (folder / "cancelled").unlink()
    seen(job("CANCELLED"), ENDED, RUNS, stop_7="another node has ended")
    assert not (folder / "cancelled").exists()


def test_job_missing_from_squeue_is_judged_by_agent_records(seen):
    assert states(seen("", DONE, DONE))[0] == "SUCCEEDED"
    found = seen("", DONE, RUNS)
    assert states(found)[:2] == ("FAILED", ["SUCCEEDED", "FAILED"])
    assert "without reporting" in found.nodes[1].reason
    assert states(seen("", DONE, RUNS, patient=True))[0] == "RUNNING"


def test_node_without_exit_record_in_ended_job_is_failed(seen):
    for state in ("COMPLETED", "FAILED"):
        found = seen(job(state), DONE, RUNS)
        assert states(found)[:2] == ("FAILED", ["SUCCEEDED", "FAILED"])
        assert found.nodes[1].reason == "its agent ended without reporting an exit code"


def test_job_that_left_queue_before_start_is_failed(seen):
    assert states(seen("", None, None)) == ("PENDING", ["PENDING"] * 2, None)
    reason = "job 7 left Slurm's queue before it started"
    assert states(seen("", None, None, job_1="7\n")) == ("FAILED", ["FAILED"] * 2, reason)


def test_unrecognized_slurm_state_is_unknown(seen):
    reason = "Slurm reports job 7 as HIBERNATING"
    assert states(seen(job("HIBERNATING"), RUNS, RUNS)) == ("UNKNOWN", ["UNKNOWN"] * 2, reason)


def test_agent_records_decide_state_while_slurm_does_not_answer(seen):
    away = "error: Unable to contact slurm controller"
    assert states(seen(away, RUNS, RUNS))[:2] == ("RUNNING", ["RUNNING"] * 2)
    assert "Unable to contact" in seen(away, RUNS, RUNS).nodes[0].reason
    assert states(seen(away, DONE, DONE))[0] == "SUCCEEDED"
