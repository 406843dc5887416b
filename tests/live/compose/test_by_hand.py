"""Two nodes by `docker compose up` alone: the losses of one rank here, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clusterkit.run import logs
from tests.live import parity
from tests.live.compose.engine import Engine
from tests.live.compose.image import ROOT

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
FILE = ROOT / "docker" / "compose.yaml"
GPU = ROOT / "docker" / "compose.gpu.yaml"
CI = Path(__file__).with_name("ci.yaml")
LAB = ROOT / "docker" / "lab.yaml"
STEPS = 10
PROGRAM = (
    f"jobs/train/gpt/train.py --strategy ddp --steps {STEPS} --global-batch 8 --micro-batch 4 "
    "--eval-every 0 --data README.md"
)


@pytest.fixture
def compose(engine: Engine, image: str) -> Iterator[Callable[..., str]]:
    """``compose("up", ...)`` of a project of the test's own, which is gone afterwards."""
    project = f"by-hand-{os.getpid()}"
    words = ("compose", "-p", project, "-f", str(FILE), "-f", str(CI))

    def call(*more: str, check: bool = True, **environment: str) -> str:
        env = {**engine.env, "CLUSTERKIT_IMAGE": image, **environment}
        done = Engine(env).run(*words, *more, check=check, timeout=300)
        return done.stdout if check else f"{done.stdout}{done.stderr}exit code {done.returncode}"

    yield call
    call("down", "--volumes", "--timeout", "5")
    label = ("--filter", f"label=com.docker.compose.project={project}", "--quiet")
    assert engine.out("ps", "--all", *label) == ""
    assert engine.out("network", "ls", *label) == ""
    assert engine.out("volume", "ls", *label) == ""


def losses(text: str) -> list[float]:
    """Of the marked lines in a log."""
    # Compose puts a code for terminals before the lines of a log, also where there is none.
    lines = [line.replace("\x1b[2K", "") for line in text.splitlines()]
    found = [logs.parse_mark(line) for line in lines]
    return [mark["loss"] for mark in found if mark and mark["event"] == "metrics"]


@pytest.mark.thorough
def test_docker_compose_up_of_two_nodes_matches_losses_of_single_rank(
    compose: Callable[..., str],
) -> None:
    program = f"{PROGRAM} --checkpoint-dir /checkpoints --checkpoint-every 5"
    compose("up", "--detach", CLUSTERKIT_PROGRAM=program)
    compose("wait", "node0", "node1", CLUSTERKIT_PROGRAM=program)
    log = compose("logs", "--no-color", "--no-log-prefix")
    found = losses(log)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    alone = subprocess.run(
        [sys.executable, *PROGRAM.split()],
        env=env,
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    expected = losses(alone.stdout)
    assert len(found) == len(expected) == STEPS, log[-3000:]
    assert parity.largest_difference(found, expected) <= parity.TOLERANCE
    assert '"world_size": 2' in log
    kept = compose("run", "--rm", "--no-deps", "node0", "ls", "/checkpoints")
    assert f"step-{STEPS:08d}" in kept.split()


def test_docker_compose_up_stops_and_returns_exit_code_when_nodes_fail(
    compose: Callable[..., str],
) -> None:
    """What docs/containers.md tells a person to type."""
    program = f"{PROGRAM} --clip minus-one"
    words = ("up", "--abort-on-container-exit", "--exit-code-from", "node0")
    said = compose(*words, check=False, CLUSTERKIT_PROGRAM=program)
    # torchrun's own, or of its end because the other node was quicker to fail.
    assert said.endswith(("exit code 1", "exit code 143"))
    assert "invalid" in said
    assert compose("ps", "--quiet", "--status", "running") == ""


@pytest.mark.parametrize(
    "files", [(FILE,), (FILE, GPU), (FILE, CI), (LAB,)], ids=lambda files: files[-1].stem
)
def test_every_compose_file_is_valid(engine: Engine, files: tuple[Path, ...]) -> None:
    words = [word for file in files for word in ("-f", str(file))]
    found = Engine({**engine.env, "CLUSTERKIT_LAB_KEY": "a key"})
    found.run("compose", *words, "config", "--quiet")


def test_gpu_compose_file_divides_gpus_between_nodes(engine: Engine) -> None:
    words = ("-f", str(FILE), "-f", str(GPU), "config", "--format", "json")
    text = engine.out("compose", *words)
    services = json.loads(text)["services"]
    devices = [
        set(node["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"])
        for node in services.values()
    ]
    assert len(devices) == 2
    assert not devices[0] & devices[1]
    assert {node["image"] for node in services.values()} == {"clusterkit:gpu"}
