"""What pods, as the API server tells of them, mean for the nodes of a run. Pure."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from clusterkit.agent import LATE, STOPPED
from clusterkit.backends.kubernetes.lost_pods import conditions_of, silent_since, unix
from clusterkit.backends.kubernetes.pods import ATTEMPT, ROLE
from clusterkit.backends.node_status import judge_exit
from clusterkit.run.status import NodeCause, NodeStatus, State

PREEMPTED = "preempted for a pod of higher priority"
"""What is known of it without its events."""
_REMOVALS = {
    "PreemptionByScheduler": f"{PREEMPTED}: {{said}}",
    "EvictionByEvictionAPI": "evicted: its node is being drained",
    "TerminationByKubelet": "evicted by its node: {node}",
    "DeletionByTaintManager": "its node is gone or tainted",
}
"""By the reason of a pod's condition DisruptionTarget."""
PHASES: Mapping[str, State] = {
    "Pending": State.PENDING,
    "Running": State.RUNNING,
    "Succeeded": State.SUCCEEDED,
    "Failed": State.FAILED,
}
"""Phases of a pod."""
WAITS_FOR_EVER = ("InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError")
"""A container that waits for one of these waits for a change of its manifest."""
# A kubelet that could not read a Secret within 1 s tries again (pkg/kubelet/util/manager, 1.34).
_TRIED_AGAIN = re.compile(r"failed to sync \w+ cache: timed out waiting for the condition")
BACK_OFF_SECONDS = 60.0
"""How long an image may be pulled in vain."""
DELETED = "its pod was deleted, by somebody or by the cluster"
NEXT = "another one takes its place"
NOT_BEGUN = "it had not begun"
_KILLED = (128 + signal.SIGKILL, 128 + signal.SIGTERM)
_PROBE = re.compile(r"(Liveness|Startup) probe failed")
_NODES = re.compile(r"\d+/\d+ nodes are available")


class Pod(Struct, frozen=True, kw_only=True):
    """What matters of one pod."""

    name: str
    uid: str
    node: int | None
    """None: it runs no node agent."""
    phase: str
    host: str = ""
    """The cluster's node that it is on."""
    words: str | None = None
    """What it waits for, or what became of it."""
    started: bool = False
    exit_code: int | None = None
    reason: str | None = None
    """The container's own: ``OOMKilled``, ``Error``, ``Completed``."""
    last_words: str | None = None
    """What its agent left: ``exit.json``."""
    lost: bool = False
    """Whether its node of the cluster has not answered for so long that it counts as gone."""
    hopeless: bool = False
    """Whether what it waits for will not come."""
    limit: str | None = None
    """Its limit of memory."""
    removed_by: str | None = None
    """Why the cluster removes it, if it does."""
    restarts: int = 0
    finished_at: float | None = None
    container: str = ""
    leaving: bool = False
    """Whether it is being removed."""
    held: bool = False
    """Whether it stays, removed by force or not, until somebody lets it go."""
    silent_since: float | None = None
    """Unix time from which its node has not answered; it may come back."""
    attempt: int = 1
    """That it was started as."""
    created: float = 0.0
    """Unix time."""

    @property
    def ran(self) -> bool:
        """Whether it was going on, and nobody had asked it to end."""
        return self.exit_code is None and not self.leaving

    @property
    def word(self) -> Mapping[str, Any]:
        """What its agent left of how it ended; empty: nothing."""
        with contextlib.suppress(ValueError):
            document = json.loads(self.last_words or "")
            if isinstance(document, dict) and isinstance(document.get("exit_code"), int):
                return document
        return {}

    @property
    def obeyed(self) -> bool:
        """Whether its agent was asked to end, by a signal."""
        return bool(self.word.get("reason") == STOPPED)


def read_pod(document: Mapping[str, Any], index: str | None, now: float | None = None) -> Pod:
    """A pod from the API server's document; one that means nothing has a phase that means nothing.

    Args:
        index: label that holds the node's rank; None: it is node 0.
        now: Unix time, to tell for how long it has waited.
    """
    meta = document["metadata"]
    labels = meta.get("labels") or {}
    number = "0" if index is None else str(labels.get(index, ""))
    node = int(number) if labels.get(ROLE) == "node" and number.isdigit() else None
    try:
        return _read(document, node, now)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError):
        return Pod(
            name=meta["name"], uid=str(meta.get("uid", "")), node=node, phase="unreadable",
            attempt=attempt_of(document),
        )  # fmt: skip


def _read(document: Mapping[str, Any], node: int | None, now: float | None) -> Pod:
    meta, spec, status = document["metadata"], document.get("spec") or {}, document["status"]
    containers = status.get("containerStatuses") or []
    state = (containers[0].get("state") or {}) if containers else {}
    ended = state.get("terminated")
    if ended is None and containers and status.get("phase") in ("Failed", "Succeeded"):
        ended = (containers[0].get("lastState") or {}).get("terminated")
    conditions = conditions_of(document)
    words, hopeless = _waits(document, state, conditions, now)
    container = (spec.get("containers") or [{}])[0]
    return Pod(
        name=meta["name"],
        uid=meta.get("uid", ""),
        node=node,
        phase=str(status.get("phase", "Unknown")),
        host=spec.get("nodeName") or "",
        words=words,
        started=state.get("running") is not None or ended is not None,
        exit_code=None if ended is None else int(ended.get("exitCode", -1)),
        reason=None if ended is None else ended.get("reason"),
        last_words=None if ended is None else ended.get("message"),
        silent_since=silent_since(document),
        created=unix(meta.get("creationTimestamp")) or 0.0,
        hopeless=hopeless,
        limit=container.get("resources", {}).get("limits", {}).get("memory"),
        removed_by=_removal(conditions.get("DisruptionTarget", {}), status),
        restarts=int(containers[0].get("restartCount", 0)) if containers else 0,
        finished_at=None if ended is None else unix(ended.get("finishedAt")),
        leaving=bool(meta.get("deletionTimestamp")),
        held=bool(meta.get("finalizers")),
        attempt=attempt_of(document),
        container=container.get("name", ""),
    )


def began_or(first: Pod | None, pod: Pod) -> Pod:
    """The pod; or as it was seen ``first`` if it never began and is being removed: a kubelet says
    137 of a container that it never made, and what the pod waited for is why it ends."""
    if first is None or first.started or first.uid != pod.uid:
        return pod
    unmade = pod.reason == "ContainerStatusUnknown"
    return msgspec.structs.replace(first, leaving=True) if unmade else pod


def attempt_of(document: Mapping[str, Any]) -> int:
    """Which attempt a pod was started as; its agent may have begun others since."""
    text = str((document["metadata"].get("labels") or {}).get(ATTEMPT, ""))
    return int(text) if text.isdigit() else 0


def _waits(
    document: Mapping[str, Any],
    state: Mapping[str, Any],
    conditions: Mapping[str, Mapping[str, Any]],
    now: float | None,
) -> tuple[str | None, bool]:
    """What the pod waits for, and whether in vain."""
    status = document.get("status") or {}
    if status.get("phase") not in ("Pending", None):
        return None, False
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        said = str(scheduled.get("message") or "")
        if scheduled.get("reason") == "SchedulingGated":
            return "it waits in its queue", False
        said = said.partition(" preemption:")[0].partition(" no new claims")[0]
        said = said.removesuffix(" not found").rstrip("., ")
        if _NODES.match(said):
            return f"no node for it: {said}", False
        return f"not scheduled yet{f': {said}' if said else ''}", False
    waiting = state.get("waiting")
    if waiting is None:
        return "not scheduled yet" if not scheduled else "its container is being created", False
    reason, message = str(waiting.get("reason", "")), str(waiting.get("message") or "")
    image = ((document.get("spec") or {}).get("containers") or [{}])[0].get("image")
    if reason == "InvalidImageName":
        return f"image name {image} is not valid", True
    if reason in ("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull"):
        since = unix(scheduled.get("lastTransitionTime"))
        late = now is not None and since is not None and now - since > BACK_OFF_SECONDS
        return f"image {image} cannot be pulled: {_image_words(reason, message)}", (
            late or reason in WAITS_FOR_EVER
        )
    if reason in WAITS_FOR_EVER:
        again = _TRIED_AGAIN.search(message) is not None
        return f"its container cannot be created: {message or reason}", not again
    if reason in ("ContainerCreating", "PodInitializing"):
        since = unix(scheduled.get("lastTransitionTime"))
        for_ = f" for {now - since:.0f} s" if now and since and now - since >= 5 else ""
        return f"its container is being created, or its image pulled{for_}", False
    return f"{reason}{f': {message}' if message else ''}", False


def _image_words(reason: str, message: str) -> str:
    low = message.lower()
    if reason == "ErrImageNeverPull":
        return "it is not on the node, and image_pull_policy is Never"
    if "unauthorized" in low or "authorization failed" in low or "denied" in low:
        return "the registry wants credentials (image_pull_secrets), or does not have it"
    if "not found" in low or "manifest unknown" in low:
        return "the registry does not have it"
    if re.search(r"no such host|dial tcp|i/o timeout|connection refused|failed to do request", low):
        return "its registry does not answer"
    return message.rpartition(": ")[2] or reason


def _removal(condition: Mapping[str, Any], status: Mapping[str, Any]) -> str | None:
    """Why the cluster removes a pod, if it does."""
    said = str(condition.get("message") or "")
    if condition.get("status") == "True" and (reason := condition.get("reason")) in _REMOVALS:
        return _REMOVALS[reason].format(said=said, node=status.get("message") or said)
    if status.get("reason") == "DeadlineExceeded":
        return LATE
    if status.get("reason") == "Evicted":
        return f"evicted: {status.get('message') or 'its node was short of something'}"
    return None


def cause_from_events(events: Sequence[Mapping[str, Any]], namespace: str) -> str | None:
    """Why a pod of this namespace was ended, where only its events say so: which pod it had to make
    room for, which probe of it failed. None: they do not say."""
    killed, probe = False, None
    for event in events:
        related, message = event.get("related") or {}, str(event.get("message", "")).strip()
        match event.get("reason"):
            case "Preempted" if related.get("name"):
                theirs = related.get("namespace", namespace)
                of = "" if theirs == namespace else f" of namespace {theirs}"
                return f"preempted for pod {related['name']}{of}, whose priority is higher"
            case "Killing":
                killed = True
            case "Unhealthy" if _PROBE.match(message):
                probe = message
    return f"ended by its node: {probe}" if killed and probe is not None else None


def unexplained(pod: Pod) -> bool:
    """Whether its events may say more of why it was ended than the pod itself."""
    if pod.removed_by is not None:
        return pod.removed_by.startswith(PREEMPTED)
    if pod.exit_code is None or pod.leaving or pod.reason == "OOMKilled":
        return False
    return pod.obeyed or (pod.exit_code in _KILLED and not pod.word)


def judge(
    node: int,
    pod: Pod | None,
    before: Pod | None,
    *,
    replaced: bool = False,
    rejoin: Rejoin | None = None,
    waits: str | None = None,
    ours: bool = False,
) -> NodeStatus:
    """A node's state from its pod.

    Args:
        pod: as it is; None: there is none.
        before: as it was when it was seen last; None: it was never seen.
        replaced: whether another pod may take its place (elastic runs).
        rejoin: how another pod takes its place while the run waits for it; None: it does not.
        waits: why there is no pod yet, where somebody says.
        ours: whether clusterkit itself has removed the pods.
    """
    last = pod or before
    host, ended_at = (last.host, last.finished_at) if last else ("", None)

    def status(state: State, reason: str | None = None) -> NodeStatus:
        return NodeStatus(node=node, host=host, state=state, reason=reason, ended_at=ended_at)

    if rejoin is not None and not ours and last is not None:
        if (words := rejoin.waits(last, there=pod is not None)) is not None:
            return status(State.PENDING, words)
        if pod is None:
            return _ended(node, last, ours=ours)
        before = None
    if pod is None:
        if before is None:
            if ours:
                return status(State.CANCELLED, NOT_BEGUN)
            return status(State.PENDING, waits)
        if before.exit_code is not None:
            return _ended(node, before, ours=ours)
        if before.lost:
            return status(State.FAILED, f"node {before.host} of the cluster does not answer")
        if before.hopeless:
            return status(State.FAILED, before.words)
        if ours:
            late = "killed: it did not stop when asked to"
            return status(State.CANCELLED, late if before.started else NOT_BEGUN)
        if replaced:
            return status(State.PENDING, "its pod was removed; another one takes its place")
        why = before.removed_by or "somebody deleted it, or the namespace"
        return status(State.FAILED, f"its pod is gone: {why}")
    if before is not None and pod.uid != before.uid and not replaced:
        if before.exit_code is not None:
            return _ended(node, before, ours=ours)
        why = before.removed_by or "it was deleted"
        return status(State.FAILED, f"its pod was replaced: {why}")
    if pod.exit_code is not None:
        if pod.phase == "Running" and replaced:
            return status(State.RUNNING)
        return _ended(node, pod, ours=ours)
    if pod.lost:
        return status(State.UNKNOWN, f"node {pod.host} of the cluster does not answer")
    state = PHASES.get(pod.phase, State.UNKNOWN)
    if state is State.FAILED or state is State.SUCCEEDED:
        # Without a container that ended: it never came to that.
        return status(State.FAILED, pod.removed_by or pod.words or f"its pod is {pod.phase}")
    if state is State.PENDING and pod.hopeless:
        return status(State.FAILED, pod.words)
    if state is State.UNKNOWN:
        return status(state, f"Kubernetes reports its pod as {pod.phase!r}")
    return status(state, pod.words)


class Rejoin(Struct, frozen=True):
    """What happens to lost pods of a run that goes on when they are replaced."""

    forced: bool
    """Whether clusterkit removes those whose node of the cluster does not answer."""

    def waits(self, pod: Pod, *, there: bool) -> str | None:
        """Why another pod is waited for in the place of this one; None: it is not.

        Args:
            there: whether it is still there.
        """
        if pod.removed_by == LATE:
            return None
        if there and pod.lost:
            silent = f"node {pod.host} of the cluster does not answer"
            if self.forced:
                return f"{silent}; another pod takes its place"
            return (
                f"{silent} (replace_lost: false): kubectl delete pod {pod.name} --force "
                "--grace-period=0 lets another pod take its place"
            )
        if pod.exit_code is None:
            taken = pod.leaving or not there
        else:
            # One that was killed had no time for a word.
            wordless = not (pod.last_words or "").strip() and pod.reason != "OOMKilled"
            taken = pod.obeyed or (wordless and pod.exit_code in _KILLED)
        if taken or (pod.removed_by is not None and not pod.word):
            return f"{pod.removed_by or 'its pod was removed'}; {NEXT}"
        return None


def by_node(pods: Collection[Pod]) -> dict[int, Pod]:
    """The pod of each node; of several the one that was made last."""
    ordered = sorted(pods, key=lambda pod: (pod.created, pod.name))
    return {pod.node: pod for pod in ordered if pod.node is not None}


def _ended(node: int, pod: Pod, *, ours: bool) -> NodeStatus:
    if pod.word:
        found = judge_exit(node, pod.host, (pod.last_words or "").encode())
        if found.reason == STOPPED and not ours:
            # It obeyed, but whom?
            return msgspec.structs.replace(
                found, state=State.FAILED, reason=pod.removed_by or DELETED
            )
        return found
    reason = pod.removed_by or _reason(pod)
    said = (pod.last_words or "").strip()
    if said and reason is None:
        reason = f"exited with {pod.exit_code}: {said.rpartition(chr(10))[2]}"
    return NodeStatus(
        node=node,
        host=pod.host,
        state=State.SUCCEEDED if pod.exit_code == 0 else State.FAILED,
        reason=reason,
        exit_code=pod.exit_code,
        ended_at=pod.finished_at,
    )


def _reason(pod: Pod) -> str | None:
    if pod.reason == "OOMKilled":
        return starved(pod)
    if pod.reason in ("StartError", "ContainerCannotRun"):
        return f"its container could not be started: {(pod.last_words or '').strip()}"
    if pod.exit_code == 137:
        return "its container was killed (exit code 137) and reported nothing"
    return None


def starved(pod: Pod) -> str:
    limit = f"over its pod's memory limit of {pod.limit}" if pod.limit else "its node was full"
    return f"killed by the kernel for want of memory: {limit}"


def causes(pods: Sequence[Pod], ours: Collection[str] = ()) -> tuple[NodeCause, ...]:
    """What was done to pods, where their nodes could not tell or not know.

    Args:
        ours: names of those that clusterkit itself has ended.
    """
    found = []
    for pod in pods:
        node = 0 if pod.node is None else pod.node
        if pod.reason == "OOMKilled":
            hint = "a larger `memory` in the cluster entry, or a smaller batch.micro"
            found.append(NodeCause(node=node, words=starved(pod), hint=hint))
        elif pod.name in ours:
            continue
        elif pod.removed_by is not None or pod.obeyed:
            code = 137 if pod.exit_code is None else pod.exit_code
            words = pod.removed_by or DELETED
            found.append(NodeCause(node=node, words=words, exit_code=code))
    return tuple(found)
