"""Write text as token files, which train.py maps into memory instead of reading them whole.

    python jobs/train/gpt/prepare.py my-texts/ tokens/                      # a token per byte
    python jobs/train/gpt/prepare.py my-texts/ tokens/ --tokenizer gpt2     # or a folder with one
    torchrun --nproc-per-node 8 jobs/train/gpt/train.py --model 124m --data tokens/

Every plain file, and every line of a .jsonl file, is a document. A tokenizer's end-of-text token
follows each; special tokens that stand in a text stay text.

``train.bin`` and ``val.bin`` (the last tenth) hold tokens of 16 bits, as nanoGPT has them, or of 32
for a vocabulary above 65,536; ``train.idx`` and ``val.idx`` where each document starts, in 64 bits;
``meta.json`` how many of each there are: a torn copy is noticed.
"""

from __future__ import annotations

import argparse
import codecs
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from gpt_data import COMPRESSED, JSON_LINES, Tokens, text_files
from gpt_ranks import BadInput, Explained, run
from gpt_settings import positive

PIECE = 1 << 18
"""Characters that are tokenized together. Longer documents are cut, so that memory is bounded."""

FILES = {"train.bin": 0, "val.bin": 0, "train.idx": 8, "val.idx": 8}  # bytes of a number; 0: token

Piece = tuple[str, bool, bool]  # of a document; whether it begins, and ends, the document


def documents(text: Path, folder: Path, key: str) -> Iterator[Piece]:
    """The documents of a file or a folder, none of them empty."""
    for file in text_files(text):
        if file.suffix in COMPRESSED:
            raise BadInput(f"{file} is compressed", hint="unpack it first (.gz: gunzip)")
        if file.name in FILES and file.resolve().is_relative_to(folder.resolve()):
            raise BadInput(f"{file} is a token file", hint="write to a folder outside the text's")
        if file.suffix in JSON_LINES:
            for record in _records(file, key):
                yield from _pieces([record])
        else:
            yield from _pieces(_decoded(file))


def _decoded(file: Path) -> Iterator[str]:
    decoder, read, block = codecs.getincrementaldecoder("utf-8")(), 0, b"-"
    with file.open("rb") as stream:
        while block:
            block = stream.read(PIECE)
            read += len(block)
            try:
                yield decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise _not_utf8(str(file), read - len(error.object) + error.start) from None


def _not_utf8(where: str, place: int) -> BadInput:
    return BadInput(
        f"{where} is not UTF-8: byte {place}",
        hint="leave the file out, or convert it, such as iconv -f LATIN1 -t UTF-8",
    )


def _records(file: Path, key: str) -> Iterator[str]:
    """The text of each line of a JSONL file."""
    read = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{file}, line {number}"
            try:
                record = json.loads(line.decode()) if line.strip() else {key: ""}
            except UnicodeDecodeError as error:
                raise _not_utf8(where, read + error.start) from None
            except (ValueError, RecursionError):
                hint = f'each line is an object such as {{"{key}": "..."}}'
                raise BadInput(f"{where} is not JSON", hint) from None
            read += len(line)
            text = record.get(key) if isinstance(record, dict) else None
            if not isinstance(text, str):
                keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
                hint = "say with --key which of them is the text"
                raise BadInput(f'{where} has no text "{key}", only {keys or "{}"}', hint)
            if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
                said = f"{where} holds half a character (\\ud800 to \\udfff alone)"
                raise BadInput(said, "write both halves, or take it out")
            yield text


def _pieces(blocks: Iterable[str]) -> Iterator[Piece]:
    """One document's, of at most about `PIECE`, cut where words and lines end."""
    held, begins = "", True
    for block in blocks:
        held += block
        while len(held) > PIECE:
            place = _end(held[:PIECE])
            yield held[:place], begins, False
            held, begins = held[place:], False
    if held:
        yield held, begins, True


def _end(text: str) -> int:
    """Behind the last line end between two letters, across which usual tokens do not go; else
    before the last such space; else the end."""
    found = re.match(r".*\S\n(?=\S)", text, re.S) or re.match(r".*\S(?= \S)", text, re.S)
    return found.end() if found else len(text)


def batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """As many pieces together as are worth sending to a process."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[0])
        if size >= PIECE:
            yield batch
            batch, size = [], 0
    yield batch


Encoded = tuple[bytes, list[int]]  # tokens as they stand in a file; where documents start in them
_PLAIN = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}


class Encoder:
    """Pieces to tokens: of a Hugging Face tokenizer, or bytes."""

    def __init__(self, tokenizer: str | None) -> None:
        self.known: Any = None
        self.vocabulary = 256
        self.begin: list[int] = []  # put before each document, and behind it
        self.end: list[int] = []
        if tokenizer is not None:
            from gpt_hugging_face import load_tokenizer

            self.known = known = load_tokenizer(tokenizer)
            if known is None:
                raise BadInput(f"--tokenizer {tokenizer}: there is none", "a hub name, or a folder")
            self.vocabulary = max(known.get_vocab().values()) + 1
            self.end = [] if known.eos_token_id is None else [known.eos_token_id]
            if known("")["input_ids"][:1] == [known.bos_token_id]:
                self.begin = [known.bos_token_id]
        self.width = 2 if self.vocabulary <= 1 << 16 else 4

    def __call__(self, batch: list[Piece]) -> Encoded:
        tokens, starts = bytearray(), []
        for text, begins, ends in batch:
            if begins:
                starts.append(len(tokens) // self.width)
            if self.known is None:
                one = text.encode()
                tokens += bytes(2 * len(one))
                tokens[-2 * len(one) :: 2] = one
                continue
            ids = self.known(text, **_PLAIN)["input_ids"]
            ids = self.begin * begins + ids + self.end * ends
            tokens += array("H" if self.width == 2 else "I", ids).tobytes()
        return bytes(tokens), starts


_encoder: Encoder  # of a process that encodes


def _begin(encoder: Encoder) -> None:
    global _encoder
    _encoder = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of Ctrl-C the first process tells


def _encode(batch: list[Piece]) -> Encoded:
    return _encoder(batch)


def encoded(pieces: Iterable[Piece], encoder: Encoder, processes: int) -> Iterator[Encoded]:
    """In order, and never more under way than keeps the processes busy."""
    if processes == 1:
        yield from map(encoder, batches(pieces))
        return
    waiting: deque[Future[Encoded]] = deque()
    # Forked, they share this process's torch and tokenizer, and begin at once.
    with ProcessPoolExecutor(processes, get_context("fork"), _begin, (encoder,)) as pool:
        try:
            for batch in batches(pieces):
                waiting.append(pool.submit(_encode, batch))
                if len(waiting) > 2 * processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            hint = "for want of memory? then fewer --processes"
            raise Explained("a process that tokenizes was killed", hint) from None


def prepare(
    text: Path, folder: Path, tokenizer: str | None = None, key: str = "text", processes: int = 1
) -> dict[str, int]:
    """Write the files; returns what meta.json says of them."""
    _check(text, folder)
    encoder = Encoder(tokenizer)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".draft-") as name:
            draft, width = Path(name), encoder.width
            _write(draft, encoded(documents(text, folder, key), encoder, processes), width)
            about = {"vocabulary": encoder.vocabulary, "bits": 8 * width}
            for file, size in FILES.items():
                about[file] = (draft / file).stat().st_size // (size or width)
            (draft / "meta.json").write_text(json.dumps(about) + "\n")
            # In this order: until all are there, their sizes are not those that meta.json says.
            for file in ("meta.json", *FILES):
                with (draft / file).open("rb") as written:
                    os.fsync(written.fileno())
                (draft / file).replace(folder / file)
    except OSError as error:
        raise BadInput(f"{error.filename or folder}: {error.strerror}") from None
    finally:
        with suppress(OSError):
            folder.rmdir()  # where it was made for nothing
    return about


def _check(text: Path, folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder} is a file", hint="give a folder to write to")
    if text.is_dir() and folder.resolve().is_relative_to(text.resolve()):
        raise BadInput(f"{folder} lies in {text}", hint="write to a folder outside the text's")
    about = folder / "meta.json"
    if about.exists() and b'"vocabulary"' not in about.read_bytes():
        raise BadInput(f"{about} is not of prepare.py", hint="give another folder")


def _write(draft: Path, found: Iterable[Encoded], width: int) -> None:
    """The tokens and starts of all documents, then the last tenth of them apart."""
    total = 0
    train, val, train_index, val_index = (draft / file for file in FILES)
    with train.open("wb") as tokens, train_index.open("wb") as index:
        for ids, starts in found:
            tokens.write(ids)
            index.write(array("q", [total + start for start in starts]).tobytes())
            total += len(ids) // width
    first = total - total // 10
    if first == total:
        raise BadInput(f"{total} tokens are too few to divide", hint="give more text")
    count = train_index.stat().st_size // 8
    mapped = torch.from_file(str(train_index), size=count, dtype=torch.int64)
    parts = [part.starts for part in Tokens(torch.empty(total, device="meta"), mapped).split(first)]
    val_index.write_bytes(parts[1].numpy().tobytes())
    os.truncate(train_index, 8 * len(parts[0]))
    with train.open("r+b") as tokens, val.open("wb") as rest:
        tokens.seek(first * width)
        shutil.copyfileobj(tokens, rest)
        tokens.truncate(first * width)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("text", type=Path, help="file or folder: plain text, .jsonl")
    add("folder", type=Path, help="where to write")
    add("--tokenizer", metavar="NAME", help="Hugging Face name or folder")
    add("--key", default="text", help="of the text in a JSONL line (default: text)")
    help = "that tokenize (default: one a core, and 1 without --tokenizer)"
    add("--processes", type=positive, metavar="N", help=help)
    args = parser.parse_args()
    processes = args.processes or (os.cpu_count() or 1 if args.tokenizer else 1)
    print(json.dumps(prepare(args.text, args.folder, args.tokenizer, args.key, processes)))
    return 0


if __name__ == "__main__":
    run(main)
