"""A ``patch:`` that no API server would take is refused before anything starts."""

import pytest

from clusterkit.backends.kubernetes.pods import resources
from clusterkit.backends.kubernetes.validation import check_entry, check_patch
from clusterkit.errors import BadInput
from clusterkit.jobfile import loader


@pytest.mark.parametrize(
    "patch",
    [
        {},
        {"hostNetwork": True, "dnsPolicy": None},
        {"containers": [{"name": "pytorch", "resources": {"limits": {"cpu": 2, "a/b": "1"}}}]},
        {"containers": [{"name": "x", "ports": [{"containerPort": 8080, "name": "x"}]}]},
        {"containers": [{"name": "x", "livenessProbe": {"tcpSocket": {"port": "http"}}}]},
        {"volumes": [{"name": "nfs", "nfs": {"server": "s", "path": "/p"}}]},
        {"nodeSelector": {"pool": "h100"}, "terminationGracePeriodSeconds": 30},
        {"overhead": {"memory": 100}},
    ],
)
def test_check_patch_accepts_valid_pod_fields(patch):
    check_patch(patch)


@pytest.mark.parametrize(
    ("patch", "words", "hint"),
    [
        ({"container": []}, "patch: container: pods have no such key", "containers"),
        ({"containers": [{"imag": "x"}]}, r"patch: containers\[0\].imag: pods", "image"),
        ({"containers": {"name": "x"}}, "patch: containers is .*, but should be a list", "explain"),
        ({"hostNetwork": "yes"}, "patch: hostNetwork is 'yes', but .* true or false", "explain"),
        ({"priority": True}, "patch: priority is True, but should be int", "explain"),
        ({"nodeSelector": {"gpu": True}}, "patch: nodeSelector.gpu is True, .* text", "explain"),
        ({"nodeSelector": "gpu"}, "patch: nodeSelector is 'gpu', but should be a mapping", "expl"),
        ({"securityContext": 3}, "patch: securityContext is 3, but should be a mapping", "expl"),
        ({"zzzz": 1}, "patch: zzzz: pods have no such key", "a pod's spec"),
    ],
)
def test_check_patch_refuses_unknown_key_or_wrong_type(patch, words, hint):
    with pytest.raises(BadInput, match=words) as error:
        check_patch(patch)
    assert hint in (error.value.hint or "")


def test_entry_resources_accept_numbers(tmp_path):
    file = tmp_path / "clusters.yaml"
    file.write_text(
        "k8s: {backend: kubernetes, resources: {cpu: 4, a/b: 0.5, c/d: '1e3', e/f: 2Gi}}"
    )
    cluster = loader.read_cluster("k8s", file).cluster
    asked = {"cpu": "4", "a/b": "0.5", "c/d": "1e3", "e/f": "2Gi"}
    assert resources(cluster, 0) == {"limits": asked, "requests": asked}


@pytest.mark.parametrize("amount", ["-1", "true", "[4]", ".nan"])
def test_check_entry_refuses_bad_resource_amount(amount, tmp_path):
    file = tmp_path / "clusters.yaml"
    file.write_text(f"k8s:\n  backend: kubernetes\n  resources:\n    cpu: {amount}\n")
    with pytest.raises(BadInput, match="cpu"):
        check_entry(loader.read_cluster("k8s", file).cluster)
