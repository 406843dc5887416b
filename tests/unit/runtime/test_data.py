from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpt_data import STANDARD_LIBRARY_BYTES, Batches, as_tokens, check_same, read, read_text, split
from gpt_ranks import BadInput, World
from gpt_settings import solve
from prepare import prepare

CPU = torch.device("cpu")
TEXT = split(as_tokens(bytes(range(256)) * 20), 16, "the test")


def world(rank: int = 0, size: int = 1) -> World:
    return World(rank, rank, 0, size, size, device=torch.device("cpu"), backend="gloo")


def batches(rank: int = 0, size: int = 1, *, seed: int = 0, micro: int = 2) -> Batches:
    sizes = solve(data_parallel=size, global_size=8, micro=micro)
    return Batches(TEXT, seed, sizes, CPU, rank)


def test_standard_library_text_is_reproducible() -> None:
    text = read_text()
    assert len(text) == STANDARD_LIBRARY_BYTES
    assert text == read_text()
    assert b"def __init__(self" in text


def test_folder_text_joins_visible_files_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "1").write_bytes(b"second ")
    (tmp_path / "a").write_bytes(b"first ")
    (tmp_path / "c").write_bytes(b"third")
    (tmp_path / ".hidden").write_bytes(b"never")
    assert read_text(str(tmp_path)) == b"first second third"
    assert read_text(str(tmp_path / "c")) == b"third"


def test_missing_or_empty_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--data .*/missing: No such file"):
        read_text(str(tmp_path / "missing"))
    empty = read_text(str(tmp_path))
    with pytest.raises(BadInput, match="it holds 0 tokens; with a context of 8 it must hold at"):
        split(as_tokens(empty), 8, "it")


def test_split_needs_90_tokens_for_context_of_8() -> None:
    with pytest.raises(BadInput, match="at least 90"):
        split(as_tokens(bytes(89)), 8, "it")
    text = split(as_tokens(bytes(90)), 8, "it")
    assert len(text.held_out) == 9
    sizes = solve(data_parallel=1, global_size=1)
    ((tokens, targets),) = Batches(text, 0, sizes, CPU).held_out()
    assert tokens.shape == targets.shape == (1, 8)


def test_targets_are_tokens_shifted_by_one() -> None:
    for tokens, targets in batches().of_step(1):
        assert tokens.shape == targets.shape == (2, 16)
        assert tokens.dtype == torch.int64
        assert torch.equal((tokens + 1) % 256, targets)  # the text counts up


@pytest.mark.parametrize("size", [1, 2, 4])
def test_micro_batches_are_independent_of_rank_count(size: int) -> None:
    alone = batches().of_step(7)
    together = [pair for rank in range(size) for pair in batches(rank, size).of_step(7)]
    assert len(together) == len(alone) == 4
    for (tokens, _), (expected, _) in zip(together, alone, strict=True):
        assert torch.equal(tokens, expected)


def test_samples_are_independent_of_micro_batch() -> None:
    small = torch.cat([tokens for tokens, _ in batches(micro=1).of_step(3)])
    large = torch.cat([tokens for tokens, _ in batches(micro=8).of_step(3)])
    assert torch.equal(small, large)


def test_samples_differ_by_step_and_seed() -> None:
    first = batches().of_step(1)[0][0]
    assert torch.equal(first, batches().of_step(1)[0][0])
    assert not torch.equal(first, batches().of_step(2)[0][0])
    assert not torch.equal(first, batches(seed=1).of_step(1)[0][0])


def test_held_out_batches_never_contain_training_text() -> None:
    tokens = torch.cat([torch.zeros(900, dtype=torch.uint8), torch.ones(100, dtype=torch.uint8)])
    text = split(tokens, 16, "it")
    here = Batches(text, 0, solve(data_parallel=1, global_size=64), CPU)
    assert all(int(pair[1].sum()) == 0 for step in range(5) for pair in here.of_step(step))
    assert all(int(pair[0].min()) == 1 for pair in here.held_out())


def test_check_same_names_rank_with_other_text(monkeypatch: pytest.MonkeyPatch) -> None:
    check_same(TEXT, world())
    monkeypatch.setattr(World, "gather", lambda self, value: [value, value, (7, 0)])
    with pytest.raises(BadInput, match=r"rank 2 trains on other text \(7 tokens\) than rank 0"):
        check_same(TEXT, world(0, 3))


# ---------------------------------------------------------------- token files


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """A folder of token files."""
    assert prepare(bytes(range(250)) * 4, tmp_path, None) == {
        "vocabulary": 256, "train.bin": 900, "val.bin": 100,
    }  # fmt: skip
    return tmp_path


def test_token_files_give_same_samples_as_text(tokens: Path) -> None:
    whole, files = split(as_tokens(bytes(range(250)) * 4), 16, "it"), read(str(tokens), 16, 256)
    assert (files.training.dtype, len(files.training), len(files.held_out)) == (
        torch.uint16, 900, 100,
    )  # fmt: skip
    sizes = solve(data_parallel=1, global_size=4)
    (there, _), (here, _) = (Batches(text, 0, sizes, CPU).of_step(3)[0] for text in (whole, files))
    assert torch.equal(here, there)
    (tokens / "meta.json").unlink()  # nanoGPT's own has none
    assert read(str(tokens / "train.bin"), 16, 256).training[249] == 249


def test_prepare_writes_two_byte_tokens_and_refuses_larger_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tokenizer:
        size = 0

        def __len__(self) -> int:
            return self.size

        def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
            return {"input_ids": [65_535, 1, 2, 3, 4] * 4}

    known = Tokenizer()
    monkeypatch.setattr("gpt_hugging_face.load_tokenizer", lambda name: known)
    known.size = 65_536
    assert prepare(b"text", tmp_path, "some") == {
        "vocabulary": 65_536, "train.bin": 18, "val.bin": 2,
    }  # fmt: skip
    assert (tmp_path / "train.bin").read_bytes()[:4] == b"\xff\xff\x01\x00"
    known.size = 65_537
    with pytest.raises(BadInput, match="--tokenizer some has 65537 tokens, and a token file of"):
        prepare(b"text", tmp_path, "some")


def test_truncated_token_file_is_refused(tokens: Path) -> None:
    train = tokens / "train.bin"
    train.write_bytes(train.read_bytes()[:-2])
    with pytest.raises(BadInput, match=r"train\.bin is truncated, .*: 1798 bytes, not the 1800 of"):
        read(str(tokens), 16)
    (tokens / "meta.json").unlink()
    assert len(read(str(tokens), 16).training) == 899  # nothing says how long it was
    train.write_bytes(train.read_bytes()[:-1])
    with pytest.raises(BadInput, match=r"train\.bin is truncated, or no token file: 1797 bytes$"):
        read(str(tokens), 16)
    train.write_bytes(b"")
    with pytest.raises(BadInput, match=r"holds 0 tokens in train\.bin or val.bin, and a sample ne"):
        read(str(tokens), 16)
    (tokens / "meta.json").write_text("[1")
    with pytest.raises(BadInput, match=r"train\.bin: Expecting"):
        read(str(tokens), 16)


def test_token_file_with_larger_vocabulary_than_model_is_refused(tokens: Path) -> None:
    with pytest.raises(BadInput, match="has a vocabulary of 256, the model one of 200"):
        read(str(tokens), 16, 200)
    (tokens / "meta.json").unlink()
    text = read(str(tokens), 16, 200)
    batches = Batches(text, 0, solve(data_parallel=1, global_size=64), CPU)
    with pytest.raises(BadInput, match=r"has a token 249, the model one of 200"):
        batches.of_step(1)
