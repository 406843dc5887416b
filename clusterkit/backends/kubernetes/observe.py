"""A run's pods while they run: their states by a watch, their logs into the run's folder."""

from __future__ import annotations

import contextlib
import json
import posixpath
import re
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from clusterkit.backends.base import Handle, Observation
from clusterkit.backends.kubernetes.flavors import FLAVORS, Flavor
from clusterkit.backends.kubernetes.judge import (
    Pod,
    Rejoin,
    attempt_of,
    causes,
    judge,
    newest,
    read_pod,
    told_by_events,
    unexplained,
)
from clusterkit.backends.kubernetes.pods import RUN
from clusterkit.backends.nodes import observed
from clusterkit.errors import ClusterkitError, Unavailable
from clusterkit.mirror import NodeView, keeping
from clusterkit.plan import Plan
from clusterkit.runs import node_dir
from clusterkit.status import State
from clusterkit.transport import Put, Stream, Transport

HOST = "localhost"
AGAIN_SECONDS = 1.0
"""Pause before the API server is asked again."""
WATCH_SECONDS = 280
"""How long one watch lasts; the server ends it."""
LOG_SECONDS = 15.0
"""How long the log of a pod that has ended may take to come whole."""
LOGS_AT_ONCE = 8
"""Of a run that nobody watched."""
NEWS_SECONDS = 5.0
"""How often it is asked why there are no pods, and states are judged anew although nothing came."""
_LET_GO = ("--type", "merge", "--patch", '{"metadata":{"finalizers":null}}')
_STAMPED = re.compile(rb"([0-9T:.-]{19,29})Z (.*)\Z", re.DOTALL)
_OURS = re.compile(rb"[0-9T:-]{19}\.[0-9]{6}Z (-|[0-9]{1,9}) ")


# ---------------------------------------------------------------- the plan's own words


def tool(plan: Plan) -> list[str]:
    """``kubectl`` for the server and namespace that the run was planned for."""
    argv = next((step.argv for step in plan.steps if "apply" in step.argv), ("kubectl", "apply"))
    return list(argv[: argv.index("apply")])


def namespace(plan: Plan) -> str:
    words = tool(plan)
    return words[words.index("--namespace") + 1] if "--namespace" in words else "default"


def flavor_of(plan: Plan) -> Flavor:
    return FLAVORS[plan.note("flavor") or "job"]


def name_of(plan: Plan) -> str:
    return plan.note("name") or plan.run_id


def local_dir(plan: Plan) -> str:
    """The run's folder on this machine."""
    path = next((file.path for file in plan.files), posixpath.join(plan.run_dir, "files", "x"))
    return posixpath.dirname(posixpath.dirname(path))


def node_file(handle: Handle, node: int, name: str) -> str:
    return posixpath.join(node_dir(local_dir(handle.plan), handle.attempt, node), name)


def known(plan: Plan, transport: Transport) -> bool:
    return transport.get(HOST, posixpath.join(local_dir(plan), "run.json"), 0, 1) is not None


def object_path(plan: Plan, api: str, plural: str, name: str) -> str:
    """Where the API server has an object of the run's namespace."""
    root = f"/apis/{api}" if "/" in api else f"/api/{api}"
    return f"{root}/namespaces/{namespace(plan)}/{plural}/{name}"


def job_path(plan: Plan) -> str:
    """Where it has the job that keeps the run's pods."""
    flavor = flavor_of(plan)
    return object_path(plan, flavor.API, flavor.PLURAL, name_of(plan))


def pods_path(plan: Plan, **query: str) -> str:
    selector = quote(f"{RUN}={plan.run_id}", safe="")
    more = "".join(f"&{key}={quote(value, safe='')}" for key, value in query.items())
    return f"/api/v1/namespaces/{namespace(plan)}/pods?labelSelector={selector}{more}"


def raw(plan: Plan, path: str, transport: Transport, *, timeout: float | None = None) -> str:
    """What the API server answers.

    Raises:
        Unavailable: nothing, or no.
    """
    done = transport.run(HOST, [*tool(plan), "get", "--raw", path], timeout=timeout)
    if done.exit_code:
        raise Unavailable(done.stderr.strip() or f"exit code {done.exit_code}")
    return done.stdout


def events_of(plan: Plan, field: str, transport: Transport) -> list[dict[str, Any]]:
    """The namespace's events of which this is true.

    Raises:
        Unavailable: the API server does not answer, or will not.
    """
    chosen = quote(field, safe="")
    path = f"/api/v1/namespaces/{namespace(plan)}/events?fieldSelector={chosen}"
    found: list[dict[str, Any]] = json.loads(raw(plan, path, transport))["items"]
    return found


# ---------------------------------------------------------------- what is seen


def pods_of(handle: Handle, transport: Transport) -> dict[str, Pod]:
    """The attempt's pods, by name.

    Raises:
        Unavailable: the API server does not answer.
    """
    listed = json.loads(raw(handle.plan, pods_path(handle.plan), transport))
    return _read(handle, listed["items"])


def _read(handle: Handle, items: Sequence[Mapping[str, Any]]) -> dict[str, Pod]:
    index = flavor_of(handle.plan).INDEX
    found = {}
    for told in items:
        if attempt_of(told) == handle.attempt:
            pod = read_pod(told, index, time.time())
            found[pod.name] = pod
    return found


def _snapshot_path(handle: Handle) -> str:
    folder = posixpath.join(local_dir(handle.plan), "attempts", str(handle.attempt))
    return posixpath.join(folder, "pods.json")


def snapshot(handle: Handle, transport: Transport) -> dict[str, Pod]:
    """The pods as they were when they were seen last: their ends are told by nothing else once they
    are gone."""
    data = transport.get(HOST, _snapshot_path(handle))
    try:
        return msgspec.json.decode(data or b"{}", type=dict[str, Pod])
    except msgspec.MsgspecError:
        return {}


def with_seen(before: Mapping[str, Pod], pods: Mapping[str, Pod], plan: Plan) -> dict[str, Pod]:
    """What was seen of pods, with what is seen of them now; the first of a name stays, unless
    others may take its place."""
    found = dict(before)
    for name, pod in pods.items():
        first = before.get(name)
        if first is None or first.uid == pod.uid or replaces(plan):
            if first is not None and first.uid == pod.uid and pod.exit_code is None:
                pod = msgspec.structs.replace(pod, removed_by=pod.removed_by or first.removed_by)
            found[name] = pod
    return found


def keep(handle: Handle, pods: Mapping[str, Pod], transport: Transport) -> None:
    """Write down what was seen; a full disk is no reason to end the training."""
    data = msgspec.json.format(msgspec.json.encode(pods), indent=1)
    with contextlib.suppress(ClusterkitError):
        transport.put_all(HOST, [Put(_snapshot_path(handle), data)])


def replaces(plan: Plan) -> bool:
    """Whether another pod may take the place of one that is gone."""
    return plan.rejoin or plan.topology.get("min_nodes") != plan.topology.get("nodes")


def _rejoin(plan: Plan) -> Rejoin | None:
    return Rejoin(forced=plan.replace_lost) if plan.rejoin else None


def _goes_on(plan: Plan, transport: Transport) -> bool:
    """Whether the run's job is still there to make new pods; yes where nobody says."""
    flavor = flavor_of(plan)
    path = job_path(plan)
    done = transport.run(HOST, [*tool(plan), "get", "--raw", path])
    if done.exit_code:
        return "(NotFound)" not in done.stderr
    conditions = (json.loads(done.stdout).get("status") or {}).get("conditions") or ()
    true = {each["type"] for each in conditions if each.get("status") == "True"}
    return not any(flavor.STATES.get(each, State.UNKNOWN).final for each in true)


def removed_path(handle: Handle) -> str:
    """The file that holds `Removed`."""
    return posixpath.join(posixpath.dirname(_snapshot_path(handle)), "removed.json")


class Removed(msgspec.Struct, frozen=True):
    """Pods of an attempt that clusterkit itself has ended, by name."""

    ended: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()
    """Those of them whose nodes of the cluster did not answer."""
    complete: bool = False
    """Whether nothing is there any more that could make others."""


def removed(handle: Handle, transport: Transport) -> Removed | None:
    """What clusterkit itself has ended; None: nothing yet."""
    data = transport.get(HOST, removed_path(handle))
    try:
        return None if data is None else msgspec.json.decode(data, type=Removed)
    except msgspec.MsgspecError:
        return Removed()


def put_removed(handle: Handle, what: Removed, transport: Transport) -> None:
    transport.put_all(HOST, [Put(removed_path(handle), msgspec.json.encode(what))])


def observation(
    handle: Handle,
    pods: Mapping[str, Pod],
    transport: Transport,
    *,
    before: Mapping[str, Pod] | None = None,
    waits: str | None = None,
    silent: str | None = None,
    unheard: frozenset[str] = frozenset(),
    unseen: State = State.UNKNOWN,
) -> Observation:
    """The run's nodes from its pods.

    Args:
        before: the pods as they were seen last; None: as they were written down.
        waits: why there are no pods.
        silent: why the API server does not answer.
        unheard: pods that have ended and whose logs are still to come.
        unseen: what a node is that nobody has ever seen while the API server does not answer.
    """
    if before is None:
        before = snapshot(handle, transport)
    if silent is not None:
        pods = before
    by_us = removed(handle, transport) or Removed()
    ours = by_us.ended
    before = {
        name: msgspec.structs.replace(pod, lost=True) if name in by_us.lost else pod
        for name, pod in before.items()
    }
    long_ago = time.time() - handle.plan.lost_after
    now = {
        node: msgspec.structs.replace(pod, lost=True)
        if pod.silent_since is not None and pod.silent_since < long_ago
        else pod
        for node, pod in newest(pods.values()).items()
    }
    then = newest(before.values())
    rejoin = _rejoin(handle.plan)
    if rejoin is not None and silent is None:
        known_ones = {**then, **now}.items()
        away = any(rejoin.waits(pod, there=node in now) is not None for node, pod in known_ones)
        with contextlib.suppress(ClusterkitError):
            if away and not _goes_on(handle.plan, transport):
                rejoin = None
    nodes, last_words = [], {}
    for node in range(handle.plan.nodes):
        pod = now.get(node)
        named = pod or then.get(node)
        found = judge(
            node,
            pod,
            then.get(node),
            replaced=replaces(handle.plan),
            rejoin=rejoin,
            waits=waits,
            ours=by_us.complete if named is None else named.name in ours,
        )
        if pod is not None and pod.name in unheard and found.state.final:
            found = msgspec.structs.replace(found, state=State.RUNNING, reason=None)
        if silent is not None and not found.state.final:
            state = found.state if before else unseen
            found = msgspec.structs.replace(found, state=state, reason=silent)
        nodes.append(found)
        if named is not None:
            last_words[node] = (named.last_words or "").encode()
    blamed = causes(_blamable(handle.plan, [*{**before, **pods}.values()]), ours)
    return msgspec.structs.replace(observed(nodes, last_words), causes=blamed)


def _blamable(plan: Plan, pods: Sequence[Pod]) -> Sequence[Pod]:
    """Those whose end may be the run's: none that another pod has taken the place of."""
    return list(newest(pods).values()) if plan.rejoin else pods


def why_no_pods(plan: Plan, transport: Transport) -> str | None:
    """What the cluster says of a job that has no pods: its queue, a quota, a rule."""
    flavor, name = flavor_of(plan), name_of(plan)
    words: list[str] = []
    with contextlib.suppress(ClusterkitError, ValueError, KeyError, TypeError):
        job = json.loads(raw(plan, job_path(plan), transport))
        if job.get("spec", {}).get("suspend") or job["spec"].get("runPolicy", {}).get("suspend"):
            return "it waits in its queue"
        if not job.get("status"):
            words.append(f"no controller acts on {flavor.KIND} {name}: is its operator up?")
    with contextlib.suppress(ClusterkitError, ValueError, KeyError, TypeError):
        for event in events_of(plan, "type=Warning", transport):
            about = event["involvedObject"].get("name", "")
            if about == name or about.startswith(f"{name}-"):
                words.append(str(event.get("message", "")).strip())
    return words[-1] if words else None


# ---------------------------------------------------------------- watching


class PodWatcher:
    """Keeps up with an attempt's pods: one watch for all of them, one stream for each log."""

    def __init__(self, handle: Handle, transport: Transport) -> None:
        self._handle = handle
        self._transport = transport
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._pods: dict[str, Pod] = {}
        self._before = self._kept = snapshot(handle, transport)
        self._listed = False
        self._news = True
        self._judge_at = 0.0
        self._silent: str | None = None
        self._waits: str | None = None
        self._ask_at = time.monotonic() + NEWS_SECONDS
        self._logs: dict[tuple[str, str, int], _Log] = {}
        self._ended_at: dict[str, float] = {}
        self._stream: Stream | None = None
        self._last: Observation | None = None
        self._given_up: dict[str, float] = {}
        self._events: dict[str, str] = {}
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def status(self) -> Observation | None:
        if not known(self._handle.plan, self._transport):
            return None
        now = time.monotonic()
        with self._lock:
            news, self._news = self._news, False
            pods, silent, listed = dict(self._pods), self._silent, self._listed
            # At one moment: a pod that is known from before, and not there, is gone.
            before = self._before = with_seen(self._before, self._pods, self._handle.plan)
        if before != self._kept:
            self._kept = before
            keep(self._handle, before, self._transport)
        if listed and not pods and silent is None and now >= self._ask_at:
            self._ask_at = now + NEWS_SECONDS
            waits = why_no_pods(self._handle.plan, self._transport)
            news, self._waits = news or waits != self._waits, waits
        if self._handle.plan.replace_lost and silent is None:
            for pod in pods.values():
                self._give_up(pod, now)
        if not listed and silent is None:
            # Nothing is known yet but what was written down.
            return observation(self._handle, before, self._transport, before=before)
        if self._last is None or news or now >= self._judge_at:
            self._judge(pods, before, silent, now)
        return self._last

    def _judge(
        self, pods: Mapping[str, Pod], before: Mapping[str, Pod], silent: str | None, now: float
    ) -> None:
        self._judge_at = now + NEWS_SECONDS
        unheard = set()
        for pod in pods.values():
            log = self._log_of(pod)
            if log is None or pod.exit_code is None or log.whole.is_set():
                continue
            log.hurry()
            if now < self._ended_at.setdefault(pod.uid, now) + LOG_SECONDS:
                unheard.add(pod.name)
                self._judge_at = now
        self._last = observation(
            self._handle, pods, self._transport, before=before, waits=self._waits,
            silent=silent, unheard=frozenset(unheard), unseen=State.PENDING,
        )  # fmt: skip

    def _give_up(self, pod: Pod, now: float) -> None:
        """Remove by force a pod whose node of the cluster has not answered for long: nobody there
        says that it has ended, and before that none is made in its place."""
        since = pod.unready_since
        if since is None or pod.node is None or time.time() < since + self._handle.plan.lost_after:
            return
        if now < self._given_up.get(pod.uid, now):
            return
        self._given_up[pod.uid] = now + NEWS_SECONDS
        plan = self._handle.plan
        with contextlib.suppress(ClusterkitError):
            ready = node_ready(plan, pod.host, self._transport)
            if ready is False or (ready is None and pod.lost):
                path = object_path(plan, "v1", "pods", pod.name)
                command = [*tool(plan), "delete", "--raw", f"{path}?gracePeriodSeconds=0"]
                self._transport.run(HOST, command)
                if flavor_of(plan).KIND != "PyTorchJob":
                    # A Job holds its pods until they have ended, which this one will not say.
                    self._transport.run(HOST, [*tool(plan), "patch", "pod", pod.name, *_LET_GO])

    def _log_of(self, pod: Pod) -> _Log | None:
        """The follower of a pod's log, made as soon as there can be one."""
        if pod.node is None or not pod.started:
            return None
        key = (pod.name, pod.uid, pod.restarts)
        if key not in self._logs:
            for (_, uid, _), log in self._logs.items():
                if log.node == pod.node and uid != pod.uid:
                    # What a node of the cluster that does not answer still holds will not come.
                    log.give_up()
            self._logs[key] = _Log(self._handle, pod, self._transport, self._closed)
        return self._logs[key]

    # -- the watch

    def _watch(self) -> None:
        while not self._closed.is_set():
            try:
                version = self._list()
                while not self._closed.is_set():
                    version = self._follow(version)
            except _Stale:
                continue
            except ClusterkitError as error:
                with self._lock:
                    self._news = self._news or self._silent is None
                    self._silent = error.message
                self._closed.wait(AGAIN_SECONDS)

    def _list(self) -> str:
        plan = self._handle.plan
        listed = json.loads(raw(plan, pods_path(plan), self._transport))
        pods = self._explained(_read(self._handle, listed["items"]))
        with self._lock:
            self._pods = pods
            self._listed, self._news, self._silent = True, True, None
        return str(listed["metadata"]["resourceVersion"])

    def _follow(self, version: str) -> str:
        """One watch, to its end; gives where the next one goes on."""
        plan = self._handle.plan
        path = pods_path(
            plan, watch="1", resourceVersion=version, allowWatchBookmarks="true",
            timeoutSeconds=str(WATCH_SECONDS),
        )  # fmt: skip
        rest = b""
        with self._transport.open(HOST, [*tool(plan), "get", "--raw", path]) as stream:
            self._stream = stream
            while not self._closed.is_set():
                data = stream.read(WATCH_SECONDS + 20)
                if not data:
                    break
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    version = self._take(json.loads(line), version)
        if not self._closed.is_set():
            # Ended, or broken off: what was missed is told by the list.
            raise _Stale
        return version

    def _take(self, event: Mapping[str, Any], version: str) -> str:
        told = event["object"]
        if event["type"] == "ERROR":
            raise _Stale
        if event["type"] != "BOOKMARK":
            name = told["metadata"]["name"]
            read = self._explained(_read(self._handle, [told]))
            with self._lock:
                self._news = True
                # At once: its end may be told by this alone, and it may be gone the next moment.
                self._before = with_seen(self._before, read, self._handle.plan)
                if event["type"] == "DELETED":
                    self._pods.pop(name, None)
                else:
                    self._pods.update(read)
        return str(told["metadata"]["resourceVersion"])

    def _explained(self, pods: dict[str, Pod]) -> dict[str, Pod]:
        """The pods, with what their events say of why they were ended."""
        plan = self._handle.plan
        for name, pod in pods.items():
            if not unexplained(pod):
                continue
            if pod.uid not in self._events:
                with contextlib.suppress(ClusterkitError, ValueError):
                    events = events_of(plan, f"involvedObject.uid={pod.uid}", self._transport)
                    if said := told_by_events(events, namespace(plan)):
                        self._events[pod.uid] = said
            said = self._events.get(pod.uid, pod.removed_by)
            pods[name] = msgspec.structs.replace(pod, removed_by=said)
        return pods

    def close(self) -> None:
        """Watch no more; the pods go on."""
        self._closed.set()
        if self._stream is not None:
            self._stream.close()
        for log in self._logs.values():
            log.close()
        self._thread.join(2 * AGAIN_SECONDS)
        for log in self._logs.values():
            log.thread.join(2 * AGAIN_SECONDS)


def node_ready(plan: Plan, host: str, transport: Transport) -> bool | None:
    """Whether a node of the cluster answers; None: we may not look."""
    done = transport.run(HOST, [*tool(plan), "get", "--raw", f"/api/v1/nodes/{host}"])
    if done.exit_code:
        return False if "(NotFound)" in done.stderr else None
    conditions = json.loads(done.stdout).get("status", {}).get("conditions") or ()
    return {each["type"]: each["status"] for each in conditions}.get("Ready") == "True"


class _Stale(Exception):
    """The watch has to begin anew."""


class _Log:
    """Brings the log of one pod into the run's folder while it is written."""

    def __init__(
        self, handle: Handle, pod: Pod, transport: Transport, closed: threading.Event
    ) -> None:
        self.whole = threading.Event()
        """The container has ended and all of its log is here."""
        self._plan = handle.plan
        self._pod = pod
        self._transport = transport
        self._closed = closed
        self._stream: Stream | None = None
        self._given_up = False
        self._hurry = threading.Event()
        assert pod.node is not None
        self.node = pod.node
        folder = Path(node_dir(local_dir(handle.plan), handle.attempt, pod.node))
        self._view = NodeView(pod.node, pod.host, folder)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with keeping(self._view, lambda: not self._closed.wait(0.1)) as view:
            if view.folder is None:
                self.whole.set()
                return
            pause = AGAIN_SECONDS
            while not self._closed.is_set():
                began = time.monotonic()
                try:
                    if self._pull(view.folder / "log") or self._given_up:
                        self.whole.set()
                        return
                    # Where streams end at once, they would be opened for ever and ever.
                    brief = time.monotonic() < began + AGAIN_SECONDS
                    pause = min(2 * pause, LOG_SECONDS) if brief else AGAIN_SECONDS
                except ClusterkitError:
                    pause = AGAIN_SECONDS  # the watch of the pods tells of it
                if self._given_up:
                    self.whole.set()
                    return
                self._hurry.wait(pause)

    def _pull(self, path: Path) -> bool:
        """Take what is new; whether the log has ended."""
        splitter = Catcher(path)
        where = log_path(self._plan, self._pod, follow=True, since=splitter.since)
        stream = self._transport.open(HOST, [*tool(self._plan), "get", "--raw", where])
        with stream, path.open("ab", buffering=0) as file:
            self._stream = stream
            while not self._closed.is_set():
                data = stream.read(None)
                if not data:
                    break
                if lines := splitter.feed(data):
                    file.write(lines)
            if lines := splitter.end():
                file.write(lines)
        # A stream that ends while the container runs has broken off.
        return self._ended()

    def _ended(self) -> bool:
        plan, pod = self._plan, self._pod
        if self._closed.is_set():
            return False
        path = object_path(plan, "v1", "pods", pod.name)
        done = self._transport.run(HOST, [*tool(plan), "get", "--raw", path])
        if done.exit_code:
            return "(NotFound)" in done.stderr
        now = read_pod(json.loads(done.stdout), None)
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


def log_path(plan: Plan, pod: Pod, *, follow: bool, since: str | None) -> str:
    query = f"container={pod.container}&timestamps=true"
    query += "&follow=true" if follow else ""
    query += f"&sinceTime={quote(since, safe='')}" if since else ""
    return f"{object_path(plan, 'v1', 'pods', pod.name)}/log?{query}"


def collect(handle: Handle, transport: Transport) -> None:
    """Bring what is new in the logs of an attempt's pods to the run's folder, once.

    Raises:
        Unavailable: the API server does not answer.
    """

    def bring(pod: Pod) -> None:
        assert pod.node is not None
        catcher = Catcher(Path(node_file(handle, pod.node, "log")))
        where = log_path(handle.plan, pod, follow=False, since=catcher.since)
        catcher.append(raw(handle.plan, where, transport).encode())

    begun = [
        pod for pod in pods_of(handle, transport).values() if pod.node is not None and pod.started
    ]
    with ThreadPoolExecutor(LOGS_AT_ONCE) as pool:
        list(pool.map(bring, begun))


class Catcher:
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
