"""Train a GPT on text, on one rank or thousands, divided by the strategy of your choice.

    clusterkit submit jobs/ddp.yaml                                     # what you want
    python jobs/train/gpt.py --steps 20                                 # one rank, no launcher
    torchrun --nproc-per-node 2 jobs/train/gpt.py --model small         # or any launcher
    torchrun --nproc-per-node 8 jobs/train/gpt.py --strategy 3d --mesh pp=2,dp=2,tp=2

The same seed and the same global batch give the same losses on any number of ranks and with any
strategy. The model is in clusterkit/runtime/gpt.py, the loop in clusterkit/runtime/training.py.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from clusterkit.errors import BadInput
from clusterkit.runtime import arguments, data, huggingface
from clusterkit.runtime.arguments import count, positive
from clusterkit.runtime.distributed import choose_device, distributed, read_ranks, run
from clusterkit.runtime.gpt import GPT, PRESETS
from clusterkit.runtime.mesh import STRATEGIES
from clusterkit.runtime.metrics import Reporter
from clusterkit.runtime.strategy import decayed_groups, recompute
from clusterkit.runtime.training import Pace, train

# --------------------------------------------------------------------------- training


def main() -> int:
    args = parse_args()
    ranks = read_ranks()
    reporter = Reporter(speaks=ranks.is_first)
    # Whatever can be wrong with the input, each rank finds alone, before they meet.
    device = choose_device(ranks)
    facts, make_model, text = choose_model(args)
    mesh = arguments.choose_mesh(args, ranks, facts)
    batch = arguments.choose_batch(args, ranks, mesh)
    recipe = arguments.choose_strategy(args, batch, device, mesh)
    checkpoints = arguments.choose_checkpoints(args, facts)
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
        groups = decayed_groups(model, args.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95))
        strategy = recipe.build(model, optimizer, world)
        batches = data.Batches(text, args.seed, batch, world, strategy.replica)
        if checkpoint is not None:
            checkpoints.load(checkpoint, strategy, world)
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
            **strategy.describe(),
        )
        rate = partial(scheduled, args=args)
        pace = Pace(args.steps, args.log_every, args.eval_every, rate)
        return train(pace, world, reporter, strategy, batches, checkpoints, checkpoint)


def scheduled(step: int, args: argparse.Namespace) -> float:
    """The learning rate of a step: linear warm-up, then half a cosine down to a tenth."""
    peak, warmup, steps = float(args.learning_rate), int(args.warmup), int(args.steps)
    if step <= warmup:
        return peak * step / warmup
    done = (step - warmup) / (steps - warmup)
    return peak * (0.55 + 0.45 * math.cos(math.pi * done))


# --------------------------------------------------------------------------- choices


def choose_model(
    args: argparse.Namespace,
) -> tuple[dict[str, Any], Callable[[], nn.Module], data.Text]:
    """What describes the model, what builds it, and the text in its tokens."""
    text = data.read_text(args.data)
    if args.model in PRESETS:
        shape = PRESETS[args.model]
        shape = replace(shape, context=args.context or shape.context)
        facts = {"name": args.model, **asdict(shape)}
        make_model: Callable[[], nn.Module] = partial(GPT, shape)
        tokens, context = data.as_tokens(text), shape.context
    elif huggingface.looks_like_a_name(args.model):
        facts, make_model, tokens = huggingface.choose(args.model, text, pretrained=args.pretrained)
        context = args.context or 256
    else:
        raise BadInput(
            f"--model {args.model}: no such model",
            hint=f"one of {', '.join(PRESETS)}, or the name or folder of a Hugging Face model",
        )
    return facts, make_model, data.split(tokens, context, args.data or "the standard library")


def parse_args() -> argparse.Namespace:
    parser = arguments.Parser(__doc__, strategies=STRATEGIES)
    add = parser.add_argument
    add("--model", default="tiny", help=f"{', '.join(PRESETS)}, or a Hugging Face name or folder")
    add("--pretrained", action="store_true", help="start from the Hugging Face model's weights")
    add("--data", metavar="PATH", help="file or folder (default: Python's standard library)")
    add("--context", type=positive, help="tokens in a sample (default: the model's own)")
    add("--steps", type=positive, default=200, help="how long to train (default: 200)")
    add("--learning-rate", type=float, default=1e-3, metavar="RATE", help="at its peak")
    add("--warmup", type=count, default=20, metavar="STEPS", help="until the peak (default: 20)")
    add("--weight-decay", type=float, default=0.1, help="of matrices alone (default: 0.1)")
    add("--seed", type=int, default=0, help="of weights and samples (default: 0)")
    add("--log-every", type=positive, default=1, metavar="STEPS", help="metrics (default: 1)")
    add("--eval-every", type=count, default=0, metavar="STEPS", help="0: never")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
