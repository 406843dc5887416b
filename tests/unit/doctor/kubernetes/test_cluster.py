"""Judgements about a Kubernetes cluster and its nodes."""

from __future__ import annotations

import pytest

from clusterkit.backends.kubernetes.doctor import CHECKS
from clusterkit.backends.kubernetes.doctor.base import (
    CLUSTER,
    ClusterAnswers,
    Reply,
    templates,
)
from clusterkit.backends.kubernetes.flavors import FLAVORS
from clusterkit.backends.kubernetes.rbac import run_rights, watcher_rights
from clusterkit.errors import Unavailable
from clusterkit.spec import JobSpec
from tests.unit.doctor.kubernetes.recorded import (
    ALONE,
    FORBIDDEN,
    WAITS,
    Api,
    documents,
    judged,
    only,
    seen_of,
    subject_of,
    watched,
)

GPU = "nvidia.com/gpu"


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
