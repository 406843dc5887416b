"""What a submitter must be allowed to do in a namespace: one table for `k8s/rbac.yaml` and for
whoever asks the API server. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from clusterkit.backends.kubernetes.flavors import FLAVORS
from clusterkit.backends.kubernetes.text import made, plural

ROLE = "clusterkit-submitter"
"""What `k8s/rbac.yaml` calls the role."""
ROLE_HINT = "k8s/rbac.yaml is the role that a submitter needs: an admin can bind it"
JOB_VERBS = ("get", "list", "create", "patch", "delete")


class Rule(Struct, frozen=True):
    """Some verbs on some kinds of one API group, as roles have them."""

    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]


BESIDES = (
    # `clusterkit attach` reads a run's config map from another machine; nobody reads its Secret.
    Rule("", ("configmaps",), ("get", "create", "patch", "delete")),
    Rule("", ("secrets",), ("create", "patch", "delete")),
    Rule("", ("services",), ("create", "patch", "delete", "deletecollection")),
    Rule("", ("pods",), ("get", "list", "watch", "patch", "delete", "deletecollection")),
    Rule("", ("pods/log",), ("get",)),
    Rule("", ("events",), ("list",)),
)
"""For runs of every kind."""
WATCHING = (
    Rule("", ("serviceaccounts",), ("create", "patch", "delete")),
    Rule("rbac.authorization.k8s.io", ("roles", "rolebindings"), ("create", "patch", "delete")),
)
"""For the watcher that a run has in the cluster; without these rights it has none."""


def jobs_rules(flavors: Sequence[str] = tuple(FLAVORS)) -> list[Rule]:
    """For the kinds of jobs themselves, one rule for each API group."""
    kinds: dict[str, list[str]] = {}
    for flavor in map(FLAVORS.__getitem__, flavors):
        kinds.setdefault(flavor.group, []).extend(map(plural, (flavor.kind, *flavor.besides)))
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


def needed(flavor: str) -> list[Right]:
    """All that runs of this kind need."""
    found = _rights([*jobs_rules([flavor]), *BESIDES])
    return [right for right in found if right[2] != "services" or flavor == "job"]


def to_watch() -> list[Right]:
    """What a run with a watcher in the cluster needs besides."""
    return _rights([*WATCHING, Rule("batch", ("jobs",), ("create", "patch", "delete"))])


TO_MAKE_WATCHER = [right for right in to_watch() if right[0] == "create"]


def access_review(namespace: str, verb: str, group: str, resource: str) -> dict[str, Any]:
    """The question whether we may, as the API server takes it."""
    name, _, part = resource.partition("/")
    attributes = {"namespace": namespace, "verb": verb, "group": group, "resource": name}
    if part:
        attributes["subresource"] = part
    return made(
        "authorization.k8s.io/v1",
        "SelfSubjectAccessReview",
        spec={"resourceAttributes": attributes},
    )
