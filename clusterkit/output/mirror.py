"""Copies the files of remote nodes into the run folder while the nodes write them.

They are received as frames of `clusterkit.agent.report`, through one stream per host, and have the
same names in the submitter's run folder, where logs, status and metrics can be read whether the
hosts answer or not.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterkit.agent import PauseAwareClock
from clusterkit.agent.protocol import GROWING_FILES, WHOLE_FILES
from clusterkit.errors import ClusterkitError, SubmitFailed, Unavailable
from clusterkit.files import locked, size_of, write_atomic
from clusterkit.transport import Stream

QUIET_SECONDS = 8.0
"""Timeout of a stream without data (agent.HEARTBEAT_SECONDS is 2)."""
AGAIN_SECONDS = 1.0
"""Pause before a host that was lost is tried again."""
LONGEST_PAUSE = 30.0
"""The longest pause after errors in a row on this machine."""
BACK_SECONDS = 3.0
"""How often to check whether a node that has ended has come back."""
LOCK_SECONDS = 30.0
"""How long a watch waits for another process that writes to the folder, before it continues without
it: longer than `status` waits for a host."""
SWITCH_SECONDS = 5e-5
"""Part of Python's thread switch interval for each host."""
_LARGEST = 1 << 24
"""Far more than `agent.report.report` writes in a frame."""
awake = PauseAwareClock()
"""The clock that measures silence: seconds in which this process was stopped do not count."""


class Unreadable(SubmitFailed):
    """A host answers, but not with a report."""

    answered = True


class Frames:
    """A parser of the output of `clusterkit.agent.report`."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Yield the header and payload of each frame that is complete now.

        Raises:
            SubmitFailed: the data is not such output.
        """
        self._rest += data
        while (end := self._rest.find(b"\n")) >= 0:
            try:
                header = json.loads(self._rest[:end])
                size = int(header["bytes"])
                if not 0 <= size <= _LARGEST:
                    raise ValueError(size)
            except (ValueError, KeyError, TypeError, RecursionError):
                shown = self._rest[:200].decode(errors="replace")
                raise Unreadable(f"a node's report cannot be read: {shown!r}") from None
            if len(self._rest) < end + 1 + size:
                return
            payload = self._rest[end + 1 : end + 1 + size]
            self._rest = self._rest[end + 1 + size :]
            yield header, payload


@dataclass
class NodeView:
    """The state and files of one node.

    Args:
        folder: where its files are written; None: in `files` only.
        clock: a clock like `awake`.
    """

    node: int
    host: str
    folder: Path | None = None
    known: bool = True
    """Whether its host has the run's folder."""
    begun: bool = False
    alive: bool = False
    ended: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    """`WHOLE_FILES` that were received."""
    clock: Callable[[], float] = awake
    received_at: float | None = None
    """When the last frame was received."""
    silent_since: float | None = None
    """Since when its host has not answered; None: it answers."""
    error: ClusterkitError | None = None
    """Why it does not answer, or its answer cannot be used."""
    away: bool = False
    """Whether it was silent while no host answered: this machine was cut off, perhaps."""
    write_error: str | None = None
    """Why a file could not be written; None: all were."""
    changes: int = 0
    """Grows with every change of the node's state: not with log lines, heartbeats and usage."""

    @classmethod
    def of(cls, node: int, host: str, folder: Path) -> NodeView:
        """Read a view from the node's folder. A node that had begun is assumed to run until its
        host reports."""
        view = cls(node, host, folder)
        for name in ("started.json", "exit.json"):
            with contextlib.suppress(OSError):
                view.files[name] = (folder / name).read_bytes()
        # exit.json is sent last: the host need not be asked again.
        view.begun, view.ended = bool(view.files), "exit.json" in view.files
        view.alive = view.begun and not view.ended
        return view

    def silent_for(self) -> float | None:
        """Return for how many seconds its host has not answered; None: it answers."""
        since = self.silent_since
        return None if since is None else self.clock() - since

    def offsets(self) -> dict[str, int]:
        """Return how many bytes of each growing file are already copied; -1: none are wanted."""
        if self.folder is None:
            return {"log": -1, "ranks.jsonl": len(self.files.get("ranks.jsonl", b""))}
        return {name: size_of(self.folder / name) for name in GROWING_FILES}

    def take(self, header: dict[str, Any], payload: bytes) -> None:
        """Process a frame.

        Raises:
            ClusterkitError: its file cannot be written.
        """
        self.received_at = self.clock()
        if self.silent_since is not None:
            self.silent_since, self.error = None, None
            self.changes += 1
        if (name := header.get("file")) is None:
            state = [bool(header.get(word)) for word in ("begun", "alive", "ended")]
            if state != [self.begun, self.alive, self.ended]:
                if self.ended and not state[2]:
                    self._came_back()
                self.begun, self.alive, self.ended = state
                self.changes += 1
        elif name in GROWING_FILES:
            self._append(name, payload)
        elif name in WHOLE_FILES:
            self.files[name] = payload
            self.changes += name != "usage.json"
            if self.folder is not None:
                write_atomic(self.folder / name, payload, 0o644)

    def _came_back(self) -> None:
        # Another agent runs there: how the previous one ended is obsolete.
        self.files.pop("exit.json", None)
        if self.folder is not None:
            (self.folder / "exit.json").unlink(missing_ok=True)

    def _append(self, name: str, payload: bytes) -> None:
        if self.folder is None:
            self.files[name] = self.files.get(name, b"") + payload
            return
        path = f"{self.folder}/{name}"  # a string: faster, for the lines of thousands of nodes
        before = None
        try:
            with open(path, "ab", buffering=0) as file:
                before = file.tell()
                while payload:
                    payload = payload[file.write(payload) :]
        except OSError as error:
            # The whole payload is sent again.
            with contextlib.suppress(OSError):
                if before is not None:
                    os.truncate(path, before)
            raise SubmitFailed(f"cannot write {path}: {error.strerror}") from error

    def lost(self, error: ClusterkitError) -> None:
        """Record that its host does not answer."""
        self.error = error
        self.changes += 1
        if self.silent_since is None:
            self.silent_since = self.clock() if self.received_at is None else self.received_at


@contextlib.contextmanager
def folder_lock(view: NodeView, again: Callable[[], bool] = lambda: False) -> Iterator[NodeView]:
    """Lock the view's folder. Without a folder if another process writes to it or it is read-only.

    Args:
        again: waits, and returns whether to try once more to lock the folder.
    """
    folder = view.folder
    with contextlib.ExitStack() as stack:
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context((folder / ".mirror").open("wb"))
                while not locked(lock):
                    if not again():
                        view.folder = None
                        break
        except OSError:
            view.folder = None
        try:
            yield view
        finally:
            view.folder = folder


def pull(view: NodeView, stream: Stream, stop: Callable[[], bool] = lambda: False) -> None:
    """Process a stream's frames until it ends.

    Raises:
        ClusterkitError: it times out, or a frame cannot be read or written.
    """
    frames = Frames()
    problem: ClusterkitError | None = None
    while not stop():
        data = stream.read(QUIET_SECONDS)
        if not data:
            return
        for header, payload in frames.feed(data):
            try:
                if problem is None or header.get("file") not in GROWING_FILES:
                    view.take(header, payload)
            except ClusterkitError as error:
                # A full disk here must not hide the node's state, which is in a later frame.
                problem = error
            if "file" not in header:
                write_error = None if problem is None else problem.message
                if write_error != view.write_error:
                    view.write_error = write_error
                    view.changes += 1
                if problem is not None:
                    raise problem


class Watch:
    """Updates the views of all nodes until closed, with a thread and a stream per host.

    Args:
        views: one per node.
        open_stream: starts `report --follow` for a view.
        back: whether a node that has ended may come back.
    """

    def __init__(
        self,
        views: Sequence[NodeView],
        open_stream: Callable[[NodeView], Stream],
        back: bool = False,
    ) -> None:
        self.views = views
        # Each waiting thread requests the interpreter once in such an interval: when a thousand
        # hosts send at once, 5 ms would leave little time for anything else.
        sys.setswitchinterval(max(sys.getswitchinterval(), SWITCH_SECONDS * len(views)))
        self._open, self._back = open_stream, back
        self._closed = threading.Event()
        self._streams: dict[int, Stream] = {}
        self._threads = [
            threading.Thread(target=self._watch, args=(view,), daemon=True) for view in views
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:  # can't start new thread
            self.close()
            raise Unavailable(f"this machine cannot follow {len(views)} hosts: {error}") from error

    def _watch(self, view: NodeView) -> None:
        """Follow a host until closed. Whatever goes wrong here is tried again: a thread that ended
        would leave the node's last state for ever."""
        pause = AGAIN_SECONDS
        while not self._closed.is_set():
            try:
                return self._follow(view)
            except Exception as error:  # ESTALE, no memory, a bug
                if not self._closed.is_set():  # `close` closes the stream while this thread reads
                    why = f"{type(error).__name__}: {error}"
                    view.lost(Unavailable(f"the copy of node {view.node}'s files stopped: {why}"))
                self._closed.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    def _follow(self, view: NodeView) -> None:
        deadline = time.monotonic() + LOCK_SECONDS
        closed = self._closed.is_set
        with folder_lock(view, lambda: not self._closed.wait(0.1) and time.monotonic() < deadline):
            while not closed() and (self._back or not view.ended):
                if view.ended and self._closed.wait(BACK_SECONDS):
                    return
                try:
                    with self._open(view) as stream:
                        self._streams[view.node] = stream
                        pull(view, stream, closed)
                        if not view.ended and not closed():
                            code = stream.exit_code(QUIET_SECONDS)
                            view.known = code != 2 or view.received_at is not None
                            stderr = stream.stderr.strip()[-300:]
                            raise Unreadable(
                                f"host {view.host}: reporting ended with {code}: {stderr}"
                            )
                except ClusterkitError as error:
                    if not closed():
                        view.lost(error)
                        self._closed.wait(AGAIN_SECONDS)

    def close(self) -> None:
        """Stop watching; the nodes continue."""
        self._closed.set()
        for stream in list(self._streams.values()):
            stream.close()
        deadline = time.monotonic() + 2 * AGAIN_SECONDS
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
