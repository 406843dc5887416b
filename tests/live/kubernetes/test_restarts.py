"""Restarts in place, and what happens while nobody outside of the cluster watches over a run."""

import json
import time

import pytest

from clusterkit.run.status import State
from tests.live import supervisors
from tests.live.kubernetes.conftest import apart

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


@pytest.mark.parametrize(
    "flavor",
    [
        "pytorchjob",
        *(
            pytest.param(x, marks=pytest.mark.thorough)
            for x in ("mpijob", "job", "trainjob", "jobset")
        ),
    ],
)
def test_killed_rank_restarts_all_ranks_in_same_pods_without_supervisor(
    flavor, submit, begun, kube
):
    launcher = LAUNCHERS.get(flavor, "forkserver")
    run = begun(submit(FOREVER, restarts=1, launcher=launcher, on={"flavor": flavor}))
    supervisors.kill(run)
    assert "its nodes restart failed ranks (1 restart left)" in (run.status().remark or "")
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


@pytest.mark.thorough
@pytest.mark.parametrize("flavor", ["pytorchjob", "job", "trainjob", "jobset"])
def test_pods_of_crashed_node_are_replaced_without_supervisor(flavor, submit, begun, kube, broken):
    wait = "echo up; until [ -e /tmp/go ]; do sleep 0.2; done"
    on = {"flavor": flavor, "lost_after": 5.0, "patch": apart("live")}
    run = begun(submit(wait, restarts=1, on=on))
    supervisors.kill(run)
    before = pods_of(kube, run)
    broken("crash")
    deadline = time.monotonic() + 180
    mine = ("-l", f"clusterkit/run={run.id},clusterkit/role=node", "-o", "json")
    while True:
        items = json.loads(kube.kubectl("get", "pods", *mine))["items"]
        hosts = [each["spec"].get("nodeName") for each in items]
        phases = [each["status"]["phase"] for each in items]
        if (hosts, phases) == (["node-1"] * 2, ["Running"] * 2):
            break
        assert time.monotonic() < deadline, (hosts, phases)
        time.sleep(0.5)
    assert len(set(before.values()) & set(pods_of(kube, run).values())) == 1
    for each in items:
        kube.kubectl("exec", each["metadata"]["name"], "--", "touch", "/tmp/go")
    status = run.wait(120)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 1), status


def test_time_limit_ends_run_without_supervisor(submit, begun, kube):
    run = begun(submit(FOREVER, time_limit="15s", restarts=1))
    supervisors.kill(run)
    status = run.wait(60)
    assert (status.state, status.attempt, status.exit_code) == (State.FAILED, 1, 124), status
    assert "time_limit of 15s" in status.failure.cause
    assert {line.text for line in run.logs() if line.rank is not None} == {"attempt 1"}


def test_exit_code_and_logs_are_kept_for_run_without_supervisor(submit, begun, kube):
    run = begun(submit("echo here; sleep 5; echo done; [ $RANK = 0 ] || exit 4"))
    supervisors.kill(run)
    status = run.wait(60)
    assert (status.state, status.exit_code) == (State.FAILED, 4), status
    # What the ranks said meanwhile is not gone with their pods.
    assert [line.text for line in run.logs(rank=1)] == ["here", "done"]
    assert [line.text for line in run.logs(rank=0)] == ["here", "done"]
    assert kube.there() == set()


def test_watcher_pod_is_recreated_and_its_role_covers_only_its_run(submit, begun, kube):
    run = begun(submit(FOREVER, restarts=1, on={"watcher": True}))
    me = f"system:serviceaccount:{kube.namespace}:{run.id}-watch"

    def may(*words):
        said = kube.kubectl("auth", "can-i", "--as", me, *words, check=False)
        return said.strip().startswith("yes")

    assert may("delete", f"pods/{run.id}-worker-1")
    assert not may("delete", "pods/another")
    assert not may("patch", f"pods/{run.id}-worker-1")
    assert not may("delete", f"pytorchjobs.kubeflow.org/{run.id}")
    assert not may("get", "secrets")
    watcher = ("-l", f"clusterkit/run={run.id},clusterkit/role=watcher")
    kube.kubectl("wait", "pod", *watcher, "--for=condition=Ready", "--timeout=60s")
    first = kube.kubectl("get", "pods", *watcher, "-o", "name")
    kube.kubectl("delete", first.strip())
    words = ("wait", "job", f"{run.id}-watch", "--for=jsonpath={.status.ready}=1")
    kube.kubectl(*words, "--timeout=60s")  # its Job's back-off is 10 s
    assert kube.kubectl("get", "pods", *watcher, "-o", "name") != first


def test_status_is_unknown_after_job_is_deleted_without_supervisor(submit, begun, kube):
    run = begun(submit(FOREVER, restarts=2))
    assert not [name for name in kube.there() if "watch" in name]
    supervisors.kill(run)
    kube.kubectl("delete", "pytorchjob", run.id)
    gone = ("--for=delete", "--timeout=60s")  # one that is being deleted tells how it ends
    kube.kubectl("wait", "pod", "-l", f"clusterkit/run={run.id}", *gone, check=False)
    status = run.wait(60)
    assert status.state is State.UNKNOWN  # it may have been taken up elsewhere
    assert "attached elsewhere" in (status.remark or "")
