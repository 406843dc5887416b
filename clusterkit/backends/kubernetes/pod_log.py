"""The logs of a run's pods, copied into its folder: while they are written, or once."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from clusterkit.agent import NODE_FILE, next_attempt
from clusterkit.backends.kubernetes.api_server import PARALLEL_REQUESTS, AnswerStream, RunObjects
from clusterkit.backends.kubernetes.pod import Pod, read_pod
from clusterkit.errors import ClusterkitError, RunFolderError
from clusterkit.files import write_atomic
from clusterkit.output.mirror import NodeView, folder_lock
from clusterkit.run.folder import RunFolder, RunHandle
from clusterkit.run.logs import HEAD
from clusterkit.transport import Transport

RETRY_SECONDS = 1.0
LOG_SECONDS = 15.0
"""How long to wait for the rest of the log of a pod that has ended."""
QUIET_SECONDS = 60.0
"""After how long a stream on which nothing comes is opened anew: one that a load balancer has
dropped says nothing either, nor does the server for two minutes of a node that was just lost."""
LAST_SECONDS = 3.0
"""How long a stream may go on after its container has ended, before all is read once more."""
TAIL_BYTES = 1 << 20
_STAMPED = re.compile(rb"([0-9T:.-]{19,29})Z (.*)\Z", re.DOTALL)
_FILE = re.compile(
    rb"[0-9T:.-]{26}Z - " + NODE_FILE + rb" (started|exit)\.json (.*)\n\Z", re.DOTALL
)


def fetch_logs(handle: RunHandle, transport: Transport, pods: Iterable[Pod]) -> None:
    """Copy what is new in the logs of pods into the run's folder.

    Raises:
        Unavailable: the API server does not answer.
        RunFolderError: the folder cannot be written to.
    """
    objects = RunObjects(handle.plan, transport)

    def fetch(pod: Pod) -> None:
        try:
            with folder_lock(_view(handle, pod)) as view:
                if view.folder is not None:
                    with LogWriter(handle.folder, pod) as writer:
                        writer.feed(objects.request("GET", writer.path(objects)).encode())
                        writer.end()
        except OSError as error:
            raise RunFolderError(
                f"{error.strerror}: {error.filename or handle.folder.path}"
            ) from None

    started = [pod for pod in pods if pod.node is not None and pod.started]
    with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
        list(pool.map(fetch, started))


def _view(handle: RunHandle, pod: Pod) -> NodeView:
    """Return the view of a pod's node, whose folder is locked while the log is written."""
    assert pod.node is not None
    return NodeView(pod.node, pod.host, handle.folder.node_dir(pod.attempt, pod.node))


class LogWriter:
    """Splits a pod's log, as the API server sends it, into the logs of its node's attempts.

    It goes on where those logs end. The agent's files, which it prints as lines (`NODE_FILE`),
    become files again; after an ``exit.json`` the next attempt begins.

    Attributes:
        since: time from which on the log is needed; None: from its start.
    """

    def __init__(self, folder: RunFolder, pod: Pod, notify: Callable[[], None] = lambda: None):
        assert pod.node is not None
        self._folder, self._pod, self._node, self._notify = folder, pod, pod.node, notify
        self._rest = b""
        self._written: Counter[bytes] = Counter()
        self.since: str | None = None
        paths = folder.path.glob(f"attempts/*/node-{pod.node}/log")
        numbers = sorted(int(path.parts[-3]) for path in paths if path.parts[-3].isdigit())
        self._attempt = max([pod.attempt, *numbers])
        for number in reversed([each for each in numbers if each >= pod.attempt]):
            tail = _tail(folder.node_dir(number, pod.node) / "log")
            if self.since is None and tail and HEAD.match(tail[-1]):
                self.since = f"{tail[-1][:19].decode()}Z"
            if self.since is not None:
                # The server takes whole seconds, and stamps a line when it reads it, which on a
                # busy node is long after the agent has: lines that come twice are left out.
                self._written.update(tail)
                if tail and tail[0][:19].decode(errors="replace") < _minute_before(self.since):
                    break
        self._file = self._open()

    def path(self, objects: RunObjects) -> str:
        """Return the path of the part of the log that is needed."""
        query = f"container={self._pod.container}&timestamps=true"
        query += f"&sinceTime={quote(self.since, safe='')}" if self.since else ""
        return f"{objects.pod_path(self._pod.name)}/log?{query}"

    def _open(self) -> BinaryIO:
        path = self._folder.node_dir(self._attempt, self._node)
        path.mkdir(parents=True, exist_ok=True)
        file = (path / "log").open("a+b", buffering=0)
        # Part of a line was written before the disk was full: it comes again.
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        last = file.read()
        file.truncate(size - len(last) + last.rfind(b"\n") + 1)
        return file

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    def feed(self, data: bytes) -> None:
        """Write the lines that are new."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        new: list[bytes] = []
        for line in map(self._line, lines):
            if (match := _FILE.match(line)) is None:
                new.append(line)
            else:
                self._write(b"".join(new))
                new = []
                self._write_file(match[1].decode(), match[2])
        self._write(b"".join(new))

    def end(self) -> None:
        """Write a last line that has no newline."""
        self.feed(b"\n" if self._rest else b"")

    def _write_file(self, name: str, document: bytes) -> None:
        folder = self._folder.node_dir(self._attempt, self._node)
        if name == "exit":
            number = next_attempt(document) or 0
            if number <= self._attempt:
                return  # it was received before, maybe from another pod
            self._attempt = number
            self._file.close()
            self._file = self._open()
        write_atomic(folder / f"{name}.json", document, 0o644)
        self._notify()

    def _line(self, line: bytes) -> bytes:
        """Return a line without the server's time; empty if it was written before."""
        match = _STAMPED.match(line)
        if match is None:
            return b""
        text = match[2]
        if not HEAD.match(text):
            # Not by the agent: of what ran before it, or of the container runtime.
            second, _, fraction = match[1].decode().partition(".")
            text = f"{second}.{fraction[:6]:0<6}Z - ".encode() + text
        if self._written[text] > 0:
            self._written[text] -= 1
            return b""
        return text + b"\n"

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _minute_before(since: str) -> str:
    return (datetime.fromisoformat(since[:19]) - timedelta(minutes=1)).isoformat()


def _tail(path: Path) -> list[bytes]:
    """Return the last whole lines of a log."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return file.read().split(b"\n")[:-1]


class RestartableThread:
    """A thread that is started again where it died, or could not be started."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._thread: threading.Thread | None = None

    def ensure(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._work, daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread is left: the next call tries again
                thread.start()
                self._thread = thread

    def join(self, seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(seconds)


class LogFollower:
    """Copies the log of a pod into the run's folder while it is written, in a thread.

    Attributes:
        complete: set once the container has ended and all of its log is in the folder.
    """

    def __init__(
        self,
        handle: RunHandle,
        pod: Pod,
        transport: Transport,
        closed: threading.Event,
        notify: Callable[[], None],
    ) -> None:
        assert pod.node is not None
        self.node = pod.node
        self.complete = threading.Event()
        self._handle, self._pod, self._notify = handle, pod, notify
        self._objects = RunObjects(handle.plan, transport)
        self._closed = closed
        self._stream: AnswerStream | None = None
        self._abandoned = False
        self._awake = threading.Event()
        self._ended = threading.Event()
        self._close_at = 0.0
        self._thread = RestartableThread(self._run)

    def ensure(self) -> None:
        """Let the thread run until the log is complete."""
        if not (self.complete.is_set() or self._closed.is_set()):
            self._thread.ensure()

    def _run(self) -> None:
        view = _view(self._handle, self._pod)
        pause = RETRY_SECONDS
        with folder_lock(view, lambda: not self._closed.wait(0.1)) as view:
            if view.folder is None:  # it cannot be written to now, or this was closed
                self._closed.wait(RETRY_SECONDS)
                return
            while not self._closed.is_set():
                began = time.monotonic()
                try:
                    if self._copy():
                        return self.complete.set()
                    # Streams that end at once are opened less and less often.
                    brief = time.monotonic() < began + RETRY_SECONDS
                    pause = min(2 * pause, LOG_SECONDS) if brief else RETRY_SECONDS
                except ClusterkitError:
                    pause = RETRY_SECONDS  # the watch of the pods reports it
                except Exception:
                    pause = LOG_SECONDS  # this machine's, such as a full disk; or a proxy's
                if self._abandoned:
                    return self.complete.set()
                self._awake.wait(pause)
                self._awake.clear()

    def _copy(self) -> bool:
        """Copy what is new; returns whether that is all there will be."""
        # Of a container that has ended before, all is sent. Else the stream may have broken, or the
        # log have been cut off where its node died.
        last = self._ended.is_set()
        with LogWriter(self._handle.folder, self._pod, self._notify) as writer:
            query = "" if last else "&follow=true"
            path = writer.path(self._objects) + query
            with self._objects.stream(path, QUIET_SECONDS) as stream:
                self._stream = None if last else stream
                while not self._closed.is_set() and (data := stream.read()):
                    writer.feed(data)
            self._stream = None
            if self._closed.is_set():
                return False
            if last and not stream.broken:
                writer.end()
                return True
        found = self._objects.find(self._objects.pod_path(self._pod.name))
        if found is None:
            return True
        pod = self._pod
        now = read_pod(found, None, pod.container)
        if now.uid == pod.uid and now.restarts == pod.restarts:
            if now.exit_code is None:
                return False
            self._ended.set()
            self._awake.set()
            return False
        return True

    def abandon(self) -> None:
        """Stop: the pod is gone, and the rest of its log with it."""
        self._abandoned = True
        self.close()

    def container_ended(self) -> None:
        """Read all that there is. A stream that still waits for more does so in vain."""
        now, stream = time.monotonic(), self._stream
        if not self._ended.is_set():
            self._close_at = now + LAST_SECONDS
            self._ended.set()
            self._awake.set()
        elif stream is not None and now >= self._close_at:
            self._close_at = now + LAST_SECONDS
            stream.stop()

    def close(self) -> None:
        self._awake.set()
        if (stream := self._stream) is not None:
            stream.stop()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
