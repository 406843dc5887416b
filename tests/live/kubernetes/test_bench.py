"""`clusterkit bench --cluster k8s`: collectives between pods, and between every pair of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live.kubernetes.conftest import Kube

pytestmark = [pytest.mark.live, pytest.mark.thorough, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    "words", [["--collectives", "all_reduce,broadcast"], ["--pairwise"]], ids=["all", "pairs"]
)
def test_bench_measures_between_all_cluster_nodes_by_default(words, kube: Kube, tmp_path: Path):
    kube.entry()
    done = subprocess.run(
        [sys.executable, "-m", "clusterkit", "bench", "--cluster", "k8s", "--cluster-file",
         str(kube.file), "--sizes", "1K,64K", "--iterations", "5", "--json", *words],
        cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    # Without --nodes: one pod for each node of the cluster.
    assert (report["world_size"], len(report["nodes"])) == (2, 2)
    assert (report["backend"], report["device"], report["wrong"]) == ("gloo", "cpu", 0)
    assert len({node["host"] for node in report["nodes"]}) == 2
    if report["pairs"] is None:
        measured = {(row["collective"], row["size"]) for row in report["rows"]}
        assert measured == {
            (name, size) for name in ("all_reduce", "broadcast") for size in (1024, 65536)
        }
        assert all(row["bus_gb_per_s"] > 0 for row in report["rows"])
    else:
        there, back = report["pairs"]["gb_per_s"]
        assert there[0] is None
        assert there[1] > 0
        assert back[0] > 0
    # The run has ended, and so has all of it.
    assert kube.there() == set()
