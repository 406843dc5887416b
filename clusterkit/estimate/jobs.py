"""Read the model and the setup of a job from its file and its program's text.

The programs of jobs/train, and copies of them, are known by their flags. Of any other program only
the DeepSpeed section is known, and its model must be given.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from clusterkit.batch import DEEPSPEED_KEYS, solve
from clusterkit.errors import BadInput, pluralize
from clusterkit.estimate import mesh as meshes
from clusterkit.estimate import models
from clusterkit.estimate.mesh import Mesh
from clusterkit.estimate.published import PRESETS
from clusterkit.estimate.setup import ZERO, Model, Precision, Setup, Zero
from clusterkit.jobfile.deepspeed_config import precision
from clusterkit.spec import JobSpec

_DEFAULT_GLOBAL_BATCH = 32
"""The default of jobs/train/gpt/gpt_settings.py."""
_HUGGING_FACE_CONTEXT = 256
"""The default of train.py for Hugging Face models, in tokens."""
_RECOMPUTE = ("--activation-checkpointing", "--gradient-checkpointing", "--gradient_checkpointing")
_OURS = re.compile(r"\b(gpt_settings\.Parser|make_parser)\(__doc__")
_HAS_PRESETS = re.compile(r"^from gpt_model import .*\bPRESETS\b", re.MULTILINE)


@dataclass(frozen=True)
class Program:
    """The arguments of a job's program."""

    ours: bool  # one of jobs/train, so that its flags are ours
    presets: bool  # --model takes our GPT's presets
    flags: Mapping[str, str]  # to values; the last one counts, as in argparse; a bare flag is ""
    defaults: Mapping[str, str]  # of flags that are not given, from the program's text

    def get(self, flag: str) -> str | None:
        """Return the value of a flag, or its default."""
        return self.flags.get(flag, self.defaults.get(flag))


def read_program(job: JobSpec) -> Program:
    """Read a job's program from its arguments and its text; an unreadable one is not ours."""
    text = ""
    if job.program is not None:
        with suppress(OSError, UnicodeDecodeError):
            text = Path(job.workdir or ".", job.program).read_text(encoding="utf-8")
    ours = bool(_OURS.search(text))
    return Program(
        ours=ours,
        presets=bool(_HAS_PRESETS.search(text)),
        flags=_flags(job.args),
        defaults=_defaults(text) if ours else {},
    )


def _flags(words: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for place, word in enumerate(words):
        if not word.startswith("--") or word == "--":
            continue
        name, equals, value = word.partition("=")
        following = words[place + 1] if place + 1 < len(words) else "--"
        if not equals and not following.startswith("--"):
            value = following
        found[name] = value
    return found


def _defaults(text: str) -> dict[str, str]:
    """Return the defaults of flags in a program's text: ``add("--model", default=...)``.

    Only literal defaults are known.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return {}
    found = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        flag = node.args[0]
        if not (isinstance(flag, ast.Constant) and str(flag.value).startswith("--")):
            continue
        for keyword in node.keywords:
            if keyword.arg == "default" and isinstance(keyword.value, ast.Constant):
                value = keyword.value.value
                if isinstance(value, str | int | float) and not isinstance(value, bool):
                    found[str(flag.value)] = str(value)
    return found


# ---------------------------------------------------------------- the model


def model_of(program: Program, *, count: bool) -> Model | None:
    """Return the model that a known program trains; None if unknown.

    Args:
        count: count Hugging Face models on the meta device, which takes seconds.

    Raises:
        BadInput: with ``count``, the model cannot be found.
    """
    name = program.get("--model")
    if not program.ours or not name:
        return None
    context = _number(program.get("--context"))
    if program.presets and name in PRESETS:
        return models.gpt(name, context)
    context = context or _number(program.get("--max-length")) or _HUGGING_FACE_CONTEXT
    if count:
        return models.hugging_face(name, context)
    try:
        found = models.locate(name)
    except BadInput:
        return None
    return None if found is None else models.from_config(found, context)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


# ---------------------------------------------------------------- how it is trained


def setup_of(
    job: JobSpec, program: Program, *, ranks: int, local_ranks: int, device: str, model: Model
) -> Setup:
    """Return how the job trains on a number of ranks.

    Raises:
        BadInput: a batch or mesh does not divide, or a value is unknown.
    """
    config = _deepspeed_config(job, program)
    strategy, mesh = "ddp", Mesh(shard=ranks)
    sequence = "--sequence-parallel" in program.flags
    if config is not None:
        strategy = ZERO[_stage(config)]
    elif program.ours and (named := program.get("--strategy")) is not None:
        strategy = named
    if strategy == "deepspeed":
        raise BadInput(
            "estimate: --strategy deepspeed without a config that can be read here",
            hint="a deepspeed section in the job file",
        )
    if strategy in meshes.STRATEGIES:
        mesh = meshes.choose(strategy, program.get("--mesh"), ranks=ranks, local_ranks=local_ranks)
        _check_cuts(mesh, model, sequence=sequence)
    elif strategy not in ZERO:
        raise BadInput(f"args: --strategy {strategy} is unknown", hint=", ".join(meshes.STRATEGIES))
    sizes = batch_of(job, program)
    if not sizes.keys() & {"global_size", "micro"}:
        sizes |= {"global_size": _DEFAULT_GLOBAL_BATCH} if program.ours else {"micro": 1}
    batch = solve(data_parallel=mesh.dp, **sizes)
    reshard = "--no-reshard-after-forward" not in program.flags and (
        mesh.pp == 1 or "--reshard-after-forward" in program.flags
    )
    offload = strategy == "fsdp" and "--offload" in program.flags
    setup = Setup(
        strategy=strategy,
        mesh=mesh,
        precision=_precision(program, config, device),
        micro=batch.micro,
        accumulation=batch.accumulation,
        local_ranks=local_ranks,
        device=device,
        # Our flag, those of Hugging Face's programs, or a DeepSpeed section that our programs read.
        recompute=not program.flags.keys().isdisjoint(_RECOMPUTE)
        or (program.ours and config is not None and "activation_checkpointing" in config),
        reshard=reshard,
        sequence=sequence,
        schedule=program.get("--schedule") or "1f1b",
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
            f"{model.name} is not cut into layers or stages; fsdp or deepspeed divide it"
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
    named = program.flags.get("--strategy") if program.ours else None
    if named is not None and named != "deepspeed":
        return None
    if job.deepspeed is not None:
        return job.deepspeed
    path = program.flags.get("--deepspeed-config") or program.flags.get("--deepspeed")
    if not path:
        return None
    try:
        config = json.loads(Path(job.workdir or ".", path).read_text())
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


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
    named = program.get("--dtype") if program.ours else None
    if named is None and config is not None:
        return precision(config)
    if named is None:
        return "fp32" if device == "cpu" else "bf16"
    for known in get_args(Precision):
        if named == known:
            return known  # type: ignore[no-any-return]
    raise BadInput(f"args: --dtype {named} is unknown", hint="fp32, bf16 or fp16")


def batch_of(job: JobSpec, program: Program) -> dict[str, int]:
    """Return the batch sizes that are set, by the names of ``batch.solve``'s parameters.

    From flags of our programs, the job's ``batch``, flags of transformers' Trainer, or the
    DeepSpeed config, in this order.
    """
    asked = job.batch
    sizes = {
        "global_size": asked.global_size if asked else None,
        "micro": asked.micro if asked else None,
        "accumulation": asked.accumulation if asked else None,
    }
    if program.ours:
        for name, flag in (("global_size", "--global-batch"), ("micro", "--micro-batch")):
            sizes[name] = _number(program.flags.get(flag)) or sizes[name]
    elif not any(sizes.values()) and _trainer_flag(program, "per_device_train_batch_size"):
        sizes["micro"] = _trainer_flag(program, "per_device_train_batch_size")
        sizes["accumulation"] = _trainer_flag(program, "gradient_accumulation_steps")
    if not any(sizes.values()):
        config = _deepspeed_config(job, program) or {}
        sizes = {name: config.get(key) for name, key in DEEPSPEED_KEYS.items()}
    # A config may say "auto".
    return {name: size for name, size in sizes.items() if type(size) is int and size > 0}


def _trainer_flag(program: Program, name: str) -> int | None:
    """Return a number given to transformers' Trainer, whose parser takes both spellings."""
    dashed = name.replace("_", "-")
    return _number(program.flags.get(f"--{name}") or program.flags.get(f"--{dashed}"))
