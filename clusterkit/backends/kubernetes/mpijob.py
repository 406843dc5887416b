"""MPIJob of Kubeflow's MPI operator 0.7: workers run sshd as a plain user, the launcher mpirun."""

from __future__ import annotations

from collections.abc import Mapping

from clusterkit.backends.kubernetes.pods import Shape, metadata, template
from clusterkit.backends.kubernetes.text import Object
from clusterkit.status import State

KIND, API, PLURAL = "MPIJob", "kubeflow.org/v2beta1", "mpijobs"
INDEX = None
"""There is one launcher, and it is node 0."""
SSH_PORT = 2222
KEYS = "/etc/clusterkit/ssh"
"""Where sshd and ssh of the image look for keys, whatever HOME is, and only root may put some."""
STATES: Mapping[str, State] = {
    "Created": State.PENDING,
    "Suspended": State.PENDING,
    "Running": State.RUNNING,
    "Restarting": State.RESTARTING,
    "Succeeded": State.SUCCEEDED,
    "Failed": State.FAILED,
}


def node_name(shape: Shape, node: int) -> str:
    return f"{shape.name}-worker-{node}.{shape.name}.{shape.namespace}.svc"


def render(shape: Shape) -> list[Object]:
    probe = {
        # Without it, and without launcherCreationPolicy, mpirun comes before sshd and fails.
        "ports": [{"name": "ssh", "containerPort": SSH_PORT}],
        "readinessProbe": {"tcpSocket": {"port": SSH_PORT}, "periodSeconds": 2},
    }
    return [
        {
            "apiVersion": API,
            "kind": KIND,
            "metadata": metadata(shape),
            "spec": {
                "slotsPerWorker": shape.nproc_per_node,
                "sshAuthMountPath": KEYS,
                "launcherCreationPolicy": "WaitForWorkersReady",
                "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 0},
                "mpiReplicaSpecs": {
                    "Launcher": {
                        "replicas": 1,
                        "restartPolicy": "Never",
                        "template": template(shape, "mpi", rank=None, gpus=0),
                    },
                    "Worker": {
                        "replicas": shape.nodes,
                        "restartPolicy": "Never",
                        "template": template(
                            shape,
                            "mpi",
                            rank=None,
                            role="worker",
                            command=("clusterkit-sshd",),
                            more=probe,
                        ),
                    },
                },
            },
        }
    ]
