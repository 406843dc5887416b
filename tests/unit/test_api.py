"""Every verb as a function."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

import clusterkit
from clusterkit import agent, api, backends
from clusterkit.cluster import Project
from clusterkit.errors import BadInput, RunFolderError, RunNotFound, SubmitFailed
from clusterkit.jobfile import request
from clusterkit.lifecycle import supervise
from clusterkit.run.folder import Event, RunFolder
from clusterkit.run.status import Failure, NodeStatus, RunStatus, State
from clusterkit.spec import JobSpec
from clusterkit.transport import LocalTransport

pytestmark = pytest.mark.usefixtures("no_gpus")


def python_job(**fields):
    return JobSpec(**({"name": "demo", "program": "train.py", "launcher": "forkserver"} | fields))


@pytest.fixture
def program(write_job):
    write_job()


def test_plan_is_same_for_job_file_spec_and_command(write_job, facts):
    path = write_job("launcher: forkserver\n")
    from_file = api.plan(path, facts=facts, run_id="r1")
    from_path = api.plan(Path(path), facts=facts, run_id="r1")
    from_spec = api.plan(python_job(), facts=facts, run_id="r1")
    from_argv = api.plan(
        ["python", "train.py"],
        settings=["launcher=forkserver", "name=demo"],
        facts=facts,
        run_id="r1",
    )
    assert from_file == from_path == from_spec == from_argv


def test_plan_refuses_mapping_as_job(facts):
    with pytest.raises(BadInput, match="is neither a path nor a JobSpec") as told:
        api.plan({"name": "demo", "program": "train.py"}, facts=facts)
    assert "JobSpec(...)" in (told.value.hint or "")


def test_plan_is_deterministic(write_job, facts):
    job = write_job("launcher: forkserver\n")
    assert api.plan(job, facts=facts) == api.plan(job, facts=facts)


def test_plan_notes_project_remark(program, facts):
    found = Project(root="/root", digest="d", files=1, bytes=1, how="all", remark="a home folder")
    plan = api.plan(python_job(), facts=msgspec.structs.replace(facts, project=found))
    assert "\n  a home folder\n" in plan.to_text()


@pytest.mark.parametrize(("gpus", "noted"), [(None, False), (1, False), (2, True)])
def test_plan_notes_self_spawning_program_only_with_several_ranks(
    write_job, facts, gpus, noted, cwd
):
    write_job()
    (cwd / "train.py").write_text("import torch.multiprocessing as mp\nmp.spawn(print, nprocs=2)\n")
    text = api.plan(python_job(launcher="torchrun"), gpus=gpus, facts=facts).to_text()
    assert ("starts its ranks itself (mp.spawn)" in text) == noted


def test_plan_writes_no_files(write_job, clusterkit_home, cwd):
    before = sorted(os.listdir(cwd))
    api.plan(write_job("launcher: forkserver\n"))
    assert not clusterkit_home.exists()
    assert sorted(os.listdir(cwd)) == sorted({*before, "job.yaml", "train.py"})


def test_plan_arguments_override_job_file(write_job, facts):
    plan = api.plan(write_job("launcher: forkserver\nnodes: 3\n"), nodes=2, gpus=4, facts=facts)
    assert plan.topology == {"min_nodes": 2, "nodes": 2, "nproc_per_node": 4}


def test_submit_records_plan_that_plan_printed(write_job, facts, unstarted_run):
    run = unstarted_run("launcher: forkserver\n", run_id="demo-1")
    folder = RunFolder(run.path)
    printed = api.plan("job.yaml", facts=facts, run_id="demo-1")
    assert run.plan == printed
    assert folder.read("plan.json").decode() == printed.to_json().decode()
    assert folder.read("plan.txt").decode() == printed.to_text()


def test_recorded_job_file_plans_same_run_again(unstarted_run, facts):
    run = unstarted_run("launcher: forkserver\nenv: {A: 'x y'}\n", nodes=2, run_id="demo-1")
    again = api.plan(run.path / "job.json", facts=facts, run_id="demo-1")
    assert again == run.plan


def test_plan_requires_secrets_in_environment_and_omits_their_values(program, facts, monkeypatch):
    spec = python_job(secrets=("TOKEN_X",))
    with pytest.raises(BadInput, match="secrets: TOKEN_X is not set in your environment"):
        api.plan(spec, facts=facts)
    monkeypatch.setenv("TOKEN_X", "hunter2")
    assert "hunter2" not in api.plan(spec, facts=facts).to_json().decode()


def test_run_folder_holds_secret_names_but_no_values(unstarted_run, monkeypatch):
    monkeypatch.setenv("TOKEN_X", "hunter2-unique")
    run = unstarted_run("launcher: forkserver\nsecrets: [TOKEN_X]\n")
    written = b"".join(p.read_bytes() for p in run.path.rglob("*") if p.is_file())
    assert b"TOKEN_X" in written
    assert b"hunter2-unique" not in written


def test_submit_that_cannot_launch_leaves_no_run_folder(
    write_job, facts, clusterkit_home, monkeypatch
):
    def broken(*_, **__):
        raise SubmitFailed("no process")

    monkeypatch.setattr(supervise, "launch", broken)
    with pytest.raises(SubmitFailed, match="no process"):
        api.submit(write_job("launcher: forkserver\n"), facts=facts)
    assert os.listdir(clusterkit_home / "runs") == []


def test_submit_interrupted_by_ctrl_c_leaves_no_run_folder(
    write_job, facts, clusterkit_home, monkeypatch
):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(supervise, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        api.submit(write_job("launcher: forkserver\n"), facts=facts)
    assert os.listdir(clusterkit_home / "runs") == []


def test_ctrl_c_before_supervisor_starts_ends_started_nodes(clusterkit_home, cwd, monkeypatch):
    started = []

    def interrupted(folder, lock):
        started.append(folder.path)
        raise KeyboardInterrupt

    monkeypatch.setattr(supervise, "spawn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        api.submit(["sleep", "600"], settings=["launcher=python"])
    assert agent.processes_of(str(started[0])) == []
    assert os.listdir(clusterkit_home / "runs") == []


def test_ctrl_c_while_launch_closes_connections_cancels_run(cwd, monkeypatch):
    def interrupted(transport):
        raise KeyboardInterrupt

    ready = api.prepare(["sleep", "600"], settings=["launcher=python"])
    monkeypatch.setattr(type(ready.transport), "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        api.launch(ready)
    (status,) = api.runs()
    assert status.state == "CANCELLED"
    assert agent.processes_of(str(api.get(status.run).path)) == []


def test_submit_works_for_user_id_without_name(nameless, unstarted_run):
    assert unstarted_run().status().backend == "local"


def test_nodes_that_fail_to_start_end_run_as_failed(write_job, monkeypatch):
    def refused(*_, **__):
        raise SubmitFailed("no process", hint="look")

    monkeypatch.setattr(LocalTransport, "start", refused)
    monkeypatch.setattr(supervise, "spawn", lambda *_, **__: pytest.fail("nothing to watch"))
    status = api.submit(write_job("launcher: python\n")).status()
    assert (status.state, status.exit_code) == (State.FAILED, 125)
    assert (status.failure.cause, status.failure.hint) == ("no process", "look")


@pytest.fixture
def transports(monkeypatch):
    """The local transports that are made, each with whether it was closed."""
    made = []

    class Counted(LocalTransport):
        closed = False

        def close(self):
            self.closed = True

    def transport_for(cluster):
        made.append(Counted())
        return made[-1]

    monkeypatch.setattr(backends, "transport_for", transport_for)
    return made


@pytest.mark.parametrize(
    "use",
    [
        lambda job, facts: api.plan(job, facts=facts),
        lambda job, facts: api.submit(job, facts=facts),
        lambda job, facts: api.prepare(job, facts=facts, run_id="No"),
        lambda job, facts: api.estimate(job),
    ],
    ids=["plan", "submit", "a prepare that fails", "estimate"],
)
def test_plan_submit_and_estimate_close_connections(
    use, write_job, facts, transports, monkeypatch, clusterkit_home
):
    monkeypatch.setattr(supervise, "launch", lambda *_, **__: None)
    with contextlib.suppress(BadInput):
        use(write_job("launcher: forkserver\n"), facts)
    assert [transport.closed for transport in transports] == [True]


@pytest.mark.parametrize("failing", ["job.json", "cluster.json", "plan.json", "run.json"])
def test_full_disk_during_submit_leaves_no_run_folder(
    failing, write_job, facts, clusterkit_home, monkeypatch
):
    real = RunFolder.write

    def write(self, name, data):
        if name == failing:
            raise RunFolderError(f"cannot write {name}: No space left on device")
        real(self, name, data)

    monkeypatch.setattr(RunFolder, "write", write)
    monkeypatch.setattr(supervise, "launch", lambda *_, **__: pytest.fail("it was started"))
    with pytest.raises(RunFolderError, match="No space left"):
        api.submit(write_job("launcher: forkserver\n"), facts=facts)
    assert os.listdir(clusterkit_home / "runs") == []


def test_get_finds_run_by_id_and_refuses_unknown_id(unstarted_run):
    run = unstarted_run()
    assert repr(api.get(run.id)) == f"<Run {run.id}>"
    assert api.get("last").path == run.path
    with pytest.raises(RunNotFound, match="'nope' is unknown"):
        api.get("nope")


def test_runs_of_same_moment_get_distinct_ids(unstarted_run):
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


def test_wait_returns_final_status(unstarted_run):
    run = unstarted_run()
    status = final(run)
    assert run.wait() == status
    assert run.wait_started() == status


def test_wait_timeout_names_current_state(unstarted_run):
    run = unstarted_run()
    with pytest.raises(TimeoutError, match=f"run {run.id} is PENDING after 0 s"):
        run.wait(0)


def test_wait_ends_when_until_condition_holds(unstarted_run):
    assert unstarted_run().wait(until=lambda status: True).state is State.PENDING


STAMP = "2026-11-21T20:11:58.12345"


def test_logs_list_attempts_in_order(unstarted_run, by_hand):
    run = unstarted_run()
    by_hand(run).node(attempt=1, log=f"{STAMP}9Z 0 first\n", exit_code=1)
    by_hand(run).node(attempt=2, log=f"{STAMP}1Z 0 second\n", exit_code=0)
    final(run, attempt=2)
    assert [(line.attempt, line.text) for line in run.logs()] == [(1, "first"), (2, "second")]
    assert list(run.logs(follow=True)) == list(run.logs())


def test_logs_follow_notes_failed_attempt_before_next_attempt_lines(unstarted_run, by_hand):
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


def test_metrics_and_reported_events_come_from_log(unstarted_run, by_hand):
    run = unstarted_run()
    marks = [{"event": "start", "steps": 1}, {"event": "metrics", "step": 1, "loss": 2.0}]
    text = "".join(f"{STAMP}1Z 0 @clusterkit {json.dumps(mark)}\n" for mark in marks)
    by_hand(run).node(log=text, exit_code=0)
    final(run)
    assert run.metrics() == api.metrics(run.id) == [{"step": 1, "loss": 2.0}]
    assert run.reported_events() == marks


def test_delete_refuses_run_that_has_not_ended(unstarted_run):
    run = unstarted_run()
    with pytest.raises(BadInput, match="is PENDING") as error:
        run.delete()
    assert error.value.hint == f"clusterkit cancel {run.id}"
    final(run)
    run.delete()
    assert not run.path.exists()


def test_wait_with_check_raises_run_failed_with_cause(unstarted_run):
    run = unstarted_run()
    failure = Failure(node=1, rank=3, exit_code=7, cause="ValueError: bad", hint="mend it")
    RunFolder(run.path).write_json(
        "state.json", msgspec.structs.replace(
            run.status(), state=State.FAILED, exit_code=7, failure=failure, finished_at=1.0
        ),
    )  # fmt: skip
    assert run.wait().state is State.FAILED
    with pytest.raises(clusterkit.RunFailed) as error:
        run.wait(check=True)
    assert error.value.message == f"run {run.id} is FAILED: rank 3 on node 1: ValueError: bad"
    assert (error.value.hint, error.value.exit_code) == ("mend it", 7)
    assert error.value.status.failure == failure


def test_package_exports_common_names_and_imports_lazily():
    assert clusterkit.submit is api.submit
    assert (clusterkit.Run, clusterkit.Job) == (api.Run, JobSpec)
    assert dir(clusterkit) == sorted(
        ["ClusterkitError", "Job", "Run", "RunFailed", "__version__", "get", "runs", "submit"]
    )
    with pytest.raises(AttributeError, match="'nope'"):
        clusterkit.nope  # noqa: B018
    code = "import sys, clusterkit; print([n for n in sys.modules if n.startswith('clusterkit.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_api_has_function_for_every_cli_verb():
    from clusterkit.cli import VERBS

    names = {"ls": "runs", "logs": "log_lines", "rm": "get", "export": "plan_as", "wait": "get"}
    for verb in set(VERBS) - {"completion", "shell", "top"}:  # these are for a terminal
        assert callable(getattr(api, names.get(verb, verb))), verb


def test_api_functions_accept_run_in_place_of_id(unstarted_run, by_hand, tmp_path):
    run = unstarted_run()
    mark = '@clusterkit {"event": "metrics", "step": 1, "loss": 2.0}'
    by_hand(run).node(log=f"{STAMP}1Z 0 {mark}\n", exit_code=0)
    status = final(run)
    assert api.get(run) is run
    assert api.status(run) == status
    assert list(api.log_lines(run)) == list(run.logs())
    assert api.metrics(run) == [{"step": 1, "loss": 2.0}]
    assert api.cancel(run) == status
    assert api.attach(run) is run
    assert api.attach(run, cluster="anywhere") is run
    assert api.plot([run, run.id], tmp_path / "loss.svg").exists()


def first_example(text):
    """The first block of Python in a page or docstring."""
    fenced = text.partition("```python\n")[2].partition("```")[0]
    return fenced or text.partition("\n\n")[2]


@pytest.mark.parametrize(
    "text", [api.__doc__, (Path(__file__).parents[2] / "docs/python-api.md").read_text()]
)
def test_documented_first_example_handles_failed_run(unstarted_run, text, monkeypatch, capsys):
    run = unstarted_run()
    final(run, State.FAILED)
    monkeypatch.setattr(api, "submit", lambda *_, **__: run)
    exec(compile(first_example(text), "example", "exec"), {})
    assert "FAILED" in capsys.readouterr().out


def test_repr_of_api_objects_is_short(write_job, facts):
    ready = api.prepare(write_job("launcher: forkserver\n"), facts=facts, nodes=2)
    failure = Failure(
        node=1, rank=3, exit_code=1, cause="ValueError: " + "very " * 50 + "bad\nand more",
        hint="mend it", traceback="Traceback\n" * 30,
    )  # fmt: skip
    nodes = tuple(NodeStatus(node=n, host=f"h{n}", state=State.FAILED) for n in range(8))
    status = RunStatus(
        run="demo-1", job="demo", cluster="lab", backend="ssh", state=State.FAILED, exit_code=1,
        nodes=nodes, failure=failure,
    )  # fmt: skip
    listed = api.ListedRun(**msgspec.structs.asdict(status))
    for what, begins in (
        (status, "<RunStatus demo-1 FAILED (1): ValueError: very very"),
        (listed, "<ListedRun demo-1 FAILED (1): ValueError"),
        (ready, "<Prepared demo for local: 2 nodes"),
        (ready.plan, f"<Plan {ready.plan.run_id}: local, 2 nodes"),
        (ready.job, "JobSpec(name='demo', program='train.py'"),
    ):
        assert repr(what).startswith(begins)
        assert len(repr(what)) < 200
        assert "\n" not in repr(what)


class Counted(LocalTransport):
    """This machine; tells whether it was let go."""

    def __init__(self, every):
        every.append(self)
        self.closed = False

    def close(self):
        self.closed = True


@pytest.fixture
def unwatched(unstarted_run, by_hand, monkeypatch):
    """A run that goes on without its supervisor, what makes its files, and transports to it."""
    run = unstarted_run()
    hand = by_hand(run)
    hand.unwatched()
    hand.node(started=hand.alive(), log=f"{STAMP}1Z 0 hello\n")
    transports = []
    monkeypatch.setattr(backends, "transport_for", lambda cluster: Counted(transports))
    return run, hand, transports


@pytest.mark.parametrize("verb", ["logs", "wait", "cancel", "status"])
def test_run_verbs_connect_to_hosts_once_and_close_connection(unwatched, monkeypatch, verb):
    run, hand, transports = unwatched
    polls = []

    def end_later(seconds):
        polls.append(seconds)
        if len(polls) == 10:
            final(run)

    if verb in ("logs", "wait"):
        monkeypatch.setattr(time, "sleep", end_later)
    else:
        hand.node(exit_code=0, started=hand.dead())
    asked = {
        "logs": lambda: [line.text for line in run.logs(follow=True)],
        "wait": run.wait, "cancel": run.cancel, "status": run.status,
    }[verb]()  # fmt: skip
    assert verb != "logs" or asked == ["hello"]
    assert [transport.closed for transport in transports] == [True]


def test_log_batches_closed_early_close_connection(unwatched):
    run, _, transports = unwatched
    lines = run.log_batches(follow=True)
    assert next(lines)[0].text == "hello"
    lines.close()
    assert [transport.closed for transport in transports] == [True]


def test_request_reads_nodes_as_number_or_text(write_job):
    path = write_job("launcher: torchrun\n")
    assert request.read(path, nodes="2").job == request.read(path, nodes=2).job
    assert request.read(path, nodes="1:2").job.nodes == "1:2"
