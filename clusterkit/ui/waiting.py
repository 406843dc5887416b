"""What is waited for, how long already, and where that is known how long yet: on stderr."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from clusterkit.ui.words import duration, printable

PATIENCE = 1.0
"""Seconds after which a wait is told of."""


class Waiting:
    """Words for what is being done, and how much of it is done."""

    def __init__(self, words: str) -> None:
        self.say(words)
        self._begun = time.monotonic()
        self._sent: dict[tuple[str, int], int] = {}
        self._first: tuple[float, int] | None = None
        """When bytes were counted first, and how many there were."""
        self._lock = threading.Lock()

    def say(self, words: str) -> None:
        """Something else is waited for."""
        self.words = printable(" ".join(words.split()), colours=False)

    def sent(self, host: str, done: int, whole: int) -> None:
        """As `clusterkit.api.Progress`: bytes sent to a host so far, and to send."""
        with self._lock:
            self._sent[host, whole] = done
            self._first = self._first or (time.monotonic(), done)

    def so_far(self) -> str:
        """How long already, or bytes, rate and time left."""
        now = time.monotonic()
        with self._lock:
            done, whole = sum(self._sent.values()), sum(whole for _, whole in self._sent)
        if self._first is None or not whole:
            return duration(now - self._begun)
        from rich.filesize import decimal

        if done == whole:  # what the hosts do with it is not in bytes
            return f"{decimal(whole)} sent  {duration(now - self._begun)}"
        text = f"{decimal(done)} of {decimal(whole)}"
        since, before = self._first
        if done <= before or now <= since:
            return text
        rate = (done - before) / (now - since)
        return f"{text}  {decimal(int(rate))}/s  {duration((whole - done) / rate)} left"


@contextmanager
def waiting(words: str, *, plain: bool = False) -> Iterator[Waiting]:
    """Tell of a wait once it takes over a second; nothing may be printed on stdout meanwhile.

    Args:
        plain: without a terminal a line is said, once.
    """
    told = Waiting(words)
    done = threading.Event()

    def tell() -> None:
        if done.wait(PATIENCE):
            return
        # FORCE_COLOR makes a terminal of any file for rich; closed, it is None.
        if sys.stderr is None or not sys.stderr.isatty():
            if plain and sys.stderr is not None:
                print(told.words, file=sys.stderr)
            return
        from rich.console import Console
        from rich.text import Text

        console = Console(stderr=True, highlight=False)
        with console.status("") as status:
            while True:
                words, rest = Text(told.words), f"  {told.so_far()}"
                words.truncate(max(20, console.width - 3 - len(rest)), overflow="ellipsis")
                status.update(words.append(rest))
                if done.wait(0.1):
                    return

    teller = threading.Thread(target=tell, name="waiting", daemon=True)
    teller.start()
    try:
        yield told
    finally:
        done.set()
        teller.join()
