"""Which samples the ranks of a run see, from what files, and after a resume."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import gpt_data
import pytest
import torch
from gpt_data import (
    STANDARD_LIBRARY_BYTES,
    Batches,
    Text,
    Tokens,
    as_tokens,
    check_same,
    map_tokens,
    permuted,
    read,
    read_text,
    shares,
    split,
)  # fmt: skip
from gpt_model import GPT, Shape
from gpt_ranks import BadInput, World
from gpt_settings import solve
from prepare import prepare

CPU = torch.device("cpu")


def text_of(tokens: torch.Tensor, context: int = 16) -> Text:
    return Text((split(Tokens(tokens), context, "the test"),), context)


TEXT = text_of(as_tokens(bytes(range(256)) * 20))


def world(rank: int = 0, size: int = 1) -> World:
    return World(rank, rank, 0, size, size, device=torch.device("cpu"), backend="gloo")


def batches(
    rank: int = 0, size: int = 1, *, text: Text = TEXT, seed: int = 0, micro: int | None = 2,
    global_size: int = 8, **more: Any,
) -> Batches:  # fmt: skip
    sizes = solve(data_parallel=size, global_size=global_size, micro=micro)
    return Batches(text, seed, sizes, CPU, rank, **more)


# ---------------------------------------------------------------- text


def test_standard_library_text_is_reproducible() -> None:
    text = read_text()
    assert len(text) == STANDARD_LIBRARY_BYTES
    assert text == read_text()
    assert b"def __init__(self" in text


def test_folder_text_joins_visible_files_in_sorted_order(tmp_path: Path) -> None:
    for name, text in {"b/1": "second ", "a": "first ", "c": "third", ".git/x": "never"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / ".hidden").write_bytes(b"never")
    assert read_text(str(tmp_path)) == b"first second third"
    assert read_text(str(tmp_path / "c")) == b"third"


def test_linked_folders_are_read_once_and_loops_end(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_bytes(b"linked ")
    (tmp_path / "elsewhere" / "up").symlink_to(tmp_path / "text")
    (tmp_path / "text" / "a").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "text" / "b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "text" / "c").write_bytes(b"own")
    assert read_text(str(tmp_path / "text")) == b"linked own"
    (tmp_path / "text" / "d").symlink_to(tmp_path / "nowhere")
    with pytest.raises(BadInput, match=r"--data .*/text/d: No such file"):
        read_text(str(tmp_path / "text"))


def test_missing_or_empty_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--data .*/missing: No such file"):
        read_text(str(tmp_path / "missing"))
    empty = read_text(str(tmp_path))
    with pytest.raises(BadInput, match="it holds 0 tokens; with a context of 8 it must hold at"):
        split(Tokens(as_tokens(empty)), 8, "it")


@pytest.mark.parametrize("name", ["a.gz", "a.jsonl", "a.zst"])
def test_data_refuses_compressed_and_json_text_and_names_prepare(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"text" * 100)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(BadInput, match=rf"--data .*/{name} is not plain text") as refused:
            read(str(path), 16)
        assert "prepare.py" in str(refused.value.hint)


def test_split_needs_90_tokens_for_context_of_8() -> None:
    with pytest.raises(BadInput, match="at least 90"):
        text_of(as_tokens(bytes(89)), 8)
    text = text_of(as_tokens(bytes(90)), 8)
    assert len(text.sources[0].held_out) == 9
    ((tokens, targets),) = batches(text=text, global_size=1, micro=None).held_out()
    assert tokens.shape == targets.shape == (1, 8)


# ---------------------------------------------------------------- samples


def test_targets_are_tokens_shifted_by_one() -> None:
    for tokens, targets in batches().of_step(1):
        assert tokens.shape == targets.shape == (2, 16)
        assert tokens.dtype == torch.int64
        assert torch.equal((tokens + 1) % 256, targets)  # the text counts up


@pytest.mark.parametrize("sampling", gpt_data.SAMPLINGS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_micro_batches_are_independent_of_rank_count(size: int, sampling: str) -> None:
    alone = batches(sampling=sampling).of_step(7)
    each = [batches(rank, size, sampling=sampling) for rank in range(size)]
    together = [pair for rank in each for pair in rank.of_step(7)]
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


def test_random_samples_stay_where_they_always_began() -> None:
    places = [batches().place(step, number)[1] for step in (1, 2) for number in (0, 1)]
    assert places == [4075, 2422, 3487, 1215]


def test_held_out_batches_never_contain_training_text() -> None:
    text = text_of(torch.cat([torch.zeros(900, dtype=torch.uint8), torch.ones(100).byte()]))
    here = batches(text=text, global_size=64)
    assert all(int(pair[1].sum()) == 0 for step in range(1, 6) for pair in here.of_step(step))
    assert all(int(pair[0].min()) == 1 for pair in here.held_out())


def test_samples_prepared_ahead_are_those_of_their_step() -> None:
    ahead, alone = batches(), batches(ahead=False)
    for step in (1, 2, 3, 7, 4):
        for ours, theirs in zip(ahead.of_step(step), alone.of_step(step), strict=True):
            assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
def test_permutation_holds_each_number_once_and_depends_on_key(size: int) -> None:
    orders = [[permuted(n, size, key) for n in range(size)] for key in ("0", "0", "1")]
    assert sorted(orders[0]) == sorted(orders[2]) == [*range(size)]
    assert orders[0] == orders[1]
    assert size < 7 or orders[0] != orders[2] != [*range(size)]


def test_epochs_hold_each_window_once_in_another_order() -> None:
    here = batches(sampling="epochs")
    windows = (len(TEXT.sources[0].training) - 1) // 16
    order = [here.place(1 + n // 8, n % 8)[1] for n in range(3 * windows)]
    epochs = [order[first : first + windows] for first in range(0, 3 * windows, windows)]
    assert all(sorted(epoch) == [*range(0, windows * 16, 16)] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


# ---------------------------------------------------------------- several files


def test_shares_are_exact_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shares(None) == [(None, 1)]
    assert shares("a=0.7,b=0.3") == [("a", 7), ("b", 3)]
    assert shares("a=1/3,b=2/3") == [("a", 1), ("b", 2)]
    for data, said in {
        "a=0.7,b=0.2": "add up to 9/10, not to 1", "a=0.5,a=0.5": "'a=0.5' is not a path of its",
        "a=1,b=0": "'b=0' is not", "a=0.5,b": "'b' is not", "a=x,b=0.5": "'a=x' is not",
    }.items():  # fmt: skip
        with pytest.raises(BadInput, match=said):
            shares(data)
    monkeypatch.chdir(tmp_path)
    Path("lr=0.1").touch()
    assert shares("lr=0.1") == [("lr=0.1", 1)]


@pytest.mark.parametrize("sampling", gpt_data.SAMPLINGS)
def test_every_ten_samples_hold_seven_and_three_of_two_sources(
    tmp_path: Path, sampling: str
) -> None:
    for name, letter in (("a", b"a"), ("b", b"b")):
        (tmp_path / name).write_bytes(letter * 2000)
    text = read(f"{tmp_path}/a=0.7,{tmp_path}/b=0.3", 16)
    here = batches(text=text, global_size=20, micro=20, sampling=sampling)
    for step in range(1, 6):
        sources = [here.place(step, number)[0] for number in range(20)]
        assert Counter(sources[:10]) == Counter(sources[10:]) == {0: 7, 1: 3}
        ((tokens, _),) = here.of_step(step)
        assert [int(row[0]) for row in tokens] == [ord("ab"[source]) for source in sources]
    if sampling == "epochs":
        places = [here.place(1, number) for number in range(100)]
        assert len({*places}) == 100


# ---------------------------------------------------------------- after a resume


def samples(here: Batches, steps: range) -> list[tuple[int, int]]:
    size = here.batch.global_size
    return [here.place(step, number) for step in steps for number in range(size)]


@pytest.mark.parametrize("rests", [[(2, 8)], [(3, 12)], [(1, 4), (4, 8)]])
def test_resume_with_other_ranks_and_global_batch_neither_skips_nor_repeats(
    rests: list[tuple[int, int]],
) -> None:
    """Shrunk, and rejoined: each time from a checkpoint."""
    whole = samples(batches(global_size=8, sampling="epochs"), range(1, 40))
    here, step = batches(0, 4, global_size=8, sampling="epochs"), 5
    seen = samples(here, range(1, step + 1))
    for size, global_size in rests:
        state = json.loads(json.dumps(here.state(step)))
        here = batches(0, size, global_size=global_size, micro=None, sampling="epochs")
        assert here.resume(step, state) is None
        seen += samples(here, range(step + 1, step + 4))
        step += 3
    assert here.state(step)["samples"] == len(seen)
    assert seen == whole[: len(seen)]


def test_resume_of_checkpoint_without_data_state_counts_its_steps() -> None:
    here = batches(sampling="epochs")
    assert here.resume(5, {}) is None
    assert samples(here, range(6, 8)) == samples(batches(sampling="epochs"), range(6, 8))


def test_resume_says_what_changes_in_one_sentence() -> None:
    state = batches().state(5)
    assert batches(seed=1, sampling="epochs").resume(5, state) == (
        "--sampling epochs instead of random and --seed 1 instead of 0: the order of samples "
        "begins anew, some may be trained on again"
    )
    other = text_of(as_tokens(bytes(range(256)) * 30))
    assert str(batches(text=other).resume(5, state)).startswith("other --data: the order of")
    masked = batches(document_mask=True)
    assert str(masked.resume(5, state)).startswith("--document-mask: from here on attention ends")
    assert str(batches().resume(5, masked.state(5))).startswith("no --document-mask: from here")


def test_samples_begin_anew_where_their_order_changes() -> None:
    here = batches(sampling="epochs")
    here.resume(5, batches().state(5))
    assert samples(here, range(6, 8)) == samples(batches(sampling="epochs"), range(1, 3))


def test_check_same_names_rank_with_other_text(monkeypatch: pytest.MonkeyPatch) -> None:
    check_same(TEXT, world())
    monkeypatch.setattr(World, "gather", lambda self, value: [value, value, [[1, 7, 0]]])
    with pytest.raises(BadInput, match=r"rank 2 trains on other text \(7 tokens\) than rank 0"):
        check_same(TEXT, world(0, 3))


# ---------------------------------------------------------------- token files


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """A folder of token files, of text that counts up."""
    (tmp_path / "text").write_bytes(bytes(range(125)) * 8)
    prepare(tmp_path / "text", tmp_path / "tokens")
    return tmp_path / "tokens"


def test_token_files_give_same_samples_as_text(tokens: Path) -> None:
    texts = [read(str(tokens.with_name("text")), 16), read(str(tokens), 16, 256)]
    assert texts[1].sources[0].training.ids.dtype == torch.uint16
    for draw in (lambda b: b.of_step(3), lambda b: b.held_out()):
        (there, _), (here, _) = (draw(batches(text=text))[0] for text in texts)
        assert torch.equal(here, there)
    (tokens / "meta.json").unlink()  # nanoGPT's own has none
    assert read(str(tokens / "train.bin"), 16, 256).sources[0].training.ids[124] == 124


def test_tokens_of_32_bits_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(array("I", [70_000 + n for n in range(200)]).tobytes())
    with pytest.raises(BadInput, match=r"no meta\.json says whether its tokens have 16 or 32 bits"):
        read(str(tmp_path / "a.bin"), 16, 128_256)
    (tmp_path / "meta.json").write_text('{"bits": 32}')
    text = read(str(tmp_path / "a.bin"), 16, 128_256)
    ((ids, targets),) = batches(text=text, micro=8).of_step(1)
    assert torch.equal(ids + 1, targets)
    assert int(ids.min()) >= 70_000
    (tmp_path / "meta.json").write_text('{"bits": 24}')
    with pytest.raises(BadInput, match="says 24 bits a token, not 16 or 32"):
        read(str(tmp_path / "a.bin"), 16)


def test_truncated_token_file_is_refused(tokens: Path) -> None:
    train = tokens / "train.bin"
    train.write_bytes(train.read_bytes()[:-2])
    with pytest.raises(BadInput, match=r"train\.bin is truncated, .*: 1798 bytes, not the 1800 of"):
        read(str(tokens), 16)
    (tokens / "meta.json").unlink()
    assert len(read(str(tokens), 16).sources[0].training) == 899  # nothing says how long it was
    train.write_bytes(train.read_bytes()[:-1])
    with pytest.raises(BadInput, match=r"train\.bin is truncated, or no token file: 1797 bytes$"):
        read(str(tokens), 16)
    train.write_bytes(b"")
    (tokens / "train.idx").unlink()
    with pytest.raises(BadInput, match=r"holds 0 tokens in train\.bin or val.bin, and a sample ne"):
        read(str(tokens), 16)
    (tokens / "meta.json").write_text("[1")
    with pytest.raises(BadInput, match=r"train\.bin: Expecting"):
        read(str(tokens), 16)


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_token_folder_without_one_of_its_files_is_refused(tokens: Path, name: str) -> None:
    """It is no folder of texts, which it would be read as."""
    (tokens / name).unlink()
    with pytest.raises(BadInput, match=rf"{name}: .*No such file or directory"):
        read(str(tokens), 16)


def test_token_file_with_larger_vocabulary_than_model_is_refused(tokens: Path) -> None:
    with pytest.raises(BadInput, match="has a vocabulary of 256, the model one of 100"):
        read(str(tokens), 16, 100)
    (tokens / "meta.json").unlink()
    text = read(str(tokens), 16, 100)
    with pytest.raises(BadInput, match=r"has a token 1\d\d, the model one of 100"):
        batches(text=text, global_size=64, micro=64).of_step(1)


# ---------------------------------------------------------------- documents


def test_positions_restart_where_a_document_does() -> None:
    tokens = Tokens(torch.arange(20), torch.tensor([0, 3, 4, 10]))
    assert tokens.positions(0, 6).tolist() == [0, 1, 2, 0, 0, 1]
    assert tokens.positions(5, 7).tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert tokens.positions(4, 3).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("first", "before", "after"),
    [
        (12, [0, 3, 4, 10], [0]),
        (10, [0, 3, 4], [0]),
        (8, [0, 3, 4], [0, 2]),
        (2, [0], [0, 1, 2, 8]),
    ],
)
def test_documents_are_split_with_their_tokens(
    first: int, before: list[int], after: list[int]
) -> None:
    parts = Tokens(torch.arange(20), torch.tensor([0, 3, 4, 10])).split(first)
    assert [part.starts.tolist() for part in parts if part.starts is not None] == [before, after]


def test_document_mask_gives_the_losses_of_the_documents_alone() -> None:
    torch.manual_seed(0)
    gpt = GPT(Shape(layers=2, heads=2, width=16, context=12, vocabulary=50))
    ids, targets = torch.randint(50, (2, 1, 12))
    places = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    parts = gpt(ids[:, :5], targets[:, :5]) * 5 + gpt(ids[:, 5:], targets[:, 5:]) * 7
    torch.testing.assert_close(gpt(ids, targets, places), parts / 12)
    torch.testing.assert_close(gpt(ids, targets, torch.arange(12)[None]), gpt(ids, targets))


def test_document_mask_of_hugging_face_model_gives_losses_of_documents_alone() -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers: not installed (pip install 'clusterkit[train]')"
    )
    from gpt_hugging_face import CausalLM

    config = transformers.Qwen2Config(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = CausalLM("tiny", config, pretrained=False)
    ids, targets = torch.randint(50, (2, 1, 12))
    places = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    parts = model(ids[:, :5], targets[:, :5]) * 5 + model(ids[:, 5:], targets[:, 5:]) * 7
    torch.testing.assert_close(model(ids, targets, places), parts / 12)
    config._attn_implementation = "eager"
    with pytest.raises(BadInput, match="this model has no sdpa attention, but eager"):
        CausalLM("tiny", config, pretrained=False)(ids, targets, places)


def test_document_mask_adds_positions_and_needs_idx_files(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "ab" * n}) for n in range(1, 60)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    prepare(tmp_path / "a.jsonl", tmp_path / "tokens")
    text = read(str(tmp_path / "tokens"), 16, document_mask=True)
    here = batches(text=text, document_mask=True, micro=8, sampling="epochs")
    ((ids, _, places),) = here.of_step(1)
    assert ids.shape == places.shape
    starts = text.sources[0].training.starts
    assert starts is not None
    known = {*starts.tolist()}
    for number, row in enumerate(places.tolist()):
        _, start = here.place(1, number)
        assert [n for n, place in enumerate(row) if place == 0] == [
            n for n in range(16) if n == 0 or start + n in known
        ]
    for name in ("train.idx", "val.idx"):
        (tmp_path / "tokens" / name).unlink()
    with pytest.raises(BadInput, match="--document-mask: nothing says where the documents"):
        read(str(tmp_path / "tokens"), 16, document_mask=True)


def test_idx_of_another_file_is_refused(tokens: Path) -> None:
    (tokens / "train.idx").write_bytes(array("q", [9000]).tobytes())
    with pytest.raises(BadInput, match=r"train\.idx is not of train\.bin: its documents lie else"):
        map_tokens(tokens / "train.bin")
