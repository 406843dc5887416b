"""A plain Indexed Job and a headless service: no operator, every cluster has it."""

from __future__ import annotations

from collections.abc import Mapping

from clusterkit.agent import LEFT
from clusterkit.backends.kubernetes.pods import Shape, metadata, template
from clusterkit.backends.kubernetes.text import Object
from clusterkit.status import State

KIND, API, PLURAL = "Job", "batch/v1", "jobs"
INDEX = "batch.kubernetes.io/job-completion-index"
STATES: Mapping[str, State] = {
    "Suspended": State.PENDING,
    "SuccessCriteriaMet": State.RUNNING,
    "FailureTarget": State.RUNNING,
    "Complete": State.SUCCEEDED,
    "Failed": State.FAILED,
}


def node_name(shape: Shape, node: int) -> str:
    return f"{shape.name}-{node}.{shape.name}"


def replacing(shape: Shape, container: str) -> Object:
    """The keys of a Job by which a pod that was taken away is made anew, and no other.

    A pod that somebody deletes is not marked as disrupted: its agent's exit code tells.
    """
    found: Object = {"backoffLimit": 0}
    if shape.rejoin:
        taken = {"containerName": container, "operator": "In", "values": [LEFT]}
        # (Written out: in a TrainJob's runtime it has no default.)
        disrupted = {"type": "DisruptionTarget", "status": "True"}
        found["podReplacementPolicy"] = "Failed"
        found["podFailurePolicy"] = {
            "rules": [
                {"action": "Ignore", "onPodConditions": [disrupted]},
                {"action": "Ignore", "onExitCodes": taken},
            ]
        }
    return found


def render(shape: Shape) -> list[Object]:
    service: Object = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(shape, shape.name),
        "spec": {
            "clusterIP": "None",
            # Names are there before their pods are ready: they wait for each other.
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": shape.name},
        },
    }
    job: Object = {
        "apiVersion": API,
        "kind": KIND,
        "metadata": metadata(shape),
        "spec": {
            "completionMode": "Indexed",
            "completions": shape.nodes,
            "parallelism": shape.nodes,
            # One that fails takes the others with it; whoever watches starts all of them again.
            **replacing(shape, "train"),
            "template": template(
                shape,
                "train",
                rank=f"metadata.annotations['{INDEX}']",
                subdomain=shape.name,
            ),
        },
    }
    return [service, job]
