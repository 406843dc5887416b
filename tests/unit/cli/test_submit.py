"""`clusterkit submit` and its exit codes."""

import pytest

from clusterkit.lifecycle import supervise
from clusterkit.run.status import Failure, State
from tests.unit.cli.commands import LOG, final

pytestmark = pytest.mark.usefixtures("no_gpus")


@pytest.fixture
def scripted_submit(monkeypatch, by_hand):
    """Submits whose supervisor is replaced by its last word."""

    def end(state, code, **fields):
        def launch(folder, lock, transport):
            node = folder.path / "attempts" / "1" / "node-0"
            node.mkdir(parents=True)
            (node / "log").write_text(LOG)
            folder.write_json("state.json", final(folder.run_id, state, code, **fields))

        monkeypatch.setattr(supervise, "launch", launch)

    return end


def test_submit_prints_run_id_on_stdout_and_exits_with_run_code(cli, write_job, scripted_submit):
    scripted_submit(State.SUCCEEDED, 0)
    done = cli("submit", write_job("launcher: forkserver\n"), "--run-id", "demo-7")
    assert (done.code, done.out) == (0, "demo-7\n")
    assert "n0 r0 hello" in done.err
    assert "demo-7 SUCCEEDED in 1 min 00 s" in done.err
    assert "loss      2.5000 at step 1, 1.2500 at step 2" in done.err


def test_submit_of_failing_run_exits_with_its_code_and_shows_failure(
    cli, write_job, scripted_submit
):
    failure = Failure(node=0, rank=1, exit_code=7, cause="ValueError: bad", hint="mend it")
    scripted_submit(State.FAILED, 7, failure=failure)
    done = cli("submit", write_job("launcher: forkserver\n"))
    assert done.code == 7
    assert "rank 1 on node 0 failed first: ValueError: bad (exit code 7)" in done.err


def test_submit_with_json_prints_final_status_instead_of_id(cli, write_job, scripted_submit):
    scripted_submit(State.SUCCEEDED, 0)
    done = cli("submit", write_job("launcher: forkserver\n"), "--json", "--run-id", "demo-8")
    assert (done.json["run"], done.json["state"]) == ("demo-8", "SUCCEEDED")


def test_detached_submit_prints_run_id(cli, write_job, scripted_submit):
    scripted_submit(State.SUCCEEDED, 0)
    done = cli("submit", write_job("launcher: forkserver\n"), "--detach", "--run-id", "demo-9")
    assert (done.code, done.out) == (0, "demo-9\n")


def test_detached_submit_that_fails_at_once_shows_cause(cli, write_job, scripted_submit):
    failure = Failure(node=0, exit_code=1, cause="image a/b:1 cannot be pulled", hint="push it")
    scripted_submit(State.FAILED, 1, failure=failure)
    done = cli("submit", write_job("launcher: forkserver\n"), "--detach", "--run-id", "demo-9")
    assert (done.code, done.out) == (1, "demo-9\n")
    assert "demo-9 FAILED\nnode 0 failed first: image a/b:1 cannot be pulled" in done.err
    assert "push it" in done.err


def test_submit_under_existing_run_id_is_refused(cli, ended, write_job):
    done = cli("submit", "job.yaml", "--run-id", ended.id)
    assert done.code == 125
    assert f"run {ended.id} exists already" in done.err
    assert ended.status().state is State.SUCCEEDED


def test_submit_notes_more_ranks_than_cores(cli, write_job, scripted_submit):
    scripted_submit(State.SUCCEEDED, 0)
    done = cli("submit", write_job("launcher: forkserver\ndevice: cpu\n"), "--gpus", "5000")
    assert "note: 5000 ranks share" in done.err
