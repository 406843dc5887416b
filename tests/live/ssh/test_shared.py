"""Runs on hosts that share their home, as on most clusters: a `workdir` below a folder of all."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from clusterkit import api
from clusterkit.run.status import State
from tests.lab import Lab

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
PROGRAM = "import os\nprint('rank', os.environ['RANK'], os.uname().nodename, flush=True)\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_lab: Lab) -> Path:
    """A project of its own, the current folder; and a cluster file."""
    entry = {
        "backend": "ssh", "inventory": str(shared_lab.inventory), "workdir": "/srv/shared/three",
        "stop_grace": 2, "lost_after": 10,
    }  # fmt: skip
    (tmp_path / "clusters.json").write_text(json.dumps({"lab": entry}))
    monkeypatch.setenv("CLUSTERKIT_CLUSTERS", str(tmp_path / "clusters.json"))
    monkeypatch.setenv("CLUSTERKIT_HOME", str(tmp_path / "home"))
    project = tmp_path / "project"
    project.mkdir()
    (project / "job.yaml").write_text("program: hello.py\nlauncher: forkserver\nnodes: 3\n")
    monkeypatch.chdir(project)
    return project


def test_concurrent_runs_succeed_in_workdir_shared_by_hosts(shared_lab: Lab, project: Path) -> None:
    runs = []
    for number in range(3):
        (project / "hello.py").write_text(f"{PROGRAM}# version {number}\n")
        runs.append(api.submit("job.yaml", cluster="lab", doctor=False))
    for run in runs:
        assert run.wait(120).state is State.SUCCEEDED
        said = {line.text for line in run.logs() if line.rank is not None}
        assert said == {f"rank {number} h{number}" for number in range(3)}
    home = shared_lab.shared / "three"

    def drafts() -> list[Path]:  # the agents end after what they report
        return [path for path in home.rglob(".*") if path.name not in (".lock", ".reserve")]

    deadline = time.monotonic() + 30
    while drafts() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert drafts() == []
    for run in runs:
        run.delete()
    assert list((home / "runs").iterdir()) == []
