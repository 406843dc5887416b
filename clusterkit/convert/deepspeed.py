"""``deepspeed``: its options that choose hosts, and the hostfile. Pure."""

from __future__ import annotations

import re

from clusterkit.convert.options import by_meaning
from clusterkit.convert.sheet import Sheet
from clusterkit.jobfile.command import Used

DEFAULT_HOSTFILE = "/job/hostfile"
_LOCAL = ("localhost", "127.0.0.1")


def option(sheet: Sheet, used: Used) -> None:
    """One option of the command."""
    name = used.name
    if name in ("--hostfile", "--include", "--exclude"):
        sheet.hosts[name] = used  # all are needed to say which hosts are left
    elif name in ("--num-nodes", "--num-gpus", "--num-accelerators"):
        if used.value == "-1":
            sheet.drop(used.written, "all there are, as without it")
        else:
            sheet.hosts[name.replace("accelerators", "gpus")] = used
    elif name == "--launcher" and used.value not in ("pdsh",):
        sheet.drop(used.written, "clusterkit starts the nodes itself")
    elif name == "--venv-script":
        sheet.refuse(used.written, "`python:` of the cluster's entry names the interpreter")
    else:
        by_meaning(sheet, used)


def finish(sheet: Sheet) -> None:
    """Hosts, GPUs and number of nodes, of all options together."""
    hosts = sheet.hosts
    given = hosts.get("--hostfile")
    path = given.value if given else DEFAULT_HOSTFILE
    if given is None and sheet.read(path) is None:
        _this_machine(sheet)
        return
    what = given.written if given else f"{path}, which deepspeed reads by itself"
    if not (found := sheet.hostfile(what, path)):
        return
    sheet.ssh(what, found)
    chosen = _chosen(sheet, {host.name: host.slots or 1 for host in found})
    if sheet.refused:
        return
    if nodes := hosts.get("--num-nodes"):
        count = sheet.whole(nodes.written, nodes.value)
        if count is not None and count <= len(chosen):
            chosen = dict(list(chosen.items())[:count])
        elif count is not None:
            sheet.refuse(nodes.written, f"{path} has {len(chosen)} hosts")
    sheet.key(nodes.written if nodes else what, "nodes", len(chosen))
    if gpus := hosts.get("--num-gpus"):
        sheet.number(gpus.written, "gpus_per_node", gpus.value)
    elif len(set(chosen.values())) > 1:
        uneven = ", ".join(f"{name}: {count}" for name, count in chosen.items())
        sheet.refuse(what, f"every node has as many ranks as the others, but {uneven}")
    else:
        sheet.key(f"slots of {path}", "gpus_per_node", next(iter(chosen.values())))


def _this_machine(sheet: Sheet) -> None:
    hosts = sheet.hosts
    for name, key in (("--num-nodes", "nodes"), ("--num-gpus", "gpus_per_node")):
        if used := hosts.get(name):
            sheet.number(used.written, key, used.value)
    for name in ("--include", "--exclude"):
        if used := hosts.get(name):
            host, _, numbers = used.value.partition(":")
            if host not in _LOCAL or not re.fullmatch(r"\d+(,\d+)*", numbers):
                sheet.refuse(used.written, f"there is no hostfile: {DEFAULT_HOSTFILE}")
            elif name == "--exclude":
                sheet.refuse(used.written, "name the GPUs that are wanted with --include")
            else:
                sheet.key(used.written, "gpus_per_node", len(set(numbers.split(","))))
                sheet.yours(used.written, f"export CUDA_VISIBLE_DEVICES={numbers} where you submit")
    if not hosts:
        sheet.key("no hostfile", "gpus_per_node", "auto")


def _chosen(sheet: Sheet, slots: dict[str, int]) -> dict[str, int]:
    """Slots of the hosts that ``--include`` or ``--exclude`` leaves."""
    for key in ("include", "exclude"):
        if (used := sheet.hosts.get(f"--{key}")) is None:
            continue
        named = {}
        for part in used.value.split("@"):
            host, colon, numbers = part.strip().partition(":")
            if host not in slots or (colon and not re.fullmatch(r"\d+(,\d+)*", numbers)):
                sheet.refuse(used.written, f"{part} is not a host of the hostfile")
                return slots
            named[host] = len(set(numbers.split(","))) if colon else slots[host]
        sheet.entry(used.written, key, used.value)
        left = {
            host: named.get(host, 0) if key == "include" else count - named.get(host, 0)
            for host, count in slots.items()
        }
        slots = {host: count for host, count in left.items() if count > 0}
        if not slots:
            sheet.refuse(used.written, "leaves no host")
    return slots
