"""What to run: `JobSpec`, the contents of one job file. Frozen and validated; no I/O.

The docstring under each field is its documentation: `clusterkit.jobfile.schema` reads it for the
JSON schema and for docs/job-file.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from clusterkit.errors import BadInput, Place, Source, about, dotted
from clusterkit.shell import NAME, check_text, is_name

Launcher = Literal["forkserver", "torchrun", "deepspeed", "mpirun"]
Device = Literal["auto", "cpu", "cuda"]
Count = Annotated[int, Meta(ge=1)]
Auto = Literal["auto"]

JOB_NAME_MAX = 100
LONGEST = 1e9
"""Seconds that a time limit stays below."""
MOST_NODES = 100_000
MOST_RANKS = 10_000
"""Of a node. No machine has as much; a larger number is a slip of the hand."""
_JOB_NAME = r"\w[\w. -]*"
_NODES = "([0-9]{1,7})(?::([0-9]{1,7}))?"
_SECONDS = r"[0-9]+(\.[0-9]+)?"
_DURATION = r"([0-9]+(\.[0-9]+)?[dhms])+"

Duration = Annotated[
    float | str,
    Meta(
        extra_json_schema={
            "exclusiveMinimum": 0,
            "exclusiveMaximum": LONGEST,
            "pattern": rf"^\s*(?=.*[1-9])({_SECONDS}|{_DURATION})\s*$",
        }
    ),
]
"""A length of time, for `parse_duration`."""

RUNS = ("program", "module", "command")
"""What a job can run; it has one of them."""

# For the JSON schema alone: the loader's own errors, from `check_job`, say more.
Text = Annotated[str, Meta(extra_json_schema={"pattern": r"^[^\u0000]*$"})]
SCHEMA: dict[str, Any] = {
    "oneOf": [{"required": [key], "properties": {key: {"not": {"type": "null"}}}} for key in RUNS],
    "if": {
        "required": ["nodes"],
        "properties": {"nodes": {"type": "string", "pattern": r"^\s*0*([1-9][0-9]*):(?!0*\1\s*$)"}},
    },
    "then": {"properties": {"launcher": {"enum": ["torchrun", "auto", None]}}},
}
"""What `check_job` says of several keys at once: one thing to run; elastic jobs need torchrun."""


class Spec(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a YAML file holds: every key is known, and frozen once read."""


class BatchSpec(Spec, frozen=True, rename={"global_size": "global"}):
    """Sizes in samples; global = micro x accumulation x ranks. What is left out is worked out."""

    global_size: Count | None = None
    """Samples per optimizer step, over all ranks."""
    micro: Count | None = None
    """Samples per forward pass of one rank."""
    accumulation: Count | None = None
    """Forward passes per optimizer step."""


class CheckpointSpec(Spec, frozen=True):
    """Where, how often and how many; given to the program as CLUSTERKIT_CHECKPOINT_*."""

    dir: Annotated[Text, Meta(min_length=1)] = "checkpoints"
    """Folder; a relative one lies in the run's folder. Or `s3://BUCKET/PREFIX`, where the program
    can: `jobs/train/gpt` does."""
    every: Count = 100
    """Steps between checkpoints."""
    keep: Count = 2
    """How many of the newest are kept."""
    resume: Annotated[Text, Meta(min_length=1)] = "auto"
    """`auto` (the newest whole one in `dir`), `never`, or the path of one."""


class JobSpec(Spec, frozen=True, kw_only=True, repr_omit_defaults=True):
    """One job: a program, its arguments, how many nodes and ranks, and what they need."""

    name: Annotated[
        str, Meta(extra_json_schema={"pattern": f"^{_JOB_NAME}$", "maxLength": JOB_NAME_MAX})
    ]
    """Letters, digits, `.`, `_`, `-` and spaces, 100 at most; begins the run id."""
    description: str = ""
    """One line for people."""
    program: Text | None = None
    """Python file that every rank runs; sought from the current folder, then from the job file's
    folder upwards."""
    module: Text | None = None
    """Python module to run instead of a file (`python -m`)."""
    command: Annotated[tuple[Text, ...] | None, Meta(extra_json_schema={"minItems": 1})] = None
    """Any command to run instead, as a list of words."""
    args: tuple[Text, ...] = ()
    """Arguments of the program. `${clusterkit.NAME}` is replaced; NAME is one of global_batch,
    micro_batch, accumulation, deepspeed_config, run_id, run_dir, checkpoint_dir, world_size."""
    python: Annotated[str, Meta(min_length=1)] | None = None
    """Interpreter of the ranks: a path, or a command of the hosts; by default the cluster entry's.
    """
    launcher: Launcher | Literal["auto", "python"] = "auto"
    """What starts the ranks of one node. `auto`: torchrun for an elastic number of nodes, unless
    `on_node_loss` is `shrink`, otherwise forkserver, which `python` means, too."""
    nodes: Annotated[
        int | str,
        Meta(
            extra_json_schema={
                "minimum": 1,
                "maximum": MOST_NODES,
                "pattern": rf"^\s*(?=.*[1-9])(?!0+:){_NODES}\s*$",
            }
        ),
    ] = 1
    """How many nodes: `2`, or `"2:4"` for an elastic number."""
    gpus_per_node: Annotated[Count | Auto, Meta(extra_json_schema={"maximum": MOST_RANKS})] = "auto"
    """Ranks per node. `auto`: every GPU of the node, or one rank where there is none."""
    device: Device = "auto"
    """`auto`: GPUs when there are some, otherwise CPU threads."""
    threads_per_rank: Count | Auto = "auto"
    """OMP_NUM_THREADS of a rank. `auto`: the cores, shared between the ranks."""
    batch: BatchSpec | None = None
    """Batch sizes, in samples."""
    deepspeed: dict[str, Any] | None = None
    """A DeepSpeed config, or the path of one, from the job file's folder. Batch sizes come from
    `batch`; gradient_clipping is 0 unless given."""
    checkpoint: CheckpointSpec | None = None
    """Checkpoints and where to resume."""
    restarts: Annotated[int, Meta(ge=0)] = 0
    """How often a failed run is started again."""
    on_node_loss: Literal["wait", "shrink", "fail"] = "wait"
    """What a run with `restarts` does that loses a node, not for a rank that failed: wait, for 10
    minutes at most, until the node answers, and start again, which costs none of them; or end.
    `shrink`, with `nodes: MIN:MAX`: after some seconds the others start again without it, if they
    are at least MIN and node 0 is among them; a node that is back joins them after a checkpoint.
    That needs no `restarts` and costs none."""
    spares: Annotated[int, Meta(ge=0, le=MOST_NODES)] = 0
    """How many hosts more than `nodes` start and wait. When a node is lost and does not answer for
    some seconds, one of them takes its rank, and all ranks start again; that needs no `restarts`
    and costs none. When no spare is left, `on_node_loss` says what happens. Checkpoints have to lie
    where all hosts find them."""
    retry_on: tuple[Annotated[int, Meta(ge=1, le=255)], ...] = ()
    """Exit codes of a rank after which the run is started again (a signal N is 128 + N); by default
    any. One that failed with another ends the run, whatever `restarts` are left."""
    time_limit: Duration | None = None
    """How long the run may take, restarts included, in seconds or as `90m`, `2h`, `1d12h`; then its
    nodes end it. It counts from their start: waiting for them does not."""
    hang_timeout: Annotated[
        float | str | None,
        Meta(
            extra_json_schema={
                "minimum": 0,
                "exclusiveMaximum": LONGEST,
                "pattern": rf"^\s*({_SECONDS}|{_DURATION})\s*$",
            }
        ),
    ] = None
    """After how long without progress all ranks are ended, and start again if there are restarts
    left; written as `time_limit` is. `0`: never. By default 2 minutes or 20 steps, whichever is
    longer, if a rank waits for another one; ten times that before the first step, and while the
    one that others wait for does something else, such as a checkpoint or an evaluation."""
    env: Annotated[
        dict[str, Text], Meta(extra_json_schema={"propertyNames": {"pattern": f"^{NAME}$"}})
    ] = {}
    """Environment of every rank; values arrive exactly as written."""
    secrets: tuple[Annotated[str, Meta(extra_json_schema={"pattern": f"^{NAME}$"})], ...] = ()
    """Variables taken from the submitter's environment; never written to a file, an argument list
    or a log."""
    workdir: Text | None = None
    """Folder the ranks start in; by default where the program was found."""
    track: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ()
    """Trackers that get what rank 0 reports, written where the run is submitted: the program and
    its nodes need none of it. `tensorboard`: `tensorboard/` in the run's folder. `wandb`, `mlflow`,
    `trackio`: as their variables and logins say there, and without them on that machine alone."""

    @property
    def node_range(self) -> tuple[int, int]:
        """Smallest and largest number of nodes; equal unless the job is elastic."""
        return parse_nodes(self.nodes)

    @property
    def elastic(self) -> bool:
        low, high = self.node_range
        return low != high

    @property
    def shrinks(self) -> bool:
        """Whether the agents start fewer nodes again; else torchrun does, of an elastic job."""
        return self.on_node_loss == "shrink"

    @property
    def started_by(self) -> Launcher:
        """The launcher that is used."""
        return launcher_of(self)[0]

    @property
    def limit_seconds(self) -> float | None:
        """``time_limit`` in seconds."""
        return None if self.time_limit is None else parse_duration(self.time_limit)

    @property
    def hang_seconds(self) -> float | None:
        """``hang_timeout`` in seconds; 0: never."""
        if self.hang_timeout is None:
            return None
        return parse_duration(self.hang_timeout, "hang_timeout", zero=True)


def launcher_of(job: JobSpec) -> tuple[Launcher, str]:
    """The launcher that starts a job's ranks, and where that comes from."""
    if job.launcher == "python":
        return "forkserver", "job: launcher python"
    if job.launcher != "auto":
        return job.launcher, "job: launcher"
    if job.elastic and not job.shrinks:
        return "torchrun", f"nodes: {job.nodes} is elastic"
    return "forkserver", "the default"


def parse_nodes(nodes: int | str) -> tuple[int, int]:
    """``2`` as (2, 2) and ``"2:4"`` as (2, 4).

    Raises:
        BadInput: not of that form, below 1, or the smaller number second.
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
    if high > MOST_NODES:
        raise BadInput(f"nodes: {nodes}: a run has {MOST_NODES} nodes at most", job="nodes")
    if high < low:
        raise BadInput(
            f"nodes: {nodes}: the smaller number comes first",
            hint=f'did you mean "{high}:{low}"?',
            job="nodes",
        )
    return low, high


def parse_duration(duration: float | str, of: str = "time_limit", *, zero: bool = False) -> float:
    """``90``, ``"90s"``, ``"1.5h"`` and ``"1d2h"`` in seconds.

    Raises:
        BadInput: not of that form, or not above 0, but for ``zero``.
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
            f"{of}: {text[:40]!r} is not a length of time", hint="such as 3600, 90m, 2h, 1d12h"
        )
    if not (0 < seconds < LONGEST or (zero and seconds == 0)):
        raise BadInput(f"{of}: {text[:40]}: it has to be above 0, and finite")
    return seconds


def check_job(job: JobSpec) -> None:
    """What types alone cannot say of a job.

    Raises:
        BadInput: the message begins with the key.
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
    parse_nodes(job.nodes)
    if job.gpus_per_node != "auto" and not 1 <= job.gpus_per_node <= MOST_RANKS:
        few = "needs at least 1 rank" if job.gpus_per_node < 1 else f"has {MOST_RANKS} at most"
        raise BadInput(f"gpus_per_node: {job.gpus_per_node}: a node {few}", job="gpus_per_node")
    for key, length in (("time_limit", job.time_limit), ("hang_timeout", job.hang_timeout)):
        if length is not None:
            with about("job", key):
                parse_duration(length, key, zero=key == "hang_timeout")
    if job.shrinks and (not job.elastic or job.started_by != "forkserver"):
        other = f"launcher {job.started_by}" if job.elastic else f"nodes: {job.nodes}"
        raise BadInput(
            f"on_node_loss: shrink needs nodes: MIN:MAX and launcher: forkserver, not {other}",
            hint="torchrun goes on with fewer of nodes: MIN:MAX without it",
            job="on_node_loss",
        )
    if job.elastic and job.started_by != "torchrun" and not job.shrinks:
        raise BadInput(
            f"nodes: {job.nodes}: launcher {job.launcher} cannot run an elastic number of nodes",
            hint="launcher: torchrun, or on_node_loss: shrink with launcher: forkserver",
            job="nodes",
        )
    _check_spares(job)
    check_environment(job.env)
    for name in job.secrets:
        if not is_name(name):
            raise BadInput(
                f"secrets: {name!r} is not a valid name of an environment variable", job="secrets"
            )
    texts: list[tuple[Place, str]] = [
        ((key,), getattr(job, key) or "") for key in ("program", "module", "python", "workdir")
    ]
    if job.checkpoint is not None:
        texts += [(("checkpoint", key), getattr(job.checkpoint, key)) for key in ("dir", "resume")]
    for key in ("args", "command"):
        texts += [((key, number), word) for number, word in enumerate(getattr(job, key) or ())]
    for place, text in texts:
        with about("job", *place):
            check_text(dotted(place), text)
    twice = sorted(set(job.env) & set(job.secrets))
    if twice:
        raise BadInput(f"secrets: {twice[0]} is set in env as well", job="secrets")


def _check_spares(job: JobSpec) -> None:
    if job.spares and job.on_node_loss == "fail":
        why, hint = "on_node_loss: fail ends the run", "on_node_loss: wait, or shrink"
    elif job.spares and job.started_by != "forkserver":
        why = f"launcher {job.started_by} gives a lost node's ranks to no other"
        hint = "launcher: forkserver; of an elastic job with on_node_loss: shrink"
    else:
        return
    raise BadInput(f"spares: {job.spares}, but {why}", hint=hint, job="spares")


def check_environment(env: Mapping[str, str], source: Source = "job") -> None:
    """Refuse what cannot be an environment variable.

    Raises:
        BadInput: about ``env``.
    """
    for name, value in env.items():
        with about(source, "env", name):
            if not is_name(name):
                raise BadInput(f"env: {name!r} is not a valid name of an environment variable")
            check_text(f"env.{name}", value)


Job = str | os.PathLike[str] | JobSpec | Sequence[str]
"""What can be asked for: a job file's path, a `JobSpec`, or a command such as
``["python", "train.py", "--fast"]``."""
