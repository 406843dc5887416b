"""Fine-tune a causal language model of Hugging Face with ZeRO: Qwen2, tiny by default.

    clusterkit submit jobs/qwen.yaml                # a tiny Qwen2 with random weights
    clusterkit submit jobs/qwen.yaml -- --model Qwen/Qwen2-1.5B --data my-texts/
    clusterkit submit jobs/qwen.yaml --set deepspeed.zero_optimization.stage=2

Every rank says what it keeps of the model. Batch, checkpoints and the loop are those of train.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import data
import hugging_face
import settings
import torch
from ranks import choose_device, read_ranks
from report import Reporter
from settings import positive
from strategy import Strategy, decayed_groups, recompute
from torch import nn
from train import Pace, train
from world import distributed, run

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
    ranks = read_ranks()
    reporter = Reporter(speaks=ranks.is_first)
    # Whatever can be wrong with the input, each rank finds alone, before they meet.
    device = choose_device(ranks)
    facts, make_model, text = choose_model(args)
    mesh = settings.choose_mesh(args, ranks, facts)
    batch = settings.choose_batch(args, mesh)
    recipe = settings.choose_strategy(args, batch, device, mesh)
    checkpoints = settings.choose_checkpoints(args, facts)
    checkpoint = checkpoints.find(ranks, strategy=recipe.name, converts=recipe.converts)

    reporter.phase("rendezvous")
    with distributed(ranks, device) as world:
        reporter.phase("build")
        data.check_same(text, world)
        torch.manual_seed(args.seed)  # every rank builds the same weights
        with recipe.building(world):
            model = make_model()
        if args.activation_checkpointing:
            recompute(model)
        rate, groups = learning_rate(args), decayed_groups(model, 0.0)
        optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
        strategy = recipe.build(model, optimizer, world)
        batches = data.Batches(text, args.seed, batch, world, strategy.replica)
        if checkpoint is not None:
            checkpoints.load(checkpoint, strategy, world)
        print(describe(world.rank, recipe.name, model, strategy), flush=True)
        reporter.event(
            "start",
            steps=args.steps,
            first_step=checkpoint.step if checkpoint else 0,
            tokens_per_step=batches.tokens_per_step,
            parameters=strategy.parameters,
            device=device.type,
            dtype=recipe.dtype,
            world_size=world.size,
            strategy=recipe.name,
        )
        pace = Pace(
            args.steps, 1, 0, lambda step: learning_rate(args) * (1 - (step - 1) / args.steps)
        )
        return train(pace, world, reporter, strategy, batches, checkpoints, checkpoint)


def describe(rank: int, recipe: str, model: nn.Module, strategy: Strategy) -> str:
    """The line of one rank. Stage 3 leaves it a part of each parameter, padded to be divisible."""
    stage = recipe.partition("zero-")[2][:1] or "none (DDP)"
    held = sum(getattr(p, "ds_tensor", p).numel() for p in model.parameters())
    return (
        f"Device {rank} | ZeRO Stage: {stage} | whole model={strategy.parameters} | "
        f"parameter count={held}"
    )


def choose_model(
    args: argparse.Namespace,
) -> tuple[dict[str, Any], Callable[[], nn.Module], data.Text]:
    """What describes the model, what builds it, and the text in its tokens."""
    text = data.read_text(args.data)
    if args.model is None:
        hugging_face.import_transformers()
        from transformers import Qwen2Config

        config = Qwen2Config(**TINY)
        facts: dict[str, Any] = {"name": "tiny qwen2", **TINY}

        def make_model() -> nn.Module:
            return hugging_face.CausalLM("tiny qwen2", config, pretrained=False)

        tokens = data.as_tokens(text)
    else:
        facts, make_model, tokens = hugging_face.choose(args.model, text, True)
    return facts, make_model, data.split(tokens, args.context, args.data or "the standard library")


def learning_rate(args: argparse.Namespace) -> float:
    """The one that was given, or what suits new weights or trained ones."""
    if args.learning_rate is not None:
        return float(args.learning_rate)
    return 1e-3 if args.model is None else 2e-5


def parse_args() -> argparse.Namespace:
    parser = settings.Parser(__doc__)
    add = parser.add_argument
    add("--model", metavar="NAME", help="Hugging Face name or folder (default: a tiny new Qwen2)")
    add("--data", metavar="PATH", help="file or folder (default: Python's standard library)")
    add("--context", type=positive, default=128, metavar="TOKENS", help="default: 128")
    add("--steps", type=positive, default=50, help="default: 50")
    add("--learning-rate", type=float, metavar="RATE",
        help="at the start, falls to 0 (default: 2e-5 with --model, else 1e-3)")  # fmt: skip
    add("--seed", type=int, default=0, help="of weights and samples (default: 0)")
    parser.set_defaults(strategy="deepspeed")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
