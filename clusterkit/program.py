"""A rank's command, its batch sizes and its DeepSpeed config. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from clusterkit import agent
from clusterkit import batch as batches
from clusterkit.batch import Batch
from clusterkit.errors import BadInput
from clusterkit.jobfile.command import PYTHONS, interpreter_options
from clusterkit.plan import Note
from clusterkit.rendezvous import Topology
from clusterkit.shell import Word
from clusterkit.spec import JobSpec

_NAME = re.compile(r"\$\{clusterkit\.([^}]*)\}")


def solve_batch(job: JobSpec, topology: Topology) -> tuple[Batch | None, list[Note]]:
    """Return the batch sizes for all nodes, or None if the job has no batch.

    Raises:
        BadInput: the sizes do not divide for some number of nodes that an elastic job may have.
    """
    if job.batch is None:
        return None, []
    asked = job.batch
    solved = [
        batches.solve(
            data_parallel=nodes * topology.nproc_per_node,
            global_size=asked.global_size,
            micro=asked.micro,
            accumulation=asked.accumulation,
        )
        for nodes in range(topology.min_nodes, topology.nodes + 1)
    ][-1]
    if not topology.elastic:
        factors = (solved.micro, solved.accumulation, solved.data_parallel)
        value = f"{solved.global_size} = {' x '.join(map(str, factors))}"
        return solved, [Note("batch", value, "global = micro x accumulation x ranks")]
    if asked.global_size is None:
        return solved, [Note("batch", f"micro {solved.micro}", "global follows the world size")]
    follows = "accumulation" if asked.micro else "micro"
    value = f"global {solved.global_size}"
    return solved, [Note("batch", value, f"{follows} follows the world size")]


def batch_environment(job: JobSpec, sizes: Batch | None, *, elastic: bool) -> dict[str, str]:
    """Return the variables with a rank's batch sizes; of an elastic run those that are fixed."""
    if sizes is None:
        return {}
    asked, env = job.batch, {}
    if not elastic or (asked and asked.global_size):
        env["CLUSTERKIT_GLOBAL_BATCH"] = str(sizes.global_size)
    if not elastic or (asked and asked.micro):
        env["CLUSTERKIT_MICRO_BATCH"] = str(sizes.micro)
    if not elastic:
        env["CLUSTERKIT_ACCUMULATION"] = str(sizes.accumulation)
    return env


def deepspeed_config(
    config: Mapping[str, Any], sizes: Batch | None, *, elastic: bool = False
) -> tuple[dict[str, Any], list[Note]]:
    """Return the job's DeepSpeed config with batch sizes and an explicit gradient clipping.

    Raises:
        BadInput: the config has other batch sizes than the job, or a number that JSON cannot hold.
    """
    whole = dict(config)
    notes = []
    numbers = {} if sizes is None else sizes.deepspeed()
    for key, value in numbers.items():
        if whole.get(key, value) not in (value, "auto"):
            raise BadInput(
                f"deepspeed.{key}: {whole[key]}, but batch gives {value}",
                hint=f"leave {key} to `batch`",
                job=("deepspeed", key),
            )
        whole[key] = value
    if elastic and numbers:
        # They change with the world size; the program sets them (jobs/train/gpt/gpt_deepspeed.py).
        del whole["train_batch_size"], whole["gradient_accumulation_steps"]
    if (place := _not_json(whole, "deepspeed")) is not None:
        raise BadInput(f"{place}: a DeepSpeed config cannot hold NaN or infinity")
    if "gradient_clipping" not in whole:
        whole["gradient_clipping"] = 0.0
        notes.append(
            Note("gradient_clipping", "0.0", "not in the job; DeepSpeed's own default would be 1.0")
        )
    return whole, notes


def _not_json(value: Any, place: str) -> str | None:
    """Return the first place in ``value`` with a NaN or infinity, or None."""
    if isinstance(value, float) and not math.isfinite(value):
        return place
    pairs = enumerate(value) if isinstance(value, list) else ()
    items: Iterable[tuple[object, Any]] = value.items() if isinstance(value, dict) else pairs
    return next((at for key, inner in items if (at := _not_json(inner, f"{place}.{key}"))), None)


def program_argv(
    job: JobSpec, python: str, run_env: Mapping[str, str], topology: Topology
) -> list[Word]:
    """Return the command of a rank, with every ``${clusterkit.NAME}`` in ``args`` replaced.

    Raises:
        BadInput: a name that is unknown, or has no value in this job.
    """
    if job.command is not None:
        words = [python if job.command[0] in PYTHONS else job.command[0], *job.command[1:]]
    elif job.module is not None:
        words = [python, "-u", "-m", job.module]
    else:
        words = [python, "-u", job.program or ""]
    names = (
        "global_batch", "micro_batch", "accumulation", "deepspeed_config", "run_id", "run_dir",
        "checkpoint_dir",
    )  # fmt: skip
    values = {name: run_env.get(f"CLUSTERKIT_{name.upper()}") for name in names}
    values["local_rank"] = agent.LOCAL_RANK_WORD  # each rank's own: replaced on its node
    values["world_size"] = None if topology.elastic else str(topology.world_size)

    def value_of(match: re.Match[str]) -> str:
        name = match[1]
        if name not in values:
            raise BadInput(
                f"args: ${{clusterkit.{name}}} is unknown", hint=", ".join(values), job="args"
            )
        if (value := values[name]) is None:
            raise BadInput(
                f"args: ${{clusterkit.{name}}} has no value in this job",
                hint=_what_gives_value(name, job, topology),
                job="args",
            )
        return value

    return [*words, *(_NAME.sub(value_of, arg) for arg in job.args)]


def interpreter_words(job: JobSpec) -> int | None:
    """Return how many words of `program_argv` are Python and its options.

    None: a rank does not execute Python, or has options with which it cannot be forked.
    """
    if job.command is None:
        return 2
    options = interpreter_options(job.command[1:]) if job.command[0] in PYTHONS else None
    return None if options is None else 1 + options


def _what_gives_value(name: str, job: JobSpec, topology: Topology) -> str:
    """Return a hint: why a name in ``args`` has no value, and what gives it one."""
    size = {"global_batch": "global", "micro_batch": "micro"}.get(name)
    if name == "deepspeed_config":
        return "the job has no `deepspeed` section"
    if name == "checkpoint_dir":
        return "the job has no `checkpoint` section"
    if topology.elastic and (name == "world_size" or job.batch is not None):
        follows = (
            f"nodes: {topology.min_nodes}:{topology.nodes} is elastic, so it changes while the "
            "job runs; "
        )
        if size is not None:
            return f"{follows}`batch: {{{size}: N}}` fixes it"
        return f"{follows}the program works it out from WORLD_SIZE"
    return f"the job has no batch: `batch: {{{size or 'global'}: N}}`"
