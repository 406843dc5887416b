"""clusterkit doctor on a real Kubernetes: all is well, and each thing that may not be."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from clusterkit import api
from clusterkit.backends.kubernetes.doctor import CHECKS
from clusterkit.doctor.base import Finding
from clusterkit.doctor.report import Report
from clusterkit.errors import BadInput
from clusterkit.spec import JobSpec
from tests.live.kubernetes.conftest import KUBECONFIG, KUBECTL, Kube

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[3]
JOB = JobSpec(name="live", command=("true",), nodes=2, launcher="forkserver")
GPU = "nvidia.com~1gpu"
Examine = Callable[..., Report]


@pytest.fixture
def examine(kube: Kube) -> Examine:
    """``examine(job, only=..., image=...)``: the report, with these keys in the cluster's entry."""

    def call(job: JobSpec | None = JOB, *, only: str | None = None, **entry: object) -> Report:
        names = None if only is None else only.split(",")
        return api.doctor(job, only=names, **kube.entry(**entry))

    return call


def at(report: Report, check: str, host: str = "cluster") -> Finding:
    """The only thing that a check says of a host."""
    (found,) = (f for f in report.findings if (f.check, f.host) == (check, host))
    return found


def ready(name: str, namespace: str) -> None:
    """Wait until a deployment is."""
    words = ["-n", namespace, "rollout", "status", f"deployment/{name}", "--timeout=240s"]
    subprocess.run([*KUBECTL, *words], check=True, capture_output=True)


@pytest.fixture
def well(kube: Kube) -> None:
    """What the cluster comes with is up: it may have just been started."""
    for name, namespace in (
        ("training-operator", "kubeflow"), ("mpi-operator", "mpi-operator"),
        ("kubeflow-trainer-controller-manager", "kubeflow-system"),
        ("jobset-controller-manager", "jobset-system"), ("coredns", "kube-system"),
    ):  # fmt: skip
        ready(name, namespace)
    # A kubelet looks for new images every 30 s, and tells of them later.
    deadline = time.monotonic() + 180
    every = len(kube.nodes())
    while kube.kubectl("get", "nodes", "-o", "json").count('/clusterkit:cpu"') < every:
        assert time.monotonic() < deadline
        time.sleep(1)


@pytest.mark.parametrize(
    "flavor",
    [
        "pytorchjob",
        "mpijob",
        *(pytest.param(each, marks=pytest.mark.thorough) for each in ("trainjob", "job")),
    ],
)
def test_doctor_passes_on_healthy_cluster_and_leaves_no_objects(flavor, examine, well, kube):
    job = JobSpec(
        name="live", command=("true",), nodes=2,
        launcher="mpirun" if flavor == "mpijob" else "torchrun",
    )  # fmt: skip
    before = kube.there()
    report = examine(job, flavor=flavor)
    assert report.ok, report.table()
    assert report.worst == "ok", report.table()
    assert report.checks == tuple(check.name for check in CHECKS)
    assert report.hosts == ("cluster", *kube.nodes())
    assert at(report, "admission").cause.startswith(
        "pod security: the namespace enforces restricted; it accepts a pod ("
    )
    # Nothing that was rehearsed is there.
    assert kube.there() == before


def test_doctor_command_reports_healthy_cluster_and_missing_namespace(kube, well, monkeypatch):
    kube.entry()
    monkeypatch.setenv("CLUSTERKIT_CLUSTERS", str(kube.file))
    argv = [sys.executable, "-m", "clusterkit", "doctor", "jobs/zero3.yaml", "-n", "2", "-c", "k8s"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == (
        f"k8s: cluster and 2 nodes, {len(CHECKS)} checks: all is well"
    )
    kube.entry(namespace="nowhere-at-all")
    done = subprocess.run([*argv, "--json"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    document = json.loads(done.stdout)
    failed = [each for each in document["findings"] if each["level"] == "fail"]
    assert failed[0]["cause"] == "the cluster has no namespace nowhere-at-all"
    assert failed[0]["remedy"].endswith("create namespace nowhere-at-all")


def test_doctor_reports_unreachable_api_server(kube, tmp_path):
    config = yaml.safe_load(KUBECONFIG.read_text())
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    dead = tmp_path / "dead.conf"
    dead.write_text(yaml.safe_dump(config))
    report = api.doctor(JOB, **kube.entry(kubeconfig=str(dead)))
    assert [f.check for f in report.findings if f.level == "fail"] == ["api-server"]
    assert "https://127.0.0.1:1 does not answer" in at(report, "api-server").cause


# ---------------------------------------------------------------- rights


@pytest.fixture
def somebody(kube: Kube, tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """A kubeconfig of somebody who may do what these manifests say, and nothing else."""

    def make(*manifests: Path) -> Path:
        kube.kubectl("create", "serviceaccount", "me")
        for each in manifests:
            kube.kubectl("apply", "-f", str(each))
            kube.kubectl(
                "create", "rolebinding", "me", "--role=clusterkit-submitter",
                f"--serviceaccount={kube.namespace}:me",
            )  # fmt: skip
        token = kube.kubectl("create", "token", "me").strip()
        config = yaml.safe_load(KUBECONFIG.read_text())
        config["users"][0]["user"] = {"token": token}
        path = tmp_path / "me.conf"
        path.write_text(yaml.safe_dump(config))
        return path

    return make


def test_doctor_lists_permissions_that_service_account_lacks(kube, somebody, examine):
    report = examine(kubeconfig=str(somebody()))
    told = at(report, "rights")
    assert told.level == "fail"
    assert f"system:serviceaccount:{kube.namespace}:me may not" in told.cause
    assert "create, patch, delete pytorchjobs; get, create, patch, delete configmaps" in told.cause
    assert "get pods/log" in told.cause
    assert f"--serviceaccount {kube.namespace}:me" in (told.remedy or "")
    assert at(report, "nodes").level == "skip"
    assert at(report, "nodes").cause.startswith("unknown: no permission to list")


def test_doctor_accepts_permissions_of_submitter_role(kube, somebody, examine):
    report = examine(kubeconfig=str(somebody(ROOT / "k8s" / "rbac.yaml")))
    assert report.ok, report.table()
    assert at(report, "rights").level == "ok"
    assert "not tried: no permission to create pods" in at(report, "admission").cause


# ---------------------------------------------------------------- kinds, operators


def test_doctor_reports_job_kind_that_cluster_does_not_serve(kube, examine, well):
    job = JobSpec(name="live", command=("true",), nodes=2, launcher="mpirun")

    def serve(there: bool) -> Finding:
        change = [{"op": "replace", "path": "/spec/versions/0/served", "value": there}]
        kube.kubectl(
            "patch", "crd", "mpijobs.kubeflow.org", "--type=json", "-p", json.dumps(change)
        )
        deadline = time.monotonic() + 60
        while True:
            report = examine(job, flavor="mpijob", only="kind,plan")
            told = at(report, "kind")
            # The API server hears of its own change a moment later, and its two answers (what it
            # serves, the dry run) change at different moments.
            levels = {told.level, at(report, "plan").level}
            if levels == {"ok" if there else "fail"} or time.monotonic() > deadline:
                assert levels == {"ok" if there else "fail"}
                return told

    try:
        assert serve(False).cause == (
            "the cluster does not serve MPIJob (kubeflow.org/v2beta1); of kubeflow.org it serves v1"
        )
    finally:
        assert serve(True).level == "ok"


# ---------------------------------------------------------------- the namespace


def test_submit_reports_refusal_by_limit_range_and_quota(kube, submit, examine, tmp_path):
    limit_range = {
        "apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "small"},
        "spec": {"limits": [{"type": "Container", "max": {"cpu": "1"}}]},
    }  # fmt: skip
    (tmp_path / "range.json").write_text(json.dumps(limit_range))
    kube.kubectl("create", "-f", str(tmp_path / "range.json"))
    with pytest.raises(BadInput, match="must be less than or equal to cpu limit of 1") as refused:
        submit("true", on={"cpus": 2})
    kubectl = f"kubectl --kubeconfig {KUBECONFIG} -n {kube.namespace}"
    assert f"{kubectl} describe limitrange" in (refused.value.hint or "")
    kube.kubectl("delete", "limitrange", "small")
    kube.kubectl("create", "quota", "cores", "--hard=requests.cpu=10")
    with pytest.raises(
        BadInput, match=r"failed quota: cores: must specify requests\.cpu"
    ) as refused:
        submit("true")
    assert "`cpus`" in (refused.value.hint or "")
    with pytest.raises(BadInput, match=r"exceeded quota: cores, requested: requests\.cpu=16"):
        submit("true", on={"cpus": 16})
    assert at(examine(only="admission", cpus=8), "admission").level == "ok"
    kube.kubectl("delete", "quota", "cores")


def test_doctor_reports_patch_that_violates_pod_security(kube, examine):
    patch = {"hostNetwork": True}
    told = at(examine(patch=patch, only="admission"), "admission")
    assert told.level == "fail"
    assert 'violates PodSecurity "restricted:latest": host namespaces' in told.cause
    label = "pod-security.kubernetes.io/enforce=privileged"
    kube.kubectl("label", "namespace", kube.namespace, label, "--overwrite")
    told = at(examine(patch=patch, only="admission"), "admission")
    assert told.cause.startswith(
        "pod security: the namespace enforces privileged; it accepts a pod ("
    )


def test_doctor_reports_priority_that_admission_refuses(examine):
    told = at(examine(priority_class="highest", only="admission"), "admission")
    assert told.level == "fail"
    assert "no PriorityClass with name highest was found" in told.cause
    told = at(examine(patch={"priority": 5}, only="admission"), "admission")
    assert told.level == "fail"
    assert told.cause.startswith("a pod (worker) is refused: ")
    assert "the integer value of priority (5) must not be provided in pod spec" in told.cause


def test_doctor_reports_missing_image_pull_secret(kube, examine):
    told = at(examine(image_pull_secrets=["regcred"], only="pull-secrets"), "pull-secrets")
    assert told.cause == f"namespace {kube.namespace} has no secret regcred"
    kube.kubectl(
        "create", "secret", "docker-registry", "regcred", "--docker-server=x",
        "--docker-username=x", "--docker-password=hunter2",
    )  # fmt: skip
    report = examine(image_pull_secrets=["regcred"], only="pull-secrets")
    assert at(report, "pull-secrets").level == "ok"
    assert "hunter2" not in str(report)
    kube.kubectl("delete", "secret", "regcred")


def test_doctor_reports_missing_and_unusable_volume_claims(kube, examine, tmp_path):
    volumes = [{"claim": "data", "path": "/data"}]
    told = at(examine(volumes=volumes, only="volumes"), "volumes")
    assert told.cause == f"namespace {kube.namespace} has no volume claim data"

    def make(storage: str, mode: str) -> None:
        claim = yaml.safe_load((ROOT / "k8s" / "pvc.yaml").read_text())
        claim["metadata"]["name"] = "data"
        claim["spec"] |= {"storageClassName": storage, "accessModes": [mode]}
        path = tmp_path / "claim.yaml"
        path.write_text(yaml.safe_dump(claim))
        kube.kubectl("apply", "-f", str(path))

    make("none-such", "ReadWriteMany")
    told = at(examine(volumes=volumes, only="volumes"), "volumes")
    assert told.level == "fail"
    assert told.cause.endswith("the cluster has no storage class none-such")
    kube.kubectl("delete", "pvc", "data")
    alone = {
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": kube.namespace},
        "spec": {
            "storageClassName": kube.namespace, "accessModes": ["ReadWriteOnce"],
            "capacity": {"storage": "200Gi"}, "hostPath": {"path": "/nowhere"},
        },
    }  # fmt: skip
    path = tmp_path / "volume.yaml"
    path.write_text(yaml.safe_dump(alone))
    kube.kubectl("apply", "-f", str(path))
    try:
        make(kube.namespace, "ReadWriteOnce")
        kube.kubectl("wait", "pvc/data", "--for=jsonpath={.status.phase}=Bound", "--timeout=60s")
        told = at(examine(volumes=volumes, only="volumes"), "volumes")
        assert told.cause == (
            "claim data: ReadWriteOnce: pods on several nodes cannot all write to it"
        )
        kube.kubectl("delete", "pvc", "data")
    finally:
        kube.kubectl("delete", "-f", str(path))
    make("shared", "ReadWriteMany")
    kube.kubectl("wait", "pvc/data", "--for=jsonpath={.status.phase}=Bound", "--timeout=60s")
    assert at(examine(volumes=volumes, only="volumes"), "volumes").level == "ok"
    kube.kubectl("delete", "pvc", "data")


# ---------------------------------------------------------------- nodes, GPUs, image


def test_doctor_reports_missing_and_too_few_gpus_per_node(kube, examine):
    job = JobSpec(
        name="live",
        command=("true",),
        nodes=2,
        launcher="forkserver",
        gpus_per_node=8,
        device="cuda",
    )
    report = examine(job, only="plan,gpus")
    assert at(report, "gpus").level == "warn"
    assert "no node for the job's pods offers nvidia.com/gpu" in at(report, "gpus").cause
    node = kube.nodes()[0]
    patch = ["patch", "node", node, "--subresource=status", "--type=json", "-p"]
    path = f"/status/capacity/{GPU}"
    kube.kubectl(*patch, json.dumps([{"op": "add", "path": path, "value": "4"}]))
    try:
        kube.kubectl(
            "wait", f"node/{node}", r"--for=jsonpath={.status.allocatable.nvidia\.com/gpu}=4",
            "--timeout=60s",
        )  # fmt: skip
        told = at(examine(job, only="gpus"), "gpus")
        assert "a pod of the job needs 8 GPUs, no node has more than 4" in told.cause
    finally:
        kube.kubectl(*patch, json.dumps([{"op": "remove", "path": path}]))
        kube.kubectl(*patch, json.dumps([{"op": "remove", "path": path.replace(
            "capacity", "allocatable")}]), check=False)  # fmt: skip


def test_doctor_reports_cordoned_node(kube, examine):
    last = kube.nodes()[-1]
    kube.kubectl("cordon", last)
    try:
        told = at(examine(only="nodes"), "nodes", last)
        assert told.cause == "SchedulingDisabled: it is cordoned"
        assert (told.remedy or "").endswith(f"uncordon {last}")
    finally:
        kube.kubectl("uncordon", last)
