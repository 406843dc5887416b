"""Cluster entries and facts are plain, frozen data."""

import msgspec
import pytest

from clusterkit.cluster import CLUSTER_TYPES, Facts, LocalCluster


@pytest.mark.parametrize(
    "entry",
    [
        {"gpus": -1},
        {"gpus": "some"},
        {"port": 0},
        {"port": 65536},
        {"stop_grace": -0.1},
        {"stop_grace": float("nan")},
        {"stop_grace": float("inf")},
        {"python": 3},
        {"env": {"A": 1}},
        {"backend": "ssh"},
        {"nodes": 3},
    ],
    ids=str,
)
def test_local_cluster_refuses_invalid_values(entry):
    with pytest.raises(msgspec.ValidationError, match=r"Expected|Invalid|unknown field"):
        msgspec.convert(entry, LocalCluster)


def test_local_cluster_defaults_to_all_gpus_and_free_port():
    assert (LocalCluster().gpus, LocalCluster().port) == ("auto", "auto")


def test_facts_survive_json_round_trip(make_facts):
    facts = make_facts(gpus=2)
    assert msgspec.json.decode(msgspec.json.encode(facts), type=Facts) == facts


def test_each_cluster_type_is_registered_under_its_backend_name():
    for name, kind in CLUSTER_TYPES.items():
        assert kind().backend == name
