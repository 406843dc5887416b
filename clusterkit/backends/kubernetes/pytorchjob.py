"""PyTorchJob of Kubeflow's training operator 1.9: Workers only.

A Master would bring an init container into every Worker that pod security "restricted" forbids,
and a job that counts as done when its Master is.
"""

from __future__ import annotations

from collections.abc import Mapping

from clusterkit.backends.kubernetes.pods import Shape, metadata, template
from clusterkit.backends.kubernetes.text import Object
from clusterkit.status import State

KIND, API, PLURAL = "PyTorchJob", "kubeflow.org/v1", "pytorchjobs"
INDEX = "training.kubeflow.org/replica-index"
"""Label that holds the number of a pod."""
STATES: Mapping[str, State] = {
    "Created": State.PENDING,
    "Suspended": State.PENDING,
    "Running": State.RUNNING,
    "Restarting": State.RESTARTING,
    "Succeeded": State.SUCCEEDED,
    "Failed": State.FAILED,
}


def node_name(shape: Shape, node: int) -> str:
    """The name under which the other pods find a node's."""
    return f"{shape.name}-worker-{node}"


def _restarts(shape: Shape) -> str:
    if shape.elastic:
        return "OnFailure"
    # Makes a pod anew that ends with 128 or more; with Never one that was deleted counts as failed.
    return "ExitCode" if shape.rejoin else "Never"


def render(shape: Shape) -> list[Object]:
    return [
        {
            "apiVersion": API,
            "kind": KIND,
            "metadata": metadata(shape),
            "spec": {
                # A job is done for the operator when Worker 0 is; the others may still be at work,
                # and end together by themselves when one of them fails (agent.membership).
                "runPolicy": {"cleanPodPolicy": "None"},
                "pytorchReplicaSpecs": {
                    "Worker": {
                        "replicas": shape.nodes,
                        "restartPolicy": _restarts(shape),
                        "template": template(shape, "pytorch", rank=f"metadata.labels['{INDEX}']"),
                    }
                },
            },
        }
    ]
