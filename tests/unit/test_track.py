"""A run's metrics in trackers: read back by TensorBoard and MLflow themselves, and never in the
run's way."""

from __future__ import annotations

import calendar
import importlib.util
import json
import math
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from clusterkit.lifecycle.supervisor import Supervisor
from clusterkit.output import track
from clusterkit.output.series import MOST_METRICS
from clusterkit.run import folder as run_folder
from clusterkit.run.folder import Event, RunFolder
from clusterkit.run.status import RunStatus, State
from clusterkit.spec import JobSpec

JOB = JobSpec(name="demo", program="train.py", track=("tensorboard",))


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    monkeypatch.setattr(track, "END_SECONDS", 200.0)  # the first test imports the library


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


def report(folder, attempt, *events, rank=0, node=0, second=0, end="\n"):
    """Append metrics lines to a node's log, one a second."""
    log = folder.node_dir(attempt, node) / "log"
    log.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        f"2026-11-21T20:{attempt:02}:{second + at:02}.500000Z {rank} @clusterkit "
        + json.dumps({"event": "metrics", **event})
        for at, event in enumerate(events)
    ]
    with log.open("a") as file:
        file.write("\n".join(lines) + end)


def tracked(folder, attempt=1, notes=None, by="tensorboard"):
    """Track what is in the folder by now."""
    job = msgspec.structs.replace(JOB, track=(by,))
    with track.tracking(job, folder, lambda: attempt, pytest.fail if notes is None else notes):
        pass


def scalars(folder):
    """Steps and values by tag, as TensorBoard's server reads them and as notebooks do."""
    from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator
    from tensorboard.util.tensor_util import make_ndarray

    path, everything = str(folder.path / "tensorboard"), {"scalars": 0, "tensors": 0}
    server = plugin_event_accumulator.EventAccumulator(path, everything).Reload()
    notebook = event_accumulator.EventAccumulator(path, everything).Reload()
    found = {
        tag: [(at.step, make_ndarray(at.tensor_proto).item()) for at in server.Tensors(tag)]
        for tag in server.Tags()["tensors"]
    }
    assert {tag: [step for step, _ in found[tag]] for tag in found} == {
        tag: [at.step for at in notebook.Scalars(tag)] for tag in notebook.Tags()["scalars"]
    }
    return found


def test_tensorboard_gets_rank_0_metrics_and_latest_value_of_step(folder):
    report(folder, 1, *({"step": step, "loss": step / 2, "note": "x"} for step in range(1, 6)))
    report(folder, 1, {"step": 4, "eval_loss": 9.0}, second=5)  # of a step that is past
    report(folder, 1, {"step": 1, "loss": 77.0}, rank=1)
    report(folder, 1, {"step": 1, "loss": 78.0}, node=1, rank=2)
    tracked(folder)
    assert scalars(folder) == {
        "loss": [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0), (5, 2.5)], "eval_loss": [(4, 9.0)]
    }  # fmt: skip
    report(folder, 2, {"step": 4, "loss": 40.0}, {"step": 5, "loss": 50.0}, {"step": 6, "loss": 60})
    tracked(folder, attempt=2)
    assert scalars(folder) == {
        "loss": [(1, 0.5), (2, 1.0), (3, 1.5), (4, 40.0), (5, 50.0), (6, 60.0)], "eval_loss": []
    }  # fmt: skip


def test_next_supervisor_rewrites_own_event_file_and_keeps_others(folder):
    report(folder, 1, {"step": 1, "loss": 1.0})
    tracked(folder)
    other = folder.path / "tensorboard" / "events.out.tfevents.1.program"
    other.write_bytes(b"")
    report(folder, 1, {"step": 2, "loss": 2.0}, second=1)
    tracked(folder)
    assert len(list(other.parent.iterdir())) == 2
    other.unlink()
    assert scalars(folder) == {"loss": [(1, 1.0), (2, 2.0)]}


def test_tensorboard_skips_malformed_metrics(folder):
    report(
        folder, 1,
        {"loss": 1.0}, {"step": True, "loss": 1.0}, {"step": math.nan}, {"step": 1 << 70},
        {"step": 1},
        {"step": 2, "loss": math.nan, "big": 10**400, "flag": True, "text": "x", "list": [1]},
        {"step": 3} | {f"m{number}": number for number in range(100)},
    )  # fmt: skip
    tracked(folder)
    found = scalars(folder)
    assert len(found) == MOST_METRICS
    assert math.isnan(found["loss"][0][1])
    assert not {"big", "flag", "text", "list"} & found.keys()


def test_rank_0_reader_returns_whole_lines_once_in_time_order(folder):
    def steps(newest=1):
        return [line.event["step"] for line in lines.read(newest)]

    lines = run_folder.Rank0(folder)
    assert steps() == []
    report(folder, 1, {"step": 1}, {"step": 2}, end="")
    assert steps() == [1]
    report(folder, 1, end="\n")
    # Under torchrun rank 0 may come to be on another node.
    report(folder, 1, {"step": 4}, second=4)
    report(folder, 1, {"step": 3}, node=1, second=3)
    report(folder, 2, {"step": 5})
    assert steps() == [2, 3, 4]
    report(folder, 3, {"step": 6})
    assert steps(newest=3) == [5, 6]


def test_tracker_write_error_is_noted_once_and_ends_tracking(folder, monkeypatch):
    notes: list[str] = []
    (folder.path / "tensorboard").write_text("")
    tracked(folder, notes=notes.append)
    assert notes == ["track: tensorboard: File exists; no more of this run is written to it"]

    def full(self):
        raise OSError(28, "No space left on device")

    (folder.path / "tensorboard").unlink()
    monkeypatch.setattr(track.TensorBoard, "flush", full)
    tracked(folder, notes=notes.append)
    assert notes[1:] == [
        "track: tensorboard: No space left on device; no more of this run is written to it"
    ]


def test_slow_tracker_does_not_block_run_end(folder, monkeypatch):
    go_on = threading.Event()

    class Slow(track.TensorBoard):
        def flush(self):
            go_on.wait()

    monkeypatch.setitem(track.TRACKERS, "tensorboard", Slow)
    monkeypatch.setattr(track, "END_SECONDS", 0.01)
    before = set(threading.enumerate())
    notes: list[str] = []
    tracked(folder, notes=notes.append)
    assert notes == ["track: tensorboard: the last metrics took longer than 0.01 s"]
    go_on.set()
    for thread in set(threading.enumerate()) - before:
        thread.join()


def test_supervisor_tracks_metrics_until_run_end(cwd, unstarted_run, monkeypatch):
    run = unstarted_run("track: [tensorboard]\n")
    supervisor = Supervisor(RunFolder(run.path))
    monkeypatch.setattr("clusterkit.lifecycle.supervisor.signal.signal", lambda *_: None)

    def attempts(adopt):
        report(supervisor.folder, 1, {"step": 1, "loss": 1.0})
        supervisor._finish(State.SUCCEEDED)

    monkeypatch.setattr(supervisor, "supervise", attempts)
    supervisor.main()
    assert scalars(supervisor.folder) == {"loss": [(1, 1.0)]}
    assert supervisor.folder.records("events.jsonl", Event) == []


def test_submit_refuses_tracker_whose_library_is_missing(cwd, refused, write_job, monkeypatch):
    (cwd / "tensorboard").mkdir()  # event files of other programs
    namespace = importlib.util.spec_from_loader("tensorboard", None)
    for found in (None, namespace):
        monkeypatch.setattr(importlib.util, "find_spec", lambda _, found=found: found)
        error = refused("submit", write_job("track: [tensorboard]\n"))
        assert "track: tensorboard is not installed on this machine" in error
        assert "pip install 'clusterkit[track]'" in error
    assert not list(Path(cwd).rglob("state.json"))


def test_plan_refuses_unknown_tracker_and_names_choices(refused, write_job):
    error = refused("plan", write_job("track: [wandbb]\n"))
    assert "track[0]: 'wandbb'" in error
    assert "wandb" in error


# ---------------------------------------------------------------- others


class Told(SimpleNamespace):
    """A tracker's library that writes down what is done with it."""

    def __init__(self, **fields):
        super().__init__(calls=[], **fields)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **fields):
            self.calls.append((name, *args, *fields.items()))
            return self

        return call

    def said(self, name):
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
def library(monkeypatch, tmp_path):
    """``library("wandb")``: stands in for it."""

    def make(name, **fields):
        found = Told(**fields)
        monkeypatch.setitem(sys.modules, name, found)
        return found

    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return make


def test_wandb_gets_every_value_with_step_and_timestamp(folder, library, monkeypatch):
    wandb = library("wandb")
    report(folder, 1, {"step": 7, "loss": 0.5, "note": "x"}, {"step": 8, "loss": 0.25})
    tracked(folder, by="wandb")
    at = calendar.timegm((2026, 11, 21, 20, 1, 0)) + 0.5
    assert wandb.said("log") == [
        ({"loss": 0.5, "step": 7, "_timestamp": at},),
        ({"loss": 0.25, "step": 8, "_timestamp": at + 1},),
    ]
    (made,) = wandb.said("init")
    assert {("project", "demo"), ("id", folder.run_id), ("mode", "offline")} <= {*made[:-1]}
    assert wandb.calls[-1] == ("finish", ("exit_code", 1))  # nothing says that it succeeded
    about = {"run": folder.run_id, "job": "demo", "cluster": "local", "backend": "local"}
    folder.write_json("state.json", RunStatus(**about, state=State.SUCCEEDED))
    # With a key it goes where the key's account is; the key itself is the library's business.
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    tracked(folder, by="wandb")
    assert ("mode", None) in wandb.said("init")[1]
    assert not any(b"hunter2" in path.read_bytes() for path in folder.path.glob("*.*"))


def test_wandb_login_in_netrc_counts_as_key(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.com/")
    assert not track._has_key()
    logins = tmp_path / ".netrc"
    logins.write_text("machine wandb.example.com login user password hunter2\n")
    logins.chmod(0o600)
    assert track._has_key()


def test_mlflow_reuses_run_and_sanitizes_metric_names(folder, monkeypatch):
    runs: list[SimpleNamespace] = []
    sent: list[list[tuple[object, ...]]] = []
    uris = set()

    class Client:
        def __init__(self, tracking_uri):
            uris.add(tracking_uri)

        def get_experiment_by_name(self, name):
            return SimpleNamespace(experiment_id="7") if runs else None

        def create_experiment(self, name):
            assert name == "demo"
            return "7"

        def search_runs(self, experiments, ours):
            assert (experiments, ours) == (["7"], f"tags.clusterkit = '{folder.run_id}'")
            return runs

        def create_run(self, experiment, tags, run_name):
            assert (experiment, tags["clusterkit"], run_name) == ("7", *[folder.run_id] * 2)
            runs.append(SimpleNamespace(info=SimpleNamespace(run_id="r1")))
            return runs[0]

        def log_batch(self, run, metrics):
            assert run == "r1"
            sent.append(metrics)

        def set_terminated(self, run, status):
            assert (run, status) == ("r1", "FAILED")

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    monkeypatch.setenv("CLUSTERKIT_HOME", "/runs")
    entities = SimpleNamespace(Metric=lambda *each: each)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setitem(sys.modules, "mlflow.tracking", SimpleNamespace(MlflowClient=Client))
    at = 1000 * calendar.timegm((2026, 11, 21, 20, 1, 0)) + 500
    report(folder, 1, {"step": 1, "loss": 1.0, "lr(max)": 2.0})
    tracked(folder, by="mlflow")
    many = {f"m{number}": number for number in range(30)}
    report(folder, 1, *({"step": step, **many} for step in range(2, 42)), second=1)
    tracked(folder, by="mlflow")
    assert uris == {"sqlite:////runs/mlflow.db"}
    assert sent[0] == [("loss", 1.0, at, 1), ("lr_max_", 2.0, at, 1)]
    assert [len(batch) for batch in sent[1:]] == [1000, 200]
    assert len(runs) == 1


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_next_supervisor_continues_tracking_where_previous_stopped(folder, library, name):
    told = library(name)
    report(folder, 1, {"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0})
    tracked(folder, by=name)
    report(folder, 1, {"step": 3, "loss": 3.0}, second=2)
    report(folder, 2, {"step": 2, "loss": math.nan}, {"step": 3, "loss": 33.0})
    tracked(folder, attempt=2, by=name)
    losses = [call[0]["loss"] for call in told.said("log")]
    assert math.isnan(losses.pop(3))
    assert losses == [1.0, 2.0, 3.0, 33.0]
