"""Examines a Kubernetes cluster: requests that change nothing, then the judgements."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from clusterkit.backends.kubernetes.client import Refusal
from clusterkit.backends.kubernetes.flavors import FLAVORS, choose
from clusterkit.backends.kubernetes.nodes import gpus_of
from clusterkit.backends.kubernetes.rights import to_watch
from clusterkit.backends.kubernetes.server import Server
from clusterkit.cluster import Gpu, KubernetesFacts
from clusterkit.doctor.base import Finding
from clusterkit.doctor.kubernetes.base import (
    CLUSTER,
    FIRST,
    KINDS,
    NODES,
    VERSION,
    WATCHING,
    Ask,
    KubeCheck,
    KubeSubject,
    Look,
    Reply,
    Seen,
    allowed,
    names_of,
    nodes_of,
)
from clusterkit.doctor.kubernetes.checks import CHECKS
from clusterkit.doctor.report import Progress, Report
from clusterkit.doctor.words import shortened
from clusterkit.errors import BadInput, ClusterkitError, Unavailable, counted
from clusterkit.transport import Transport

__all__ = ["CHECKS", "look"]

AT_ONCE = 8
"""Requests at a time."""


def look(
    subject: KubeSubject, transport: Transport, checks: Sequence[KubeCheck], progress: Progress
) -> Report:
    """Ask the API server, and judge what it answered. Nothing in the cluster is changed.

    Raises:
        BadInput: a kubeconfig that cannot be used.
    """
    seen = gathered(subject, transport, checks, progress)
    try:
        nodes = names_of(nodes_of(seen, subject))
    except (KeyError, TypeError, AttributeError):
        nodes = []  # the check of nodes tells of it
    everything = CLUSTER + (f" and {counted(len(nodes), 'node')}" if nodes else "")
    return Report(
        cluster=subject.cluster,
        hosts=(CLUSTER, *nodes),
        checks=tuple(check.name for check in checks),
        findings=tuple(finding for check in checks for finding in judge(check, seen, subject)),
        everything=everything,
    )


def judge(check: KubeCheck, seen: Seen, subject: KubeSubject) -> list[Finding]:
    """What a check says. An answer of a shape that Kubernetes does not give is a warning."""
    try:
        return check.judge(seen, subject)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        cause = f"the API server answered with something unexpected: {type(error).__name__} {error}"
        return [Finding(check.name, CLUSTER, "warn", shortened(cause))]


def gathered(
    subject: KubeSubject, transport: Transport, checks: Sequence[KubeCheck], progress: Progress
) -> Seen:
    """All that the checks have to know."""
    context, namespace = subject.locate()
    seen = Seen(namespace=namespace, context=context, now=time.time())
    looks = {each.name: each for each in (*FIRST, *(one for c in checks for one in c.looks))}
    progress(1, ("the API server",))
    # Whether it answers at all is found out once.
    seen = _ask(seen, subject, transport, [looks.pop(VERSION.name)])
    if not seen.reply(VERSION).reason:
        early = [each for each in looks.values() if not each.late]
        seen = _ask(seen, subject, transport, early)
        seen = planned(seen, subject)
        seen = _ask(seen, subject, transport, [each for each in looks.values() if each.late])
    progress(1, ())
    return seen


def planned(seen: Seen, subject: KubeSubject) -> Seen:
    """With the job's objects, or why there are none. Pure, but for the job's own files."""
    kube = KubernetesFacts(
        version=str(seen.reply(VERSION).document.get("gitVersion", "?")),
        context=seen.context,
        namespace=seen.namespace,
        kinds=tuple(
            flavor.kind
            for name, flavor in FLAVORS.items()
            if flavor.served(seen.reply(KINDS, name).document)
        ),
        may_watch=subject.entry.watcher is not False
        and all(allowed(seen.reply(WATCHING, f"{verb} {what}")) for verb, _, what in to_watch()),
    )
    try:
        flavor, origin = choose(subject.job, subject.entry, kube)
        seen = replace(seen, flavor=flavor, origin=origin)
        gpus: tuple[Gpu, ...] = ()
        if subject.entry.gpus != 0 and subject.job.device != "cpu":
            reply = seen.reply(NODES)
            gpus = gpus_of(subject.entry, subject.job, None if reply.reason else reply.items)
        return replace(seen, objects=tuple(subject.manifests(kube, gpus)))
    except ClusterkitError as error:
        return replace(seen, problem=error)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        cause = f"the API server answered with something unexpected: {type(error).__name__} {error}"
        return replace(seen, problem=Unavailable(cause))


def _ask(seen: Seen, subject: KubeSubject, transport: Transport, looks: Iterable[Look]) -> Seen:
    """With the answers to all questions of the looks, asked at once."""
    server = Server.of(subject.entry, transport)
    asked = [
        (look.name, key, ask) for look in looks for key, ask in look.asks(seen, subject).items()
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda each: _answer(server, each[2]), asked))
    replies: dict[str, Mapping[str, Reply]] = dict(seen.replies)
    for (name, key, _), answer in zip(asked, answers, strict=True):
        replies[name] = {**replies.get(name, {}), key: answer}
    return replace(seen, replies=replies)


def _answer(server: Server, ask: Ask) -> Reply:
    try:
        document = server.get(ask.path) if ask.body is None else server.post(ask.path, ask.body)
    except BadInput:
        raise
    except Refusal as error:
        return Reply(reason=error.reason, said=error.said)
    except ClusterkitError as error:
        return Reply(reason="Unavailable", said=error.message)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        return Reply(reason="Unreadable", said="it answered with something unreadable")
    return Reply(document=document)
