"""The sizes of the GPT in jobs/train/gpt/model.py, which a test holds to be the same."""

from __future__ import annotations

from dataclasses import dataclass


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
