"""The states of a run's nodes: once, or while its pods and their logs are followed."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from clusterkit.backends.base import Observation
from clusterkit.backends.kubernetes import observe
from clusterkit.backends.kubernetes.api_server import AnswerStream, RunObjects
from clusterkit.backends.kubernetes.pod import Pod, PodState
from clusterkit.backends.kubernetes.pod_log import (
    LOG_SECONDS,
    RETRY_SECONDS,
    LogFollower,
    RestartableThread,
    fetch_logs,
)
from clusterkit.backends.kubernetes.pod_status import (
    cause_from_events,
    needs_events,
    updated,
    without,
)
from clusterkit.backends.node_status import folder_exists
from clusterkit.errors import ClusterkitError, SubmitFailed
from clusterkit.run.folder import RunHandle
from clusterkit.run.status import State
from clusterkit.transport import Transport

WATCH_SECONDS = 280
"""How long a watch lasts before the server ends it."""
SILENT_SECONDS = 100.0
"""After how long a watch on which nothing comes is opened anew."""
REFRESH_SECONDS = 5.0
"""How often states are worked out anew although nothing changed, and why pods are missing."""


def status_now(handle: RunHandle, transport: Transport) -> Observation | None:
    """Return the states of an attempt's nodes, by one list of its pods."""
    if not folder_exists(handle):
        return None
    before = observe.read_known(handle)
    try:
        listed = observe.list_pods(handle, transport)
    except ClusterkitError as error:
        return observe.observation(handle, before, transport, unreachable=error.message)
    objects = RunObjects(handle.plan, transport)
    pods = observe.known_after(before, listed, handle.plan)
    if not listed and (unknown := observe.ended_elsewhere(handle, pods, objects)) is not None:
        return unknown
    if handle.plan.restarts:
        # Which attempt runs in the pods is in their logs alone, in each node's the same.
        with contextlib.suppress(ClusterkitError):
            fetch_logs(handle, transport, [pod for pod in listed.values() if pod.node == 0])
    waits_for = (
        None if observe.all_nodes_had_pods(handle.plan, pods) else observe.why_no_pods(objects)
    )
    long_ago = objects.time() - handle.plan.lost_after
    lost = {pod.uid for pod in pods.values() if (pod.unreachable_since or math.inf) < long_ago}
    return observe.observation(handle, pods, transport, waits_for=waits_for, lost=lost)


class PodWatch:
    """A thread that keeps up with the pods of an attempt. Read its attributes under its lock.

    Attributes:
        pods: all that are known, by name; replaced by a new dict at each change.
        listed: whether the API server has listed them yet.
        unreachable: why the pods cannot be seen now.
    """

    def __init__(self, handle: RunHandle, objects: RunObjects, notify: Callable[[], None]) -> None:
        self._handle, self._objects, self._notify = handle, objects, notify
        self._closed = threading.Event()
        self._stream: AnswerStream | None = None
        self._event_causes: dict[str, str] = {}
        self.lock = threading.Lock()
        self.pods = observe.read_known(handle)
        self.listed = False
        self.unreachable: str | None = None
        self._thread = RestartableThread(self._run)
        self.ensure, self.join = self._thread.ensure, self._thread.join

    def _run(self) -> None:
        since = ""
        while not self._closed.is_set():
            try:
                # After a watch has ended, the next list shows what was missed.
                self._follow(self._list())
            except Exception as error:
                # Whatever it is, it is this machine's trouble or the connection's, not the run's.
                why = f"the pods cannot be followed: {type(error).__name__}: {error}"
                if isinstance(error, ClusterkitError):
                    why = error.message
                if news := self.unreachable is None:
                    since = time.strftime("%H:%M:%S")
                with self.lock:
                    self.unreachable = f"{why} (since {since})"
                if news:
                    self._notify()
                self._closed.wait(RETRY_SECONDS)

    def _list(self) -> str:
        """List all pods, and return the version at which to begin a watch."""
        items, version = self._objects.listed(self._objects.pods_path())
        pods = self._with_causes(observe.read_pods(self._handle, self._objects, items))
        with self.lock:
            self.pods = observe.known_after(self.pods, pods, self._handle.plan)
            self.listed, self.unreachable = True, None
        self._notify()
        return version

    def _follow(self, version: str) -> None:
        """Take the events of one watch, until it ends or nothing comes."""
        # With bookmarks the server sends something about every minute.
        path = self._objects.pods_path(
            watch="1", resourceVersion=version, allowWatchBookmarks="true",
            timeoutSeconds=str(WATCH_SECONDS),
        )  # fmt: skip
        rest = b""
        with self._objects.stream(path, SILENT_SECONDS) as stream:
            self._stream = stream
            with contextlib.suppress(SubmitFailed):
                while not self._closed.is_set() and (data := stream.read()):
                    *lines, rest = (rest + data).split(b"\n")
                    for event in map(json.loads, lines):
                        if event["type"] == "ERROR":  # the version is too old
                            return
                        if event["type"] != "BOOKMARK":
                            self._take(event)

    def _take(self, event: Mapping[str, Any]) -> None:
        pods = observe.read_pods(self._handle, self._objects, [event["object"]])
        pods = self._with_causes(pods)
        with self.lock:
            self.pods = updated(self.pods, pods, replaceable=observe.replaces(self._handle.plan))
            if event["type"] == "DELETED":
                self.pods = without(self.pods, (pod.uid for pod in pods.values()))
        self._notify()

    def _with_causes(self, pods: dict[str, Pod]) -> dict[str, Pod]:
        """Add the causes of ends that only the namespace or events have."""
        for name, pod in pods.items():
            removed_by = pod.removed_by
            ends = pod.state is PodState.TERMINATING
            if ends and removed_by is None and self._objects.namespace_deleted:
                removed_by = f"its namespace, {self._objects.namespace}, is being deleted"
            if needs_events(pod):
                if pod.uid not in self._event_causes:
                    with contextlib.suppress(ClusterkitError, ValueError):
                        events = self._objects.events(f"involvedObject.uid={pod.uid}")
                        if cause := cause_from_events(events, self._objects.namespace):
                            self._event_causes[pod.uid] = cause
                removed_by = self._event_causes.get(pod.uid, removed_by)
            pods[name] = replace(pod, removed_by=removed_by)
        return pods

    def close(self) -> None:
        self._closed.set()
        if self._stream is not None:
            self._stream.stop()


class PodMonitor:
    """The states of an attempt's nodes, while its pods are watched and their logs followed."""

    def __init__(self, handle: RunHandle, transport: Transport) -> None:
        self._handle, self._transport = handle, transport
        self._objects = RunObjects(handle.plan, transport)
        self._closed = threading.Event()
        self._changed = threading.Event()
        self._changed.set()
        self._watch = PodWatch(handle, self._objects, self._changed.set)
        self._recorded: Mapping[str, Pod] = observe.read_known(handle)
        self._last: Observation | None = None
        self._refresh_at = 0.0
        self._waits_for: str | None = None
        self._ask_at = time.monotonic() + REFRESH_SECONDS
        self._logs: dict[tuple[str, str, int], LogFollower] = {}
        self._ended_at: dict[str, float] = {}
        self._silent: dict[tuple[str, float], float] = {}
        self._lost_pods: frozenset[str] = frozenset()
        self._force_at: dict[str, float] = {}

    def status(self) -> Observation | None:
        if not folder_exists(self._handle):
            return None
        self._watch.ensure()
        now, plan = time.monotonic(), self._handle.plan
        changed = self._changed.is_set()
        self._changed.clear()
        with self._watch.lock:
            pods, listed = self._watch.pods, self._watch.listed
            unreachable = self._watch.unreachable
        if unreachable is not None:
            # What has happened meanwhile is not known, as little as that nothing has.
            self._silent = {}
        else:
            if not listed:
                return observe.observation(self._handle, pods, self._transport)
            if now >= self._ask_at and not observe.all_nodes_had_pods(plan, pods):
                self._ask_at = now + REFRESH_SECONDS
                waits_for = observe.why_no_pods(self._objects)
                changed, self._waits_for = changed or waits_for != self._waits_for, waits_for
            lost = self._lost(pods, now, plan.lost_after)
            changed, self._lost_pods = changed or lost != self._lost_pods, lost
            if plan.replace_lost:
                self._remove_lost(pods, now)
        if self._last is None or changed or now >= self._refresh_at:
            self._refresh_at = now + REFRESH_SECONDS
            incomplete = self._incomplete_logs(pods, now) if listed else frozenset()
            if incomplete:
                self._refresh_at = now
            self._last = observe.observation(
                self._handle, pods, self._transport, waits_for=self._waits_for,
                unreachable=unreachable, incomplete_logs=incomplete, unseen=State.PENDING,
                lost=self._lost_pods,
            )  # fmt: skip
        known = {name: self._with_log(pod) for name, pod in pods.items()}
        if known != self._recorded:
            self._recorded = known
            observe.write_known(self._handle, known)
        return self._last

    def _lost(self, pods: Mapping[str, Pod], now: float, seconds: float) -> frozenset[str]:
        """Return the uids of pods whose nodes of the cluster have not answered for so long.

        Seen by this machine's monotonic clock: its time of day may differ from the server's.
        """
        silent = ((pod.uid, pod.unreachable_since) for pod in pods.values() if not pod.gone)
        self._silent = {
            (uid, since): self._silent.get((uid, since), now)
            for uid, since in silent
            if since is not None
        }
        return frozenset(uid for (uid, _), at in self._silent.items() if now >= at + seconds)

    def _remove_lost(self, pods: Mapping[str, Pod], now: float) -> None:
        """Remove by force pods on lost nodes, as the run's watcher in the cluster does if any.

        By then their ranks, which do not hear of node 0, have ended.
        """
        plan = self._handle.plan
        lost = self._lost(pods, now, plan.lost_after + plan.stop_grace)
        for pod in pods.values():
            if pod.node is None or pod.uid not in lost:
                continue
            if now >= self._force_at.get(pod.uid, now):
                self._force_at[pod.uid] = now + REFRESH_SECONDS
                with contextlib.suppress(ClusterkitError):
                    self._objects.force(pod)

    def _with_log(self, pod: Pod) -> Pod:
        log = self._logs.get((pod.name, pod.uid, pod.restarts))
        return replace(pod, logged=True) if log is not None and log.complete.is_set() else pod

    def _incomplete_logs(self, pods: Mapping[str, Pod], now: float) -> frozenset[str]:
        """Follow the logs of all pods; returns the names of those that have ended a short time ago
        and whose logs are still to come."""
        incomplete = set()
        for pod in pods.values():
            if pod.gone or pod.node is None or not pod.started:
                continue
            log = self._log_of(pod)
            if pod.exit_code is not None and not log.complete.is_set():
                log.container_ended()
                if now < self._ended_at.setdefault(pod.uid, now) + LOG_SECONDS:
                    incomplete.add(pod.name)
        return frozenset(incomplete)

    def _log_of(self, pod: Pod) -> LogFollower:
        key = (pod.name, pod.uid, pod.restarts)
        if key not in self._logs:
            for (_, uid, _), log in self._logs.items():
                if log.node == pod.node and uid != pod.uid:
                    # The rest of its log is on a node of the cluster that does not answer.
                    log.abandon()
            self._logs[key] = LogFollower(
                self._handle, pod, self._transport, self._closed, self._changed.set
            )
        self._logs[key].ensure()
        return self._logs[key]

    def close(self) -> None:
        """Stop watching; the pods go on."""
        self._closed.set()
        self._watch.close()
        for log in self._logs.values():
            log.close()
        self._watch.join(2 * RETRY_SECONDS)
        for log in self._logs.values():
            log.join(2 * RETRY_SECONDS)
