"""The training programs, part by part; tests/live/test_programs.py runs them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from clusterkit.jobfile import loader
from clusterkit.run.logs import parse_mark
from tests.unit.jobs.conftest import FILES, ROOT
from tests.unit.runtime.conftest import environment

JOBS = sorted((ROOT / "jobs").rglob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_program_is_under_200_lines_without_clusterkit_import(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 200
    assert not re.search(r"^\s*(from|import) clusterkit\b", text, re.MULTILINE)


STANDALONE = {
    "ddp": (["train/ddp.py"], ["--epochs", "1"], "checked: all 2 ranks hold the same weights"),
    "ddp_start": (
        ["tour/ddp_start.py", "train/ddp.py"], ["spawn", "--epochs", "1"], "checked: all 2 ranks"
    ),
    "dp": (["tour/dp.py"], ["--steps", "2"], "without GPUs nothing was divided"),
    "rpc": (["tour/rpc.py"], ["--steps", "2"], "checked: the weights of one process"),
    "collectives": (
        ["tour/collectives.py", "tour/operations.py", "tour/operations_all.py"],
        ["barrier"], "1 operations right",
    ),
    "sentiment": (
        [f"sentiment/{name}.py" for name in ("sentiment", "classifier", "reviews")], [], "accuracy"
    ),
    "sentiment_trainer": (
        [f"sentiment/{name}.py" for name in ("sentiment_trainer", "classifier", "reviews")],
        [], "keeps",
    ),
}  # fmt: skip
"""What to copy from jobs/, with which arguments it runs, and what it then says."""
ONE_PROCESS = {"ddp_start", "dp", "sentiment", "sentiment_trainer"}
"""Those that start ranks themselves, need none, or differ from the rest by what one rank does:
each import of torch takes seconds of CI. In two ranks tests/live/test_programs.py runs them."""
EACH_TIME = ("ddp_start", "sentiment")
"""One of plain torch, which starts ranks of ddp.py, and one of transformers."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in EACH_TIME else pytest.mark.thorough)
        for name in STANDALONE
    ],
)
def test_copied_program_runs_without_clusterkit(name: str, tmp_path: Path) -> None:
    files, words, said = STANDALONE[name]
    folder = tmp_path / "mine"
    folder.mkdir()
    for file in files:
        (folder / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "jobs" / file, folder / file)
        beside = (folder / file).with_name("clusterkit.py")
        beside.write_text("raise ImportError('there is no clusterkit here')")
    if name.startswith("sentiment"):
        data = folder / "reviews.csv"
        data.write_text("label,review\n" + "1,good one\n0,bad one\n" * 20)
        words = ["--data", str(data), "--epochs", "1", "--max-length", "8"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = environment() | {"TMPDIR": str(tmp_path)}  # torchrun leaves a folder there
    if name in ONE_PROCESS:
        launcher = []
    if name in ONE_PROCESS - {"ddp_start"}:
        env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "0"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, *launcher, files[0], *words],
        cwd=folder, env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    events = [event for line in done.stdout.splitlines() if (event := parse_mark(line))]
    assert "start" in [event["event"] for event in events]


def test_standalone_table_covers_every_program_file() -> None:
    copied = {ROOT / "jobs" / file for files, _, _ in STANDALONE.values() for file in files}
    assert copied == {path for path in FILES if path.name != "make_reviews.py"}


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_job_file_is_named_and_described(path: Path) -> None:
    job = loader.load_job(path)
    assert job.name == path.stem
    assert 10 < len(job.description) < 100
    assert path.read_text().startswith("# ")


def test_zero_job_files_differ_in_their_stage_only() -> None:
    texts = [(ROOT / "jobs" / f"zero{stage}.yaml").read_text() for stage in range(4)]
    for stage, text in enumerate(texts):
        assert text.replace(f"stage: {stage}}}", "stage: 3}") == texts[3]
        setting = f"deepspeed.zero_optimization.stage={stage}"
        chosen = loader.load_job(ROOT / "jobs" / "zero3.yaml", [setting, f"name=zero{stage}"])
        assert chosen == loader.load_job(ROOT / "jobs" / f"zero{stage}.yaml")


# ---------------------------------------------------------------- flags

PARSERS = {
    "ddp": lambda module: module.parse_args(),
    "dp": lambda module: module.parse_args(0),
    "rpc": lambda module: module.parse_args(2),
    "sentiment": lambda module: module.parse_args(),
    "sentiment_trainer": lambda module: module.parse_args(),
}


@pytest.fixture(params=PARSERS)
def parse(request: pytest.FixtureRequest, program, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``parse("--batch", "3")``: what a program makes of these words."""
    module = program(request.param)

    def parse(*words: str) -> Any:
        monkeypatch.setattr(sys, "argv", [f"{request.param}.py", *words])
        return PARSERS[request.param](module)

    parse.accumulates = request.param == "sentiment_trainer"  # type: ignore[attr-defined]
    return parse


@pytest.mark.parametrize("words", [["--batch", "0"], ["--batch", "x"], ["more"]])
def test_program_exits_2_on_wrong_flag(parse, capsys, words: list[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        parse(*words)
    assert leaving.value.code == 2
    said = capsys.readouterr().err
    assert ": error: " in said
    assert "Traceback" not in said


def test_program_takes_batch_default_from_job_environment(parse, monkeypatch, capsys) -> None:
    monkeypatch.setenv("CLUSTERKIT_MICRO_BATCH", "7")
    assert parse().batch == 7
    assert parse("--batch", "3").batch == 3
    monkeypatch.setenv("CLUSTERKIT_ACCUMULATION", "3")
    if parse.accumulates:
        assert (parse().batch, parse().accumulation) == (7, 3)
        return
    with pytest.raises(SystemExit) as leaving:
        parse()
    assert leaving.value.code == 2
    assert "error: this program does not accumulate" in capsys.readouterr().err


@pytest.mark.parametrize("words", [
    ["--samples", "9", "--epochs", "1"],
    ["--", "--samples", "9", "--epochs", "1"],
])  # fmt: skip
@pytest.mark.parametrize("first", [["spawn"], ["--ranks", "3", "spawn"], ["spawn", "--ranks", "3"]])
def test_ddp_start_passes_arguments_through_to_ddp(
    program, monkeypatch: pytest.MonkeyPatch, first: list[str], words: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ddp_start.py", *first, *words])
    args = program("ddp_start").parse_args()
    assert (args.way, args.ranks) == ("spawn", 3 if len(first) > 1 else None)
    assert args.rest == ["--samples", "9", "--epochs", "1"]


# ---------------------------------------------------------------- the hub


@contextmanager
def hub(status: int) -> Iterator[tuple[str, list[str]]]:
    """A hub that answers everything with ``status``; gives its address and what it was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")


@pytest.mark.usefixtures("no_proxy")
@pytest.mark.parametrize("status", [200, 401, 404, 500])
def test_hub_counts_as_reachable_on_any_http_status(
    program, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    with hub(status) as (address, asked):
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert program("classifier")._answers("owner/model")
    assert asked == ["/api/models/owner/model"]


@pytest.mark.usefixtures("no_proxy")
@pytest.mark.parametrize(
    "endpoint", ["http://127.0.0.1:9", "nonsense", "http://no.such.host.invalid"]
)
def test_hub_counts_as_unreachable_without_answer(
    program, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert not program("classifier")._answers("owner/model")


def test_classifier_refuses_model_folder_without_config_json(program, tmp_path: Path) -> None:
    classifier = program("classifier")
    with pytest.raises(classifier.BadInput, match=r"holds no config\.json"):
        classifier.import_transformers(str(tmp_path))


# ---------------------------------------------------------------- counting right


class Guess(nn.Module):
    """Says class 1 when the first token is above 50; its loss is uneven over the rows."""

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        sure = input_ids[:, :1].float() / 50 - 1
        return SimpleNamespace(logits=torch.cat([-sure, sure], dim=1))


def collate(rows: list[dict[str, Any]]) -> Any:
    class Batch(dict):
        def to(self, device: torch.device) -> Batch:
            return self

    return Batch(
        input_ids=torch.tensor([row["input_ids"] for row in rows]),
        labels=torch.tensor([row["labels"] for row in rows]),
    )


@pytest.mark.parametrize("count", [1, 2, 7, 31, 64])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_sentiment_evaluation_is_independent_of_rank_count(
    program, monkeypatch: pytest.MonkeyPatch, count: int, ranks: int
) -> None:
    sentiment = program("sentiment")
    draw = torch.Generator().manual_seed(count)
    rows = [
        {"input_ids": [int(token)], "labels": int(label)}
        for token, label in zip(
            torch.randint(0, 100, (count,), generator=draw),
            torch.randint(0, 2, (count,), generator=draw),
            strict=True,
        )
    ]
    told: list[list[float]] = []
    for rank in range(ranks):

        def mean(*values: torch.Tensor) -> list[float]:
            told.append([float(value) for value in values])
            return [0.0, 0.0]

        monkeypatch.setattr(sentiment, "mean", mean)
        sentiment.evaluate(
            Guess(), rows[rank::ranks], count / ranks, collate, 5, torch.device("cpu")
        )
    accuracy, loss = (sum(column) / ranks for column in zip(*told, strict=True))
    batch = collate(rows)
    logits = Guess()(batch["input_ids"]).logits
    right = (logits.argmax(-1) == batch["labels"]).sum().item()
    assert accuracy == pytest.approx(right / count, abs=1e-6)
    expected = nn.functional.cross_entropy(logits, batch["labels"]).item()
    assert loss == pytest.approx(expected, abs=1e-6)


@pytest.fixture
def ddp(program, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    return program("ddp")


def test_ddp_sample_check_detects_missed_and_repeated_samples(ddp, capsys) -> None:
    ddp.check_samples(torch.ones(64, dtype=torch.int64), 32, 2, 1)
    assert capsys.readouterr().out == (
        "checked: 32 x 2 steps x 1 ranks = 64 samples, each seen once\n"
    )
    for seen in ([1, 0, 2, 1], [2, 1, 1, 1]):
        with pytest.raises(RuntimeError, match="samples were seen"):
            ddp.check_samples(torch.tensor(seen), 2, 2, 1)


def test_ddp_weight_check_detects_differing_ranks(ddp, capsys) -> None:
    ddp.check_weights([[0.5, 1.0], [0.5, 1.0]])
    assert capsys.readouterr().out == "checked: all 2 ranks hold the same weights\n"
    with pytest.raises(RuntimeError, match="different weights"):
        ddp.check_weights([[0.5, 1.0], [0.5, 1.5]])


# ---------------------------------------------------------------- collectives


def test_collectives_marks_wrong_result(program, capsys) -> None:
    collectives = program("collectives")
    one, two = torch.tensor([1, 2]), torch.tensor([1, 3])
    for held, must, right in (
        (one, one.double(), True),
        (one, two, False),
        ([one, two], [one, two], True),
        ([one, one], [one, two], False),
        (["a"], ["a"], True),
        (["a"], ["b"], False),
        (None, None, True),
        (None, ["a"], False),
    ):
        assert collectives.is_right((None, held, must)) is right
    assert collectives.words([one, two]) == "1 2; 1 3"
    assert collectives.words(torch.tensor([0.5, 2.0])) == "0.5 2"
    assert collectives.words(None) == "-"
    collectives.print_part("scatter", [("1", "2", True), ("-", "3", False)])
    assert "WRONG on rank 1" in capsys.readouterr().out


def test_collectives_and_rpc_refuse_single_rank(program, monkeypatch, capsys) -> None:
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, complaint in (
        ("collectives", "one rank has nobody to talk to"),
        ("rpc", "a parameter server needs a worker"),
    ):
        monkeypatch.setattr(sys, "argv", [f"{name}.py"])
        with pytest.raises(SystemExit):
            program(name).main()
        assert f"{name}.py: error: {complaint}" in capsys.readouterr().err


def test_collectives_refuses_unknown_operation(program, monkeypatch, capsys) -> None:
    launched = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # fmt: skip
    monkeypatch.setenv("CLUSTERKIT_DEVICE", "cpu")
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["collectives.py", "all_redcue SUM"])
    with pytest.raises(SystemExit):
        program("collectives").main()
    assert "error: no operation 'all_redcue SUM'" in capsys.readouterr().err


def test_data_parallel_refuses_two_nodes(program, monkeypatch, capsys) -> None:
    launched = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # fmt: skip
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["dp.py"])
    with pytest.raises(SystemExit):
        program("dp").main()
    assert "one process, so it cannot use 2 nodes" in capsys.readouterr().err
