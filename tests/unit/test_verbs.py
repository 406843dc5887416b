"""The verbs of version 0.1 that `tests/unit/cli/` does not hold, their exit codes and old names."""

import errno
import io
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from clusterkit import api
from clusterkit.cli import GROUPS, VERBS
from clusterkit.errors import RunFolderError, Unavailable
from clusterkit.lifecycle import launch
from clusterkit.run.folder import RunFolder
from clusterkit.run.status import Failure, NodeStatus, RunStatus, State
from clusterkit.spec import JobSpec

pytestmark = pytest.mark.usefixtures("no_gpus")


@pytest.fixture
def ended(unstarted_run, by_hand):
    """Make a run that has ended: ``ended("a", State.FAILED, 7)``."""

    def make(run_id, state=State.SUCCEEDED, code=0, *, ago=10.0, log="", **fields):
        run = unstarted_run("launcher: forkserver\nargs: [--lr, '1']\n", run_id=run_id)
        by_hand(run).node(exit_code=code, log=log)
        by_hand(run).unwatched()
        status = RunStatus(
            run=run.id, job="demo", cluster="local", backend="local", state=state, exit_code=code,
            nodes=(NodeStatus(node=0, host="localhost", state=state, exit_code=code),),
            started_at=time.time() - ago - 5, finished_at=time.time() - ago, **fields,
        )  # fmt: skip
        RunFolder(run.path).write_json("state.json", status)
        return run

    return make


# ---------------------------------------------------------------- help and names


def test_help_shows_groups_in_order(cli):
    said = cli("--help").out
    places = [said.index(f"\n{group}:\n") for group in ("Start", "Runs", "Cluster", "Other")]
    assert places == sorted(places)
    assert list(GROUPS) == ["Start", "Runs", "Inside a run", "Cluster", "Other"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ls-jobs", "clusterkit jobs"),
        ("examples", "clusterkit jobs --examples, jobs --copy NAME"),
        ("notify", "clusterkit doctor --notify"),
        ("plot", "clusterkit metrics RUN... --plot FILE.png"),
    ],
)
def test_old_verb_is_refused_with_new_name(refused, old, new):
    assert old not in VERBS
    assert refused(old, "x") == f"error: {old} has a new name\n hint: {new}\n"


def test_old_option_works_and_names_new_option(cli, cwd):
    (cwd / "c.yaml").write_text("lab: {backend: local}\n")
    done = cli("clusters", "--clusters", "c.yaml", "--json")
    assert [each["name"] for each in done.json] == ["lab", "local"]
    assert "note: --clusters has a new name: --cluster-file\n" in done.err


def test_ranks_per_node_option_is_alias_of_gpus(cli, write_job):
    first = cli("plan", write_job("launcher: forkserver\n"), "--ranks-per-node", "2", "--json")
    assert first.json["world_size"] == 2
    assert cli("plan", "job.yaml", "--gpus", "2", "--json").json["world_size"] == 2


def test_debug_flag_works_after_verb(cli):
    with pytest.raises(LookupError):
        cli("status", "nope", "--debug")


# ---------------------------------------------------------------- errors


def test_error_with_json_flag_is_one_json_object(cli):
    done = cli("status", "nope", "--json")
    assert done.code == 125
    assert done.json["error"]["message"].startswith("run 'nope' is unknown under ")
    assert done.err.startswith("error: run 'nope' is unknown")


@pytest.mark.parametrize(
    "words",
    [("status",), ("status", "--nope", "last"), ("submit", "no.yaml"), ("nonsense",),
     ("logs", "last", "--since", "soon"), ("logs", "last", "--grep", "(")],
)  # fmt: skip
def test_refused_input_exits_with_125(cli, words):
    assert cli(*words).code == 125


# ---------------------------------------------------------------- wait


def test_wait_exits_with_code_of_first_failed_run(cli, ended):
    failure = Failure(node=0, rank=1, exit_code=7, cause="ValueError: bad")
    ended("good"), ended("bad", State.FAILED, 7, failure=failure), ended("worse", State.FAILED, 9)
    assert cli("wait", "good").code == 0
    done = cli("wait", "good", "bad", "worse")
    assert done.code == 7
    assert done.out == "good SUCCEEDED\nbad FAILED\nworse FAILED\n"
    assert "ValueError: bad" in done.err
    assert [each["exit_code"] for each in cli("wait", "bad", "good", "--json").json] == [7, 0]
    assert cli("wait", "good", "--json").json["state"] == "SUCCEEDED"


def test_wait_timeout_exits_with_124_and_run_goes_on(cli, unstarted_run):
    run = unstarted_run()
    done = cli("wait", run.id, "--timeout", "0.1s")
    assert (done.code, done.out) == (124, f"{run.id} PENDING\n")
    assert f"run {run.id} is PENDING after 0." in done.err
    assert run.status().state is State.PENDING


# ---------------------------------------------------------------- rerun


def test_rerun_prepares_recorded_job_on_recorded_cluster(ended, facts, monkeypatch, cwd):
    run = ended("first")
    (cwd / "job.yaml").unlink()  # the record is enough
    entry = json.loads((run.path / "cluster.json").read_bytes())
    (run.path / "cluster.json").write_text(json.dumps({**entry, "env": {"FROM": "record"}}))
    probed = []

    def probe(self, cluster, transport, job):
        probed.append(cluster)
        return facts

    monkeypatch.setattr("clusterkit.backends.local.backend.LocalBackend.probe", probe)
    with launch.prepare_again(run, settings=["restarts=2"], more_args=["--steps", "3"]) as ready:
        before = msgspec.json.decode((run.path / "job.json").read_bytes(), type=JobSpec)
        assert ready.job == msgspec.structs.replace(
            before, restarts=2, args=("--lr", "1", "--steps", "3")
        )
        assert ready.plan.run_id != "first"
        assert ready.cluster_name == "local"
    assert probed[0].env == {"FROM": "record"}


def test_rerun_starts_new_run_with_more_args(cli, ended, monkeypatch):
    run = ended("first")
    seen = []

    def start(ready, as_json, *, detach, top):
        seen.append((ready.job.args, detach))
        ready.__exit__()
        return 5

    monkeypatch.setattr("clusterkit.cli.rerun.start", start)
    assert cli("rerun", run.id, "-d", "--", "--epochs", "-3").code == 5
    assert seen == [(("--lr", "1", "--epochs", "-3"), True)]


def test_rerun_refuses_unknown_run(refused):
    assert "run 'nope' is unknown" in refused("rerun", "nope")


# ---------------------------------------------------------------- clusters


def test_clusters_reports_which_clusters_are_reachable(cli, cwd, monkeypatch):
    (cwd / "clusters.yaml").write_text(
        "lab: {backend: ssh, hosts: [{name: h1}]}\nhere: {backend: local}\nbad: {backend: nope}\n"
    )

    def probe(self, cluster, transport, job):
        raise Unavailable("h1: connection refused")

    monkeypatch.setattr("clusterkit.backends.ssh.backend.SshBackend.probe", probe)
    done = cli("clusters", "--json")
    found = {each["name"]: each for each in done.json}
    assert done.code == 1
    assert list(found) == ["bad", "here", "lab", "local"]
    assert found["lab"]["error"] == "h1: connection refused"
    assert found["lab"]["backend"] == "ssh"
    assert "'nope' is not a backend" in found["bad"]["error"]
    assert found["here"]["error"] is None
    assert "can be reached" in cli("clusters").out


# ---------------------------------------------------------------- several runs


def test_status_and_cancel_take_several_runs(cli, ended):
    ended("a"), ended("b", State.FAILED, 3)
    done = cli("status", "a", "b")
    assert done.code == 0
    assert done.out.index("a  SUCCEEDED") < done.out.index("b  FAILED")
    assert [each["run"] for each in cli("status", "a", "b", "--json").json] == ["a", "b"]
    assert cli("cancel", "a", "b").out == "a SUCCEEDED\nb FAILED\n"


def test_ls_limits_to_newest_runs_and_filters_by_state(cli, ended):
    for name in ("a", "b", "c"):
        ended(name, State.FAILED if name == "b" else State.SUCCEEDED)
    assert [run["run"] for run in cli("ls", "--limit", "2", "--json").json] == ["c", "b"]
    assert [run["run"] for run in cli("ls", "--state", "failed", "--json").json] == ["b"]
    assert cli("ls", "--state", "RUNNING").err == "no run is in that state\n"


def test_rm_by_age_and_state_removes_only_matching_runs(cli, ended, unstarted_run, monkeypatch):
    day = 86400.0
    old, failed = ended("old", ago=40 * day), ended("bad", State.FAILED, 1, ago=31 * day)
    new, pending = ended("new"), unstarted_run(run_id="pending")
    words = ("rm", "--older-than", "30d", "--state", "FAILED")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    done = cli(*words)  # nobody to ask
    assert (done.code, done.err) == (125, "error: 1 run to remove\n hint: add --yes\n")
    assert failed.path.exists()
    assert cli(*words, "--yes").out == "bad\n"
    assert cli("rm", "--older-than", "30d", "-y").out == "old\n"
    assert [path.exists() for path in (old.path, failed.path)] == [False, False]
    assert new.path.exists()
    assert pending.path.exists()
    assert cli("rm").code == cli("rm", "new", "--older-than", "1d").code == 125
    assert new.path.exists()


def test_rm_of_repeated_run_id_removes_run_once(cli, ended):
    ended("a")
    done = cli("rm", "a", "a")
    assert (done.code, done.out) == (0, "a\n")


# ---------------------------------------------------------------- logs and metrics


def stamped(ago, text):
    at = time.time() - ago
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
    return f"{whole}.000000Z 0 {text}\n"


def test_logs_filters_by_time_pattern_and_attempt(cli, ended):
    log = stamped(7200, "old Error one") + stamped(60, "new line") + stamped(30, "new Error two")
    run = ended("a", log=log)

    def texts(*words):
        return [line["text"] for line in cli("logs", run.id, "--json", *words).json]

    assert texts("--since", "1h") == ["new line", "new Error two"]
    assert texts("--grep", "Err.r") == ["old Error one", "new Error two"]
    assert texts("--grep", "Error", "--tail", "1") == ["new Error two"]
    assert texts("--attempt", "1", "--since", "5m", "--grep", "line") == ["new line"]
    done = cli("logs", run.id, "--attempt", "2")
    assert (done.code, done.err) == (125, "error: --attempt: run a has 1 attempt\n")


def test_logs_of_several_runs_are_merged_by_time_and_name_their_run(cli, ended):
    ended("a", log=stamped(60, "one") + stamped(20, "three"))
    ended("b", log=stamped(40, "two") + stamped(10, "four"))

    def said(*words):
        lines = cli("logs", "a", "b", "a", *words).out.splitlines()
        return [f"{line.split()[0]} {line.split()[-1]}" for line in lines]

    merged = ["a one", "b two", "a three", "b four"]
    assert said() == merged
    assert sorted(said("-f")) == sorted(merged)
    assert said("--tail", "2") == merged[2:]
    assert said("--grep", "o") == ["a one", "b two", "b four"]
    assert said("--grep", "o", "--tail", "2") == ["b two", "b four"]
    assert cli("logs", "a", "b", "--raw").out == "one\ntwo\nthree\nfour\n"
    objects = cli("logs", "a", "b", "--json").json
    assert [f"{each['run']} {each['text']}" for each in objects] == merged
    lines = cli("logs", "a", "b", "-f", "--json").out.splitlines()
    assert {(json.loads(line)["run"], json.loads(line)["rank"]) for line in lines} == {
        ("a", 0), ("b", 0),
    }  # fmt: skip
    assert "run" not in cli("logs", "a", "--json").json[0]


def test_logs_grep_matches_metrics_as_written_and_as_shown(cli, ended):
    mark = '@clusterkit {"event": "metrics", "step": 3, "loss": 0.5}'
    ended("a", log=stamped(60, mark) + stamped(50, "step 4"))
    for pattern in ("step 3  loss 0.5", '"step": 3'):
        assert [line["text"] for line in cli("logs", "a", "--json", "--grep", pattern).json] == [
            mark
        ]


def test_metrics_plots_several_runs_and_requires_plot_option(cli, ended, monkeypatch):
    ended("a"), ended("b")
    seen = []
    monkeypatch.setattr(api, "plot", lambda runs, path: seen.append((runs, path)) or path)
    assert cli("metrics", "a", "b", "--plot", "x.png").out == "x.png\n"
    assert seen == [(("a", "b"), "x.png")]
    assert "need --plot" in cli("metrics", "a", "b").err


# ---------------------------------------------------------------- plan


def test_plan_lists_files_and_shows_contents_with_files_flag(cli, write_job):
    short = cli("plan", write_job("launcher: forkserver\n")).out
    whole = cli("plan", "job.yaml", "--files").out
    assert "\nfiles\n" in short
    assert "node.sh" in short
    assert "#!/bin/sh" not in short
    assert "#!/bin/sh" in whole
    assert "nproc_per_node=1" in short
    assert short.split("\nsteps\n")[1] == whole.split("\nsteps\n")[1]


# ---------------------------------------------------------------- the output


def run_with(output, *words, **streams):
    """The exit code and standard error of ``clusterkit``, with what standard output is."""
    done = subprocess.run(
        [sys.executable, "-m", "clusterkit", *words], stdout=output, stderr=subprocess.PIPE,
        text=True, check=False, **streams,
    )  # fmt: skip
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize("words", [("--help",), ("submit", "--help"), ("jobs",)])
def test_closed_pipe_ends_any_output_with_141(words):
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as closed:
        assert run_with(closed, *words) == (141, [])


def test_error_that_cannot_be_written_has_its_exit_code():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "clusterkit", "status", "nosuch", "--json"]
        for streams in ({"stdout": full}, {"stderr": full}, {"stdout": full, "stderr": full}):
            streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **streams}
            assert subprocess.run(command, check=False, **streams).returncode == 125


@pytest.fixture
def unwritable():
    """Standard streams that cannot be written: each alone and both, full and without a reader."""
    reads, writes = os.pipe()
    os.close(reads)
    with open("/dev/full", "w") as full, os.fdopen(writes, "w") as closed:
        yield [
            {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **streams}
            for file in (full, closed)
            for streams in ({"stdout": file}, {"stderr": file}, {"stdout": file, "stderr": file})
        ]


@pytest.mark.parametrize("words", [("wait", "a"), ("attach", "a", "--json")])
def test_verbs_that_follow_run_exit_with_its_code_where_output_is_lost(words, ended, unwritable):
    ended("a", State.FAILED, 7, failure=Failure(node=0, rank=0, exit_code=7, cause="x"))
    command = [sys.executable, "-m", "clusterkit", *words]
    codes = [subprocess.run(command, check=False, **streams).returncode for streams in unwritable]
    assert codes == [7] * 6


def test_submit_exits_with_code_of_run_where_output_is_lost(cwd, unwritable):
    words = ["submit", "--gpus", "1", "--no-doctor", "--", "sh", "-c", "echo x; exit 7"]
    command = [sys.executable, "-m", "clusterkit", *words]
    assert subprocess.run(command, check=False, **unwritable[2]).returncode == 7
    assert subprocess.run(command, check=False, **unwritable[5]).returncode == 7


def test_lost_output_is_noted_and_all_runs_are_cancelled_and_removed(ended):
    ended("a"), ended("b")
    for verb in ("cancel", "rm"):
        with open("/dev/full", "w") as full:
            code, lines = run_with(full, verb, "a", "b")
        assert (code, lines[-1]) == (0, "note: No space left on device: standard output")
    assert api.runs() == []


INTERRUPTED = """
import os, signal, sys

interrupting = sys.argv.pop(1)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == interrupting:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
from clusterkit.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["click", "clusterkit.cli.status", "clusterkit.run.find"])
def test_interrupt_during_import_ends_with_130_and_no_traceback(module):
    command = [sys.executable, "-c", INTERRUPTED, module, "status", "nope"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.parametrize("words", [("ls", "--json"), ("jobs",)])
def test_full_standard_output_is_reported_as_one_error(words):
    with open("/dev/full", "w") as full:
        code, lines = run_with(full, *words)
    assert (code, lines) == (125, ["error: No space left on device: standard output"])


def test_closed_pipe_ends_with_141(ended):
    ended("a", log=stamped(60, "x"))
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as closed:
        assert run_with(closed, "logs", "a") == (141, [])
    code = subprocess.run(
        ["bash", "-c", '"$@" | true; exit ${PIPESTATUS[0]}', "bash", sys.executable, "-m",
         "clusterkit", "schema"], check=False,
    ).returncode  # fmt: skip
    assert code in (0, 141)  # by whether it wrote before the reader ended


def test_status_works_with_closed_standard_streams(ended):
    ended("a")
    for closing in (">&-", ">&- 2>&- <&-"):
        words = f'"$@" {closing}'
        command = [
            "bash",
            "-c",
            words,
            "bash",
            sys.executable,
            "-m",
            "clusterkit",
            "status",
            "last",
        ]
        done = subprocess.run(command, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")


def test_cancel_refuses_run_of_other_user(unstarted_run, monkeypatch):
    def touch(path, mode=0o666):
        raise PermissionError(errno.EACCES, "Permission denied")

    run = unstarted_run()
    monkeypatch.setattr(Path, "touch", touch)
    with pytest.raises(RunFolderError, match="Permission denied"):
        run.cancel()


def test_rm_refuses_run_of_other_user_and_names_owner(cli, ended, monkeypatch):
    path = ended("a").path
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    done = cli("rm", "a", "--force")
    assert done.code == 125
    owner = path.owner()
    assert done.err == f"error: run a belongs to {owner}\n hint: only {owner} can remove it\n"
    assert path.exists()


def test_export_replaces_existing_file_only_with_force(cli, cwd):
    words = ("export", "job", "-o", "x.yaml", "--gpus", "1", "--", "true")
    assert cli(*words).code == 0
    (cwd / "x.yaml").write_text("mine")
    done = cli(*words)
    assert (done.code, done.err) == (
        125,
        "error: x.yaml exists already\n hint: --force replaces it\n",
    )
    assert (cwd / "x.yaml").read_text() == "mine"
    assert cli(*words[:4], "--force", *words[4:]).code == 0
    assert (cwd / "x.yaml").read_text() != "mine"


def test_export_writes_to_device_and_refuses_folder_and_missing_folder(cli, cwd):
    os.mkfifo("fifo")
    words = ("--gpus", "1", "--", "true")
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit((cwd / "fifo").read_bytes)
        assert cli("export", "job", "-o", "fifo", *words).code == 0
        assert read.result().startswith(b"#")
    assert (cwd / "fifo").is_fifo()
    for output, said in {
        str(cwd): f"{cwd} is a folder\n hint: name a file in it",
        "none/x": "none/x: there is no folder none\n hint: mkdir -p none",
    }.items():
        assert cli("export", "job", "-o", output, *words).err == f"error: {said}\n"


def test_ls_shows_unreadable_run_folder_as_unknown(cli, ended, unstarted_run, monkeypatch):
    """Path.exists raises there, where os.path.exists does not."""
    ended("a")
    other = RunFolder(unstarted_run(run_id="b").path)
    read, exists = RunFolder.read, Path.exists

    def reads(folder, name):
        if folder.path == other.path:
            raise RunFolderError(f"cannot read {name}: Permission denied")
        return read(folder, name)

    def path_exists(path):
        if path.parent == other.path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(RunFolder, "read", reads)
    monkeypatch.setattr(Path, "exists", path_exists)
    states = {row["run"]: row["state"] for row in cli("ls", "--json").json}
    assert states == {"a": "SUCCEEDED", "b": "UNKNOWN"}
