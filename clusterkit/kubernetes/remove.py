"""Ending a run: its job, whatever that made, and what was made for it."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec

from clusterkit.backends.base import Handle
from clusterkit.errors import ClusterkitError, Unavailable
from clusterkit.kubernetes.guard import watch_name
from clusterkit.kubernetes.judge import read_pod
from clusterkit.kubernetes.lease import guarded
from clusterkit.kubernetes.observe import (
    HOST,
    Removed,
    flavor_of,
    keep,
    known,
    name_of,
    namespace,
    pods_of,
    pods_path,
    put_removed,
    raw,
    removed,
    snapshot,
    tool,
    with_seen,
)
from clusterkit.kubernetes.pods import STOP_EXTRA
from clusterkit.plan import Plan
from clusterkit.transport import Transport

LOOK_SECONDS = 0.25
GONE_SECONDS = 20.0
"""How long pods may take to be gone, beyond the time that they have to end."""
COLLECT_SECONDS = 2.0
"""How long Kubernetes has to end the pods of a job that is gone; then they are ended one by one."""


def remove(handle: Handle, transport: Transport) -> None:
    """End and remove everything of the run; how its pods were is kept.

    Raises:
        Unavailable: the API server does not answer, will not, or a node does not.
    """
    plan = handle.plan
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
            jobs = f"/apis/batch/v1/namespaces/{namespace(plan)}/jobs"
            _delete(plan, f"{jobs}/{watch_name(name_of(plan))}", transport)
        if plan.trees:
            path = f"/api/v1/namespaces/{namespace(plan)}/configmaps/{name_of(plan)}-code"
            _delete(plan, path, transport)
        for api, plural in _kinds(plan):
            _delete(plan, f"{_root(api)}/namespaces/{namespace(plan)}/{plural}/{name_of(plan)}",
                    transport)  # fmt: skip
        for api, plural in _GUARD if guarded(plan) else ():
            path = f"{_root(api)}/namespaces/{namespace(plan)}/{plural}"
            _delete(plan, f"{path}/{watch_name(name_of(plan))}", transport)
        if lost := _await_gone(plan, transport):
            by_us = removed(handle, transport) or Removed()
            put_removed(handle, msgspec.structs.replace(by_us, lost=by_us.lost | lost), transport)
    except ClusterkitError as error:
        raise Unavailable(
            f"could not end run {plan.run_id}: {error.message}",
            hint=f"clusterkit cancel {plan.run_id} again, once it answers",
        ) from error


def _kinds(plan: Plan) -> list[tuple[str, str]]:
    """What a run may have, its job first: without that nobody makes new pods."""
    flavor = flavor_of(plan)
    found = [(flavor.API, flavor.PLURAL)]
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


def _root(api: str) -> str:
    return f"/apis/{api}" if "/" in api else f"/api/{api}"


def _delete(plan: Plan, path: str, transport: Transport, **query: str) -> None:
    options = {"propagationPolicy": "Background", **query}
    words = "&".join(f"{key}={value}" for key, value in options.items())
    done = transport.run(HOST, [*tool(plan), "delete", "--raw", f"{path}?{words}"])
    if done.exit_code and "(NotFound)" not in done.stderr:
        raise Unavailable(done.stderr.strip() or f"exit code {done.exit_code}")


def _await_gone(plan: Plan, transport: Transport) -> frozenset[str]:
    """Wait for the end of all pods; gives those whose nodes of the cluster do not answer."""
    lost: set[str] = set()
    started = time.monotonic()
    deadline = started + plan.stop_grace + STOP_EXTRA + GONE_SECONDS
    asked: set[str] = set()
    while True:
        items = json.loads(raw(plan, pods_path(plan), transport))["items"]
        if not items:
            return frozenset(lost)
        for told in items:
            name, leaving = told["metadata"]["name"], told["metadata"].get("deletionTimestamp")
            path = f"/api/v1/namespaces/{namespace(plan)}/pods/{name}"
            over = time.monotonic() > started + COLLECT_SECONDS
            if not leaving and over and name not in asked:
                asked.add(name)
                _delete(plan, path, transport)
            late = time.monotonic() > started + plan.stop_grace + STOP_EXTRA
            if leaving and late and _node_gone(plan, told, transport):
                # Nobody there will say that it has ended.
                lost.add(name)
                _delete(plan, path, transport, gracePeriodSeconds="0")
        if time.monotonic() > deadline:
            names = ", ".join(sorted(each["metadata"]["name"] for each in items))
            raise Unavailable(f"pods that do not end: {names}")
        time.sleep(LOOK_SECONDS)


def _node_gone(plan: Plan, told: dict[str, Any], transport: Transport) -> bool:
    """Whether the pod's node of the cluster does not answer."""
    if read_pod(told, None).lost:
        return True
    host = (told.get("spec") or {}).get("nodeName")
    done = transport.run(HOST, [*tool(plan), "get", "--raw", f"/api/v1/nodes/{host}"])
    if done.exit_code:  # gone from the cluster; or we may not look at nodes
        return "(NotFound)" in done.stderr
    conditions = json.loads(done.stdout).get("status", {}).get("conditions") or ()
    ready = {each["type"]: each["status"] for each in conditions}.get("Ready")
    return ready != "True"
