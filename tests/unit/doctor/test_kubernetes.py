"""Judgements about a Kubernetes cluster, on what a real one answered and on changes of that."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import msgspec
import pytest

from clusterkit import backends
from clusterkit.backends.kubernetes import api_server
from clusterkit.backends.kubernetes.api_server import KubeTransport, Refusal
from clusterkit.backends.kubernetes.flavors import FLAVORS
from clusterkit.backends.kubernetes.objects import parse_amount
from clusterkit.backends.kubernetes.rbac import run_rights, watcher_rights
from clusterkit.cluster import Claim, KubernetesCluster
from clusterkit.doctor.kubernetes import CHECKS, look
from clusterkit.doctor.kubernetes.base import (
    CLUSTER,
    Reply,
    Seen,
    amount,
    limits,
    requests,
    templates,
)
from clusterkit.doctor.kubernetes.checks.nodes import full_name
from clusterkit.errors import BadInput, Unavailable
from clusterkit.spec import JobSpec

RECORDED = json.loads((Path(__file__).parents[2] / "data/kubernetes/cluster.json").read_text())
NOW = 1_795_000_000.0
ALONE = ""
"""Key of the answer where a sort of questions has but one."""
NOT_ALLOWED = Reply(
    reason="Forbidden", detail='pods is forbidden: "u" cannot create resource "pods"'
)
FORBIDDEN = Reply(reason="Forbidden", detail='pods is forbidden: User "u" cannot list resource')
GPU = "nvidia.com/gpu"
DATA = (Claim(claim="data", path="/data"),)


def subject_of(job=None, **entry):
    """A cluster entry, and a job of two nodes unless another is given."""
    job = job or JobSpec(name="any", command=("true",), nodes=2)
    cluster = KubernetesCluster(**{"image": "clusterkit:cpu", "namespace": "default", **entry})
    return backends.backend("kubernetes").subject("k8s", cluster, job)


@pytest.fixture(autouse=True)
def located(monkeypatch):
    monkeypatch.setattr(api_server, "context_of", lambda entry: ("kube-test", "default"))


def documents():
    """Sort of question to key to reply, as recorded; to be changed freely."""
    found = {
        sort: {key: msgspec.convert(reply, Reply) for key, reply in replies.items()}
        for sort, replies in copy.deepcopy(RECORDED).items()
    }
    # Of one kind of job, at the time of the recording: all others are allowed as well.
    for flavor in FLAVORS:
        for verb, _, what in run_rights(flavor):
            found["rights"].setdefault(f"{verb} {what}", Reply({"status": {"allowed": True}}))
    return found


PATHS = {
    "/version": "version", "/api/v1/namespaces/default": "namespace", "/apis": "groups",
    "/api/v1/nodes": "nodes", "/apis/apps/v1/deployments": "deployments", "/api/v1/pods": "pods",
    "/apis/storage.k8s.io/v1/storageclasses": "classes",
    "/apis/authentication.k8s.io/v1/selfsubjectreviews": "who",
    "/api/v1/namespaces/default/resourcequotas": "quotas",
    "/api/v1/namespaces/default/limitranges": "limit-ranges",
    "/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices": "dns",
}  # fmt: skip
KINDS = {f"/apis/{flavor.api}": name for name, flavor in FLAVORS.items()}


def asked_for(path, body):
    """Sort and key of a question."""
    path = path.partition("?")[0]
    if path in PATHS:
        return PATHS[path], ALONE
    if path in KINDS:
        return "kinds", KINDS[path]
    if body is None:
        return "claims", path.rpartition("/")[2]
    if body["kind"] == "SelfSubjectAccessReview":
        of = body["spec"]["resourceAttributes"]
        part = f"/{of['subresource']}" if "subresource" in of else ""
        return "rights", f"{of['verb']} {of['resource']}{part}"
    if body["kind"] == "Secret":
        return "pull-secrets", body["metadata"]["name"]
    if body["kind"] == "Pod":
        return "rehearsal", body["metadata"]["name"].removeprefix("doctor-rehearsal-")
    return "rehearsal", body["kind"]


class Recorded(KubeTransport):
    """An API server that answers as one did; what it was not asked then, it does not allow."""

    def __init__(self, replies):
        super().__init__()
        self.replies = replies

    def request(self, to, method, path, body=None, content=""):
        sort, key = asked_for(path, body)
        other = Reply({"status": {}}) if sort == "rights" else NOT_ALLOWED
        reply = self.replies.get(sort, {}).get(key, other)
        if reply.reason:
            raise Refusal(reply.detail, reply.reason)
        return json.dumps(reply.document)


def watched(replies):
    """Allow a watcher in the cluster."""
    yes = Reply({"status": {"allowed": True}})
    replies["rights"] |= {f"{verb} {what}": yes for verb, _, what in watcher_rights()}


WAITS = subject_of(JobSpec(name="any", command=("true",), nodes=2, restarts=1), watcher=True)
"""Where another pod is waited for in the place of a lost one."""


def seen_of(subject, replies=None):
    seen = Seen(subject, Recorded(replies or documents()))
    seen.now = NOW
    return seen


def judged(name, subject=None, replies=None):
    """Verdicts of one check."""
    subject = subject or subject_of()
    check = next(check for check in CHECKS if check.name == name)
    return check.judge(seen_of(subject, replies))


def only(found):
    assert len(found) == 1, found
    return found[0]


def node(replies, number=0):
    return replies["nodes"][ALONE].document["items"][number]


def with_gpus(replies, *counts, capacity=None):
    for number, count in enumerate(counts):
        status = node(replies, number)["status"]
        status["allocatable"][GPU] = str(count)
        status["capacity"][GPU] = str(count if capacity is None else capacity)
    return replies


# ---------------------------------------------------------------- all is well


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_cluster_that_is_well(check):
    for finding in check.judge(seen_of(subject_of())):
        assert finding.level in ("ok", "skip"), finding
        assert finding.remedy is None
        assert finding.host in (CLUSTER, "node-1", "node-2")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_an_api_server_that_answers_nothing(check):
    def answer(path):
        raise Unavailable("it does not answer")

    for finding in check.judge(Seen(subject_of(), Api(answer))):
        assert finding.cause
        assert finding.level == ("fail" if check.name == "api-server" else "skip"), finding


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_somebody_who_may_look_at_nothing_is_told_so(check):
    replies = {
        look: dict.fromkeys(answers, FORBIDDEN)
        for look, answers in documents().items()
        if look not in ("version", "groups", "kinds")
    }
    replies = {**documents(), **replies}
    for finding in judged(check.name, replies=replies):
        if check.name == "admission":
            assert finding.level == "fail"  # the API server's own words, whatever they are
        elif check.name not in ("api-server", "kind", "plan"):
            assert finding.level in ("skip", "ok"), finding
            assert "may not" in finding.cause or "unknown" in finding.cause or "asked" in (
                finding.cause
            ) or "names none" in finding.cause, finding  # fmt: skip


# ---------------------------------------------------------------- API server, namespace, rights


@pytest.mark.parametrize(
    ("version", "built", "level", "words"),
    [
        ("v1.34.4", "2026-02-10T12:00:00Z", "ok", "v1.34.4, built 2026-02, 9 months ago"),
        ("v1.36.0", "", "ok", "v1.36.0"),
        ("v1.33.1", "", "ok", "v1.33.1; clusterkit was tried with 1.34"),
        ("v1.31.0+k3s1", "", "warn", "by 3 versions; Kubernetes' project supports 3"),
        ("v1.26.9", "", "fail", "older than 1.27, which clusterkit needs"),
        ("master", "", "warn", "cannot tell how old that is"),
    ],
)
def test_the_version(version, built, level, words):
    replies = documents()
    replies["version"][ALONE] = Reply({"gitVersion": version, "buildDate": built})
    found = only(judged("api-server", replies=replies))
    assert found.level == level
    assert words in found.cause


def test_a_namespace_that_is_not_there_and_one_that_goes():
    replies = documents()
    replies["namespace"][ALONE] = Reply(reason="NotFound", detail='namespaces "x" not found')
    found = only(judged("namespace", replies=replies))
    assert (found.level, found.cause) == ("fail", "the cluster has no namespace default")
    assert found.remedy == "kubectl create namespace default"
    assert only(judged("admission", replies=replies)).level == "skip"
    replies["namespace"][ALONE] = Reply({"status": {"phase": "Terminating"}})
    assert "being deleted" in only(judged("namespace", replies=replies)).cause


def test_every_right_that_is_missing_is_named():
    replies = documents()
    for right in ("create pytorchjobs", "get pods/log", "patch secrets"):
        replies["rights"][right].document["status"] = {"allowed": False}
    found = only(judged("rights", replies=replies))
    assert found.level == "fail"
    assert found.cause == (
        "admin may not, in namespace default: create pytorchjobs; patch secrets; get pods/log"
    )
    assert found.remedy.splitlines()[1].endswith("--role clusterkit-submitter --user admin")
    replies["who"][ALONE].document["status"]["userInfo"]["username"] = "system:serviceaccount:a:b"
    assert only(judged("rights", replies=replies)).remedy.endswith("--serviceaccount a:b")


def test_a_watcher_needs_rights_of_its_own_and_is_planned_where_the_entry_has_one():
    replies, count = documents(), len(run_rights("pytorchjob"))
    assert only(judged("rights", replies=replies)).cause == (
        f"admin may do all {count} things needed"
    )
    denied = only(judged("rights", subject_of(watcher=True), replies))
    assert "admin may not, in namespace" in denied.cause
    assert "roles" in denied.cause
    watched(replies)
    count += len(watcher_rights())
    assert only(judged("rights", subject_of(watcher=True), replies)).cause == (
        f"admin may do all {count} things needed"
    )
    assert only(judged("plan", replies=replies)).cause == "2 pods"
    assert only(judged("plan", WAITS, replies)).cause == "3 pods"
    roles = [role for role, _, _ in templates(seen_of(WAITS, replies).objects)]
    assert roles == ["watcher", "worker"]
    # Its pod is kept by a Job, whatever keeps the others.
    assert ("create", "batch", "jobs") in watcher_rights()


def test_only_rights_of_the_kind_of_job_are_asked_for():
    assert ("create", "kubeflow.org", "pytorchjobs") in run_rights("pytorchjob")
    assert {resource for _, _, resource in run_rights("job")} >= {"jobs", "services"}
    assert not {"mpijobs", "services"} & {resource for _, _, resource in run_rights("pytorchjob")}


# ---------------------------------------------------------------- kind, operator, plan


def test_a_kind_that_is_not_served():
    replies = documents()
    replies["kinds"]["pytorchjob"] = Reply(reason="NotFound", detail="not found")
    groups = replies["groups"][ALONE].document["groups"]
    (ours,) = (group for group in groups if group["name"] == "kubeflow.org")
    ours["versions"] = [{"version": "v1alpha9"}]
    found = only(judged("kind", subject_of(flavor="pytorchjob"), replies))
    assert found.cause == (
        "the cluster does not serve PyTorchJob (kubeflow.org/v1); "
        "of kubeflow.org it serves v1alpha9"
    )
    assert "Kubeflow's training operator" in found.remedy
    assert only(judged("plan", subject_of(flavor="pytorchjob"), replies)).level == "fail"
    assert only(judged("operator", subject_of(flavor="pytorchjob"), replies)).level == "skip"
    # Left open, it is another kind.
    assert only(judged("kind", replies=replies)).cause.startswith("TrainJob")


@pytest.mark.parametrize("flavor", FLAVORS)
def test_every_flavor_is_well(flavor):
    launcher = "mpirun" if flavor == "mpijob" else "torchrun"
    job = JobSpec(name="any", command=("true",), nodes=2, launcher=launcher)
    subject = subject_of(job, flavor=flavor)
    assert only(judged("kind", subject)).level == "ok"
    assert only(judged("operator", subject)).level == "ok"
    pods = sum(number for _, number, _ in templates(seen_of(subject).objects))
    assert pods == (3 if flavor == "mpijob" else 2)


def operator(replies, name):
    return next(
        each for each in replies["deployments"][ALONE].document["items"]
        if each["metadata"]["name"] == name
    )  # fmt: skip


def test_an_operator_that_is_scaled_to_nothing_or_does_not_come_up():
    replies = documents()
    found = operator(replies, "training-operator")
    found["spec"]["replicas"] = 0
    # Its pod is about to end, or has.
    for found["status"] in ({"readyReplicas": 1}, {}):
        told = only(judged("operator", replies=replies))
        assert told.cause == "kubeflow/training-operator is scaled to 0: nobody acts on the job"
    assert told.remedy == "kubectl -n kubeflow scale deployment training-operator --replicas=1"
    found["spec"]["replicas"] = 2
    assert "0 of 2 pods are ready" in only(judged("operator", replies=replies)).cause


def test_an_operator_that_keeps_to_another_namespace():
    replies = documents()
    found = operator(replies, "training-operator")
    container = found["spec"]["template"]["spec"]["containers"][0]
    for words in (["--namespace=team-a"], ["--namespace", "team-a"], ["-namespace=team-a"]):
        container["args"] = words
        told = only(judged("operator", replies=replies))
        assert told.level == "fail"
        assert told.cause.endswith("watches namespace team-a alone, not default")
    container["args"] = ["--namespace=default"]
    assert only(judged("operator", replies=replies)).level == "ok"


def test_an_operator_that_nobody_sees():
    replies = documents()
    items = replies["deployments"][ALONE].document["items"]
    items.remove(operator(replies, "training-operator"))
    told = only(judged("operator", replies=replies))
    assert (told.level, told.cause.split(":")[0]) == ("warn", "unknown")
    replies["deployments"][ALONE] = FORBIDDEN
    told = only(judged("operator", replies=replies))
    assert told.level == "skip"
    assert told.cause.startswith("unknown: you may not look at deployments")


def test_the_trainer_needs_who_acts_on_job_sets():
    replies = documents()
    found = operator(replies, "jobset-controller-manager")
    found["status"] = {}
    told = only(judged("operator", subject_of(flavor="trainjob"), replies))
    assert "jobset-system/jobset-controller-manager: 0 of 1" in told.cause


# ---------------------------------------------------------------- nodes, GPUs, room, image


def test_nodes_that_are_not_well():
    replies = documents()
    for condition in node(replies)["status"]["conditions"]:
        if condition["type"] == "Ready":
            condition.update(status="Unknown", message="Kubelet stopped posting node status.")
    node(replies, 1)["spec"]["unschedulable"] = True
    found = {finding.host: finding for finding in judged("nodes", replies=replies)}
    assert found["node-1"].cause == "not ready: Kubelet stopped posting node status."
    assert found["node-2"].remedy == "kubectl uncordon node-2"
    assert found[CLUSTER].level == "fail"


def test_taints_and_selectors():
    replies = documents()
    node(replies)["spec"]["taints"] = [{"key": "team", "value": "b", "effect": "NoSchedule"}]
    found = {finding.host: finding for finding in judged("nodes", replies=replies)}
    assert found["node-1"].level == "skip"
    assert found["node-1"].cause == "it takes no pods of the job: taint team=b:NoSchedule"
    assert found["node-2"].level == "ok"
    told = only(judged("nodes", subject_of(topology_key="rack"), replies))
    assert told.cause == "no node has the labels rack"
    told = only(judged("nodes", subject_of(node_selector={"pool": "h100"}), replies))
    assert told.cause == "no node has the labels pool=h100"


def test_a_node_short_of_disk():
    replies = documents()
    for condition in node(replies)["status"]["conditions"]:
        if condition["type"] == "DiskPressure":
            condition["status"] = "True"
    found = judged("nodes", replies=replies)
    assert found[0].cause == "short of disk: pods may be evicted"


def test_gpus_that_are_there():
    found = judged("gpus", replies=with_gpus(documents(), 8, 4))
    assert {f.host: (f.level, f.cause) for f in found} == {
        "node-1": ("ok", "8 GPUs"), "node-2": ("skip", "4 GPUs; a pod of the job needs 8"),
    }  # fmt: skip


def test_gpus_that_are_not_well():
    replies = with_gpus(documents(), 7, capacity=8)
    job = JobSpec(name="any", command=("true",), gpus_per_node=4)
    found = judged("gpus", subject_of(job), replies)
    assert found[0].cause == "1 of 8 GPUs are not well, says the device plugin"


def test_a_cluster_without_a_device_plugin():
    job = JobSpec(name="any", command=("true",), gpus_per_node=8, device="cuda")
    told = only(judged("gpus", subject_of(job)))
    assert told.level == "warn"
    assert "no node that takes the job's pods knows of nvidia.com/gpu" in told.cause
    assert "right where a pool is scaled to zero" in told.cause
    assert only(judged("plan", subject_of(job))).level == "ok"
    replies = {**documents(), "rehearsal": {}}
    assert judged("room", subject_of(job), replies)[-1].level == "warn"
    assert only(judged("gpus")).level == "skip"


def test_more_gpus_than_any_node_has():
    job = JobSpec(name="any", command=("true",), gpus_per_node=8, device="cuda")
    found = judged("gpus", subject_of(job), with_gpus(documents(), 4, 2))
    assert found[-1].cause.startswith("a pod of the job needs 8 GPUs, no node has more than 4. ")
    assert found[-1].level == "warn"


def test_room_on_empty_nodes_and_beside_what_runs():
    replies = documents()
    replies["rehearsal"] = {}
    told = judged("room", subject_of(cpus=64, memory="16Gi"), replies)
    assert told[-1].level == "fail"
    assert "no room for 2 of the job's 2 pods; a pod asks for cpu 64, memory 16Gi" in told[-1].cause
    assert told[0].cause == "cpu 2, not 64"
    assert only(judged("room", subject_of(cpus=1.5), replies)).level == "ok"
    other = {"spec": {"nodeName": "node-1", "containers": [{"resources": {
        "requests": {"cpu": "1"}}}]}}  # fmt: skip
    replies["pods"][ALONE].document["items"].append(other)
    found = judged("room", subject_of(cpus=1.5), replies)
    assert (found[0].level, found[0].host) == ("warn", CLUSTER)
    assert "no room for 1 of the job's 2 pods now" in found[0].cause
    assert found[1].cause == "cpu 960m, not 1500m beside what runs there"
    replies["pods"][ALONE] = FORBIDDEN
    assert "how full they are is unknown" in only(judged("room", subject_of(cpus=1), replies)).cause


def test_gpus_take_room_too():
    replies = with_gpus(documents(), 8, 8)
    replies["rehearsal"] = {}
    holder = {"spec": {"nodeName": "node-2", "containers": [{"resources": {
        "limits": {GPU: "2"}}}]}}  # fmt: skip
    replies["pods"][ALONE].document["items"].append(holder)
    found = judged("room", replies=replies)
    assert "no room for 1 of the job's 2 pods now" in found[0].cause
    assert found[1].cause == "nvidia.com/gpu 6, not 8 beside what runs there"


def test_the_image():
    found = judged("image", subject_of(image="registry.example/train:3"))
    assert {f.level for f in found} == {"warn"}
    assert found[0].remedy is None
    assert judged("image", subject_of(image="mine"))[0].remedy.startswith("push mine to a registry")
    never = subject_of(image="mine", image_pull_policy="Never")
    assert {f.level for f in judged("image", never)} == {"fail"}
    always = subject_of(image="mine", image_pull_policy="Always")
    assert only(judged("image", always)).level == "ok"
    assert [f.cause for f in judged("image")] == ["clusterkit:cpu is there"] * 2


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("clusterkit:cpu", "docker.io/library/clusterkit:cpu"),
        ("clusterkit", "docker.io/library/clusterkit:latest"),
        ("me/train", "docker.io/me/train:latest"),
        ("localhost/train:1", "localhost/train:1"),
        ("host:5000/train", "host:5000/train:latest"),
        ("ghcr.io/a/b:1@sha256:ab", "ghcr.io/a/b@sha256:ab"),
    ],
)
def test_names_of_images_are_completed_as_nodes_do_it(image, name):
    assert full_name(image) == name


# ---------------------------------------------------------------- secrets, volumes


def test_secrets_of_the_registry():
    subject = subject_of(image_pull_secrets=("regcred", "other"))
    replies = documents()
    replies["pull-secrets"] = {
        "regcred": Reply(reason="AlreadyExists", detail='secrets "regcred" already exists'),
        "other": Reply({"metadata": {"name": "other"}}),
    }
    told = only(judged("pull-secrets", subject, replies))
    assert told.cause == "namespace default has no secret other"
    assert "create secret docker-registry other" in told.remedy
    replies["pull-secrets"]["other"] = replies["pull-secrets"]["regcred"]
    assert only(judged("pull-secrets", subject, replies)).level == "ok"


def claim(phase="Bound", modes=("ReadWriteMany",), storage="shared"):
    return Reply({
        "spec": {"accessModes": list(modes), "storageClassName": storage},
        "status": {"phase": phase, **({"accessModes": list(modes)} if phase == "Bound" else {})},
    })  # fmt: skip


@pytest.mark.parametrize(
    ("reply", "level", "words"),
    [
        (claim(), "ok", "claim data: ReadWriteMany"),
        (claim(modes=["ReadWriteOnce"]), "fail", "pods on several nodes cannot write to it"),
        (claim("Pending"), "fail", "claim data is not bound"),
        (claim("Pending", storage="fast"), "fail", "the cluster has no storage class fast"),
        (claim("Lost"), "fail", "its volume is gone"),
        (Reply(reason="NotFound"), "fail", "namespace default has no volume claim data"),
        (FORBIDDEN, "skip", "you may not look at volume claims, so not at data"),
    ],
)
def test_volumes(reply, level, words):
    subject = subject_of(volumes=DATA)
    replies = documents() | {"claims": {"data": reply}}
    told = only(judged("volumes", subject, replies))
    assert told.level == level
    assert words in told.cause


def test_a_volume_that_is_bound_when_the_first_pod_comes():
    subject = subject_of(volumes=DATA)
    replies = documents() | {"claims": {"data": claim("Pending")}}
    replies["classes"][ALONE].document["items"][0]["volumeBindingMode"] = "WaitForFirstConsumer"
    told = only(judged("volumes", subject, replies))
    assert (told.level, told.cause) == ("ok", "claim data: ReadWriteMany, not bound yet")


def test_one_node_may_keep_a_volume_to_itself():
    alone = JobSpec(name="any", command=("true",))
    replies = documents() | {"claims": {"data": claim(modes=["ReadWriteOnce"])}}
    assert only(judged("volumes", subject_of(alone, volumes=DATA), replies)).level == "ok"


# ---------------------------------------------------------------- admission, quotas, limits, DNS

REFUSED = (
    'pods "doctor-rehearsal-worker" is forbidden: violates PodSecurity "restricted:latest": '
    'runAsNonRoot != true (pod or container "pytorch" must set securityContext.runAsNonRoot=true)'
)


def test_pod_security_in_the_api_server_s_own_words():
    replies = documents()
    replies["namespace"][ALONE].document["metadata"]["labels"][
        "pod-security.kubernetes.io/enforce"
    ] = "restricted"
    assert only(judged("admission", replies=replies)).cause == (
        "the namespace enforces restricted; it takes a pod (worker), PyTorchJob"
    )
    replies["rehearsal"]["worker"] = Reply(reason="Forbidden", detail=REFUSED)
    told = only(judged("admission", replies=replies))
    assert told.level == "fail"
    assert told.cause.startswith('a pod (worker) is refused: violates PodSecurity "restricted')
    not_allowed = 'pods is forbidden: User "u" cannot create resource "pods" in API group ""'
    replies["rehearsal"]["worker"] = Reply(reason="Forbidden", detail=not_allowed)
    told = only(judged("admission", replies=replies))
    assert told.cause == (
        "the namespace enforces restricted, which clusterkit's pods pass; it takes PyTorchJob; "
        "pods were not tried: you may not create them yourself"
    )
    patched = subject_of(patch={"hostNetwork": True})
    assert "clusterkit's pods pass" not in only(judged("admission", patched, replies)).cause
    replies["rehearsal"]["PyTorchJob"] = Reply(reason="Forbidden", detail=not_allowed)
    assert only(judged("admission", patched, replies)).level == "skip"


def test_what_admission_refuses_is_told_in_its_words():
    replies = documents()
    said = 'pods "x" is forbidden: no PriorityClass with name high was found'
    replies["rehearsal"]["worker"] = Reply(reason="Forbidden", detail=said)
    told = only(judged("admission", replies=replies))
    assert told.cause == f"a pod (worker) is refused: {said}"
    same = said.replace('"x"', '"x-watch"')
    replies["rehearsal"]["watcher"] = Reply(reason="Forbidden", detail=same)
    watched(replies)
    told = only(judged("admission", WAITS, replies))
    assert told.cause == f"a pod (watcher) and a pod (worker) are refused: {same}"
    replies["rehearsal"]["PyTorchJob"] = Reply(reason="BadRequest", detail='unknown field "spec.x"')
    assert [f.cause for f in judged("admission", WAITS, replies)][1] == (
        'PyTorchJob is refused: unknown field "spec.x"'
    )


def quota(replies, hard, used=None, **spec):
    replies["quotas"][ALONE].document["items"] = [{
        "metadata": {"name": "team"}, "spec": {"hard": hard, **spec},
        "status": {"hard": hard, "used": used or dict.fromkeys(hard, "0")},
    }]  # fmt: skip
    return replies


@pytest.mark.parametrize(
    ("hard", "used", "level", "words"),
    [
        ({"pods": "10"}, {"pods": "2"}, "ok", "room in team"),
        ({"pods": "1"}, None, "fail", "has 1 of pods, 0 in use; the job needs 2"),
        ({"pods": "3"}, {"pods": "2"}, "warn", "has 3 of pods, 2 in use; the job needs 2"),
        ({"requests.memory": "6Gi"}, None, "fail", "6Gi of requests.memory"),
        ({"requests.cpu": "3500m"}, None, "fail", "3500m of requests.cpu"),
        ({"limits.memory": "8Gi"}, None, "ok", "room"),
        ({"count/pytorchjobs.kubeflow.org": "0"}, None, "fail", "the job needs 1"),
        ({"services": "0"}, None, "ok", "room"),
        ({"secrets": "0"}, None, "fail", "the job needs 1"),
    ],
)
def test_quotas(hard, used, level, words):
    replies = quota(documents(), hard, used)
    replies["rehearsal"] = {}
    found = only(judged("quota", subject_of(cpus=2, memory="4Gi"), replies))
    assert found.level == level
    assert words in found.cause


def test_a_quota_that_wants_an_amount_named():
    replies = quota(documents(), {"requests.cpu": "100"})
    said = 'pods "x" is forbidden: failed quota: team: must specify requests.cpu for: pytorch'
    replies["rehearsal"]["worker"] = Reply(reason="Forbidden", detail=said)
    found = only(judged("admission", replies=replies))
    assert found.cause == (
        "a pod (worker) is refused: failed quota: team: must specify requests.cpu for: pytorch"
    )
    assert only(judged("quota", replies=replies)).level == "ok"


def test_a_quota_that_is_used_up_is_told_once():
    replies = quota(documents(), {"pods": "3"}, {"pods": "3"})
    said = 'pods "x" is forbidden: exceeded quota: team, requested: pods=1, used: pods=3'
    replies["rehearsal"]["worker"] = Reply(reason="Forbidden", detail=said)
    assert only(judged("quota", replies=replies)).level == "warn"
    assert only(judged("admission", replies=replies)).level == "ok"
    replies["quotas"][ALONE].document["items"][0]["spec"]["scopes"] = ["BestEffort"]
    assert "exceeded quota: team" in only(judged("admission", replies=replies)).cause


def test_a_quota_for_some_pods_only_is_left_to_admission():
    replies = quota(documents(), {"pods": "0"}, scopes=["BestEffort"])
    assert only(judged("quota", replies=replies)).level == "ok"


@pytest.mark.parametrize(
    ("rule", "level", "words"),
    [
        ({"type": "Container", "max": {"memory": "2Gi"}}, "fail", "memory 2Gi at most"),
        ({"type": "Container", "min": {"cpu": "4"}}, "fail", "cpu 4 at least"),
        ({"type": "Pod", "max": {"cpu": "8"}}, "ok", "within limits"),
        ({"type": "PersistentVolumeClaim", "max": {"storage": "1Gi"}}, "ok", "within limits"),
        ({"type": "Container", "default": {"cpu": "1"}}, "warn", "limit cpu 1"),
        ({"type": "Container", "defaultRequest": {"ephemeral-storage": "1Gi"}}, "ok", "gives"),
    ],
)
def test_limit_ranges(rule, level, words):
    replies = documents()
    replies["limit-ranges"][ALONE].document["items"] = [
        {"metadata": {"name": "limits"}, "spec": {"limits": [rule]}}
    ]
    found = only(judged("limit-range", subject_of(cpus=2, memory="4Gi"), replies))
    assert found.level == level
    assert words in found.cause


def test_name_servers():
    replies = documents()
    (group,) = replies["dns"][ALONE].document["items"]
    group["endpoints"][0]["conditions"]["ready"] = False
    assert only(judged("dns", replies=replies)).level == "fail"
    replies["dns"][ALONE].document["items"] = []
    assert only(judged("dns", replies=replies)).level == "warn"


# ---------------------------------------------------------------- amounts


def test_amounts():
    assert parse_amount("500m") * 2 == 1
    assert parse_amount("nonsense") == 0
    assert amount("memory", parse_amount("1536Mi")) == "1.5Gi"
    assert amount("cpu", parse_amount("1500m")) == "1500m"
    assert amount(GPU, parse_amount("8")) == "8"
    pod = {
        "containers": [{"resources": {"limits": {"cpu": "2"}}}, {}],
        "initContainers": [{"resources": {"requests": {"cpu": "3", "memory": "1Gi"}}}],
    }
    assert requests(pod) == {"cpu": 3, "memory": 2**30}
    assert limits(pod) == {"cpu": 2}


# ---------------------------------------------------------------- asking


class Api(KubeTransport):
    """Answers as recorded, and remembers what it was asked."""

    def __init__(self, answers):
        super().__init__()
        self.answers = answers
        self.asked = []

    def request(self, to, method, path, body=None, content=""):
        self.asked.append((method, path, body))
        return self.answers(path)


def test_every_question_changes_nothing():
    server = Api(lambda path: '{"items": []}')
    subject = subject_of(image_pull_secrets=("regcred",), volumes=DATA)
    look(subject, server, CHECKS, lambda *_: None)
    for method, path, body in server.asked:
        if method == "GET":
            assert body is None
            continue
        assert method == "POST"
        assert "dryRun=All" in path or "reviews" in path
    once = [(method, path) for method, path, _ in server.asked if "accessreviews" not in path]
    assert len(once) == len(set(once))


def test_a_server_that_is_away_is_asked_once():
    def answer(path):
        raise Unavailable("the API server https://x does not answer: timed out")

    server = Api(answer)
    report = look(subject_of(), server, list(CHECKS), lambda *_: None)
    assert len(server.asked) == 1
    assert [f.check for f in report.findings if f.level == "fail"] == ["api-server"]
    assert report.findings[0].cause == "the API server https://x does not answer: timed out"


def test_bad_input_is_no_finding():
    def answer(path):
        raise BadInput("context: kubeconfig has no context 'x'")

    with pytest.raises(BadInput):
        look(subject_of(), Api(answer), list(CHECKS), lambda *_: None)


@pytest.mark.parametrize("text", ["", "[]", "<html>", '"x"'])
def test_what_is_not_readable_is_no_traceback(text):
    server = Api(lambda path: text)
    report = look(subject_of(), server, list(CHECKS), lambda *_: None)
    assert report.findings[0].level == "fail"


@pytest.mark.parametrize(
    "document",
    [{}, {"items": [1]}, {"items": [{}]}, {"items": [{"metadata": {"name": "x"}}]}, {"items": 7},
     {"items": [{"metadata": {"name": "x"}, "spec": {}, "status": {}}], "gitVersion": []}],
)  # fmt: skip
def test_answers_of_any_shape_are_no_traceback(document):
    server = Api(lambda path: json.dumps(document))
    subject = subject_of(volumes=DATA, image_pull_secrets=("x",))
    report = look(subject, server, list(CHECKS), lambda *_: None)
    assert {finding.check for finding in report.findings} == set(report.checks)


def test_only_what_the_checks_need_is_asked():
    server = Api(lambda path: '{"items": []}')
    checks = [check for check in CHECKS if check.name == "dns"]
    look(subject_of(), server, checks, lambda *_: None)
    paths = [path for _, path, _ in server.asked]
    assert any("endpointslices" in path for path in paths)
    assert not any("persistentvolumeclaims" in path or "dryRun" in path for path in paths)


def test_the_report_says_what_everything_is():
    def answer(path):
        for answers in RECORDED.values():
            for reply in answers.values():
                if reply.get("document", {}).get("kind") == "NodeList" and path.endswith("/nodes"):
                    return json.dumps(reply["document"])
        return '{"items": [], "gitVersion": "v1.34.4"}'

    report = look(subject_of(), Api(answer), list(CHECKS), lambda *_: None)
    assert report.hosts == (CLUSTER, "node-1", "node-2")
    assert report.summary().startswith("k8s: cluster and 2 nodes, 16 checks: ")


def test_checks_have_names_of_their_own():
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    assert all(check.purpose.endswith(".") for check in CHECKS)
