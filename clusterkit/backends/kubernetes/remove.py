"""Ending a run: its job, whatever that made, and what was made for it."""

from __future__ import annotations

import json
import math
import time
from typing import Any
from urllib.parse import quote

import msgspec

from clusterkit.backends.kubernetes.guard import watch_name
from clusterkit.backends.kubernetes.judge import read_pod
from clusterkit.backends.kubernetes.lease import guarded
from clusterkit.backends.kubernetes.observe import (
    HOST,
    Removed,
    flavor_of,
    job_path,
    keep,
    known,
    name_of,
    namespace,
    node_ready,
    object_path,
    pods_of,
    pods_path,
    put_removed,
    raw,
    removed,
    snapshot,
    tool,
    with_seen,
)
from clusterkit.backends.kubernetes.pods import STOP_EXTRA
from clusterkit.errors import ClusterkitError, Unavailable
from clusterkit.plan import Plan
from clusterkit.runs import RunHandle as Handle
from clusterkit.transport import Transport

LOOK_SECONDS = 0.25
GONE_SECONDS = 20.0
"""How long no pod may go, beyond the time that they have to end."""
AGAIN_SECONDS = 2.0
"""Pause before pods are asked to end once more: an operator may have been making some."""
NAMED = 3
"""How many pods an error names."""


def remove(handle: Handle, transport: Transport) -> None:
    """End and remove everything of the run; how its pods were is kept.

    Raises:
        Unavailable: the API server does not answer, will not, or a node does not.
    """
    plan = handle.plan
    name, watch = name_of(plan), watch_name(name_of(plan))
    try:
        if known(plan, transport):
            pods = pods_of(handle, transport)
            before = snapshot(handle, transport)
            keep(handle, with_seen(before, pods, plan), transport)
            if removed(handle, transport) is None:
                ended = frozenset(pod.name for pod in pods.values() if pod.ran)
                put_removed(handle, Removed(ended), transport)
        if guarded(plan):
            # First, or it would go on with the run.
            _delete(plan, object_path(plan, "batch/v1", "jobs", watch), transport)
        if plan.trees:
            _delete(plan, object_path(plan, "v1", "configmaps", f"{name}-code"), transport)
        # Before the pods: without it nobody makes new ones.
        _delete(plan, job_path(plan), transport)
        _delete_pods(plan, transport)
        for kind in _kinds(plan):
            _delete(plan, object_path(plan, *kind, name), transport)
        for kind in _GUARD if guarded(plan) else ():
            _delete(plan, object_path(plan, *kind, watch), transport)
        lost = _await_gone(plan, transport)
        if known(plan, transport):
            by_us = removed(handle, transport) or Removed()
            after = msgspec.structs.replace(by_us, lost=by_us.lost | lost, complete=True)
            if after != by_us:
                put_removed(handle, after, transport)
    except ClusterkitError as error:
        raise Unavailable(
            f"could not end run {plan.run_id}: {error.message}",
            hint=f"clusterkit cancel {plan.run_id} again, once it answers",
        ) from error


def _kinds(plan: Plan) -> list[tuple[str, str]]:
    """What a run may have besides its job: API and plural."""
    flavor = flavor_of(plan)
    found: list[tuple[str, str]] = []
    if flavor.KIND == "TrainJob":
        found.append((flavor.API, "trainingruntimes"))
    if flavor.KIND == "Job":
        found.append(("v1", "services"))
    return [*found, ("v1", "configmaps"), ("v1", "secrets")]


_GUARD = (
    ("coordination.k8s.io/v1", "leases"), ("v1", "configmaps"), ("v1", "serviceaccounts"),
    ("rbac.authorization.k8s.io/v1", "rolebindings"), ("rbac.authorization.k8s.io/v1", "roles"),
)  # fmt: skip
"""What a watcher in the cluster has besides its job."""


def _delete(plan: Plan, path: str, transport: Transport, **query: str) -> None:
    options = {"propagationPolicy": "Background", **query}
    words = "&".join(f"{key}={value}" for key, value in options.items())
    joined = "&" if "?" in path else "?"
    done = transport.run(HOST, [*tool(plan), "delete", "--raw", f"{path}{joined}{words}"])
    if done.exit_code and "(NotFound)" not in done.stderr:
        raise Unavailable(done.stderr.strip() or f"exit code {done.exit_code}")


def _delete_pods(plan: Plan, transport: Transport) -> None:
    """Ask all of them to end, in one request; and the services that an operator made, one a pod.

    The cluster's own garbage collection asks for one after the other: 200 take it 15 s. It does
    get there, so that it is no error if we may not.
    """
    collections = [pods_path(plan)]
    if flavor_of(plan).KIND == "PyTorchJob":
        selector = quote(f"training.kubeflow.org/job-name={name_of(plan)}", safe="")
        collections.append(
            f"/api/v1/namespaces/{namespace(plan)}/services?labelSelector={selector}"
        )
    for path in collections:
        try:
            _delete(plan, path, transport)
        except Unavailable as error:
            if "(Forbidden)" not in error.message:
                raise


def _await_gone(plan: Plan, transport: Transport) -> frozenset[str]:
    """Wait for the end of all pods; gives those whose nodes of the cluster do not answer."""
    lost: set[str] = set()
    started = again = time.monotonic()
    late_at = started + plan.stop_grace + STOP_EXTRA
    deadline, fewest = late_at + GONE_SECONDS, math.inf
    while True:
        now = time.monotonic()
        late = now > late_at
        # One pod tells as well as all of them that not all are gone.
        path = pods_path(plan) if late else pods_path(plan, limit="1")
        items = json.loads(raw(plan, path, transport))["items"]
        if not items:
            return frozenset(lost)
        if now > again + AGAIN_SECONDS:
            again = now
            _delete_pods(plan, transport)
        if late:
            if len(items) < fewest:
                fewest, deadline = len(items), max(deadline, now + GONE_SECONDS)
            lost |= _end_lost(plan, items, transport)
        if now > deadline:
            names = sorted(each["metadata"]["name"] for each in items)
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            raise Unavailable(f"pods that do not end: {', '.join(names[:NAMED])}{more}")
        time.sleep(LOOK_SECONDS)


def _end_lost(plan: Plan, items: list[dict[str, Any]], transport: Transport) -> set[str]:
    """Remove by force the pods on nodes that do not answer: nobody there will say that they have
    ended."""
    lost: set[str] = set()
    gone: dict[str | None, bool] = {}
    for told in items:
        if not told["metadata"].get("deletionTimestamp"):
            continue
        host = (told.get("spec") or {}).get("nodeName")
        if host not in gone:
            gone[host] = host is not None and node_ready(plan, host, transport) is False
        if gone[host] or read_pod(told, None).lost:
            name = told["metadata"]["name"]
            lost.add(name)
            path = object_path(plan, "v1", "pods", name)
            _delete(plan, path, transport, gracePeriodSeconds="0")
    return lost
