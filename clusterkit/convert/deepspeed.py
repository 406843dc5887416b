"""``deepspeed``: its options that choose hosts, and the hostfile. Pure."""

from __future__ import annotations

import re

from clusterkit.convert.draft import Draft
from clusterkit.convert.options import apply_option
from clusterkit.jobfile.command import Used

DEFAULT_HOSTFILE = "/job/hostfile"
_LOCAL = ("localhost", "127.0.0.1")


def option(draft: Draft, used: Used) -> None:
    """Convert one option of the command."""
    name = used.name
    if name in ("--hostfile", "--include", "--exclude"):
        draft.hosts[name] = used  # all are needed to say which hosts are left
    elif name in ("--num-nodes", "--num-gpus", "--num-accelerators"):
        if used.value == "-1":
            draft.drop(used.written, "all is the default")
        else:
            draft.hosts[name.replace("accelerators", "gpus")] = used
    elif name == "--launcher" and used.value not in ("pdsh",):
        draft.drop(used.written, "clusterkit starts the nodes itself")
    else:
        apply_option(draft, used)


def finish(draft: Draft) -> None:
    """Work out hosts, GPUs and number of nodes from all options together."""
    hosts = draft.hosts
    given = hosts.get("--hostfile")
    path = given.value if given else DEFAULT_HOSTFILE
    if given is None and draft.read(path) is None:
        _this_machine(draft)
        return
    origin = given.written if given else f"{path}, which deepspeed reads by itself"
    if not (found := draft.hostfile(origin, path)):
        return
    draft.ssh(origin, found)
    chosen = _chosen(draft, {host.name: host.slots or 1 for host in found})
    if draft.refused:
        return
    if nodes := hosts.get("--num-nodes"):
        count = draft.integer(nodes.written, nodes.value)
        if count is not None and count <= len(chosen):
            chosen = dict(list(chosen.items())[:count])
        elif count is not None:
            draft.refuse(nodes.written, f"{path} has {len(chosen)} hosts")
    draft.key(nodes.written if nodes else origin, "nodes", len(chosen))
    if gpus := hosts.get("--num-gpus"):
        draft.number(gpus.written, "gpus_per_node", gpus.value)
    elif len(set(chosen.values())) > 1:
        uneven = ", ".join(f"{name}: {count}" for name, count in chosen.items())
        draft.refuse(origin, f"every node has as many ranks as the others, but {uneven}")
    else:
        draft.key(f"slots of {path}", "gpus_per_node", next(iter(chosen.values())))


def _this_machine(draft: Draft) -> None:
    hosts = draft.hosts
    for name, key in (("--num-nodes", "nodes"), ("--num-gpus", "gpus_per_node")):
        if used := hosts.get(name):
            draft.number(used.written, key, used.value)
    for name in ("--include", "--exclude"):
        if used := hosts.get(name):
            host, _, numbers = used.value.partition(":")
            if host not in _LOCAL or not re.fullmatch(r"\d+(,\d+)*", numbers):
                draft.refuse(used.written, f"there is no hostfile: {DEFAULT_HOSTFILE}")
            elif name == "--exclude":
                draft.refuse(used.written, "use --include with the GPUs to use")
            else:
                draft.key(used.written, "gpus_per_node", len(set(numbers.split(","))))
                draft.todo(used.written, f"export CUDA_VISIBLE_DEVICES={numbers} where you submit")
    if not hosts:
        draft.key("no hostfile", "gpus_per_node", "auto")


def _chosen(draft: Draft, slots: dict[str, int]) -> dict[str, int]:
    """Return the slots by host that remain after ``--include`` or ``--exclude``."""
    for key in ("include", "exclude"):
        if (used := draft.hosts.get(f"--{key}")) is None:
            continue
        named = {}
        for part in used.value.split("@"):
            host, colon, numbers = part.strip().partition(":")
            if host not in slots or (colon and not re.fullmatch(r"\d+(,\d+)*", numbers)):
                draft.refuse(used.written, f"{part} is not a host of the hostfile")
                return slots
            named[host] = len(set(numbers.split(","))) if colon else slots[host]
        draft.entry(used.written, key, used.value)
        left = {
            host: named.get(host, 0) if key == "include" else count - named.get(host, 0)
            for host, count in slots.items()
        }
        slots = {host: count for host, count in left.items() if count > 0}
        if not slots:
            draft.refuse(used.written, "leaves no host")
    return slots
