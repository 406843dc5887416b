"""clusterkit estimate"""

from __future__ import annotations

import math
import os
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import click

from clusterkit import api
from clusterkit.cli.common import (
    JobVerb,
    cluster_options,
    facts_option,
    json_option,
    options,
    print_json,
    set_option,
    table,
    terminal_width,
    verb,
)
from clusterkit.estimate import Estimate, published
from clusterkit.estimate.advice import Row
from clusterkit.estimate.units import gib

_COLUMNS = 100
_COUNT = re.compile(r"[0-9.]+[KMBT]\Z", re.IGNORECASE)
_HEADER = (
    "STRATEGY", "MESH", "PARAMS", "GRADS", "OPTIM", "ACTIV", "LOSS", "COMM", "TOTAL", "FITS",
    "MICRO", "HOST",
)  # fmt: skip
_LESS = ("LOSS", "COMM", "GRADS", "MESH", "HOST", "PARAMS", "ACTIV", "OPTIM", "MICRO")
"""Columns that a narrow terminal leaves out, in this order."""


class _EstimateVerb(JobVerb):
    job_required = False


@verb(
    "estimate",
    "clusterkit estimate jobs/ddp.yaml --gpus 8 --gpu-memory 80GB",
    "clusterkit estimate llama-3-8b --nodes 2 --gpus 8 --gpu-memory 80GB",
    "clusterkit estimate 7B --layers 32 --hidden 4096 --gpus 8 --gpu-memory 80GB",
    cls=_EstimateVerb,
)
@options(
    click.argument("job", required=False, type=click.Path(), metavar="[JOB|MODEL|COUNT]"),
    click.option("--gpu-memory", metavar="SIZE", help="Memory of one GPU: 80GB, 80GiB, 40960MiB."),
    click.option("-n", "--nodes", type=int, metavar="N", help="Number of nodes."),
    click.option("-g", "--gpus", type=int, metavar="N", help="GPUs per node."),
    click.option("--model", metavar="NAME",
                 help="Model, instead of the job's: llama-3-8b, qwen2-1.5b, mistral-7b, gpt2-xl "
                 "and others, tiny to 1.5b of jobs/train/gpt, or a Hugging Face name or folder."),
    click.option("--parameters", metavar="COUNT",
                 help="Any transformer with so many parameters: 7B."),
    click.option("--layers", type=int, metavar="N", help="With --parameters: layers."),
    click.option("--hidden", type=int, metavar="N",
                 help="With --parameters: hidden size, the width of a layer."),
    click.option("--heads", type=int, metavar="N", help="With --parameters: attention heads."),
    click.option("--kv-heads", type=int, metavar="N",
                 help="With --parameters: key and value heads, if fewer than --heads."),
    click.option("--intermediate", type=int, metavar="N",
                 help="With --parameters: width of the MLP (intermediate_size)."),
    click.option("--gated/--no-gated", default=None,
                 help="With --parameters: whether the MLP has a gate (SwiGLU, as in Llama) or none "
                 "(as in GPT-2). Default: gated, which needs more memory."),
    click.option("--vocabulary", type=int, metavar="N",
                 help="With --parameters: tokens in the vocabulary."),
    click.option("--context", type=int, metavar="N", help="Sequence length in tokens."),
    click.option("--micro-batch", type=int, metavar="N",
                 help="Samples per forward pass of one rank."),
    click.option("--dtype", metavar="TYPE", help="Precision: fp32, bf16 or fp16."),
    click.option("--optimizer", metavar="NAME", default="adamw", show_default=True,
                 help="adamw, adafactor, momentum or sgd."),
    click.option("--attention", metavar="KIND", default="fused", show_default=True,
                 help="fused (flash, memory-efficient), or eager, which stores the scores."),
    click.option("--activation-checkpointing", is_flag=True,
                 help="Store only each layer's input, and compute the rest again."),
    click.option("--overhead", metavar="SIZE",
                 help="Memory that a GPU needs besides tensors. Default: 1.5GiB."),
    cluster_options("Cluster to probe for its GPUs, unless --gpu-memory is given.", "local"),
    facts_option,
    set_option,
    json_option,
)  # fmt: skip
def command(job: str | list[str] | None, as_json: bool, **question: Any) -> None:
    """Estimate the memory per GPU for every way to divide a model, and recommend one.

    JOB is a job file, from which model, batch, precision and strategy are read; MODEL is short
    for --model MODEL, and a COUNT such as 7B for --parameters 7B. The words after -- are further
    arguments of the job's program.

    Adds up parameters, gradients, optimizer states, activations and buckets at every point of a
    training step; TOTAL is the peak. Without --gpu-memory the cluster is probed for its GPUs. No
    weights are needed, and nothing is written or started.
    """
    if isinstance(job, str) and (name := _option_for(job)) and question[name] is None:
        job, question[name] = None, job
    if not job and question["model"] is None and question["parameters"] is None:
        raise click.UsageError("Give a job file, --model or --parameters.")
    found = api.estimate(job, **question)
    if as_json:
        print_json(found)
        return
    click.echo("\n".join(_text(found)))
    for note in found.notes:
        click.echo(_wrapped(note, "note: ", math.inf), err=True)


def _option_for(word: str) -> str | None:
    """Return the option that a word in place of a job file is short for; None if it is a file."""
    if os.path.exists(word):
        return None
    if _COUNT.match(word):
        return "parameters"
    named = published.config(word) or word in published.PRESETS
    # A word that is no file's name is a model's, whose spelling the error corrects.
    return "model" if named or not ("/" in word or "." in word) else None


def _text(found: Estimate) -> Iterator[str]:
    """Yield the lines to print, as wide as the terminal and at most 100 columns."""
    model = found.model
    kept = ", activation checkpointing" if found.activation_checkpointing else ""
    memory = "unknown" if found.gpu_memory is None else f"{gib(found.gpu_memory)} GiB"
    yield _wrapped(
        f"{model.name}: {model.parameters:,} parameters, {model.layers} layers x {model.hidden}, "
        f"vocabulary {model.vocabulary:,}",
        "model   ",
    )
    yield _wrapped(f"({model.origin})", " " * 8)
    first = found.rows[0]
    yield _wrapped(
        f"micro batch {first.micro_batch} x {model.context} tokens, accumulation "
        f"{first.accumulation}; {found.precision}, {found.optimizer}, {found.attention} "
        f"attention{kept}",
        "step    ",
    )
    yield _wrapped(
        f"{found.nodes * found.gpus_per_node} ({found.nodes} x {found.gpus_per_node}) of "
        f"{memory} ({found.gpu_origin})",
        "GPUs    ",
    )
    yield ""
    own = "; * the job as it is written" if first.own else ""
    yield _wrapped(f"GiB per GPU; TOTAL is the peak of a step, not the sum{own}")
    yield ""
    yield table([_cells(row) for row in found.rows], _HEADER, drop=_LESS, wrap=False)
    if found.advice is not None:
        yield ""
        yield _wrapped(found.advice.reason, "choose  " if found.advice.strategy else "")


def _wrapped(text: str, label: str = "", width: float = _COLUMNS) -> str:
    """Return a text in lines, right of its label; no number and no name is broken."""
    room = min(width, terminal_width())
    if room == math.inf:
        return label + text
    return textwrap.fill(
        text, int(room), initial_indent=label,
        subsequent_indent=" " * len(label), break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


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
