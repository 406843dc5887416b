"""The lab of containers: clusterkit's SSH backend and Ansible use it as they use machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterkit import api
from clusterkit.jobfile import loader
from clusterkit.run.status import State
from tests.live import parity
from tests.live.compose.engine import Engine
from tests.live.compose.image import ROOT
from tests.live.parity import Case

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
STEPS = 10


@pytest.fixture(scope="module")
def lab(engine: Engine, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The inventory of two hosts."""
    folder = tmp_path_factory.mktemp("lab") / "with a space"
    project = f"lab-{os.getpid()}"

    def call(verb: str, *more: str) -> None:
        words = (verb, "--folder", str(folder), "--project", project, *more)
        done = subprocess.run(
            [sys.executable, ROOT / "docker" / "lab.py", *words],
            env=engine.env,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr

    try:
        call("up", "--hosts", "2", "--image", image)
        yield folder / "inventory.yaml"
    finally:
        call("down")
    assert not folder.exists()
    label = ("--filter", f"label=com.docker.compose.project={project}", "--quiet")
    assert engine.out("ps", "--all", *label) == ""
    assert engine.out("network", "ls", *label) == ""


@pytest.fixture
def clusters(lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clusters file whose entry `lab` is that lab."""
    file = tmp_path / "clusters.yaml"
    entry = {"backend": "ssh", "inventory": str(lab), "group": "nodes", "lost_after": 120}
    file.write_text(json.dumps({"lab": entry}))
    monkeypatch.setenv("CLUSTERKIT_CLUSTERS", str(file))
    monkeypatch.chdir(ROOT)


@pytest.mark.usefixtures("clusters")
def test_doctor_passes_on_container_lab(clusterkit: list[str]) -> None:
    words = [*clusterkit, "doctor", "--cluster", "lab", "--json"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    findings = json.dumps(json.loads(done.stdout))
    assert "2.13.0" in findings


@pytest.mark.thorough
@pytest.mark.usefixtures("clusters")
def test_two_lab_hosts_match_losses_of_single_rank() -> None:
    text = ("--data", "README.md")  # the default is Python's own source, another version's there
    expected = parity.measure(Case("ddp", 1, 1, text), steps=STEPS).losses
    found = parity.measure(Case("ddp", 2, 1, text), steps=STEPS, cluster="lab")
    assert len(found.losses) == STEPS
    assert parity.largest_difference(found.losses, expected) <= parity.TOLERANCE


@pytest.mark.thorough
@pytest.mark.usefixtures("clusters")
def test_mpirun_job_succeeds_on_lab_hosts() -> None:
    """The image's own ssh client is used there: nobody has to know its port or keys."""
    job = loader.load_job("jobs/ddp.yaml")
    run = api.submit(
        job, cluster="lab", nodes=2, gpus=1,
        settings=["device=cpu", "threads_per_rank=1", "launcher=mpirun", "args=[--steps, '2']"],
    )  # fmt: skip
    try:
        assert run.wait(300).state is State.SUCCEEDED, run.status()
    finally:
        run.cancel()


def test_ansible_reaches_lab_hosts(lab: Path) -> None:
    ansible = Path(sys.executable).with_name("ansible")
    words = [str(ansible), "nodes", "-i", str(lab), "-m", "ansible.builtin.setup"]
    more = ["-a", "gather_subset=!all,!min,user_dir"]
    done = subprocess.run([*words, *more], capture_output=True, text=True, cwd=lab.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count('"ansible_user_dir": "/root"') == 2
