"""Progress of a project on its way to the hosts."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from clusterkit.api import Prepared, Progress


@contextmanager
def sending(ready: Prepared) -> Iterator[Progress | None]:
    """What `api.launch` reports of the bytes it has sent, as one bar over all hosts on stderr.

    None where there is nothing to send, or no terminal to draw on.
    """
    if not ready.plan.trees or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("copying the project"), BarColumn(), DownloadColumn())
    sent: dict[tuple[str, int], tuple[int, int]] = {}
    lock = threading.Lock()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("copying", total=None)

        def report(host: str, done: int, whole: int) -> None:
            with lock:
                sent[host, whole] = (done, whole)
                completed = sum(done for done, _ in sent.values())
                bar.update(task, completed=completed, total=sum(w for _, w in sent.values()))

        yield report
