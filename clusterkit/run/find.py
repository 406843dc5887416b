"""Find runs under CLUSTERKIT_HOME by an id, a prefix of one, or ``last``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from clusterkit.errors import RunFolderError, RunNotFound, join_some
from clusterkit.jobfile.arguments import checked
from clusterkit.run.folder import HOME_HINT, LAST, RUN_ID, RunFolder, home

_TIMESTAMP = re.compile(r"-\d{10}-")
"""In the ids that `new_run_id` makes."""


def all_runs() -> Iterator[RunFolder]:
    """Yield every run folder, newest first, but not the folders of `plan -o`."""
    base = home() / "runs"
    try:
        folders = [entry for entry in os.scandir(base) if entry.is_dir() and not _is_plan(entry)]
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunFolderError(f"cannot read {base}: {error.strerror}", hint=HOME_HINT) from error
    paths = [Path(entry.path) for entry in folders]
    yield from map(RunFolder, sorted(paths, key=_created, reverse=True))


def _is_plan(folder: os.DirEntry[str]) -> bool:
    # What `plan -o` writes has neither of these files.
    ours = (os.path.exists(f"{folder.path}/{name}") for name in ("run.json", "job.json"))
    return not any(ours) and os.path.exists(f"{folder.path}/plan.txt")


def _created(path: Path) -> float:
    # run.json is written once, when the run is made.
    try:
        return (path / "run.json").stat().st_mtime
    except OSError:
        return path.stat().st_mtime if path.exists() else 0.0


@checked
def find_run(name: str) -> RunFolder:
    """Return the run with this id, the only one whose id begins so, or the newest for ``last``.

    Raises:
        RunNotFound: none, or several; the message lists candidates.
    """
    exact = home() / "runs" / name
    # os.path: False, not an error, for a folder of another user; all_runs() reports that.
    if RUN_ID.match(name) and os.path.isdir(exact):
        return RunFolder(exact)
    ids = [run.run_id for run in all_runs()]
    where = f"under {home() / 'runs'}"
    if _TIMESTAMP.search(name) and not any(each.startswith(name) for each in ids):
        raise RunNotFound(
            f"run {name!r} is unknown {where}",
            hint=f"another machine's, on Kubernetes: clusterkit attach {name} --cluster CLUSTER",
        )
    return RunFolder(home() / "runs" / resolve_id(name, ids, where))


def resolve_id(name: str, ids: Sequence[str], where: str) -> str:
    """Return ``name`` if it is one of the ids, the only id that begins so, or the first for
    ``last``. Pure.

    Args:
        ids: newest first.
        where: where they were found, for the message.

    Raises:
        RunNotFound: none, or several; the message lists candidates.
    """
    if name in ids:
        return name
    if name == LAST and ids:
        return ids[0]
    matching = [each for each in ids if each.startswith(name)] if name else []
    if len(matching) == 1:
        return matching[0]
    if matching:
        shown = join_some(matching, 5)
        raise RunNotFound(f"run {name!r} is ambiguous: {shown}", hint="give more of its id")
    raise RunNotFound(
        f"run {name!r} is unknown {where}",
        hint=f"the newest runs: {', '.join(ids[:3])}" if ids else "there are no runs",
    )
