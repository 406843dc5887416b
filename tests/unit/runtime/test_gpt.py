"""The training program: its parts here, and itself as ranks would run it."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import gpt_model as models
import gpt_optimizer
import pytest
import torch
import train
from gpt_parallelize import count_parameters
from gpt_ranks import run

from clusterkit.estimate import published
from clusterkit.run.logs import parse_mark
from tests.unit.runtime.conftest import GPT, Result, environment, launching, zero_arguments

TOLERANCE = 2e-6
SHORT = ["--steps", "4", "--global-batch", "8", "--micro-batch", "2", "--context", "16"]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("tiny", 437_760), ("124m", 124_439_808), ("355m", 354_823_168), ("774m", 774_030_080)],
)
def test_gpt_preset_parameter_counts_match_names(name: str, parameters: int) -> None:
    with torch.device("meta"):
        assert count_parameters(models.GPT(models.PRESETS[name])) == parameters


def test_initial_loss_is_close_to_uniform_guess() -> None:
    torch.manual_seed(0)
    model = models.GPT(models.PRESETS["tiny"])
    tokens, targets = torch.randint(0, 256, (2, 4, 64))
    loss = model(tokens, targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(5.545, abs=0.15)  # ln 256


def test_attention_is_causal() -> None:
    torch.manual_seed(0)
    attention = models.Attention(models.PRESETS["tiny"])
    x = torch.randn(1, 8, 128)
    changed = x.clone()
    changed[:, 5:] = 0
    assert torch.equal(attention(x)[:, :5], attention(changed)[:, :5])
    assert not torch.equal(attention(x)[:, 5:], attention(changed)[:, 5:])


def test_adamw_decays_matrices_but_not_biases_and_norms() -> None:
    args = argparse.Namespace(weight_decay=0.1, learning_rate=1.0)
    matrices, vectors = gpt_optimizer.adamw(models.GPT(models.PRESETS["tiny"]), args).param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in matrices["params"]} == {2}
    assert {p.dim() for p in vectors["params"]} == {1}


def test_learning_rate_warms_up_and_falls_to_one_tenth() -> None:
    args = argparse.Namespace(learning_rate=1.0, warmup=10, steps=110)
    rates = [gpt_optimizer.scheduled(step, args) for step in range(1, 111)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[59] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)


def test_learning_rate_without_warmup_and_one_step_is_one_tenth() -> None:
    args = argparse.Namespace(learning_rate=1.0, warmup=0, steps=1)
    assert gpt_optimizer.scheduled(1, args) == pytest.approx(0.1)


def test_one_rank_prints_all_launcher_events(launch) -> None:
    result = launch(*SHORT, "--eval-every", "3")
    assert (result.codes, result.stderr) == ([0], [""])
    (start,) = result.of("start")
    assert start == {
        "event": "start",
        "steps": 4,
        "first_step": 0,
        "tokens_per_step": 128,
        "parameters": 431_616,
        "device": "cpu",
        "dtype": "fp32",
        "world_size": 1,
        "strategy": "ddp",
    }
    metrics = result.of("metrics")
    assert [record["step"] for record in metrics] == [1, 2, 3, 4]
    assert ["eval_loss" in record for record in metrics] == [False, False, True, True]
    for record in metrics:
        assert record["tokens_per_second"] == pytest.approx(128 / record["step_seconds"])
        assert record["gradient_norm"] > 0
        assert record["learning_rate"] > 0
    assert result.of("optimizer") == [
        {"event": "optimizer", "rank": 0, "parameters": 431_616, "total": 431_616}
    ]
    (end,) = result.of("end")
    assert end["steps"] == 4
    assert (end["first_loss"], end["loss"]) == (metrics[0]["loss"], metrics[-1]["loss"])
    phases = result.of("phase")
    names = ["imports", "rendezvous", "build", "first_step", "training", "ending"]
    assert [phase["name"] for phase in phases] == names
    for phase, following in pairwise(phases):
        ended_at = phase["started_at"] + phase["seconds"]
        assert ended_at == pytest.approx(following["started_at"], abs=1e-3)


STATE = 431_616
CPU = {"device": "cpu"}
DIVIDED: dict[str, tuple[list[Any], int, list[int]]] = {
    "ddp": (["--strategy", "ddp"], 2, [STATE, STATE]),
    "zero-0": ([{"stage": 0}], 2, [STATE, STATE]),
    "zero-1": ([{"stage": 1}], 2, [STATE // 2] * 2),
    "zero-2": ([{"stage": 2}], 2, [STATE // 2] * 2),
    "zero-2 offload": ([{"stage": 2, "offload_optimizer": CPU}], 2, [STATE // 2] * 2),
    "zero-3": ([{"stage": 3}], 2, [STATE // 2] * 2),
    "zero-3 init": ([{"stage": 3}, "--zero-init"], 2, [STATE // 2] * 2),
    "zero-3 offload": (
        [{"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}], 2, [STATE // 2] * 2,
    ),
    "autotp": ([{"stage": 1}, "--mesh", "tp=2"], 2, [234_112] * 2),
    "deepspeed pp": ([{"stage": 1}, "--mesh", "pp=2"], 4, [116_544] * 2 + [115_648] * 2),
    "fsdp": (["--strategy", "fsdp", "--checkpoint-async"], 2, [STATE // 2] * 2),
    "fsdp kept": (
        ["--strategy", "fsdp", "--no-reshard-after-forward", "--activation-checkpointing"],
        2, [STATE // 2] * 2,
    ),
    "fsdp offload": (["--strategy", "fsdp", "--offload"], 2, [STATE // 2] * 2),
    "hsdp": (["--strategy", "fsdp", "--mesh", "replicate=2"], 4, [STATE // 2] * 4),
    "tp": (["--strategy", "tp", "--mesh", "tp=2"], 4, [108_864] * 4),
    "tp sequence": (["--strategy", "tp", "--sequence-parallel"], 2, [217_728] * 2),
    "pp": (["--strategy", "pp", "--mesh", "pp=2"], 2, [233_088, 231_296]),
    "3d": (["--strategy", "3d", "--mesh", "pp=2,dp=1,tp=2"], 4, [117_952] * 2 + [116_160] * 2),
}  # fmt: skip
"""Arguments (a section: ZeRO with it), ranks, and what each rank's optimizer then holds."""
RESUMED = ("ddp", "zero-3", "deepspeed pp", "fsdp", "tp sequence", "3d")
"""Those whose resumed run each test run compares."""


@dataclass(frozen=True)
class Whole:
    """A run of 4 steps that saved after 2 and 4, and the arguments that it had."""

    args: list[str]
    result: Result

    @property
    def half(self) -> str:
        """The checkpoint after 2 steps."""
        return str(self.result.of("checkpoint")[0]["path"])


@pytest.fixture(scope="module")
def whole(warm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Whole]]:
    """``whole("fsdp")``: the run of that entry of `DIVIDED`, made once."""
    made: dict[str, Whole] = {}
    with launching(tmp_path_factory.mktemp("whole"), warm) as launch:

        def run(name: str) -> Whole:
            if name not in made:
                (first, *rest), ranks, _ = DIVIDED[name]
                folder = tmp_path_factory.mktemp("run")
                how = zero_arguments(folder, **first) if isinstance(first, dict) else [first]
                args = [*SHORT, *how, *rest, "--eval-every", "2", "--checkpoint-every", "2",
                        "--checkpoint-dir", str(folder / "c")]  # fmt: skip
                made[name] = Whole(args, launch(*args, ranks=ranks))
                assert made[name].result.codes == [0] * ranks, made[name].result.stderr
            return made[name]

        yield run


@pytest.fixture(scope="module")
def alone(warm, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The metrics of one rank."""
    with launching(tmp_path_factory.mktemp("alone"), warm) as launch:
        return launch(*SHORT, "--eval-every", "2").of("metrics")


@pytest.mark.parametrize("name", DIVIDED)
def test_losses_agree_across_strategies_and_optimizer_state_is_divided(
    whole: Callable[[str], Whole], alone: list[dict[str, Any]], name: str
) -> None:
    run, held = whole(name).result, DIVIDED[name][2]
    said = "warning: dp=1 in a 3d mesh divides nothing\n" if name == "3d" else ""
    assert "".join(run.stderr) == said
    for here, there in zip(run.of("metrics"), alone, strict=True):
        assert here["loss"] == pytest.approx(there["loss"], abs=TOLERANCE)
        assert here.get("eval_loss") == pytest.approx(there.get("eval_loss"), abs=TOLERANCE)
        # DeepSpeed does not tell the norm in stage 0.
        norm = None if name == "zero-0" else pytest.approx(there["gradient_norm"], rel=1e-5)
        assert here["gradient_norm"] == norm
    assert run.of("optimizer") == [
        {"event": "optimizer", "rank": rank, "parameters": count, "total": STATE}
        for rank, count in enumerate(held)
    ]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_pipeline_reports_bubble_and_matches_losses_of_one_rank(
    launch, alone: list[dict[str, Any]], schedule: str
) -> None:
    result = launch(*SHORT, "--strategy", "pp", "--schedule", schedule, ranks=2)
    assert result.codes == [0, 0], result.stderr
    (start,) = result.of("start")
    # (p - 1) / (m + p - 1) with 2 stages and 8 / 2 micro batches.
    assert (start["schedule"], start["micro_batches"], start["bubble"]) == (schedule, 4, 1 / 5)
    assert start["mesh"] == "pp=2"
    expected = {row["step"]: row["loss"] for row in alone}
    assert result.losses() == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.thorough
def test_three_stage_pipeline_matches_losses_of_one_rank(launch) -> None:
    how = [*SHORT, "--model", "small"]
    one, three = launch(*how), launch(*how, "--strategy", "pp", ranks=3)
    assert three.codes == [0, 0, 0], three.stderr
    assert three.losses() == pytest.approx(one.losses(), abs=TOLERANCE)


def test_activation_checkpointing_leaves_losses_unchanged(launch) -> None:
    plain = launch(*SHORT)
    again = launch(*SHORT, "--activation-checkpointing")
    assert again.codes == [0], again.stderr
    assert again.losses() == plain.losses()


@pytest.mark.parametrize(
    "name",
    [
        name if name in RESUMED else pytest.param(name, marks=pytest.mark.thorough)
        for name in DIVIDED
    ],
)
def test_resumed_run_repeats_uninterrupted_losses_exactly(
    launch, whole: Callable[[str], Whole], name: str
) -> None:
    run, ranks = whole(name), DIVIDED[name][1]
    assert [event["step"] for event in run.result.of("checkpoint")] == [2, 4]
    rest = launch(*run.args, "--checkpoint-resume", run.half, ranks=ranks)
    assert rest.codes == [0] * ranks, rest.stderr
    assert rest.of("resumed") == [{"event": "resumed", "step": 2, "path": run.half}]
    assert rest.of("start")[0]["first_step"] == 2
    assert rest.losses() == {step: run.result.losses()[step] for step in (3, 4)}
    assert rest.of("end") == run.result.of("end")


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("ddp", 1),
        ("fsdp", 1),
        ("pp", 4),
        pytest.param("zero-0", 1, marks=pytest.mark.thorough),
        pytest.param("tp", 2, marks=pytest.mark.thorough),
    ],
)
def test_run_resumes_on_different_rank_count(
    launch, whole: Callable[[str], Whole], name: str, ranks: int
) -> None:
    run = whole(name)
    other = launch(*run.args, "--checkpoint-resume", run.half, ranks=ranks)
    assert set(other.codes) == {0}, other.stderr
    expected = {step: run.result.losses()[step] for step in (3, 4)}
    assert other.losses() == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("name", [pytest.param("zero-2", marks=pytest.mark.thorough), "zero-3"])
def test_zero_checkpoint_refuses_different_rank_count(
    launch, whole: Callable[[str], Whole], name: str
) -> None:
    alone = launch(*whole(name).args)
    assert alone.codes == [1]
    assert "was saved by 2 ranks, now there are 1" in alone.stderr[0]
    assert "set deepspeed.checkpoint.load_universal to true" in alone.stderr[0]


# With stage 2 tests/live/test_parity.py shows it.
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.thorough), 3])
def test_universal_checkpoint_resumes_on_different_rank_count(
    launch, zero: Callable[..., list[str]], tmp_path: Path, stage: int
) -> None:
    how = [*SHORT, *zero(stage), "--checkpoint-dir", tmp_path / "c"]
    whole = launch(*how, "--checkpoint-every", "2", ranks=2)
    config = Path(how[-3])
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "checkpoint": {"load_universal": True}})
    )
    half = whole.of("checkpoint")[0]["path"]
    for ranks in (1, 2):
        rest = launch(*how, "--checkpoint-resume", half, ranks=ranks)
        assert set(rest.codes) == {0}, rest.stderr
        expected = {step: whole.losses()[step] for step in (3, 4)}
        assert rest.losses() == pytest.approx(expected, abs=TOLERANCE)
        lost = Path(half, "universal", "zero", "norm.weight", "fp32.pt")
        assert lost.exists()
        lost.unlink()  # which the next one notices, and converts anew


def test_finished_run_trains_no_step_when_repeated(launch, tmp_path: Path) -> None:
    how = [*SHORT, "--checkpoint-dir", tmp_path / "c"]
    first, again = launch(*how), launch(*how)
    assert (again.codes, again.losses()) == ([0], {})
    assert again.of("end") == first.of("end")


def test_nan_loss_fails_run_only_with_stop_at_nan(launch) -> None:
    how = [*SHORT, "--learning-rate", "1e30", "--warmup", "0"]
    assert launch(*how).codes == [0]
    result = launch(*how, "--stop-at-nan")
    assert result.codes == [1]
    assert "error: the loss is nan at step " in result.stderr[0]


def test_sigterm_to_one_rank_saves_checkpoint_and_exits_143(launch, tmp_path: Path) -> None:
    def stop(event: dict[str, object], ranks: list[Any]) -> None:
        if event["event"] == "metrics" and event["step"] == 2:
            ranks[1].send_signal(signal.SIGTERM)

    how = ["--global-batch", "8", "--context", "16", "--checkpoint-dir", tmp_path / "c"]
    result = launch(*how, "--steps", "100000", ranks=2, on_event=stop)
    assert result.codes == [143, 143]
    assert result.stderr == ["", ""]
    (saved,) = result.of("checkpoint")
    assert saved["step"] == max(result.losses())
    assert result.of("end") == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "tinny"], "--model tinny: no such model (one of tiny, small, 124m"),
        (["--steps", "ten"], "argument --steps: 'ten' is not a whole number"),
        (["--data", "/nowhere"], "--data /nowhere: No such file or directory"),
        (["--data", "/dev/null"], "/dev/null holds 0 tokens"),
        (["--strategy", "deepspeed"], "--strategy deepspeed needs a config"),
        (["--checkpoint-resume", "/nowhere"], "checkpoint to resume from: /nowhere is not"),
        (["--strategy", "tp"], "--strategy tp with tp=1 divides nothing"),
        (["--strategy", "3d"], "--strategy 3d needs a mesh"),
        (["--strategy", "pp", "--mesh", "pp=2"], "--mesh pp=2: pp 2 is 2 ranks, and there is 1"),
        (["--offload"], "--offload does nothing with --strategy ddp (it is for fsdp)"),
        (["--zero-init"], "--zero-init does nothing with --strategy ddp"),
    ],
)
def test_training_program_prints_one_line_for_bad_input(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *args])
    with pytest.raises(SystemExit) as leaving:
        run(train.main)
    assert leaving.value.code == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_two_ranks_refuse_indivisible_batch_without_events(launch) -> None:
    result = launch("--global-batch", "7", ranks=2)
    assert result.codes == [1, 1]
    assert result.stderr[0].startswith("error: batch: global 7 is not a multiple of 2 ranks (")
    assert result.events == []


def test_ddp_training_imports_no_heavy_modules(launch, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import runpy, sys\n"
        f"sys.path[0] = {str(GPT.parent)!r}\n"
        "try:\n"
        f"    runpy.run_path({str(GPT)!r}, run_name='__main__')\n"
        "except SystemExit as leaving:\n"
        "    assert leaving.code == 0\n"
        "heavy = ['deepspeed', 'transformers', 'torch.distributed.pipelining', 'gpt_pipeline']\n"
        "assert [name for name in heavy if name in sys.modules] == []\n"
    )
    result = launch(*SHORT, "--checkpoint-dir", tmp_path / "c", program=program, warm=None)
    assert (result.codes, result.stderr) == ([0], [""])


def test_copied_gpt_folder_trains_without_clusterkit(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(GPT.parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "clusterkit.py").write_text("raise ImportError('there is no clusterkit here')")
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(
        [sys.executable, *words, *SHORT, "--checkpoint-dir", "c"],
        cwd=folder, env=environment() | {"TMPDIR": str(tmp_path)},  # torchrun leaves a folder there
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    events = [event for line in done.stdout.splitlines() if (event := parse_mark(line))]
    assert [event["step"] for event in events if event["event"] == "metrics"] == [1, 2, 3, 4]
    assert (folder / "c" / "step-00000004" / "checkpoint.json").is_file()


@pytest.mark.parametrize("path", sorted(GPT.parent.glob("*.py")), ids=lambda path: path.name)
def test_program_file_is_under_500_lines_without_clusterkit_import(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"^\s*(from|import) clusterkit\b", text, re.MULTILINE)
    assert text.count("\n") <= 500


def test_estimate_presets_match_model_shapes() -> None:
    for name, shape in models.PRESETS.items():
        assert published.PRESETS[name] == (
            {
                "model_type": "llama", "num_hidden_layers": shape.layers,
                "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
                "head_dim": shape.width // shape.heads, "hidden_size": shape.width,
                "intermediate_size": shape.inner, "max_position_embeddings": shape.context,
                "vocab_size": shape.vocabulary, "tie_word_embeddings": 1,
            }
            if shape.llama
            else {
                "model_type": "gpt2", "n_layer": shape.layers, "n_head": shape.heads,
                "n_embd": shape.width, "n_positions": shape.context, "vocab_size": shape.vocabulary,
            }
        )  # fmt: skip
    assert published.PRESETS.keys() == models.PRESETS.keys()


def test_hugging_face_model_trains_on_bytes_and_refuses_pipeline(launch, zero, llama: Path) -> None:
    result = launch("--model", llama, *SHORT, *zero(3))
    assert result.codes == [0], result.stderr
    assert result.losses()[1] == pytest.approx(5.545, abs=0.15)
    assert result.losses()[4] < result.losses()[1]
    sharded = launch("--model", llama, *SHORT, "--strategy", "fsdp", ranks=2)
    assert sharded.codes == [0, 0], sharded.stderr
    assert sharded.losses() == pytest.approx(result.losses(), abs=TOLERANCE)
    cut = launch("--model", llama, "--strategy", "pp", ranks=2)
    assert cut.codes == [1, 1]
    assert "--strategy pp cannot cut" in cut.stderr[0]
