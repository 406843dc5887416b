"""Containers that are killed, paused and cut off; entries that are refused."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from clusterkit import api
from clusterkit.run.status import RunStatus, State
from clusterkit.spec import JobSpec
from tests.live import inside
from tests.live.compose.backend.running import (
    SOON,
    WAIT,
    Start,
    ended,
    left_over,
    node,
    ready,
    words,
)

PATIENCE = 4.0
"""Seconds without a sign of life after which a node counts as lost, here."""
CRASH_SECONDS = 10.0
"""Within which a run has ended after a crash."""
SILENT_SECONDS = CRASH_SECONDS + 2 * PATIENCE
"""The same where nothing says that anything is wrong, but that nothing is said."""
pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]  # the first one has the image built


# ---------------------------------------------------------------- faults


def after(run: api.Run, engine: Any, *command: str, within: float = CRASH_SECONDS) -> RunStatus:
    """How a run ends after a command to the engine, and that it does so in time."""
    ready(run)
    begun = time.monotonic()
    engine.run(*command)
    status = run.wait(SOON)
    spent = time.monotonic() - begun
    assert status.state is State.FAILED, status
    assert spent < within, f"{spent:.1f} s: {status}"
    assert left_over(engine) == []
    return status


def test_status_names_node_of_killed_container(start: Start, engine: Any) -> None:
    run = start(words(WAIT))
    failure = after(run, engine, "kill", node(run, 1)).failure
    assert failure is not None
    assert (failure.node, failure.exit_code) == (1, 137)
    assert "its container was killed from outside" in failure.cause


@pytest.mark.parametrize("victim", [0, 1])
def test_status_names_node_of_paused_container(start: Start, engine: Any, victim: int) -> None:
    run = start(words(WAIT), lost_after=PATIENCE)
    failure = after(run, engine, "pause", node(run, victim), within=SILENT_SECONDS).failure
    assert failure is not None
    assert failure.node == victim
    assert "paused" in failure.cause


def test_status_names_node_disconnected_from_network(start: Start, engine: Any) -> None:
    run = start(words(WAIT), lost_after=PATIENCE)
    ready(run)
    network = f"clusterkit-{run.id}_default"
    cut = ("network", "disconnect", network, node(run, 1))
    failure = after(run, engine, *cut, within=SILENT_SECONDS).failure
    assert failure is not None
    assert failure.node == 1
    assert "cut off from the run's network" in failure.cause


def test_status_names_node_of_stopped_or_removed_container(start: Start, engine: Any) -> None:
    for command, words_of_it in ((("stop",), "stopped"), (("rm", "--force"), "removed")):
        run = start(words(WAIT))
        failure = after(run, engine, *command, node(run, 1)).failure
        assert failure is not None
        assert failure.node == 1, failure
        assert words_of_it in failure.cause


def test_killed_rank_fails_run_and_status_names_rank(start: Start, engine: Any) -> None:
    run = start(words(WAIT))
    ready(run)
    path = run.path / "attempts/1/node-1/ranks.jsonl"
    pid = json.loads(path.read_text().splitlines()[0])["pid"]  # as it is called in there
    status = after(run, engine, "exec", node(run, 1), "sh", "-c", f"kill -9 {pid}")
    failure = status.failure
    assert failure is not None
    assert (failure.node, failure.rank, failure.exit_code) == (1, 1, 137)
    assert "SIGKILL" in failure.cause


def test_status_names_rank_and_node_over_memory_limit(start: Start, engine: Any) -> None:
    code = (
        "import os, signal\n"
        "held = []\n"
        "while os.environ['RANK'] == '1': held.append(b'x' * (8 << 20))\n"
        "signal.pause()"
    )
    run = start(words(code), memory="128m")
    status = ended(run)
    failure = status.failure
    assert failure is not None, status
    assert (failure.node, failure.rank, failure.exit_code) == (1, 1, 137)
    assert failure.cause == "OOMKilled: its container used more than its memory limit of 128 MiB"
    assert "memory" in (failure.hint or "")
    assert left_over(engine) == []


def test_status_names_node_of_container_killed_during_start(start: Start, engine: Any) -> None:
    """Before its node has said a word."""
    hit: list[str] = []
    command = [
        "docker", "events", "--filter", "event=create", "--filter", "label=clusterkit.node=1",
        "--format", "{{.ID}}",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=engine.env) as events:
        assert events.stdout is not None

        def strike() -> None:
            container = events.stdout.readline().strip()  # type: ignore[union-attr]
            deadline = time.monotonic() + SOON
            kill = ("kill", container)
            while engine.run(*kill, check=False).returncode and time.monotonic() < deadline:
                pass
            hit.append(container)

        striker = threading.Thread(target=strike)
        striker.start()
        try:
            run = start(words(WAIT))
            status = ended(run)
        finally:
            events.kill()
            striker.join(SOON)
    assert hit
    assert hit[0]
    assert status.state is State.FAILED
    assert status.failure is not None
    assert status.failure.node == 1
    assert "killed from outside" in status.failure.cause
    assert left_over(engine) == []


def test_missing_job_command_fails_run_with_exit_code_127(start: Start) -> None:
    run = start(JobSpec(name="none", command=("/nothing",), launcher="forkserver"), nodes=1)
    status = ended(run)
    assert status.state is State.FAILED
    assert status.failure is not None
    assert status.failure.exit_code == 127


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("entry", "environment", "said"),
    [
        ({"image": "clusterkit:nothing"}, {}, r"the docker engine has no clusterkit:nothing"),
        ({"context": "nowhere"}, {}, r"context: docker has no context 'nowhere'"),
        ({}, {"DOCKER_HOST": "unix:///nowhere.sock"}, r"no docker engine answers at unix:///no"),
        ({}, {"DOCKER_HOST": "ssh://u@far"}, r"the engine at ssh://u@far is on another machine"),
        ({}, {"PATH": "/nowhere"}, r"backend compose needs docker, which is not installed"),
        ({"python": "python7"}, {}, r"image clusterkit:cpu has no python7"),
        ({"volumes": ["nothing-here:/x"]}, {}, r"docker has no volume nothing-here"),
        ({"volumes": ["/nothing/here:/x"]}, {}, r"volumes: /nothing/here does not exist"),
        ({"memory": "much"}, {}, r"memory: 'much' is not a size"),
        ({"gpus": 3}, {}, r"gpus: 3 wanted, but this machine has 0"),
    ],
    ids=lambda value: re.sub(r"\W+", "-", str(value))[:40],
)
def test_submit_refuses_unusable_entry_or_engine_with_hint(
    entry: dict[str, Any], environment: dict[str, str], said: str,
    image: str, tmp_path: Path, module_home: Path,
) -> None:  # fmt: skip
    refused(tmp_path, {"image": image, **entry}, environment, said)


def refused(
    tmp_path: Path, entry: dict[str, Any], environment: dict[str, str], said: str,
    prefix: tuple[str, ...] = (),
) -> None:  # fmt: skip
    clusters = tmp_path / "clusters.yaml"
    clusters.write_text(json.dumps({"here": {"backend": "compose", **entry}}))
    home = tmp_path / "home"
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "clusterkit", "submit", "--cluster", "here",
         "--cluster-file", str(clusters), "--", "python", "jobs/train/gpt/train.py"],
        capture_output=True, text=True, timeout=SOON,
        env={**os.environ, "CLUSTERKIT_HOME": str(home), **environment},
    )  # fmt: skip
    assert done.returncode == 125, done.stderr
    assert done.stdout == ""
    first, *rest = done.stderr.splitlines()
    assert re.match(rf"error: .*{said}", first), done.stderr
    assert rest
    assert all(line.strip().startswith("hint: ") for line in rest), done.stderr
    assert not list(home.glob("runs/*"))


def test_submit_refuses_subnet_in_use(engine: Any, image: str, tmp_path: Path) -> None:
    shape = "{{range .IPAM.Config}}{{.Subnet}}{{end}}"
    taken = engine.run("network", "inspect", "bridge", "--format", shape).stdout.strip()
    refused(tmp_path, {"image": image, "subnet": taken}, {}, "is taken: docker's network bridge")


def test_submit_refuses_docker_client_without_compose_plugin(image: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    environment = {"DOCKER_CONFIG": str(tmp_path / "empty"), "HOME": str(tmp_path)}
    refused(tmp_path, {"image": image}, environment, "docker has no compose plugin")


def test_submit_refuses_user_without_permission_for_docker_engine(
    image: str, tmp_path: Path
) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    nobody = ("setpriv", "--reuid=4242", "--regid=4242", "--clear-groups")
    tmp_path.chmod(0o755)
    for folder in tmp_path.parents[:3]:  # one of them is a worker's of pytest-xdist
        if folder != Path(tempfile.gettempdir()):
            folder.chmod(0o755)
    refused(tmp_path, {"image": image}, {}, "you may not use the docker engine", nobody)


def test_submit_refuses_ulimit_that_engine_may_not_set(
    engine: Any, image: str, tmp_path: Path
) -> None:
    probe = ["run", "--rm", "--network", "none", "--ulimit", "memlock=-1", "--entrypoint", "true"]
    if engine.run(*probe, image, check=False).returncode == 0:
        pytest.skip("this engine may set every limit")
    entry = {"image": image, "ulimits": {"memlock": -1}}
    refused(tmp_path, entry, {}, "ulimits: the docker engine may not set")


def test_bench_measures_between_containers(
    image: str, tmp_path: Path, clusterkit: list[str]
) -> None:
    clusters = tmp_path / "clusters.yaml"
    clusters.write_text(json.dumps({"here": {"backend": "compose", "image": image}}))
    line = f"bench --nodes 2 --cluster here --cluster-file {shlex.quote(str(clusters))} --json"
    options = ["--collectives", "all_reduce", "--sizes", "1K,64K", "--iterations", "2"]
    done = subprocess.run(
        [*clusterkit, *shlex.split(line), *options], capture_output=True, text=True, timeout=SOON
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


def test_commands_inside_containers(start: Start, tmp_path: Path) -> None:
    run = start(words(WAIT))
    ready(run)
    inside.exec_works(run)
    inside.files_are_copied(run, tmp_path)
    inside.port_is_forwarded(run)
    run.cancel()
    inside.refused_after_end(run)
