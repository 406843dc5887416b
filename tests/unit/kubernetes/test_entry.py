"""A ``patch:`` that no API server would take is refused before anything starts."""

import pytest

from clusterkit.backends.kubernetes.entry import check_patch
from clusterkit.errors import BadInput


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
def test_what_pods_have_is_taken(patch):
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
def test_what_they_do_not_have_is_refused_by_name(patch, words, hint):
    with pytest.raises(BadInput, match=words) as error:
        check_patch(patch)
    assert hint in (error.value.hint or "")
