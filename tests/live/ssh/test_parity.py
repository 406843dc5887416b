"""The same losses on hosts over SSH as on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.lab import Lab
from tests.live import parity
from tests.live.parity import Case

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[3]
STEPS = 10
JOBS = ("ddp", "zero0", "zero1", "zero2", "zero3")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one rank on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv("CLUSTERKIT_HOME", str(tmp_path_factory.mktemp("home")))
        return parity.measure(parity.REFERENCE, steps=STEPS).losses


def agree(lab: Lab, job: str, expected: list[float], home: Path, patch: pytest.MonkeyPatch) -> None:
    clusters = home.with_name("clusters.yaml")
    clusters.write_text(
        json.dumps({"lab": {"backend": "ssh", "inventory": str(lab.inventory), "lost_after": 120}})
    )
    patch.setenv("CLUSTERKIT_HOME", str(home))
    patch.setenv("CLUSTERKIT_CLUSTERS", str(clusters))
    patch.chdir(ROOT)
    nodes = len(lab.hosts)
    micro = parity.MICRO_2 if nodes > 2 else ()
    found = parity.measure(Case(job, nodes, 1, micro), steps=STEPS, cluster="lab")
    assert len(found.losses) == STEPS
    assert parity.largest_difference(found.losses, expected) <= parity.TOLERANCE
    shards = nodes if job[-1] in "123" else 1
    assert set(found.held.values()) == {found.total // shards}


@pytest.mark.parametrize(
    "job", [*(pytest.param(job, marks=pytest.mark.thorough) for job in JOBS[:-1]), JOBS[-1]]
)
def test_two_hosts_match_losses_of_single_rank(
    lab: Lab, job: str, expected: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agree(lab, job, expected, tmp_path / "home", monkeypatch)


@pytest.mark.thorough
@pytest.mark.parametrize("job", JOBS)
def test_four_hosts_match_losses_of_single_rank(
    lab4: Lab, job: str, expected: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agree(lab4, job, expected, tmp_path / "home", monkeypatch)
