"""List the job files of a project and what each needs, without running or importing anything."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from clusterkit.errors import BadInput, pluralize
from clusterkit.jobfile import loader, sources
from clusterkit.spec import JobSpec

FOLDER = "jobs"
_JOB = re.compile(r"^(program|module|command)\s*:", re.MULTILINE)
"""A key that every job has, and few other YAML files."""


class CatalogueEntry(Struct, frozen=True):
    """A job file; if it cannot be read, ``error`` says why and most fields are empty.

    Attributes:
        path: relative to the current folder where possible.
        nodes: ``2``, or ``1:4``.
        ranks: how many ranks can run it, for people.
        device: ``GPUs``, ``CPU`` or ``GPUs or CPU``.
        packages: as `packages`.
    """

    name: str
    path: str
    description: str = ""
    nodes: str = ""
    ranks: str = ""
    device: str = ""
    packages: tuple[str, ...] = ()
    error: str | None = None

    @property
    def label(self) -> str:
        """Return its name, with the folder in jobs/ that it is in."""
        parent = Path(self.path).parent.name
        return self.name if parent == FOLDER else f"{parent}/{self.name}"


def find_folder() -> Path:
    """Return the nearest ``jobs`` folder with a job file, in the current folder or above.

    Raises:
        BadInput: there is none.
    """
    current = loader.current_folder()
    for base in (current, *current.parents):
        if job_files(base / FOLDER):
            return base / FOLDER
    raise BadInput(
        f"there is no folder {FOLDER}/ with job files in {current} or above",
        hint="clusterkit init writes a job file, clusterkit jobs --examples lists some to copy",
    )


def entries(folder: Path) -> list[CatalogueEntry]:
    """Return an entry for every job file of a folder; those of folders in it come last."""
    return [_entry(path) for path in job_files(folder)]


def packages(job: JobSpec) -> tuple[str, ...]:
    """Return the top-level modules that a job's launcher, config and program import, sorted.

    Python's standard library and clusterkit are left out, and DeepSpeed unless the job's launcher
    or config needs it, as programs may import it on demand. Commands and modules are not read.
    """
    wanted = {"torch"} if job.started_by == "torchrun" else set()
    if job.program is not None:
        (program, *_), _ = sources.starts_of(job)
        wanted |= {name for _, names in followed(Path(program)) for name in names}
    wanted.discard("deepspeed")
    if job.started_by == "deepspeed" or job.deepspeed is not None:
        wanted |= {"torch", "deepspeed"}
    return tuple(sorted(wanted))


def job_files(folder: Path) -> list[Path]:
    """Return the YAML files of a folder by name, then those of each folder in it that are jobs.

    A folder in it may have other YAML files, such as settings of a program.
    """
    here = [*folder.glob("*.y*ml"), *filter(_is_job, folder.glob("*/*.y*ml"))]
    found = [path for path in here if path.suffix in (".yaml", ".yml")]
    return sorted(found, key=lambda path: (path.parent != folder, path.parent, path.stem))


def _is_job(path: Path) -> bool:
    try:
        return bool(_JOB.search(path.read_text(errors="replace")))
    except OSError:
        return False


def _entry(path: Path) -> CatalogueEntry:
    current = loader.current_folder()
    shown = path.relative_to(current) if path.is_relative_to(current) else path
    try:
        job = loader.load_job(shown)
    except BadInput as error:
        return CatalogueEntry(name=path.stem, path=str(shown), error=error.message)
    return CatalogueEntry(
        name=job.name,
        path=str(shown),
        description=job.description,
        nodes=str(job.nodes),
        ranks=_ranks(job),
        device={"auto": "GPUs or CPU", "cuda": "GPUs", "cpu": "CPU"}[job.device],
        packages=packages(job),
    )


def _ranks(job: JobSpec) -> str:
    batch = job.batch
    if batch is not None and batch.global_size is not None:
        shared = batch.global_size // ((batch.micro or 1) * (batch.accumulation or 1))
        return f"a divisor of {shared}"
    low, high = job.node_range
    if job.gpus_per_node == "auto":
        return "any number"
    if low == high:
        return pluralize(low * job.gpus_per_node, "rank")
    return f"{low * job.gpus_per_node} to {high * job.gpus_per_node} ranks"


def followed(program: Path) -> Iterator[tuple[Path, set[str]]]:
    """Yield a program and each module next to it that it imports, with their other imports."""
    folder = program.parent
    for path, text in sources.imported([str(program)], [str(folder)]):
        names = {names[0] for level, names in sources.imports(text) if not level}
        names -= {*sys.stdlib_module_names, "clusterkit"}
        own = {name for name in names if (folder / name).is_dir()}
        own |= {name for name in names if (folder / f"{name}.py").is_file()}
        yield Path(path), names - own
