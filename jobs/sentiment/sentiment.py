"""Classify reviews with BERT: a DDP loop of one's own, done right.

    clusterkit submit jobs/sentiment/sentiment.yaml
    clusterkit submit jobs/sentiment/sentiment.yaml -- --model google-bert/bert-base-chinese
    python jobs/sentiment/sentiment.py --epochs 1                 # one rank, no launcher

What goes wrong in most such loops, and does not here: the order changes with each epoch; the split
comes from a seed, so no rank trains on rows that another one validates on; the validation rows are
shared out without filling up, so accuracy counts each row once whatever their number; losses are
means over all ranks and not rank 0's.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import zlib
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from classifier import choose_model, encode, join, report
from reviews import BadInput, learning_rate, make_parser, read_reviews, split
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    args = parse_args()
    # Whatever can be wrong with the input, each rank finds alone, before they meet.
    reviews = read_reviews(args.data, separator=args.separator, encoding=args.encoding)
    training, validation = split(len(reviews.texts), args.validation, args.seed)
    texts = [reviews.texts[row] for row in training]
    tokenizer, make_model = choose_model(args.model, texts, reviews.classes, args.max_length)
    device = join()
    rank = dist.get_rank()
    if rank == 0:
        print(reviews.describe(len(training), len(validation)), flush=True)
    check_same(zlib.crc32(repr((reviews, training)).encode()))
    parts = (training, validation)
    sets = [encode(tokenizer, reviews, rows, args.max_length) for rows in parts]
    torch.manual_seed(args.seed)
    model = make_model().to(device)
    torch.manual_seed(args.seed + rank)  # every rank draws its own dropout
    train(args, device, model, tokenizer, *sets)
    if args.output and rank == 0:
        model.save_pretrained(args.output)
        tokenizer.save_pretrained(args.output)
        print(f"saved for transformers: {args.output}", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a process that used gloo sometimes aborts where the interpreter would end it


def train(
    args: argparse.Namespace,
    device: torch.device,
    model: nn.Module,
    tokenizer: Any,
    training: list[dict[str, Any]],
    validation: list[dict[str, Any]],
) -> None:
    """All epochs."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    collate = partial(tokenizer.pad, return_tensors="pt")
    # All ranks make as many steps: where they do not divide, the sampler gives some rows twice.
    sampler = DistributedSampler(training, seed=args.seed)
    loader = DataLoader(training, args.batch, sampler=sampler, collate_fn=collate)
    ddp = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=learning_rate(args))
    steps, step = args.epochs * len(loader), 0
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 - done / steps)
    report("start", steps=steps, first_step=0, world_size=ranks)
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        model.train()
        for batch in loader:
            step, started = step + 1, time.perf_counter()
            batch = batch.to(device)
            loss = ddp(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            tokens = batch["attention_mask"].sum()
            mean_loss, mean_tokens = mean(loss.detach(), tokens)
            seconds = time.perf_counter() - started
            details = {"learning_rate": schedule.get_last_lr()[0], "step_seconds": seconds}
            schedule.step()
            if step % len(loader) == 0:
                details |= evaluate(model, validation[rank::ranks], len(validation) / ranks,
                                    collate, args.batch, device)  # fmt: skip
                if rank == 0:
                    print(f"epoch {epoch}  validation loss {details['eval_loss']:.4f}  "
                          f"accuracy {details['accuracy']:.4f}", flush=True)  # fmt: skip
            speed = mean_tokens * ranks / seconds
            report("metrics", step=step, loss=mean_loss, tokens_per_second=speed, **details)
    report("end", steps=steps)


def mean(*values: Tensor) -> list[float]:
    """Of each value over the ranks, all in one collective."""
    total = torch.stack([value.double() for value in values])
    dist.all_reduce(total)
    return [value / dist.get_world_size() for value in total.tolist()]


@torch.no_grad()
def evaluate(
    model: nn.Module,
    mine: list[dict[str, Any]],
    share: float,
    collate: Any,
    batch: int,
    device: torch.device,
) -> dict[str, float]:
    """Accuracy and mean loss over all rows, each counted once. Collective.

    Ranks may have one row more or less, and none at all: each divides its sums by the ``share`` of
    rows that a rank has on average. A mean of the ranks' own means would weigh rows unequally.
    """
    model.eval()
    right = summed = torch.zeros((), device=device)
    for first in range(0, len(mine), batch):
        inputs = collate(mine[first : first + batch]).to(device)
        logits = model(**{key: value for key, value in inputs.items() if key != "labels"}).logits
        labels = inputs["labels"]
        right = right + (logits.argmax(dim=-1) == labels).sum()
        summed = summed + nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
    accuracy, loss = mean(right / share, summed / share)
    return {"accuracy": accuracy, "eval_loss": loss}


def check_same(mark: int) -> None:
    """Make sure that all ranks read the same rows and split them alike. Collective."""
    marks = [0] * dist.get_world_size()
    dist.all_gather_object(marks, mark)
    for rank, other in enumerate(marks):
        if other != mark:
            raise BadInput(
                f"rank {rank} reads other reviews than rank {dist.get_rank()}",
                hint="give --data a path that holds the same on every node",
            )


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__)
    if os.environ.get("CLUSTERKIT_ACCUMULATION", "1") != "1":
        parser.error("this program does not accumulate: give batch.global or batch.micro alone")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
