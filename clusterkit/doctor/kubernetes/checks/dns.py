"""Can pods find each other by name?"""

from __future__ import annotations

from clusterkit.doctor.base import Finding
from clusterkit.doctor.kubernetes.base import (
    CLUSTER,
    KubeCheck,
    KubeSubject,
    Look,
    Seen,
    kubectl,
    one,
    unknown,
)
from clusterkit.errors import counted

NAME = "dns"
_SLICES = "/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices"
SERVERS = Look("dns", one(f"{_SLICES}?labelSelector=kubernetes.io%2Fservice-name%3Dkube-dns"))


def judge(seen: Seen, subject: KubeSubject) -> list[Finding]:
    reply = seen.reply(SERVERS)
    if reply.reason:
        return unknown(NAME, reply, "the name servers in kube-system")
    ready = {
        address
        for each in reply.items
        for endpoint in each.get("endpoints") or ()
        # Nothing said means that it is.
        if (endpoint.get("conditions") or {}).get("ready", True) is not False
        for address in endpoint.get("addresses") or ()
    }
    if ready:
        told = f"{counted(len(ready), 'name server')} behind kube-system/kube-dns"
        return [Finding(NAME, CLUSTER, "ok", told)]
    if not reply.items:
        cause = "unknown: there is no service kube-system/kube-dns; pods find each other by name"
        return [Finding(NAME, CLUSTER, "warn", cause)]
    mend = kubectl(subject, "-n", "kube-system", "get", "pods", "-l", "k8s-app=kube-dns")
    cause = "no name server behind kube-system/kube-dns is ready: pods cannot find each other"
    return [Finding(NAME, CLUSTER, "fail", cause, mend)]


CHECK = KubeCheck(NAME, "The cluster's name servers are ready.", judge, (SERVERS,))
