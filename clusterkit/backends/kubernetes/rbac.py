"""The rights that a submitter needs in a namespace: one table for `k8s/rbac.yaml` and for access
reviews."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct

from clusterkit.backends.kubernetes.api_server import PARALLEL_REQUESTS, Server
from clusterkit.backends.kubernetes.flavors import FLAVORS
from clusterkit.backends.kubernetes.objects import new_object, plural

ROLE = "clusterkit-submitter"
"""Name of the role in `k8s/rbac.yaml`."""
ROLE_HINT = "k8s/rbac.yaml is the role that a submitter needs: an admin can bind it"
JOB_VERBS = ("get", "list", "create", "patch", "delete")


class Rule(Struct, frozen=True):
    """A rule of a role."""

    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]


RUN_RULES = (
    # `clusterkit attach` reads a run's config map from another machine; nobody reads its Secret.
    Rule("", ("configmaps",), ("get", "create", "patch", "delete")),
    Rule("", ("secrets",), ("create", "patch", "delete")),
    Rule("", ("services",), ("create", "patch", "delete", "deletecollection")),
    Rule("", ("pods",), ("get", "list", "watch", "patch", "delete", "deletecollection")),
    Rule("", ("pods/log",), ("get",)),
    Rule("", ("events",), ("list",)),
)
"""For runs of every flavor."""
INSIDE_RULES = (Rule("", ("pods/exec",), ("get", "create")),)
"""For commands in a run's pods (`clusterkit exec`): a WebSocket is a GET, from Kubernetes 1.35 on
``create`` is asked for too."""
WATCHER_RULES = (
    Rule("", ("serviceaccounts",), ("create", "patch", "delete")),
    Rule("rbac.authorization.k8s.io", ("roles", "rolebindings"), ("create", "patch", "delete")),
)
"""For a run's watcher in the cluster (`watcher: true`)."""


def job_rules(flavors: Sequence[str] = tuple(FLAVORS)) -> list[Rule]:
    """Return the rules for the jobs themselves, one for each API group."""
    kinds: dict[str, list[str]] = {}
    for flavor in map(FLAVORS.__getitem__, flavors):
        kinds.setdefault(flavor.group, []).extend(map(plural, (flavor.kind, *flavor.extra_kinds)))
    return [Rule(group, tuple(names), JOB_VERBS) for group, names in kinds.items()]


Right = tuple[str, str, str]
"""A verb, an API group and a resource."""


def _rights(rules: Sequence[Rule]) -> list[Right]:
    return [
        (verb, rule.group, resource)
        for rule in rules
        for resource in rule.resources
        for verb in rule.verbs
    ]


def run_rights(flavor: str) -> list[Right]:
    """Return all rights that a run of a flavor needs."""
    found = _rights([*job_rules([flavor]), *RUN_RULES])
    return [right for right in found if right[2] != "services" or flavor == "job"]


def watcher_rights() -> list[Right]:
    """Return the further rights that a run with a watcher needs."""
    return _rights([*WATCHER_RULES, Rule("batch", ("jobs",), ("create", "patch", "delete"))])


CREATE_WATCHER = [right for right in watcher_rights() if right[0] == "create"]


def denied(server: Server, rights: Iterable[Right]) -> list[Right]:
    """Return the rights that the user lacks in the namespace. Raises as `Server.request`."""

    def is_denied(right: Right) -> bool:
        verb, group, resource = right
        name, _, part = resource.partition("/")
        attributes = {"namespace": server.namespace, "verb": verb, "group": group, "resource": name}
        if part:
            attributes["subresource"] = part
        api = "authorization.k8s.io/v1"
        spec = {"resourceAttributes": attributes}
        review = new_object(api, "SelfSubjectAccessReview", spec=spec)
        answer = server.post(f"/apis/{api}/selfsubjectaccessreviews", review)
        return not (answer.get("status") or {}).get("allowed")

    asked = list(rights)
    with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
        return [right for right, no in zip(asked, pool.map(is_denied, asked), strict=True) if no]
