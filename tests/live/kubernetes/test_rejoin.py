"""Lost pods that come back on a real Kubernetes: the run goes on, in the same attempt."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from clusterkit import api
from clusterkit.run.status import State
from clusterkit.spec import CheckpointSpec
from tests.live import supervisors
from tests.live.kubernetes.conftest import apart, own_namespace

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
STEPS = 80
ARGS = (
    "--data", "jobs/data/reviews.csv", "--steps", str(STEPS), "--eval-every", "1000",
)  # fmt: skip
EVERY = ("checkpoint.every=5",)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Losses of the same job on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLUSTERKIT_HOME", str(tmp_path_factory.mktemp("reference")))
        job = ROOT / "jobs" / "ddp.yaml"
        run = api.submit(job, nodes=1, gpus=2, more_args=ARGS, settings=EVERY)
        assert run.wait(300).state is State.SUCCEEDED
        return by_step(run)


def by_step(run):
    """The loss of every step; one that was done twice has the same twice."""
    found: dict[int, float] = {}
    for told in run.metrics():
        if "loss" in told:
            step = told["step"]
            assert found.setdefault(step, told["loss"]) == pytest.approx(told["loss"], abs=2e-6)
    return found


@pytest.fixture(scope="module")
def namespace(running, tmp_path_factory):
    """One for all tests here: the cluster has few volumes, and does not use one again."""
    with own_namespace(tmp_path_factory.mktemp("namespace"), claim=True) as found:
        yield found


@pytest.fixture
def kube(namespace):
    """That namespace; as empty after the test as before."""
    yield namespace
    assert namespace.there() == set()


@pytest.fixture
def train(kube):
    """Start the job on two pods with checkpoints on a volume of both; ended with the test."""
    started = []

    def start(settings=(), **on):
        run = api.submit(
            ROOT / "jobs" / "ddp.yaml", nodes=2, gpus=1, more_args=ARGS,
            settings=(*EVERY, *settings),
            **kube.entry(
                shm_size="256Mi", volumes=[{"claim": "runs", "path": "/runs"}], shared="/runs",
                lost_after=5.0, **on,
            ),
        )  # fmt: skip
        started.append(run)
        return run

    yield start
    for run in started:
        run.cancel()


def until_step(run, step):
    """Wait until rank 0 has told of this step; gives when it did, in Unix seconds."""
    for line in run.logs(follow=True):
        event = line.event
        if event is not None and event["event"] == "metrics" and event.get("step", 0) >= step:
            return line.time
    raise AssertionError(f"ended before step {step}: {run.status()}")


def pods_of(kube, run):
    """Name by node of those that are there and are not being removed."""
    mine = f"clusterkit/run={run.id},clusterkit/role=node"
    told = json.loads(kube.kubectl("get", "pods", "-l", mine, "-o", "json"))
    return {
        rank_of(pod): pod["metadata"]["name"]
        for pod in told["items"] if "deletionTimestamp" not in pod["metadata"]
    }  # fmt: skip


def rank_of(pod):
    labels = pod["metadata"]["labels"]
    for name in ("training.kubeflow.org/replica-index", "batch.kubernetes.io/job-completion-index"):
        if name in labels:
            return int(labels[name])
    raise AssertionError(labels)


def next_step(run, since):
    """Seconds from then to the first step that was done after all had started again."""
    again = False
    for line in run.logs(rank=0):
        if line.time > since and line.event is not None:
            again = again or line.event["event"] == "start"
            if again and line.event["event"] == "metrics":
                return line.time - since
    raise AssertionError("nothing was started again")


def whole(run, reference, *, told=True):
    """It ended as the reference did. ``told``: and somebody heard of every step."""
    status = run.wait(240)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 1), status
    losses = by_step(run)
    assert losses == pytest.approx({step: reference[step] for step in losses}, abs=2e-6)
    assert sorted(reference) == [*range(1, STEPS + 1)]
    assert set(losses) == set(reference) if told else STEPS in losses


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("flavor", "node", "launcher"),
    [
        ("pytorchjob", 1, "torchrun"),
        ("pytorchjob", 0, "torchrun"),
        ("job", 0, "torchrun"),
        ("trainjob", 1, "deepspeed"),
        ("jobset", 1, "torchrun"),
    ],
)
def test_deleted_pod_rejoins_same_attempt_with_reference_losses(
    flavor, node, launcher, train, kube, reference
):
    run = train(settings=(f"launcher={launcher}",), flavor=flavor)
    until_step(run, 7)
    at = time.time()
    kube.kubectl("delete", "pod", pods_of(kube, run)[node], "--wait=false")
    whole(run, reference)
    print(f"{flavor} {launcher} node {node}: next step {next_step(run, at):.1f} s after the delete")


# With 143 an agent ends whose pod is taken away.
@pytest.mark.parametrize(("flavor", "code"), [("pytorchjob", 7), ("job", 143)])
def test_rank_failure_ends_rejoin_run_without_second_start(flavor, code, submit, kube):
    volume = {"volumes": [{"claim": "runs", "path": "/runs"}], "shared": "/runs"}
    up = '"/runs/$CLUSTERKIT_RUN_ID"'
    run = submit(
        f"echo here; [ $RANK = 0 ] && : >{up} && exec sleep 3600; "
        f"until [ -e {up} ]; do sleep 0.1; done; exit {code}",
        on={"flavor": flavor, **volume}, checkpoint=CheckpointSpec(),
    )  # fmt: skip
    assert run.plan.rejoin
    status = run.wait(120)
    assert (status.state, status.attempt) == (State.FAILED, 1)
    assert status.failure is not None
    assert (status.failure.node, status.failure.exit_code) == (1, code)
    assert [line.text for line in run.logs(rank=1)] == ["here"]


def ranks_of(run):
    """Processes of the program of this run: all nodes of the cluster are on this machine."""
    mark = f"CLUSTERKIT_RUN_ID={run.id}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            ours = mark in (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if ours and words[:3] == [b"python3", b"-u", b"jobs/train/gpt/train.py"]:
            found.append(words)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("flavor", "how", "watched"),
    [("pytorchjob", "cut", True), ("pytorchjob", "crash", False), ("job", "crash", False)],
)
def test_pods_of_lost_node_rejoin_on_other_node_with_reference_losses(
    flavor, how, watched, train, kube, reference, broken
):
    """``watched``: by whoever submitted it; else by what the run has in the cluster alone."""
    run = train(flavor=flavor, patch=apart("ddp"))
    until_step(run, 7)
    assert sorted(node.host for node in run.status().nodes) == ["node-1", "node-2"]
    if not watched:
        supervisors.kill(run)
    at = time.time()
    broken(how)
    whole(run, reference, told=watched)
    assert {node.host for node in run.status().nodes} == {"node-1"}
    # Cut off, nobody could tell them to end.
    assert ranks_of(run) == []
    print(f"{flavor} {how}: next step {next_step(run, at):.1f} s after")
