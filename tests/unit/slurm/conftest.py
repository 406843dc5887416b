"""Fixtures of the tests beside this file."""

import msgspec
import pytest

from clusterkit import backends
from clusterkit.cluster import SlurmCluster, SlurmFacts
from clusterkit.spec import JobSpec


@pytest.fixture
def plan(make_facts):
    def make(cluster=None, slurm=None, **fields):
        given = {"version": "22.05.8", "partition": "main", "nodes": 16, "minutes": 2880}
        facts = msgspec.structs.replace(make_facts(), slurm=SlurmFacts(**(given | (slurm or {}))))
        asked = JobSpec(**{"name": "demo", "command": ("true",), "nodes": 2, **fields})
        entry = SlurmCluster(**(cluster or {}))
        return backends.backend("slurm").plan(asked, entry, facts, "demo-1")

    return make
