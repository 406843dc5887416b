"""What probing counts on."""

import pytest

from clusterkit.cluster import KubernetesCluster
from clusterkit.kubernetes.nodes import usable as may_be_used

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
def test_gpus_are_counted_only_where_pods_may_go(spec, tolerations, usable):
    assert may_be_used({"spec": spec}, KubernetesCluster(tolerations=tolerations)) is usable
