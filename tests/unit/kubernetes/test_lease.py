"""Who watches over a run, as its Lease says."""

import json
import threading

import msgspec
import pytest

from clusterkit import backends
from clusterkit.backends.base import HandedOver
from clusterkit.backends.kubernetes import lease
from clusterkit.backends.kubernetes.apply import Refusal
from clusterkit.backends.kubernetes.client import KubeTransport
from clusterkit.backends.kubernetes.guard import SUBMITTER
from clusterkit.backends.kubernetes.watcher import WATCHER
from clusterkit.cluster import KubernetesCluster, KubernetesFacts
from clusterkit.spec import JobSpec


class Server(KubeTransport):
    """Has one Lease, or none; a patch of another version of it than the newest is refused."""

    def __init__(self):
        super().__init__()
        self.holder = SUBMITTER
        self.version = 1
        self.there = True
        self.renewed = threading.Event()

    def request(self, to, method, path, body=None, content=""):
        if not self.there:
            raise Refusal("NotFound", "no")
        if method == "PATCH":
            if body["metadata"]["resourceVersion"] != str(self.version):
                raise Refusal("Conflict", "changed")
            self.holder = body["spec"]["holderIdentity"]
            self.version += 1
            self.renewed.set()
        document = {
            "metadata": {"resourceVersion": str(self.version)},
            "spec": {"holderIdentity": self.holder},
        }
        return json.dumps(document)


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def holder(make_facts, server):
    """It has the Lease, and renews it when it is asked to."""
    kube = KubernetesFacts(version="v1.34.4", context="c", namespace="x", kinds=(), may_watch=True)
    facts = msgspec.structs.replace(make_facts(), kubernetes=kube)
    job = JobSpec(name="demo", command=("true",), launcher="forkserver")
    entry = KubernetesCluster(lost_after=3600.0)
    plan = backends.backend("kubernetes").plan(job, entry, facts, "demo-1")
    made = lease.Holder(plan, server)
    assert server.renewed.wait(10)
    yield made
    made.close()


@pytest.fixture
def later(monkeypatch, holder):
    """The machine has slept."""
    now = lease._clock()
    monkeypatch.setattr(lease, "_clock", lambda: now + 100_000)


def test_a_lease_that_is_overdue_is_renewed_at_once(holder, server, later):
    server.renewed.clear()
    assert holder.check()
    assert server.renewed.is_set()
    assert not holder.taken


def test_a_lease_that_goes_with_the_run_is_no_reason_to_believe_nothing(holder, server, later):
    server.there = False
    assert holder.check()


def test_a_lease_that_the_watcher_has_had_meanwhile_is_taken_back(holder, server, later):
    server.holder, server.version = WATCHER, 7
    assert holder.check()
    assert holder.taken
    assert server.holder not in (WATCHER, SUBMITTER)


def test_a_lease_that_somebody_else_has_is_left_to_them(holder, server, later):
    server.holder, server.version = "ada@other:1:2", 7
    with pytest.raises(HandedOver, match="ada@other watches over run demo-1 now"):
        holder.check()
