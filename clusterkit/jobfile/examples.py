"""The examples that come with clusterkit: job files to copy into a project with their programs."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from clusterkit.errors import BadInput, did_you_mean
from clusterkit.files import write_new
from clusterkit.jobfile import catalogue, loader
from clusterkit.jobfile.arguments import checked


def folder() -> Path:
    """Return the folder of the examples: ``jobs`` of the checkout, or its copy in a wheel."""
    return Path(str(resources.files("clusterkit"))) / catalogue.FOLDER


def names() -> list[str]:
    """Return the names that `example` accepts."""
    return [path.stem for path in catalogue.job_files(folder())]


def files_of(name: str) -> list[Path]:
    """Return the paths of a job file, its program, and the modules and data that this needs.

    The folder's README comes along.

    Args:
        name: of the job, or ``FOLDER/NAME`` as `clusterkit jobs` prints it.

    Raises:
        BadInput: there is no such example.
    """
    paths = catalogue.job_files(folder())
    known = {each.stem: each for each in paths}
    known |= {f"{each.parent.name}/{each.stem}": each for each in paths}
    if name not in known:
        raise BadInput(
            f"there is no example {name!r}",
            did_you_mean(name, names()) or "clusterkit jobs --examples",
        )
    path = known[name]
    job = loader.read_job(path)[0]
    assert job.program is not None
    program = folder().parent / job.program
    own = program.parent.parent != folder()  # a program with a folder of its own needs all of it
    found = [*program.parent.rglob("*.py")] if own else _with_modules(program)
    others = [*folder().glob("*/*.py"), *(folder() / "data").glob("*.csv")]
    for file in found:  # the loop appends to it
        text = file.read_text()
        named = [other for other in others if f'"{other.name}"' in text]
        found += [each for other in named for each in _with_modules(other) if each not in found]
    return [path, *sorted([*found, *path.parent.glob("README.md")])]


def _with_modules(program: Path) -> list[Path]:
    return [module for module, _ in catalogue.followed(program)]


def examples() -> list[catalogue.CatalogueEntry]:
    """Return an entry for every example: its job and what it needs."""
    return catalogue.entries(folder())


@checked
def example(name: str) -> list[Path]:
    """Copy an example to ``jobs`` in the current folder.

    Returns:
        The paths of the copies, the job file first.

    Raises:
        BadInput: there is no such example, or one of the files exists with other contents.
    """
    target = Path(catalogue.FOLDER)
    copies = {target / file.relative_to(folder()): file.read_bytes() for file in files_of(name)}
    write_new(copies)
    return list(copies)
