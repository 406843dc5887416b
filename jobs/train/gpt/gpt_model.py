"""A GPT-2 or a Llama in plain torch. Nothing here knows ranks; gpt_parallelize.py cuts it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
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
    # Those of Llama: RMSNorm, rotary positions, a gated perceptron (SwiGLU), no biases.
    llama: bool = False
    kv_heads: int | None = None  # of keys and values; None: as many as heads
    inner: int | None = None  # width of the perceptron; None: 4 x width
    theta: float = 10_000.0  # of the rotary positions

    def facts(self) -> dict[str, Any]:
        """What describes the model in a checkpoint: of GPT-2 without Llama's options."""
        own = asdict(self)
        return own if self.llama else {key: own[key] for key in SIZES}


SIZES = ("layers", "heads", "width", "context", "vocabulary")

# The four sizes with GPT-2's vocabulary have GPT-2's parameter counts; bytes use 256 of its tokens.
PRESETS = {
    "tiny": Shape(layers=2, heads=4, width=128, context=64),
    "small": Shape(layers=6, heads=6, width=384, context=256),
    "124m": Shape(layers=12, heads=12, width=768, context=1024, vocabulary=50257),
    "355m": Shape(layers=24, heads=16, width=1024, context=1024, vocabulary=50257),
    "774m": Shape(layers=36, heads=20, width=1280, context=1024, vocabulary=50257),
    "1.5b": Shape(layers=48, heads=25, width=1600, context=1024, vocabulary=50257),
    "llama-tiny": Shape(
        layers=2, heads=4, width=128, context=64, llama=True, kv_heads=2, inner=352
    ),
    # The sizes of Llama 3.2 1B.
    "llama-1b": Shape(
        layers=16, heads=32, width=2048, context=8192, vocabulary=128256,
        llama=True, kv_heads=8, inner=8192, theta=500_000.0,
    ),
}  # fmt: skip


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


def _norm(shape: Shape) -> nn.Module:
    return nn.RMSNorm(shape.width, eps=1e-5) if shape.llama else nn.LayerNorm(shape.width)


Angles = tuple[Tensor, Tensor]
"""Cosine and sine of rotary positions, both (length, width of a head); of positions that differ
between samples (batch, 1, length, width of a head)."""


def rotary_angles(shape: Shape, places: Tensor) -> Angles:
    """Su et al. 2021, https://arxiv.org/abs/2104.09864: each pair of numbers of a head turns with
    the position, the first one fastest. The pairs are one half with the other, as in Llama."""
    width = shape.width // shape.heads
    speeds = 1.0 / shape.theta ** (torch.arange(0, width, 2, device=places.device).float() / width)
    turns = places.float()[..., None] * speeds
    angles = torch.cat([turns, turns], dim=-1)
    return angles.cos(), angles.sin()


def _rotated(x: Tensor, angles: Angles) -> Tensor:
    cos, sin = (part.to(x.dtype) for part in angles)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention with several heads: (batch, length, width) to the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        groups = shape.kv_heads or shape.heads
        self.queries = shape.heads // groups  # that share a key and a value
        # The rows of one group of heads, its queries, its key, its value, lie together, so that a
        # slice of the rows is a number of heads.
        rows = (self.queries + 2) * groups * self.head_width
        self.heads_in = Linear(shape.width, rows, bias=not shape.llama)
        self.output = Linear(shape.width, shape.width, bias=not shape.llama, std=_output_std(shape))

    def forward(
        self, x: Tensor, angles: Angles | None = None, mask: Tensor | None = None
    ) -> Tensor:
        rows = self.heads_in(x)
        batch, length, _ = rows.shape
        heads = rows.view(batch, length, -1, self.queries + 2, self.head_width)
        # Each of the three: (batch, heads of this rank, length, width of a head).
        parts = heads.split([self.queries, 1, 1], dim=3)
        query, key, value = (part.flatten(2, 3).transpose(1, 2) for part in parts)
        if angles is not None:
            query, key = _rotated(query, angles), _rotated(key, angles)
        y = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, enable_gqa=self.queries > 1
        )
        return self.output(y.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each normalised before and added after."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        inner, bias = shape.inner or 4 * shape.width, not shape.llama
        self.shape = shape
        self.attention_norm = _norm(shape)
        self.attention = Attention(shape)
        self.perceptron_norm = _norm(shape)
        self.expand = Linear(shape.width, inner, bias=bias)
        self.gate = Linear(shape.width, inner, bias=bias) if shape.llama else None
        self.output = Linear(inner, shape.width, bias=bias, std=_output_std(shape))

    def forward(
        self, x: Tensor, angles: Angles | None = None, mask: Tensor | None = None
    ) -> Tensor:
        if angles is None and self.gate is not None:  # alone, in DeepSpeed's pipeline
            angles = rotary_angles(self.shape, _places(x))
        x = x + self.attention(self.attention_norm(x), angles, mask)
        y = self.perceptron_norm(x)
        if self.gate is None:
            inner = F.gelu(self.expand(y), approximate="tanh")
        else:
            inner = F.silu(self.gate(y)) * self.expand(y)
        return x + self.output(inner)


class _Blocks(nn.Module):
    """What a GPT and a stage of one have in common.

    Attributes:
        recompute: called as ``recompute(block, x)`` to run a block and forget what is inside it;
            None to keep everything for the backward pass.
    """

    recompute: Callable[..., Any] | None = None
    shape: Shape
    blocks: nn.ModuleDict
    # Modules; None in a stage that is not the first, or not the last.
    token: Any
    position: Any
    norm: Any
    head: Any

    def embed(self, tokens: Tensor, places: Tensor | None = None) -> Tensor:
        """Tokens as vectors, (batch, length) to (batch, length, width), with those of their
        positions, unless the blocks turn them."""
        if self.position is None:
            return self.token(tokens)
        return self.token(tokens) + self.position(_places(tokens) if places is None else places)

    def through(self, x: Tensor, places: Tensor | None = None) -> Tensor:
        """Activations after all blocks that are here."""
        more: dict[str, Any] = {}
        if self.shape.llama:
            turned = _places(x) if places is None else places[:, None]
            more["angles"] = rotary_angles(self.shape, turned)
        if places is not None:
            more["mask"] = document_mask(places)
        for module in self.blocks.values():
            block = partial(module, **more) if more else module
            x = block(x) if self.recompute is None else self.recompute(block, x)
        return x


def _places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device)


class GPT(_Blocks):
    """GPT-2 without dropout, or Llama; the output layer shares its weight with the token embedding.

    Args:
        chunked_loss: compute the loss, and again its gradient, of `CHUNK` tokens at a time, so that
            there are never the logits of all.
    """

    def __init__(self, shape: Shape, *, chunked_loss: bool = False) -> None:
        super().__init__()
        self.shape, self.chunked_loss = shape, chunked_loss
        self.token = Embedding(shape.vocabulary, shape.width)
        self.position = None if shape.llama else Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleDict({str(n): Block(shape) for n in range(shape.layers)})
        self.norm = _norm(shape)
        self.head = Linear(shape.width, shape.vocabulary, bias=False)
        self.tie()

    def tie(self) -> None:
        """Let the output layer use the token embedding's weight."""
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, targets: Tensor, places: Tensor | None = None) -> Tensor:
        """Mean cross entropy of ``targets``, a float32 scalar; all (batch, length), int64.

        With ``places``, of the tokens in their documents, attention does not leave those.
        """
        x = self.norm(self.through(self.embed(tokens, places), places))
        if self.chunked_loss:
            return chunked_cross_entropy(self.head, x, targets)
        return cross_entropy(self.head(x), targets)

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
        self.recompute, self.shape = gpt.recompute, gpt.shape
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


CHUNK = 512


def chunked_cross_entropy(head: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    """`cross_entropy` of ``head(x)``, of which a chunk is kept as its input alone."""

    def total(part: Tensor, answers: Tensor) -> Tensor:
        return F.cross_entropy(head(part).float(), answers, reduction="sum")

    parts = zip(x.flatten(0, 1).split(CHUNK), targets.flatten().split(CHUNK), strict=True)
    sums = [torch.utils.checkpoint.checkpoint(total, *part, use_reentrant=False) for part in parts]
    return torch.stack(sums).sum() / targets.numel()
