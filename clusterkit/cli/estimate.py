"""clusterkit estimate"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import click

from clusterkit import api
from clusterkit.cli.common import (
    COMMAND,
    PlanCommand,
    cluster_options,
    facts_option,
    json_option,
    options,
    prepare_options,
    print_json,
    set_option,
    table,
)
from clusterkit.estimate import Estimate, published
from clusterkit.estimate.advice import Row
from clusterkit.estimate.units import gib

_COLUMNS = 100
_INDENT = " " * 8
_COUNT = re.compile(r"[0-9.]+[KMBT]\Z", re.IGNORECASE)
_HEADER = (
    "STRATEGY", "MESH", "PARAMS", "GRADS", "OPTIM", "ACTIV", "LOSS", "COMM", "TOTAL", "FITS",
    "MICRO", "HOST",
)  # fmt: skip


@click.command(
    "estimate",
    cls=PlanCommand,
    epilog="Examples: clusterkit estimate jobs/ddp.yaml --gpus 8 --gpu-memory 80GB;  "
    "clusterkit estimate --parameters 7B --layers 32 --hidden 4096 --gpus 8 --gpu-memory 80GB",
)
@options(
    click.argument("job", required=False, type=click.Path(), metavar="[JOB|MODEL|COUNT]"),
    click.option("--gpu-memory", metavar="SIZE", help="Of one GPU: 80GB, 80GiB, 40960MiB."),
    click.option("-n", "--nodes", type=int, metavar="N", help="How many nodes."),
    click.option("-g", "--gpus", type=int, metavar="N", help="GPUs per node."),
    click.option("--model", metavar="NAME",
                 help="Instead of the job's: llama-3-8b, qwen2-1.5b, mistral-7b, gpt2-xl ..., "
                 "tiny ... 1.5b of jobs/train/gpt, or a Hugging Face name or folder."),
    click.option("--parameters", metavar="COUNT", help="Any transformer of so many: 7B."),
    click.option("--layers", type=int, metavar="N", help="Of --parameters."),
    click.option("--hidden", type=int, metavar="N", help="Of --parameters: width of a layer."),
    click.option("--heads", type=int, metavar="N", help="Of --parameters: attention heads."),
    click.option("--kv-heads", type=int, metavar="N",
                 help="Of --parameters: heads of keys and values, if fewer."),
    click.option("--intermediate", type=int, metavar="N",
                 help="Of --parameters: width of the perceptron (intermediate_size)."),
    click.option("--gated/--no-gated", default=None,
                 help="Of --parameters: whether the perceptron has a gate (SwiGLU) as Llama's "
                 "has, or none as GPT-2's; gated, which takes more, if not said."),
    click.option("--vocabulary", type=int, metavar="N", help="Of --parameters: tokens."),
    click.option("--context", type=int, metavar="N", help="Tokens in a sample."),
    click.option("--micro-batch", type=int, metavar="N",
                 help="Samples in one forward pass of one rank."),
    click.option("--dtype", metavar="TYPE", help="fp32, bf16 or fp16."),
    click.option("--optimizer", metavar="NAME", default="adamw", show_default=True,
                 help="adamw, adafactor, momentum or sgd."),
    click.option("--attention", metavar="KIND", default="fused", show_default=True,
                 help="fused (flash, memory-efficient), or eager, which keeps the scores."),
    click.option("--activation-checkpointing", is_flag=True,
                 help="Keep a layer's input alone and compute the rest again."),
    click.option("--overhead", metavar="SIZE",
                 help="What a GPU holds besides tensors (assumed: 1.5GiB)."),
    cluster_options("Whose GPUs, unless --gpu-memory is given.", "local"),
    facts_option,
    set_option,
    json_option,
)  # fmt: skip
@click.pass_context
def command(ctx: click.Context, /, job: str | None, as_json: bool, **asked: Any) -> None:
    """The memory a job takes on a GPU, for every way to divide it, and which to choose.

    Reads what JOB says of model, batch, precision and strategy, and adds up parameters,
    gradients, optimizer states, activations and buckets at every moment of a step; TOTAL is the
    largest moment. Without --gpu-memory the cluster is probed for its GPUs. No weights are
    needed, and nothing is written or started. What follows -- are further arguments of the
    program. Instead of a job file, MODEL stands for --model MODEL and a COUNT such as 7B for
    --parameters 7B.
    """
    words: list[str] | None = ctx.meta.get(COMMAND)
    if job is not None and (name := _instead_of_a_job(job)) and asked[name] is None:
        job, asked[name] = None, job
    what: Any = job
    if job is None and words:
        what, words = words, None
    if what is None and asked["model"] is None and asked["parameters"] is None:
        raise click.UsageError("Give a job file, --model or --parameters.", ctx)
    found = api.estimate(what, more_args=words or (), **prepare_options(**asked))
    if as_json:
        print_json(found)
        return
    click.echo("\n".join(_text(found)))
    for note in found.notes:
        click.echo(f"note: {note}", err=True)


def _instead_of_a_job(word: str) -> str | None:
    """Which option is meant where a model stands in the place of the job file; None: a file is."""
    if os.path.exists(word):
        return None
    if _COUNT.match(word):
        return "parameters"
    return "model" if published.config(word) or word in published.PRESETS else None


def _text(found: Estimate) -> Iterator[str]:
    """The answer for people, at most 100 columns wide."""
    model = found.model
    kept = ", activation checkpointing" if found.activation_checkpointing else ""
    memory = "unknown" if found.gpu_memory is None else f"{gib(found.gpu_memory)} GiB"
    yield (
        f"model   {model.name}: {model.parameters:,} parameters, {model.layers} layers x "
        f"{model.hidden}, {model.vocabulary:,} tokens"
    )
    yield textwrap.fill(f"({model.origin})", _COLUMNS, initial_indent=_INDENT,
                        subsequent_indent=_INDENT)  # fmt: skip
    first = found.rows[0]
    yield (
        f"step    micro batch {first.micro_batch} x {model.context} tokens, accumulation "
        f"{first.accumulation}; {found.precision}, {found.optimizer}, {found.attention} "
        f"attention{kept}"
    )
    yield (
        f"GPUs    {found.nodes * found.gpus_per_node} ({found.nodes} x {found.gpus_per_node}) of "
        f"{memory} ({found.gpu_origin})"
    )
    yield ""
    own = "; * the job as it stands" if first.own else ""
    yield f"GiB per GPU; TOTAL is the largest moment of a step, not the sum{own}"
    yield ""
    yield table([_cells(row) for row in found.rows], _HEADER)
    if found.advice is not None:
        yield ""
        said = f"choose  {found.advice.reason}" if found.advice.strategy else found.advice.reason
        yield textwrap.fill(said, _COLUMNS, subsequent_indent=_INDENT)


def _cells(row: Row) -> tuple[str | int | None, ...]:
    verdict = {None: "?", True: "yes", False: "no"}[row.fits]
    sizes = (
        row.parameters, row.gradients, row.optimizer, row.activations, row.loss,
        row.communication, row.total,
    )  # fmt: skip
    return (
        f"{row.strategy}{'*' if row.own else ''}",
        row.mesh,
        *(gib(size) for size in sizes),
        verdict,
        row.largest_micro_batch,
        gib(row.host_per_node) if row.host_per_node else None,
    )
