"""The states of a run's nodes by its pods; and the record of the pods in the run's folder, by which
their ends are known once they are gone."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from clusterkit.agent import next_attempt
from clusterkit.agent.report import read_from
from clusterkit.backends.base import Observation
from clusterkit.backends.kubernetes.api_server import NotFound, RunObjects
from clusterkit.backends.kubernetes.objects import Object
from clusterkit.backends.kubernetes.pod import Pod, PodState, attempt_of, read_pod
from clusterkit.backends.kubernetes.pod_status import (
    Rejoin,
    by_node,
    causes,
    node_status,
    updated,
    without,
)
from clusterkit.backends.kubernetes.remote_runs import state_of
from clusterkit.backends.node_status import judge_exit, observed
from clusterkit.errors import ClusterkitError
from clusterkit.plan import Plan
from clusterkit.run.folder import RunHandle
from clusterkit.run.status import NodeCause, NodeStatus, State
from clusterkit.transport import Transport

_PREVENTS = re.compile("Fail|Error|Exceed|Invalid|Forbidden|Denied|NotFound|Missing")
ENDED_ELSEWHERE = (
    "NotFound: the run has no objects left in the cluster: it was attached elsewhere (`clusterkit "
    "attach`) and has ended there, or a user deleted them"
)


def list_pods(handle: RunHandle, transport: Transport) -> dict[str, Pod]:
    """Return the attempt's pods that exist, by name.

    Raises:
        Unavailable: the API server does not answer.
    """
    objects = RunObjects(handle.plan, transport)
    return read_pods(handle, objects, objects.items(objects.pods_path()))


def read_pods(
    handle: RunHandle, objects: RunObjects, items: Sequence[Mapping[str, Any]]
) -> dict[str, Pod]:
    """Read the pods of the attempt, by name: those started for it, or for the newest before it."""
    now, flavor = objects.time(), objects.flavor
    found = [
        read_pod(each, flavor.index, flavor.container, now)
        for each in items
        if attempt_of(each) <= handle.attempt
    ]
    newest = max((pod.attempt for pod in found), default=0)
    return {pod.name: pod for pod in found if pod.attempt == newest > 0}


def known_after(known: Mapping[str, Pod], listed: Mapping[str, Pod], plan: Plan) -> dict[str, Pod]:
    """Return the record of an attempt's pods after all that exist were listed."""
    # On a full disk it is not recorded that an attempt was removed: its pods are still known.
    newest = max((pod.attempt for pod in listed.values()), default=0)
    known = {name: pod for name, pod in known.items() if pod.attempt >= newest}
    present = {pod.uid for pod in listed.values()}
    gone = {pod.uid for pod in known.values()} - present
    return without(updated(known, listed, replaceable=replaces(plan)), gone)


def observation(
    handle: RunHandle,
    pods: Mapping[str, Pod],
    transport: Transport,
    *,
    waits_for: str | None = None,
    unreachable: str | None = None,
    incomplete_logs: frozenset[str] = frozenset(),
    unseen: State = State.UNKNOWN,
    lost: Collection[str] = (),
) -> Observation:
    """Return the states of the run's nodes.

    Args:
        pods: all pods that are known, also those that are gone.
        waits_for: why pods are missing.
        unreachable: why the API server does not answer.
        incomplete_logs: names of pods that have ended and whose logs are still to come.
        unseen: the nodes' state if no pod was ever seen and the API server does not answer.
        lost: uids of pods whose nodes of the cluster have not answered for `lost_after`.
    """
    plan, ended_here = handle.plan, removed_pods(handle)
    removed = ended_here or Removed()
    pods = {
        name: replace(pod, state=PodState.LOST if pod.gone else PodState.UNREACHABLE)
        if (name in removed.lost if pod.gone else pod.uid in lost)
        else pod
        for name, pod in pods.items()
    }
    of_nodes = by_node(pods.values())
    rejoin = Rejoin(forced=plan.replace_lost) if plan.rejoin else None
    decision = None
    if unreachable is None and ended_here is None and _missing(of_nodes, plan.nodes):
        objects = RunObjects(plan, transport)
        job = _job(objects)
        decision = _removal(job, objects)
        if decision is not None or (job is not None and state_of(job).final):
            rejoin = None
    # An MPIJob's launcher, its only node, is created once all workers are ready.
    worker = next((pod for pod in pods.values() if pod.node is None and pod.waits_for), None)
    nodes, exit_reports = [], {}
    for node in range(plan.nodes):
        pod = of_nodes.get(node, worker)
        if (ended := _next_attempt(handle, node)) is not None:
            nodes.append(judge_exit(node, pod.host if pod else "", ended))
            exit_reports[node] = ended
            continue
        found = node_status(
            node,
            pod,
            _agent_file(handle, node, "started.json"),
            replaceable=replaces(plan),
            rejoin=rejoin,
            waits_for=waits_for,
            removed_by_clusterkit=removed.complete if pod is None else pod.name in removed.ended,
        )
        if pod is not None and pod.name in incomplete_logs and found.state.final:
            found = replace(found, state=State.RUNNING, reason=None)
        over = pod is None or (pod.removed and (pod.gone or pod.exit_code is not None))
        if decision is not None and over:  # one that has ended by itself has its own reason
            found = replace(found, state=State.CANCELLED, reason=decision)
        if unreachable is not None and not found.state.final:
            found = replace(found, state=found.state if pods else unseen, reason=unreachable)
        nodes.append(found)
        if pod is not None:
            exit_reports[node] = (pod.termination_message or "").encode()
    # The end of a pod that was replaced is not why the run ended.
    ended_pods = of_nodes.values() if plan.rejoin else pods.values()
    result = observed(nodes, exit_reports)
    found_causes = (*causes(ended_pods, removed.ended), *result.causes)
    return replace(result, causes=found_causes, removed=decision)


def _next_attempt(handle: RunHandle, node: int) -> bytes | None:
    """Return a node's ``exit.json`` of the attempt if its agent has begun another one since."""
    ended = _agent_file(handle, node, "exit.json")
    return ended if next_attempt(ended) is not None else None


def _agent_file(handle: RunHandle, node: int, name: str) -> bytes | None:
    return read_from(handle.folder.node_dir(handle.attempt, node) / name)


def _missing(pods: Mapping[int, Pod], nodes: int) -> bool:
    """Whether a node has no pod, or one that somebody or the cluster removes."""
    return len(pods) < nodes or any(pod.removed or pod.on_lost_node for pod in pods.values())


def _job(objects: RunObjects) -> Object | None:
    """Return the run's job; None: there is none. Empty if it is unknown."""
    try:
        return objects.get(objects.job_path)
    except NotFound as error:
        # A server that does not serve the kind (yet) names no object.
        return None if f'"{objects.name}"' in error.detail else {}
    except ClusterkitError:
        return {}


def _removal(job: Object | None, objects: RunObjects) -> str | None:
    """Return by what the run's job, which owns all of it, was removed; None: it was not. Whoever
    does that wants the run to end."""
    # A namespace's objects are deleted in any order: pods may end before their job is.
    if job != {} and objects.namespace_deleted:
        return f"its namespace, {objects.namespace}, is being deleted"
    if job is not None and "deletionTimestamp" not in job.get("metadata", {}):
        return None
    return (
        f"NotFound: {objects.flavor.kind} {objects.name} was deleted by a user, or the run was "
        "cancelled or has ended on another machine"
    )


def ended_elsewhere(
    handle: RunHandle, pods: Mapping[str, Pod], objects: RunObjects
) -> Observation | None:
    """Return UNKNOWN for an attempt that had not ended when it was seen last, and has neither pods
    nor a job. None: its job exists, or clusterkit has ended it from this machine."""
    ended = pods and all(pod.exit_code is not None for pod in pods.values())
    if ended or removed_pods(handle) is not None or _job(objects) is not None:
        return None
    hosts = {node: pod.host for node, pod in by_node(pods.values()).items()}
    nodes = [
        NodeStatus(node=node, host=hosts.get(node, ""), state=State.UNKNOWN, reason=ENDED_ELSEWHERE)
        for node in range(handle.plan.nodes)
    ]
    hint = f"`clusterkit cancel {handle.plan.run_id}` records here that it is over"
    cause = NodeCause(node=0, words=ENDED_ELSEWHERE, hint=hint, exit_code=1)
    return replace(observed(nodes, {}), causes=(cause,))


def all_nodes_had_pods(plan: Plan, pods: Mapping[str, Pod]) -> bool:
    return len(by_node(pods.values())) == plan.nodes


def why_no_pods(objects: RunObjects) -> str | None:
    """Return why a job lacks pods, by its conditions and events: its queue, a quota, a webhook."""
    name = objects.name
    reasons: list[tuple[bool, str, str]] = []
    with contextlib.suppress(ClusterkitError, ValueError, KeyError, TypeError):
        job = objects.get(objects.job_path)
        if job.get("spec", {}).get("suspend") or job["spec"].get("runPolicy", {}).get("suspend"):
            return "suspended: waits for its Kueue queue"
        if not job.get("status"):
            kind = objects.flavor.kind
            reason = f"no controller has updated {kind} {name}; is its operator running?"
            reasons.append((False, "", reason))
    with contextlib.suppress(ClusterkitError, ValueError, KeyError, TypeError):
        for event in objects.events("type=Warning"):
            about = event["involvedObject"]
            # A pod's status is more exact than its events.
            if about.get("kind") != "Pod" and f"{about.get('name')}-".startswith(f"{name}-"):
                at = str(event.get("lastTimestamp") or event.get("eventTime") or "")
                # Operators warn of much that keeps no pod from being created.
                if _PREVENTS.search(str(event.get("reason", ""))):
                    reasons.append((True, at, str(event.get("message", "")).strip()))
    return max(reasons, default=(False, "", None))[2]


def replaces(plan: Plan) -> bool:
    """Whether another pod may take the place of one that is gone."""
    return plan.rejoin or plan.topology.get("min_nodes") != plan.topology.get("nodes")


# ---------------------------------------------------------------- the run's folder

_PODS, _REMOVED = "attempts/{}/pods.json", "attempts/{}/removed.json"


class Removed(Struct, frozen=True):
    """Pods of an attempt that clusterkit itself has ended, by name.

    Attributes:
        lost: those of them whose nodes of the cluster did not answer.
        complete: whether nothing is left that could create others.
    """

    ended: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()
    complete: bool = False


def read_known(handle: RunHandle) -> dict[str, Pod]:
    """Return the attempt's pods as they were seen last, by name; if it has begun in the pods of the
    attempt before, those."""
    found = handle.folder.maybe_json(_PODS.format(handle.attempt), dict[str, Pod])
    before = dataclasses.replace(handle, attempt=handle.attempt - 1)
    if found is not None or handle.attempt == 1 or removed_pods(before) is not None:
        return found or {}
    return read_known(before)


def write_known(handle: RunHandle, pods: Mapping[str, Pod]) -> None:
    """Record what is known of pods; a full disk is no reason to end the training."""
    with contextlib.suppress(ClusterkitError):
        handle.folder.write_json(_PODS.format(handle.attempt), pods)


def removed_pods(handle: RunHandle) -> Removed | None:
    """Return what clusterkit itself has ended; None: nothing yet."""
    return handle.folder.maybe_json(_REMOVED.format(handle.attempt), Removed)


def write_removed(handle: RunHandle, removed: Removed) -> None:
    """Record what clusterkit has ended; on a full disk it ends all the same."""
    with contextlib.suppress(ClusterkitError):
        handle.folder.write_json(_REMOVED.format(handle.attempt), removed)
