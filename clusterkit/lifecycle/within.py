"""The verbs that look inside a run, as functions of `clusterkit.api`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from clusterkit.lifecycle.copying import parse
from clusterkit.lifecycle.run import Run, get

if TYPE_CHECKING:
    from clusterkit.lifecycle.forwarding import Forward
    from clusterkit.lifecycle.inside import Stacks
    from clusterkit.transport import Completed


def exec(run: str | Run, argv: Sequence[str], **options: Any) -> Completed:
    """Run a command beside the ranks of a run; see `Run.exec`."""
    return get(run).exec(argv, **options)


def stack(run: str | Run, rank: int | None = None) -> Stacks:
    """Return where the ranks of a run are now; see `Run.stack`."""
    return get(run).stack(rank)


def cp(source: str, dest: str, **options: Any) -> None:
    """Copy a file from a node of a run or to it; one of the two is ``RUN:PATH``.

    Options as of `Run.download`.
    """
    run, there, goal = parse(source, dest)
    if there is not None:
        get(run).download(there, dest, **options)
    else:
        get(run).upload(source, str(goal), **options)


def forward(run: str | Run, port: int, **options: Any) -> Forward:
    """Make a port of a node one of this machine; see `Run.forward`."""
    return get(run).forward(port, **options)
