"""What a real cluster has answered."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import msgspec

from clusterkit import backends
from clusterkit.backends.kubernetes.api_server import KubeTransport, Refusal
from clusterkit.backends.kubernetes.doctor import CHECKS
from clusterkit.backends.kubernetes.doctor.base import (
    ClusterAnswers,
    Reply,
)
from clusterkit.backends.kubernetes.flavors import FLAVORS
from clusterkit.backends.kubernetes.rbac import run_rights, watcher_rights
from clusterkit.cluster import KubernetesCluster
from clusterkit.spec import JobSpec

RECORDED = json.loads((Path(__file__).parents[3] / "data/kubernetes/cluster.json").read_text())
NOW = 1_795_000_000.0
ALONE = ""
"""Key of the answer where a sort of questions has but one."""
NOT_ALLOWED = Reply(
    reason="Forbidden", detail='pods is forbidden: "u" cannot create resource "pods"'
)
FORBIDDEN = Reply(reason="Forbidden", detail='pods is forbidden: User "u" cannot list resource')


def subject_of(job=None, **entry):
    """A cluster entry, and a job of two nodes unless another is given."""
    job = job or JobSpec(name="any", command=("true",), nodes=2)
    cluster = KubernetesCluster(**{"image": "clusterkit:cpu", "namespace": "default", **entry})
    return backends.backend("kubernetes").subject("k8s", cluster, job)


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


class Api(KubeTransport):
    """Answers as recorded, and remembers what it was asked."""

    def __init__(self, answers):
        super().__init__()
        self.answers = answers
        self.asked = []

    def request(self, to, method, path, body=None, content=""):
        self.asked.append((method, path, body))
        return self.answers(path)
