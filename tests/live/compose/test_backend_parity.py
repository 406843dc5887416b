"""The same losses in two containers as on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.live import parity
from tests.live.parity import Case

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[3]
STEPS = 10
TEXT = ("--data", "README.md")
"""The default is Python's own source, which is another version's in the image."""
JOBS = ("ddp", "zero0", "zero1", "zero2", "zero3")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity") / "home"


@pytest.fixture(scope="module")
def expected(home: Path) -> list[float]:
    """Losses of one rank on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv("CLUSTERKIT_HOME", str(home))
        return parity.measure(Case("ddp", 1, 1, TEXT), steps=STEPS).losses


@pytest.mark.parametrize(
    "job", [*(pytest.param(job, marks=pytest.mark.thorough) for job in JOBS[:-1]), JOBS[-1]]
)
def test_two_containers_match_losses_of_single_rank(
    job: str, expected: list[float], home: Path, engine: Any, image: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    clusters = home.with_name("clusters.yaml")
    clusters.write_text(
        json.dumps({"here": {"backend": "compose", "image": image, "lost_after": 120}})
    )
    for name, value in engine.env.items():
        if name.startswith("DOCKER_") or name == "PATH":
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("CLUSTERKIT_HOME", str(home))
    monkeypatch.setenv("CLUSTERKIT_CLUSTERS", str(clusters))
    monkeypatch.chdir(ROOT)
    found = parity.measure(Case(job, 2, 1, TEXT), steps=STEPS, cluster="here")
    assert len(found.losses) == STEPS
    assert parity.largest_difference(found.losses, expected) <= parity.TOLERANCE
    assert set(found.held.values()) == {found.total // (2 if job[-1] in "123" else 1)}
