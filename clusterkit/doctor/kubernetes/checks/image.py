"""Have the nodes got the image?"""

from __future__ import annotations

from clusterkit.backends.kubernetes.nodes import usable
from clusterkit.doctor.base import Finding
from clusterkit.doctor.kubernetes.base import (
    CLUSTER,
    NODES,
    KubeCheck,
    KubeSubject,
    Seen,
    is_ready,
    nodes_of,
    templates,
    unknown,
    unplanned,
)

NAME = "image"
LISTED = 50
"""How many images a node tells of, the largest first, unless its kubelet is set otherwise."""


def judge(seen: Seen, subject: KubeSubject) -> list[Finding]:
    if not seen.objects:
        return unplanned(NAME, seen)
    if seen.reply(NODES).reason:
        return unknown(NAME, seen.reply(NODES), "nodes, so not at their images")
    (image,) = {
        container["image"]
        for _, _, template in templates(seen.objects)
        for container in template["spec"]["containers"][:1]
    }
    if subject.entry.image_pull_policy == "Always":
        cause = f"{image} is pulled each time; whether it can be is seen then alone"
        return [Finding(NAME, CLUSTER, "ok", cause)]
    wanted = full_name(image)
    findings = []
    nodes = [each for each in nodes_of(seen, subject) if is_ready(each)]
    for node in (each for each in nodes if usable(each, subject.entry)):
        name, images = node["metadata"]["name"], node["status"].get("images") or ()
        if any(full_name(each) == wanted for one in images for each in one.get("names") or ()):
            findings.append(Finding(NAME, name, "ok", f"{image} is there"))
            continue
        if subject.entry.image_pull_policy == "Never":
            cause = f"{image} is not there, and image_pull_policy: Never"
            findings.append(Finding(NAME, name, "fail", cause))
            continue
        cause = f"{image} is not there"
        if len(images) >= LISTED:
            cause = f"{image} is not among the {len(images)} largest, which are all that it tells"
        cause += ": it will be pulled, and whether that works is seen then alone"
        findings.append(Finding(NAME, name, "warn", cause, _load(image)))
    return findings or [Finding(NAME, CLUSTER, "skip", "no node takes pods of the job")]


def _load(image: str) -> str | None:
    """What to do about a name that no registry has."""
    if "/" in image:
        return None
    return f"push {image} to a registry and name it (image: REGISTRY/{image}), or load it there"


def full_name(image: str) -> str:
    """The image's name as nodes write it: with a registry and a tag."""
    name, at, digest = image.partition("@")
    first, slash, rest = name.partition("/")
    if not slash:
        name = f"docker.io/library/{name}"
    elif "." not in first and ":" not in first and first != "localhost":
        name = f"docker.io/{first}/{rest}"
    if at:
        return f"{name.rpartition(':')[0] if ':' in name.rpartition('/')[2] else name}@{digest}"
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


CHECK = KubeCheck(
    NAME,
    "The nodes have the image; where they do not, that it can be pulled is only seen then.",
    judge,
    (NODES,),
)
