"""Every verb as a function."""

import json
import os
from pathlib import Path

import msgspec
import pytest

from clusterkit import api, supervise
from clusterkit.cluster import Project
from clusterkit.errors import BadInput, RunFolderError, RunNotFound, SubmitFailed
from clusterkit.runs import Event, RunFolder
from clusterkit.spec import JobSpec
from clusterkit.status import RunStatus, State

pytestmark = pytest.mark.usefixtures("no_gpus")


def python_job(**fields):
    return JobSpec(**({"name": "demo", "program": "train.py", "launcher": "python"} | fields))


@pytest.fixture
def program(write_job):
    write_job()


def test_a_job_is_a_file_a_spec_or_a_command(write_job, facts):
    path = write_job("launcher: python\n")
    from_file = api.plan(path, facts=facts, run_id="r1")
    from_path = api.plan(Path(path), facts=facts, run_id="r1")
    from_spec = api.plan(python_job(), facts=facts, run_id="r1")
    from_argv = api.plan(
        ["python", "train.py"], settings=["launcher=python", "name=demo"], facts=facts, run_id="r1"
    )
    assert from_file == from_path == from_spec == from_argv


def test_planning_twice_gives_the_same_plan(write_job, facts):
    job = write_job("launcher: python\n")
    assert api.plan(job, facts=facts) == api.plan(job, facts=facts)


def test_what_a_person_should_know_of_the_project_is_a_note_of_the_plan(program, facts):
    found = Project(root="/root", digest="d", files=1, bytes=1, how="all", remark="a home folder")
    plan = api.plan(python_job(), facts=msgspec.structs.replace(facts, project=found))
    assert "\n  a home folder\n" in plan.to_text()


def test_planning_writes_nothing(write_job, clusterkit_home, cwd):
    before = sorted(os.listdir(cwd))
    api.plan(write_job("launcher: python\n"))
    assert not clusterkit_home.exists()
    assert sorted(os.listdir(cwd)) == sorted({*before, "job.yaml", "train.py"})


def test_arguments_go_before_the_job_file(write_job, facts):
    plan = api.plan(write_job("launcher: python\nnodes: 3\n"), nodes=2, gpus=4, facts=facts)
    assert plan.topology == {"min_nodes": 2, "nodes": 2, "nproc_per_node": 4}


def test_what_submit_carries_out_is_what_plan_printed(write_job, facts, unstarted_run):
    run = unstarted_run("launcher: python\n", run_id="demo-1")
    folder = RunFolder(run.path)
    printed = api.plan("job.yaml", facts=facts, run_id="demo-1")
    assert run.plan == printed
    assert folder.read("plan.json").decode() == printed.to_json().decode()
    assert folder.read("plan.txt").decode() == printed.to_text()


def test_the_run_folder_holds_enough_to_submit_the_same_again(unstarted_run, facts):
    run = unstarted_run("launcher: python\nenv: {A: 'x y'}\n", nodes=2, run_id="demo-1")
    again = api.plan(run.path / "job.json", facts=facts, run_id="demo-1")
    assert again == run.plan


def test_secrets_must_be_in_the_environment(program, facts, monkeypatch):
    spec = python_job(secrets=("TOKEN_X",))
    with pytest.raises(BadInput, match="secrets: TOKEN_X is not set in your environment"):
        api.plan(spec, facts=facts)
    monkeypatch.setenv("TOKEN_X", "hunter2")
    assert "hunter2" not in api.plan(spec, facts=facts).to_json().decode()


def test_secrets_are_written_nowhere(unstarted_run, monkeypatch):
    monkeypatch.setenv("TOKEN_X", "hunter2-unique")
    run = unstarted_run("launcher: python\nsecrets: [TOKEN_X]\n")
    written = b"".join(p.read_bytes() for p in run.path.rglob("*") if p.is_file())
    assert b"TOKEN_X" in written
    assert b"hunter2-unique" not in written


def test_a_submit_that_cannot_start_leaves_nothing(write_job, facts, clusterkit_home, monkeypatch):
    def broken(*_):
        raise SubmitFailed("no process")

    monkeypatch.setattr(supervise, "spawn", broken)
    with pytest.raises(SubmitFailed, match="no process"):
        api.submit(write_job("launcher: python\n"), facts=facts)
    assert os.listdir(clusterkit_home / "runs") == []


def test_a_submit_interrupted_by_ctrl_c_leaves_nothing(
    write_job, facts, clusterkit_home, monkeypatch
):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(supervise, "spawn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        api.submit(write_job("launcher: python\n"), facts=facts)
    assert os.listdir(clusterkit_home / "runs") == []


@pytest.mark.parametrize("failing", ["job.json", "cluster.json", "plan.json", "run.json"])
def test_a_disk_that_fills_up_during_a_submit_leaves_nothing(
    failing, write_job, facts, clusterkit_home, monkeypatch
):
    real = RunFolder.write

    def write(self, name, data):
        if name == failing:
            raise RunFolderError(f"cannot write {name}: No space left on device")
        real(self, name, data)

    monkeypatch.setattr(RunFolder, "write", write)
    monkeypatch.setattr(supervise, "spawn", lambda *_: pytest.fail("it was started"))
    with pytest.raises(RunFolderError, match="No space left"):
        api.submit(write_job("launcher: python\n"), facts=facts)
    assert os.listdir(clusterkit_home / "runs") == []


def test_a_run_is_found_again_by_its_id(unstarted_run):
    run = unstarted_run()
    assert repr(api.get(run.id)) == f"<Run {run.id}>"
    assert api.get("last").path == run.path
    with pytest.raises(RunNotFound, match="'nope' is unknown"):
        api.get("nope")


def test_runs_of_the_same_moment_have_ids_of_their_own(unstarted_run):
    first, second = unstarted_run(), unstarted_run()
    assert first.id != second.id
    assert {status.run for status in api.runs()} == {first.id, second.id}


def final(run, state=State.SUCCEEDED, attempt=1):
    status = RunStatus(
        run=run.id, job="demo", cluster="local", backend="local", state=state, attempt=attempt,
        exit_code=0,
    )  # fmt: skip
    RunFolder(run.path).write_json("state.json", status)
    return status


def test_waiting_returns_the_final_status(unstarted_run):
    run = unstarted_run()
    status = final(run)
    assert run.wait() == status
    assert run.wait_started() == status


def test_waiting_too_long_says_how_it_stands(unstarted_run):
    run = unstarted_run()
    with pytest.raises(TimeoutError, match=f"run {run.id} is PENDING after 0 s"):
        run.wait(0)


def test_waiting_ends_when_a_condition_holds(unstarted_run):
    assert unstarted_run().wait(until=lambda status: True).state is State.PENDING


STAMP = "2026-11-21T20:11:58.12345"


def test_the_logs_of_all_attempts_follow_one_another(unstarted_run, by_hand):
    run = unstarted_run()
    by_hand(run).node(attempt=1, log=f"{STAMP}9Z 0 first\n", exit_code=1)
    by_hand(run).node(attempt=2, log=f"{STAMP}1Z 0 second\n", exit_code=0)
    final(run, attempt=2)
    assert [(line.attempt, line.text) for line in run.logs()] == [(1, "first"), (2, "second")]
    assert list(run.logs(follow=True)) == list(run.logs())


def test_an_attempt_that_failed_is_told_between_its_lines_and_the_next_ones(unstarted_run, by_hand):
    run = unstarted_run()
    hand = by_hand(run)
    hand.node(attempt=1, log=f"{STAMP}9Z 0 first\n", exit_code=1)
    hand.node(attempt=2, log=f"{STAMP}1Z 0 second\n", started=hand.alive())
    hand.folder.append("events.jsonl", Event(at=1.0, attempt=1, text="attempt 1 failed"))
    final(run, attempt=2, state=State.RUNNING)
    told = []
    for line in run.logs(follow=True, note=lambda event: told.append(event.text)):
        told.append(line.text)
        if line.text == "second":
            break  # the run goes on
    assert told == ["first", "attempt 1 failed", "second"]


def test_metrics_and_marks_come_from_the_log(unstarted_run, by_hand):
    run = unstarted_run()
    marks = [{"event": "start", "steps": 1}, {"event": "metrics", "step": 1, "loss": 2.0}]
    text = "".join(f"{STAMP}1Z 0 @clusterkit {json.dumps(mark)}\n" for mark in marks)
    by_hand(run).node(log=text, exit_code=0)
    final(run)
    assert run.metrics() == api.metrics(run.id) == [{"step": 1, "loss": 2.0}]
    assert run.marks() == marks


def test_a_run_that_has_not_ended_is_not_deleted(unstarted_run):
    run = unstarted_run()
    with pytest.raises(BadInput, match="is PENDING") as error:
        run.delete()
    assert error.value.hint == f"clusterkit cancel {run.id}"
    final(run)
    run.delete()
    assert not run.path.exists()


def test_the_facade_has_a_function_for_every_verb():
    from clusterkit.cli import VERBS

    names = {"ls": "runs", "logs": "log_lines", "rm": "get", "ls-jobs": "jobs"}
    for verb in set(VERBS) - {"completion"}:
        assert callable(getattr(api, names.get(verb, verb))), verb
