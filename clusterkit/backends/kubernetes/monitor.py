"""Keeps up with a run's pods while somebody watches it: one watch, one stream for each log."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from clusterkit.backends.base import Observation
from clusterkit.backends.kubernetes.client import RawStream
from clusterkit.backends.kubernetes.judge import Pod, cause_from_events, unexplained
from clusterkit.backends.kubernetes.observe import (
    all_nodes_had_pods,
    keep,
    observation,
    read_pods,
    snapshot,
    why_no_pods,
    with_seen,
)
from clusterkit.backends.kubernetes.pod_log import AGAIN_SECONDS, LOG_SECONDS, PodLog
from clusterkit.backends.kubernetes.server import RunObjects
from clusterkit.backends.node_status import folder_exists
from clusterkit.errors import ClusterkitError
from clusterkit.run.folder import RunHandle
from clusterkit.run.status import State
from clusterkit.transport import Transport

WATCH_SECONDS = 280
"""How long one watch lasts; the server ends it."""
NEWS_SECONDS = 5.0
"""How often it is asked why there are no pods, and states are judged anew although nothing came."""


class PodMonitor:
    """Follows one attempt."""

    def __init__(self, handle: RunHandle, transport: Transport) -> None:
        self._handle = handle
        self._transport = transport
        self._objects = RunObjects(handle.plan, transport)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._pods: dict[str, Pod] = {}
        self._before = self._kept = snapshot(handle)
        self._listed = False
        self._news = True
        self._judge_at = 0.0
        self._silent: str | None = None
        self._waits: str | None = None
        self._ask_at = time.monotonic() + NEWS_SECONDS
        self._logs: dict[tuple[str, str, int], PodLog] = {}
        self._ended_at: dict[str, float] = {}
        self._stream: RawStream | None = None
        self._last: Observation | None = None
        self._given_up: dict[str, float] = {}
        self._events: dict[str, str] = {}
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def status(self) -> Observation | None:
        if not folder_exists(self._handle):
            return None
        now = time.monotonic()
        with self._lock:
            news, self._news = self._news, False
            pods, silent, listed = dict(self._pods), self._silent, self._listed
            # At one moment: a pod that is known from before, and not there, is gone.
            before = self._before = with_seen(self._before, self._pods, self._handle.plan)
        if before != self._kept:
            self._kept = before
            keep(self._handle, before)
        whole = all_nodes_had_pods(self._handle.plan, pods, before)
        if listed and not whole and silent is None and now >= self._ask_at:
            self._ask_at = now + NEWS_SECONDS
            waits = why_no_pods(self._objects)
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
        """Remove by force a pod whose node of the cluster has not answered for long, as the run's
        watcher in the cluster does, where it has one."""
        since = pod.silent_since
        if since is None or pod.node is None or time.time() < since + self._handle.plan.lost_after:
            return
        if now >= self._given_up.get(pod.uid, now):
            self._given_up[pod.uid] = now + NEWS_SECONDS
            with contextlib.suppress(ClusterkitError):
                self._objects.force(pod)

    def _log_of(self, pod: Pod) -> PodLog | None:
        """The follower of a pod's log, made as soon as there can be one."""
        if pod.node is None or not pod.started:
            return None
        key = (pod.name, pod.uid, pod.restarts)
        if key not in self._logs:
            for (_, uid, _), log in self._logs.items():
                if log.node == pod.node and uid != pod.uid:
                    # What a node of the cluster that does not answer still holds will not come.
                    log.give_up()
            self._logs[key] = PodLog(self._handle, pod, self._transport, self._closed, self._told)
        return self._logs[key]

    def _told(self) -> None:
        """A node's agent has told of itself."""
        with self._lock:
            self._news = True

    # -- the watch

    def _watch(self) -> None:
        while not self._closed.is_set():
            try:
                # When a watch has ended or broken off, the next list tells what was missed.
                self._follow(self._list())
            except ClusterkitError as error:
                with self._lock:
                    self._news = self._news or self._silent is None
                    self._silent = error.message
                self._closed.wait(AGAIN_SECONDS)

    def _list(self) -> str:
        listed = self._objects.get(self._objects.pods_path())
        pods = self._explained(read_pods(self._handle, self._objects, listed["items"]))
        with self._lock:
            self._pods = pods
            self._listed, self._news, self._silent = True, True, None
        return str(listed["metadata"]["resourceVersion"])

    def _follow(self, version: str) -> None:
        """One watch, to its end."""
        path = self._objects.pods_path(
            watch="1", resourceVersion=version, timeoutSeconds=str(WATCH_SECONDS)
        )
        rest = b""
        with self._objects.stream(path) as stream:
            self._stream = stream
            while not self._closed.is_set() and (data := stream.read(WATCH_SECONDS + 20)):
                *lines, rest = (rest + data).split(b"\n")
                for event in map(json.loads, lines):
                    if event["type"] == "ERROR":  # it is too far behind
                        return
                    self._take(event)

    def _take(self, event: Mapping[str, Any]) -> None:
        read = self._explained(read_pods(self._handle, self._objects, [event["object"]]))
        with self._lock:
            self._news = True
            # At once: its end may be told by this alone, and it may be gone the next moment.
            self._before = with_seen(self._before, read, self._handle.plan)
            if event["type"] == "DELETED":
                self._pods.pop(event["object"]["metadata"]["name"], None)
            else:
                self._pods.update(read)

    def _explained(self, pods: dict[str, Pod]) -> dict[str, Pod]:
        """The pods, with what their events say of why they were ended."""
        for name, pod in pods.items():
            if pod.leaving and pod.removed_by is None and self._objects.namespace_goes:
                pods[name] = msgspec.structs.replace(
                    pod, removed_by=f"its namespace, {self._objects.namespace}, is being deleted"
                )
            if not unexplained(pod):
                continue
            if pod.uid not in self._events:
                with contextlib.suppress(ClusterkitError, ValueError):
                    events = self._objects.events(f"involvedObject.uid={pod.uid}")
                    if said := cause_from_events(events, self._objects.namespace):
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
