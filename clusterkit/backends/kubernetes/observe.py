"""What a run's pods mean for its nodes, asked for once (`monitor` keeps up with them); and what the
run's folder keeps of them, as nothing else tells of their ends once they are gone."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from clusterkit.agent import goes_on
from clusterkit.agent.report import read_from
from clusterkit.backends.base import Observation
from clusterkit.backends.kubernetes.judge import (
    Pod,
    Rejoin,
    attempt_of,
    began_or,
    by_node,
    causes,
    judge,
    read_pod,
)
from clusterkit.backends.kubernetes.remote_runs import state_of
from clusterkit.backends.kubernetes.server import RunObjects
from clusterkit.backends.node_status import judge_exit, judge_running, observed
from clusterkit.errors import ClusterkitError
from clusterkit.plan import Plan
from clusterkit.run.folder import RunHandle
from clusterkit.run.status import NodeStatus, State
from clusterkit.transport import Transport

ELSEWHERE = (
    "nothing of it is left in the cluster: it was taken up elsewhere (`clusterkit attach`) and has "
    "ended there, or somebody deleted it"
)


def pods_of(handle: RunHandle, transport: Transport) -> dict[str, Pod]:
    """The attempt's pods, by name.

    Raises:
        Unavailable: the API server does not answer.
    """
    objects = RunObjects(handle.plan, transport)
    return read_pods(handle, objects, objects.get(objects.pods_path())["items"])


def read_pods(
    handle: RunHandle, objects: RunObjects, items: Sequence[Mapping[str, Any]]
) -> dict[str, Pod]:
    """Those in which the attempt goes on, by name: started as this attempt, or as one before that
    has gone on in them."""
    now, index = time.time(), objects.flavor.index
    found = [read_pod(each, index, now) for each in items if attempt_of(each) <= handle.attempt]
    newest = max((pod.attempt for pod in found), default=0)
    return {pod.name: pod for pod in found if pod.attempt == newest > 0}


def observation(
    handle: RunHandle,
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
        waits: why there are not all pods.
        silent: why the API server does not answer.
        unheard: pods that have ended and whose logs are still to come.
        unseen: what a node is that nobody has ever seen while the API server does not answer.
    """
    plan = handle.plan
    if before is None:
        before = snapshot(handle)
    pods = {name: began_or(before.get(name), pod) for name, pod in pods.items()}
    if silent is not None:
        pods = before
    by_us = removed(handle) or Removed()
    long_ago = time.time() - plan.lost_after
    before = {name: _lost(pod, pod.name in by_us.lost) for name, pod in before.items()}
    now = {
        node: _lost(pod, pod.silent_since is not None and pod.silent_since < long_ago)
        for node, pod in by_node(pods.values()).items()
    }
    then = by_node(before.values())
    rejoin = Rejoin(forced=plan.replace_lost) if plan.rejoin else None
    if rejoin is not None and silent is None:
        known_ones = {**then, **now}.items()
        away = any(rejoin.waits(pod, there=node in now) is not None for node, pod in known_ones)
        if away and not _goes_on(RunObjects(plan, transport)):
            rejoin = None
    seen = {**before, **pods}.values()
    # An MPIJob's launcher, which is its node, is made once all workers are well.
    worker = next((pod for pod in seen if pod.node is None and pod.words), None)
    nodes, last_words = [], {}
    for node in range(plan.nodes):
        pod, last = now.get(node), then.get(node)
        if pod is None and last is None and worker is not None:
            pod, last = pods.get(worker.name), worker
        named = pod or last
        if (ended := _went_on(handle, node)) is not None:
            nodes.append(judge_exit(node, named.host if named else "", ended))
            last_words[node] = ended
            continue
        found = judge(
            node,
            pod,
            last,
            replaced=replaces(plan),
            rejoin=rejoin,
            waits=waits,
            ours=by_us.complete if named is None else named.name in by_us.ended,
        )
        if found.state is State.RUNNING and found.reason is None:
            found = judge_running(node, found.host, _file(handle, node, "started.json"))
        if pod is not None and pod.name in unheard and found.state.final:
            found = msgspec.structs.replace(found, state=State.RUNNING, reason=None)
        if silent is not None and not found.state.final:
            state = found.state if before else unseen
            found = msgspec.structs.replace(found, state=state, reason=silent)
        nodes.append(found)
        if named is not None:
            last_words[node] = (named.last_words or "").encode()
    # Of pods that others have taken the place of, the end is not the run's.
    blamed = causes(list(by_node(seen).values() if plan.rejoin else seen), by_us.ended)
    told = observed(nodes, last_words)
    return msgspec.structs.replace(told, causes=(*blamed, *told.causes))


def _went_on(handle: RunHandle, node: int) -> bytes | None:
    """How the attempt ended on a node whose agent has begun another one since, by its log."""
    ended = _file(handle, node, "exit.json")
    return ended if goes_on(ended) is not None else None


def _file(handle: RunHandle, node: int, name: str) -> bytes | None:
    """What a node's agent has told of itself, by its log."""
    return read_from(handle.folder.node_dir(handle.attempt, node) / name)


def _lost(pod: Pod, lost: bool) -> Pod:
    return msgspec.structs.replace(pod, lost=True) if lost else pod


def _goes_on(objects: RunObjects) -> bool:
    """Whether the run's job is still there to make new pods; yes where nobody says."""
    try:
        job = objects.find(objects.job_path)
    except ClusterkitError:
        return True
    return job is not None and not state_of(job).final


def ended_elsewhere(handle: RunHandle, objects: RunObjects) -> Observation | None:
    """Of an attempt without pods that was going on when it was seen last from here: nobody here can
    say how it ended. None: its job is there, or clusterkit has ended it from here."""
    there = by_node(snapshot(handle).values())
    with contextlib.suppress(ClusterkitError):
        began = any(pod.exit_code is None for pod in there.values()) and removed(handle) is None
        if began and objects.find(objects.job_path) is None:
            unknown = (
                NodeStatus(node=node, host=pod.host, state=State.UNKNOWN, reason=ELSEWHERE)
                for node, pod in there.items()
            )
            return observed(list(unknown), {})
    return None


def all_nodes_had_pods(plan: Plan, pods: Mapping[str, Pod], before: Mapping[str, Pod]) -> bool:
    return len(by_node([*before.values(), *pods.values()])) == plan.nodes


def why_no_pods(objects: RunObjects) -> str | None:
    """What the cluster says of a job that lacks pods: its queue, a quota, a rule."""
    name = objects.name
    words: list[tuple[bool, str, str]] = []
    with contextlib.suppress(ClusterkitError, ValueError, KeyError, TypeError):
        job = objects.get(objects.job_path)
        if job.get("spec", {}).get("suspend") or job["spec"].get("runPolicy", {}).get("suspend"):
            return "it waits in its queue"
        if not job.get("status"):
            words.append(
                (False, "", f"nobody acts on {objects.flavor.kind} {name}: is its operator up?")
            )
    with contextlib.suppress(ClusterkitError, ValueError, KeyError, TypeError):
        for event in objects.events("type=Warning"):
            about = event["involvedObject"]
            # Pods that are there tell by themselves.
            if about.get("kind") != "Pod" and f"{about.get('name')}-".startswith(f"{name}-"):
                at = str(event.get("lastTimestamp") or event.get("eventTime") or "")
                # An operator warns of much; what it failed at is why.
                failed = str(event.get("reason", "")).startswith("Failed")
                words.append((failed, at, str(event.get("message", "")).strip()))
    return max(words, default=(False, "", None))[2]


# ---------------------------------------------------------------- what the run's folder keeps

_PODS, _REMOVED = "attempts/{}/pods.json", "attempts/{}/removed.json"


class Removed(msgspec.Struct, frozen=True):
    """Pods of an attempt that clusterkit itself has ended, by name."""

    ended: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()
    """Those of them whose nodes of the cluster did not answer."""
    complete: bool = False
    """Whether nothing is there any more that could make others."""


def snapshot(handle: RunHandle) -> dict[str, Pod]:
    """The attempt's pods as they were when they were seen last, by name: those of the attempt
    before, where that has gone on in them."""
    found = handle.folder.maybe_json(_PODS.format(handle.attempt), dict[str, Pod])
    before = dataclasses.replace(handle, attempt=handle.attempt - 1)
    if found is not None or handle.attempt == 1 or removed(before) is not None:
        return found or {}
    return snapshot(before)


def keep(handle: RunHandle, pods: Mapping[str, Pod]) -> None:
    """Write down what was seen; a full disk is no reason to end the training."""
    with contextlib.suppress(ClusterkitError):
        handle.folder.write_json(_PODS.format(handle.attempt), pods)


def removed(handle: RunHandle) -> Removed | None:
    """What clusterkit itself has ended; None: nothing yet."""
    return handle.folder.maybe_json(_REMOVED.format(handle.attempt), Removed)


def put_removed(handle: RunHandle, what: Removed) -> None:
    """Write it down.

    Raises:
        RunFolderError: that cannot be done.
    """
    handle.folder.write_json(_REMOVED.format(handle.attempt), what)


def with_seen(before: Mapping[str, Pod], pods: Mapping[str, Pod], plan: Plan) -> dict[str, Pod]:
    """What was seen of pods, with what is seen of them now; the first of a name stays, unless
    others may take its place."""
    found = dict(before)
    for name, pod in pods.items():
        first = before.get(name)
        pod = began_or(first, pod)
        if first is None or first.uid == pod.uid or replaces(plan):
            if first is not None and first.uid == pod.uid and pod.exit_code is None:
                pod = msgspec.structs.replace(pod, removed_by=pod.removed_by or first.removed_by)
            found[name] = pod
    return found


def replaces(plan: Plan) -> bool:
    """Whether another pod may take the place of one that is gone."""
    return plan.rejoin or plan.topology.get("min_nodes") != plan.topology.get("nodes")
