"""A GPT-2 in plain torch. Nothing here knows ranks; parallelize.py and zero.py cut it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_STD = 0.02
SHARED = {"head.weight": "token.weight"}
"""A weight that the first and the last layer have in common, by its second name."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT. ``width`` is split over ``heads``; ``context`` is the longest sample."""

    layers: int
    heads: int
    width: int
    context: int
    vocabulary: int = 256  # one token per byte


# The four sizes with GPT-2's vocabulary have GPT-2's parameter counts; bytes use 256 of its tokens.
PRESETS = {
    "tiny": Shape(layers=2, heads=4, width=128, context=64),
    "small": Shape(layers=6, heads=6, width=384, context=256),
    "124m": Shape(layers=12, heads=12, width=768, context=1024, vocabulary=50257),
    "355m": Shape(layers=24, heads=16, width=1024, context=1024, vocabulary=50257),
    "774m": Shape(layers=36, heads=20, width=1280, context=1024, vocabulary=50257),
    "1.5b": Shape(layers=48, heads=25, width=1600, context=1024, vocabulary=50257),
}


class Linear(nn.Linear):
    """Weights drawn with ``std``, biases zero.

    Drawn here and not later: under DeepSpeed's ``zero.Init`` a weight is whole only until the
    module that holds it is complete.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, std: float = _STD) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """Weights drawn as those of ``Linear``."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=_STD)


def _output_std(shape: Shape) -> float:
    """Of the weights that add to the residual stream, so that its variance stays near one."""
    return _STD / math.sqrt(2 * shape.layers)


class Attention(nn.Module):
    """Causal self-attention with several heads: (batch, length, width) to the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        # The rows of one head lie together, so that a slice of the rows is a number of heads.
        self.heads_in = Linear(shape.width, 3 * shape.width)
        self.output = Linear(shape.width, shape.width, std=_output_std(shape))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        rows = self.heads_in(x)
        batch, length, _ = rows.shape
        heads = rows.view(batch, length, -1, 3, self.head_width)
        # Each of the three: (batch, heads of this rank, length, width of a head).
        query, key, value = heads.permute(3, 0, 2, 1, 4)
        causal = mask is None
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
        return self.output(y.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each normalised before and added after."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.perceptron_norm = nn.LayerNorm(shape.width)
        self.expand = Linear(shape.width, 4 * shape.width)
        self.output = Linear(4 * shape.width, shape.width, std=_output_std(shape))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask)
        inner = F.gelu(self.expand(self.perceptron_norm(x)), approximate="tanh")
        return x + self.output(inner)


class _Blocks(nn.Module):
    """What a GPT and a stage of one have in common.

    Attributes:
        recompute: called as ``recompute(block, x)`` to run a block and forget what is inside it;
            None to keep everything for the backward pass.
    """

    recompute: Callable[..., Any] | None = None
    blocks: nn.ModuleDict
    # Modules; None in a stage that is not the first, or not the last.
    token: Any
    position: Any
    norm: Any
    head: Any

    def embed(self, tokens: Tensor, places: Tensor | None = None) -> Tensor:
        """Tokens with their positions as vectors: (batch, length) to (batch, length, width)."""
        if places is None:
            places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.token(tokens) + self.position(places)

    def through(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Activations after all blocks that are here."""
        for module in self.blocks.values():
            block = module if mask is None else partial(module, mask=mask)
            x = block(x) if self.recompute is None else self.recompute(block, x)
        return x


class GPT(_Blocks):
    """GPT-2 without dropout; the output layer shares its weight with the token embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = Embedding(shape.vocabulary, shape.width)
        self.position = Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleDict({str(n): Block(shape) for n in range(shape.layers)})
        self.norm = nn.LayerNorm(shape.width)
        self.head = Linear(shape.width, shape.vocabulary, bias=False)
        self.tie()

    def tie(self) -> None:
        """Let the output layer use the token embedding's weight."""
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, targets: Tensor, places: Tensor | None = None) -> Tensor:
        """Mean cross entropy of ``targets``, a float32 scalar; all (batch, length), int64.

        With ``places``, of the tokens in their documents, attention does not leave those.
        """
        mask = None if places is None else document_mask(places)
        x = self.through(self.embed(tokens, places), mask)
        return cross_entropy(self.head(self.norm(x)), targets)

    def stage(self, index: int, stages: int) -> Stage:
        """The ``index``-th of ``stages`` equal runs of the blocks, with what stands at the ends.

        When the blocks do not divide, earlier stages take one more. The modules are this model's
        own and keep their names.
        """
        blocks = list(self.blocks.items())
        fewest, more = divmod(len(blocks), stages)
        first = index * fewest + min(index, more)
        own = blocks[first : first + fewest + (index < more)]
        return Stage(self, dict(own), first=index == 0, last=index == stages - 1)


class Stage(_Blocks):
    """Some blocks of a GPT: from tokens or activations to activations or logits."""

    def __init__(self, gpt: GPT, blocks: dict[str, nn.Module], *, first: bool, last: bool) -> None:
        super().__init__()
        self.recompute = gpt.recompute
        self.token = gpt.token if first else None
        self.position = gpt.position if first else None
        self.blocks = nn.ModuleDict(blocks)
        self.norm = gpt.norm if last else None
        self.head = gpt.head if last else None

    def forward(self, x: Tensor) -> Tensor:
        """``x``: tokens (batch, length) in the first stage, else (batch, length, width)."""
        if self.token is not None:
            x = self.embed(x)
        x = self.through(x)
        if self.head is not None:
            x = self.head(self.norm(x))
        return x


def document_mask(places: Tensor) -> Tensor:
    """What each token may attend to, from its place in its document: (batch, 1, length, length)."""
    numbers = torch.arange(places.shape[1], device=places.device)
    before = numbers[:, None] - numbers
    return ((before >= 0) & (before <= places[:, :, None]))[:, None]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens, in float32."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
