"""A spinner on stderr for what takes longer than a second, with the time or the bytes so far."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from clusterkit.ui.formatting import duration, printable

DELAY_SECONDS = 1.0
"""How long the work may take before the spinner appears."""


class Spinner:
    """The text and the progress that `spinner` shows."""

    def __init__(self, text: str) -> None:
        self.update(text)
        self._started = time.monotonic()
        self._sent: dict[tuple[str, int], int] = {}
        self._first: tuple[float, int] | None = None
        """When bytes were reported first, and how many."""
        self._lock = threading.Lock()

    def update(self, text: str) -> None:
        """Show another text."""
        self.text = printable(" ".join(text.split()), colours=False)

    def report_sent(self, host: str, done: int, whole: int) -> None:
        """Record bytes sent to a host so far, and in all; a `clusterkit.api.Progress`."""
        with self._lock:
            self._sent[host, whole] = done
            self._first = self._first or (time.monotonic(), done)

    def progress(self) -> str:
        """Return the bytes sent, rate and time left, or without bytes the time so far."""
        now = time.monotonic()
        with self._lock:
            done, whole = sum(self._sent.values()), sum(whole for _, whole in self._sent)
        if self._first is None or not whole:
            return duration(now - self._started)
        from rich.filesize import decimal

        if done == whole:  # the hosts still unpack it, for which there is no rate
            return f"{decimal(whole)} sent  {duration(now - self._started)}"
        text = f"{decimal(done)} of {decimal(whole)}"
        since, before = self._first
        if done <= before or now <= since:
            return text
        rate = (done - before) / (now - since)
        return f"{text}  {decimal(int(rate))}/s  {duration((whole - done) / rate)} left"


@contextmanager
def spinner(text: str, *, plain: bool = False) -> Iterator[Spinner]:
    """Show a spinner while the block runs; the block must print nothing on stdout.

    Args:
        plain: without a terminal, print the text once; otherwise nothing is shown there.
    """
    shown = Spinner(text)
    done = threading.Event()
    thread = threading.Thread(target=_draw, args=(shown, done, plain), name="spinner", daemon=True)
    thread.start()
    try:
        yield shown
    finally:
        done.set()
        thread.join()


def _draw(shown: Spinner, done: threading.Event, plain: bool) -> None:
    if done.wait(DELAY_SECONDS):
        return
    # Not rich's is_terminal, which FORCE_COLOR turns on for any file. Closed, stderr is None.
    if sys.stderr is None or not sys.stderr.isatty():
        if plain and sys.stderr is not None:
            print(shown.text, file=sys.stderr)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    with console.status("") as status:
        while True:
            text, rest = Text(shown.text), f"  {shown.progress()}"
            text.truncate(max(20, console.width - 3 - len(rest)), overflow="ellipsis")
            status.update(text.append(rest))
            if done.wait(0.1):
                return
