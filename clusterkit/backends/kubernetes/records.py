"""What a run's folder keeps of its pods: their ends are told by nothing else once they are gone."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping

import msgspec

from clusterkit.backends.kubernetes.judge import Pod, began_or
from clusterkit.errors import ClusterkitError
from clusterkit.plan import Plan
from clusterkit.runs import RunHandle


class Removed(msgspec.Struct, frozen=True):
    """Pods of an attempt that clusterkit itself has ended, by name."""

    ended: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()
    """Those of them whose nodes of the cluster did not answer."""
    complete: bool = False
    """Whether nothing is there any more that could make others."""


def known(handle: RunHandle) -> bool:
    """Whether the run's folder is there; one that is gone does not come back."""
    return handle.folder.file("run.json").exists()


def snapshot(handle: RunHandle) -> dict[str, Pod]:
    """The attempt's pods as they were when they were seen last, by name: those of the attempt
    before, where that has gone on in them."""
    found = handle.folder.maybe_json(_file(handle, "pods"), dict[str, Pod])
    before = dataclasses.replace(handle, attempt=handle.attempt - 1)
    if found is not None or handle.attempt == 1 or removed(before) is not None:
        return found or {}
    return snapshot(before)


def keep(handle: RunHandle, pods: Mapping[str, Pod]) -> None:
    """Write down what was seen; a full disk is no reason to end the training."""
    with contextlib.suppress(ClusterkitError):
        handle.folder.write_json(_file(handle, "pods"), pods)


def removed(handle: RunHandle) -> Removed | None:
    """What clusterkit itself has ended; None: nothing yet."""
    return handle.folder.maybe_json(_file(handle, "removed"), Removed)


def put_removed(handle: RunHandle, what: Removed) -> None:
    """Write it down.

    Raises:
        RunFolderError: that cannot be done.
    """
    handle.folder.write_json(_file(handle, "removed"), what)


def _file(handle: RunHandle, name: str) -> str:
    return f"attempts/{handle.attempt}/{name}.json"


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
