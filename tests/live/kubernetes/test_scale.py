"""A job of 200 pods and 1,600 GPUs on nodes that exist in the API alone: time, requests, memory.

One kind of job by default; ``CLUSTERKIT_SCALE=pytorchjob,mpijob,trainjob,job`` takes the others as
well. ``-s`` prints the figures.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from clusterkit import api
from clusterkit.run.status import State
from clusterkit.spec import JobSpec
from tests.live import supervisors
from tests.live.kubernetes.conftest import KUBECONFIG, KUBECTL, cluster
from tests.live.kubernetes.counting import Counting

pytestmark = [pytest.mark.live, pytest.mark.thorough, pytest.mark.timeout(900)]
PODS = 200
FLAVORS = os.environ.get("CLUSTERKIT_SCALE", "job").split(",")
FOLLOWED_SECONDS = 10


@pytest.fixture
def counting(running, tmp_path):
    """The API server with 200 more nodes, behind a counter; the nodes are gone afterwards."""
    cluster("fake", str(PODS))
    folder = tmp_path / "counting"
    folder.mkdir()
    try:
        with Counting(KUBECONFIG, folder) as found:
            yield found
    finally:
        words = ["delete", "nodes", "--selector", "kube-test/fake=true", "--wait=false"]
        subprocess.run([*KUBECTL, *words], check=True, stdout=subprocess.DEVNULL)


@pytest.fixture
def measured(counting, request):
    """``with measured("status"):`` says how long it took and what was asked."""
    figures = {}

    class Measured:
        def __init__(self, what):
            self.what = what

        def __enter__(self):
            counting.reset()
            self.start = time.monotonic()
            return self

        def __exit__(self, *_):
            self.seconds = time.monotonic() - self.start
            self.calls = counting.total
            figures[self.what] = (self.seconds, self.calls, counting.bytes, dict(counting.calls))

    yield Measured
    for what, (seconds, calls, size, each) in figures.items():
        print(f"\n{request.node.name} {what}: {seconds:.2f} s, {calls} requests, "
              f"{size / 1e6:.1f} MB: {each}")  # fmt: skip


def resident(pid: int) -> int:
    """MiB of memory that a process holds."""
    told = Path(f"/proc/{pid}/status").read_text()
    return int(told.partition("VmRSS:")[2].split()[0]) // 1024


@pytest.mark.parametrize("flavor", FLAVORS)
def test_run_of_200_pods_needs_few_api_requests_and_constant_memory(
    flavor, kube, counting, measured, own_home
):
    job = JobSpec(
        name="big", command=("sh", "-c", "sleep 3600"), nodes=PODS, gpus_per_node=8, device="cuda",
        launcher="mpirun" if flavor == "mpijob" else "forkserver",
    )  # fmt: skip
    entry = kube.entry(
        kubeconfig=str(counting.kubeconfig), flavor=flavor, gpus=8, lost_after=300.0,
        node_selector={"kube-test/fake": "true"},
        tolerations=[{"key": "kube-test/fake", "operator": "Exists"}],
    )  # fmt: skip
    with measured("submit") as submit:
        run = api.submit(job, **entry)
    try:
        # Ten for the probe, a few to make it, however many pods it has.
        assert submit.calls <= 20
        with measured("until all run"):
            run.wait_started(300)
            # One stream for each log.
            run.wait(60, until=lambda _: counting.calls["GET pods/NAME/log"] >= run.plan.nodes)
        status = run.status()
        assert {node.state for node in status.nodes} == {State.RUNNING}, status.failure
        with measured("status") as asked:
            run.status()
        assert asked.calls == 0  # its supervisor watches
        with measured("logs of a rank") as logs:
            assert list(run.logs(rank=0)) == []  # a fake pod says nothing of a rank
        assert logs.calls == 0
        pid = supervisors.pid_of(run)
        before = resident(pid)
        with measured("followed") as followed:
            time.sleep(FOLLOWED_SECONDS)
        assert followed.calls <= 2
        assert resident(pid) - before <= 2
        print(f"\nmemory of the supervisor: {before}, then {resident(pid)} MiB")
        supervisors.kill(run)
        with measured("status that nobody watches") as alone:
            assert run.wait(10, until=lambda s: bool(s.remark)).state is State.RUNNING
        assert alone.calls <= 5
    finally:
        with measured("cancel") as cancel:
            after = run.cancel()
    assert after.state is State.CANCELLED
    # Nobody watched any more: each log is read once.
    assert cancel.calls - counting.calls["GET pods/NAME/log"] <= 50
    left = kube.kubectl("get", "pods", "-o", "name").split()
    assert left == []
