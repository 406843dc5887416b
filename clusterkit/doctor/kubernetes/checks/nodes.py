"""Checks of the nodes: ready, with GPUs, room and the image."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from clusterkit.backends.kubernetes.lost_pods import conditions_of
from clusterkit.backends.kubernetes.nodes import gpu_count, is_ready, repelling, usable
from clusterkit.backends.kubernetes.objects import Object, parse_amount
from clusterkit.doctor.base import Verdict
from clusterkit.doctor.kubernetes.base import (
    NODES,
    PODS,
    Seen,
    amount,
    check,
    fail,
    limits,
    nodes_of,
    ok,
    requests,
    skip,
    templates,
    warn,
)
from clusterkit.errors import counted

_PRESSURE = {"MemoryPressure": "memory", "DiskPressure": "disk", "PIDPressure": "process ids"}


@check(NODES, of="nodes")
def nodes(seen: Seen) -> Verdict | list[Verdict]:
    """There are nodes that take pods of the job, and they are well."""
    found = nodes_of(seen)
    if not found:
        entry = seen.entry
        wanted = ", ".join(
            [*map("=".join, entry.node_selector.items()), *filter(None, [entry.topology_key])]
        )
        cause = f"no node has the labels {wanted}" if wanted else "the cluster has no nodes"
        return fail(cause, seen.kubectl("get", "nodes"))
    findings = [_node(node, seen) for node in found]
    if not any(finding.level == "ok" for finding in findings):
        causes = dict.fromkeys(finding.cause for finding in findings)
        findings.append(fail(f"no node takes pods of the job: {'; '.join(causes)}"))
    return findings


def _node(node: Any, seen: Seen) -> Verdict:
    name = node["metadata"]["name"]
    conditions = conditions_of(node)
    if not is_ready(node):
        said = str((conditions.get("Ready", {})).get("message") or "it has never been ready")
        remedy = seen.kubectl("describe", "node", name)
        return warn(f"not ready: {said}", remedy, host=name)
    if (node.get("spec") or {}).get("unschedulable"):
        remedy = seen.kubectl("uncordon", name)
        return warn("it takes no pods (cordoned)", remedy, host=name)
    for taint in repelling(node, seen.entry):
        text = f"{taint.get('key')}={taint.get('value', '')}:{taint.get('effect')}"
        # On purpose, most of the time.
        cause = f"it takes no pods of the job: taint {text.replace('=:', ':')}"
        return skip(cause, host=name)
    short = [
        word for kind, word in _PRESSURE.items() if conditions.get(kind, {}).get("status") == "True"
    ]
    if short:
        return warn(f"short of {' and '.join(short)}: pods may be evicted", host=name)
    return ok("ready", host=name)


def _taking(seen: Seen) -> list[Object]:
    """Return the nodes that take pods of the job."""
    return [node for node in nodes_of(seen) if is_ready(node) and usable(node, seen.entry)]


_WAITS = "Pods wait until a node has as many, which is right where a pool is scaled to zero"


@check(NODES, of="nodes, so not at their GPUs", planned=True)
def gpus(seen: Seen) -> Verdict | list[Verdict]:
    """A device plugin offers GPUs, and there are nodes with as many as a pod of the job needs."""
    resource = seen.entry.gpu_resource
    found = _taking(seen)
    wanted = _gpus_wanted(seen)
    if not any(resource in (each["status"].get("capacity") or {}) for each in found):
        if wanted == 0:
            return skip("no GPUs are asked for: ranks run on CPUs")
        cause = f"no node that takes the job's pods knows of {resource}: "
        cause += "is the device plugin up, and does `gpu_resource` name what it offers? "
        return warn(cause + _WAITS)
    findings = []
    for node in found:
        name, offered = node["metadata"]["name"], gpu_count(node, seen.entry)
        capacity = int(parse_amount((node["status"].get("capacity") or {}).get(resource, 0)))
        if offered < capacity:
            cause = f"{capacity - offered} of {counted(capacity, 'GPU')} are not well, "
            findings.append(warn(f"{cause}says the device plugin", host=name))
        if offered < wanted:
            cause = f"{counted(offered, 'GPU')}; a pod of the job needs {wanted}"
            findings.append(skip(cause, host=name))
        elif offered == capacity:
            findings.append(ok(counted(offered, "GPU"), host=name))
    most = max(gpu_count(each, seen.entry) for each in found)
    if wanted > most:
        cause = f"a pod of the job needs {counted(wanted, 'GPU')}, no node has more than {most}"
        findings.append(warn(f"{cause}. {_WAITS}"))
    return findings


def _gpus_wanted(seen: Seen) -> int:
    """GPUs of a pod."""
    name = seen.entry.gpu_resource
    return max(int(limits(spec["spec"]).get(name, 0)) for _, _, spec in templates(seen.objects))


Amounts = dict[str, Decimal]


@check(NODES, of="nodes, so not at the room there", planned=True)
def room(seen: Seen) -> Verdict | list[Verdict]:
    """The nodes have room for all pods of the job, with what each asks for."""
    pods = [
        requests(seen.spec_of(role, template))
        for role, number, template in templates(seen.objects)
        for _ in range(number)
    ]
    whole = {
        node["metadata"]["name"]: {
            name: parse_amount(value)
            for name, value in (node["status"].get("allocatable") or {}).items()
        }
        for node in _taking(seen)
    }
    largest = max(pods, key=lambda pod: sorted(pod.items()))
    asked = ", ".join(f"{name} {amount(name, value)}" for name, value in sorted(largest.items()))
    if left := _left_over(pods, whole):
        cause = f"even on empty nodes {_no_room(left, len(pods))}; a pod asks for "
        most = max((gpu_count(each, seen.entry) for each in _taking(seen)), default=0)
        # An autoscaler may start nodes with so many GPUs once pods wait for them.
        level = warn if _gpus_wanted(seen) > most else fail
        return [*_lacking(largest, whole), level(cause + (asked or "nothing"))]
    cause = f"{counted(len(pods), 'pod')}"
    cause += f" with {asked}" if asked else " that ask for nothing"
    if seen.reply(PODS).reason:
        why = "how full they are is unknown: you may not look at all pods"
        return ok(f"{cause} fit on empty nodes; {why}")
    free = {name: dict(has) for name, has in whole.items()}
    for pod in seen.reply(PODS).items:
        spec = pod.get("spec") or {}
        _take(free.get(spec.get("nodeName") or "", {}), requests(spec))
    if left := _left_over(pods, free):
        cause = f"{_no_room(left, len(pods))} now: the nodes are too full, they would wait; a pod "
        cause += f"asks for {asked or 'nothing'}"
        return [warn(cause), *_lacking(largest, free, " beside what runs there")]
    return ok(cause)


def _no_room(left: int, pods: int) -> str:
    if pods == 1:
        return "there is no room for the job's pod"
    return f"there is no room for {left} of the job's {pods} pods"


def _lacking(pod: Amounts, free: Mapping[str, Amounts], suffix: str = "") -> list[Verdict]:
    """Return what a pod would lack on each node on which it does not fit."""
    missing = {name: _missing(pod, has) for name, has in free.items()}
    return [skip(f"{text}{suffix}", host=name) for name, text in missing.items() if text]


def _take(has: Amounts, needs: Mapping[str, Decimal]) -> None:
    """Subtract a pod's requests from what a node has."""
    for name, value in {**needs, "pods": Decimal(1)}.items():
        if name in has:
            has[name] -= value


def _missing(needs: Mapping[str, Decimal], has: Mapping[str, Decimal]) -> str:
    """Return as text what a pod would lack; empty if it fits."""
    lacking = [
        f"{name} {amount(name, max(Decimal(0), has.get(name, Decimal(0))))}, "
        f"not {amount(name, value)}"
        for name, value in {"pods": Decimal(1), **needs}.items()
        if has.get(name, Decimal(0)) < value
    ]
    return "; ".join(lacking)


def _left_over(pods: Iterable[Amounts], nodes: Mapping[str, Amounts]) -> int:
    """Count the pods that do not fit, each put on the first node that has room."""
    free = [dict(has) for has in nodes.values()]
    left = 0
    for needs in pods:
        for has in free:
            if not _missing(needs, has):
                _take(has, needs)
                break
        else:
            left += 1
    return left


LISTED = 50
"""How many images a node lists, the largest first, unless its kubelet is set otherwise."""


@check(NODES, of="nodes, so not at their images", planned=True)
def image(seen: Seen) -> Verdict | list[Verdict]:
    """The nodes have the image; where they do not, that it can be pulled is only seen then."""
    (name,) = {
        container["image"]
        for _, _, template in templates(seen.objects)
        for container in template["spec"]["containers"][:1]
    }
    policy = seen.entry.image_pull_policy
    if policy == "Always":
        return ok(f"{name} is pulled each time; whether it can be is seen then alone")
    wanted = full_name(name)
    findings = []
    for node in _taking(seen):
        host, images = node["metadata"]["name"], node["status"].get("images") or ()
        if any(full_name(each) == wanted for one in images for each in one.get("names") or ()):
            findings.append(ok(f"{name} is there", host=host))
            continue
        if policy == "Never":
            cause = f"{name} is not there, and image_pull_policy: Never"
            findings.append(fail(cause, host=host))
            continue
        cause = f"{name} is not there"
        if len(images) >= LISTED:
            cause = f"{name} is not among the {len(images)} largest, which are all that it tells"
        cause += ": it will be pulled, and whether that works is seen then alone"
        push = f"push {name} to a registry and name it (image: REGISTRY/{name}), or load it there"
        findings.append(warn(cause, None if "/" in name else push, host=host))
    return findings or skip("no node takes pods of the job")


def full_name(image: str) -> str:
    """Return an image's name as nodes list it: with a registry and a tag."""
    name, at, digest = image.partition("@")
    first, slash, rest = name.partition("/")
    if not slash:
        name = f"docker.io/library/{name}"
    elif "." not in first and ":" not in first and first != "localhost":
        name = f"docker.io/{first}/{rest}"
    if at:
        return f"{name.rpartition(':')[0] if ':' in name.rpartition('/')[2] else name}@{digest}"
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"
