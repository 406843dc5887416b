"""The logs of a run's pods, copied into its folder: while they are written, or once."""

from __future__ import annotations

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
from clusterkit.backends.kubernetes.api_server import PARALLEL_REQUESTS, RawStream, RunObjects
from clusterkit.backends.kubernetes.pod_status import Pod, read_pod
from clusterkit.errors import ClusterkitError
from clusterkit.files import write_atomic
from clusterkit.output.logs import HEAD
from clusterkit.output.mirror import NodeView, folder_lock
from clusterkit.run.folder import RunFolder, RunHandle
from clusterkit.transport import Transport

RETRY_SECONDS = 1.0
LOG_SECONDS = 15.0
"""How long to wait for the rest of the log of a pod that has ended."""
TAIL_BYTES = 1 << 20
_STAMPED = re.compile(rb"([0-9T:.-]{19,29})Z (.*)\Z", re.DOTALL)
_FILE = re.compile(
    rb"[0-9T:.-]{26}Z - " + NODE_FILE + rb" (started|exit)\.json (.*)\n\Z", re.DOTALL
)


def fetch_logs(handle: RunHandle, transport: Transport, pods: Iterable[Pod]) -> None:
    """Copy what is new in the logs of pods into the run's folder.

    Raises:
        Unavailable: the API server does not answer.
    """
    objects = RunObjects(handle.plan, transport)

    def fetch(pod: Pod) -> None:
        with folder_lock(_view(handle, pod)) as view:
            if view.folder is not None:
                with LogWriter(handle.folder, pod) as writer:
                    writer.feed(objects.request("GET", writer.path(objects)).encode())
                    writer.end()

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
        return (path / "log").open("ab", buffering=0)

    def feed(self, data: bytes) -> None:
        """Write the lines that are new."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        new: list[bytes] = []
        for line in map(self._line, lines):
            if (match := _FILE.match(line)) is None:
                new.append(line)
            else:
                self._file.write(b"".join(new))
                new = []
                self._write_file(match[1].decode(), match[2])
        self._file.write(b"".join(new))

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


class LogFollower:
    """A thread that copies the log of a pod into the run's folder while it is written.

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
        self._stream: RawStream | None = None
        self._abandoned = False
        self._awake = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        view = _view(self._handle, self._pod)
        with folder_lock(view, lambda: not self._closed.wait(0.1)) as view:
            if view.folder is None or self._follow():
                self.complete.set()

    def _follow(self) -> bool:
        """Copy until the log ends or is abandoned; False: the monitor was closed before."""
        pause = RETRY_SECONDS
        while not self._closed.is_set():
            began, ended = time.monotonic(), False
            try:
                ended = self._pull()
                # Streams that end at once are opened less and less often.
                brief = time.monotonic() < began + RETRY_SECONDS
                pause = min(2 * pause, LOG_SECONDS) if brief else RETRY_SECONDS
            except ClusterkitError:
                pause = RETRY_SECONDS  # the watch of the pods reports it
            if ended or self._abandoned:
                return True
            self._awake.wait(pause)
        return False

    def _pull(self) -> bool:
        """Copy what is new; returns whether the log has ended."""
        with LogWriter(self._handle.folder, self._pod, self._notify) as writer:
            with self._objects.stream(writer.path(self._objects) + "&follow=true") as stream:
                self._stream = stream
                while not self._closed.is_set() and (data := stream.read(None)):
                    writer.feed(data)
            # The connection may have broken while the container runs.
            if ended := self._container_has_ended():
                writer.end()
            return ended

    def _container_has_ended(self) -> bool:
        if self._closed.is_set():
            return False
        found = self._objects.find(self._objects.pod_path(self._pod.name))
        if found is None:
            return True
        pod = self._pod
        now = read_pod(found, None, pod.container)
        return now.uid != pod.uid or now.restarts != pod.restarts or now.exit_code is not None

    def abandon(self) -> None:
        """Stop: the pod is gone, and the rest of its log with it."""
        self._abandoned = True
        self.close()

    def container_ended(self) -> None:
        """Retry at once: all of the log is there."""
        self._awake.set()

    def close(self) -> None:
        self._awake.set()
        if self._stream is not None:
            self._stream.close()
