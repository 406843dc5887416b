"""What probing counts on."""

import json
import sys
from pathlib import Path

import msgspec
import pytest

import clusterkit
from clusterkit import backends
from clusterkit.backends.kubernetes import probe
from clusterkit.backends.kubernetes.api_server import ClusterServer, Forbidden, KubeTransport
from clusterkit.backends.kubernetes.nodes import usable as may_be_used
from clusterkit.bench import bandwidth
from clusterkit.cluster import KubernetesCluster, KubernetesFacts
from clusterkit.errors import BadInput, Unavailable

CONTROL = {"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}
GPU = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("spec", "tolerations", "usable"),
    [
        ({}, (), True),
        ({"unschedulable": True}, (), False),
        ({"taints": [CONTROL]}, (), False),
        ({"taints": [CONTROL]}, ({"operator": "Exists"},), True),
        ({"taints": [CONTROL]}, ({"key": CONTROL["key"], "operator": "Exists"},), True),
        ({"taints": [CONTROL]}, ({"key": CONTROL["key"], "effect": "NoExecute"},), False),
        ({"taints": [GPU]}, (), True),
        ({"taints": [GPU, CONTROL]}, (), False),
        ({"taints": [{**CONTROL, "effect": "PreferNoSchedule"}]}, (), True),
        ({"taints": [{"key": "a", "value": "b", "effect": "NoSchedule"}]},
         ({"key": "a", "value": "b"},), True),
        ({"taints": [{"key": "a", "value": "c", "effect": "NoSchedule"}]},
         ({"key": "a", "value": "b"},), False),
    ],
)  # fmt: skip
def test_node_is_usable_only_when_schedulable_and_taints_tolerated(spec, tolerations, usable):
    assert may_be_used({"spec": spec}, KubernetesCluster(tolerations=tolerations)) is usable


class Nodes(KubeTransport):
    """An API server that lists these nodes, or will not."""

    def __init__(self, *nodes):
        super().__init__()
        self.nodes = nodes

    def request(self, to, method, path, *_):
        if not self.nodes:
            raise Forbidden("no")
        assert (method, path) == ("GET", "/api/v1/nodes")
        return json.dumps({"items": self.nodes})


def test_probe_refuses_unreadable_kubeconfig(tmp_path, no_gpus):
    file = tmp_path / "kubeconfig"
    file.write_text("{broken: [")
    entry = KubernetesCluster(kubeconfig=str(file))
    with pytest.raises(BadInput, match=r"kubeconfig: .*kubeconfig cannot be read"):
        backends.backend("kubernetes").probe(entry, KubeTransport(), None)


def test_forbidden_access_review_counts_as_missing_permission():
    server = ClusterServer(KubernetesCluster(namespace="team"), Nodes())
    with pytest.raises(Unavailable, match="you may not list pods in namespace team"):
        probe._require([("list", "", "pods")], server, hint="")


def test_probe_without_kubernetes_package_names_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(Unavailable, match="needs the package kubernetes") as error:
        backends.backend("kubernetes").probe(KubernetesCluster(), KubeTransport(), None)
    assert "clusterkit[kubernetes]" in error.value.hint


def test_capacity_counts_only_usable_matching_nodes():
    def node(labels=None, **spec):
        return {"metadata": {"labels": labels or {}}, "spec": spec, "status": {}}

    transport = Nodes(node(), node(unschedulable=True), node({"pool": "a"}), node(taints=[CONTROL]))
    backend = backends.backend("kubernetes")
    assert backend.capacity(KubernetesCluster(), transport) == 2
    assert backend.capacity(KubernetesCluster(node_selector={"pool": "a"}), transport) == 1
    assert backend.capacity(KubernetesCluster(topology_key="pool"), transport) == 1
    with pytest.raises(Unavailable, match="how many nodes the cluster has is unknown"):
        backend.capacity(KubernetesCluster(), Nodes())


def test_plan_ships_bandwidth_program_with_run(make_facts):
    job = msgspec.structs.replace(bandwidth.job_of(bandwidth.choose()), nodes=2)
    facts = msgspec.structs.replace(
        make_facts(),
        kubernetes=KubernetesFacts(version="1", context="", namespace="x", kinds=("PyTorchJob",)),
    )
    plan = backends.backend("kubernetes").plan(job, KubernetesCluster(), facts, "bench-1")
    (file,) = (file for file in plan.files if file.path.endswith("/bandwidth.py"))
    ours = Path(clusterkit.__file__).parent / "runtime" / "bandwidth.py"
    assert file.content() == ours.read_bytes()
    (script,) = (file.text for file in plan.files if file.path.endswith("/node.sh"))
    assert "/run/clusterkit/bench-1/files/bandwidth.py" in script
    assert str(ours) not in script
