"""The job files that come with clusterkit, to be copied into a project with their programs."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from clusterkit.errors import BadInput, did_you_mean
from clusterkit.files import write_new
from clusterkit.jobfile import catalogue, loader


def folder() -> Path:
    """Where they lie: in a checkout a link to its ``jobs``, in a wheel a copy of that."""
    return Path(str(resources.files("clusterkit"))) / catalogue.FOLDER


def names() -> list[str]:
    """What `example` takes."""
    return sorted(path.stem for path in catalogue.job_files(folder()))


def files_of(name: str) -> list[Path]:
    """A job file, its program with the modules and data that belong to it; below `folder`.

    Raises:
        BadInput: there is no such example.
    """
    path = folder() / f"{name}.yaml"
    if name not in names():
        raise BadInput(
            f"there is no example {name!r}", did_you_mean(name, names()) or "clusterkit examples"
        )
    job = loader.read_job(path)[0]
    assert job.program is not None
    program, programs = folder().parent / job.program, folder() / "train"
    own = program.parent != programs  # a folder of its own: all of it belongs together
    found = [*program.parent.rglob("*.py")] if own else _with_modules(program)
    others = [*programs.glob("*.py"), *(folder() / "data").glob("*.csv")]
    for file in found:  # which grows meanwhile
        text = file.read_text()
        named = [other for other in others if f'"{other.name}"' in text]
        found += [each for other in named for each in _with_modules(other) if each not in found]
    return [path, *sorted(found)]


def _with_modules(program: Path) -> list[Path]:
    return [module for module, _ in catalogue.followed(program)]


def examples() -> list[catalogue.CatalogueEntry]:
    """Every job file that comes with clusterkit, and what each needs."""
    return catalogue.entries(folder())


def example(name: str) -> list[Path]:
    """Copy one into the current folder, below ``jobs``; gives the paths there, job file first.

    Raises:
        BadInput: there is no such example, or one of its files is there with other contents.
    """
    below = Path(catalogue.FOLDER)
    here = {below / file.relative_to(folder()): file.read_bytes() for file in files_of(name)}
    write_new(here)
    return list(here)
