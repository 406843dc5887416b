"""Classify reviews with BERT: a DDP loop of one's own, done right.

    clusterkit submit jobs/sentiment.yaml
    clusterkit submit jobs/sentiment.yaml -- --model google-bert/bert-base-chinese --data my.csv
    python jobs/train/sentiment.py --epochs 1                     # one rank, no launcher

What goes wrong in most such loops, and does not here: the order changes with each epoch; the split
comes from a seed, so no rank trains on rows that another one validates on; the validation rows are
shared out without filling up, so accuracy counts each row once whatever their number; losses are
means over all ranks and not rank 0's.
"""

from __future__ import annotations

import argparse
import time
import zlib
from functools import partial
from typing import Any

import torch
from classifier import choose_model, encode
from flags import Flags
from reviews import add_flags, learning_rate, read_reviews, split
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from clusterkit.errors import BadInput
from clusterkit.runtime.distributed import (
    EXIT_STOPPED,
    World,
    choose_device,
    distributed,
    read_ranks,
    run,
    stop_requested,
)
from clusterkit.runtime.metrics import Reporter


def main() -> int:
    args = parse_args()
    ranks = read_ranks()
    reporter = Reporter(speaks=ranks.is_first)
    # Whatever can be wrong with the input, each rank finds alone, before they meet.
    device = choose_device(ranks)
    reviews = read_reviews(args.data, separator=args.separator, encoding=args.encoding)
    training, validation = split(len(reviews.texts), args.validation, args.seed)
    texts = [reviews.texts[row] for row in training]
    tokenizer, make_model = choose_model(args.model, texts, reviews.classes, args.max_length)
    if ranks.is_first:
        print(reviews.describe(len(training), len(validation)), flush=True)
    reporter.phase("rendezvous")
    with distributed(ranks, device) as world:
        reporter.phase("build")
        check_same(zlib.crc32(repr((reviews, training)).encode()), world)
        parts = (training, validation)
        sets = [encode(tokenizer, reviews, rows, args.max_length) for rows in parts]
        torch.manual_seed(args.seed)
        model = make_model().to(device)
        torch.manual_seed(args.seed + world.rank)  # every rank draws its own dropout
        return train(args, world, reporter, model, tokenizer, *sets)


def train(
    args: argparse.Namespace,
    world: World,
    reporter: Reporter,
    model: nn.Module,
    tokenizer: Any,
    training: list[dict[str, Any]],
    validation: list[dict[str, Any]],
) -> int:
    """All epochs. Returns the exit code."""
    collate = partial(tokenizer.pad, return_tensors="pt")
    # All ranks make as many steps: where they do not divide, the sampler gives some rows twice.
    sampler = DistributedSampler(training, world.size, world.rank, seed=args.seed)
    loader = DataLoader(training, args.batch, sampler=sampler, collate_fn=collate)
    on_gpu = world.device.type == "cuda"
    ddp = DistributedDataParallel(model, device_ids=[world.device] if on_gpu else None)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=learning_rate(args))
    steps, step = args.epochs * len(loader), 0
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 - done / steps)
    reporter.event("start", steps=steps, first_step=0, world_size=world.size)
    reporter.phase("training")
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        model.train()
        for batch in loader:
            step, started = step + 1, time.perf_counter()
            batch = batch.to(world.device)
            loss = ddp(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            tokens = batch["attention_mask"].sum()
            mean, tokens, stop = world.mean(loss.detach(), tokens, stop_requested())
            seconds = time.perf_counter() - started
            details = {"learning_rate": schedule.get_last_lr()[0], "step_seconds": seconds}
            schedule.step()
            if step % len(loader) == 0 and not stop:
                details |= evaluate(model, validation, collate, args.batch, world)
                if world.is_first:
                    print(f"epoch {epoch}  validation loss {details['eval_loss']:.4f}  "
                          f"accuracy {details['accuracy']:.4f}", flush=True)  # fmt: skip
            speed = tokens * world.size / seconds
            reporter.event("metrics", step=step, loss=mean, tokens_per_second=speed, **details)
            if stop > 0:
                return EXIT_STOPPED
    if args.output and world.is_first:
        model.save_pretrained(args.output)
        tokenizer.save_pretrained(args.output)
        print(f"saved for transformers: {args.output}", flush=True)
    reporter.event("end", steps=steps)
    reporter.phase(None)
    return 0


@torch.no_grad()
def evaluate(
    model: nn.Module, rows: list[dict[str, Any]], collate: Any, batch: int, world: World
) -> dict[str, float]:
    """Accuracy and mean loss over all rows, each counted once. Collective.

    Ranks may have one row more or less, and none at all: the sums are added up, and divided by the
    number of rows at the end. A mean of the ranks' means would weigh rows unequally.
    """
    model.eval()
    right = summed = torch.zeros((), device=world.device)
    mine = rows[world.rank :: world.size]
    for first in range(0, len(mine), batch):
        inputs = collate(mine[first : first + batch]).to(world.device)
        logits = model(**{key: value for key, value in inputs.items() if key != "labels"}).logits
        labels = inputs["labels"]
        right = right + (logits.argmax(dim=-1) == labels).sum()
        summed = summed + nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
    share = len(rows) / world.size  # World.mean divides by the number of ranks
    accuracy, loss = world.mean(right / share, summed / share)
    return {"accuracy": accuracy, "eval_loss": loss}


def check_same(mark: int, world: World) -> None:
    """Make sure that all ranks read the same rows and split them alike. Collective."""
    for rank, other in enumerate(world.gather(mark)):
        if other != mark:
            raise BadInput(
                f"rank {rank} reads other reviews than rank {world.rank}",
                hint="give --data a path that holds the same on every node",
            )


def parse_args() -> argparse.Namespace:
    flags = Flags(__doc__)
    flags.add_batch(16)
    add_flags(flags)
    return flags.parse_args()


if __name__ == "__main__":
    run(main)
