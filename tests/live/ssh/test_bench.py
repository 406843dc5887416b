"""`clusterkit bench --cluster lab`: the hosts of the cluster, and the one with the slow link."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab import Lab

pytestmark = pytest.mark.live


@pytest.mark.thorough
def test_bench_names_host_with_slow_link(
    lab4: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "clusters.yaml").write_text(
        f"lab: {{backend: ssh, inventory: {lab4.inventory}, group: nodes}}\n"
    )
    monkeypatch.setenv("CLUSTERKIT_HOME", str(tmp_path / "home"))
    lab4.fault("slow", "h2", "50mbit")
    done = subprocess.run(
        [sys.executable, "-m", "clusterkit", "bench", "--cluster", "lab", "--pairwise",
         "--sizes", "1K,1M", "--json"],
        cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    pairs = report["pairs"]
    # Without --nodes every host takes part, under its name in the inventory.
    assert pairs["hosts"] == ["h0", "h1", "h2", "h3"]
    assert report["wrong"] == 0
    rate = 50e6 / 8 / 1e9
    for peer in (0, 1, 3):
        for link in (pairs["gb_per_s"][peer][2], pairs["gb_per_s"][2][peer]):
            assert rate / 2 < link < rate * 1.3  # a burst goes through at once
    worst = pairs["findings"][0]
    assert (worst["kind"], worst["hosts"], worst["what"]) == ("host", ["h2"], "bandwidth")
    assert "Host h2 is slow: bandwidth 0.00" in pairs["judgement"]
