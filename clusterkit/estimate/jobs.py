"""Read the model and the setup of a job from its file.

Of a job without the key `estimate` only the batch, the DeepSpeed section and the flags of
transformers' Trainer are known, and its model must be given. No program's text is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clusterkit import program as ranks_program
from clusterkit.batch import DEEPSPEED_KEYS, Batch, solve
from clusterkit.errors import BadInput, error_key, pluralize
from clusterkit.estimate import flags as known_flags
from clusterkit.estimate import mesh as meshes
from clusterkit.estimate import models
from clusterkit.estimate.mesh import Mesh
from clusterkit.estimate.published import PRESETS
from clusterkit.estimate.setup import ZERO, Model, Precision, Setup, Zero
from clusterkit.jobfile.deepspeed_config import precision
from clusterkit.rendezvous import Topology
from clusterkit.spec import JobSpec

_GLOBAL_BATCH = 32
_HUGGING_FACE_CONTEXT = 256
"""What jobs/train/gpt/choices.py takes where no flag says it."""
_RECOMPUTE = ("activation_checkpointing", "gradient_checkpointing")
_JOBS_CONFIG = "\0"
"""Stands for the path of the file that clusterkit makes of a job's DeepSpeed section."""


@dataclass(frozen=True)
class Program:
    """The arguments of a job's program."""

    kind: str | None = None  # the job's key `estimate`
    # With it, the value of every flag, given or not, by its name with _ for -.
    flags: Mapping[str, Any] = field(default_factory=dict)
    # Without it, the words behind flags that are given; behind a bare flag nothing.
    given: Mapping[str, str] = field(default_factory=dict)

    @property
    def of_gpt(self) -> bool:
        """Whether it is a program of jobs/train/gpt."""
        return self.kind in ("gpt", "qwen")


def read_program(job: JobSpec, *, nodes: int, local_ranks: int) -> Program:
    """Read the arguments of a job's program.

    Raises:
        BadInput: one that the program does not take, or a batch that does not divide.
    """
    if job.estimate is None:
        return Program(given=_given(job.args))
    topology = Topology(min(job.node_range[0], nodes) if job.elastic else nodes, nodes, local_ranks)
    sizes, _ = ranks_program.solve_batch(job, topology)
    environ = ranks_program.batch_environment(job, sizes, elastic=topology.elastic)
    if job.deepspeed is not None:
        environ["CLUSTERKIT_DEEPSPEED_CONFIG"] = _JOBS_CONFIG
    # Of other names only their places matter.
    names = dict.fromkeys(("CLUSTERKIT_RUN_ID", "CLUSTERKIT_RUN_DIR"), "run")
    if job.checkpoint is not None:
        names["CLUSTERKIT_CHECKPOINT_DIR"] = job.checkpoint.dir
    words = ranks_program.program_argv(job, "python", names | environ, topology)
    arguments = [str(word) for word in words[len(words) - len(job.args) :]]
    return Program(job.estimate, known_flags.parse(job.estimate, arguments, environ))


def _given(words: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for place, word in enumerate(words):
        if not word.startswith("--") or word == "--":
            continue
        name, equals, value = word.partition("=")
        following = words[place + 1] if place + 1 < len(words) else "--"
        if not equals and not following.startswith("--"):
            value = following
        found[name[2:].replace("-", "_")] = value
    return found


# ---------------------------------------------------------------- the model


def model_of(
    program: Program, *, count: bool, name: str | None = None, context: int | None = None
) -> Model | None:
    """Return the model that a known program trains; None if unknown.

    Args:
        count: count Hugging Face models on the meta device, which takes seconds.
        name, context: instead of the program's.

    Raises:
        BadInput: with ``count``, the model cannot be found.
    """
    name = name or program.flags.get("model")
    if program.kind is None or not name:
        return None
    context = context or program.flags.get("context") or program.flags.get("max_length")
    if program.kind == "gpt" and name in PRESETS:
        return models.gpt(name, context)
    context = context or _HUGGING_FACE_CONTEXT
    if count:
        return models.hugging_face(name, context)
    try:
        found = models.locate(name)
    except BadInput:
        return None
    return None if found is None else models.from_config(found, context)


# ---------------------------------------------------------------- how it is trained


def setup_of(
    job: JobSpec, program: Program, *, ranks: int, local_ranks: int, device: str, model: Model
) -> Setup:
    """Return how the job trains on a number of ranks.

    Raises:
        BadInput: a batch or mesh does not divide, or a value is unknown.
    """
    flags = program.flags
    config = _deepspeed_config(job, program)
    strategy = flags.get("strategy", "ddp")
    mesh, sequence = Mesh(shard=ranks), flags.get("sequence_parallel", False)
    if program.of_gpt:
        text = flags["mesh"]
        with error_key("job", "args"):
            mesh = meshes.choose(strategy, text, ranks=ranks, local_ranks=local_ranks)
            _check_cuts(mesh, model, sequence=sequence)
    if config is not None:
        strategy = ZERO[_stage(config)]
    batch = _batch(job, program, config, mesh)
    reshard = flags.get("reshard_after_forward")
    offload = strategy == "fsdp" and flags["offload"]
    setup = Setup(
        strategy=strategy,
        mesh=mesh,
        precision=_precision(program, config, device),
        micro=batch.micro,
        accumulation=batch.accumulation,
        local_ranks=local_ranks,
        device=device,
        fused=program.of_gpt and "optimizer" not in (config or {}),
        recompute=_recomputes(program, config),
        reshard=mesh.pp == 1 if reshard is None else reshard,
        sequence=sequence,
        schedule=flags.get("schedule", "1f1b"),
        offload_optimizer=offload,
        offload_parameters=offload,
    )
    return setup if config is None else _with_zero(setup, config)


def _check_cuts(mesh: Mesh, model: Model, *, sequence: bool) -> None:
    """Check that the mesh divides the model's layers, heads and context."""
    if mesh.pp == 1 and mesh.tp == 1:
        return
    if not model.divisible:
        raise BadInput(
            f"--mesh {mesh}: estimate cannot cut {model.name} into stages or slices",
            hint="--strategy fsdp or deepspeed without --mesh",
        )
    if mesh.pp > model.layers:
        raise BadInput(f"--mesh pp={mesh.pp}: {model.name} has {pluralize(model.layers, 'layer')}")
    if model.heads % mesh.tp:
        raise BadInput(
            f"--mesh tp={mesh.tp} does not divide the {model.heads} heads of {model.name}"
        )
    if sequence and model.context % mesh.tp:
        raise BadInput(f"--sequence-parallel: tp={mesh.tp} does not divide {model.context}")


def _deepspeed_config(job: JobSpec, program: Program) -> Mapping[str, Any] | None:
    """Return the DeepSpeed config that the program trains with; None: it trains without one.

    Raises:
        BadInput: a known program needs one that cannot be read here.
    """
    needed = program.flags.get("strategy") == "deepspeed"
    if program.of_gpt and not needed:
        return None
    if program.kind is not None:
        path = program.flags["deepspeed_config"]
        if path == _JOBS_CONFIG:
            return job.deepspeed
        if path is None and needed:
            raise BadInput(
                "--strategy deepspeed without a config",
                hint="a deepspeed section in the job file",
                job="args",
            )
    elif job.deepspeed is not None:
        return job.deepspeed
    else:
        path = program.given.get("deepspeed_config") or program.given.get("deepspeed")
    if not path:
        return None
    try:
        config = json.loads(Path(job.workdir or ".", path).read_text())
    except (OSError, ValueError):
        config = None
    if isinstance(config, dict):
        return config
    if program.kind is None:
        return None
    raise BadInput(f"--deepspeed-config {path}: no JSON object that can be read", job="args")


def _stage(config: Mapping[str, Any]) -> int:
    zero = config.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise BadInput(f"deepspeed.zero_optimization.stage: {stage!r} is not 0, 1, 2 or 3")
    return int(stage)


def _with_zero(setup: Setup, config: Mapping[str, Any]) -> Setup:
    section = config.get("zero_optimization")
    section = section if isinstance(section, dict) else {}

    def number(key: str, default: float) -> float:
        value = section.get(key, default)
        usable = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        return float(value) if usable else default

    def offloaded(key: str, older: str) -> bool:
        value = section.get(key)
        if value is None:
            return section.get(older) is True  # its older spelling
        return isinstance(value, dict) and value.get("device", "none") != "none"

    usual = Zero()
    return replace(
        setup,
        offload_optimizer=offloaded("offload_optimizer", "cpu_offload"),
        offload_parameters=offloaded("offload_param", "cpu_offload_param"),
        zero=Zero(
            reduce_bucket=number("reduce_bucket_size", usual.reduce_bucket),
            prefetch=number("stage3_prefetch_bucket_size", usual.prefetch),
            max_live=number("stage3_max_live_parameters", usual.max_live),
            overlap=section.get("overlap_comm") is True,
        ),
    )


def _precision(program: Program, config: Mapping[str, Any] | None, device: str) -> Precision:
    if (named := program.flags.get("dtype")) is not None:
        return named  # type: ignore[no-any-return]
    if config is not None:
        return precision(config)
    return "fp32" if device == "cpu" or program.kind == "sentiment" else "bf16"


def _recomputes(program: Program, config: Mapping[str, Any] | None) -> bool:
    if program.kind is None:
        words = [program.given[name] for name in _RECOMPUTE if name in program.given]
        return any(word.lower() not in ("false", "no", "0") for word in words)
    if not program.of_gpt:
        return False
    in_config = config is not None and "activation_checkpointing" in config
    return program.flags["activation_checkpointing"] or in_config


def _batch(job: JobSpec, program: Program, config: Mapping[str, Any] | None, mesh: Mesh) -> Batch:
    """Return the batch as the program works it out.

    Raises:
        BadInput: the sizes do not divide.
    """
    flags = program.flags
    if program.kind is None:
        sizes = batch_of(job, program)
        sizes |= {} if sizes.keys() & {"global_size", "micro"} else {"micro": 1}
    elif not program.of_gpt:
        sizes = {"micro": flags["batch"], "accumulation": flags["accumulation"]}
    elif flags["global_batch"] or flags["micro_batch"]:
        sizes = {"global_size": flags["global_batch"], "micro": flags["micro_batch"]}
    elif config is not None:
        sizes = _sizes_in(config) or {"global_size": _GLOBAL_BATCH}
    elif mesh.pp > 1 and flags["schedule"] == "1f1b":
        # 1F1B takes no fewer micro batches than there are stages.
        micro = max(1, _GLOBAL_BATCH // (mesh.dp * mesh.pp))
        sizes = {"micro": micro, "accumulation": mesh.pp}
    else:
        sizes = {"global_size": _GLOBAL_BATCH}
    return solve(data_parallel=mesh.dp, **sizes)


def batch_of(job: JobSpec, program: Program) -> dict[str, int]:
    """Return the batch sizes that are set for an unknown program, as ``batch.solve`` takes them.

    From the job's ``batch``, flags of transformers' Trainer, or the DeepSpeed config, in this
    order.
    """
    asked = job.batch
    if asked is not None:
        sizes = {
            "global_size": asked.global_size,
            "micro": asked.micro,
            "accumulation": asked.accumulation,
        }
        if any(sizes.values()):
            return {name: size for name, size in sizes.items() if size}
    if micro := _number(program.given.get("per_device_train_batch_size")):
        accumulation = _number(program.given.get("gradient_accumulation_steps"))
        return {"micro": micro, **({"accumulation": accumulation} if accumulation else {})}
    return _sizes_in(_deepspeed_config(job, program) or {})


def _sizes_in(config: Mapping[str, Any]) -> dict[str, int]:
    sizes = {name: config.get(key) for name, key in DEEPSPEED_KEYS.items()}
    # A config may say "auto".
    return {name: size for name, size in sizes.items() if type(size) is int and size > 0}


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None
