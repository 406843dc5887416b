"""Text and token files, and which samples of them a rank sees at a step.

Text is read whole, a token per byte or by the model's tokenizer. Token files are not: they are
mapped into memory, and only what a step needs is read (nanoGPT's layout, written by prepare.py:
each token two bytes, nothing else, ``train.bin`` and ``val.bin`` in a folder, or any one ``.bin``).

The samples are a pure function of seed, step and the sample's number in the global batch, so the
same seed and global batch give the same samples on any number of ranks, and after a resume.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpt_ranks import BadInput, World
from torch import Tensor

if TYPE_CHECKING:
    from gpt_settings import Batch

STANDARD_LIBRARY_BYTES = 4_000_000

# Parts that Linux distributions leave out or change: without them the text is the same wherever
# the Python version is.
_NOT_EVERYWHERE = {
    *("site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo"),
    *("lib2to3", "ensurepip", "distutils", "__pycache__"),
}


def read_text(path: str | None = None) -> bytes:
    """A file, or a folder's files in sorted order; None: the first 4 MB of Python's own library."""
    if path is None:
        return _standard_library()
    try:
        if os.path.isdir(path):
            # Names that begin with a dot are leftovers of editors and version control.
            files = sorted(f for f in Path(path).rglob("[!.]*") if f.is_file())
            return b"".join(file.read_bytes() for file in files)
        return Path(path).read_bytes()
    except OSError as error:
        raise BadInput(
            f"--data {path}: {error.strerror}", hint="give a file or a folder that every node has"
        ) from None


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


def map_tokens(path: Path, vocabulary: int | None = None) -> Tensor:
    """The tokens of a ``.bin`` file, mapped and not read: (number of tokens,), uint16."""
    about: dict[str, Any] = {}
    try:
        size = path.stat().st_size
        with suppress(FileNotFoundError):
            about = json.loads(path.with_name("meta.json").read_text())
        meant, largest = about.get(path.name), about.get("vocabulary")
    except (OSError, ValueError, AttributeError) as error:
        raise BadInput(f"--data {path}: {error}", hint="prepare.py writes such files") from None
    if size % 2 or (meant is not None and size != 2 * meant):
        whole = f", not the {2 * meant} of its meta.json" if meant is not None else ""
        raise BadInput(
            f"--data {path} is truncated, or no token file: {size} bytes{whole}",
            hint="two bytes a token; write it anew with prepare.py",
        )
    if vocabulary is not None and largest is not None and largest > vocabulary:
        raise other_vocabulary(path, f"a vocabulary of {largest}", vocabulary)
    return torch.from_file(str(path), size=size // 2, dtype=torch.uint16)


def other_vocabulary(path: object, what: str, vocabulary: int) -> BadInput:
    return BadInput(
        f"--data {path} has {what}, the model one of {vocabulary}",
        hint="another --model, or tokens of its own tokenizer (prepare.py --tokenizer)",
    )


@dataclass(frozen=True)
class Text:
    """Tokens to train on and a held-out part to evaluate on, both at least one sample long."""

    training: Tensor  # (number of tokens,), any integer type
    held_out: Tensor  # the same
    context: int  # tokens in one sample
    source: str = "the text"
    vocabulary: int | None = None  # of the model: no token may be as large


def read(
    path: str | None,
    context: int,
    vocabulary: int | None = None,
    tokenize: Callable[[bytes], Tensor] = as_tokens,
) -> Text:
    """What ``--data`` names: token files as they are, or text, which ``tokenize`` makes tokens."""
    source = path or "the standard library"
    folder = Path(path or "")
    if path and (folder / "train.bin").exists() and (folder / "val.bin").exists():
        parts = [map_tokens(folder / name, vocabulary) for name in ("train.bin", "val.bin")]
        if (fewest := min(map(len, parts))) < context + 1:
            raise BadInput(
                f"{source} holds {fewest} tokens in train.bin or val.bin, and a sample needs "
                f"{context + 1}",
                hint="more text, or a smaller --context",
            )
        return Text(*parts, context, source, vocabulary)
    mapped = folder.suffix == ".bin"
    tokens = map_tokens(folder, vocabulary) if mapped else tokenize(read_text(path))
    return split(tokens, context, source, vocabulary)


def split(tokens: Tensor, context: int, source: str, vocabulary: int | None = None) -> Text:
    """Hold out the last tenth of the tokens."""
    held_out = len(tokens) // 10
    if held_out < context + 1:
        raise BadInput(
            f"{source} holds {len(tokens)} tokens; with a context of {context} it must hold at "
            f"least {10 * (context + 1)}",
            hint="give more text with --data, or a smaller --context",
        )
    return Text(tokens[:-held_out], tokens[-held_out:], context, source, vocabulary)


MicroBatch = tuple[Tensor, Tensor]
"""Tokens and targets, both (micro batch, context), int64, on the rank's device."""


def check_same(text: Text, world: World) -> None:
    """Make sure that all ranks read the same text (of a long one, a sample). Collective."""
    tokens = text.training
    # What is only mapped is read for this: less of it.
    most = 1_000_000 if tokens.dtype == torch.uint8 else 10_000
    sample = tokens[:: max(1, len(tokens) // most)].contiguous()
    seen = world.gather((len(tokens), zlib.crc32(sample.numpy().tobytes())))
    for rank, (length, _) in enumerate(seen):
        if seen[rank] != seen[0]:
            raise BadInput(
                f"rank {rank} trains on other text ({length} tokens) than rank 0 ({seen[0][0]})",
                hint="give --data a path that holds the same on every node",
            )


@dataclass(frozen=True)
class Batches:
    """Samples of a text: windows of ``context`` tokens, and the same windows one token on."""

    text: Text
    seed: int  # another seed, other samples
    batch: Batch  # how many samples a step has and how the ranks share them
    device: torch.device  # where the micro batches go
    replica: int = 0  # which of the equal shares of the global batch is this rank's

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all ranks together train on in one step."""
        return self.batch.global_size * self.text.context

    def of_step(self, step: int) -> list[MicroBatch]:
        """This rank's micro batches of ``step``: its own of the equal runs of the global batch.

        A micro batch holds the same samples whether one rank accumulates all of them or many
        ranks take some each, which is what makes their losses comparable to the last bits.
        """
        return self._draw(self.text.training, step)

    def held_out(self) -> list[MicroBatch]:
        """This rank's share of one global batch of the held-out part, always the same."""
        return self._draw(self.text.held_out, 0)

    def _draw(self, tokens: Tensor, step: int) -> list[MicroBatch]:
        micro = self.batch.micro
        share = micro * self.batch.accumulation
        first = self.replica * share
        return [
            self._micro_batch(tokens, step, range(number, number + micro))
            for number in range(first, first + share, micro)
        ]

    def _micro_batch(self, tokens: Tensor, step: int, numbers: range) -> MicroBatch:
        length = self.text.context + 1
        starts = []
        for number in numbers:
            drawn = hashlib.blake2b(f"{self.seed} {step} {number}".encode(), digest_size=8).digest()
            starts.append(int.from_bytes(drawn, "big") % (len(tokens) - length + 1))
        windows = torch.stack([tokens[s : s + length].to(torch.int64) for s in starts])
        vocabulary = self.text.vocabulary
        if vocabulary is not None and (largest := int(windows.max())) >= vocabulary:
            raise other_vocabulary(self.text.source, f"a token {largest}", vocabulary)
        if self.device.type == "cuda":  # the host goes on while they travel
            windows = windows.pin_memory()
        windows = windows.to(self.device, non_blocking=True)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
