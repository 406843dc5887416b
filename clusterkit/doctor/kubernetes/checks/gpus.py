"""Do nodes have the GPUs that a pod is to get?"""

from __future__ import annotations

from clusterkit.backends.kubernetes.nodes import gpu_count, usable
from clusterkit.doctor.base import Finding
from clusterkit.doctor.kubernetes.base import (
    CLUSTER,
    NODES,
    KubeCheck,
    KubeSubject,
    Seen,
    is_ready,
    limits,
    nodes_of,
    quantity,
    templates,
    unknown,
)
from clusterkit.errors import counted

NAME = "gpus"


def judge(seen: Seen, subject: KubeSubject) -> list[Finding]:
    resource = subject.entry.gpu_resource
    reply = seen.reply(NODES)
    if reply.reason:
        return unknown(NAME, reply, "nodes, so not at their GPUs")
    nodes = [each for each in nodes_of(seen, subject) if is_ready(each)]
    nodes = [each for each in nodes if usable(each, subject.entry)]
    wanted = _wanted(seen, subject)
    known = any(resource in (each["status"].get("capacity") or {}) for each in nodes)
    if wanted is None or not known:
        if wanted:
            cause = f"no node that takes the job's pods knows of {resource}: "
            cause += "is the device plugin up, and does `gpu_resource` name what it offers?"
            return [Finding(NAME, CLUSTER, "fail", cause)]
        why = "no GPUs are asked for" if wanted == 0 else f"no node has {resource}"
        return [Finding(NAME, CLUSTER, "skip", f"{why}: ranks run on CPUs")]
    findings = []
    for node in nodes:
        name, there = node["metadata"]["name"], gpu_count(node, subject.entry)
        capacity = int(quantity((node["status"].get("capacity") or {}).get(resource, 0)))
        if there < capacity:
            cause = f"{capacity - there} of {counted(capacity, 'GPU')} are not well, "
            findings.append(Finding(NAME, name, "warn", f"{cause}says the device plugin"))
        if there < wanted:
            cause = f"{counted(there, 'GPU')}; a pod of the job needs {wanted}"
            findings.append(Finding(NAME, name, "skip", cause))
        elif there == capacity:
            findings.append(Finding(NAME, name, "ok", counted(there, "GPU")))
    enough = [each for each in nodes if gpu_count(each, subject.entry) >= wanted]
    if wanted and not enough:
        most = max((gpu_count(each, subject.entry) for each in nodes), default=0)
        cause = f"a pod of the job needs {counted(wanted, 'GPU')}, no node has more than {most}"
        findings.append(Finding(NAME, CLUSTER, "fail", cause))
    return findings


def _wanted(seen: Seen, subject: KubeSubject) -> int | None:
    """GPUs of a pod; None: as many as there are."""
    job, entry = subject.job, subject.entry
    if seen.objects:
        name = entry.gpu_resource
        return max(int(limits(spec["spec"]).get(name, 0)) for _, _, spec in templates(seen.objects))
    if job.device == "cpu" or entry.gpus == 0:
        return 0
    if job.gpus_per_node != "auto" and job.device == "cuda":
        return job.gpus_per_node
    if entry.gpus != "auto":
        return entry.gpus
    return 1 if job.device == "cuda" else None


CHECK = KubeCheck(
    NAME,
    "A device plugin offers GPUs, and there are nodes with as many as a pod of the job needs.",
    judge,
    (NODES,),
)
