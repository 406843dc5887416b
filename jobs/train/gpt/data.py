"""Which samples of a text a rank sees at a step.

A pure function of seed, step and the sample's number in the global batch, so the same seed and
global batch give the same samples on any number of ranks, and after a resume.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass

import torch
from choices import Batch
from ranks import BadInput
from text import Text, other_vocabulary
from torch import Tensor
from world import World

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
