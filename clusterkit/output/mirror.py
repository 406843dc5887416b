"""The files of remote nodes, copied into the run folder while the nodes write them.

They come as the frames of `report` (`clusterkit.agent`) through one stream per host, and get the
same names in the submitter's run folder: logs, status and metrics are read from there, whether the
hosts still answer or not.
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

from clusterkit.agent import Awake
from clusterkit.agent.protocol import GROWING_FILES, WHOLE_FILES
from clusterkit.errors import ClusterkitError, SubmitFailed
from clusterkit.files import locked, size_of, write_atomic
from clusterkit.transport import Stream

QUIET_SECONDS = 8.0
"""A stream that said nothing for so long (agent.HEARTBEAT_SECONDS is 2) is given up."""
AGAIN_SECONDS = 1.0
"""Pause before a host that was lost is tried again."""
BACK_SECONDS = 3.0
"""How often it is looked whether a node that has ended has come back."""
LOCK_SECONDS = 30.0
"""How long a watch waits for another process that fills the folder, before it goes on without it:
longer than `status` waits for a host."""
SWITCH_SECONDS = 5e-5
"""For each host, of the interval in which a thread that runs lets others run."""
_LARGEST = 1 << 24
"""Far more than `agent.report.report` puts into a frame."""
awake = Awake()
"""The clock by which silence is measured."""


class Frames:
    """A parser of what `clusterkit.agent.report` writes."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """The frames that are complete by now.

        Raises:
            SubmitFailed: this is not such output.
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
                raise SubmitFailed(f"a node's report cannot be read: {shown!r}") from None
            if len(self._rest) < end + 1 + size:
                return
            payload = self._rest[end + 1 : end + 1 + size]
            self._rest = self._rest[end + 1 + size :]
            yield header, payload


@dataclass
class NodeView:
    """What is known of one node.

    Args:
        folder: where its files are kept; None: in `files` alone.
        clock: seconds; those in which this process was stopped do not count.
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
    """`WHOLE_FILES`, as far as they came."""
    clock: Callable[[], float] = awake
    heard_at: float | None = None
    """When the last frame came."""
    silent_since: float | None = None
    """Since when its host has not answered; None: it answers."""
    error: ClusterkitError | None = None
    """Why it does not answer."""
    unkept: str | None = None
    """Why not all that it has sent could be written here; None: it could."""
    changes: int = 0
    """Grows with everything that tells how the node is: not with log lines, signs of life and what
    its ranks use."""

    @classmethod
    def of(cls, node: int, host: str, folder: Path) -> NodeView:
        """A view of a node as its folder here tells of it: one that had begun is taken to run until
        its host says otherwise."""
        view = cls(node, host, folder)
        for name in ("started.json", "exit.json"):
            with contextlib.suppress(OSError):
                view.files[name] = (folder / name).read_bytes()
        # That file comes last: the host need not be asked again.
        view.begun, view.ended = bool(view.files), "exit.json" in view.files
        view.alive = view.begun and not view.ended
        return view

    def silent_for(self) -> float | None:
        """Seconds for which its host has not answered; None: it does."""
        since = self.silent_since
        return None if since is None else self.clock() - since

    def offsets(self) -> dict[str, int]:
        """Bytes of the growing files that are here already; -1: not wanted."""
        if self.folder is None:
            return {"log": -1, "ranks.jsonl": len(self.files.get("ranks.jsonl", b""))}
        return {name: size_of(self.folder / name) for name in GROWING_FILES}

    def take(self, header: dict[str, Any], payload: bytes) -> None:
        """Take one frame in.

        Raises:
            ClusterkitError: its file cannot be written.
        """
        self.heard_at = self.clock()
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
                write_atomic(self.folder / name, payload)

    def _came_back(self) -> None:
        """Another agent runs there: how the one before ended is no more."""
        self.files.pop("exit.json", None)
        if self.folder is not None:
            (self.folder / "exit.json").unlink(missing_ok=True)

    def _append(self, name: str, payload: bytes) -> None:
        if self.folder is None:
            self.files[name] = self.files.get(name, b"") + payload
            return
        path = f"{self.folder}/{name}"  # a string: thousands of nodes' lines pass here
        before = None
        try:
            with open(path, "ab", buffering=0) as file:
                before = file.tell()
                while payload:
                    payload = payload[file.write(payload) :]
        except OSError as error:
            # What came half would come again.
            with contextlib.suppress(OSError):
                if before is not None:
                    os.truncate(path, before)
            raise SubmitFailed(f"cannot write {path}: {error.strerror}") from error

    def lost(self, error: ClusterkitError) -> None:
        """Its host does not answer."""
        self.error = error
        self.changes += 1
        if self.silent_since is None:
            self.silent_since = self.clock() if self.heard_at is None else self.heard_at


@contextlib.contextmanager
def keeping(view: NodeView, again: Callable[[], bool] = lambda: False) -> Iterator[NodeView]:
    """The view, without its folder if another process fills that or it cannot be written to.

    Args:
        again: waits, and says whether to try once more to lock the folder.
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
    """Take a stream's frames until it ends.

    Raises:
        ClusterkitError: it falls silent, or a frame cannot be read or written.
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
                # A full disk here must not hide how the node is: that frame is still to come.
                problem = error
            if "file" not in header:
                unkept = None if problem is None else problem.message
                if unkept != view.unkept:
                    view.unkept = unkept
                    view.changes += 1
                if problem is not None:
                    raise problem


class Watch:
    """Keeps the views of all nodes up to date, a thread and a stream per host, until closed.

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
        # Threads that wait for the interpreter ask for it once in such an interval: when a thousand
        # hosts have news at once, 5 ms would leave it little time for anything else.
        sys.setswitchinterval(max(sys.getswitchinterval(), SWITCH_SECONDS * len(views)))
        self._open, self._back = open_stream, back
        self._closed = threading.Event()
        self._streams: dict[int, Stream] = {}
        self._threads = [
            threading.Thread(target=self._watch, args=(view,), daemon=True) for view in views
        ]
        for thread in self._threads:
            thread.start()

    def _watch(self, view: NodeView) -> None:
        deadline = time.monotonic() + LOCK_SECONDS
        closed = self._closed.is_set
        with keeping(view, lambda: not self._closed.wait(0.1) and time.monotonic() < deadline):
            while not closed() and (self._back or not view.ended):
                if view.ended and self._closed.wait(BACK_SECONDS):
                    return
                try:
                    with self._open(view) as stream:
                        self._streams[view.node] = stream
                        pull(view, stream, closed)
                        if not view.ended and not closed():
                            code = stream.exit_code(QUIET_SECONDS)
                            view.known = code != 2 or view.heard_at is not None
                            said = stream.stderr.strip()[-300:]
                            raise SubmitFailed(
                                f"host {view.host}: reporting ended with {code}: {said}"
                            )
                except ClusterkitError as error:
                    if not closed():
                        view.lost(error)
                        self._closed.wait(AGAIN_SECONDS)
                except (OSError, ValueError):
                    if not closed():  # by `close`, while this thread was reading
                        raise

    def close(self) -> None:
        """Stop watching; the nodes go on."""
        self._closed.set()
        for stream in list(self._streams.values()):
            stream.close()
        for thread in self._threads:
            thread.join(2 * AGAIN_SECONDS)
