"""Train a GPT on text, on one rank or thousands: DDP, or DeepSpeed ZeRO 0 to 3.

    clusterkit submit jobs/ddp.yaml                                     # what you want
    python jobs/train/gpt.py --steps 20                                 # one rank, no launcher
    torchrun --nproc-per-node 2 jobs/train/gpt.py --model small         # or any launcher

The same seed and the same global batch give the same losses on any number of ranks.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clusterkit.errors import BadInput
from clusterkit.runtime import arguments, data, huggingface
from clusterkit.runtime.arguments import count, positive
from clusterkit.runtime.checkpoint import Checkpoint, Checkpoints
from clusterkit.runtime.distributed import (
    EXIT_STOPPED,
    World,
    choose_device,
    distributed,
    read_ranks,
    run,
    stop_requested,
)
from clusterkit.runtime.metrics import Reporter, report
from clusterkit.runtime.strategy import Strategy, decayed_groups

# --------------------------------------------------------------------------- the model


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


class Attention(nn.Module):
    """Causal self-attention with several heads: (batch, length, width) to the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.output = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        # Each of the three: (batch, heads, length, width of a head).
        query, key, value = split.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.output(y.transpose(1, 2).reshape(batch, length, width))
        return mixed


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each normalised before and added after."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.perceptron_norm = nn.LayerNorm(shape.width)
        self.expand = nn.Linear(shape.width, 4 * shape.width)
        self.output = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        inner = F.gelu(self.expand(self.perceptron_norm(x)), approximate="tanh")
        added: Tensor = x + self.output(inner)
        return added


class GPT(nn.Module):
    """GPT-2 without dropout; the output layer shares its weight with the token embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.token.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                # Each block adds to the residual stream twice; keep its variance near one.
                shrink = math.sqrt(2 * shape.layers) if name.endswith("output.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 / shrink)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of ``targets``, a float32 scalar; both (batch, length), int64."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# --------------------------------------------------------------------------- training


def main() -> int:
    args = parse_args()
    ranks = read_ranks()
    reporter = Reporter(speaks=ranks.is_first)
    # Whatever can be wrong with the input, each rank finds alone, before they meet.
    device = choose_device(ranks)
    batch = arguments.choose_batch(args, ranks)
    facts, make_model, text = choose_model(args)
    recipe = arguments.choose_strategy(args, batch, device)
    checkpoints = arguments.choose_checkpoints(args, facts)
    checkpoint = checkpoints.find(ranks, strategy=recipe.name)

    reporter.phase("rendezvous")
    with distributed(ranks, device) as world:
        reporter.phase("build")
        data.check_same(text, world)
        torch.manual_seed(args.seed)  # every rank builds the same weights
        model = make_model()
        groups = decayed_groups(model, args.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95))
        strategy = recipe.build(model, optimizer, world)
        batches = data.Batches(text, args.seed, batch, world)
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
        )
        return train(args, world, reporter, strategy, batches, checkpoints, checkpoint)


def train(
    args: argparse.Namespace,
    world: World,
    reporter: Reporter,
    strategy: Strategy,
    batches: data.Batches,
    checkpoints: Checkpoints,
    resumed: Checkpoint | None,
) -> int:
    """The loop, the same for every strategy. Returns the exit code."""
    first = resumed.step + 1 if resumed else 1
    notes: dict[str, Any] = dict(resumed.notes) if resumed else {}
    stop = 0.0
    reporter.phase("first_step")
    for step in range(first, args.steps + 1):
        started = time.perf_counter()
        learning_rate = scheduled(step, args)
        rank_loss, gradient_norm = strategy.step(batches.of_step(step), learning_rate)
        loss, stop = world.mean(rank_loss, stop_requested())
        seconds = time.perf_counter() - started
        if step == first:
            held = strategy.optimizer_parameters()
            report("optimizer", rank=world.rank, parameters=held, total=strategy.parameters)
            reporter.phase("training")

        notes = {"loss": loss, "first_loss": notes.get("first_loss", loss)}
        last = step == args.steps or stop > 0
        evaluated = {}
        if args.eval_every and (last or step % args.eval_every == 0):
            (evaluated["eval_loss"],) = world.mean(strategy.evaluate(batches.held_out()))
        if last or evaluated or step == first or step % args.log_every == 0:
            reporter.event(
                "metrics",
                step=step,
                loss=loss,
                tokens_per_second=batches.tokens_per_step / seconds,
                step_seconds=seconds,
                learning_rate=learning_rate,
                gradient_norm=gradient_norm,
                **evaluated,
            )
        if checkpoints.due(step, last=last):
            checkpoints.save(step, strategy, world, notes)
        if stop > 0:
            break

    reporter.phase("ending")
    world.barrier()
    if stop > 0:
        return EXIT_STOPPED
    reporter.event("end", steps=args.steps, **notes)
    reporter.phase(None)
    return 0


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
    parser = arguments.Parser(__doc__)
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
