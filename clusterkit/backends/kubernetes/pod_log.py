"""The logs of a run's pods, brought into its folder: as they are written, or at once."""

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

from clusterkit.agent import NODE_FILE, goes_on
from clusterkit.backends.kubernetes.client import RawStream
from clusterkit.backends.kubernetes.judge import Pod, read_pod
from clusterkit.backends.kubernetes.server import AT_ONCE, RunObjects
from clusterkit.errors import ClusterkitError
from clusterkit.files import write_atomic
from clusterkit.output.logs import HEAD
from clusterkit.output.mirror import NodeView, folder_lock
from clusterkit.run.folder import RunFolder, RunHandle
from clusterkit.transport import Transport

AGAIN_SECONDS = 1.0
"""Pause before a log is asked for again."""
LOG_SECONDS = 15.0
"""How long the log of a pod that has ended may take to come whole."""
_STAMPED = re.compile(rb"([0-9T:.-]{19,29})Z (.*)\Z", re.DOTALL)
_FILE = re.compile(
    rb"[0-9T:.-]{26}Z - " + NODE_FILE + rb" (started|exit)\.json (.*)\n\Z", re.DOTALL
)


def collect(handle: RunHandle, transport: Transport, pods: Iterable[Pod]) -> None:
    """Bring what is new in the logs of pods to the run's folder, once.

    Raises:
        Unavailable: the API server does not answer.
    """
    objects = RunObjects(handle.plan, transport)

    def bring(pod: Pod) -> None:
        with folder_lock(_view(handle, pod)) as view:
            if view.folder is not None:
                with NodeLines(handle.folder, pod) as lines:
                    lines.feed(objects.text(lines.path(objects)).encode())
                    lines.end()

    begun = [pod for pod in pods if pod.node is not None and pod.started]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(bring, begun))


def _view(handle: RunHandle, pod: Pod) -> NodeView:
    """Of a pod's node; its folder is locked for as long as a log is written from the pod."""
    assert pod.node is not None
    return NodeView(pod.node, pod.host, handle.folder.node_dir(pod.attempt, pod.node))


class NodeLines:
    """Makes the logs of a node's attempts of its pod's log, as the API server gives that, from
    where they end.

    All attempts that went on in a pod are in its one log. The agent's files, which it prints as
    lines (`NODE_FILE`), become files again; after an ``exit.json`` the next attempt begins.
    """

    def __init__(self, folder: RunFolder, pod: Pod, news: Callable[[], None] = lambda: None):
        assert pod.node is not None
        self._folder, self._pod, self._node, self._news = folder, pod, pod.node, news
        self._rest = b""
        self._seen: Counter[bytes] = Counter()
        self.since: str | None = None
        """From when on the log is wanted."""
        there = folder.path.glob(f"attempts/*/node-{pod.node}/log")
        numbers = sorted(int(path.parts[-3]) for path in there if path.parts[-3].isdigit())
        self._attempt = max([pod.attempt, *numbers])
        for number in reversed([each for each in numbers if each >= pod.attempt]):
            tail = _tail(folder.node_dir(number, pod.node) / "log")
            if self.since is None and tail and HEAD.match(tail[-1]):
                self.since = f"{tail[-1][:19].decode()}Z"
            if self.since is not None:
                # The server takes whole seconds, and stamps a line when it reads it, which on a
                # busy node is long after the agent has: what comes twice is left out.
                self._seen.update(tail)
                if tail and tail[0][:19].decode(errors="replace") < _earlier(self.since):
                    break
        self._file = self._open()

    def path(self, objects: RunObjects) -> str:
        """Where what is wanted of the log is."""
        query = f"container={self._pod.container}&timestamps=true"
        query += f"&sinceTime={quote(self.since, safe='')}" if self.since else ""
        return f"{objects.pod_path(self._pod.name)}/log?{query}"

    def _open(self) -> BinaryIO:
        path = self._folder.node_dir(self._attempt, self._node)
        path.mkdir(parents=True, exist_ok=True)
        return (path / "log").open("ab", buffering=0)

    def feed(self, data: bytes) -> None:
        """Write what is new of it."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._take(lines)

    def end(self) -> None:
        """Write a last line that has no newline."""
        self.feed(b"\n" if self._rest else b"")

    def _take(self, lines: list[bytes]) -> None:
        new: list[bytes] = []
        for line in map(self._line, lines):
            if (told := _FILE.match(line)) is None:
                new.append(line)
            else:
                self._file.write(b"".join(new))
                new = []
                self._told(told[1].decode(), told[2])
        self._file.write(b"".join(new))

    def _told(self, name: str, document: bytes) -> None:
        folder = self._folder.node_dir(self._attempt, self._node)
        if name == "exit":
            number = goes_on(document) or 0
            if number <= self._attempt:
                return  # heard before, or by another pod
            self._attempt = number
            self._file.close()
            self._file = self._open()
        write_atomic(folder / f"{name}.json", document)
        self._news()

    def _line(self, line: bytes) -> bytes:
        match = _STAMPED.match(line)
        if match is None:
            return b""
        text = match[2]
        if not HEAD.match(text):
            # Not the agent's: what the pod said before it, or of it.
            second, _, fraction = match[1].decode().partition(".")
            text = f"{second}.{fraction[:6]:0<6}Z - ".encode() + text
        if self._seen[text] > 0:
            self._seen[text] -= 1
            return b""
        return text + b"\n"

    def __enter__(self) -> NodeLines:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _earlier(since: str) -> str:
    """A minute before."""
    return (datetime.fromisoformat(since[:19]) - timedelta(minutes=1)).isoformat()


def _tail(path: Path) -> list[bytes]:
    """The last whole lines of a log."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 20)))
        return file.read().split(b"\n")[:-1]


class PodLog:
    """Brings the log of one pod into the run's folder while it is written."""

    def __init__(
        self,
        handle: RunHandle,
        pod: Pod,
        transport: Transport,
        closed: threading.Event,
        news: Callable[[], None],
    ) -> None:
        assert pod.node is not None
        self.node = pod.node
        self.whole = threading.Event()
        """The container has ended and all of its log is here."""
        self._handle, self._pod, self._news = handle, pod, news
        self._objects = RunObjects(handle.plan, transport)
        self._closed = closed
        self._stream: RawStream | None = None
        self._given_up = False
        self._hurry = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        view = _view(self._handle, self._pod)
        with folder_lock(view, lambda: not self._closed.wait(0.1)) as view:
            if view.folder is None or self._follow():
                self.whole.set()

    def _follow(self) -> bool:
        """Until all of the log is here, or will not come; False: nobody watches any more."""
        pause = AGAIN_SECONDS
        while not self._closed.is_set():
            began, ended = time.monotonic(), False
            try:
                ended = self._pull()
                # Where streams end at once, they would be opened for ever and ever.
                brief = time.monotonic() < began + AGAIN_SECONDS
                pause = min(2 * pause, LOG_SECONDS) if brief else AGAIN_SECONDS
            except ClusterkitError:
                pause = AGAIN_SECONDS  # the watch of the pods tells of it
            if ended or self._given_up:
                return True
            self._hurry.wait(pause)
        return False

    def _pull(self) -> bool:
        """Take what is new; whether the log has ended."""
        with NodeLines(self._handle.folder, self._pod, self._news) as lines:
            with self._objects.stream(lines.path(self._objects) + "&follow=true") as stream:
                self._stream = stream
                while not self._closed.is_set() and (data := stream.read(None)):
                    lines.feed(data)
            # A stream that ends while the container runs has broken off.
            if ended := self._ended():
                lines.end()
            return ended

    def _ended(self) -> bool:
        if self._closed.is_set():
            return False
        found = self._objects.find(self._objects.pod_path(self._pod.name))
        if found is None:
            return True
        now, pod = read_pod(found, None), self._pod
        return now.uid != pod.uid or now.restarts != pod.restarts or now.exit_code is not None

    def give_up(self) -> None:
        """Its pod is gone: what has not come will not."""
        self._given_up = True
        self.close()

    def hurry(self) -> None:
        """Its container has ended: the rest of the log is there."""
        self._hurry.set()

    def close(self) -> None:
        self._hurry.set()
        if self._stream is not None:
            self._stream.close()
