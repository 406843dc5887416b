"""What pods, as the API server reports them, mean for the nodes of a run. Pure."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from clusterkit.agent import OVER_TIME_LIMIT, STOPPED
from clusterkit.backends.kubernetes.lost_pods import conditions_of, unix, unreachable_since
from clusterkit.backends.kubernetes.objects import ATTEMPT, ROLE
from clusterkit.backends.node_status import judge_exit
from clusterkit.run.status import NodeCause, NodeStatus, State

PREEMPTED = "preempted for a pod of higher priority"
_DISRUPTIONS = {
    "PreemptionByScheduler": f"{PREEMPTED}: {{message}}",
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
_CREATING = (None, "ContainerCreating", "PodInitializing")
"""Why a container waits that is about to start, as far as its own status says."""
STUCK_REASONS = ("InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError")
"""Why a container waits for ever, until its manifest is changed."""
# A kubelet that could not read a Secret within 1 s tries again (pkg/kubelet/util/manager, 1.34).
_TRIED_AGAIN = re.compile(r"failed to sync \w+ cache: timed out waiting for the condition")
PULL_SECONDS = 60.0
"""How long pulls of the image may fail before its pod counts as stuck."""
DELETED = "its pod was deleted, by somebody or by the cluster"
REPLACEMENT = "another one takes its place"
NOT_BEGUN = "it had not begun"
_KILLED = (128 + signal.SIGKILL, 128 + signal.SIGTERM)
_PROBE = re.compile(r"(Liveness|Startup) probe failed")
_NODES = re.compile(r"\d+/\d+ nodes are available")


class Pod(Struct, frozen=True, kw_only=True):
    """A pod as it was seen last. Times are Unix seconds.

    Attributes:
        node: node rank; None: it runs no node agent.
        host: node of the cluster; empty: not scheduled.
        waits_for: what a pending pod waits for.
        stuck: whether that will not come.
        container: name of the container that runs the node; what follows is of that one.
        started: whether it has started.
        exit_code: None: it has not ended.
        restartable: whether the kubelet starts it again although it has ended.
        reason: ``OOMKilled``, ``Error``, ``Completed``.
        termination_message: the agent's ``exit.json``.
        unreachable_since: from when its node has not answered; it may come back.
        lost: whether that is so long ago that the node counts as gone.
        removed_by: why the cluster removes it, if it does.
        terminating: whether it is being deleted.
        has_finalizers: whether removal by force has to remove these as well.
        attempt: the attempt that it was started for; its agent may have begun others since.
        gone: whether it was deleted, or another pod has its name now.
    """

    name: str
    uid: str
    node: int | None
    phase: str
    host: str = ""
    waits_for: str | None = field(default=None, name="words")
    stuck: bool = field(default=False, name="hopeless")
    started: bool = False
    exit_code: int | None = None
    restartable: bool = False
    reason: str | None = None
    termination_message: str | None = field(default=None, name="last_words")
    unreachable_since: float | None = field(default=None, name="silent_since")
    lost: bool = False
    memory_limit: str | None = field(default=None, name="limit")
    removed_by: str | None = None
    restarts: int = 0
    finished_at: float | None = None
    container: str = ""
    terminating: bool = field(default=False, name="leaving")
    has_finalizers: bool = field(default=False, name="held")
    attempt: int = 1
    created: float = 0.0
    gone: Literal["deleted", "replaced"] | None = None

    @property
    def running(self) -> bool:
        """Whether it had neither ended nor been asked to."""
        return self.exit_code is None and not self.terminating

    @property
    def exit_report(self) -> Mapping[str, Any]:
        """The agent's ``exit.json``; empty if it left none."""
        with contextlib.suppress(ValueError):
            document = json.loads(self.termination_message or "")
            if isinstance(document, dict) and isinstance(document.get("exit_code"), int):
                return document
        return {}

    @property
    def stopped(self) -> bool:
        """Whether its agent was asked to end, by a signal."""
        return bool(self.exit_report.get("reason") == STOPPED)

    @property
    def removed(self) -> bool:
        """Whether it ends because somebody or the cluster removed it, not by itself."""
        if self.exit_code is None:
            removed = self.terminating or self.gone is not None
        else:
            # An agent that was killed had no time for a report.
            silent = not (self.termination_message or "").strip() and self.reason != "OOMKilled"
            removed = self.stopped or (silent and self.exit_code in _KILLED)
        return removed or (self.removed_by is not None and not self.exit_report)


# ---------------------------------------------------------------- reading


def read_pod(
    document: Mapping[str, Any], index: str | None, container: str, now: float | None = None
) -> Pod:
    """Read a pod from the API server's document; if that is malformed its phase is ``unreadable``.

    Args:
        index: label that holds the node's rank; None: it is node 0.
        container: name of the container that runs the node. A pod may have any others, which the
            user or an admission webhook has added: their states are not the node's.
        now: Unix time; None: without the time that it has waited.
    """
    meta = document["metadata"]
    labels = meta.get("labels") or {}
    number = "0" if index is None else str(labels.get(index, ""))
    node = int(number) if labels.get(ROLE) == "node" and number.isdigit() else None
    try:
        return _read(document, node, container, now)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError):
        return Pod(
            name=meta["name"], uid=str(meta.get("uid", "")), node=node, phase="unreadable",
            attempt=attempt_of(document), container=container,
        )  # fmt: skip


def _read(document: Mapping[str, Any], node: int | None, container: str, now: float | None) -> Pod:
    meta, spec, status = document["metadata"], document.get("spec") or {}, document["status"]
    own = _named(status.get("containerStatuses"), container)
    state = own.get("state") or {}
    ended = state.get("terminated")
    if ended is None and status.get("phase") in ("Failed", "Succeeded"):
        ended = (own.get("lastState") or {}).get("terminated")
    started = state.get("running") is not None or ended is not None
    waits_for, stuck = (None, False) if started else _waiting(document, container, now)
    resources = _named(spec.get("containers"), container).get("resources", {})
    pod = Pod(
        name=meta["name"],
        uid=meta.get("uid", ""),
        node=node,
        phase=str(status.get("phase", "Unknown")),
        host=spec.get("nodeName") or "",
        waits_for=waits_for,
        stuck=stuck,
        started=started,
        unreachable_since=unreachable_since(document),
        memory_limit=resources.get("limits", {}).get("memory"),
        removed_by=_disruption(document),
        restarts=int(own.get("restartCount", 0)),
        container=container,
        terminating=bool(meta.get("deletionTimestamp")),
        has_finalizers=bool(meta.get("finalizers")),
        attempt=attempt_of(document),
        created=unix(meta.get("creationTimestamp")) or 0.0,
    )
    if ended is None:
        return pod
    code, policy = int(ended.get("exitCode", -1)), spec.get("restartPolicy")
    return replace(
        pod,
        exit_code=code,
        restartable=policy == "Always" or (policy == "OnFailure" and code != 0),
        reason=ended.get("reason"),
        termination_message=ended.get("message"),
        finished_at=unix(ended.get("finishedAt")),
    )


def _named(items: Any, name: str) -> Mapping[str, Any]:
    """Return the item with this name; empty: there is none."""
    return next((each for each in items or () if each["name"] == name), {})


def attempt_of(document: Mapping[str, Any]) -> int:
    """Return the attempt that an object was created for; 0: none."""
    text = str((document["metadata"].get("labels") or {}).get(ATTEMPT, ""))
    return int(text) if text.isdigit() else 0


def _waiting(
    document: Mapping[str, Any], container: str, now: float | None
) -> tuple[str | None, bool]:
    """Return what a pod waits for whose container has not started, and whether in vain."""
    spec, status = document.get("spec") or {}, document["status"]
    inits, others = status.get("initContainerStatuses") or (), status.get("containerStatuses")
    if status.get("phase") == "Failed":
        return next(filter(None, map(_init_failure, inits)), None), False
    if status.get("phase") not in ("Pending", None):
        return None, False
    scheduled = conditions_of(document).get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return _unscheduled(scheduled), False
    # Containers are created one after the other, init containers first: while its own is not, the
    # node waits for what another one waits for.
    waits = {container: {}} | {
        each["name"]: (each.get("state") or {}).get("waiting") or {}
        for each in (*inits, *(others or ()))
    }
    name = container
    if waits[container].get("reason") in _CREATING:
        held = (each for each, found in waits.items() if found.get("reason") not in _CREATING)
        name = next(held, container)
    whose = "its container" if name == container else f"its container {name}"
    reason, message = waits[name].get("reason"), str(waits[name].get("message") or "")
    if reason is None:
        return "its container is being created" if scheduled else "not scheduled yet", False
    specs = (*(spec.get("initContainers") or ()), *(spec.get("containers") or ()))
    image = _named(specs, name).get("image")
    since = unix(scheduled.get("lastTransitionTime"))
    seconds = 0.0 if now is None or since is None else now - since
    # The node's container starts although a sidecar beside it does not.
    needed = name == container or any(each["name"] == name for each in inits)
    stuck = needed and reason in STUCK_REASONS
    if reason == "InvalidImageName":
        return f"image name {image} is not valid", stuck
    if reason in ("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull"):
        cause = f"image {image} cannot be pulled: {_pull_error(reason, message)}"
        return cause, stuck or (needed and seconds > PULL_SECONDS)
    if reason in STUCK_REASONS:
        cause = f"{whose} cannot be created: {message or reason}"
        return cause, stuck and _TRIED_AGAIN.search(message) is None
    if reason in _CREATING:
        for_seconds = f" for {seconds:.0f} s" if seconds >= 5 else ""
        return f"{whose} is being created, or its image pulled{for_seconds}", False
    said = f"{reason}{f': {message}' if message else ''}"
    return said if name == container else f"{whose}: {said}", False


def _init_failure(status: Mapping[str, Any]) -> str | None:
    """Return how an init container failed; None: it has not."""
    ended = (status.get("state") or {}).get("terminated") or {}
    if not (code := ended.get("exitCode")):
        return None
    said = str(ended.get("message") or "").strip().rpartition("\n")[2]
    more = f": {said}" if said else ""
    return f"its init container {status['name']} failed with exit code {code}{more}"


def _unscheduled(scheduled: Mapping[str, Any]) -> str:
    if scheduled.get("reason") == "SchedulingGated":
        return "it waits in its queue"
    message = str(scheduled.get("message") or "")
    message = message.partition(" preemption:")[0].partition(" no new claims")[0]
    message = message.removesuffix(" not found").rstrip("., ")
    if _NODES.match(message):
        return f"no node for it: {message}"
    return f"not scheduled yet{f': {message}' if message else ''}"


def _pull_error(reason: str, message: str) -> str:
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


def _disruption(document: Mapping[str, Any]) -> str | None:
    """Return why the cluster removes a pod, if it does."""
    status = document["status"]
    condition = conditions_of(document).get("DisruptionTarget", {})
    message = str(condition.get("message") or "")
    if condition.get("status") == "True" and (reason := condition.get("reason")) in _DISRUPTIONS:
        node = status.get("message") or message
        return _DISRUPTIONS[reason].format(message=message, node=node)
    if status.get("reason") == "DeadlineExceeded":
        return OVER_TIME_LIMIT
    if status.get("reason") == "Evicted":
        return f"evicted: {status.get('message') or 'its node was short of something'}"
    return None


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
                return f"preempted for pod {related['name']}{of}, whose priority is higher"
            case "Killing":
                killed = True
            case "Unhealthy" if _PROBE.match(message):
                probe = message
    return f"ended by its node: {probe}" if killed and probe is not None else None


def needs_events(pod: Pod) -> bool:
    """Whether a pod's events may have a cause of its end that the pod has not."""
    if pod.removed_by is not None:
        return pod.removed_by.startswith(PREEMPTED)
    if pod.exit_code is None or pod.terminating or pod.reason == "OOMKilled":
        return False
    return pod.stopped or (pod.exit_code in _KILLED and not pod.exit_report)


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
        if first is None or (first.uid != pod.uid and replaceable):
            found[name] = pod
        elif first.uid != pod.uid:
            found[name] = replace(first, gone="replaced")
        elif not first.started and pod.reason == "ContainerStatusUnknown":
            # A kubelet reports 137 of a container that it never created; why the pod ends is what
            # it waited for.
            found[name] = replace(first, terminating=True, gone=None)
        else:
            removed_by = pod.removed_by
            if pod.exit_code is None:
                removed_by = removed_by or first.removed_by
            found[name] = replace(pod, removed_by=removed_by)
    return found


def without(known: Mapping[str, Pod], uids: Iterable[str]) -> dict[str, Pod]:
    """Mark pods as gone."""
    deleted = frozenset(uids)
    return {
        name: replace(pod, gone="deleted") if pod.uid in deleted and not pod.gone else pod
        for name, pod in known.items()
    }


def by_node(pods: Collection[Pod]) -> dict[int, Pod]:
    """Return the pod of each node: the newest that is not gone, else the newest."""
    ordered = sorted(pods, key=lambda pod: (pod.gone is None, pod.created, pod.name))
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
        if pod.lost and not pod.gone:
            reason = f"node {pod.host} of the cluster does not answer"
            if self.forced:
                return f"{reason}; another pod takes its place"
            return (
                f"{reason} (replace_lost: false): kubectl delete pod {pod.name} --force "
                "--grace-period=0 lets another pod take its place"
            )
        if pod.removed:
            return f"{pod.removed_by or 'its pod was removed'}; {REPLACEMENT}"
        return None


def node_status(
    node: int,
    pod: Pod | None,
    *,
    replaceable: bool = False,
    rejoin: Rejoin | None = None,
    waits_for: str | None = None,
    ours: bool = False,
) -> NodeStatus:
    """Return a node's state by its pod.

    Args:
        pod: None: none was ever seen.
        replaceable: whether another pod may take its place (elastic runs).
        rejoin: how a replacement is waited for; None: it is not.
        waits_for: why there is no pod yet, if known.
        ours: whether clusterkit itself has removed the pod.
    """
    host, ended_at = (pod.host, pod.finished_at) if pod else ("", None)

    def status(state: State, reason: str | None = None) -> NodeStatus:
        return NodeStatus(node=node, host=host, state=state, reason=reason, ended_at=ended_at)

    if pod is None:
        if ours:
            return status(State.CANCELLED, NOT_BEGUN)
        return status(State.PENDING, waits_for)
    if rejoin is not None and not ours:
        if (reason := rejoin.waits(pod)) is not None:
            return status(State.PENDING, reason)
        if pod.gone:
            return _ended(node, pod, ours=ours)
    if pod.exit_code is not None:
        if pod.restartable and pod.phase == "Running" and not pod.gone:
            return status(State.RUNNING)
        return _ended(node, pod, ours=ours)
    if pod.gone == "replaced":
        return status(State.FAILED, f"its pod was replaced: {pod.removed_by or 'it was deleted'}")
    if pod.lost:
        state = State.FAILED if pod.gone else State.UNKNOWN
        return status(state, f"node {pod.host} of the cluster does not answer")
    if pod.gone:
        if pod.stuck:
            return status(State.FAILED, pod.waits_for)
        if ours:
            late = "killed: it did not stop when asked to"
            return status(State.CANCELLED, late if pod.started else NOT_BEGUN)
        if replaceable:
            return status(State.PENDING, f"its pod was removed; {REPLACEMENT}")
        cause = pod.removed_by or "somebody deleted it, or the namespace"
        return status(State.FAILED, f"its pod is gone: {cause}")
    # While a sidecar waits, say for its image, the pod of a node that runs is Pending.
    phase = "Running" if pod.started and pod.phase == "Pending" else pod.phase
    state = PHASES.get(phase, State.UNKNOWN)
    if state is State.FAILED or state is State.SUCCEEDED:
        # No container has ended: none was ever started.
        reason = pod.removed_by or pod.waits_for or f"its pod is {pod.phase}"
        return status(State.FAILED, reason)
    if state is State.UNKNOWN:
        return status(state, f"Kubernetes reports its pod as {pod.phase!r}")
    return status(State.FAILED if pod.stuck else state, pod.waits_for)


def _ended(node: int, pod: Pod, *, ours: bool) -> NodeStatus:
    message = (pod.termination_message or "").strip()
    if pod.exit_report:
        found = judge_exit(node, pod.host, message.encode())
        if found.reason == STOPPED and not ours:
            return replace(found, state=State.FAILED, reason=pod.removed_by or DELETED)
        return found
    reason = pod.removed_by
    if reason is None and pod.reason == "OOMKilled":
        reason = _out_of_memory(pod)
    elif reason is None and pod.reason in ("StartError", "ContainerCannotRun"):
        reason = f"its container could not be started: {message}"
    elif reason is None and pod.exit_code == 137:
        reason = "its container was killed (exit code 137) and reported nothing"
    elif reason is None and message:
        reason = f"exited with {pod.exit_code}: {message.rpartition(chr(10))[2]}"
    return NodeStatus(
        node=node,
        host=pod.host,
        state=State.SUCCEEDED if pod.exit_code == 0 else State.FAILED,
        reason=reason,
        exit_code=pod.exit_code,
        ended_at=pod.finished_at,
    )


def _out_of_memory(pod: Pod) -> str:
    limit = pod.memory_limit
    cause = f"over its pod's memory limit of {limit}" if limit else "its node was full"
    return f"killed by the kernel for want of memory: {cause}"


def causes(pods: Iterable[Pod], ours: Collection[str] = ()) -> tuple[NodeCause, ...]:
    """Return why pods were ended from outside, which their agents cannot know.

    Args:
        ours: names of those that clusterkit itself has ended.
    """
    found = []
    for pod in pods:
        node = 0 if pod.node is None else pod.node
        if pod.reason == "OOMKilled":
            hint = "a larger `memory` in the cluster entry, or a smaller batch.micro"
            found.append(NodeCause(node=node, words=_out_of_memory(pod), hint=hint))
        elif pod.name not in ours and (pod.removed_by is not None or pod.stopped):
            code = 137 if pod.exit_code is None else pod.exit_code
            cause = pod.removed_by or DELETED
            found.append(NodeCause(node=node, words=cause, exit_code=code))
    return tuple(found)
