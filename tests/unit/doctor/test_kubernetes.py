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
from clusterkit.backends.kubernetes.doctor import CHECKS, run_checks
from clusterkit.backends.kubernetes.doctor.base import (
    CLUSTER,
    ClusterAnswers,
    Reply,
    limits,
    templates,
)
from clusterkit.backends.kubernetes.flavors import FLAVORS
from clusterkit.backends.kubernetes.objects import parse_amount
from clusterkit.backends.kubernetes.rbac import run_rights, watcher_rights
from clusterkit.cluster import Claim, KubernetesCluster
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
    "/api/v1/nodes": "nodes",
    "/apis/storage.k8s.io/v1/storageclasses": "classes",
    "/apis/authentication.k8s.io/v1/selfsubjectreviews": "who",
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
    seen = ClusterAnswers(subject, Recorded(replies or documents()))
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
def test_checks_pass_or_skip_on_healthy_cluster(check):
    for finding in check.judge(seen_of(subject_of())):
        assert finding.level in ("ok", "skip"), finding
        assert finding.remedy is None
        assert finding.host in (CLUSTER, "node-1", "node-2")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_unreachable_api_server_fails_only_api_server_check(check):
    def answer(path):
        raise Unavailable("it does not answer")

    for finding in check.judge(ClusterAnswers(subject_of(), Api(answer))):
        assert finding.cause
        assert finding.level == ("fail" if check.name == "api-server" else "skip"), finding


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_checks_of_user_without_list_permission_name_missing_permission(check):
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
        ("v1.33.1", "", "ok", "v1.33.1; clusterkit was tested with 1.34"),
        ("v1.31.0+k3s1", "", "warn", "3 versions older than the 1.34"),
        ("v1.26.9", "", "fail", "older than 1.27, which clusterkit needs"),
        ("master", "", "warn", "unknown version"),
    ],
)
def test_api_server_check_judges_version(version, built, level, words):
    replies = documents()
    replies["version"][ALONE] = Reply({"gitVersion": version, "buildDate": built})
    found = only(judged("api-server", replies=replies))
    assert found.level == level
    assert words in found.cause


def test_namespace_check_reports_missing_or_terminating_namespace():
    replies = documents()
    replies["namespace"][ALONE] = Reply(reason="NotFound", detail='namespaces "x" not found')
    found = only(judged("namespace", replies=replies))
    assert (found.level, found.cause) == ("fail", "the cluster has no namespace default")
    assert found.remedy == "kubectl create namespace default"
    assert only(judged("admission", replies=replies)).level == "skip"
    replies["namespace"][ALONE] = Reply({"status": {"phase": "Terminating"}})
    assert "being deleted" in only(judged("namespace", replies=replies)).cause


def test_rights_check_names_every_missing_permission_with_remedy():
    replies = documents()
    for right in ("create pytorchjobs", "get pods/log", "patch secrets"):
        replies["rights"][right].document["status"] = {"allowed": False}
    found = only(judged("rights", replies=replies))
    assert found.level == "fail"
    assert found.cause == (
        "Forbidden: in namespace default admin may not create pytorchjobs; patch secrets; get "
        "pods/log"
    )
    assert found.remedy.splitlines()[1].endswith("--role clusterkit-submitter --user admin")
    replies["who"][ALONE].document["status"]["userInfo"]["username"] = "system:serviceaccount:a:b"
    assert only(judged("rights", replies=replies)).remedy.endswith("--serviceaccount a:b")


def test_watcher_adds_permissions_and_pod_to_plan():
    replies, count = documents(), len(run_rights("pytorchjob"))
    assert only(judged("rights", replies=replies)).cause == (
        f"admin has all {count} permissions needed"
    )
    denied = only(judged("rights", subject_of(watcher=True), replies))
    assert "admin may not" in denied.cause
    assert "roles" in denied.cause
    watched(replies)
    count += len(watcher_rights())
    assert only(judged("rights", subject_of(watcher=True), replies)).cause == (
        f"admin has all {count} permissions needed"
    )
    assert only(judged("plan", replies=replies)).cause == "2 pods"
    assert only(judged("plan", WAITS, replies)).cause == "3 pods"
    roles = [role for role, _, _ in templates(seen_of(WAITS, replies).objects)]
    assert roles == ["watcher", "worker"]
    # Its pod is kept by a Job, whatever keeps the others.
    assert ("create", "batch", "jobs") in watcher_rights()


def test_run_rights_cover_only_kind_of_job():
    assert ("create", "kubeflow.org", "pytorchjobs") in run_rights("pytorchjob")
    assert {resource for _, _, resource in run_rights("job")} >= {"jobs", "services"}
    assert not {"mpijobs", "services"} & {resource for _, _, resource in run_rights("pytorchjob")}


# ---------------------------------------------------------------- kind, plan


def test_kind_check_reports_kind_that_cluster_does_not_serve():
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
    # Left open, it is another kind.
    assert only(judged("kind", replies=replies)).cause.startswith("TrainJob")


@pytest.mark.parametrize("flavor", FLAVORS)
def test_kind_check_passes_for_every_flavor(flavor):
    launcher = "mpirun" if flavor == "mpijob" else "torchrun"
    job = JobSpec(name="any", command=("true",), nodes=2, launcher=launcher)
    subject = subject_of(job, flavor=flavor)
    assert only(judged("kind", subject)).level == "ok"
    pods = sum(number for _, number, _ in templates(seen_of(subject).objects))
    assert pods == (3 if flavor == "mpijob" else 2)


# ---------------------------------------------------------------- nodes, GPUs, room, image


def test_nodes_check_reports_not_ready_and_cordoned_nodes():
    replies = documents()
    for condition in node(replies)["status"]["conditions"]:
        if condition["type"] == "Ready":
            condition.update(status="Unknown", message="Kubelet stopped posting node status.")
    node(replies, 1)["spec"]["unschedulable"] = True
    found = {finding.host: finding for finding in judged("nodes", replies=replies)}
    assert found["node-1"].cause == "NotReady: Kubelet stopped posting node status."
    assert found["node-2"].remedy == "kubectl uncordon node-2"
    assert found[CLUSTER].level == "fail"


def test_nodes_check_reports_untolerated_taint_and_missing_labels():
    replies = documents()
    node(replies)["spec"]["taints"] = [{"key": "team", "value": "b", "effect": "NoSchedule"}]
    found = {finding.host: finding for finding in judged("nodes", replies=replies)}
    assert found["node-1"].level == "skip"
    assert found["node-1"].cause == "taint team=b:NoSchedule: the job's pods do not tolerate it"
    assert found["node-2"].level == "ok"
    told = only(judged("nodes", subject_of(topology_key="rack"), replies))
    assert told.cause == "no node has the labels rack"
    told = only(judged("nodes", subject_of(node_selector={"pool": "h100"}), replies))
    assert told.cause == "no node has the labels pool=h100"


def test_nodes_check_reports_disk_pressure():
    replies = documents()
    for condition in node(replies)["status"]["conditions"]:
        if condition["type"] == "DiskPressure":
            condition["status"] = "True"
    found = judged("nodes", replies=replies)
    assert found[0].cause == "DiskPressure: its pods may be evicted"


def test_gpus_check_counts_gpus_and_skips_node_with_too_few():
    found = judged("gpus", replies=with_gpus(documents(), 8, 4))
    assert {f.host: (f.level, f.cause) for f in found} == {
        "node-1": ("ok", "8 GPUs"), "node-2": ("skip", "4 GPUs; a pod of the job needs 8"),
    }  # fmt: skip


def test_gpus_check_reports_unhealthy_gpus_of_device_plugin():
    replies = with_gpus(documents(), 7, capacity=8)
    job = JobSpec(name="any", command=("true",), gpus_per_node=4)
    found = judged("gpus", subject_of(job), replies)
    assert found[0].cause == "the device plugin reports 1 of 8 GPUs unhealthy"


def test_gpus_check_warns_cuda_job_when_no_node_offers_gpus():
    job = JobSpec(name="any", command=("true",), gpus_per_node=8, device="cuda")
    told = only(judged("gpus", subject_of(job)))
    assert told.level == "warn"
    assert "no node for the job's pods offers nvidia.com/gpu" in told.cause
    assert "if its node pool scales from zero" in told.cause
    assert only(judged("plan", subject_of(job))).level == "ok"
    assert only(judged("gpus")).level == "skip"


def test_gpus_check_warns_when_pod_needs_more_gpus_than_any_node():
    job = JobSpec(name="any", command=("true",), gpus_per_node=8, device="cuda")
    found = judged("gpus", subject_of(job), with_gpus(documents(), 4, 2))
    assert found[-1].cause.startswith("a pod of the job needs 8 GPUs, no node has more than 4. ")
    assert found[-1].level == "warn"


# ---------------------------------------------------------------- secrets, volumes


def test_pull_secrets_check_reports_missing_secret():
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
        (claim(modes=["ReadWriteOnce"]), "fail", "pods on several nodes cannot all write to it"),
        (claim("Pending"), "fail", "claim data is not bound"),
        (claim("Pending", storage="fast"), "fail", "the cluster has no storage class fast"),
        (claim("Lost"), "fail", "its volume is gone"),
        (Reply(reason="NotFound"), "fail", "namespace default has no volume claim data"),
        (FORBIDDEN, "skip", "no permission to list volume claims, so not at data"),
    ],
)
def test_volumes_check_judges_claim_phase_and_access_mode(reply, level, words):
    subject = subject_of(volumes=DATA)
    replies = documents() | {"claims": {"data": reply}}
    told = only(judged("volumes", subject, replies))
    assert told.level == level
    assert words in told.cause


def test_volumes_check_accepts_pending_claim_with_wait_for_first_consumer():
    subject = subject_of(volumes=DATA)
    replies = documents() | {"claims": {"data": claim("Pending")}}
    replies["classes"][ALONE].document["items"][0]["volumeBindingMode"] = "WaitForFirstConsumer"
    told = only(judged("volumes", subject, replies))
    assert (told.level, told.cause) == ("ok", "claim data: ReadWriteMany, not bound yet")


def test_volumes_check_accepts_read_write_once_for_one_node():
    alone = JobSpec(name="any", command=("true",))
    replies = documents() | {"claims": {"data": claim(modes=["ReadWriteOnce"])}}
    assert only(judged("volumes", subject_of(alone, volumes=DATA), replies)).level == "ok"


# ---------------------------------------------------------------- admission

REFUSED = (
    'pods "doctor-rehearsal-worker" is forbidden: violates PodSecurity "restricted:latest": '
    'runAsNonRoot != true (pod or container "pytorch" must set securityContext.runAsNonRoot=true)'
)


def test_admission_check_reports_pod_security_verdict_of_api_server():
    replies = documents()
    replies["namespace"][ALONE].document["metadata"]["labels"][
        "pod-security.kubernetes.io/enforce"
    ] = "restricted"
    assert only(judged("admission", replies=replies)).cause == (
        "pod security: the namespace enforces restricted; it accepts a pod (worker), PyTorchJob"
    )
    replies["rehearsal"]["worker"] = Reply(reason="Forbidden", detail=REFUSED)
    told = only(judged("admission", replies=replies))
    assert told.level == "fail"
    assert told.cause.startswith('a pod (worker) is refused: violates PodSecurity "restricted')
    not_allowed = 'pods is forbidden: User "u" cannot create resource "pods" in API group ""'
    replies["rehearsal"]["worker"] = Reply(reason="Forbidden", detail=not_allowed)
    told = only(judged("admission", replies=replies))
    assert told.cause == (
        "pod security: the namespace enforces restricted, which clusterkit's pods meet; it accepts "
        "PyTorchJob; "
        "pods were not tried: no permission to create pods"
    )
    patched = subject_of(patch={"hostNetwork": True})
    assert "clusterkit's pods meet" not in only(judged("admission", patched, replies)).cause
    replies["rehearsal"]["PyTorchJob"] = Reply(reason="Forbidden", detail=not_allowed)
    assert only(judged("admission", patched, replies)).level == "skip"


def test_admission_check_quotes_refusal_of_each_object():
    replies = documents()
    said = 'pods "x" is forbidden: no PriorityClass with name high was found'
    replies["rehearsal"]["worker"] = Reply(reason="Forbidden", detail=said)
    told = only(judged("admission", replies=replies))
    assert told.cause == "a pod (worker) is refused: no PriorityClass with name high was found"
    same = said.replace('"x"', '"x-watch"')
    replies["rehearsal"]["watcher"] = Reply(reason="Forbidden", detail=same)
    watched(replies)
    told = only(judged("admission", WAITS, replies))
    assert told.cause == (
        "a pod (watcher) and a pod (worker) are refused: no PriorityClass with name high was found"
    )
    replies["rehearsal"]["PyTorchJob"] = Reply(reason="BadRequest", detail='unknown field "spec.x"')
    assert [f.cause for f in judged("admission", WAITS, replies)][1] == (
        'PyTorchJob is refused: unknown field "spec.x"'
    )


EXCEEDED = (
    "exceeded quota: team, requested: limits.cpu={}, used: limits.cpu=3, limited: limits.cpu=4"
)
DEFAULTED = (
    'spec.containers[0].resources.requests: Invalid value: "2": '
    "must be less than or equal to cpu limit of 1"
)
RANGE = (
    "[maximum cpu usage per Container is 1, but limit is 2, "
    "minimum memory usage per Pod is 1Gi, but request is 1Mi]"
)
DENIED = 'admission webhook "policy.example" denied the request: pods need an owner'


@pytest.mark.parametrize(
    ("of", "reason", "said", "level", "remedy"),
    [
        ("worker", "Forbidden", EXCEEDED.format(8), "fail", "describe quota team"),
        # What others use may be free later: until then pods wait.
        ("worker", "Forbidden", EXCEEDED.format(2), "warn", "describe quota team"),
        ("worker", "Forbidden", "failed quota: team: must specify limits.cpu for: pytorch", "fail",
         "`cpus`, `memory` and `resources` of the cluster entry, or the quota"),
        ("worker", "Forbidden", RANGE, "fail", "kubectl -n default describe limitrange"),
        ("worker", "Forbidden", DEFAULTED, "fail", "kubectl -n default describe limitrange"),
        # A pod that no job owns may be refused where that of a job is not.
        ("worker", "Forbidden", DENIED, "warn", None),
        ("PyTorchJob", "Forbidden", DENIED, "fail", None),
        ("PyTorchJob", "BadRequest", 'webhook "x" does not support dry run', "warn", None),
        ("PyTorchJob", "InternalError", "failed calling webhook: connection refused", "warn", None),
    ],
)  # fmt: skip
def test_admission_check_gives_level_and_remedy_for_refusal(of, reason, said, level, remedy):
    replies = documents()
    detail = f'pods "doctor-rehearsal-worker" is forbidden: {said}'
    replies["rehearsal"][of] = Reply(reason=reason, detail=detail)
    told = only(judged("admission", replies=replies))
    assert told.level == level
    refused = "is refused" if level == "fail" else "is refused in a dry run"
    what = of if of == "PyTorchJob" else f"a pod ({of})"
    assert told.cause == f"{what} {refused}: {said}"
    assert (remedy or "") in (told.remedy or "")
    assert next(check for check in CHECKS if check.name == "admission").quick


# ---------------------------------------------------------------- amounts


def test_quantities_are_parsed_and_container_limits_summed():
    assert parse_amount("500m") * 2 == 1
    assert parse_amount("nonsense") == 0
    pod = {
        "containers": [{"resources": {"limits": {"cpu": "2"}}}, {}],
        "initContainers": [{"resources": {"requests": {"cpu": "3", "memory": "1Gi"}}}],
    }
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


def test_checks_send_only_reads_reviews_and_dry_runs_once():
    server = Api(lambda path: '{"items": []}')
    subject = subject_of(image_pull_secrets=("regcred",), volumes=DATA)
    run_checks(subject, server, CHECKS, lambda *_: None)
    for method, path, body in server.asked:
        if method == "GET":
            assert body is None
            continue
        assert method == "POST"
        assert "dryRun=All" in path or "reviews" in path
    once = [(method, path) for method, path, _ in server.asked if "accessreviews" not in path]
    assert len(once) == len(set(once))


def test_checks_ask_unreachable_api_server_only_once():
    def answer(path):
        raise Unavailable("the API server https://x does not answer: timed out")

    server = Api(answer)
    report = run_checks(subject_of(), server, list(CHECKS), lambda *_: None)
    assert len(server.asked) == 1
    assert [f.check for f in report.findings if f.level == "fail"] == ["api-server"]
    assert report.findings[0].cause == "the API server https://x does not answer: timed out"


def test_checks_raise_bad_input_instead_of_finding():
    def answer(path):
        raise BadInput("context: kubeconfig has no context 'x'")

    with pytest.raises(BadInput):
        run_checks(subject_of(), Api(answer), list(CHECKS), lambda *_: None)


@pytest.mark.parametrize("text", ["", "[]", "<html>", '"x"'])
def test_checks_report_failure_for_unreadable_answers(text):
    server = Api(lambda path: text)
    report = run_checks(subject_of(), server, list(CHECKS), lambda *_: None)
    assert report.findings[0].level == "fail"


@pytest.mark.parametrize(
    "document",
    [{}, {"items": [1]}, {"items": [{}]}, {"items": [{"metadata": {"name": "x"}}]}, {"items": 7},
     {"items": [{"metadata": {"name": "x"}, "spec": {}, "status": {}}], "gitVersion": []}],
)  # fmt: skip
def test_every_check_reports_on_answers_of_any_shape(document):
    server = Api(lambda path: json.dumps(document))
    subject = subject_of(volumes=DATA, image_pull_secrets=("x",))
    report = run_checks(subject, server, list(CHECKS), lambda *_: None)
    assert {finding.check for finding in report.findings} == set(report.checks)


def test_checks_request_only_needed_resources():
    server = Api(lambda path: '{"items": []}')
    checks = [check for check in CHECKS if check.name == "kind"]
    run_checks(subject_of(), server, checks, lambda *_: None)
    paths = [path for _, path, _ in server.asked]
    assert "/apis" in paths
    assert not any("persistentvolumeclaims" in path or "dryRun" in path for path in paths)


def test_report_lists_cluster_and_nodes_in_summary():
    def answer(path):
        for answers in RECORDED.values():
            for reply in answers.values():
                if reply.get("document", {}).get("kind") == "NodeList" and path.endswith("/nodes"):
                    return json.dumps(reply["document"])
        return '{"items": [], "gitVersion": "v1.34.4"}'

    report = run_checks(subject_of(), Api(answer), list(CHECKS), lambda *_: None)
    assert report.hosts == (CLUSTER, "node-1", "node-2")
    assert report.summary().startswith("k8s: cluster and 2 nodes, 10 checks: ")


def test_check_names_are_unique_and_purposes_end_with_period():
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    assert all(check.purpose.endswith(".") for check in CHECKS)
