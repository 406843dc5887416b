"""The manifests of ``k8s/``: jobs as a person would write them, with nothing of clusterkit but the
image. Pure.

Operators tell torchrun by PET_* how many nodes there are and where they meet; nobody watches these
jobs from outside, so each is written to get along by itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from clusterkit.backends.kubernetes import job as plain_job
from clusterkit.backends.kubernetes import mpijob, pytorchjob, trainjob
from clusterkit.backends.kubernetes.pods import MANAGER, TMP, container_security, pod_security
from clusterkit.backends.kubernetes.pods import ROLE as POD_ROLE
from clusterkit.backends.kubernetes.rights import BESIDES, ROLE, WATCHING, Rule, jobs_rules
from clusterkit.backends.kubernetes.text import Object, literal
from clusterkit.program import deepspeed_config
from clusterkit.spec import JobSpec
from clusterkit.yaml_text import Commented, documents

NODES, GPUS = 2, 1
IMAGE = "clusterkit:gpu"
PORT = 29500
TRAINJOB = "ddp-trainjob"
CHECKPOINTS = "/checkpoints"
CONFIG = "/etc/clusterkit-job"
_ELASTIC_CONF = {
    "keep_alive_interval": "1",
    "keep_alive_max_attempt": "3",
    "last_call_timeout": "3",
    "join_timeout": "600",
    "close_timeout": "5",
}
_APPLY = "kubectl apply -f k8s/{file}"


def manifests(jobs: Mapping[str, JobSpec]) -> dict[str, str]:
    """File name to text; ``jobs`` by the name of their files."""
    ddp, elastic, zero2 = jobs["ddp"], jobs["elastic"], jobs["zero2"]
    return {
        "pytorchjob.yaml": documents(_pytorchjob(ddp, NODES), _PYTORCHJOB),
        "pytorchjob-elastic.yaml": documents(
            _pytorchjob(elastic, elastic.node_range[1], elastic.node_range[0]), _ELASTIC
        ),
        "mpijob.yaml": documents(_mpijob(zero2), _MPIJOB),
        "trainjob-runtime.yaml": documents(_runtime(ddp), _RUNTIME),
        "trainjob.yaml": documents(_trainjob(ddp), _TRAINJOB),
        "job.yaml": documents(_job(ddp), _JOB),
        "pvc.yaml": documents(_claim(), _PVC),
        "rbac.yaml": documents(_roles(), _RBAC),
        "networkpolicy.yaml": documents(_policy(), _POLICY),
        "kustomization.yaml": documents(_base(), _BASE),
        "overlays/cpu/kustomization.yaml": documents(_overlay(None), _CPU),
        "overlays/gpu/kustomization.yaml": documents(_overlay(8), _GPU),
    }


_PYTORCHJOB = """\
Two nodes with one GPU each, kept by Kubeflow's training operator.

    kubectl apply -f k8s/pytorchjob.yaml
    kubectl logs -f ddp-worker-0
    kubectl delete -f k8s/pytorchjob.yaml

Workers only, which meet through torchrun's c10d: the form that pod security "restricted" admits,
and that goes on by itself when a pod is lost, the first one included. A Master would bring an init
container that is not admitted, and ranks that hang when one of them comes back."""
_ELASTIC = """\
One to four nodes that may come and go; training goes on from the newest checkpoint.

    kubectl apply -f k8s/pvc.yaml -f k8s/pytorchjob-elastic.yaml"""
_MPIJOB = """\
Two nodes whose ranks mpirun starts, kept by Kubeflow's MPI operator. The workers run sshd as a
plain user; the operator makes their keys.

    kubectl apply -f k8s/mpijob.yaml
    kubectl logs -f job/zero2-launcher"""
_RUNTIME = """\
The runtime of k8s/trainjob.yaml: what its pods are. Apply it first, once in a namespace."""
_TRAINJOB = """\
Two nodes, kept by Kubeflow's trainer (v2), with the runtime that k8s/trainjob-runtime.yaml makes.
The trainer refuses a job whose runtime it has not heard of yet: so these are two steps.

    kubectl apply -f k8s/trainjob-runtime.yaml
    kubectl apply -f k8s/trainjob.yaml
    kubectl logs -f -l job-name=ddp-trainjob-node-0,batch.kubernetes.io/job-completion-index=0
    kubectl delete -f k8s/trainjob.yaml"""
_JOB = """\
Two nodes on any cluster: a plain Job with numbered pods, and a service that gives them names.

    kubectl apply -f k8s/job.yaml
    kubectl logs -f -l job-name=ddp-job,batch.kubernetes.io/job-completion-index=0"""
_PVC = "Checkpoints that outlive their pods. All pods of a job write here: ReadWriteMany."
_RBAC = """\
The least that `clusterkit submit` needs in a namespace; bind it to whoever submits.

    kubectl create rolebinding me --role clusterkit-submitter --user NAME"""
_POLICY = """\
Optional: pods of clusterkit's runs talk to those of their own run, to DNS, and to nobody else. One
policy for each run: put its id in. Without egress, programs cannot download data or models."""
_BASE = """\
    kubectl apply -k k8s

Which job, and which overlay: overlays/cpu for nodes without GPUs, overlays/gpu for 8 on each."""
_CPU = "For nodes without GPUs: `make image` on a machine that has none builds clusterkit:cpu."
_GPU = "For nodes with 8 GPUs."


# ---------------------------------------------------------------- the pod


def _pod(
    job: JobSpec,
    container: str,
    command: list[str],
    *,
    env: Mapping[str, str] | None = None,
    more: Mapping[str, Any] | None = None,
    gpus: bool = True,
    restart: str | None = "OnFailure",
    claim: bool = False,
    bare: bool = False,
) -> Object:
    values = {"HOME": TMP, "OMP_NUM_THREADS": "1", **_batch(job), **(env or {})}
    if job.checkpoint is not None:
        values |= {
            "CLUSTERKIT_CHECKPOINT_DIR": CHECKPOINTS,
            "CLUSTERKIT_CHECKPOINT_EVERY": str(job.checkpoint.every),
            "CLUSTERKIT_CHECKPOINT_KEEP": str(job.checkpoint.keep),
            "CLUSTERKIT_CHECKPOINT_RESUME": job.checkpoint.resume,
        }
    if job.deepspeed is not None:
        values["CLUSTERKIT_DEEPSPEED_CONFIG"] = f"{CONFIG}/deepspeed.json"
    variables: list[Any] = [
        {"name": name, "value": literal(value)} for name, value in values.items()
    ]
    variables[0] = Commented(
        variables[0],
        "network: name the interface if a pod has several (NCCL_SOCKET_IFNAME: eth0), and\n"
        "NCCL_IB_HCA with RDMA",
    )
    body: Object = {
        "name": container,
        "image": Commented(IMAGE, "where your nodes can pull it from: REGISTRY/clusterkit:gpu"),
        "command": command,
        **({} if bare else {"env": variables}),
        **(more or {}),
        "securityContext": container_security(),
    }
    if gpus:
        body["resources"] = {
            "limits": {
                "nvidia.com/gpu": Commented(
                    GPUS, "GPUs of a node; the number of ranks above is the same. RDMA: rdma/hca: 1"
                )
            }
        }
    mounts: list[Object] = [
        {"name": "tmp", "mountPath": TMP},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "checkpoints", "mountPath": CHECKPOINTS},
    ]
    kept: Any = {"persistentVolumeClaim": {"claimName": "checkpoints"}}
    gone: Any = {"emptyDir": {}}
    volumes: list[Any] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "checkpoints", **kept}
        if claim
        else Commented(
            {"name": "checkpoints", **gone},
            "gone with the pod; k8s/pvc.yaml makes a volume that stays:\n"
            "persistentVolumeClaim: {claimName: checkpoints}",
        ),
    ]
    if job.deepspeed is not None:
        mounts.append({"name": "config", "mountPath": CONFIG})
        volumes.append({"name": "config", "configMap": {"name": job.name}})
    body["volumeMounts"] = mounts
    spec: Object = {
        **({"restartPolicy": restart} if restart else {}),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(1000),
        "containers": [body],
        "volumes": volumes,
    }
    return {"metadata": {"labels": _labels(job)}, "spec": spec}


def _batch(job: JobSpec) -> dict[str, str]:
    if job.batch is None or job.batch.global_size is None:
        return {}
    return {"CLUSTERKIT_GLOBAL_BATCH": str(job.batch.global_size)}


def _labels(job: JobSpec) -> dict[str, str]:
    return {"app.kubernetes.io/managed-by": MANAGER, "clusterkit/job": job.name}


def _program(job: JobSpec) -> list[str]:
    return [literal(word) for word in (job.program or "", *job.args)]


def _config(job: JobSpec) -> list[Object]:
    """A config map with the job's DeepSpeed config."""
    if job.deepspeed is None:
        return []
    config, _ = deepspeed_config(job.deepspeed, None)
    micro = {"train_batch_size": job.batch.global_size} if job.batch else {}
    text = json.dumps({**micro, **config}, indent=2) + "\n"
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": job.name, "labels": _labels(job)},
            "data": {"deepspeed.json": text},
        }
    ]


# ---------------------------------------------------------------- jobs


def _pytorchjob(job: JobSpec, nodes: int, least: int | None = None) -> list[Object]:
    again = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # ranks find each other a second time
    pod = _pod(
        job,
        "pytorch",
        ["torchrun", *_program(job)],
        env=again,
        restart=None,
        claim=least is not None,
    )
    return [
        {
            "apiVersion": pytorchjob.API,
            "kind": pytorchjob.KIND,
            "metadata": {"name": job.name, "labels": _labels(job)},
            "spec": {
                "nprocPerNode": Commented(str(GPUS), "ranks of a node: one per GPU"),
                "elasticPolicy": {
                    "rdzvBackend": "c10d",
                    "minReplicas": least or nodes,
                    "maxReplicas": nodes,
                    "maxRestarts": 10,
                    "rdzvConf": [
                        {"key": key, "value": value} for key, value in _ELASTIC_CONF.items()
                    ],
                },
                # The job counts as done with the first pod that is, and the operator would end the
                # others with their logs. But of an elastic job some may still wait for a place.
                "runPolicy": {"cleanPodPolicy": "None" if least is None else "Running"},
                "pytorchReplicaSpecs": {
                    "Worker": {
                        "replicas": Commented(nodes, "nodes; as maxReplicas above"),
                        "restartPolicy": "OnFailure",
                        "template": pod,
                    }
                },
            },
        }
    ]


def _mpijob(job: JobSpec) -> list[Object]:
    name = job.name
    ranks = NODES * GPUS
    forward = [
        word
        for variable in (
            "MASTER_ADDR", "MASTER_PORT", "HOME", "OMP_NUM_THREADS", *_batch(job),
            "CLUSTERKIT_DEEPSPEED_CONFIG", "CLUSTERKIT_CHECKPOINT_DIR",
            "CLUSTERKIT_CHECKPOINT_EVERY", "CLUSTERKIT_CHECKPOINT_KEEP",
            "CLUSTERKIT_CHECKPOINT_RESUME",
        )
        for word in ("-x", variable)
    ]  # fmt: skip
    # The name of the first worker, as the operator writes it into the hostfile.
    script = (
        "export MASTER_ADDR=$(sed -n '1s/ .*//p' /etc/mpi/hostfile) "
        f'MASTER_PORT={PORT} && exec mpirun "$@"'
    )
    launcher = _pod(
        job,
        "mpi",
        [
            "sh", "-c", literal(script), "sh", "-np", str(ranks),
            "--map-by", f"ppr:{GPUS}:node", "--bind-to", "none", *forward,
            "python", "-u", *_program(job),
        ],
        gpus=False, restart="Never",
    )  # fmt: skip
    worker = _pod(
        job,
        "mpi",
        ["clusterkit-sshd"],
        more={
            "ports": [{"name": "ssh", "containerPort": mpijob.SSH_PORT}],
            # mpirun must not come before sshd listens.
            "readinessProbe": {"tcpSocket": {"port": mpijob.SSH_PORT}, "periodSeconds": 2},
        },
        restart="Never",
        bare=True,
    )
    return [
        *_config(job),
        {
            "apiVersion": mpijob.API,
            "kind": mpijob.KIND,
            "metadata": {"name": name, "labels": _labels(job)},
            "spec": {
                "slotsPerWorker": Commented(
                    GPUS, "ranks of a node: one per GPU; -np: of all nodes"
                ),
                "sshAuthMountPath": mpijob.KEYS,
                "launcherCreationPolicy": "WaitForWorkersReady",
                "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 2},
                "mpiReplicaSpecs": {
                    "Launcher": {"replicas": 1, "restartPolicy": "Never", "template": launcher},
                    "Worker": {
                        "replicas": Commented(NODES, "nodes"),
                        "restartPolicy": "Never",
                        "template": worker,
                    },
                },
            },
        },
    ]


def _runtime(job: JobSpec) -> list[Object]:
    pod = _pod(job, "node", ["torchrun", *_program(job)], restart="Never")
    runtime: Object = {
        "apiVersion": trainjob.API,
        "kind": "TrainingRuntime",
        "metadata": {"name": TRAINJOB, "labels": _labels(job)},
        "spec": {
            "mlPolicy": {
                "numNodes": NODES,
                "torch": {"numProcPerNode": Commented(GPUS, "ranks of a node: one per GPU")},
            },
            "template": {
                "spec": {
                    "replicatedJobs": [
                        {
                            "name": "node",
                            "template": {
                                "metadata": {
                                    "labels": {
                                        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
                                    }
                                },
                                "spec": {"backoffLimit": 0, "template": pod},
                            },
                        }
                    ]
                }
            },
        },
    }
    return [runtime]


def _trainjob(job: JobSpec) -> list[Object]:
    train: Object = {
        "apiVersion": trainjob.API,
        "kind": trainjob.KIND,
        "metadata": {"name": TRAINJOB, "labels": _labels(job)},
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": TRAINJOB,
            },
            # Without it trainer 2.1 tells torchrun nothing, and every pod trains by itself.
            "trainer": {"numNodes": Commented(NODES, "nodes")},
        },
    }
    return [train]


def _job(job: JobSpec) -> list[Object]:
    name = "ddp-job"
    command = [
        "torchrun", f"--nnodes={NODES}", f"--nproc-per-node={GPUS}",
        # Kubernetes puts the pod's number in.
        "--node-rank=$(JOB_COMPLETION_INDEX)", f"--master-addr={name}-0.{name}",
        f"--master-port={PORT}", *_program(job),
    ]  # fmt: skip
    pod = _pod(job, "train", command, restart="Never")
    pod["spec"]["subdomain"] = name
    service: Object = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": _labels(job)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": name},
        },
    }
    body: Object = {
        "apiVersion": plain_job.API,
        "kind": plain_job.KIND,
        "metadata": {"name": name, "labels": _labels(job)},
        "spec": {
            "completionMode": "Indexed",
            "completions": Commented(NODES, "nodes, three times: here, below and --nnodes"),
            "parallelism": NODES,
            "backoffLimit": 0,
            "template": pod,
        },
    }
    return [service, body]


# ---------------------------------------------------------------- what stands beside them


def _claim() -> list[Object]:
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "checkpoints"},
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "storageClassName": Commented("shared", "`kubectl get storageclass` lists yours"),
                "resources": {"requests": {"storage": Commented("100Gi", "how much")}},
            },
        }
    ]


def _roles() -> list[Object]:
    kinds, besides = jobs_rules(), [*BESIDES, *WATCHING]
    rules: list[Any] = [_rule(rule) for rule in kinds]
    rules[0] = Commented(rules[0], "the kinds of jobs; leave out what the cluster does not have")
    rules += [Commented(_rule(rule), rule.why) if rule.why else _rule(rule) for rule in besides]
    return [
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": {"name": ROLE},
            "rules": rules,
        }
    ]


def _rule(rule: Rule) -> Object:
    return {
        "apiGroups": [rule.group],
        "resources": list(rule.resources),
        "verbs": list(rule.verbs),
    }


def _policy() -> list[Object]:
    run = {"podSelector": {"matchLabels": {"clusterkit/run": "RUN"}}}
    dns = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    return [
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": "clusterkit-run"},
            "spec": {
                "podSelector": {
                    "matchLabels": {
                        "clusterkit/run": Commented("RUN", "the run's id, three times"),
                    },
                    "matchExpressions": [
                        Commented(
                            {"key": POD_ROLE, "operator": "NotIn", "values": ["watcher"]},
                            "a run's watcher talks to the API server",
                        )
                    ],
                },
                "policyTypes": ["Ingress", "Egress"],
                "ingress": [{"from": [run]}],
                "egress": [{"to": [run]}, {"ports": dns}],
            },
        }
    ]


def _base() -> list[Object]:
    return [
        {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": ["pytorchjob.yaml"],
            "components": ["overlays/cpu"],
        }
    ]


_CONTAINERS = {
    "PyTorchJob": ["/spec/pytorchReplicaSpecs/Worker/template/spec/containers/0"],
    "MPIJob": ["/spec/mpiReplicaSpecs/Worker/template/spec/containers/0"],
    "TrainingRuntime": [
        "/spec/template/spec/replicatedJobs/0/template/spec/template/spec/containers/0"
    ],
    "Job": ["/spec/template/spec/containers/0"],
}
_RANKS = {
    "PyTorchJob": ("/spec/nprocPerNode", True),
    "MPIJob": ("/spec/slotsPerWorker", False),
    "TrainingRuntime": ("/spec/mlPolicy/torch/numProcPerNode", False),
}


def _overlay(gpus: int | None) -> list[Object]:
    patches = []
    for kind, places in _CONTAINERS.items():
        operations: list[Object] = []
        for place in places:
            if gpus is None:
                operations.append({"op": "remove", "path": f"{place}/resources"})
                continue
            limit = f"{place}/resources/limits/nvidia.com~1gpu"
            operations.append({"op": "replace", "path": limit, "value": gpus})
        if gpus is not None and kind in _RANKS:
            path, text = _RANKS[kind]
            value: Any = str(gpus) if text else gpus
            operations.append({"op": "replace", "path": path, "value": value})
        patch = "".join(
            f"- op: {each['op']}\n  path: {each['path']}\n"
            + (f"  value: {json.dumps(each['value'])}\n" if "value" in each else "")
            for each in operations
        )
        patches.append({"target": {"kind": kind}, "patch": patch})
    found: Object = {
        "apiVersion": "kustomize.config.k8s.io/v1alpha1",
        "kind": "Component",
        "images": [{"name": "clusterkit", "newTag": "cpu" if gpus is None else "gpu"}],
        "patches": patches,
    }
    return [found]
