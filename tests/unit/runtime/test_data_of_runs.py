"""Runs that read token files, and go on from a checkpoint with the sample that comes next."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from prepare import prepare

WORDS = ["--steps", "6", "--warmup", "2", "--context", "16", "--micro-batch", "2"]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files with about 30 windows of 16 tokens in an epoch: less than four steps of 8."""
    folder = tmp_path_factory.mktemp("tokens")
    lines = [json.dumps({"text": f"document {n}, of {'x' * (n % 9)} words"}) for n in range(20)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    prepare(folder / "a.jsonl", folder / "tokens")
    return folder / "tokens"


def test_run_resumed_on_other_ranks_and_batch_goes_on_with_next_sample(
    launch, tokens: Path, tmp_path: Path
) -> None:
    args = [*WORDS, "--data", tokens, "--sampling", "epochs", "--document-mask",
            "--checkpoint-dir", tmp_path / "c", "--checkpoint-every", "3"]  # fmt: skip
    keep_all = ["--checkpoint-keep", "0"]
    whole = launch(*args, *keep_all, "--global-batch", "8", ranks=2)
    assert whole.codes == [0, 0], whole.stderr
    half = tmp_path / "c" / "step-00000003"
    state = json.loads((half / "checkpoint.json").read_text())["data"]
    assert (state["samples"], state["--sampling"], state["mask"]) == (24, "epochs", True)

    one = launch(*args, *keep_all, "--global-batch", "8", "--checkpoint-resume", half)
    assert (one.codes, one.stderr) == ([0], [""])
    expected = {step: whole.losses()[step] for step in (4, 5, 6)}
    assert one.losses() == pytest.approx(expected, abs=2e-6)

    other = launch(*args, *keep_all, "--global-batch", "4", "--checkpoint-resume", half, ranks=2)
    assert (other.codes, other.stderr) == ([0, 0], ["", ""])
    last = json.loads((tmp_path / "c" / "step-00000006" / "checkpoint.json").read_text())
    assert last["data"]["samples"] == 24 + 3 * 4


def test_resume_with_other_sampling_warns_in_one_line(launch, tokens: Path, tmp_path: Path) -> None:
    args = [*WORDS, "--data", tokens, "--global-batch", "4", "--checkpoint-dir", tmp_path / "c"]
    assert launch(*args).codes == [0]
    changed = launch(*args, "--steps", "8", "--sampling", "epochs")
    assert changed.codes == [0]
    assert changed.stderr == [
        "warning: resuming with --sampling epochs instead of random: the order of samples begins "
        "anew, some may be trained on again\n"
    ]


def test_document_mask_is_refused_where_it_cannot_be(launch, tokens: Path) -> None:
    for more, said in (
        (["--data", tokens, "--strategy", "pp"], "stages of a pipeline send each other no posit"),
        ([], "nothing says where the documents of the standard library start"),
    ):
        ranks = 2 if more else 1
        result = launch(*WORDS, "--document-mask", *more, ranks=ranks)
        assert result.codes == [1] * ranks
        assert said in result.stderr[0]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["fsdp", "--activation-checkpointing"], marks=pytest.mark.thorough),
        ["tp", "--sequence-parallel", "--activation-checkpointing"],
    ],
    ids=" ".join,
)
def test_document_mask_gives_same_losses_where_model_is_cut(
    launch, tokens: Path, words: list[str]
) -> None:
    args = [*WORDS, "--data", tokens, "--document-mask", "--global-batch", "4"]
    alone, cut = launch(*args), launch(*args, "--strategy", *words, ranks=2)
    assert (alone.codes, cut.codes) == ([0], [0, 0]), cut.stderr
    assert cut.losses() == pytest.approx(alone.losses(), abs=2e-6)


@pytest.mark.thorough
def test_document_mask_gives_same_losses_with_deepspeed(
    launch, zero: Callable[..., list[str]], tokens: Path
) -> None:
    args = [*WORDS, "--data", tokens, "--document-mask", "--global-batch", "4"]
    alone, cut = launch(*args), launch(*args, *zero(3), "--activation-checkpointing", ranks=2)
    assert (alone.codes, cut.codes) == ([0], [0, 0]), cut.stderr
    assert cut.losses() == pytest.approx(alone.losses(), abs=2e-6)
