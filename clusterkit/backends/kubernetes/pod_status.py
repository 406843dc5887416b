"""What a run's pods mean for its nodes. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from clusterkit.agent import OVER_TIME_LIMIT
from clusterkit.backends.kubernetes.pod import KILLED, PREEMPTED, Pod, PodState
from clusterkit.backends.node_status import NativeState, NodeFiles, judge_node
from clusterkit.run.status import NodeCause, NodeStatus, State

PHASES: Mapping[str, State] = {
    "Pending": State.PENDING,
    "Running": State.RUNNING,
    "Succeeded": State.SUCCEEDED,
    "Failed": State.FAILED,
}
DELETED = "its pod was deleted by a user or by the cluster"
REPLACEMENT = "another pod replaces it"
NOT_READY = "NotReady: node {} of the cluster does not answer"
NOT_BEGUN = "it had not begun"
_PROBE = re.compile(r"(Liveness|Startup) probe failed")


def cause_from_events(events: Sequence[Mapping[str, Any]], namespace: str) -> str | None:
    """Return why a pod was ended, by its events: it was preempted for which pod, or which probe
    failed. None: they do not show it."""
    killed, probe = False, None
    for event in events:
        related, message = event.get("related") or {}, str(event.get("message", "")).strip()
        match event.get("reason"):
            case "Preempted" if related.get("name"):
                other = related.get("namespace", namespace)
                of = "" if other == namespace else f" of namespace {other}"
                return f"Preempted: by pod {related['name']}{of}, whose priority is higher"
            case "Killing":
                killed = True
            case "Unhealthy" if _PROBE.match(message):
                probe = message
    return (
        f"Unhealthy: the kubelet killed the container: {probe}"
        if killed and probe is not None
        else None
    )


def needs_events(pod: Pod) -> bool:
    """Whether a pod's events may have a cause of its end that the pod has not."""
    if pod.removed_by is not None:
        return pod.removed_by.startswith(PREEMPTED)
    ended_by_itself = pod.exit_code is not None and pod.state is not PodState.TERMINATING
    if not ended_by_itself or pod.reason == "OOMKilled":
        return False
    return pod.stopped or (pod.exit_code in KILLED and not pod.exit_report)


# ---------------------------------------------------------------- keeping up with pods


def updated(
    known: Mapping[str, Pod], pods: Mapping[str, Pod], *, replaceable: bool
) -> dict[str, Pod]:
    """Return the record of pods after some were seen again.

    Args:
        replaceable: whether a pod may take the place of another of its name. If not, the first of a
            name counts.
    """
    found = dict(known)
    for name, pod in pods.items():
        first = known.get(name)
        ends = pod.state is PodState.TERMINATING and pod.removed_by is None
        if pod.node is None and ends and first is not None:
            # An MPIJob's operator removes the workers only once the launcher has ended.
            over = any(each.node is not None and each.exit_code is not None
                       for each in (*known.values(), *pods.values()))  # fmt: skip
            if not over:
                pod = replace(pod, removed_by=DELETED)
        if first is None or (first.uid != pod.uid and replaceable):
            found[name] = pod
        elif first.uid != pod.uid:
            found[name] = replace(first, state=PodState.REPLACED)
        elif first.stuck and not pod.started:
            # Why it never began is what was known first, whatever it shows while it is removed.
            kept = replace(pod, waits_for=first.waits_for, stuck=True, exit_code=None)
            found[name] = replace(kept, removed_by=first.removed_by)
        elif not first.started and pod.reason == "ContainerStatusUnknown":
            # A kubelet reports 137 of a container that it never created; why the pod ends is what
            # it waited for.
            found[name] = replace(first, state=PodState.TERMINATING)
        else:
            removed_by = pod.removed_by
            if pod.exit_code is None:
                removed_by = removed_by or first.removed_by
            found[name] = replace(pod, removed_by=removed_by, logged=first.logged)
    return found


def without(known: Mapping[str, Pod], uids: Iterable[str]) -> dict[str, Pod]:
    """Mark pods as gone."""
    deleted = frozenset(uids)
    return {
        name: replace(pod, state=PodState.DELETED) if pod.uid in deleted and not pod.gone else pod
        for name, pod in known.items()
    }


def by_node(pods: Collection[Pod]) -> dict[int, Pod]:
    """Return the pod of each node: the newest that is not gone, else the newest."""
    ordered = sorted(pods, key=lambda pod: (not pod.gone, pod.created, pod.name))
    return {pod.node: pod for pod in ordered if pod.node is not None}


# ---------------------------------------------------------------- states of nodes


class Rejoin(Struct, frozen=True):
    """The rules by which a run waits for replacements of lost pods.

    Attributes:
        forced: whether clusterkit removes pods whose node of the cluster does not answer.
    """

    forced: bool

    def waits(self, pod: Pod) -> str | None:
        """Return why a replacement of this pod is waited for; None: it is not."""
        if pod.removed_by == OVER_TIME_LIMIT:
            return None
        if pod.state is PodState.UNREACHABLE:
            reason = NOT_READY.format(pod.host)
            if self.forced:
                return f"{reason}; {REPLACEMENT}"
            return (
                f"{reason} (replace_lost: false): kubectl delete pod {pod.name} --force "
                "--grace-period=0 has another pod replace it"
            )
        if pod.removed:
            return f"{pod.removed_by or 'its pod was removed'}; {REPLACEMENT}"
        return None


def node_status(
    node: int, pod: Pod | None, started: bytes | None = None, **native: Any
) -> NodeStatus:
    """Return a node's status by its pod and its agent's ``started.json``; ``native``: as of
    `native_state`."""
    report = (pod.termination_message or "").encode() if pod and pod.exit_report else None
    files = NodeFiles(begun=pod is not None, started=started, exit=report)
    return judge_node(node, pod.host if pod else "", files, native_state(pod, **native))


def native_state(
    pod: Pod | None,
    *,
    replaceable: bool = False,
    rejoin: Rejoin | None = None,
    waits_for: str | None = None,
    removed_by_clusterkit: bool = False,
) -> NativeState:
    """Return what Kubernetes says of a node by its pod.

    Args:
        pod: None: none was ever seen.
        replaceable: whether another pod may take its place (elastic runs).
        rejoin: how a replacement is waited for; None: it is not.
        waits_for: why there is no pod yet, if known.
        removed_by_clusterkit: whether clusterkit itself has removed the pod.
    """

    def state(of: State, reason: str | None = None) -> NativeState:
        return NativeState(state=of, reason=reason, ended_at=pod.finished_at if pod else None)

    if pod is None:
        return (
            state(State.CANCELLED, NOT_BEGUN)
            if removed_by_clusterkit
            else state(State.PENDING, waits_for)
        )
    if rejoin is not None and not removed_by_clusterkit:
        if (reason := rejoin.waits(pod)) is not None:
            return state(State.PENDING, reason)
        if pod.gone:
            return _ended(pod, removed_by_clusterkit=removed_by_clusterkit)
    if pod.exit_code is not None:
        if pod.restartable and pod.phase == "Running" and not pod.gone:
            return state(State.RUNNING)
        return _ended(pod, removed_by_clusterkit=removed_by_clusterkit)
    if pod.state is PodState.REPLACED:
        return state(State.FAILED, f"its pod was replaced: {pod.removed_by or 'it was deleted'}")
    if pod.on_lost_node:
        reason = NOT_READY.format(pod.host)
        return state(State.FAILED if pod.gone else State.UNKNOWN, reason)
    if pod.gone:
        if pod.stuck:
            return state(State.FAILED, pod.waits_for)
        if removed_by_clusterkit:
            late = "SIGKILL: it did not stop within stop_grace"
            return state(State.CANCELLED, late if pod.started else NOT_BEGUN)
        if replaceable:
            return state(State.PENDING, f"its pod was removed; {REPLACEMENT}")
        gone = "its pod was deleted by a user or with its namespace"
        return state(State.FAILED, pod.removed_by or gone)
    # While a sidecar waits, say for its image, the pod of a node that runs is Pending.
    phase = "Running" if pod.started and pod.phase == "Pending" else pod.phase
    found = PHASES.get(phase, State.UNKNOWN)
    if found is State.FAILED or found is State.SUCCEEDED:
        # No container has ended: none was ever started.
        return state(State.FAILED, pod.removed_by or pod.waits_for or f"its pod is {pod.phase}")
    if found is State.UNKNOWN:
        return state(found, f"Kubernetes reports its pod as {pod.phase!r}")
    return state(State.FAILED if pod.stuck else found, pod.waits_for)


def _ended(pod: Pod, *, removed_by_clusterkit: bool) -> NativeState:
    message, reason = (pod.termination_message or "").strip(), pod.removed_by
    if reason is None and pod.reason == "OOMKilled":
        reason = _out_of_memory(pod)
    elif reason is None and pod.reason in ("StartError", "ContainerCannotRun"):
        reason = f"{pod.reason}: its container could not be started: {message}"
    elif reason is None and pod.exit_code == 137:
        reason = "SIGKILL: its container was killed (exit code 137) and reported nothing"
    elif reason is None and message:
        reason = f"exit code {pod.exit_code}: {message.rpartition(chr(10))[2]}"
    return NativeState(
        state=State.SUCCEEDED if pod.exit_code == 0 else State.FAILED,
        reason=reason,
        exit_code=pod.exit_code,
        ended_at=pod.finished_at,
        ended_by=(pod.removed_by or DELETED) if pod.stopped and not removed_by_clusterkit else None,
    )


def _out_of_memory(pod: Pod) -> str:
    limit = pod.memory_limit
    if limit:
        return f"OOMKilled: its container used more than its memory limit of {limit}"
    return "OOMKilled: its node ran out of memory"


def causes(
    pods: Iterable[Pod], removed_by_clusterkit: Collection[str] = ()
) -> tuple[NodeCause, ...]:
    """Return why pods were ended from outside, which their agents cannot know.

    Args:
        removed_by_clusterkit: names of those that clusterkit itself has ended.
    """
    found = []
    for pod in pods:
        node = 0 if pod.node is None else pod.node
        if pod.reason == "OOMKilled":
            hint = "a larger `memory` in the cluster entry, or a smaller batch.micro"
            found.append(NodeCause(node=node, words=_out_of_memory(pod), hint=hint))
        elif pod.on_lost_node and pod.name not in removed_by_clusterkit:
            words = NOT_READY.format(pod.host)
            hint = (
                f"`kubectl describe node {pod.host}` says why; `kubectl cordon` keeps pods off it"
            )
            found.append(NodeCause(node=node, words=words, hint=hint, exit_code=1))
        elif pod.name not in removed_by_clusterkit and (pod.removed_by is not None or pod.stopped):
            cause = pod.removed_by or DELETED
            if pod.node is None:  # whose sshd ends with 0
                cause = f"worker {pod.name}: {cause}"
            found.append(NodeCause(node=node, words=cause, exit_code=pod.exit_code or 137))
    return tuple(found)
