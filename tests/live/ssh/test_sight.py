"""Hosts out of sight: silence ends no run, and starts no second copy of one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clusterkit import api
from clusterkit.run.status import State
from tests.lab import Lab, machine

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
LOST_AFTER = 4
PROGRAM = """
import os, sys, time
name = f"rank-{os.environ['RANK']}-{os.uname().nodename}"
for number in range(int(sys.argv[1])):
    with open(f"/srv/shared/{sys.argv[2]}/{name}", "a") as file:
        print(time.time(), file=file)
    time.sleep(0.1)
print("done", flush=True)
"""
Submit = Callable[..., api.Run]


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_lab: Lab) -> Iterator[Submit]:
    """``submit(ticks, nodes=2)``: each rank writes a line every 0.1 s, below /srv/shared/NAME."""
    entry = {
        "backend": "ssh", "inventory": str(shared_lab.inventory), "workdir": "/srv/shared/ck",
        "stop_grace": 2, "lost_after": LOST_AFTER, "connect_timeout": 5,
    }  # fmt: skip
    (tmp_path / "clusters.json").write_text(json.dumps({"lab": entry}))
    monkeypatch.setenv("CLUSTERKIT_CLUSTERS", str(tmp_path / "clusters.json"))
    monkeypatch.setenv("CLUSTERKIT_HOME", str(tmp_path / "home"))
    (tmp_path / "tick.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    started: list[api.Run] = []

    def start(ticks: int, **fields: object) -> api.Run:
        written(shared_lab, tmp_path.name).mkdir(exist_ok=True)
        job = {
            "program": "tick.py", "args": [str(ticks), tmp_path.name], "launcher": "forkserver",
            **fields,
        }  # fmt: skip
        Path("job.yaml").write_text(json.dumps(job))
        started.append(api.submit("job.yaml", cluster="lab", doctor=False))
        return started[-1]

    yield start
    link(shared_lab, "up")
    shared_lab.repair()
    for run in started:
        run.cancel()


def written(lab: Lab, name: str) -> Path:
    return lab.shared / name


def link(lab: Lab, state: str) -> None:
    """Pull out or put in the cable between this machine and all hosts."""
    machine.ip(f"link set uplink {state}", netns=lab.netns("sw"))


def until(condition: Callable[[], object], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("restarts", [0, 1])
def test_run_on_unreachable_host_is_not_restarted_and_succeeds(
    shared_lab: Lab, submit: Submit, tmp_path: Path, restarts: int
) -> None:
    run = submit(60, nodes=1, restarts=restarts)
    files = written(shared_lab, tmp_path.name)
    until(lambda: list(files.iterdir()))
    shared_lab.fault("cut", "h0")
    time.sleep(6 + 3 * LOST_AFTER)  # it ends meanwhile
    assert not run.status().state.final
    shared_lab.fault("heal", "h0")
    status = run.wait(90)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 1)
    assert [path.name for path in files.iterdir()] == ["rank-0-h0"]
    assert len((files / "rank-0-h0").read_text().splitlines()) == 60


def test_run_survives_offline_submitter_without_restart(
    shared_lab: Lab, submit: Submit, tmp_path: Path
) -> None:
    run = submit(400, nodes=3, restarts=1)
    files = written(shared_lab, tmp_path.name)
    until(lambda: len(list(files.iterdir())) == 3)
    link(shared_lab, "down")
    time.sleep(3 * LOST_AFTER)
    link(shared_lab, "up")
    status = run.wait(120)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 1)
    assert {len(path.read_text().splitlines()) for path in files.iterdir()} == {400}


def test_no_second_rank_0_starts_while_first_host_is_cut_off(
    shared_lab: Lab, submit: Submit, tmp_path: Path
) -> None:
    """Node 0's host is cut off, and writes to the shared storage: alone, as the job allows."""
    run = submit(600, nodes="1:2", spares=1, restarts=2, on_node_loss="shrink")
    files = written(shared_lab, tmp_path.name)
    until(lambda: len(list(files.iterdir())) == 2)
    shared_lab.fault("cut", "h0")
    time.sleep(10 * LOST_AFTER)
    assert not run.status().state.final
    others = [path.name for path in files.glob("rank-0-*") if not path.name.endswith("-h0")]
    assert others == []
    shared_lab.fault("heal", "h0")
    assert run.wait(200).state is State.SUCCEEDED
