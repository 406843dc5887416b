"""Taking turns with the watcher that a run has in the cluster, and reading what it wrote.

The Lease ``NAME-watch`` says who watches over the run; `clusterkit.backends.kubernetes.watcher`
takes it when nobody has renewed it for a while.
"""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import json
import math
import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from clusterkit.backends.base import ClusterProgress, HandedOver, Observation
from clusterkit.backends.kubernetes.apply import Refusal
from clusterkit.backends.kubernetes.guard import SUBMITTER, watch_name
from clusterkit.backends.kubernetes.judge import Pod, attempt_of, read_pod
from clusterkit.backends.kubernetes.monitor import PodMonitor
from clusterkit.backends.kubernetes.pod_log import LogLines
from clusterkit.backends.kubernetes.records import Removed, keep, known, put_removed, snapshot
from clusterkit.backends.kubernetes.server import RunObjects
from clusterkit.backends.kubernetes.watcher import WATCHER, lease_seconds
from clusterkit.errors import ClusterkitError
from clusterkit.plan import KubernetesNative, Plan
from clusterkit.runs import Event, RunHandle
from clusterkit.status import State
from clusterkit.transport import Transport

AGAIN_SECONDS = 1.0
BEGIN_SECONDS = 60.0
"""How long the watcher may take to make the job of an attempt that it has begun."""


def guarded(plan: Plan) -> bool:
    """Whether the run has a watcher in the cluster."""
    return isinstance(plan.native, KubernetesNative) and plan.native.watched


class Holder:
    """Renews the run's Lease for as long as somebody here watches over it."""

    def __init__(self, plan: Plan, transport: Transport) -> None:
        self._plan = plan
        self._objects = RunObjects(plan, transport)
        self._name = watch_name(self._objects.name)
        self._every = lease_seconds(plan.lost_after) / 3
        """Seconds between two renewals."""
        self._identity = f"{getpass.getuser()}@{socket.gethostname()}:{os.getpid()}:{time.time()}"
        self.taken = False
        """Whether the watcher in the cluster has had it; for whoever reads that to set back."""
        self._version = ""
        self._held = False
        self._renewed = _clock()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def check(self) -> bool:
        """Renew it, if that is overdue: this machine may have slept. Whether it could be.

        Raises:
            HandedOver: somebody else watches over the run by now.
        """
        if _clock() < self._renewed + 2 * self._every:
            return True
        try:
            self._renew()
        except HandedOver:
            raise
        except ClusterkitError:
            return False  # the watch of the pods tells of it
        return True

    def _run(self) -> None:
        pause = 0.0
        while not self._closed.wait(pause):
            try:
                self._renew()
                pause = self._every
            except HandedOver:
                return  # `check` will find that out
            except ClusterkitError:
                pause = AGAIN_SECONDS

    def _renew(self) -> None:
        with self._lock:
            now = _clock()
            if not (self._held and self._patch()):
                self._take()
            self._renewed = now

    def _take(self) -> None:
        plan, objects = self._plan, self._objects
        for _ in range(5):
            found = objects.find(objects.path("coordination.k8s.io/v1", "leases", self._name))
            if found is None:
                return  # somebody removes the run: the pods tell of it
            holder = str((found.get("spec") or {}).get("holderIdentity", ""))
            if self._held and holder not in (self._identity, SUBMITTER, WATCHER):
                who = holder.partition(":")[0]
                raise HandedOver(
                    f"{who} watches over run {plan.run_id} now",
                    hint=f"clusterkit attach {plan.run_id} takes it back",
                )
            self._version = str(found["metadata"]["resourceVersion"])
            if self._patch():
                self.taken = self.taken or holder == WATCHER
                self._held = True
                return

    def _patch(self) -> bool:
        """Whether nobody had changed or removed it meanwhile."""
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
        body = {
            "metadata": {"resourceVersion": self._version},
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": math.ceil(lease_seconds(self._plan.lost_after)),
                "renewTime": f"{stamp}.{int(now % 1 * 1e6):06d}Z",
            },
        }
        objects = self._objects
        path = objects.path("coordination.k8s.io/v1", "leases", self._name)
        try:
            made = objects.patch(path, body)
        except Refusal as error:
            if error.reason in ("Conflict", "NotFound"):
                return False
            raise
        self._version = str(made["metadata"]["resourceVersion"])
        return True

    def close(self) -> None:
        """Renew it no more."""
        self._closed.set()
        self._thread.join(2 * AGAIN_SECONDS)


def _clock() -> float:
    # The other clocks stand still while a machine sleeps.
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeasedMonitor:
    """Follows an attempt of a run that has a watcher in the cluster as well."""

    def __init__(self, handle: RunHandle, transport: Transport) -> None:
        self._handle = handle
        self._transport = transport
        self._holder = Holder(handle.plan, transport)
        self._monitor = PodMonitor(handle, transport)
        self._last: Observation | None = None

    def status(self) -> Observation | None:
        """As `Backend.status`; says so when the watcher in the cluster has gone on without us.

        Raises:
            HandedOver: somebody else watches over the run by now.
        """
        held = self._holder.check()
        seen = self._monitor.status()
        if seen is None or (held and not self._holder.taken):
            self._last = seen
            return seen
        try:
            found = progress(self._handle, self._transport) if held else None
        except ClusterkitError:
            found = None
        if found is None:
            # What looks like a failure may be the watcher's work.
            states = {node.state for node in seen.nodes}
            failed = bool(states & {State.FAILED, State.CANCELLED})
            return self._last if failed and self._last is not None else seen
        self._holder.taken = False
        if found.attempt > self._handle.attempt or found.late:
            return msgspec.structs.replace(seen, superseded=found)
        self._last = seen
        return seen

    def close(self) -> None:
        self._monitor.close()
        self._holder.close()


# ---------------------------------------------------------------- what it wrote


def progress(handle: RunHandle, transport: Transport) -> ClusterProgress:
    """How far the run has come; what the watcher recorded is brought to the run's folder.

    Raises:
        Unavailable: the API server does not answer.
    """
    plan = handle.plan
    if not guarded(plan) or not known(plan, transport):
        return ClusterProgress(attempt=handle.attempt)
    objects = RunObjects(plan, transport)
    found = objects.find(objects.path("v1", "configmaps", watch_name(objects.name)))
    record = (found or {}).get("data") or {}
    _restore(handle, objects, record)
    if "verdict" in record:
        verdict = json.loads(record["verdict"])
        return ClusterProgress(
            attempt=max(handle.attempt, int(verdict["attempt"])),
            late=verdict.get("late") == "late",
            watched=True,
            finished=True,
        )
    wanted = int(record.get("restarting", "0"))
    deadline = time.monotonic() + BEGIN_SECONDS
    while (there := _job_attempt(objects)) < wanted and time.monotonic() < deadline:
        time.sleep(AGAIN_SECONDS)
    number = max(handle.attempt, there, wanted)
    return ClusterProgress(attempt=number, begun=there >= number, watched=there > 0)


def _job_attempt(objects: RunObjects) -> int:
    """Which attempt the job is that is there; 0: there is none."""
    found = objects.find(objects.job_path)
    return 0 if found is None else attempt_of(found)


def _restore(handle: RunHandle, objects: RunObjects, record: Mapping[str, str]) -> None:
    """Bring what is recorded to the run's folder: events, how pods ended, ends of their logs."""
    folder = handle.folder
    there = {(event.at, event.text) for event in folder.records("events.jsonl", Event)}
    for line in record.get("events", "").splitlines():
        event = json.loads(line)
        if (event["at"], event["text"]) not in there:
            folder.append("events.jsonl", Event(at=event["at"], attempt=0, text=event["text"]))
    for key, text in record.items():
        prefix, _, number = key.partition("-")
        if prefix == "attempt" and number.isdigit():
            one = dataclasses.replace(handle, attempt=int(number))
            _restore_attempt(one, objects, json.loads(text))


def _restore_attempt(handle: RunHandle, objects: RunObjects, entries: list[dict[str, Any]]) -> None:
    pods: dict[str, Pod] = snapshot(handle)
    running = set()
    for entry in entries:
        pod = read_pod(entry["pod"], objects.flavor.index)
        if pod.name in pods and pods[pod.name].exit_code is not None:
            continue
        pods[pod.name] = pod
        if pod.exit_code is None:
            running.add(pod.name)
        if pod.node is not None:
            log = handle.folder.node_dir(handle.attempt, pod.node) / "log"
            LogLines(log).append(entry["log"].encode())
    keep(handle, pods)
    if running:
        with contextlib.suppress(ClusterkitError):
            put_removed(handle, Removed(ended=frozenset(running)))
