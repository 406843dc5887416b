"""TrainJob of Kubeflow's trainer 2.1, with a runtime of the run's own, which no admin has to make.

The trainer makes a JobSet of it, and that a Job.
"""

from __future__ import annotations

from collections.abc import Mapping

from clusterkit.backends.kubernetes.job import INDEX, replacing
from clusterkit.backends.kubernetes.pods import Shape, metadata, template
from clusterkit.backends.kubernetes.text import Object
from clusterkit.status import State

KIND, API, PLURAL = "TrainJob", "trainer.kubeflow.org/v1alpha1", "trainjobs"
STATES: Mapping[str, State] = {
    "Suspended": State.PENDING,
    "Complete": State.SUCCEEDED,
    "Failed": State.FAILED,
}

__all__ = ["API", "INDEX", "KIND", "PLURAL", "STATES", "node_name", "render"]


def node_name(shape: Shape, node: int) -> str:
    return f"{shape.name}-node-0-{node}.{shape.name}"


def render(shape: Shape) -> list[Object]:
    job: Object = {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {
                **replacing(shape, "node"),
                "template": template(shape, "node", rank=f"metadata.annotations['{INDEX}']"),
            },
        },
    }
    runtime: Object = {
        "apiVersion": API,
        "kind": "TrainingRuntime",
        "metadata": metadata(shape, shape.name),
        "spec": {
            "mlPolicy": {"numNodes": shape.nodes},
            "template": {"spec": {"replicatedJobs": [job]}},
        },
    }
    train: Object = {
        "apiVersion": API,
        "kind": KIND,
        "metadata": metadata(shape),
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": shape.name,
            },
            "trainer": {"numNodes": shape.nodes},
        },
    }
    return [runtime, train]
