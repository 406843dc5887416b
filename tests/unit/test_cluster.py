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
def test_values_that_make_no_sense_are_refused(entry):
    with pytest.raises(msgspec.ValidationError, match=r"Expected|Invalid|unknown field"):
        msgspec.convert(entry, LocalCluster)


def test_the_built_in_cluster_takes_all_gpus_and_a_free_port():
    assert (LocalCluster().gpus, LocalCluster().port) == ("auto", "auto")


def test_facts_survive_their_json_form(make_facts):
    facts = make_facts(gpus=2)
    assert msgspec.json.decode(msgspec.json.encode(facts), type=Facts) == facts


def test_each_kind_of_cluster_is_registered_under_the_backend_it_names():
    for name, kind in CLUSTER_TYPES.items():
        assert kind().backend == name
