"""GPUs of pods: what is asked for, what the nodes have now, and the taint of nodes with GPUs."""

import json
import threading

import pytest
import yaml

from clusterkit import backends
from clusterkit.backends.kubernetes import api_server
from clusterkit.backends.kubernetes.api_server import KubeTransport
from clusterkit.cluster import KubernetesCluster
from clusterkit.errors import BadInput
from clusterkit.spec import JobSpec
from tests.conftest import noted

GPU = "nvidia.com/gpu"
TAINT = {"key": GPU, "value": "present", "effect": "NoSchedule"}


def node(gpus=0, **spec):
    return {
        "metadata": {"name": "n", "labels": {}},
        "spec": spec,
        "status": {"allocatable": {GPU: str(gpus)} if gpus else {}},
    }


class ApiServer(KubeTransport):
    """One that has these nodes, serves plain Jobs alone, and lets us do everything."""

    def __init__(self, *nodes):
        super().__init__()
        self.nodes = nodes

    def request(self, to, method, path, *_):
        return json.dumps(
            {
                "/version": {"gitVersion": "v1.34.4"},
                "/api/v1/nodes": {"items": self.nodes},
                "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews": {
                    "status": {"allowed": True}
                },
            }.get(path, {})
        )


@pytest.fixture
def planned(clusterkit_home, monkeypatch):
    """Probe a cluster of these nodes, and plan a job on it."""
    monkeypatch.setattr(api_server, "context_of", lambda cluster: ("lab", "default"))

    def plan(*nodes, entry=None, **job):
        spec = JobSpec(name="any", command=("true",), nodes=2, **job)
        cluster = KubernetesCluster(**(entry or {}))
        backend = backends.backend("kubernetes")
        facts = backend.probe(cluster, ApiServer(*nodes), spec)
        return backend.plan(spec, cluster, facts, "any-1")

    return plan


def pod_of(plan):
    """The spec of the nodes' pods."""
    (file,) = (file for file in plan.files if file.path.endswith("manifests.yaml"))
    kept = [each for each in yaml.safe_load_all(file.content()) if each["kind"] == "Job"]
    (found,) = (each for each in kept if "parallelism" in each["spec"])
    return found["spec"]["template"]["spec"]


def gpus_of(plan):
    return pod_of(plan)["containers"][0].get("resources", {}).get("limits", {}).get(GPU)


def remarks(plan):
    return " ".join(note.value for note in plan.notes)


@pytest.mark.parametrize(
    ("entry", "job"),
    [({"gpus": 8}, {}), ({"gpus": 8}, {"device": "cuda"}), ({}, {"device": "cuda"})],
    ids=["entry", "both", "job"],
)
@pytest.mark.parametrize("there", [0, 4])
def test_plan_requests_numbered_gpus_that_no_node_has_yet(planned, there, entry, job):
    number = {} if entry else {"gpus_per_node": 8}
    plan = planned(node(there), node(), entry=entry, **job, **number)
    assert gpus_of(plan) == "8"
    assert noted(plan, "image").startswith("clusterkit:gpu")
    assert f"no node has more than {there} {GPU} now" in remarks(plan)


def test_plan_adds_no_remark_when_node_has_gpus(planned):
    plan = planned(node(8), entry={"gpus": 8})
    assert gpus_of(plan) == "8"
    assert "now" not in remarks(plan)


@pytest.mark.parametrize(
    ("cores", "entry", "job", "threads"),
    [
        (["96"], {}, {}, "12"),
        (["95500m", "190"], {}, {}, "11"),  # the pod may be on the smaller one
        (["96"], {"gpus": 2}, {}, "12"),  # of a quarter of the node's GPUs
        (["96"], {"cpus": 16}, {}, "2"),
        (["96"], {}, {"threads_per_rank": 3}, "3"),
        (["96"], {}, {"device": "cpu"}, "1"),
        ([None], {}, {}, "1"),
        (["many"], {}, {}, "1"),
    ],
)
def test_threads_per_rank_are_node_cores_divided_by_gpus(planned, cores, entry, job, threads):
    nodes = [node(8) for _ in cores]
    for each, amount in zip(nodes, cores, strict=True):
        each["status"]["allocatable"] |= {"cpu": amount} if amount else {}
    plan = planned(*nodes, node(0), entry=entry, **job)
    assert noted(plan, "threads_per_rank") == threads


def test_auto_device_without_gpus_plans_cpu_and_suggests_gpus_key(planned):
    plan = planned(node(), node())
    assert gpus_of(plan) is None
    (device,) = (note for note in plan.notes if note.name == "device")
    assert device.value == "cpu"
    assert f"no node has {GPU} now" in device.origin
    assert "`gpus: N`" in device.origin


def test_cuda_job_without_gpu_count_is_refused_with_hint(planned):
    with pytest.raises(BadInput, match=f"device: cuda, but no node has {GPU} now") as caught:
        planned(node(), device="cuda")
    assert "`gpus: N` in the cluster entry" in caught.value.hint


def test_plan_refuses_more_gpus_per_node_than_entry_gives_pod(planned):
    with pytest.raises(BadInput, match="gpus_per_node: 8, but a pod gets 4"):
        planned(node(8), entry={"gpus": 4}, gpus_per_node=8)


def test_only_gpu_pods_tolerate_gpu_taint(planned):
    tolerated = {"key": GPU, "operator": "Exists"}
    assert pod_of(planned(node(8, taints=[TAINT])))["tolerations"] == [tolerated]
    assert "tolerations" not in pod_of(planned(node(8, taints=[TAINT]), device="cpu"))


@pytest.mark.parametrize("own", [{"key": GPU, "operator": "Exists"}, {"operator": "Exists"}])
def test_gpu_toleration_of_entry_is_not_repeated(planned, own):
    plan = planned(node(8, taints=[TAINT]), entry={"tolerations": (own,)})
    assert pod_of(plan)["tolerations"] == [own]


class Slow(ApiServer):
    """Says its version once it was asked for its nodes as well."""

    def __init__(self):
        super().__init__(node())
        self.asked = []
        self.together = threading.Event()

    def request(self, to, method, path, *_):
        self.asked.append(path)
        if path == "/api/v1/nodes":
            self.together.set()
        if path == "/version":
            assert self.together.wait(30)
        return super().request(to, method, path)


def test_probe_sends_its_requests_concurrently(clusterkit_home, monkeypatch):
    monkeypatch.setattr(api_server, "context_of", lambda cluster: ("lab", "default"))
    server, job = Slow(), JobSpec(name="any", command=("true",), nodes=2)
    backends.backend("kubernetes").probe(KubernetesCluster(), server, job)
    # Its version, namespace and nodes, 4 kinds of jobs, and 3 rights.
    assert len(server.asked) == 10
