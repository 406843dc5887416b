"""The manifests of ``k8s/``, which people apply by hand, say what jobs and code say."""

import json
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import yaml

from clusterkit import __version__, backends
from clusterkit.assemble import deepspeed_config
from clusterkit.backends.kubernetes.flavors import SSH_KEYS
from clusterkit.backends.kubernetes.objects import MANAGER, ROLE
from clusterkit.backends.kubernetes.rbac import INSIDE_RULES, RUN_RULES, WATCHER_RULES, job_rules
from clusterkit.backends.kubernetes.rbac import ROLE as SUBMITTER
from clusterkit.cluster import KubernetesCluster, KubernetesFacts
from clusterkit.jobfile import loader
from tests.unit.kubernetes.test_schema import documents_of, templates

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


# What plans have besides, as an agent starts the ranks there and reports on them.
AGENT = {
    "NODE_RANK", "USER", "LOGNAME", "PYTHONUNBUFFERED", "PATH", "MASTER_ADDR", "MASTER_PORT",
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "CLUSTERKIT_ATTEMPT", "CLUSTERKIT_PEER_TOKEN",
    "CLUSTERKIT_NODE_ADDRESS", "CLUSTERKIT_NODE_DIR", "CLUSTERKIT_RUN_ID", "CLUSTERKIT_RUN_DIR",
    "CLUSTERKIT_JOB", "CLUSTERKIT_DEVICE", "CLUSTERKIT_MICRO_BATCH", "CLUSTERKIT_ACCUMULATION",
    "CLUSTERKIT_COORDINATOR",
}  # fmt: skip
# What lies elsewhere in a pod without a run's folder.
FOLDERS = {"CLUSTERKIT_CHECKPOINT_DIR", "CLUSTERKIT_DEEPSPEED_CONFIG"}
# What only torchrun needs that an operator starts: its ranks find each other a second time.
OPERATOR = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}


@pytest.fixture(params=JOBS)
def both(request, make_facts):
    """The documents of a manifest, and the plan of the same job."""
    objects = documents(request.param)
    job = loader.load_job(ROOT / "jobs" / f"{JOBS[request.param]}.yaml")
    flavor = request.param.partition("-")[0]
    nodes = job.nodes if job.elastic else 2
    launcher = "mpirun" if flavor == "mpijob" else "torchrun"
    job = msgspec.structs.replace(job, nodes=nodes, launcher=launcher)
    kubernetes = KubernetesFacts(
        version="v1.34.4", context="c", namespace="ns", kinds=("PyTorchJob", "MPIJob", "TrainJob")
    )
    facts = msgspec.structs.replace(make_facts(gpus=1), kubernetes=kubernetes)
    cluster = KubernetesCluster(
        flavor=flavor, image=f"clusterkit:{__version__}-gpu", cpus=1, memory="4Gi"
    )
    return objects, backends.backend("kubernetes").plan(job, cluster, facts, "demo")


def file_of(plan, name):
    return next(file.text for file in plan.files if file.path.endswith(f"/{name}"))


def containers(objects):
    """Of all pods, each kind of job's own way: name of its container, and what it is."""
    return [
        (template["spec"], container)
        for each in objects
        for template in templates(each)
        for container in template["spec"]["containers"]
        if container["name"] != "watcher"
    ]


def launching(objects):
    """The container that starts the job's program."""
    (found,) = (one for _, one in containers(objects) if one["command"] != ["clusterkit-sshd"])
    return found


def test_manifest_kinds_match_plan(both):
    objects, plan = both

    def kinds(documents):
        return {(each["apiVersion"], each["kind"]) for each in documents} - {
            ("v1", "ConfigMap"),  # deepspeed.json, which a plan's kustomization has
            ("trainer.kubeflow.org/v1alpha1", "TrainJob"),  # in a file of its own by hand
        }

    assert kinds(objects) == kinds(yaml.safe_load_all(file_of(plan, "manifests.yaml")))


def test_manifest_nodes_ranks_and_gpus_match_plan(both):
    objects, plan = both
    nodes, ranks, gpus = ranks_and_gpus(objects)
    assert (nodes, ranks, gpus) == (plan.topology["nodes"], plan.world_size, plan.world_size)


def test_manifest_command_matches_plan(both):
    objects, plan = both
    words = launching(objects)["command"]
    own = words[words.index("jobs/train/gpt/train.py") :]
    assert f"python -u {' '.join(own)}\n" in file_of(plan, "rank.sh").replace("python3", "python")


def test_manifest_environment_matches_plan(both):
    objects, plan = both
    planned = documents_of(plan)
    theirs = dict(re.findall(r"(?m)^export (\w+)=(.*)", file_of(plan, "node.sh")))
    # Unless the image has its own.
    theirs = {key: re.sub(r'^"\$\{\w+-(.*)\}"$', r"\1", value) for key, value in theirs.items()}
    theirs |= {each["name"]: each.get("value") for each in launching(planned)["env"]}
    ours = {each["name"]: each["value"] for each in launching(objects)["env"]}
    besides = {name for name in set(theirs) - set(ours) if not name.startswith("OMPI_")}
    assert besides <= AGENT
    assert set(ours) - set(theirs) <= OPERATOR
    for name in set(ours) - OPERATOR - FOLDERS:
        assert ours[name] == theirs[name], name
    mounts = [each["mountPath"] for each in launching(objects)["volumeMounts"]]
    assert ours.get("CLUSTERKIT_CHECKPOINT_DIR", "/checkpoints") in mounts


def test_manifest_resources_and_security_match_plan(both):
    objects, plan = both
    ours, theirs = containers(objects), containers(documents_of(plan))
    assert len(ours) == len(theirs)
    for (spec, container), (their_spec, their_container) in zip(ours, theirs, strict=True):
        for key in ("securityContext", "automountServiceAccountToken", "enableServiceLinks"):
            assert spec[key] == their_spec[key]
        for key in ("name", "image", "securityContext"):
            assert container[key] == their_container[key]
        assert container.get("ports") == their_container.get("ports")
        assert container.get("readinessProbe") == their_container.get("readinessProbe")
        amounts = json.loads(json.dumps(container["resources"]), parse_int=str)
        their_amounts = json.loads(json.dumps(their_container["resources"]))
        their_amounts["requests"]["cpu"] = their_amounts["requests"]["cpu"].replace("0.1", "100m")
        assert amounts == their_amounts
        written = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert written >= {"/tmp", "/dev/shm"}


@pytest.mark.parametrize("name", [*JOBS, "trainjob"])
def test_manifest_objects_carry_managed_by_label(name):
    for each in documents(name):
        assert each["metadata"]["labels"]["app.kubernetes.io/managed-by"] == MANAGER


def test_mpijob_mpirun_exports_its_whole_environment():
    command = launching(documents("mpijob"))["command"]
    handed = {after for word, after in pairwise(command) if word == "-x"}
    env = {each["name"] for each in launching(documents("mpijob"))["env"]}
    assert handed == env | {"MASTER_ADDR", "MASTER_PORT"}


def test_mpijob_deepspeed_config_matches_zero2_job():
    job = loader.load_job(ROOT / "jobs" / "zero2.yaml")
    wanted = {"train_batch_size": job.batch.global_size, **deepspeed_config(job.deepspeed, None)[0]}
    assert json.loads(documents("mpijob")[0]["data"]["deepspeed.json"]) == wanted


def test_elastic_manifest_replica_range_matches_job_nodes():
    job = loader.load_job(ROOT / "jobs" / "elastic.yaml")
    policy = documents("pytorchjob-elastic")[0]["spec"]["elasticPolicy"]
    assert (policy["minReplicas"], policy["maxReplicas"]) == job.node_range


def test_mpijob_ssh_auth_mount_path_matches_image():
    assert documents("mpijob")[1]["spec"]["sshAuthMountPath"] == SSH_KEYS


def test_rbac_role_grants_permissions_that_doctor_checks():
    (role,) = documents("rbac")
    assert role["metadata"]["name"] == SUBMITTER
    assert role["rules"] == [
        {
            "apiGroups": [rule.group],
            "resources": list(rule.resources),
            "verbs": list(rule.verbs),
        }
        for rule in (*job_rules(), *RUN_RULES, *INSIDE_RULES, *WATCHER_RULES)
    ]


def test_network_policy_excludes_watcher_pods():
    (policy,) = documents("networkpolicy")
    (rule,) = policy["spec"]["podSelector"]["matchExpressions"]
    assert rule == {"key": ROLE, "operator": "NotIn", "values": ["watcher"]}


@pytest.mark.parametrize("overlay", ["cpu", "gpu"])
def test_overlay_patches_gpu_resources_of_every_kind(overlay):
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
            assert operations == {f"{where}/limits/nvidia.com~1gpu": None}
        else:
            assert operations[where]["limits"]["nvidia.com/gpu"] == 8


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
def test_kustomized_manifest_starts_one_rank_per_gpu(tmp_path, name, overlay):
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
    assert f"image: clusterkit:{__version__}-{overlay or 'gpu'}\n" in built.stdout
    assert ranks == (per_node or 1) * nodes
