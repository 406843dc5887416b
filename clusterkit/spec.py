"""`JobSpec`: the contents of one job file, and the checks that types alone cannot make. No I/O.

The docstring under each field is its documentation: `clusterkit.jobfile.schema` puts it into the
JSON schema and into docs/job-file.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from clusterkit.errors import BadInput, KeyPath, Source, dotted, error_key
from clusterkit.shell import NAME, VARIABLE, check_text, is_name

Launcher = Literal["forkserver", "torchrun", "deepspeed", "mpirun"]
Device = Literal["auto", "cpu", "cuda"]
Count = Annotated[int, Meta(ge=1)]
Auto = Literal["auto"]
Estimable = Literal["gpt", "qwen", "sentiment"]
"""Programs whose flags `clusterkit estimate` knows: `clusterkit.estimate.flags`."""

JOB_NAME_MAX = 100
MAX_SECONDS = 1e9
"""Upper bound of every length of time."""
MAX_NODES = 100_000
MAX_RANKS = 10_000
"""Ranks of one node. No machine has as many: a larger number is a typing mistake."""
_JOB_NAME = r"\w[\w. -]*"
_MODULE = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
_NODES = "([0-9]{1,7})(?::([0-9]{1,7}))?"
_SECONDS = r"[0-9]+(\.[0-9]+)?"
_DURATION = r"([0-9]+(\.[0-9]+)?[dhms])+"

Duration = Annotated[
    float | str,
    Meta(
        extra_json_schema={
            "exclusiveMinimum": 0,
            "exclusiveMaximum": MAX_SECONDS,
            "pattern": rf"^\s*(?=.*[1-9])({_SECONDS}|{_DURATION})\s*$",
        }
    ),
]
"""A length of time as `parse_duration` reads it."""

ModuleName = Annotated[
    str, Meta(pattern=rf"^{_MODULE}$", description="a name of a module, such as torch.nn")
]

RUNS = ("program", "module", "command")
"""Keys that say what a job runs; it has exactly one of them."""

# Only the JSON schema has these patterns: `check_job` finds the same mistakes and explains them.
Text = Annotated[str, Meta(extra_json_schema={"pattern": r"^[^\u0000]*$"})]
SCHEMA: dict[str, Any] = {
    "oneOf": [{"required": [key], "properties": {key: {"not": {"type": "null"}}}} for key in RUNS],
    "if": {
        "required": ["nodes"],
        "properties": {"nodes": {"type": "string", "pattern": r"^\s*0*([1-9][0-9]*):(?!0*\1\s*$)"}},
    },
    "then": {"properties": {"launcher": {"enum": ["torchrun", "auto", None]}}},
}
"""Rules of `check_job` about several keys: one thing to run; elastic jobs need torchrun."""


class Spec(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base class of what is read from YAML files: frozen, without unknown keys."""


class BatchSpec(Spec, frozen=True, rename={"global_size": "global"}):
    """Batch sizes in samples; global = micro x accumulation x ranks, and missing ones follow."""

    global_size: Count | None = None
    """Samples per optimizer step, over all ranks."""
    micro: Count | None = None
    """Samples per forward pass of one rank."""
    accumulation: Count | None = None
    """Forward passes per optimizer step."""


class CheckpointSpec(Spec, frozen=True):
    """Where and how often to save; the program gets it as CLUSTERKIT_CHECKPOINT_* variables."""

    dir: Annotated[Text, Meta(min_length=1)] = "checkpoints"
    """Folder; a relative path starts in the run's folder. Or `s3://BUCKET/PREFIX`, if the program
    supports it, as `jobs/train/gpt` does."""
    every: Count = 100
    """Steps between checkpoints."""
    keep: Count = 2
    """How many of the newest checkpoints are kept."""
    resume: Annotated[Text, Meta(min_length=1)] = "auto"
    """`auto` (the newest complete checkpoint in `dir`), `never`, or the path of a checkpoint."""


class JobSpec(Spec, frozen=True, kw_only=True, repr_omit_defaults=True):
    """One job: a program, its arguments, how many nodes and ranks, and what they need."""

    name: Annotated[
        str, Meta(extra_json_schema={"pattern": f"^{_JOB_NAME}$", "maxLength": JOB_NAME_MAX})
    ]
    """Letters, digits, `.`, `_`, `-` and spaces, 100 at most; run ids begin with it."""
    description: str = ""
    """One line for people."""
    program: Text | None = None
    """Python file that every rank runs, or a folder or zip with a `__main__.py`; a relative path is
    looked up in the current folder, then in the job file's folder and those above it."""
    module: Text | None = None
    """Python module to run instead of a file (`python -m`)."""
    command: Annotated[tuple[Text, ...] | None, Meta(extra_json_schema={"minItems": 1})] = None
    """Command to run instead of a Python program, as a list of words. The file that it starts is
    looked up as `program` is."""
    args: tuple[Text, ...] = ()
    """Arguments of the program. `${clusterkit.NAME}` is replaced; NAME is one of global_batch,
    micro_batch, accumulation, deepspeed_config, run_id, run_dir, checkpoint_dir, world_size,
    local_rank."""
    estimate: Estimable | None = None
    """Whose flags `args` has, or which program it is a copy of: `gpt` (`jobs/train/gpt/train.py`),
    `qwen` (`gpt_hugging_face.py` there) or `sentiment` (`sentiment.py` and `sentiment_trainer.py`
    of `jobs/sentiment`). Only `clusterkit estimate` and submit's warning about memory read it."""
    python: Annotated[str, Meta(min_length=1)] | None = None
    """Interpreter of the ranks: a path, or a command on the hosts; by default the cluster entry's.
    """
    launcher: Launcher | Literal["auto", "python"] = "auto"
    """What starts the ranks of one node. `auto`: torchrun for an elastic number of nodes, unless
    `on_node_loss` is `shrink`; otherwise forkserver. `python` is another name of forkserver."""
    nodes: Annotated[
        int | str,
        Meta(
            extra_json_schema={
                "minimum": 1,
                "maximum": MAX_NODES,
                "pattern": rf"^\s*(?=.*[1-9])(?!0+:){_NODES}\s*$",
            }
        ),
    ] = 1
    """How many nodes: `2`, or `"2:4"` for an elastic number."""
    gpus_per_node: Annotated[Count | Auto, Meta(extra_json_schema={"maximum": MAX_RANKS})] = "auto"
    """Ranks per node. `auto`: one for each GPU of the node, or one rank on a node without GPUs."""
    device: Device = "auto"
    """`auto`: GPUs if there are any, otherwise CPU threads. GPUs that cannot be used, as without a
    driver, are refused."""
    threads_per_rank: Count | Auto = "auto"
    """OMP_NUM_THREADS of a rank. `auto`: as in the node's environment (on this machine yours), or
    else the node's cores divided by its ranks."""
    bind: Literal["auto", "none"] = "auto"
    """`auto`: with launcher forkserver, ranks of a Python program run on the CPUs of their GPU's
    NUMA node, if it is known and has as many CPUs as a rank has threads; the log says which.
    `none`: on any CPU."""
    batch: BatchSpec | None = None
    """Batch sizes, in samples."""
    deepspeed: dict[str, Any] | None = None
    """A DeepSpeed config, or the path of one relative to the job file's folder. Batch sizes come
    from `batch`; gradient_clipping is 0 unless given."""
    checkpoint: CheckpointSpec | None = None
    """Where and how often to save checkpoints, and where to resume."""
    restarts: Annotated[int, Meta(ge=0)] = 0
    """How often all ranks are started again after one failed."""
    on_node_loss: Literal["wait", "shrink", "fail"] = "wait"
    """What happens when a node is lost. `wait`, in a run with `restarts`: wait up to 10 minutes for
    the node and restart all ranks, which counts as none of the `restarts`. `fail`: end the run.
    `shrink`, with `nodes: MIN:MAX`: after some seconds restart the ranks of the other nodes, if
    they are at least MIN and node 0 is among them; a node that returns joins after a checkpoint.
    That needs no `restarts` and counts as none."""
    spares: Annotated[int, Meta(ge=0, le=MAX_NODES)] = 0
    """How many hosts besides `nodes` start and wait. When a node has been lost for some seconds, a
    spare takes its rank and all ranks restart; that needs no `restarts` and counts as none. With no
    spare left, `on_node_loss` applies. Checkpoints have to be in a folder that all hosts share."""
    retry_on: tuple[Annotated[int, Meta(ge=1, le=255)], ...] = ()
    """Exit codes of a rank after which the run restarts (signal N is 128 + N); by default all. Any
    other exit code ends the run, even if `restarts` are left."""
    time_limit: Duration | None = None
    """How long the run may take, restarts included, in seconds or as `90m`, `2h`, `1d12h`; then its
    nodes end it. Time spent waiting for nodes to start does not count."""
    hang_timeout: Annotated[
        float | str | None,
        Meta(
            extra_json_schema={
                "minimum": 0,
                "exclusiveMaximum": MAX_SECONDS,
                "pattern": rf"^\s*({_SECONDS}|{_DURATION})\s*$",
            }
        ),
    ] = None
    """After how long without progress all ranks are ended, and restarted if `restarts` are left;
    written like `time_limit`. `0`: never. By default a hang is reported and ends nothing, until the
    timeout of the process group in which ranks wait is over (`init_process_group(timeout=...)`)."""
    env: Annotated[
        dict[str, Text], Meta(extra_json_schema={"propertyNames": {"pattern": f"^{NAME}$"}})
    ] = {}
    """Environment variables of every rank; values arrive exactly as written."""
    secrets: tuple[Annotated[str, Meta(extra_json_schema={"pattern": f"^{NAME}$"})], ...] = ()
    """Names of variables taken from the submitter's environment; their values are never written to
    a file, an argument list or a log."""
    preload: tuple[ModuleName, ...] | None = None
    """Modules that launcher forkserver imports once per node, before the ranks start. By default
    torch, where the program's source shows that the time of the import makes no difference; `[]`:
    none. The program must not influence these imports, by its environment for example."""
    workdir: Text | None = None
    """Folder in which the ranks start; by default the folder where `program` was found."""
    track: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ()
    """Trackers that get the metrics of rank 0. They run on the machine that submits; program and
    nodes need none of their packages. `tensorboard` writes to `tensorboard/` in the run's folder;
    `wandb`, `mlflow` and `trackio` use the variables and logins of that machine, and store the
    metrics on it if there are none."""

    @property
    def node_range(self) -> tuple[int, int]:
        """Return the smallest and the largest number of nodes; equal unless the job is elastic."""
        return parse_nodes(self.nodes)

    @property
    def elastic(self) -> bool:
        low, high = self.node_range
        return low != high

    @property
    def shrinks(self) -> bool:
        """Return whether the agents, and not torchrun, restart an elastic job with fewer nodes."""
        return self.on_node_loss == "shrink"

    @property
    def started_by(self) -> Launcher:
        """Return the launcher that starts the ranks."""
        return launcher_of(self)[0]

    @property
    def limit_seconds(self) -> float | None:
        """Return ``time_limit`` in seconds; None: no limit."""
        return None if self.time_limit is None else parse_duration(self.time_limit)

    @property
    def hang_seconds(self) -> float | None:
        """Return ``hang_timeout`` in seconds; 0: never; None: the default."""
        if self.hang_timeout is None:
            return None
        return parse_duration(self.hang_timeout, "hang_timeout", zero=True)


def launcher_of(job: JobSpec) -> tuple[Launcher, str]:
    """Return the launcher that starts a job's ranks, and why it is that one."""
    if job.launcher == "python":
        return "forkserver", "job: launcher python"
    if job.launcher != "auto":
        return job.launcher, "job: launcher"
    if job.elastic and not job.shrinks:
        return "torchrun", f"nodes: {job.nodes} is elastic"
    return "forkserver", "the default"


def parse_nodes(nodes: int | str) -> tuple[int, int]:
    """Parse a number of nodes: ``2`` is (2, 2), ``"2:4"`` is (2, 4).

    Raises:
        BadInput: not of that form, out of range, or the larger number first.
    """
    match = re.fullmatch(_NODES, str(nodes).strip())
    if match is None:
        shown = repr(nodes)[:40]
        raise BadInput(
            f"nodes: {shown} is neither a number nor MIN:MAX", hint='2, or "2:4"', job="nodes"
        )
    low = int(match[1])
    high = int(match[2] or low)
    if low < 1:
        raise BadInput(f"nodes: {nodes}: a run needs at least 1 node", job="nodes")
    if high > MAX_NODES:
        raise BadInput(f"nodes: {nodes}: a run has {MAX_NODES} nodes at most", job="nodes")
    if high < low:
        raise BadInput(
            f"nodes: {nodes}: the minimum comes first",
            hint=f'did you mean "{high}:{low}"?',
            job="nodes",
        )
    return low, high


def parse_duration(duration: float | str, key: str = "time_limit", *, zero: bool = False) -> float:
    """Return a length of time such as ``90``, ``"90s"``, ``"1.5h"`` or ``"1d2h"`` in seconds.

    Args:
        key: the key or option that has the value, for errors.
        zero: whether 0 is allowed.

    Raises:
        BadInput: not of that form, not above 0, or not below `MAX_SECONDS`.
    """
    text = str(duration).strip()
    units = {"d": 86400, "h": 3600, "m": 60, "s": 1}
    if isinstance(duration, int | float) or re.fullmatch(_SECONDS, text):
        seconds = float(duration)
    elif re.fullmatch(_DURATION, text):
        parts = re.findall(r"([0-9.]+)([dhms])", text)
        seconds = sum(float(number) * units[unit] for number, unit in parts)
    else:
        raise BadInput(
            f"{key}: {text[:40]!r} is not a length of time", hint="such as 3600, 90m, 2h, 1d12h"
        )
    if not (0 < seconds < MAX_SECONDS or (zero and seconds == 0)):
        raise BadInput(f"{key}: {text[:40]}: it has to be above 0, and finite")
    return seconds


def check_job(job: JobSpec) -> None:
    """Check the values of a job, and whether they fit together.

    Raises:
        BadInput: about the key.
    """
    if not re.fullmatch(_JOB_NAME, job.name) or len(job.name) > JOB_NAME_MAX:
        long = f"... ({len(job.name)} characters)" if len(job.name) > 40 else ""
        shown = job.name[:40] + long
        raise BadInput(
            f"name: {shown!r} is not a valid job name",
            hint=f"letters, digits, '.', '_', '-' and spaces, {JOB_NAME_MAX} characters at most",
            job="name",
        )
    given = [key for key in RUNS if getattr(job, key) is not None]
    if len(given) != 1:
        raise BadInput(
            f"{' and '.join(given)}: give only one of them" if given else "program: missing",
            hint="one of `program: train.py`, `module: package.train`, `command: [./train.sh]`",
            job=given[0] if given else "program",
        )
    if job.command is not None and not job.command:
        raise BadInput("command: it is empty", hint="command: [./train.sh, --fast]", job="command")
    if job.estimate is not None and job.command is not None:
        raise BadInput(
            f"estimate: {job.estimate} is about the arguments of a program, not of a command",
            hint="program or module instead of command; or no estimate",
            job="estimate",
        )
    parse_nodes(job.nodes)
    if job.gpus_per_node != "auto" and not 1 <= job.gpus_per_node <= MAX_RANKS:
        rule = "needs at least 1 rank" if job.gpus_per_node < 1 else f"has {MAX_RANKS} at most"
        raise BadInput(f"gpus_per_node: {job.gpus_per_node}: a node {rule}", job="gpus_per_node")
    for key, length in (("time_limit", job.time_limit), ("hang_timeout", job.hang_timeout)):
        if length is not None:
            with error_key("job", key):
                parse_duration(length, key, zero=key == "hang_timeout")
    _check_node_loss(job)
    _check_texts(job)


def _check_node_loss(job: JobSpec) -> None:
    if job.shrinks and (not job.elastic or job.started_by != "forkserver"):
        other = f"launcher {job.started_by}" if job.elastic else f"nodes: {job.nodes}"
        raise BadInput(
            f"on_node_loss: shrink needs nodes: MIN:MAX and launcher: forkserver, not {other}",
            hint="without on_node_loss, torchrun continues with fewer of nodes: MIN:MAX",
            job="on_node_loss",
        )
    if job.elastic and job.started_by != "torchrun" and not job.shrinks:
        raise BadInput(
            f"nodes: {job.nodes}: launcher {job.launcher} cannot run an elastic number of nodes",
            hint="launcher: torchrun, or on_node_loss: shrink with launcher: forkserver",
            job="nodes",
        )
    if job.preload is not None and (job.started_by != "forkserver" or job.command is not None):
        other = f"launcher {job.started_by}" if job.command is None else "a command"
        raise BadInput(
            f"preload: {other} cannot preload modules",
            hint="program or module, with launcher: forkserver; or no preload",
            job="preload",
        )
    if job.spares and job.on_node_loss == "fail":
        raise BadInput(
            f"spares: {job.spares}, but on_node_loss: fail ends the run",
            hint="on_node_loss: wait, or shrink",
            job="spares",
        )
    if job.spares and job.started_by != "forkserver":
        raise BadInput(
            f"spares: {job.spares}, but launcher {job.started_by} cannot move a lost node's ranks",
            hint="launcher: forkserver; in an elastic job together with on_node_loss: shrink",
            job="spares",
        )


def _check_texts(job: JobSpec) -> None:
    check_environment(job.env)
    for name in job.secrets:
        if not is_name(name):
            raise BadInput(f"secrets: {name!r} is not {VARIABLE}", job="secrets")
    texts: list[tuple[KeyPath, str]] = [
        ((key,), getattr(job, key) or "") for key in ("program", "module", "python", "workdir")
    ]
    if job.checkpoint is not None:
        texts += [(("checkpoint", key), getattr(job.checkpoint, key)) for key in ("dir", "resume")]
    for key in ("args", "command"):
        texts += [((key, number), word) for number, word in enumerate(getattr(job, key) or ())]
    for place, text in texts:
        with error_key("job", *place):
            check_text(dotted(place), text)
    twice = sorted(set(job.env) & set(job.secrets))
    if twice:
        raise BadInput(f"secrets: {twice[0]} is set in env as well", job="secrets")


def check_environment(env: Mapping[str, str], source: Source = "job") -> None:
    """Check names and values of environment variables.

    Raises:
        BadInput: about the key ``env.NAME`` of ``source``.
    """
    for name, value in env.items():
        with error_key(source, "env", name):
            if not is_name(name):
                raise BadInput(f"env: {name!r} is not {VARIABLE}")
            check_text(f"env.{name}", value)


Job = str | os.PathLike[str] | JobSpec | Sequence[str]
"""What can be submitted: the path of a job file, a `JobSpec`, or a command such as
``["python", "train.py", "--fast"]``."""
