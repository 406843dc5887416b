"""The job that somebody asks for: a file, a command or a spec, with settings and flags applied."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from clusterkit.errors import BadInput
from clusterkit.files import source_of
from clusterkit.jobfile import command, loader
from clusterkit.spec import Job, JobSpec, check_job
from clusterkit.yaml_file import Document


@dataclass(frozen=True)
class Request:
    """A job that can be planned, and where its keys come from."""

    job: JobSpec
    document: Document | None
    """The file that it stands in, if any."""
    flags: Mapping[str, str]
    """Keys of the job that a flag has given."""
    remarks: tuple[str, ...] = ()
    """What is to be said of it in the plan."""

    def locating(
        self, cluster: loader.LoadedCluster | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """As `clusterkit.jobfile.loader.locating`."""
        return loader.locating(self.document, cluster, self.flags)


def read(
    job: Job,
    settings: Sequence[str] = (),
    nodes: int | str | None = None,
    gpus: int | None = None,
    more_args: Sequence[str] = (),
    cluster: str = "local",
) -> Request:
    """Read a job, apply settings and flags, read its command, find its program.

    Args:
        cluster: what it is asked for with, for the line to type that an error may end with.

    Raises:
        BadInput: anything wrong with it.
    """
    document: Document | None = None
    if isinstance(job, (str, os.PathLike)):
        spec, document = loader.read_job(Path(job), settings)
        keys = list(document.data)
    else:
        if isinstance(job, Mapping):  # its keys would be taken for the words of a command
            raise BadInput(
                "a job is a path, a JobSpec or a command's words, not a mapping",
                "msgspec.convert(job, clusterkit.spec.JobSpec)",
            )
        spec = job if isinstance(job, JobSpec) else loader.job_from_command(list(job))
        if settings:
            changes = Document("--set", msgspec.to_builtins(spec), {})
            for setting in settings:
                loader.apply_setting(changes, setting)
            spec = loader.convert(changes, (), changes.data, JobSpec)
        keys = list(msgspec.to_builtins(spec))
    given = {key: f"{key}: {getattr(spec, key)}" for key in keys if hasattr(spec, key)}
    flags: dict[str, str] = {}
    typed = [] if cluster == "local" else ["--cluster", cluster]
    for key, flag, value in (("nodes", "--nodes", nodes), ("gpus_per_node", "--gpus", gpus)):
        if value is not None:
            flags[key], given[key] = flag, f"{flag} {value}"
            typed += [flag, str(value)]
    typed += [word for setting in settings for word in ("--set", setting)]
    with Request(spec, document, flags).locating():
        spec = msgspec.structs.replace(
            spec,
            args=(*spec.args, *more_args),
            nodes=spec.nodes if nodes is None else _as_number(nodes),
            gpus_per_node=spec.gpus_per_node if gpus is None else gpus,
        )
        check_job(spec)
        taken = command.take_over(spec, given, None if document else typed)
        spec = taken.job
        check_job(spec)
        if spec.workdir is None or document is not None:
            spec = loader.locate_program(spec, document)
        text = source_of(Path(spec.workdir or "", spec.program)) if spec.program else ""
        remark = command.check_source(taken, text)
    remarks = tuple(said for said in (taken.note, remark) if said is not None)
    return Request(spec, document, flags, remarks)


def _as_number(nodes: int | str) -> int | str:
    """``--nodes 2`` as `nodes: 2`, so that one plan comes of both."""
    text = str(nodes)
    return int(text) if text.isascii() and text.isdecimal() else nodes
