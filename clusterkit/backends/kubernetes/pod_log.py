"""The logs of a run's pods, brought into its folder: as they are written, or at once."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

from clusterkit.backends.kubernetes.judge import Pod, read_pod
from clusterkit.backends.kubernetes.observe import pods_of
from clusterkit.backends.kubernetes.server import RunObjects
from clusterkit.errors import ClusterkitError
from clusterkit.mirror import NodeView, keeping
from clusterkit.runs import RunHandle
from clusterkit.transport import Stream, Transport

AGAIN_SECONDS = 1.0
"""Pause before a log is asked for again."""
LOG_SECONDS = 15.0
"""How long the log of a pod that has ended may take to come whole."""
AT_ONCE = 8
"""Logs that are read together, of a run that nobody watched."""
_STAMPED = re.compile(rb"([0-9T:.-]{19,29})Z (.*)\Z", re.DOTALL)
_OURS = re.compile(rb"[0-9T:-]{19}\.[0-9]{6}Z (-|[0-9]{1,9}) ")


def collect(handle: RunHandle, transport: Transport) -> None:
    """Bring what is new in the logs of an attempt's pods to the run's folder, once.

    Raises:
        Unavailable: the API server does not answer.
    """
    objects = RunObjects(handle.plan, transport)

    def bring(pod: Pod) -> None:
        assert pod.node is not None
        lines = LogLines(handle.folder.node_dir(handle.attempt, pod.node) / "log")
        lines.append(objects.text(_log_path(objects, pod, since=lines.since)).encode())

    begun = [
        pod for pod in pods_of(handle, transport).values() if pod.node is not None and pod.started
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(bring, begun))


def _log_path(objects: RunObjects, pod: Pod, *, since: str | None) -> str:
    query = f"container={pod.container}&timestamps=true"
    query += f"&sinceTime={quote(since, safe='')}" if since else ""
    return f"{objects.pod_path(pod.name)}/log?{query}"


class LogLines:
    """Turns a pod's log as the API server gives it into lines of a node's log, from where the file
    at ``path`` ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rest = b""
        self._seen: Counter[bytes] = Counter()
        self.since: str | None = None
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - (1 << 20)))
                tail = file.read().split(b"\n")[:-1]
        except OSError:
            return
        if tail and (last := _OURS.match(tail[-1])):
            # The server takes whole seconds; what comes twice is left out.
            stamp = tail[-1][:19].decode()
            self.since = f"{stamp}Z"
            self._seen.update(line for line in tail if line[:19] >= last[0][:19])

    def feed(self, data: bytes) -> bytes:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return b"".join(map(self._line, lines))

    def end(self) -> bytes:
        """A last line without its newline."""
        rest, self._rest = self._rest, b""
        return self._line(rest) if rest else b""

    def append(self, data: bytes) -> None:
        """Add what is new of a whole log to the file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(self.feed(data) + self.end())

    def _line(self, line: bytes) -> bytes:
        match = _STAMPED.match(line)
        if match is None:
            return b""
        text = match[2]
        if not _OURS.match(text):
            # Not the agent's: what the pod said before it, or of it.
            second, _, fraction = match[1].decode().partition(".")
            text = f"{second}.{fraction[:6]:0<6}Z - ".encode() + text
        if self._seen[text] > 0:
            self._seen[text] -= 1
            return b""
        return text + b"\n"


class PodLog:
    """Brings the log of one pod into the run's folder while it is written."""

    def __init__(
        self, handle: RunHandle, pod: Pod, transport: Transport, closed: threading.Event
    ) -> None:
        assert pod.node is not None
        self.node = pod.node
        self.whole = threading.Event()
        """The container has ended and all of its log is here."""
        self._pod = pod
        self._objects = RunObjects(handle.plan, transport)
        self._closed = closed
        self._stream: Stream | None = None
        self._given_up = False
        self._hurry = threading.Event()
        self._view = NodeView(pod.node, pod.host, handle.folder.node_dir(handle.attempt, pod.node))
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with keeping(self._view, lambda: not self._closed.wait(0.1)) as view:
            if view.folder is None or self._follow(view.folder / "log"):
                self.whole.set()

    def _follow(self, path: Path) -> bool:
        """Until all of the log is here, or will not come; False: nobody watches any more."""
        pause = AGAIN_SECONDS
        while not self._closed.is_set():
            began, ended = time.monotonic(), False
            try:
                ended = self._pull(path)
                # Where streams end at once, they would be opened for ever and ever.
                brief = time.monotonic() < began + AGAIN_SECONDS
                pause = min(2 * pause, LOG_SECONDS) if brief else AGAIN_SECONDS
            except ClusterkitError:
                pause = AGAIN_SECONDS  # the watch of the pods tells of it
            if ended or self._given_up:
                return True
            self._hurry.wait(pause)
        return False

    def _pull(self, path: Path) -> bool:
        """Take what is new; whether the log has ended."""
        lines = LogLines(path)
        where = _log_path(self._objects, self._pod, since=lines.since) + "&follow=true"
        with self._objects.stream(where) as stream, path.open("ab", buffering=0) as file:
            self._stream = stream
            while not self._closed.is_set() and (data := stream.read(None)):
                if new := lines.feed(data):
                    file.write(new)
            if new := lines.end():
                file.write(new)
        # A stream that ends while the container runs has broken off.
        return self._ended()

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
