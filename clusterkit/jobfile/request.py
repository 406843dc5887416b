"""Read the job that is submitted: a file, a command or a spec, with settings and flags applied."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from clusterkit.agent import LOCAL_RANK_WORD
from clusterkit.errors import BadInput
from clusterkit.jobfile import command, loader, prefixes, sources, values
from clusterkit.jobfile.arguments import checked
from clusterkit.jobfile.yaml_file import Document
from clusterkit.spec import Job, JobSpec, check_job


@dataclass(frozen=True)
class Request:
    """A job that has been read and checked, and where its keys come from."""

    job: JobSpec
    document: Document
    """The job's file; without a name for a command or a spec."""
    flags: Mapping[str, str]
    """Keys of the job that a flag has set, and the flag; arguments after --, and that."""
    remark: str | None = None
    """Remark on the job for the plan."""
    several_ranks: str | None = None
    """Another one, for a plan with several ranks on a node."""
    missing: BadInput | None = None
    """Error for the file of a command that is not on this machine; the cluster may have it."""

    def remarks(self, topology: Mapping[str, int]) -> list[str]:
        """Return the remarks on the job for a plan with this topology."""
        several = self.several_ranks if topology.get("nproc_per_node", 1) > 1 else None
        return [remark for remark in (self.remark, several) if remark is not None]

    def locating(
        self, cluster: loader.LoadedCluster | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Add places to errors about the job, as `clusterkit.jobfile.loader.locating`."""
        return loader.locating(self.document, cluster, self.flags)


@checked
def read(
    job: Job,
    settings: Sequence[str] = (),
    nodes: int | str | None = None,
    gpus: int | None = None,
    more_args: Sequence[str] = (),
    cluster: str = "local",
) -> Request:
    """Read a job, apply settings and flags, take over its launcher, find its program.

    Args:
        job: a path, a spec or a command's words.
        settings: as `clusterkit.jobfile.loader.read_job`.
        nodes: ``--nodes``; None: as the job says.
        gpus: ``--gpus``, ranks of a node; None: as the job says.
        more_args: arguments to append to the program's.
        cluster: name of the cluster, for a hint with the command line to type instead.

    Raises:
        BadInput: anything wrong with the job.
    """
    left = missing = None
    if isinstance(job, (str, os.PathLike)):
        spec, document = loader.read_job(Path(job), settings)
        keys = list(document.data)
    else:
        if not isinstance(job, JobSpec):
            words = _words(job)
            job, left = loader.job_from_command(words), prefixes.peel(words, programs=False).remark
        document = values.document_of(job)
        for setting in settings:
            loader.apply_setting(document, setting)
        document.include("deepspeed", Path())
        spec = values.convert(document, (), document.data, JobSpec)
        keys = list(msgspec.to_builtins(spec))
    given = {key: f"{key}: {getattr(spec, key)}" for key in keys if hasattr(spec, key)}
    flags: dict[str, str] = {}
    typed = [] if cluster == "local" else ["--cluster", cluster]
    for key, flag, value in (("nodes", "--nodes", nodes), ("gpus_per_node", "--gpus", gpus)):
        if value is not None:
            flags[key], given[key] = flag, f"{flag} {value}"
            typed += [flag, str(value)]
    typed += [word for setting in settings for word in ("--set", setting)]
    flags |= {f"args[{len(spec.args) + number}]": "after --" for number in range(len(more_args))}
    with Request(spec, document, flags).locating():
        spec = msgspec.structs.replace(
            spec,
            args=(*spec.args, *more_args),
            nodes=spec.nodes if nodes is None else _as_number(nodes),
            gpus_per_node=spec.gpus_per_node if gpus is None else gpus,
        )
        check_job(spec)
        from_file = bool(document.name)
        environ = None if from_file else os.environ
        taken = command.take_over(spec, given, None if from_file else typed, environ)
        spec = taken.job
        check_job(spec)
        if spec.workdir is None or from_file:
            spec, missing = loader.find_program(spec, document if from_file else None)
        note, texts = taken.note or left, []
        if spec.program or taken.local_rank:
            texts = [text for _, text in sources.imported(*sources.starts_of(spec))]
        if taken.local_rank:
            name = sources.local_rank_argument(taken.local_rank, texts)
            argument = f"{name}={LOCAL_RANK_WORD}"
            spec = msgspec.structs.replace(spec, args=(argument, *spec.args))
            note = f"{note}; each rank gets {name}"
        several_ranks = command.check_source(spec, texts[0] if texts else "")
    return Request(spec, document, flags, note, several_ranks, missing)


def spec_of(
    job: Job | None,
    settings: Sequence[str],
    nodes: int | str | None,
    gpus: int | None,
    more_args: Sequence[str] = (),
) -> JobSpec | None:
    """Return the job of `read`; without one, only check ``nodes`` and ``gpus``."""
    if job is None and nodes is None and gpus is None:
        return None
    if job is None:
        job, settings = JobSpec(name="any", command=("true",)), ()
    return read(job, settings, nodes, gpus, more_args).job


def _words(job: object) -> Sequence[str]:
    """Return a job that is a command.

    Raises:
        BadInput: it is not a list of text.
    """
    if isinstance(job, list | tuple) and all(isinstance(word, str) for word in job):
        return job
    shown = repr(job)[:80]
    raise BadInput(
        f"job: {shown} is neither a path nor a JobSpec nor a list of a command's words",
        'submit("job.yaml"), submit(["python", "train.py"]), or submit(JobSpec(...))',
    )


def _as_number(nodes: int | str) -> int | str:
    """Return ``--nodes 2`` as the number of `nodes: 2`, so that both give the same plan."""
    text = str(nodes)
    return int(text) if text.isascii() and text.isdecimal() else nodes
