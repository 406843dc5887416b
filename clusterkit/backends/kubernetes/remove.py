"""Ending a run: its job, whatever that made, and what was made for it."""

from __future__ import annotations

import contextlib
import math
import time
from functools import cache
from urllib.parse import quote

import msgspec

from clusterkit.backends.kubernetes.client import Forbidden
from clusterkit.backends.kubernetes.judge import read_pod
from clusterkit.backends.kubernetes.observe import pods_of
from clusterkit.backends.kubernetes.pods import STOP_EXTRA, code_of
from clusterkit.backends.kubernetes.records import (
    Removed,
    keep,
    known,
    put_removed,
    removed,
    snapshot,
    with_seen,
)
from clusterkit.backends.kubernetes.server import RunObjects, objects_of
from clusterkit.backends.kubernetes.text import Object
from clusterkit.errors import ClusterkitError, Unavailable
from clusterkit.plan import Plan
from clusterkit.runs import MADE, RunHandle
from clusterkit.transport import Transport

LOOK_SECONDS = 0.25
GONE_SECONDS = 20.0
"""How long no pod may go, beyond the time that they have to end."""
AGAIN_SECONDS = 2.0
"""Pause before pods are asked to end once more: an operator may have been making some."""
NAMED = 3
"""How many pods an error names."""


def remove(handle: RunHandle, transport: Transport) -> None:
    """End and remove everything of the run; how its pods were is kept. What this run did not make
    stays: another one of the same id may be there, which somebody submitted elsewhere.

    Raises:
        Unavailable: the API server does not answer, will not, or a node does not.
    """
    plan, objects = handle.plan, RunObjects(handle.plan, transport)
    if known(handle) and not handle.folder.file(MADE).exists():
        return
    job, *others = _made_by(plan, objects)
    try:
        if known(handle):
            pods = pods_of(handle, transport)
            keep(handle, with_seen(snapshot(handle), pods, plan))
            if removed(handle) is None:
                ended = frozenset(pod.name for pod in pods.values() if pod.ran)
                put_removed(handle, Removed(ended))
        # Before the pods: without it nobody makes new ones.
        objects.delete(job)
        _delete_pods(objects)
        for path in others:
            objects.delete(path)
        lost = _await_gone(plan, objects)
        if known(handle):
            by_us = removed(handle) or Removed()
            after = msgspec.structs.replace(by_us, lost=by_us.lost | lost, complete=True)
            if after != by_us:
                put_removed(handle, after)
    except ClusterkitError as error:
        raise Unavailable(
            f"could not end run {plan.run_id}: {error.message}",
            hint=f"clusterkit cancel {plan.run_id} again, once it answers",
        ) from error


def _made_by(plan: Plan, objects: RunObjects) -> list[str]:
    """Where the API server has what the run's plan made there; the job is the first."""
    named = [(each["apiVersion"], each["kind"], each["metadata"]["name"])
             for each in reversed(objects_of(plan))]  # fmt: skip
    files = [("v1", kind, objects.name) for kind in ("ConfigMap", "Secret")]
    code = [("v1", "ConfigMap", code_of(objects.name))] if plan.trees else []
    return [objects.path(*each) for each in (*named, *files, *code)]


def _delete_pods(objects: RunObjects) -> None:
    """Ask all of them to end, in one request; and the services that an operator made, one a pod.

    The cluster's own garbage collection asks for one after the other: 200 take it 15 s. It does
    get there, so that it is no error if we may not.
    """
    collections = [objects.pods_path()]
    if objects.flavor.kind == "PyTorchJob":
        selector = quote(f"training.kubeflow.org/job-name={objects.name}", safe="")
        collections.append(f"{objects.path('v1', 'Service')}?labelSelector={selector}")
    for path in collections:
        with contextlib.suppress(Forbidden):
            objects.delete(path)


def _await_gone(plan: Plan, objects: RunObjects) -> frozenset[str]:
    """Wait for the end of all pods; gives those whose nodes of the cluster do not answer."""
    lost: set[str] = set()
    started = again = time.monotonic()
    late_at = started + plan.stop_grace + STOP_EXTRA
    deadline, fewest = late_at + GONE_SECONDS, math.inf
    while True:
        now = time.monotonic()
        late = now > late_at
        # One pod tells as well as all of them that not all are gone.
        items = objects.get(objects.pods_path(**({} if late else {"limit": "1"})))["items"]
        if not items:
            return frozenset(lost)
        if now > again + AGAIN_SECONDS:
            again = now
            _delete_pods(objects)
        if late:
            if len(items) < fewest:
                fewest, deadline = len(items), max(deadline, now + GONE_SECONDS)
            lost |= _end_lost(objects, items)
        if now > deadline:
            names = sorted(each["metadata"]["name"] for each in items)
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            raise Unavailable(f"pods that do not end: {', '.join(names[:NAMED])}{more}")
        time.sleep(LOOK_SECONDS)


def _end_lost(objects: RunObjects, items: list[Object]) -> set[str]:
    """Remove by force the pods on nodes that do not answer: nobody there will say that they have
    ended."""
    ready = cache(objects.node_ready)
    lost: set[str] = set()
    for pod in (read_pod(each, None) for each in items):
        gone = pod.host and ready(pod.host) is False
        if pod.leaving and (gone or pod.silent_since is not None):
            lost.add(pod.name)
            objects.force(pod)
    return lost
