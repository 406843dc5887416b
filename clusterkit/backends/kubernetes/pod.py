"""A pod as the API server reports it: read for what it says of a run's node. Pure."""

from __future__ import annotations

import contextlib
import enum
import json
import re
import signal
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from clusterkit.agent import OVER_TIME_LIMIT, STOPPED
from clusterkit.backends.kubernetes.lost_pods import conditions_of, unix, unreachable_since
from clusterkit.backends.kubernetes.objects import ATTEMPT, ROLE

PREEMPTED = "Preempted: by a pod of higher priority"
_DISRUPTIONS = {
    "PreemptionByScheduler": f"{PREEMPTED}: {{message}}",
    "EvictionByEvictionAPI": "Evicted: its node is being drained",
    "TerminationByKubelet": "Evicted: {node}",
    "DeletionByTaintManager": "DeletionByTaintManager: its node is gone or has a taint that "
    "the pod does not tolerate",
}
"""By the reason of a pod's condition DisruptionTarget."""
_CREATING = (None, "ContainerCreating", "PodInitializing")
"""Why a container waits that is about to start, as far as its own status says."""
STUCK_REASONS = ("InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError")
"""Why a container waits for ever, until its manifest is changed."""
# A kubelet that could not read a Secret within 1 s tries again (pkg/kubelet/util/manager, 1.34).
_TRIED_AGAIN = re.compile(r"failed to sync \w+ cache: timed out waiting for the condition")
PULL_SECONDS = 60.0
"""How long pulls of the image may fail before its pod counts as stuck."""
KILLED = (128 + signal.SIGKILL, 128 + signal.SIGTERM)
_NODES = re.compile(r"\d+/\d+ nodes are available")


class PodState(enum.Enum):
    """Whether a pod exists, and for how long it still may."""

    PRESENT = "present"
    TERMINATING = "terminating"  # it is being deleted
    UNREACHABLE = "unreachable"  # its node has not answered for so long that it counts as gone
    DELETED = "deleted"
    LOST = "lost"  # deleted, by force, while its node did not answer
    REPLACED = "replaced"  # another pod has its name now


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
        removed_by: why the cluster removes it, if it does.
        has_finalizers: whether removal by force has to remove these as well.
        attempt: the attempt that it was started for; its agent may have begun others since.
        logged: whether all of its log is in the run's folder.
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
    memory_limit: str | None = field(default=None, name="limit")
    removed_by: str | None = None
    restarts: int = 0
    finished_at: float | None = None
    container: str = ""
    has_finalizers: bool = field(default=False, name="held")
    attempt: int = 1
    created: float = 0.0
    state: PodState = PodState.PRESENT
    logged: bool = False

    @property
    def running(self) -> bool:
        """Whether it had neither ended nor been asked to."""
        return self.exit_code is None and self.state is PodState.PRESENT

    @property
    def gone(self) -> bool:
        return self.state in (PodState.DELETED, PodState.LOST, PodState.REPLACED)

    @property
    def on_lost_node(self) -> bool:
        return self.state in (PodState.UNREACHABLE, PodState.LOST)

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
            removed = self.gone or self.state is PodState.TERMINATING
        else:
            # An agent that was killed had no time for a report.
            silent = not (self.termination_message or "").strip() and self.reason != "OOMKilled"
            removed = self.stopped or (silent and self.exit_code in KILLED)
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
        state=PodState.TERMINATING if meta.get("deletionTimestamp") else PodState.PRESENT,
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
        return (
            f"ContainerCreating: {whose} is being created" if scheduled else "not scheduled yet",
            False,
        )
    specs = (*(spec.get("initContainers") or ()), *(spec.get("containers") or ()))
    image = _named(specs, name).get("image")
    since = unix(scheduled.get("lastTransitionTime"))
    seconds = 0.0 if now is None or since is None else now - since
    # The node's container starts although a sidecar beside it does not.
    needed = name == container or any(each["name"] == name for each in inits)
    stuck = needed and reason in STUCK_REASONS
    if reason == "InvalidImageName":
        return f"InvalidImageName: {image} is not the name of an image", stuck
    if reason in ("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull"):
        # A pull that fails is ErrImagePull and ImagePullBackOff in turn: one name for both.
        term = "ErrImageNeverPull" if reason == "ErrImageNeverPull" else "ImagePullBackOff"
        cause = f"{term}: image {image} cannot be pulled: {_pull_error(reason, message)}"
        return cause, stuck or (needed and seconds > PULL_SECONDS)
    if reason in STUCK_REASONS:
        cause = f"{reason}: {whose} cannot be created{f': {message}' if message else ''}"
        return cause, stuck and _TRIED_AGAIN.search(message) is None
    if reason in _CREATING:
        for_seconds = f" for {seconds:.0f} s" if seconds >= 5 else ""
        return (
            f"ContainerCreating: {whose} is being created or its image pulled{for_seconds}",
            False,
        )
    said = f"{reason}{f': {message}' if message else ''}"
    return said if name == container else f"{whose}: {said}", False


def _init_failure(status: Mapping[str, Any]) -> str | None:
    """Return how an init container failed; None: it has not."""
    ended = (status.get("state") or {}).get("terminated") or {}
    if not (code := ended.get("exitCode")):
        return None
    said = str(ended.get("message") or "").strip().rpartition("\n")[2]
    more = f": {said}" if said else ""
    return f"Init:Error: init container {status['name']} failed with exit code {code}{more}"


def _unscheduled(scheduled: Mapping[str, Any]) -> str:
    if scheduled.get("reason") == "SchedulingGated":
        return "suspended: waits for its Kueue queue"
    message = str(scheduled.get("message") or "")
    message = message.partition(" preemption:")[0].partition(" no new claims")[0]
    message = message.removesuffix(" not found").rstrip("., ")
    if _NODES.match(message):
        return f"Unschedulable: {message}"
    return f"not scheduled yet{f': {message}' if message else ''}"


def _pull_error(reason: str, message: str) -> str:
    low = message.lower()
    if reason == "ErrImageNeverPull":
        return "it is not on the node and image_pull_policy is Never"
    if "unauthorized" in low or "authorization failed" in low or "denied" in low:
        return "the registry needs credentials (image_pull_secrets) or does not have the image"
    if "not found" in low or "manifest unknown" in low:
        return "the registry does not have the image"
    if re.search(r"no such host|dial tcp|i/o timeout|connection refused|failed to do request", low):
        return "the registry does not answer"
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
        return f"Evicted: {status.get('message') or 'its node ran out of a resource'}"
    return None
