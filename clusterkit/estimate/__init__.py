"""Estimate the memory of a job on each GPU, for every strategy.

`memory` holds the formulas, `models` the sizes of models, `jobs` reads a job's settings, `advice`
compares the strategies. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, get_args

import msgspec
from msgspec import Struct

from clusterkit.cluster import Facts
from clusterkit.errors import BadInput, ClusterkitError, pluralize
from clusterkit.estimate import advice, jobs, models
from clusterkit.estimate.advice import Advice, Row
from clusterkit.estimate.memory import predict
from clusterkit.estimate.published import PRESETS
from clusterkit.estimate.setup import OPTIMIZERS, Model, Precision, Setup
from clusterkit.estimate.units import gib, parse_count, parse_memory, parse_size
from clusterkit.spec import Estimable, JobSpec

_SHAPE = ("layers", "hidden", "heads", "kv_heads", "intermediate", "gated", "vocabulary")
"""Fields that describe a model given by ``parameters``."""
_CONTEXT = 4096
"""Tokens of a sample where neither the job nor --context says it and the model takes more."""
OVERHEAD = 1536 << 20
"""Bytes of CUDA context, cuBLAS workspaces, NCCL buffers and fragmentation: assumed, not
measured."""
ATTENTION = ("fused", "eager")
_EXAMPLES = {"qwen": "Qwen/Qwen2-1.5B", "sentiment": "google-bert/bert-base-chinese"}
_KEY = f"the job key estimate: {'|'.join(get_args(Estimable))} says whose flags `args` has"


class Question(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The flags of `clusterkit estimate`. None: taken from the job or the cluster.

    Sizes and counts are text such as ``80GB`` and ``7B``.
    """

    model: str | None = None
    parameters: str | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    intermediate: int | None = None
    gated: bool | None = None
    vocabulary: int | None = None
    context: int | None = None
    gpu_memory: str | None = None
    micro_batch: int | None = None
    dtype: str | None = None
    optimizer: str = "adamw"
    attention: str = "fused"
    activation_checkpointing: bool = False
    overhead: str | None = None


class ModelSize(Struct, frozen=True, kw_only=True):
    """The sizes of the model, for the output."""

    name: str
    parameters: int
    layers: int
    hidden: int
    heads: int
    context: int
    vocabulary: int
    origin: str


class Estimate(Struct, frozen=True, kw_only=True):
    """The result: a row for every strategy, the job's own first."""

    def __repr__(self) -> str:
        return f"<Estimate of {self.model.name} on {self.nodes * self.gpus_per_node} GPUs>"

    model: ModelSize
    nodes: int
    gpus_per_node: int
    gpu_memory: int | None
    gpu_origin: str
    precision: str
    optimizer: str
    attention: str
    activation_checkpointing: bool
    rows: tuple[Row, ...]
    advice: Advice | None
    notes: tuple[str, ...]


def check(question: Question) -> Question:
    """Check the values of the flags, and return the question.

    Raises:
        BadInput: names the flag and its value.
    """
    for name in (*_SHAPE, "context", "micro_batch"):
        value = getattr(question, name)
        if value is not None and name != "gated" and value < 1:
            raise BadInput(f"{_flag(name)}: {value} is below 1")
    for name, value, allowed in (
        ("--dtype", question.dtype, get_args(Precision)),
        ("--optimizer", question.optimizer, tuple(OPTIMIZERS)),
        ("--attention", question.attention, ATTENTION),
    ):
        if value is not None and value not in allowed:
            raise BadInput(f"{name} {value}: unknown", hint=f"one of {', '.join(allowed)}")
    if question.model is not None and question.parameters is not None:
        raise BadInput("--model and --parameters: give only one of them")
    if question.parameters is None:
        for name in _SHAPE:
            if getattr(question, name) is not None:
                raise BadInput(
                    f"{_flag(name)} describes a model of --parameters", hint="--parameters 7B"
                )
    for flag, text in (("--gpu-memory", question.gpu_memory), ("--overhead", question.overhead)):
        if text is not None and not (flag == "--overhead" and text.strip() == "0"):
            (parse_size if flag == "--overhead" else parse_memory)(text, flag)
    return question


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def estimate(
    job: JobSpec | None,
    facts: Facts | None,
    *,
    nodes: int | None = None,
    gpus: int | None = None,
    question: Question | None = None,
) -> Estimate:
    """Estimate the memory of a job, or of a model alone.

    Args:
        job: None for a model that `question` names.
        facts: of the cluster, for its GPUs; None if they do not matter.
        nodes: number of nodes; None: the job's.
        gpus: GPUs per node; None: the job's.
        question: the flags of the command.

    Raises:
        BadInput: the model is unknown, a size does not divide, or a flag has a bad value.
        Unavailable: a package that is needed to count the model is missing.
    """
    question = check(question or Question())
    spec = job or JobSpec(name="model", command=("none",))
    nodes = nodes or spec.node_range[1]
    local = gpus or _gpus_per_node(spec, facts)
    program = jobs.read_program(spec, nodes=nodes, local_ranks=local)
    model = _model(spec, program, question)
    device = "cpu" if spec.device == "cpu" and question.gpu_memory is None else "cuda"
    own = jobs.setup_of(
        spec, program, ranks=nodes * local, local_ranks=local, device=device, model=model
    )
    own = _with_question(own, question)
    limit, origin = _limit(question, facts)
    known_hosts = facts is not None and question.gpu_memory is None
    host_limit = min(h.memory_mib for h in facts.hosts) << 20 if facts and known_hosts else None
    ways: dict[tuple[str, str], Setup] = {}
    for setup in (own, *advice.alternatives(model, own, nodes * local)):
        ways.setdefault((advice.label(setup), str(setup.mesh)), setup)
    setups: list[Setup] = []
    rows: list[Row] = []

    def add(more: Iterable[Setup], *, only_fitting: bool = False) -> None:
        for setup in more:
            is_own = job is not None and setup is own
            line = advice.row(model, setup, own, is_own=is_own, limit=limit, host_limit=host_limit)
            if line.fits or not only_fitting:
                setups.append(setup)
                rows.append(line)

    def fits(*, offload: bool) -> bool:
        """Whether a strategy fits that any trainer of this model has."""
        return any(
            line.fits
            for setup, line in zip(setups, rows, strict=True)
            if setup.offload_optimizer is offload
            and (model.divisible or setup.strategy not in advice.CUTS)
        )

    add(ways.values())
    # Activation checkpointing costs a third more computation, offload much more.
    for offload in (False, True):
        if limit is not None and not fits(offload=False) and not (offload and fits(offload=True)):
            add(advice.recomputing(ways.values(), offload=offload), only_fitting=True)
    chosen = None if limit is None else advice.choose(model, setups, rows, limit)
    return Estimate(
        model=msgspec.convert(model, ModelSize, from_attributes=True),
        nodes=nodes, gpus_per_node=local, gpu_memory=limit, gpu_origin=origin,
        precision=own.precision, optimizer=own.optimizer, attention=own.attention,
        activation_checkpointing=own.recompute,
        rows=tuple(rows), advice=chosen,
        notes=tuple(_notes(spec, program, own, job, limit, model, question)),
    )  # fmt: skip


def warning(job: JobSpec, facts: Facts) -> str | None:
    """Return a warning if the job will not fit the GPUs of ``facts``; None if it fits or may fit.

    Takes milliseconds, needs no torch. Returns None for unknown programs and models, because a
    false alarm is worse than none.
    """
    try:
        gpus = [gpu for host in facts.hosts for gpu in host.gpus]
        if job.device == "cpu" or not all(gpu.memory_mib for gpu in gpus) or not gpus:
            return None  # some clusters do not say how much memory their GPUs have
        nodes = job.node_range[1]
        local = _gpus_per_node(job, facts)
        program = jobs.read_program(job, nodes=nodes, local_ranks=local)
        model = jobs.model_of(program, count=False)
        if model is None:
            return None
        setup = jobs.setup_of(
            job, program, ranks=nodes * local, local_ranks=local, device="cuda", model=model
        )
        # The assumed overhead must not be the reason for a warning.
        memory = predict(model, replace(setup, overhead=0))
    except ClusterkitError:
        return None
    limit = min(gpu.memory_mib for gpu in gpus) << 20
    if memory.total <= limit:
        return None
    return (
        f"{model.name} with {advice.label(setup)} on {pluralize(nodes * local, 'GPU')} takes about "
        f"{gib(memory.total)} GiB of each, and they have {gib(limit)} GiB: clusterkit estimate "
        "says what fits"
    )


def _gpus_per_node(job: JobSpec, facts: Facts | None) -> int:
    """Return the ranks per node: the job's number, or one for each GPU of a node."""
    if job.gpus_per_node != "auto":
        return job.gpus_per_node
    if facts is None or not facts.hosts[0].gpus or job.device == "cpu":
        return 1
    fewest = min(len(host.gpus) for host in facts.hosts)
    shared = fewest // job.node_range[1] if len(facts.hosts) == 1 else fewest
    return max(1, shared)


def _model(spec: JobSpec, program: jobs.Program, question: Question) -> Model:
    if question.parameters is not None:
        return models.from_numbers(
            parse_count(question.parameters, "--parameters"),
            context=question.context,
            **{name: getattr(question, name) for name in _SHAPE},
        )
    name, context = question.model, question.context
    if name in PRESETS:
        return models.gpt(name, context or program.flags.get("context"))
    if name is not None and program.kind is None:
        return models.hugging_face(name, context, longest=_CONTEXT)
    model = jobs.model_of(program, name=name, context=context, count=True)
    if model is not None:
        return model
    what = spec.program or spec.module or "this command"
    if program.kind is not None:
        raise BadInput(
            f"{what}: without --model it trains a tiny model of its own, which fits any GPU",
            hint=f"the model after --: -- --model {_EXAMPLES[program.kind]}",
        )
    raise BadInput(
        f"{what}: clusterkit does not know which model it trains",
        hint="--model NAME (llama-3-8b, a preset of jobs/train/gpt, a Hugging Face name or "
        f"folder), or --parameters 7B --layers 32 --hidden 4096; {_KEY}",
    )


def _with_question(setup: Setup, question: Question) -> Setup:
    changes: dict[str, Any] = {"optimizer": question.optimizer, "attention": question.attention}
    if question.dtype is not None:
        changes["precision"] = question.dtype
    if question.micro_batch is not None:
        whole = setup.micro * setup.accumulation
        changes |= {
            "micro": question.micro_batch,
            "accumulation": max(1, whole // question.micro_batch),
        }
    if question.activation_checkpointing:
        changes["recompute"] = True
    text = question.overhead
    if setup.device != "cpu" and (text is None or text.strip() != "0"):
        changes["overhead"] = OVERHEAD if text is None else parse_size(text, "--overhead")
    return replace(setup, **changes)


def _limit(question: Question, facts: Facts | None) -> tuple[int | None, str]:
    if question.gpu_memory is not None:
        return parse_memory(question.gpu_memory, "--gpu-memory"), "--gpu-memory"
    gpus = [gpu for host in facts.hosts for gpu in host.gpus] if facts is not None else []
    if not gpus:
        return None, "no GPU was found"
    smallest = min(gpus, key=lambda gpu: gpu.memory_mib)
    return smallest.memory_mib << 20, f"found: {smallest.name}"


def _notes(
    spec: JobSpec, program: jobs.Program, own: Setup, job: JobSpec | None, limit: int | None,
    model: Model, question: Question,
) -> list[str]:  # fmt: skip
    notes = []
    if limit is None:
        notes.append("no GPU was found: --gpu-memory 80GB says what would fit one")
    if own.overhead:
        notes.append(
            f"each total holds {gib(own.overhead)} GiB besides tensors (CUDA context, NCCL, "
            "fragmentation): assumed, --overhead changes it"
        )
    if job is not None and program.kind is None and own.strategy == "ddp":
        notes.append(f"the first line assumes ddp: {_KEY}")
    said = question.micro_batch or program.kind or jobs.batch_of(spec, program)
    if job is not None and not said:
        notes.append("the job has no batch: a micro batch of 1 is assumed, --micro-batch says more")
    if question.model and question.context is None and question.model not in PRESETS:
        notes.append(f"samples of {model.context:,} tokens: --context says how many yours have")
    return notes
