"""Checks of the nodes: ready, with GPUs."""

from __future__ import annotations

from typing import Any

from clusterkit.backends.kubernetes.doctor.base import (
    NODES,
    ClusterAnswers,
    check,
    fail,
    limits,
    nodes_of,
    ok,
    skip,
    templates,
    warn,
)
from clusterkit.backends.kubernetes.lost_pods import conditions_of
from clusterkit.backends.kubernetes.nodes import gpu_count, is_ready, repelling, usable
from clusterkit.backends.kubernetes.objects import Object, parse_amount
from clusterkit.doctor.base import Verdict
from clusterkit.errors import pluralize

_PRESSURE = ("MemoryPressure", "DiskPressure", "PIDPressure")


@check(NODES, of="nodes")
def nodes(seen: ClusterAnswers) -> Verdict | list[Verdict]:
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
        findings.append(fail(f"no node is schedulable for the job's pods: {'; '.join(causes)}"))
    return findings


def _node(node: Any, seen: ClusterAnswers) -> Verdict:
    name = node["metadata"]["name"]
    conditions = conditions_of(node)
    if not is_ready(node):
        said = str((conditions.get("Ready", {})).get("message") or "it has never been ready")
        remedy = seen.kubectl("describe", "node", name)
        return warn(f"NotReady: {said}", remedy, host=name)
    if (node.get("spec") or {}).get("unschedulable"):
        remedy = seen.kubectl("uncordon", name)
        return warn("SchedulingDisabled: it is cordoned", remedy, host=name)
    for taint in repelling(node, seen.entry):
        text = f"{taint.get('key')}={taint.get('value', '')}:{taint.get('effect')}"
        # On purpose, most of the time.
        cause = f"taint {text.replace('=:', ':')}: the job's pods do not tolerate it"
        return skip(cause, host=name)
    short = [kind for kind in _PRESSURE if conditions.get(kind, {}).get("status") == "True"]
    if short:
        return warn(f"{', '.join(short)}: its pods may be evicted", host=name)
    return ok("ready", host=name)


def _taking(seen: ClusterAnswers) -> list[Object]:
    """Return the nodes that take pods of the job."""
    return [node for node in nodes_of(seen) if is_ready(node) and usable(node, seen.entry)]


_WAITS = "Pods wait until a node has as many, as intended if its node pool scales from zero"


@check(NODES, of="nodes, so not at their GPUs", planned=True)
def gpus(seen: ClusterAnswers) -> Verdict | list[Verdict]:
    """A device plugin offers GPUs, and there are nodes with as many as a pod of the job needs."""
    resource = seen.entry.gpu_resource
    found = _taking(seen)
    wanted = _gpus_wanted(seen)
    if not any(resource in (each["status"].get("capacity") or {}) for each in found):
        if wanted == 0:
            return skip("no GPUs requested: ranks run on CPUs")
        return warn(
            f"no node for the job's pods offers {resource}: is the device plugin running, and does "
            f"`gpu_resource` name its resource? {_WAITS}"
        )
    findings = []
    for node in found:
        name, offered = node["metadata"]["name"], gpu_count(node, seen.entry)
        capacity = int(parse_amount((node["status"].get("capacity") or {}).get(resource, 0)))
        if offered < capacity:
            bad = f"{capacity - offered} of {pluralize(capacity, 'GPU')}"
            findings.append(warn(f"the device plugin reports {bad} unhealthy", host=name))
        if offered < wanted:
            cause = f"{pluralize(offered, 'GPU')}; a pod of the job needs {wanted}"
            findings.append(skip(cause, host=name))
        elif offered == capacity:
            findings.append(ok(pluralize(offered, "GPU"), host=name))
    most = max(gpu_count(each, seen.entry) for each in found)
    if wanted > most:
        cause = f"a pod of the job needs {pluralize(wanted, 'GPU')}, no node has more than {most}"
        findings.append(warn(f"{cause}. {_WAITS}"))
    return findings


def _gpus_wanted(seen: ClusterAnswers) -> int:
    """GPUs of a pod."""
    name = seen.entry.gpu_resource
    return max(int(limits(spec["spec"]).get(name, 0)) for _, _, spec in templates(seen.objects))
