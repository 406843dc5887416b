"""Token files as prepare.py writes them, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpt_hugging_face
import prepare as program
import pytest
import torch
from gpt_data import map_tokens
from gpt_ranks import BadInput
from prepare import PIECE, Encoder, prepare

PROGRAM = str(Path(program.__file__))


def contents(folder: Path) -> tuple[list[int], list[int]]:
    """All tokens, and where their documents start; the first of val.idx may be inside of one."""
    train, val = (map_tokens(folder / name) for name in ("train.bin", "val.bin"))
    assert train.starts is not None
    assert val.starts is not None
    starts = [*train.starts.tolist(), *(len(train) + n for n in val.starts.tolist()[1:])]
    return [*train.ids.tolist(), *val.ids.tolist()], starts


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small one of GPT-2's kind; <|endoftext|> is its token 0."""
    reason = "transformers: not installed (pip install 'clusterkit[train]')"
    transformers = pytest.importorskip("transformers", reason=reason)
    tokenizers = pytest.importorskip("tokenizers", reason=reason)
    kind = tokenizers.pre_tokenizers.ByteLevel
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = kind(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=kind.alphabet()
    )
    bpe.train_from_iterator(["def words in(lines):\n\n    return words\n"] * 9, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|endoftext|>"
    ).save_pretrained(folder)
    return folder


def test_files_and_json_lines_become_documents(tmp_path: Path) -> None:
    text = tmp_path / "text"
    (text / "b").mkdir(parents=True)
    (text / "a.txt").write_text("first")
    (text / "b" / "c.jsonl").write_text('{"text": "two", "id": 1}\n\n{"text": ""}\n{"text": "é"}\n')
    (text / "empty").touch()
    (text / "z").write_text("the last")
    about = prepare(text, tmp_path / "tokens")
    tokens, starts = contents(tmp_path / "tokens")
    assert bytes(tokens).decode() == "firsttwoéthe last"
    assert starts == [0, 5, 8, 10]
    assert about == json.loads((tmp_path / "tokens" / "meta.json").read_text())
    assert about == {
        "vocabulary": 256, "bits": 16, "train.bin": 17, "val.bin": 1, "train.idx": 4, "val.idx": 1,
    }  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "tokens").iterdir()) == [
        "meta.json", "train.bin", "train.idx", "val.bin", "val.idx",
    ]  # fmt: skip


@pytest.mark.parametrize("processes", [1, 2])
def test_tokenized_pieces_of_long_text_are_those_of_it_whole(
    tmp_path: Path, tokenizer: Path, processes: int
) -> None:
    lines = "def words in(lines):\n\n    return words\n\nx = 'é'\n"
    (tmp_path / "long").write_text(lines * (3 * PIECE // len(lines)))
    (tmp_path / "short").write_text("words")
    command = [sys.executable, PROGRAM, "--tokenizer", str(tokenizer), "--processes",
               str(processes)]  # fmt: skip
    for name in ("long", "short"):
        (tmp_path / "both").mkdir(exist_ok=True)
        (tmp_path / name).rename(tmp_path / "both" / name)
    subprocess.run([*command, str(tmp_path / "both"), str(tmp_path / "tokens")], check=True)
    tokens, starts = contents(tmp_path / "tokens")
    known = gpt_hugging_face.load_tokenizer(str(tokenizer))
    whole = known((tmp_path / "both" / "long").read_text())["input_ids"]
    assert tokens == [*whole, 0, *known("words")["input_ids"], 0]
    assert starts == [0, len(whole) + 1]


def test_special_tokens_in_text_stay_text(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a").write_text("words<|endoftext|>words" * 3)
    prepare(tmp_path / "a", tmp_path / "tokens", str(tokenizer))
    tokens, _ = contents(tmp_path / "tokens")
    assert tokens.index(0) == len(tokens) - 1
    at_train_time = gpt_hugging_face._tokenize(str(tokenizer), (tmp_path / "a").read_bytes())
    assert at_train_time.tolist() == tokens[:-1]


class Known:
    """A tokenizer with a token of its own at the begin, as Llama's."""

    bos_token_id, eos_token_id = 1, 2

    def __init__(self, size: int) -> None:
        self.size = size

    def get_vocab(self) -> dict[str, int]:
        return {"last": self.size - 1}

    def __call__(self, text: str, *, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        return {"input_ids": [1] * add_special_tokens + [self.size - 1] * len(text)}


@pytest.mark.parametrize(("size", "bits"), [(65_536, 16), (65_537, 32), (128_256, 32)])
def test_width_of_tokens_follows_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, bits: int
) -> None:
    monkeypatch.setattr("gpt_hugging_face.load_tokenizer", lambda name: Known(size))
    (tmp_path / "a").write_text("x" * 20)
    about = prepare(tmp_path / "a", tmp_path / "tokens", "some")
    assert (about["vocabulary"], about["bits"]) == (size, bits)
    assert (tmp_path / "tokens" / "train.bin").stat().st_size == 20 * bits // 8
    assert contents(tmp_path / "tokens") == ([1, *[size - 1] * 20, 2], [0])


def test_written_again_it_replaces_the_files_and_leaves_no_drafts(tmp_path: Path) -> None:
    for text in ("x" * 100, "y" * 50):
        (tmp_path / "a").write_text(text)
        prepare(tmp_path / "a", tmp_path / "tokens")
        assert bytes(contents(tmp_path / "tokens")[0]).decode() == text
        assert len([*(tmp_path / "tokens").iterdir()]) == 5


def test_interrupted_replacement_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("x" * 100)
    prepare(tmp_path / "a", tmp_path / "tokens")
    replace: Callable[..., Path] = Path.replace

    def once(path: Path, target: Path) -> Path:
        if path.name != "meta.json":
            raise OSError(28, "No space left on device")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", once)
    (tmp_path / "a").write_text("x" * 50)
    with pytest.raises(BadInput, match=r"tokens: No space left on device"):
        prepare(tmp_path / "a", tmp_path / "tokens")
    with pytest.raises(BadInput, match=r"train\.bin is truncated.* not the 90 of its meta\.json"):
        map_tokens(tmp_path / "tokens" / "train.bin")


def test_lines_that_are_no_documents_are_refused_by_number(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    for line, said, hint in (
        ("{", "is not JSON", 'each line is an object such as {"text": "..."}'),
        ("[" * 100_000, "is not JSON", "each line"),
        ('{"id": 1, "content": "x"}', 'has no text "text", only id, content', "--key"),
        ('{"text": 5}', 'has no text "text", only text', "--key"),
        ("[1]", 'has no text "text", only list', "--key"),
        ('{"text": "\\ud83d"}', "holds half a character", "both halves"),
    ):
        file.write_text(f'{{"text": "fine"}}\n{line}\n')
        with pytest.raises(BadInput) as refused:
            prepare(file, tmp_path / "tokens")
        assert refused.value.message.startswith(f"{file}, line 2 {said}")
        assert hint in str(refused.value.hint)
    file.write_text('{"content": "long enough"}\n')
    assert prepare(file, tmp_path / "tokens", key="content")["train.bin"] == 10


@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_text_that_is_not_utf8_is_refused_by_file_and_byte(
    tmp_path: Path, tokenizer: Path, with_tokenizer: bool
) -> None:
    name = str(tokenizer) if with_tokenizer else None
    for file, text, said in (
        ("a", b"fine \xff", "a is not UTF-8: byte 5"),
        ("a", "é".encode() * PIECE + b"\xc3", f"a is not UTF-8: byte {2 * PIECE}"),
        ("a", b"x" * (PIECE - 1) + b"\xc3x", f"a is not UTF-8: byte {PIECE - 1}"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}', "a.jsonl, line 2 is not UTF-8: byte 24"),
    ):
        (tmp_path / file).write_bytes(text)
        with pytest.raises(BadInput) as refused:
            prepare(tmp_path / file, tmp_path / "tokens", name)
        assert refused.value.message.endswith(said)
    assert not (tmp_path / "tokens").exists()


def test_compressed_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(BadInput, match=r"/text/a\.jsonl\.gz is compressed"):
        prepare(tmp_path / "text", tmp_path / "tokens")


def test_output_that_is_input_or_something_else_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "a").write_text("x" * 50)
    for folder in (text, text / "tokens"):
        with pytest.raises(BadInput, match=r"(text|tokens) lies in"):
            prepare(text, folder)
    with pytest.raises(BadInput, match="/text/a is a file"):
        prepare(text, text / "a")
    (tmp_path / "tokens").mkdir()
    (text / "link").symlink_to(tmp_path / "tokens")
    prepare(text, tmp_path / "tokens")
    with pytest.raises(BadInput, match=r"train\.bin is a token file"):
        prepare(text, tmp_path / "tokens")
    (text / "link").unlink()
    (tmp_path / "tokens" / "meta.json").write_text('{"name": "of another program"}')
    with pytest.raises(BadInput, match=r"meta\.json is not of prepare\.py"):
        prepare(text, tmp_path / "tokens")


def test_too_little_or_missing_text_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x" * 9)
    with pytest.raises(BadInput, match="9 tokens are too few to divide"):
        prepare(tmp_path / "a", tmp_path / "tokens")
    with pytest.raises(BadInput, match="/missing: No such file"):
        prepare(tmp_path / "missing", tmp_path / "tokens")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_zero_processes_and_missing_tokenizer_are_refused(tmp_path: Path) -> None:
    command = [sys.executable, PROGRAM, str(tmp_path), str(tmp_path / "out"), "--processes", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith("error: argument --processes: 0 is below 1\n")
    pytest.importorskip(
        "transformers", reason="transformers: not installed (pip install 'clusterkit[train]')"
    )
    with pytest.raises(BadInput, match=r"--tokenizer .*: there is none"):
        Encoder(str(tmp_path))


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """Of what Python allocates: never more than some pieces at a time."""
    import tracemalloc

    line = "some words of a line\n"
    (tmp_path / "a").write_text(line * (40 * PIECE // len(line)))
    torch.zeros(1)
    tracemalloc.start()
    prepare(tmp_path / "a", tmp_path / "tokens")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 25 * PIECE
