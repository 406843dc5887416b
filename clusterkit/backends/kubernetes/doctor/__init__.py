"""Examines a Kubernetes cluster: requests that change nothing, and judgements of the answers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from clusterkit.backends.kubernetes.doctor.base import (
    CLUSTER,
    UNEXPECTED,
    ClusterAnswers,
    KubeSubject,
    nodes_of,
)
from clusterkit.backends.kubernetes.doctor.checks import CHECKS
from clusterkit.doctor.base import Check, Finding
from clusterkit.doctor.report import Progress, Report
from clusterkit.errors import pluralize
from clusterkit.transport import Transport

__all__ = ["CHECKS", "run_checks"]


def run_checks(
    subject: KubeSubject, transport: Transport, checks: Sequence[Check], progress: Progress
) -> Report:
    """Ask the API server, and judge what it answered. Nothing in the cluster is changed.

    Raises:
        BadInput: a kubeconfig that cannot be used.
    """
    progress(1, ("the API server",))
    seen = ClusterAnswers(subject, transport)
    with ThreadPoolExecutor(len(checks) or 1) as pool:
        verdicts = pool.map(lambda check: check.judge(seen), checks)
        findings = [
            Finding(check.name, *verdict)
            for check, judged in zip(checks, verdicts, strict=True)
            for verdict in judged
        ]
    progress(1, ())
    try:
        nodes = [node["metadata"]["name"] for node in nodes_of(seen)]
    except UNEXPECTED:
        nodes = []  # the check of nodes tells of it
    everything = CLUSTER + (f" and {pluralize(len(nodes), 'node')}" if nodes else "")
    return Report(
        cluster=subject.cluster,
        hosts=(CLUSTER, *nodes),
        checks=tuple(check.name for check in checks),
        findings=tuple(findings),
        everything=everything,
    )
