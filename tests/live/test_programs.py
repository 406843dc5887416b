"""Every job of the catalogue besides train.py's, for real and small, and what it must print."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from clusterkit import agent, api
from clusterkit.run.status import State

ROOT = Path(__file__).parents[2]
SENTIMENT = ROOT / "jobs" / "sentiment"
SECONDS = 120.0
TOLERANCE = 2e-6
SMALL = ("device=cpu", "threads_per_rank=1")

pytestmark = pytest.mark.live
needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None,
    reason="accelerate: not installed (pip install 'clusterkit[train]')",
)


@pytest.fixture
def run_job() -> Iterator[Callable[..., api.Run]]:
    """``run_job("tour/rpc", "--steps", 3, nodes=2)``: a job run to its end, which is success."""
    started: list[api.Run] = []

    def run(name: str, *args: object, settings: tuple[str, ...] = (), **options: object) -> api.Run:
        job = api.submit(
            f"jobs/{name}.yaml",
            settings=[*SMALL, *settings],
            more_args=[str(word) for word in args],
            **options,
        )
        started.append(job)
        if options.get("nodes") != "1:2":
            status = job.wait(SECONDS)
            # The launcher's lines as well: where no rank has come to print, they say why.
            log = [line.text for line in job.logs()]
            assert status.state is State.SUCCEEDED, (status, log[-20:])
        return job

    yield run
    for job in started:
        job.cancel()
        assert agent.processes_of(str(job.path)) == []


def said(run: api.Run, rank: int | None = None) -> list[str]:
    """What the program printed, marked lines left out."""
    return [
        line.text
        for line in run.logs()
        if line.rank is not None and line.event is None and rank in (None, line.rank)
    ]


def losses(run: api.Run) -> list[float]:
    return [row["loss"] for row in run.metrics()]


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 210 of the shipped reviews; a tenth of them is no multiple of the ranks."""
    with (ROOT / "jobs" / "data" / "reviews.csv").open(newline="") as file:
        rows = list(csv.reader(file))[:211]
    path = tmp_path_factory.mktemp("data") / "few reviews, quoted.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


# ---------------------------------------------------------------- operations


def test_collectives_job_gives_right_results_on_three_ranks(run_job) -> None:
    run = run_job("tour/collectives", nodes=3)
    table = said(run, rank=0)
    assert table[-1] == "gloo, 3 ranks: 29 operations right, 2 not there, 0 wrong"
    rows = {
        line.split("before")[0].strip(): (line, after)
        for line, after in pairwise(table)
        if "before" in line
    }
    for name, before, after in (
        ("send, recv: 0 to 1", "1 2 3 | 11 12 13 | 21 22 23", "1 2 3 | 1 2 3 | 21 22 23"),
        ("scatter from 0", "1 2 3 | - | -", "1 | 2 | 3"),
        ("all_reduce PRODUCT", "1 2 3 | 11 12 13 | 21 22 23", " | ".join(["231 528 897"] * 3)),
        ("all_to_all", "1 2 3 | 11 12 13 | 21 22 23", "1 11 21 | 2 12 22 | 3 13 23"),
    ):
        cells = [" | ".join(cell.strip() for cell in line.split("|")[1:4]) for line in rows[name]]
        assert cells == [before, after]
    assert "all_reduce PREMUL_SUM      gloo has none of it" in "\n".join(table)


# ---------------------------------------------------------------- data parallel


@pytest.mark.thorough
def test_ddp_by_torchrun_spawn_and_launch_has_same_losses(
    run_job, tmp_path: Path, monkeypatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    # torch makes this folder as soon as it imports its compiler, and leaves it.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    runs = [
        run_job("tour/ddp-torchrun", "--epochs", 1),
        run_job("tour/ddp-spawn", "--epochs", 1),
        run_job("tour/ddp-launch", "--epochs", 1, nodes=2, gpus=1),
    ]
    for run in runs:
        lines = said(run)
        for rank in (0, 1):
            assert f"GPU:{rank} | Epoch: 0 | Batchsize: 32 | Steps: 32" in lines
        assert "checked: 32 x 32 steps x 2 ranks = 2048 samples, each seen once" in lines
        assert "checked: all 2 ranks hold the same weights" in lines
        assert losses(run) == losses(runs[0])
    assert len(losses(runs[0])) == 32
    assert losses(runs[0])[-1] < losses(runs[0])[0] / 100
    assert list(temporary.iterdir()) == []


def test_ddp_pads_samples_that_do_not_divide_among_ranks(run_job) -> None:
    words = ("--samples", 100, "--epochs", 1)
    run = run_job("tour/ddp-torchrun", *words, gpus=3, settings=("launcher=forkserver",))
    assert "checked: 32 x 2 steps x 3 ranks = 192 >= 100 samples, each seen, 2 of them again" in (
        said(run)
    )


def test_data_parallel_does_not_split_batch_on_cpu(run_job) -> None:
    lines = said(run_job("tour/dp", "--steps", 3))
    assert lines[:2] == [
        "nn.DataParallel: 1 process, 0 GPUs",
        "a batch of 256 was computed as [256]",
    ]
    bare, wrapped = (re.findall(r"loss (\S+)", line) for line in lines[2:4])
    assert bare == wrapped != []


# ---------------------------------------------------------------- Hugging Face models


@pytest.mark.thorough
def test_sentiment_job_reports_accuracy_of_model_that_was_saved(
    run_job, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "model"
    run = run_job("sentiment/sentiment", "--epochs", 2, "--data", reviews, "--output", saved,
                  gpus=2, settings=("batch.global=16",))  # fmt: skip
    told = [row for row in run.metrics() if "eval_loss" in row]
    assert len(told) == 2
    monkeypatch.syspath_prepend(str(SENTIMENT))
    import torch
    from reviews import read_reviews, split
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    data = read_reviews(reviews)
    training, validation = split(len(data.texts), 0.1, 0)
    assert (len(training), len(validation), data.dropped) == (188, 21, 1)
    tokenizer = AutoTokenizer.from_pretrained(saved)
    model = AutoModelForSequenceClassification.from_pretrained(saved).eval()
    with torch.no_grad():
        inputs = tokenizer([data.texts[row] for row in validation], padding=True,
                           truncation=True, max_length=64, return_tensors="pt")  # fmt: skip
        logits = model(**inputs).logits
    labels = torch.tensor([data.labels[row] for row in validation])
    right = int((logits.argmax(-1) == labels).sum())
    assert told[-1]["accuracy"] == pytest.approx(right / 21, abs=1e-6)
    expected = torch.nn.functional.cross_entropy(logits, labels).item()
    assert told[-1]["eval_loss"] == pytest.approx(expected, abs=1e-5)


@needs_accelerate
@pytest.mark.thorough
@pytest.mark.parametrize(("zero", "name"), [(3, "sentiment-zero3"), (2, "sentiment-zero2")])
def test_trainer_has_same_losses_with_ddp_and_zero(
    run_job, reviews: Path, zero: int, name: str
) -> None:
    # Ranks of one node: one process does their imports.
    how = {"gpus": 2, "settings": ("batch={global: 16, micro: 4}",)}
    runs = {
        stage: run_job(f"sentiment/{job}", "--epochs", 1, "--data", reviews, **how)
        for stage, job in ((0, "sentiment-trainer"), (zero, name))
    }
    for stage, run in runs.items():
        assert len(losses(run)) == 12
        # A mean over ranks and accumulation: their sum would begin at 4 x ln 2.
        assert losses(run)[0] == pytest.approx(0.693, abs=0.1)
        assert losses(run) == pytest.approx(losses(runs[0]), abs=1e-5)
        (evaluation,) = (mark for mark in run.reported_events() if mark["event"] == "evaluation")
        rows = evaluation["accuracy"] * 21
        assert rows == pytest.approx(round(rows), abs=1e-6)
        kept = [re.findall(r"keeps (\d+) of (\d+)", line) for line in said(run) if "keeps" in line]
        assert len(kept) == 2
        for ((held, whole),) in kept:
            assert int(held) == pytest.approx(int(whole) / (2 if stage == 3 else 1), rel=0.01)


@pytest.mark.thorough
def test_qwen_zero3_job_reports_parameters_of_each_device(run_job) -> None:
    run = run_job("qwen", "--steps", 4, "--context", 32, gpus=2)
    lines = sorted(line for line in said(run) if line.startswith("Device"))
    shape = r"Device (\d) \| ZeRO Stage: 3 \| whole model=90688 \| parameter count=(\d+)"
    told = [re.fullmatch(shape, line) for line in lines]
    assert [(match[1], int(match[2])) for match in told if match] == [("0", 45344), ("1", 45344)]
    assert losses(run)[0] == pytest.approx(5.545, abs=0.3)  # ln 256
    assert losses(run)[-1] < losses(run)[0]


def test_unavailable_model_gives_one_error_line_without_retries() -> None:
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "NO_PROXY": "*"}
    done = program("sentiment.py", "--model", "nobody/no-such-model", env=hub)
    assert done.returncode == 1
    assert done.stderr.startswith("error: --model nobody/no-such-model: ")
    assert done.stderr.count("\n") == 1  # transformers says it when it tries again


def test_data_file_with_wrong_separator_fails_run_without_traceback(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("label;review\n1;good\n")
    run = api.submit("jobs/sentiment/sentiment.yaml", gpus=2, settings=[*SMALL],
                     more_args=["--data", str(wrong)])  # fmt: skip
    status = run.wait(SECONDS)
    assert (status.state, status.exit_code) == (State.FAILED, 1)
    assert status.failure is not None
    assert "separated by ;" in status.failure.cause
    assert not any("Traceback" in line for line in said(run))


# ---------------------------------------------------------------- rpc, elastic


def test_rpc_parameter_server_has_weights_of_single_process(run_job) -> None:
    run = run_job("tour/rpc", "--steps", 20)
    lines = said(run)
    assert "server: 20 steps, gradients of 2 workers" in lines
    assert any(line.startswith("checked: the weights of one process") for line in lines)
    assert len(losses(run)) == 20
    assert losses(run)[-1] < losses(run)[0]


def test_elastic_job_survives_node_that_leaves_and_returns(run_job) -> None:
    run = run_job("elastic", "--steps", 100000, "--context", 16, nodes="1:2",
                  settings=("checkpoint.every=5",))  # fmt: skip
    worlds, told, killed = [], {}, False
    for line in run.logs(follow=True):
        event = line.event or {}
        if event.get("event") == "start":
            worlds.append(event["world_size"])
            if worlds == [2, 1]:
                # As a machine that came back would: the plan's own command for this node.
                step = run.plan.steps[1]
                env = {**os.environ, **step.env}
                back = subprocess.Popen(step.argv, env=env, start_new_session=True)
        if event.get("event") == "metrics":
            # What was computed twice, by other worlds, must be the same.
            assert event["loss"] == pytest.approx(
                told.setdefault(event["step"], event["loss"]), abs=TOLERANCE
            )
            if event["step"] == 12 and not killed:
                killed = True
                kill_node(run, 1)
            if len(worlds) == 3 and event["step"] > max(told) - 1:
                break
    run.cancel()
    back.wait(SECONDS)
    assert worlds == [2, 1, 2]
    resumed = [mark["step"] for mark in run.reported_events() if mark["event"] == "resumed"]
    assert resumed[0] == 10
    assert len(set(resumed)) >= 2


def kill_node(run: api.Run, node: int) -> None:
    """SIGKILL to a node's agent and everything below it: the machine is gone."""
    started = json.loads((run.path / f"attempts/1/node-{node}/started.json").read_text())
    for pid in [started["pid"], *agent.descendants(started["pid"])]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def program(
    name: str, *args: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A training program by itself, without a launcher."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("CLUSTERKIT_")}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    settings = {"PYTHONPATH": path, "CLUSTERKIT_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(SENTIMENT / name), *args],
        env=kept | settings | (env or {}),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
