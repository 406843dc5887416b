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
from pathlib import Path
from typing import Any

import msgspec

from clusterkit.backends.base import ClusterProgress, HandedOver, Observation
from clusterkit.backends.kubernetes.client import document
from clusterkit.backends.kubernetes.guard import SUBMITTER, watch_name
from clusterkit.backends.kubernetes.judge import Pod, read_pod
from clusterkit.backends.kubernetes.observe import (
    HOST,
    Catcher,
    PodWatcher,
    Removed,
    flavor_of,
    job_path,
    keep,
    known,
    local_dir,
    name_of,
    node_file,
    object_path,
    put_removed,
    snapshot,
    tool,
)
from clusterkit.backends.kubernetes.pods import ATTEMPT
from clusterkit.backends.kubernetes.watcher import WATCHER, lease_seconds
from clusterkit.errors import ClusterkitError, Unavailable
from clusterkit.plan import Plan
from clusterkit.runs import Event, RunFolder
from clusterkit.runs import RunHandle as Handle
from clusterkit.status import State
from clusterkit.transport import Transport

AGAIN_SECONDS = 1.0
BEGIN_SECONDS = 60.0
"""How long the watcher may take to make the job of an attempt that it has begun."""


def guarded(plan: Plan) -> bool:
    """Whether the run has a watcher in the cluster."""
    return plan.note("watcher") == "on"


class Holder:
    """Renews the run's Lease for as long as somebody here watches over it."""

    def __init__(self, plan: Plan, transport: Transport) -> None:
        self._plan = plan
        self._transport = transport
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
        plan = self._plan
        name = watch_name(name_of(plan))
        path = object_path(plan, "coordination.k8s.io/v1", "leases", name)
        for _ in range(5):
            found = document(tool(plan), path, self._transport)
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
        argv = [
            *tool(self._plan), "patch", "lease", watch_name(name_of(self._plan)),
            "--type", "merge", "--patch", json.dumps(body), "--output", "json",
        ]  # fmt: skip
        done = self._transport.run(HOST, argv)
        if done.exit_code:
            if "(Conflict)" in done.stderr or "(NotFound)" in done.stderr:
                return False
            raise Unavailable(done.stderr.strip())
        self._version = str(json.loads(done.stdout)["metadata"]["resourceVersion"])
        return True

    def close(self) -> None:
        """Renew it no more."""
        self._closed.set()
        self._thread.join(2 * AGAIN_SECONDS)


def _clock() -> float:
    # The other clocks stand still while a machine sleeps.
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeasedWatcher:
    """Watches over a run that has a watcher in the cluster as well."""

    def __init__(self, handle: Handle, transport: Transport) -> None:
        self._handle = handle
        self._transport = transport
        self._holder = Holder(handle.plan, transport)
        self._watcher = PodWatcher(handle, transport)
        self._last: Observation | None = None

    def status(self) -> Observation | None:
        """As `Backend.status`; says so when the watcher in the cluster has gone on without us.

        Raises:
            HandedOver: somebody else watches over the run by now.
        """
        held = self._holder.check()
        seen = self._watcher.status()
        if seen is None or (held and not self._holder.taken):
            self._last = seen
            return seen
        try:
            found = newest(self._handle, self._transport) if held else None
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
        self._watcher.close()
        self._holder.close()


# ---------------------------------------------------------------- what it wrote


def newest(handle: Handle, transport: Transport) -> ClusterProgress:
    """The newest attempt there is; what the watcher wrote of others is brought to the run's folder.

    Raises:
        Unavailable: the API server does not answer.
    """
    plan = handle.plan
    if not guarded(plan) or not known(plan, transport):
        return ClusterProgress(attempt=handle.attempt)
    record = _record(plan, transport)
    _restore(handle, record, transport)
    if "verdict" in record:
        told = json.loads(record["verdict"])
        return ClusterProgress(
            attempt=max(handle.attempt, int(told["attempt"])),
            late=told.get("late") == "late",
            watched=True,
            finished=True,
        )
    wanted = int(record.get("restarting", "0"))
    deadline = time.monotonic() + BEGIN_SECONDS
    while (there := _job_attempt(plan, transport)) < wanted and time.monotonic() < deadline:
        time.sleep(AGAIN_SECONDS)
    number = max(handle.attempt, there, wanted)
    return ClusterProgress(attempt=number, begun=there >= number, watched=there > 0)


def _record(plan: Plan, transport: Transport) -> Mapping[str, str]:
    path = object_path(plan, "v1", "configmaps", watch_name(name_of(plan)))
    found = document(tool(plan), path, transport)
    return (found or {}).get("data") or {}


def _job_attempt(plan: Plan, transport: Transport) -> int:
    """Which attempt the job is that is there; 0: there is none."""
    found = document(tool(plan), job_path(plan), transport)
    text = ((found or {}).get("metadata") or {}).get("labels", {}).get(ATTEMPT, "")
    return int(text) if text.isdigit() else 0


def _restore(handle: Handle, record: Mapping[str, str], transport: Transport) -> None:
    """Bring what is recorded to the run's folder: events, how pods ended, ends of their logs."""
    folder = RunFolder(Path(local_dir(handle.plan)))
    there = {(event.at, event.text) for event in folder.records("events.jsonl", Event)}
    for line in record.get("events", "").splitlines():
        told = json.loads(line)
        if (told["at"], told["text"]) not in there:
            folder.append("events.jsonl", Event(at=told["at"], attempt=0, text=told["text"]))
    for key, text in record.items():
        prefix, _, number = key.partition("-")
        if prefix == "attempt" and number.isdigit():
            one = dataclasses.replace(handle, attempt=int(number))
            _restore_attempt(one, json.loads(text), transport)


def _restore_attempt(handle: Handle, entries: list[dict[str, Any]], transport: Transport) -> None:
    pods: dict[str, Pod] = snapshot(handle, transport)
    running = set()
    for entry in entries:
        pod = read_pod(entry["pod"], flavor_of(handle.plan).INDEX)
        if pod.name in pods and pods[pod.name].exit_code is not None:
            continue
        pods[pod.name] = pod
        if pod.exit_code is None:
            running.add(pod.name)
        if pod.node is not None:
            Catcher(Path(node_file(handle, pod.node, "log"))).append(entry["log"].encode())
    with contextlib.suppress(ClusterkitError):
        keep(handle, pods, transport)
        if running:
            put_removed(handle, Removed(ended=frozenset(running)), transport)
