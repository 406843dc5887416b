"""Shapes of well-known models, as their authors published them in ``config.json``.

Data alone: a short name, the name on the Hugging Face hub, and what `models.from_config` reads of
the config. A model of the same shape under another name (chat, instruct) needs no line of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LLAMA = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
    "tie_word_embeddings",
)  # fmt: skip
_GPT2 = ("n_embd", "n_layer", "n_head")

_SHAPES: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "gpt2": ("openai-community/gpt2", "gpt2", (768, 12, 12)),
    "gpt2-medium": ("openai-community/gpt2-medium", "gpt2", (1024, 24, 16)),
    "gpt2-large": ("openai-community/gpt2-large", "gpt2", (1280, 36, 20)),
    "gpt2-xl": ("openai-community/gpt2-xl", "gpt2", (1600, 48, 25)),
    "llama-7b": ("huggyllama/llama-7b", "llama", (4096, 11008, 32, 32, 32, 128, 32000, 2048, 0)),
    "llama-2-7b": (
        "meta-llama/Llama-2-7b-hf", "llama", (4096, 11008, 32, 32, 32, 128, 32000, 4096, 0)),
    "llama-2-13b": (
        "meta-llama/Llama-2-13b-hf", "llama", (5120, 13824, 40, 40, 40, 128, 32000, 4096, 0)),
    "llama-2-70b": (
        "meta-llama/Llama-2-70b-hf", "llama", (8192, 28672, 80, 64, 8, 128, 32000, 4096, 0)),
    "llama-3-8b": (
        "meta-llama/Meta-Llama-3-8B", "llama", (4096, 14336, 32, 32, 8, 128, 128256, 8192, 0)),
    "llama-3-70b": (
        "meta-llama/Meta-Llama-3-70B", "llama", (8192, 28672, 80, 64, 8, 128, 128256, 8192, 0)),
    "llama-3.1-8b": (
        "meta-llama/Llama-3.1-8B", "llama", (4096, 14336, 32, 32, 8, 128, 128256, 131072, 0)),
    "llama-3.1-70b": (
        "meta-llama/Llama-3.1-70B", "llama", (8192, 28672, 80, 64, 8, 128, 128256, 131072, 0)),
    "llama-3.1-405b": (
        "meta-llama/Llama-3.1-405B", "llama", (16384, 53248, 126, 128, 8, 128, 128256, 131072, 0)),
    "llama-3.2-1b": (
        "meta-llama/Llama-3.2-1B", "llama", (2048, 8192, 16, 32, 8, 64, 128256, 131072, 1)),
    "llama-3.2-3b": (
        "meta-llama/Llama-3.2-3B", "llama", (3072, 8192, 28, 24, 8, 128, 128256, 131072, 1)),
    "tinyllama-1.1b": (
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "llama",
        (2048, 5632, 22, 32, 4, 64, 32000, 2048, 0)),
    "mistral-7b": (
        "mistralai/Mistral-7B-v0.1", "mistral", (4096, 14336, 32, 32, 8, 128, 32000, 32768, 0)),
    "qwen2-0.5b": ("Qwen/Qwen2-0.5B", "qwen2", (896, 4864, 24, 14, 2, 64, 151936, 131072, 1)),
    "qwen2-1.5b": ("Qwen/Qwen2-1.5B", "qwen2", (1536, 8960, 28, 12, 2, 128, 151936, 131072, 1)),
    "qwen2-7b": ("Qwen/Qwen2-7B", "qwen2", (3584, 18944, 28, 28, 4, 128, 152064, 131072, 0)),
    "qwen2-72b": ("Qwen/Qwen2-72B", "qwen2", (8192, 29568, 80, 64, 8, 128, 152064, 131072, 0)),
    "qwen2.5-0.5b": ("Qwen/Qwen2.5-0.5B", "qwen2", (896, 4864, 24, 14, 2, 64, 151936, 32768, 1)),
    "qwen2.5-1.5b": (
        "Qwen/Qwen2.5-1.5B", "qwen2", (1536, 8960, 28, 12, 2, 128, 151936, 131072, 1)),
    "qwen2.5-3b": ("Qwen/Qwen2.5-3B", "qwen2", (2048, 11008, 36, 16, 2, 128, 151936, 32768, 1)),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B", "qwen2", (3584, 18944, 28, 28, 4, 128, 152064, 131072, 0)),
    "qwen2.5-14b": (
        "Qwen/Qwen2.5-14B", "qwen2", (5120, 13824, 48, 40, 8, 128, 152064, 131072, 0)),
    "qwen2.5-32b": (
        "Qwen/Qwen2.5-32B", "qwen2", (5120, 27648, 64, 40, 8, 128, 152064, 131072, 0)),
    "qwen2.5-72b": (
        "Qwen/Qwen2.5-72B", "qwen2", (8192, 29568, 80, 64, 8, 128, 152064, 131072, 0)),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B", "qwen3", (1024, 3072, 28, 16, 8, 128, 151936, 40960, 1)),
    "qwen3-1.7b": ("Qwen/Qwen3-1.7B", "qwen3", (2048, 6144, 28, 16, 8, 128, 151936, 40960, 1)),
    "qwen3-4b": ("Qwen/Qwen3-4B", "qwen3", (2560, 9728, 36, 32, 8, 128, 151936, 40960, 1)),
    "qwen3-8b": ("Qwen/Qwen3-8B", "qwen3", (4096, 12288, 36, 32, 8, 128, 151936, 40960, 0)),
    "qwen3-14b": ("Qwen/Qwen3-14B", "qwen3", (5120, 17408, 40, 40, 8, 128, 151936, 40960, 0)),
    "qwen3-32b": ("Qwen/Qwen3-32B", "qwen3", (5120, 25600, 64, 64, 8, 128, 151936, 40960, 0)),
}  # fmt: skip
_GPT2_COMMON = {"vocab_size": 50257, "n_positions": 1024}

NAMES = tuple(_SHAPES)
"""The short names, for people."""
_BY_NAME = {name.lower(): short for short, (hub, *_) in _SHAPES.items() for name in (short, hub)}


def config(name: str) -> tuple[str, Mapping[str, Any]] | None:
    """The name on the hub and the config of a model, by its short name or that on the hub; the
    case of letters does not matter. None of one that is not in the table."""
    short = _BY_NAME.get(name.lower())
    if short is None:
        return None
    hub, kind, numbers = _SHAPES[short]
    if kind == "gpt2":
        return hub, {"model_type": kind, **dict(zip(_GPT2, numbers, strict=True)), **_GPT2_COMMON}
    return hub, {"model_type": kind, **dict(zip(_LLAMA, numbers, strict=True))}
