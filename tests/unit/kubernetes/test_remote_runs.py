"""Runs that a cluster knows of: their states from conditions, and finding one."""

import base64
import json

import msgspec
import pytest

from clusterkit import api, backends
from clusterkit.backends.base import RemoteRun
from clusterkit.backends.kubernetes.api_server import (
    Context,
    Forbidden,
    KubeTransport,
    NotFound,
    Server,
)
from clusterkit.backends.kubernetes.flavors import FLAVORS
from clusterkit.backends.kubernetes.remote_runs import (
    PROJECT,
    RECORD,
    Record,
    listing,
    read,
    recover,
    state_of,
)
from clusterkit.cluster import KubernetesCluster, KubernetesFacts
from clusterkit.errors import CapabilityError, RunFolderError, RunNotFound, Unavailable
from clusterkit.run.status import State
from clusterkit.spec import JobSpec
from tests.unit.doctor.kubernetes.recorded import documents, seen_of, subject_of


def condition(kind, status="True", at="2026-11-22T07:00:00Z"):
    return {"type": kind, "status": status, "lastTransitionTime": at}


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({}, "PENDING"),
        ({"conditions": [condition("Created")]}, "PENDING"),
        ({"conditions": [condition("Created"), condition("Running")]}, "RUNNING"),
        ({"conditions": [condition("Created"), condition("Running", "False"),
                                       condition("Succeeded")]}, "SUCCEEDED"),
        ({"conditions": [condition("Failed"), condition("Running")]}, "FAILED"),
        ({"conditions": [condition("Created"), condition("Suspended")]}, "PENDING"),
        ({"conditions": [condition("Running", at="2026-11-22T08:00:00Z"),
                                   condition("Restarting")]}, "RUNNING"),
        ({"active": 2}, "PENDING"),
        ({"active": 2, "ready": 1}, "RUNNING"),
        ({"conditions": [condition("SuccessCriteriaMet"), condition("Complete")]},
         "SUCCEEDED"),
        ({"conditions": [condition("FailureTarget")]}, "RUNNING"),
        ({"jobsStatus": [{"name": "node", "ready": 1}]}, "RUNNING"),
        ({"jobsStatus": [{"name": "node", "ready": 0}]}, "PENDING"),
        ({"conditions": [condition("Complete")]}, "SUCCEEDED"),
        ({"replicatedJobsStatus": [{"name": "node", "ready": 1}]}, "RUNNING"),
        ({"replicatedJobsStatus": [{"name": "node", "ready": 0}]}, "PENDING"),
        ({"conditions": [condition("Completed")]}, "SUCCEEDED"),
        ({"conditions": [condition("Levitating")]}, "UNKNOWN"),
        ({"conditions": ["garbage", None]}, "PENDING"),
    ],
)  # fmt: skip
def test_state_of_job_follows_its_conditions(status, state):
    assert state_of({"status": status}) == state


def told(run="ddp-1", **status):
    labels = {
        "clusterkit/run": run, "clusterkit/job": "ddp", "clusterkit/attempt": "3",
        "clusterkit/user": "ada",
    }  # fmt: skip
    return {
        "metadata": {"labels": labels, "creationTimestamp": "2026-11-22T06:00:00Z"},
        "spec": {"pytorchReplicaSpecs": {"Worker": {"replicas": 4}}}, "status": status,
    }  # fmt: skip


def test_read_gives_remote_run_of_job_object():
    found = read(told(conditions=[condition("Succeeded")]), FLAVORS["pytorchjob"])
    assert found == RemoteRun(
        run="ddp-1", job="ddp", state=State.SUCCEEDED, kind="PyTorchJob", attempt=3, pods=4,
        user="ada", started_at=1795327200.0, finished_at=1795330800.0,
    )  # fmt: skip
    assert read(told(), FLAVORS["pytorchjob"]).finished_at is None


@pytest.mark.parametrize("flavor", FLAVORS)
def test_read_counts_pods_of_every_flavor(flavor):
    launcher = "mpirun" if flavor == "mpijob" else "torchrun"
    job = JobSpec(name="any", command=("true",), nodes=3, launcher=launcher)
    objects = seen_of(subject_of(job, flavor=flavor), documents()).objects
    found = read(objects[-1], FLAVORS[flavor])
    assert (found.run, found.pods, found.state) == ("doctor-rehearsal", 3, State.PENDING)


class Api(KubeTransport):
    def __init__(self, answers):
        super().__init__()
        self.answers = answers
        self.asked = []

    def request(self, to, method, path, *_):
        self.asked.append(path)
        answer = next((a for part, a in self.answers.items() if part in path), NotFound)
        if isinstance(answer, type):
            raise answer("no")
        return json.dumps(answer)


def server_of(answers):
    return Server(Context(None, None), "x", Api(answers))


def test_listing_asks_once_per_kind_and_skips_unserved_kinds():
    old, new = told("old"), told("new")
    new["metadata"]["creationTimestamp"] = "2026-11-22T07:00:00Z"
    api = Api({"pytorchjobs": {"items": [old, new]}, "/jobs": {"items": []}})
    found = listing(Server(Context(None, None), "x", api))
    assert [run.run for run in found] == ["new", "old"]
    assert len(api.asked) == len(FLAVORS)
    selector = "?labelSelector=clusterkit%2Frun%2Cclusterkit%2Fattempt"
    assert all(path.endswith(selector) for path in api.asked)
    with pytest.raises(Unavailable, match="namespace x cannot be listed"):
        listing(server_of({"pytorchjobs": Forbidden}))


def config_map(make_facts, **cluster):
    """What a plan puts into the cluster."""
    seen = subject_of(**cluster)
    backend = backends.backend("kubernetes")
    kube = KubernetesFacts(
        version="v1.34.4", context="secret-context", namespace="x", kubeconfig="/home/ada/k",
        kinds=("PyTorchJob",), user="ada",
    )  # fmt: skip
    facts = msgspec.structs.replace(make_facts(), kubernetes=kube, home="/home/ada/.clusterkit")
    entry = msgspec.structs.replace(seen.entry, kubeconfig="/home/ada/k", context="secret-context")
    plan = backend.plan(seen.job, entry, facts, "ddp-1")
    (text,) = (file.text for file in plan.files if file.path.endswith(f"/{RECORD}"))
    return plan, text


def test_recovered_record_rebuilds_plan_without_local_paths(make_facts):
    plan, text = config_map(make_facts)
    for word in ("secret-context", "/home/ada"):
        assert word not in text
    held = {
        "metadata": {"labels": {"clusterkit/attempt": "2"},
                     "creationTimestamp": "2026-11-22T06:00:00Z"},
        "data": {RECORD: text},
    }  # fmt: skip
    found = recover(server_of({"configmaps/ddp-1": held}), "ddp-1")
    assert (found.attempt, found.created_at, found.project) == (2, 1795327200.0, None)
    again = backends.backend("kubernetes").plan(
        found.job,
        msgspec.structs.replace(found.cluster, namespace="x"),
        msgspec.structs.replace(
            found.facts, home="/root/.clusterkit",
            kubernetes=msgspec.structs.replace(found.facts.kubernetes, namespace="x"),
        ),
        "ddp-1",
    )  # fmt: skip
    assert [file.content() for file in again.files] == [file.content() for file in plan.files]
    assert "clusterkit/user: ada" in next(f.text for f in plan.files if "manifests" in f.path)


@pytest.mark.parametrize(
    ("held", "error"),
    [
        (NotFound, RunNotFound),
        (Forbidden, Unavailable),
        ({"metadata": {}, "data": {}}, RunFolderError),
        ({"metadata": {}, "data": {RECORD: "{"}}, RunFolderError),
        ({"metadata": {}, "data": {RECORD: '{"job": 7}'}}, RunFolderError),
    ],
)
def test_recover_fails_with_hint_when_record_is_unavailable(held, error):
    with pytest.raises(error) as refused:
        recover(server_of({"configmaps/ddp-1": held}), "ddp-1")
    assert refused.value.hint


def test_recover_reads_copied_project_from_its_config_map(make_facts):
    job = JobSpec(name="x", command=("true",))
    entry = KubernetesCluster(code="copied")
    kube = KubernetesFacts(version="1", context="", namespace="")
    facts = msgspec.structs.replace(make_facts(), kubernetes=kube)
    held = {"metadata": {}, "data": {RECORD: Record.of(job, entry, facts).text()}}
    code = {"metadata": {}, "binaryData": {PROJECT: base64.b64encode(b"packed").decode()}}
    server = server_of({"configmaps/x-1-code": code, "configmaps/x-1": held})
    assert recover(server, "x-1").project == b"packed"
    with pytest.raises(RunFolderError, match="config map x-2-code is gone"):
        recover(server_of({"x-2-code": NotFound, "x-2": held}), "x-2")


def test_local_backend_lists_no_runs_and_refuses_attach(clusterkit_home):
    assert api.runs_of("local") == []
    with pytest.raises(CapabilityError, match="keep no record"):
        api.attach("x", cluster="local")
