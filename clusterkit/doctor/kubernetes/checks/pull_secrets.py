"""Are the registry's credentials there?"""

from __future__ import annotations

from collections.abc import Mapping

from clusterkit.doctor.base import Finding
from clusterkit.doctor.kubernetes.base import (
    CLUSTER,
    Ask,
    KubeCheck,
    KubeSubject,
    Look,
    Seen,
    kubectl,
    unknown,
)

NAME = "pull-secrets"


def _ask(seen: Seen, subject: KubeSubject) -> Mapping[str, Ask]:
    """Whether one could be made of that name, without making it: nobody has to read a secret."""
    path = f"/api/v1/namespaces/{seen.namespace}/secrets?dryRun=All"
    return {
        name: Ask(path, {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}})
        for name in subject.entry.image_pull_secrets
    }


SECRETS = Look("pull-secrets", _ask)


def judge(seen: Seen, subject: KubeSubject) -> list[Finding]:
    names = subject.entry.image_pull_secrets
    if not names:
        return [Finding(NAME, CLUSTER, "skip", "the cluster entry names none")]
    findings = []
    for name in names:
        reply = seen.reply(SECRETS, name)
        if reply.reason == "AlreadyExists":
            continue
        if reply.reason:
            findings += unknown(NAME, reply, "secrets")
            continue
        cause = f"namespace {seen.namespace} has no secret {name}"
        mend = kubectl(
            subject, "-n", seen.namespace, "create", "secret", "docker-registry", name,
            "--docker-server=...", "--docker-username=...", "--docker-password=...",
        )  # fmt: skip
        findings.append(Finding(NAME, CLUSTER, "fail", cause, mend))
    return findings or [Finding(NAME, CLUSTER, "ok", ", ".join(names))]


CHECK = KubeCheck(NAME, "The secrets with the registry's credentials are there.", judge, (SECRETS,))
