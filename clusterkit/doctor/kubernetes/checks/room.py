"""Do the job's pods fit on the nodes, beside what runs there?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal

from clusterkit.backends.kubernetes.nodes import usable
from clusterkit.backends.kubernetes.text import Object
from clusterkit.doctor.base import Finding
from clusterkit.doctor.kubernetes.base import (
    CLUSTER,
    NODES,
    PODS,
    REHEARSAL,
    KubeCheck,
    KubeSubject,
    Seen,
    amount,
    is_ready,
    nodes_of,
    quantity,
    requests,
    spec_of,
    templates,
    unknown,
    unplanned,
)
from clusterkit.errors import counted

NAME = "room"
Amounts = dict[str, Decimal]


def judge(seen: Seen, subject: KubeSubject) -> list[Finding]:
    if not seen.objects:
        return unplanned(NAME, seen)
    if seen.reply(NODES).reason:
        return unknown(NAME, seen.reply(NODES), "nodes, so not at the room there")
    pods = [
        requests(spec_of(seen, role, template))
        for role, number, template in templates(seen.objects)
        for _ in range(number)
    ]
    nodes = [each for each in nodes_of(seen, subject) if is_ready(each)]
    nodes = [each for each in nodes if usable(each, subject.entry)]
    whole = {each["metadata"]["name"]: _allocatable(each) for each in nodes}
    largest = max(pods, key=lambda pod: sorted(pod.items()))
    asked = ", ".join(f"{name} {amount(name, value)}" for name, value in sorted(largest.items()))
    if left := _left_over(pods, whole):
        return [
            *(Finding(NAME, name, "skip", _missing(largest, has)) for name, has in whole.items()
              if _missing(largest, has)),
            Finding(NAME, CLUSTER, "fail", f"even on empty nodes {_no_room(left, len(pods))}; a "
                    f"pod asks for {asked or 'nothing'}"),
        ]  # fmt: skip
    told = f"{counted(len(pods), 'pod')}"
    told += f" with {asked}" if asked else " that ask for nothing"
    if seen.reply(PODS).reason:
        return [Finding(NAME, CLUSTER, "ok", f"{told} fit on empty nodes; how full they are is "
                        "unknown: you may not look at all pods")]  # fmt: skip
    free = {name: dict(has) for name, has in whole.items()}
    for pod in seen.reply(PODS).items:
        _take(free.get((pod.get("spec") or {}).get("nodeName") or "", {}), _needs(pod))
    if left := _left_over(pods, free):
        cause = f"{_no_room(left, len(pods))} now: the nodes are too full, they would wait; a pod "
        cause += f"asks for {asked or 'nothing'}"
        return [
            Finding(NAME, CLUSTER, "warn", cause),
            *(Finding(NAME, name, "skip", f"{why} beside what runs there")
              for name, has in free.items() if (why := _missing(largest, has))),
        ]  # fmt: skip
    return [Finding(NAME, CLUSTER, "ok", told)]


def _no_room(left: int, pods: int) -> str:
    if pods == 1:
        return "there is no room for the job's pod"
    return f"there is no room for {left} of the job's {pods} pods"


def _allocatable(node: Object) -> Amounts:
    there = node["status"].get("allocatable") or {}
    return {name: quantity(value) for name, value in there.items()}


def _needs(pod: Object) -> Amounts:
    return {**requests(pod.get("spec") or {}), "pods": Decimal(1)}


def _take(has: Amounts, needs: Mapping[str, Decimal]) -> None:
    for name, value in needs.items():
        if name in has:
            has[name] -= value


def _missing(needs: Mapping[str, Decimal], has: Mapping[str, Decimal]) -> str:
    """What a pod would lack there, in words; empty where it fits."""
    lacking = [
        f"{name} {amount(name, max(Decimal(0), has.get(name, Decimal(0))))}, "
        f"not {amount(name, value)}"
        for name, value in {"pods": Decimal(1), **needs}.items()
        if has.get(name, Decimal(0)) < value
    ]
    return "; ".join(lacking)


def _left_over(pods: Iterable[Amounts], nodes: Mapping[str, Amounts]) -> int:
    """How many of the pods find no place, each put on the first node that takes it."""
    free = [dict(has) for has in nodes.values()]
    left = 0
    for needs in pods:
        for has in free:
            if not _missing(needs, has):
                _take(has, {**needs, "pods": Decimal(1)})
                break
        else:
            left += 1
    return left


CHECK = KubeCheck(
    NAME,
    "The nodes have room for all pods of the job, with what each asks for.",
    judge,
    (NODES, PODS, REHEARSAL),
)
