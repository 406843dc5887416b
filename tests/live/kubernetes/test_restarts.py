"""Restarts in place, and what happens while nobody outside of the cluster watches over a run."""

import json

import pytest

from clusterkit.status import State
from tests.live import supervisors

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]
FOREVER = 'echo "attempt $CLUSTERKIT_ATTEMPT"; exec sleep 3600'
LAUNCHERS = {"mpijob": "mpirun"}
KILL = """
import os, pathlib
for process in pathlib.Path('/proc').glob('[0-9]*'):
    env = (process / 'environ').read_bytes().split(b'\\0')
    if (process / 'cmdline').read_bytes().startswith(b'sleep\\0') and b'RANK=1' in env:
        print('found', flush=True); os.kill(int(process.name), 9)
"""


def pods_of(kube, run):
    """Uid by name of the pods that run nodes or ranks."""
    mine = f"clusterkit/run={run.id},clusterkit/role in (node, worker)"
    items = json.loads(kube.kubectl("get", "pods", "-l", mine, "-o", "json"))["items"]
    return {each["metadata"]["name"]: each["metadata"]["uid"] for each in items}


def kill_rank_1(kube, run):
    words = ("--", "python3", "-c", KILL)
    assert any(
        "found" in kube.kubectl("exec", pod, *words, check=False) for pod in pods_of(kube, run)
    )


@pytest.mark.parametrize("flavor", ["pytorchjob", "job", "trainjob", "mpijob"])
def test_a_killed_rank_starts_all_again_in_the_same_pods(flavor, submit, begun, kube):
    launcher = LAUNCHERS.get(flavor, "forkserver")
    run = begun(submit(FOREVER, restarts=1, launcher=launcher, on={"flavor": flavor}))
    supervisors.kill(run)
    assert "its nodes start failed ranks again (1 restart left)" in (run.status().remark or "")
    before = pods_of(kube, run)
    kill_rank_1(kube, run)
    status = run.wait(60, until=lambda s: s.attempt == 2)
    assert (status.attempt, status.state) == (2, State.RUNNING)
    assert pods_of(kube, run) == before
    run.attach()
    told = set()
    for line in run.logs(follow=True):
        if line.rank is not None:
            told.add((line.attempt, line.rank, line.text))
        if len(told) == 4:
            break
    assert told == {(n, rank, f"attempt {n}") for n in (1, 2) for rank in (0, 1)}
    (first,) = run.wait(20, until=lambda s: bool(s.attempts)).attempts
    assert (first.failure.rank, first.failure.exit_code) == (1, 137)
    kill_rank_1(kube, run)
    status = run.wait(60)
    assert (status.state, status.attempt, status.exit_code) == (State.FAILED, 2, 137)
    assert (status.failure.rank, pods_of(kube, run)) == (1, {})
