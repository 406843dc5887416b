"""Text as tokens, and which samples a rank sees at a step.

Sampling is a pure function of seed, step and the sample's number in the global batch, so the same
seed and global batch give the same samples on any number of ranks, and after a resume.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from batch import Batch
from ranks import BadInput
from strategy import MicroBatch
from torch import Tensor
from world import World

STANDARD_LIBRARY_BYTES = 4_000_000

# Parts that Linux distributions leave out or change: without them the text is the same wherever
# the Python version is.
_NOT_EVERYWHERE = {
    *("site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo"),
    *("lib2to3", "ensurepip", "distutils", "__pycache__"),
}


def read_text(path: str | None = None) -> bytes:
    """The bytes to train on.

    Args:
        path: a file, or a folder whose files are joined in the order of their sorted paths; None
            for the source of Python's own standard library, its first 4 MB.

    Raises:
        BadInput: there is nothing to read at ``path``.
    """
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


@dataclass(frozen=True)
class Text:
    """Tokens to train on and a held-out tail to evaluate on, both at least one sample long."""

    training: Tensor  # (number of tokens,), any integer type
    held_out: Tensor  # the same
    context: int  # tokens in one sample


def split(tokens: Tensor, context: int, source: str) -> Text:
    """Hold out the last tenth of the tokens.

    Raises:
        BadInput: too few tokens for one sample in each part.
    """
    held_out = len(tokens) // 10
    if held_out < context + 1:
        raise BadInput(
            f"{source} holds {len(tokens)} tokens; with a context of {context} it must hold at "
            f"least {10 * (context + 1)}",
            hint="give more text with --data, or a smaller --context",
        )
    return Text(tokens[:-held_out], tokens[-held_out:], context)


def check_same(text: Text, world: World) -> None:
    """Make sure that all ranks read the same text (of a long one, a sample). Collective.

    Raises:
        BadInput: they did not; the message names the first rank that differs.
    """
    tokens = text.training
    sample = tokens[:: max(1, len(tokens) // 1_000_000)].contiguous()
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
    world: World  # who this rank is, and the device the micro batches go to
    replica: int | None = None  # this rank's share of the global batch; None: one for each rank

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
        """This rank's share of one global batch from the held-out tail, always the same."""
        return self._draw(self.text.held_out, 0)

    def _draw(self, tokens: Tensor, step: int) -> list[MicroBatch]:
        micro = self.batch.micro
        share = micro * self.batch.accumulation
        first = (self.world.rank if self.replica is None else self.replica) * share
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
        windows = torch.stack([tokens[start : start + length] for start in starts])
        windows = windows.to(self.world.device, torch.int64)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
