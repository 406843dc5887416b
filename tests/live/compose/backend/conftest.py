"""Fixtures of the tests beside this file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterkit import api
from clusterkit.spec import JobSpec
from tests.live.compose.backend.running import ROOT, Start, left_over


@pytest.fixture(scope="module")
def module_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One CLUSTERKIT_HOME for all tests here: what an image holds is asked once."""
    home = tmp_path_factory.mktemp("compose") / "home"
    home.mkdir()
    return home


@pytest.fixture(autouse=True)
def own_home(
    module_home: Path, engine: Any, image: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Its environment; and nothing of any run is in the engine once a test is over."""
    for name, value in engine.env.items():
        if name.startswith("DOCKER_") or name == "PATH":
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("CLUSTERKIT_HOME", str(module_home))
    monkeypatch.chdir(ROOT)
    yield module_home
    assert left_over(engine) == []


@pytest.fixture
def start(image: str, tmp_path: Path) -> Iterator[Start]:
    """``start(job, nodes=2, memory="256m")``: a run, with keys of the cluster entry of its own."""
    started: list[api.Run] = []
    number = 0

    def run(job: JobSpec, *, nodes: int | str = 2, **entry: Any) -> api.Run:
        nonlocal number
        number += 1
        clusters = tmp_path / f"clusters{number}.yaml"
        fields = {"backend": "compose", "image": image, "stop_grace": 2, **entry}
        clusters.write_text(json.dumps({"here": fields}))
        found = api.submit(job, cluster="here", clusters_file=clusters, nodes=nodes)
        started.append(found)
        return found

    yield run
    for one in started:
        one.cancel()
