"""Text and token files, and which samples of them a rank sees at a step.

Text is read whole, a token per byte or by the model's tokenizer. Token files, which prepare.py
writes, are mapped into memory, and only what a step needs is read: ``train.bin`` and ``val.bin`` in
a folder, or any one ``.bin``, hold tokens and nothing else. Each has 16 bits, as in nanoGPT's
files, or what ``meta.json`` beside them says; an ``.idx`` says where the documents start.

The samples are a pure function of the seed and of how many samples came before, so the same seed
and global batch give the same samples on any number of ranks, and after a resume.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpt_ranks import BadInput, World
from torch import Tensor

if TYPE_CHECKING:
    from gpt_settings import Batch

STANDARD_LIBRARY_BYTES = 4_000_000
SAMPLINGS = ("random", "epochs")
HELP = "file or folder, or web=0.7,code=0.3 (default: Python's standard library)"
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".parquet")
JSON_LINES = (".jsonl", ".ndjson")

# Parts that Linux distributions leave out or change: without them the text is the same wherever
# the Python version is.
_NOT_EVERYWHERE = {
    *("site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo"),
    *("lib2to3", "ensurepip", "distutils", "__pycache__"),
}


def text_files(path: Path, seen: set[tuple[int, int]] | None = None) -> Iterator[Path]:
    """A file, or a folder's files in sorted order. Links are followed, and each folder is read
    once, however many lead to it. Names that begin with a dot are leftovers of editors and version
    control."""
    if not path.is_dir():
        yield path
        return
    seen = set() if seen is None else seen
    about = path.stat()
    if (about.st_dev, about.st_ino) in seen:
        return
    seen.add((about.st_dev, about.st_ino))
    for entry in sorted(path.iterdir()):
        # A link that leads nowhere is named when it is opened; a socket is no text.
        if entry.name[0] != "." and (entry.is_dir() or entry.is_file() or entry.is_symlink()):
            yield from text_files(entry, seen)


def read_text(path: str | None = None) -> bytes:
    """A file, or a folder's files in sorted order; None: the first 4 MB of Python's own library."""
    if path is None:
        return _standard_library()
    text = bytearray()
    try:
        for file in text_files(Path(path)):
            if file.suffix in (*COMPRESSED, *JSON_LINES):
                raise BadInput(
                    f"--data {file} is not plain text",
                    hint="write token files of it with prepare.py, and give --data their folder",
                )
            text += file.read_bytes()
    except OSError as error:
        raise BadInput(
            f"--data {error.filename or path}: {error.strerror}",
            hint="give a file or a folder that every node has",
        ) from None
    return bytes(text)


def _standard_library() -> bytes:
    root = sysconfig.get_path("stdlib")
    paths = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [s for s in subfolders if s not in _NOT_EVERYWHERE and "-" not in s]
        paths += [os.path.join(folder, f) for f in files if f.endswith(".py") and f[0] != "_"]
    text = bytearray()
    for path in sorted(paths):
        text += Path(path).read_bytes()
        if len(text) >= STANDARD_LIBRARY_BYTES:
            break
    return bytes(text[:STANDARD_LIBRARY_BYTES])


def as_tokens(text: bytes) -> Tensor:
    """One token per byte: (number of bytes,), uint8."""
    if not text:  # which frombuffer refuses
        return torch.zeros(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


# ---------------------------------------------------------------- tokens


@dataclass(frozen=True)
class Tokens:
    """Tokens one after the other, and where their documents start."""

    ids: Tensor  # (number of tokens,), any integer type
    starts: Tensor | None = None  # (number of documents,), int64, the first 0; None: not known

    def __len__(self) -> int:
        return len(self.ids)

    def positions(self, start: int, length: int) -> Tensor:
        """Of these tokens within their documents: (length,), int64. What began before ``start`` is
        counted from there."""
        first, after = (
            int(torch.searchsorted(self.starts, place, right=right))
            for place, right in ((start, True), (start + length, False))
        )
        starts = self.starts[first:after] - start
        begins = torch.zeros(length, dtype=torch.int64)
        begins[starts] = starts
        return torch.arange(length) - begins.cummax(0).values

    def split(self, first: int) -> tuple[Tokens, Tokens]:
        """The first ones, and the others."""
        before = after = None
        if self.starts is not None:
            before = self.starts[: int(torch.searchsorted(self.starts, first))]
            later = self.starts[int(torch.searchsorted(self.starts, first, right=True)) :] - first
            after = torch.cat([torch.zeros(1, dtype=torch.int64), later])
        return Tokens(self.ids[:first], before), Tokens(self.ids[first:], after)


def map_tokens(path: Path, vocabulary: int | None = None) -> Tokens:
    """The tokens of a ``.bin`` file, mapped and not read, uint16 or int32."""
    about: dict[str, Any] = {}
    try:
        with suppress(FileNotFoundError):
            about = json.loads(path.with_name("meta.json").read_text())
        bits, largest = about.get("bits"), about.get("vocabulary")
    except (OSError, ValueError, AttributeError) as error:
        raise BadInput(f"--data {path}: {error}", hint="prepare.py writes such files") from None
    if bits not in (None, 16, 32):
        raise BadInput(f"--data {path}: meta.json says {bits} bits a token, not 16 or 32")
    if vocabulary is not None and largest is not None and largest > vocabulary:
        raise other_vocabulary(path, f"a vocabulary of {largest}", vocabulary)
    if vocabulary is not None and vocabulary > 1 << 16 and not about:
        raise BadInput(
            f"--data {path}: no meta.json says whether its tokens have 16 or 32 bits",
            hint="copy the meta.json of prepare.py with it",
        )
    ids = _map(path, torch.int32 if bits == 32 else torch.uint16, about)
    index = path.with_suffix(".idx")
    starts = _map(index, torch.int64, about) if index.exists() else None
    if starts is not None and not (len(starts) and starts[0] == 0 and starts[-1] < len(ids)):
        raise BadInput(
            f"--data {index} is not of {path.name}: its documents lie elsewhere",
            hint="write both anew with prepare.py",
        )
    return Tokens(ids, starts)


def _map(path: Path, dtype: torch.dtype, about: Mapping[str, Any]) -> Tensor:
    try:
        size = path.stat().st_size
        numbers, rest = divmod(size, dtype.itemsize)
        meant = about.get(path.name, numbers)
        if rest or numbers != meant:
            whole = f", not the {dtype.itemsize * meant} of its meta.json" * (path.name in about)
            raise BadInput(
                f"--data {path} is truncated, or no token file: {size} bytes{whole}",
                hint=f"{dtype.itemsize} bytes a number; write it anew with prepare.py",
            )
        return torch.from_file(str(path), size=numbers, dtype=dtype)
    except (OSError, RuntimeError) as error:
        raise BadInput(f"--data {path}: {error}", hint="prepare.py writes such files") from None


def other_vocabulary(path: object, what: str, vocabulary: int) -> BadInput:
    return BadInput(
        f"--data {path} has {what}, the model one of {vocabulary}",
        hint="another --model, or tokens of its own tokenizer (prepare.py --tokenizer)",
    )


@dataclass(frozen=True)
class Source:
    """Tokens to train on and a held-out part to evaluate on, both at least one sample long."""

    name: str
    training: Tokens
    held_out: Tokens
    share: int = 1  # samples from here, of each ``sum of all shares`` in a row


@dataclass(frozen=True)
class Text:
    """One source, or several that are mixed."""

    sources: tuple[Source, ...]
    context: int  # tokens in one sample
    vocabulary: int | None = None  # of the model: no token may be as large

    @cached_property
    def identity(self) -> list[list[int]]:
        """Share, length and a checksum (of much text, of a sample of it) of each source."""
        found = []
        for source in self.sources:
            ids = source.training.ids
            # What is only mapped is read for this: less of it.
            most = 1_000_000 if ids.dtype == torch.uint8 else 10_000
            sample = ids[:: max(1, len(ids) // most)].contiguous()
            found.append([source.share, len(ids), zlib.crc32(sample.numpy().tobytes())])
        return found


def read(
    data: str | None,
    context: int,
    vocabulary: int | None = None,
    tokenize: Callable[[bytes], Tensor] = as_tokens,
    *,
    document_mask: bool = False,
) -> Text:
    """What ``--data`` names: token files as they are, or text, which ``tokenize`` makes tokens."""
    sources = []
    for path, share in shares(data):
        name, folder = path or "the standard library", Path(path or "")
        files = folder / "train.bin", folder / "val.bin"
        if path and any(file.exists() for file in files):
            parts = tuple(map_tokens(file, vocabulary) for file in files)
            if (fewest := min(map(len, parts))) < context + 1:
                raise BadInput(
                    f"{name} holds {fewest} tokens in train.bin or val.bin, and a sample needs "
                    f"{context + 1}",
                    hint="more text, or a smaller --context",
                )
            source = Source(name, *parts, share)
        else:
            mapped = folder.suffix == ".bin"
            tokens = map_tokens(folder, vocabulary) if mapped else Tokens(tokenize(read_text(path)))
            source = split(tokens, context, name, share)
        if document_mask and None in (source.training.starts, source.held_out.starts):
            raise BadInput(
                f"--document-mask: nothing says where the documents of {name} start",
                hint="write it with prepare.py, whose .idx files do",
            )
        sources.append(source)
    return Text(tuple(sources), context, vocabulary)


def split(tokens: Tokens, context: int, name: str, share: int = 1) -> Source:
    """Hold out the last tenth of the tokens."""
    held_out = len(tokens) // 10
    if held_out < context + 1:
        raise BadInput(
            f"{name} holds {len(tokens)} tokens; with a context of {context} it must hold at "
            f"least {10 * (context + 1)}",
            hint="give more text with --data, or a smaller --context",
        )
    return Source(name, *tokens.split(len(tokens) - held_out), share)


def shares(data: str | None) -> list[tuple[str | None, int]]:
    """The paths of ``--data PATH`` or ``--data a=0.7,b=0.3``, and the samples of each in a row of
    as many as it takes to be exact (of 10: 7 and 3)."""
    if data is None or "=" not in data or os.path.exists(data):
        return [(data, 1)]
    weights: dict[str, Fraction] = {}
    for entry in data.split(","):
        path, _, weight = entry.rpartition("=")
        with suppress(ValueError, ZeroDivisionError):
            if path and path not in weights and Fraction(weight) > 0:
                weights[path] = Fraction(weight)
                continue
        raise BadInput(
            f"--data {data}: {entry!r} is not a path of its own with a weight above 0",
            hint="give PATH, or PATH=WEIGHT,PATH=WEIGHT such as web=0.7,code=0.3",
        )
    if (total := sum(weights.values())) != 1:
        raise BadInput(
            f"--data {data}: the weights add up to {total}, not to 1",
            hint="fractions such as 1/3 can be given as well",
        )
    row = math.lcm(*(weight.denominator for weight in weights.values()))
    return [(path, int(weight * row)) for path, weight in weights.items()]


def check_same(text: Text, world: World) -> None:
    """Make sure that all ranks read the same text (of a long one, a sample). Collective."""
    seen = world.gather(text.identity)
    for rank, identity in enumerate(seen):
        if identity != seen[0]:
            theirs, ours = (sum(length for _, length, _ in each) for each in (identity, seen[0]))
            raise BadInput(
                f"rank {rank} trains on other text ({theirs} tokens) than rank 0 ({ours})",
                hint="give --data a path that holds the same on every node",
            )


# ---------------------------------------------------------------- samples

MicroBatch = tuple[Tensor, ...]
"""Tokens and targets, with ``document_mask`` also the tokens' positions in their documents; all
(micro batch, context), int64, on the rank's device."""


@dataclass
class Batches:
    """Samples of a text: windows of ``context`` tokens, and the same windows one token on.

    Each begins anywhere at random, or, with ``sampling`` epochs, where the one before it in the
    text ends, and comes once in an epoch, whose order the seed shuffles.
    """

    text: Text
    seed: int  # another seed, other samples
    batch: Batch  # how many samples a step has and how the ranks share them
    device: torch.device  # where the micro batches go
    replica: int = 0  # which of the equal shares of the global batch is this rank's
    sampling: str = "random"
    document_mask: bool = False
    ahead: bool = True  # whether another thread prepares the step after the one that is asked for

    def __post_init__(self) -> None:
        self._resumed = 0, 0  # a step, and the samples up to its end
        self._next: tuple[int, Future[list[MicroBatch]]] | None = None
        cuda = self.device.type == "cuda"
        self._thread = ThreadPoolExecutor(
            1, "samples", torch.cuda.set_device if cuda else None, (self.device,) if cuda else ()
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all ranks together train on in one step."""
        return self.batch.global_size * self.text.context

    def of_step(self, step: int) -> list[MicroBatch]:
        """This rank's micro batches of ``step``: its own of the equal runs of the global batch.

        A micro batch holds the same samples whether one rank accumulates all of them or many
        ranks take some each, which is what makes their losses comparable to the last bits.
        """
        ready, self._next = self._next, None
        is_ready = ready is not None and ready[0] == step
        drawn = ready[1].result() if is_ready else self._draw(step)
        if self.ahead:
            self._next = step + 1, self._thread.submit(self._draw, step + 1)
        return [self._send(micro_batch) for micro_batch in drawn]

    def held_out(self) -> list[MicroBatch]:
        """This rank's share of one global batch of the held-out part, always the same."""
        return [self._send(micro_batch) for micro_batch in self._draw(None)]

    def place(self, step: int | None, number: int) -> tuple[int, int]:
        """Of a sample in a step's global batch: its source, and the token there at which it
        begins. Step None: of the held-out part."""
        source, turn = self._mixed(number if step is None else self._before(step) + number)
        if step is None or self.sampling == "random":
            held = self.text.sources[source]
            tokens = held.held_out if step is None else held.training
            drawn = _hash(f"{self.seed} {step or 0} {number}")
            return source, drawn % (len(tokens) - self.text.context)
        windows = (len(self.text.sources[source].training) - 1) // self.text.context
        epoch, turn = divmod(turn, windows)
        window = permuted(turn, windows, f"{self.seed} {source} {epoch}")
        return source, window * self.text.context

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint of ``step`` must hold to go on with the next sample."""
        return {"samples": self._before(step + 1), **self._order(), "mask": self.document_mask}

    def resume(self, step: int, state: Mapping[str, Any]) -> str | None:
        """Go on behind ``step``; returns a warning where the samples are not those that would have
        followed there."""
        self._resumed = step, state.get("samples", step * self.batch.global_size)
        changed = [name for name, value in self._order().items() if state.get(name, value) != value]
        if changed:
            self._resumed = step, 0
            what = " and ".join(
                f"other {name}"
                if name == "--data"
                else f"{name} {self._order()[name]} instead of {state[name]}"
                for name in changed
            )
            return f"{what}: the order of samples begins anew, some may be trained on again"
        if state.get("mask", self.document_mask) != self.document_mask:
            return (
                "--document-mask: from here on attention ends where a document does"
                if self.document_mask
                else "no --document-mask: from here on attention crosses the ends of documents"
            )
        return None

    def _order(self) -> dict[str, Any]:
        """All that the order of samples depends on, beside the global batch."""
        return {
            "--sampling": self.sampling, "--seed": self.seed, "--context": self.text.context,
            "--data": self.text.identity,
        }  # fmt: skip

    def _before(self, step: int) -> int:
        """Samples of all ranks up to the beginning of a step."""
        resumed, samples = self._resumed
        return samples + (step - 1 - resumed) * self.batch.global_size

    def _mixed(self, number: int) -> tuple[int, int]:
        """The source of a sample, and how many samples of that source come before it."""
        shares = [source.share for source in self.text.sources]
        row, place = divmod(number, sum(shares))
        if len(shares) > 1:
            place = permuted(place, sum(shares), f"{self.seed} {row}")
        for source, share in enumerate(shares):
            if place < share:
                return source, row * share + place
            place -= share
        raise AssertionError

    def _draw(self, step: int | None) -> list[MicroBatch]:
        """Windows of one token more than a sample; with ``document_mask`` also positions."""
        micro = self.batch.micro
        share = micro * self.batch.accumulation
        first = self.replica * share
        return [
            self._micro_batch(step, range(number, number + micro))
            for number in range(first, first + share, micro)
        ]

    def _micro_batch(self, step: int | None, numbers: range) -> MicroBatch:
        context, vocabulary = self.text.context, self.text.vocabulary
        windows, positions = [], []
        for number in numbers:
            index, start = self.place(step, number)
            source = self.text.sources[index]
            tokens = source.held_out if step is None else source.training
            window = tokens.ids[start : start + context + 1].to(torch.int64)
            if vocabulary is not None and (largest := int(window.max())) >= vocabulary:
                raise other_vocabulary(source.name, f"a token {largest}", vocabulary)
            windows.append(window)
            if self.document_mask:
                positions.append(tokens.positions(start, context))
        stacked = tuple(torch.stack(each) for each in (windows, positions) if each)
        # Pinned, so that the host goes on while they travel.
        return tuple(t.pin_memory() for t in stacked) if self.device.type == "cuda" else stacked

    def _send(self, micro_batch: MicroBatch) -> MicroBatch:
        windows, *positions = (t.to(self.device, non_blocking=True) for t in micro_batch)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), *positions


def permuted(number: int, size: int, key: str) -> int:
    """Where ``number`` stands in a shuffled order of 0 to ``size - 1``, without a list of them.

    A Feistel network shuffles as many numbers as bits can tell apart; what it puts beyond ``size``
    is shuffled again (Black and Rogaway 2002, https://doi.org/10.1007/3-540-45760-7_9).
    """
    low = max(1, (size - 1).bit_length() // 2)
    high = max(1, (size - 1).bit_length() - low)
    while True:
        left, right = number >> low, number & (1 << low) - 1
        for turn in range(4):
            if turn % 2:
                right ^= _hash(f"{key} {turn} {left}") & (1 << low) - 1
            else:
                left ^= _hash(f"{key} {turn} {right}") & (1 << high) - 1
        number = left << low | right
        if number < size:
            return number


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
