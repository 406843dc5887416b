"""Fine-tune a causal language model of Hugging Face with ZeRO: Qwen2, tiny by default.

    clusterkit submit jobs/qwen.yaml                # a tiny Qwen2 with random weights
    clusterkit submit jobs/qwen.yaml -- --model Qwen/Qwen2-1.5B --data my-texts/
    clusterkit submit jobs/qwen.yaml --set deepspeed.zero_optimization.stage=2

Every rank says what it keeps of the model. Batch, checkpoints and the loop are those of train.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import gpt_data
import hugging_face
import settings
from settings import positive
from torch import nn
from train import train
from world import run

TINY = {
    "vocab_size": 256,  # bytes
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


def main() -> int:
    args = parse_args()
    args.learning_rate = learning_rate(args)
    falling = partial(falling_rate, args=args)
    return train(args, choose_model, falling, describe)


def falling_rate(step: int, args: argparse.Namespace) -> float:
    """The learning rate of a step: straight down to 0."""
    return float(args.learning_rate) * (1 - (step - 1) / args.steps)


def describe(rank: int, strategy: str, model: nn.Module, total: int) -> str:
    """The line of one rank. Stage 3 leaves it a part of each parameter, padded to be divisible."""
    stage = strategy.partition("zero-")[2][:1] or "none (DDP)"
    held = sum(getattr(p, "ds_tensor", p).numel() for p in model.parameters())
    return f"Device {rank} | ZeRO Stage: {stage} | whole model={total} | parameter count={held}"


def choose_model(args: argparse.Namespace) -> tuple[dict[str, Any], Callable[[], nn.Module], Any]:
    """What describes the model, what builds it, and the text in its tokens."""
    read = partial(gpt_data.read, document_mask=args.document_mask)
    if args.model is not None:
        facts, make_model, tokenize = hugging_face.choose(args.model, True)
        return facts, make_model, read(args.data, args.context, facts["vocabulary"], tokenize)
    hugging_face.import_transformers()
    from transformers import Qwen2Config

    config = Qwen2Config(**TINY)
    make = partial(hugging_face.CausalLM, "tiny qwen2", config, pretrained=False)
    return {"name": "tiny qwen2", **TINY}, make, read(args.data, args.context, 256)


def learning_rate(args: argparse.Namespace) -> float:
    """The one that was given, or what suits new weights or trained ones."""
    if args.learning_rate is not None:
        return float(args.learning_rate)
    return 1e-3 if args.model is None else 2e-5


def parse_args() -> argparse.Namespace:
    parser = settings.Parser(__doc__)
    add = parser.add_argument
    add("--model", metavar="NAME", help="Hugging Face name or folder (default: a tiny new Qwen2)")
    add("--data", metavar="PATH", help=gpt_data.HELP)
    add("--context", type=positive, default=128, metavar="TOKENS", help="default: 128")
    add("--steps", type=positive, default=50, help="default: 50")
    add("--learning-rate", type=float, metavar="RATE",
        help="at the start, falls to 0 (default: 2e-5 with --model, else 1e-3)")  # fmt: skip
    add("--seed", type=int, default=0, help="of weights and samples (default: 0)")
    parser.set_defaults(strategy="deepspeed", weight_decay=0.0, log_every=1, eval_every=0)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
