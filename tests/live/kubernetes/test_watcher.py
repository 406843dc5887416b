"""The watcher that a run has in the cluster: what happens while nobody outside watches over it."""

import os
import signal
import time

import pytest

from clusterkit.status import State
from tests.live import supervisors

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]
# Rank 1 of the first attempt fails when its pod's /tmp/go is there.
FAILS_ONCE = (
    'echo "attempt $CLUSTERKIT_ATTEMPT"; [ $CLUSTERKIT_ATTEMPT = 2 ] && exec sh -c "$AGAIN"; '
    "while ! [ -e /tmp/go ]; do sleep 0.2; done; exit 3"
)

# Nobody watches once nobody has for so many seconds.
SOON = {"lost_after": 10}


def fail(run, kube):
    kube.kubectl("exec", f"{run.id}-worker-1", "--", "touch", "/tmp/go")


def test_a_run_starts_again_although_its_submitter_is_gone(submit, begun, kube):
    run = begun(submit(FAILS_ONCE, restarts=1, env={"AGAIN": "exec sleep 3600"}, on=SOON))
    supervisors.kill(run)
    assert "the watcher in the cluster goes on with it" in (run.status().remark or "")
    fail(run, kube)
    label = "jsonpath={.metadata.labels['clusterkit/attempt']}=2"
    kube.kubectl("wait", f"pytorchjob/{run.id}", f"--for={label}", "--timeout=180s")
    pods = f"clusterkit/run={run.id},clusterkit/role=node"
    kube.kubectl("wait", "pod", "-l", pods, "--for=condition=Ready", "--timeout=120s")
    run.attach()
    status = run.wait(60, until=lambda s: s.attempt == 2 and s.state is State.RUNNING)
    assert (status.attempt, status.state) == (2, State.RUNNING)
    told = set()
    for line in run.logs(follow=True):
        if line.text.startswith("attempt"):
            told.add((line.attempt, line.rank))
        if {(2, 0), (2, 1)} <= told:
            break
    assert {(1, 0), (1, 1), (2, 0), (2, 1)} == told
    assert "the watcher in the cluster starts it again" in (run.path / "events.jsonl").read_text()
    assert run.cancel().state is State.CANCELLED


def test_a_submitter_that_slept_goes_on_with_what_the_watcher_has_begun(submit, begun, kube):
    run = begun(submit(FAILS_ONCE, restarts=1, env={"AGAIN": "sleep 20; exit 0"}, on=SOON))
    asleep = supervisors.pid_of(run)
    os.kill(asleep, signal.SIGSTOP)
    try:
        fail(run, kube)
        label = "jsonpath={.metadata.labels['clusterkit/attempt']}=2"
        kube.kubectl("wait", f"pytorchjob/{run.id}", f"--for={label}", "--timeout=180s")
    finally:
        os.kill(asleep, signal.SIGCONT)
    status = run.wait(120)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 2), status
    assert "attempt 2 continues; the cluster started it" in (run.path / "events.jsonl").read_text()


@pytest.mark.parametrize("flavor", ["pytorchjob", pytest.param("job", marks=pytest.mark.thorough)])
def test_the_time_limit_ends_a_run_that_nobody_watches(flavor, submit, begun, kube):
    run = begun(
        submit("echo here; exec sleep 3600", time_limit="25s", on={"flavor": flavor, **SOON})
    )
    supervisors.kill(run)
    kube.kubectl("wait", f"{flavor}/{run.id}", "--for=delete", "--timeout=180s")
    status = run.wait(60)
    assert (status.state, status.exit_code) == (State.FAILED, 124), status
    assert "time_limit of 25s" in status.failure.cause
    assert {line.text for line in run.logs() if line.rank is not None} == {"here"}


def test_a_run_that_ended_while_nobody_watched_is_told_as_it_was(submit, begun, kube):
    run = begun(submit("echo here; sleep 5; echo done; [ $RANK = 0 ] || exit 4", on=SOON))
    supervisors.kill(run)
    kube.kubectl("wait", f"job/{run.id}-watch", "--for=condition=Complete", "--timeout=180s")
    status = run.status()
    assert (status.state, status.exit_code) == (State.FAILED, 4), status
    # What the ranks said meanwhile is not gone with their pods.
    assert [line.text for line in run.logs(rank=1)] == ["here", "done"]
    assert [line.text for line in run.logs(rank=0)] == ["here", "done"]
    assert kube.there() == set()


def test_a_watcher_whose_pod_is_deleted_comes_back(submit, begun, kube):
    run = begun(submit("echo here; exec sleep 3600"))
    watcher = ("-l", f"clusterkit/run={run.id},clusterkit/role=watcher")
    kube.kubectl("wait", "pod", *watcher, "--for=condition=Ready", "--timeout=60s")
    first = kube.kubectl("get", "pods", *watcher, "-o", "name")
    kube.kubectl("delete", first.strip())
    deadline = time.monotonic() + 60  # its Job's back-off is 10 s
    while not (found := kube.kubectl("get", "pods", *watcher, "-o", "name")):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    kube.kubectl("wait", found.strip(), "--for=condition=Ready", "--timeout=60s")
    assert found != first


def test_its_role_covers_the_run_and_no_more(submit, begun, kube):
    run = begun(submit("echo here; exec sleep 3600"))
    me = f"system:serviceaccount:{kube.namespace}:{run.id}-watch"

    def may(*words):
        said = kube.kubectl("auth", "can-i", "--as", me, *words, check=False)
        return said.strip().startswith("yes")

    assert may("delete", f"pytorchjobs.kubeflow.org/{run.id}")
    assert may("delete", f"pods/{run.id}-worker-1")
    assert not may("delete", "pytorchjobs.kubeflow.org/another")
    assert not may("delete", "pods/another")
    assert not may("create", "pytorchjobs.kubeflow.org")
    assert not may("get", "secrets")
    assert not may("get", "configmaps/another")


def test_without_a_watcher_status_says_that_nobody_starts_it_again(submit, begun, kube):
    run = begun(submit("echo here; exec sleep 3600", restarts=2, on={"watcher": False}))
    assert not [name for name in kube.there() if "watch" in name]
    supervisors.kill(run)
    assert "nobody restarts it (2 restarts left)" in (run.status().remark or "")
    kube.kubectl("delete", "pytorchjob", run.id)
    gone = ("--for=delete", "--timeout=60s")  # one that is being deleted tells how it ends
    kube.kubectl("wait", "pod", "-l", f"clusterkit/run={run.id}", *gone, check=False)
    status = run.wait(60)
    assert status.state is State.UNKNOWN  # it may have been taken up elsewhere
    assert "it was not restarted (2 restarts left)" in (status.remark or "")
