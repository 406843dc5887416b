"""The manifests of ``k8s/``, which people apply by hand, say what jobs and code say."""

import json
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from clusterkit import loader
from clusterkit.assemble import deepspeed_config
from clusterkit.backends.kubernetes.flavors import FLAVORS, SSH_KEYS, SSH_PORT
from clusterkit.backends.kubernetes.pods import MANAGER, ROLE, container_security, pod_security
from clusterkit.backends.kubernetes.rights import BESIDES, WATCHING, jobs_rules
from clusterkit.backends.kubernetes.rights import ROLE as SUBMITTER
from clusterkit.backends.kubernetes.text import literal
from tests.unit.kubernetes.test_schema import templates

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "k8s"
JOBS = {
    "pytorchjob": "ddp",
    "pytorchjob-elastic": "elastic",
    "mpijob": "zero2",
    "trainjob-runtime": "ddp",
    "job": "ddp",
}
"""Manifest to the job of ``jobs/`` that it runs."""
CONTAINERS = {
    "PyTorchJob": "/spec/pytorchReplicaSpecs/Worker/template/spec/containers/0",
    "MPIJob": "/spec/mpiReplicaSpecs/Worker/template/spec/containers/0",
    "TrainingRuntime": "/spec/template/spec/replicatedJobs/0/template/spec/template/spec/"
    "containers/0",
    "Job": "/spec/template/spec/containers/0",
}
"""Where the container with the GPUs is."""


def documents(name):
    return list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))


@pytest.fixture(params=JOBS)
def manifest(request):
    """The documents of a manifest, and the job that it runs."""
    job = loader.load_job(ROOT / "jobs" / f"{JOBS[request.param]}.yaml")
    return documents(request.param), job


def launching(objects):
    """The container that starts the job's program."""
    (found,) = (
        container
        for each in objects
        for template in templates(each)
        for container in template["spec"]["containers"]
        if "env" in container
    )
    return found


def test_a_manifest_starts_the_program_of_its_job(manifest):
    objects, job = manifest
    words = [literal(word) for word in (job.program, *job.args)]
    assert launching(objects)["command"][-len(words) :] == words


def test_a_manifest_s_environment_is_what_its_job_asks_for(manifest):
    objects, job = manifest
    env = {each["name"]: each["value"] for each in launching(objects)["env"]}
    assert env.pop("CLUSTERKIT_GLOBAL_BATCH") == str(job.batch.global_size)
    for key in ("every", "keep", "resume"):
        found = env.pop(f"CLUSTERKIT_CHECKPOINT_{key.upper()}", None)
        assert found == (job.checkpoint and str(getattr(job.checkpoint, key)))
    folder = env.pop("CLUSTERKIT_CHECKPOINT_DIR", None)
    assert (folder is None) == (job.checkpoint is None)
    mounts = [each["mountPath"] for each in launching(objects)["volumeMounts"]]
    assert folder is None or folder in mounts
    config = env.pop("CLUSTERKIT_DEEPSPEED_CONFIG", None)
    assert (config is None) == (job.deepspeed is None)
    again = env.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", None)
    assert again == ("1" if objects[0]["kind"] == "PyTorchJob" else None)
    assert env == {"HOME": "/tmp", "OMP_NUM_THREADS": "1"}


def test_mpirun_hands_its_environment_on():
    command = launching(documents("mpijob"))["command"]
    handed = {after for word, after in pairwise(command) if word == "-x"}
    env = {each["name"] for each in launching(documents("mpijob"))["env"]}
    assert handed == env | {"MASTER_ADDR", "MASTER_PORT"}


def test_deepspeed_reads_what_its_job_asks_for():
    job = loader.load_job(ROOT / "jobs" / "zero2.yaml")
    wanted = {"train_batch_size": job.batch.global_size, **deepspeed_config(job.deepspeed, None)[0]}
    assert json.loads(documents("mpijob")[0]["data"]["deepspeed.json"]) == wanted


def test_an_elastic_manifest_has_as_many_nodes_as_its_job():
    job = loader.load_job(ROOT / "jobs" / "elastic.yaml")
    spec = documents("pytorchjob-elastic")[0]["spec"]
    policy = spec["elasticPolicy"]
    assert (policy["minReplicas"], policy["maxReplicas"]) == job.node_range
    assert spec["pytorchReplicaSpecs"]["Worker"]["replicas"] == job.node_range[1]


@pytest.mark.parametrize("name", [*JOBS, "trainjob"])
def test_kinds_labels_and_security_are_those_of_plans(name):
    apis = {flavor.kind: flavor.api for flavor in FLAVORS.values()}
    for each in documents(name):
        assert each["apiVersion"] == apis.get(each["kind"], each["apiVersion"])
        assert each["metadata"]["labels"]["app.kubernetes.io/managed-by"] == MANAGER
        for template in templates(each):
            assert template["spec"]["securityContext"] == pod_security(1000)
            for container in template["spec"]["containers"]:
                assert container["securityContext"] == container_security()


def test_sshd_of_the_mpi_job_is_where_the_image_has_it():
    spec = documents("mpijob")[1]["spec"]
    assert spec["sshAuthMountPath"] == SSH_KEYS
    (container,) = spec["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container["ports"] == [{"name": "ssh", "containerPort": SSH_PORT}]


def test_the_role_has_the_rights_that_doctor_asks_for():
    (role,) = documents("rbac")
    assert role["metadata"]["name"] == SUBMITTER
    assert role["rules"] == [
        {
            "apiGroups": [rule.group],
            "resources": list(rule.resources),
            "verbs": list(rule.verbs),
        }
        for rule in (*jobs_rules(), *BESIDES, *WATCHING)
    ]


def test_the_network_policy_leaves_the_watcher_to_the_api_server():
    (policy,) = documents("networkpolicy")
    (rule,) = policy["spec"]["podSelector"]["matchExpressions"]
    assert rule == {"key": ROLE, "operator": "NotIn", "values": ["watcher"]}


@pytest.mark.parametrize("overlay", ["cpu", "gpu"])
def test_an_overlay_changes_what_the_manifests_have(overlay):
    (component,) = documents(f"overlays/{overlay}/kustomization")
    manifests = {each["kind"]: each for name in JOBS for each in documents(name)}
    patched = {}
    for patch in component["patches"]:
        kind = patch["target"]["kind"]
        for operation in yaml.safe_load(patch["patch"]):
            value = manifests[kind]
            for part in operation["path"].split("/")[1:]:
                value = value[
                    int(part) if isinstance(value, list) else part.replace("~1", "/")
                ]  # a path that is not there is a KeyError
            patched.setdefault(kind, {})[operation["path"]] = operation.get("value")
    assert set(patched) == set(CONTAINERS)
    for kind, operations in patched.items():
        where = f"{CONTAINERS[kind]}/resources"
        if overlay == "cpu":
            assert operations == {where: None}
        else:
            assert operations[f"{where}/limits/nvidia.com~1gpu"] == 8


def after(command, word):
    return command[command.index(word) + 1]


def ranks_and_gpus(objects):
    """How many ranks the objects start, and how many GPUs they ask for (None: of none)."""
    (each,) = (one for one in objects if one["kind"] in CONTAINERS)
    container = each
    for part in CONTAINERS[each["kind"]].split("/")[1:]:
        container = container[int(part) if isinstance(container, list) else part]
    spec = each["spec"]
    if each["kind"] == "PyTorchJob":
        nodes = spec["pytorchReplicaSpecs"]["Worker"]["replicas"]
        ranks = nodes * int(spec["nprocPerNode"])
    elif each["kind"] == "TrainingRuntime":
        nodes = spec["mlPolicy"]["numNodes"]
        ranks = nodes * spec["mlPolicy"]["torch"]["numProcPerNode"]
    elif each["kind"] == "MPIJob":
        nodes = spec["mpiReplicaSpecs"]["Worker"]["replicas"]
        command = launching(objects)["command"]
        ranks = int(after(command, "-np"))
        assert after(command, "--map-by") == f"ppr:{spec['slotsPerWorker']}:node"
        assert nodes * spec["slotsPerWorker"] == ranks
    else:
        (nodes,) = {spec["parallelism"], spec["completions"]}
        words = dict(word.partition("=")[::2] for word in container["command"])
        assert int(words["--nnodes"]) == nodes
        ranks = nodes * int(words["--nproc-per-node"])
    gpus = container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu")
    return nodes, ranks, gpus and nodes * gpus


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="takes kubectl")
@pytest.mark.parametrize("overlay", [None, "cpu", "gpu"])
@pytest.mark.parametrize("name", JOBS)
def test_a_manifest_starts_a_rank_for_every_gpu_that_it_asks_for(tmp_path, name, overlay):
    shutil.copytree(FOLDER, tmp_path / "k8s")
    told = {"resources": [f"{name}.yaml"]}
    told |= {"components": [f"overlays/{overlay}"]} if overlay else {}
    (tmp_path / "k8s" / "kustomization.yaml").write_text(yaml.safe_dump(told))
    built = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path / "k8s")], capture_output=True, text=True, check=True
    )
    nodes, ranks, gpus = ranks_and_gpus(list(yaml.safe_load_all(built.stdout)))
    per_node = {None: 1, "cpu": None, "gpu": 8}[overlay]
    assert gpus == (per_node and per_node * nodes)
    assert ranks == (per_node or 1) * nodes
