"""Secrets, volumes, admission, and what is asked of the API server."""

from __future__ import annotations

import json

import pytest

from clusterkit.backends.kubernetes.doctor import CHECKS, run_checks
from clusterkit.backends.kubernetes.doctor.base import (
    CLUSTER,
    Reply,
    limits,
)
from clusterkit.backends.kubernetes.objects import parse_amount
from clusterkit.cluster import Claim
from clusterkit.errors import BadInput, Unavailable
from clusterkit.spec import JobSpec
from tests.unit.doctor.kubernetes.recorded import (
    ALONE,
    FORBIDDEN,
    RECORDED,
    WAITS,
    Api,
    documents,
    judged,
    only,
    subject_of,
    watched,
)

DATA = (Claim(claim="data", path="/data"),)


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
