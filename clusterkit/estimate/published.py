"""Shapes of our GPT and of well-known models, from their published ``config.json``.

Only the values that `models.from_config` reads. A model of the same shape under another
name (chat, instruct) needs no line of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
    "tie_word_embeddings",
)  # fmt: skip
_GPT2_KEYS = ("n_embd", "n_layer", "n_head", "vocab_size", "n_positions")
# The sizes of the GPT in jobs/train/gpt/gpt_model.py, which a test holds to be the same. Those with
# GPT-2's vocabulary have GPT-2's parameter counts; bytes use 256 of its tokens.
_OURS = """
tiny   128  2  4   256   64
small  384  6  6   256  256
124m   768 12 12 50257 1024
355m  1024 24 16 50257 1024
774m  1280 36 20 50257 1024
1.5b  1600 48 25 50257 1024
"""
_OUR_LLAMAS = """
llama-tiny  128  352  2  4 2 32    256   64 1
llama-1b   2048 8192 16 32 8 64 128256 8192 1
"""
# Model type, short name, name on the Hugging Face hub, and the values of the keys above.
_TABLE = """
gpt2    gpt2           openai-community/gpt2                768 12 12 50257 1024
gpt2    gpt2-medium    openai-community/gpt2-medium        1024 24 16 50257 1024
gpt2    gpt2-large     openai-community/gpt2-large         1280 36 20 50257 1024
gpt2    gpt2-xl        openai-community/gpt2-xl            1600 48 25 50257 1024
llama   llama-7b       huggyllama/llama-7b                 4096 11008  32  32 32 128  32000   2048 0
llama   llama-2-7b     meta-llama/Llama-2-7b-hf            4096 11008  32  32 32 128  32000   4096 0
llama   llama-2-13b    meta-llama/Llama-2-13b-hf           5120 13824  40  40 40 128  32000   4096 0
llama   llama-2-70b    meta-llama/Llama-2-70b-hf           8192 28672  80  64  8 128  32000   4096 0
llama   llama-3-8b     meta-llama/Meta-Llama-3-8B          4096 14336  32  32  8 128 128256   8192 0
llama   llama-3-70b    meta-llama/Meta-Llama-3-70B         8192 28672  80  64  8 128 128256   8192 0
llama   llama-3.1-8b   meta-llama/Llama-3.1-8B             4096 14336  32  32  8 128 128256 131072 0
llama   llama-3.1-70b  meta-llama/Llama-3.1-70B            8192 28672  80  64  8 128 128256 131072 0
llama   llama-3.1-405b meta-llama/Llama-3.1-405B          16384 53248 126 128  8 128 128256 131072 0
llama   llama-3.2-1b   meta-llama/Llama-3.2-1B             2048  8192  16  32  8  64 128256 131072 1
llama   llama-3.2-3b   meta-llama/Llama-3.2-3B             3072  8192  28  24  8 128 128256 131072 1
llama   tinyllama-1.1b TinyLlama/TinyLlama-1.1B-Chat-v1.0  2048  5632  22  32  4  64  32000   2048 0
mistral mistral-7b     mistralai/Mistral-7B-v0.1           4096 14336  32  32  8 128  32000  32768 0
qwen2   qwen2-0.5b     Qwen/Qwen2-0.5B                      896  4864  24  14  2  64 151936 131072 1
qwen2   qwen2-1.5b     Qwen/Qwen2-1.5B                     1536  8960  28  12  2 128 151936 131072 1
qwen2   qwen2-7b       Qwen/Qwen2-7B                       3584 18944  28  28  4 128 152064 131072 0
qwen2   qwen2-72b      Qwen/Qwen2-72B                      8192 29568  80  64  8 128 152064 131072 0
qwen2   qwen2.5-0.5b   Qwen/Qwen2.5-0.5B                    896  4864  24  14  2  64 151936  32768 1
qwen2   qwen2.5-1.5b   Qwen/Qwen2.5-1.5B                   1536  8960  28  12  2 128 151936 131072 1
qwen2   qwen2.5-3b     Qwen/Qwen2.5-3B                     2048 11008  36  16  2 128 151936  32768 1
qwen2   qwen2.5-7b     Qwen/Qwen2.5-7B                     3584 18944  28  28  4 128 152064 131072 0
qwen2   qwen2.5-14b    Qwen/Qwen2.5-14B                    5120 13824  48  40  8 128 152064 131072 0
qwen2   qwen2.5-32b    Qwen/Qwen2.5-32B                    5120 27648  64  40  8 128 152064 131072 0
qwen2   qwen2.5-72b    Qwen/Qwen2.5-72B                    8192 29568  80  64  8 128 152064 131072 0
qwen3   qwen3-0.6b     Qwen/Qwen3-0.6B                     1024  3072  28  16  8 128 151936  40960 1
qwen3   qwen3-1.7b     Qwen/Qwen3-1.7B                     2048  6144  28  16  8 128 151936  40960 1
qwen3   qwen3-4b       Qwen/Qwen3-4B                       2560  9728  36  32  8 128 151936  40960 1
qwen3   qwen3-8b       Qwen/Qwen3-8B                       4096 12288  36  32  8 128 151936  40960 0
qwen3   qwen3-14b      Qwen/Qwen3-14B                      5120 17408  40  40  8 128 151936  40960 0
qwen3   qwen3-32b      Qwen/Qwen3-32B                      5120 25600  64  64  8 128 151936  40960 0
"""


def _config(kind: str, numbers: list[str]) -> Mapping[str, Any]:
    keys = _GPT2_KEYS if kind == "gpt2" else _KEYS
    return {"model_type": kind, **dict(zip(keys, map(int, numbers), strict=True))}


PRESETS = {
    name: _config(kind, numbers)
    for kind, lines in (("gpt2", _OURS), ("llama", _OUR_LLAMAS))
    for name, *numbers in map(str.split, lines.strip().splitlines())
}
"""The presets of our GPT by name, as configs."""
_ROWS = [line.split() for line in _TABLE.strip().splitlines()]
NAMES = tuple(short for _, short, *_ in _ROWS)
"""The short names."""
_KNOWN = {
    name.lower(): (hub, _config(kind, numbers))
    for kind, short, hub, *numbers in _ROWS
    for name in (short, hub)
}


def config(name: str) -> tuple[str, Mapping[str, Any]] | None:
    """Return the hub name and the config of a model by its short or hub name; None if unknown.

    The case of letters does not matter.
    """
    return _KNOWN.get(name.lower())
