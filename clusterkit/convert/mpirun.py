"""``mpirun`` of Open MPI, and the options of other MPIs that mean the same. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from clusterkit.cluster import Host
from clusterkit.convert.draft import Draft
from clusterkit.convert.options import apply_option, assigned
from clusterkit.hosts.addresses import host_from
from clusterkit.jobfile.command import Used

_HOSTS = ("-H", "-host", "--host")
_FILES = ("-hostfile", "--hostfile", "-machinefile", "--machinefile")
_BINDS = ("--map-by", "-map-by", "--bind-to", "-bind-to", "--rank-by")


def option(draft: Draft, used: Used) -> None:
    """Convert one option of the command."""
    name, value = used.name, used.value
    if name in _HOSTS:
        found: dict[str, int] = {}
        for each in value.split(","):
            host, colon, count = each.strip().partition(":")
            if not host or (colon and not count.isdecimal()):
                draft.refuse(used.written, f"{each} is not HOST or HOST:SLOTS")
                return
            found[host] = found.get(host, 0) + (int(count) if colon else 1)
        hosts = [replace(host_from(name), slots=count) for name, count in found.items()]
        _hosts(draft, used, hosts)
    elif name in _FILES:
        _hosts(draft, used, draft.hostfile(used.written, value))
    elif used.meaning == "ranks":
        draft.hosts["ranks"] = used
    elif name == "-x":
        variable, equals, text = value.partition("=")
        if variable == "PATH" and not equals:
            draft.drop(used.written, "PATH begins with the folder of the ranks' Python")
        elif equals:
            assigned(draft, used.written, variable, text)
        else:
            draft.secret(used.written, variable)
    elif name in ("-genv",):
        variable, _, text = value.partition("=")
        assigned(draft, used.written, variable, text)
    elif name in ("-mca", "--mca", "-gmca", "--gmca"):
        variable, _, text = value.partition("=")
        draft.env(used.written, f"OMPI_MCA_{variable}", text)
    elif name in ("-wdir", "--wdir", "-wd"):
        draft.key(used.written, "workdir", value)
    elif name in _BINDS and value in ("slot", "none", "node", "core", "ppr:1:node", "socket"):
        if value in ("slot", "none"):
            draft.drop(used.written, "ranks are placed by slot and not bound")
        else:
            draft.refuse(used.written, "ranks are placed by slot and not bound to cores")
    else:
        apply_option(draft, used)


def _hosts(draft: Draft, used: Used, hosts: list[Host]) -> None:
    draft.slots = {host.name: host.slots or 1 for host in hosts}
    if list(draft.slots) in (["localhost"], ["127.0.0.1"]):
        draft.drop(used.written, "this machine is the default")
    elif hosts:
        draft.ssh(used.written, hosts)


def finish(draft: Draft) -> None:
    """Work out nodes and ranks from all options together. mpirun fills one host after another."""
    used, slots = draft.hosts.get("ranks"), draft.slots
    ranks = None if used is None else draft.integer(used.written, used.value)
    origin = used.written if used else "slots of the hosts"
    if used is not None and ranks is None:
        return
    per_node = draft.job.get("gpus_per_node")
    if not slots:
        if ranks is None:
            if per_node is None:
                draft.refuse("mpirun", "without -np it starts a rank per core: write the number")
            return
        if per_node is None:
            draft.key(origin, "gpus_per_node", ranks)
        elif ranks % int(per_node):
            draft.refuse(origin, f"{ranks} ranks cannot be divided by {per_node} per node")
        else:
            draft.key(origin, "nodes", ranks // int(per_node))
        return
    left = sum(slots.values()) if ranks is None else ranks
    if per_node is not None:
        filled = [int(per_node)] * (left // int(per_node) if ranks is not None else len(slots))
    else:
        filled = []
        for count in slots.values():
            if left > 0:
                filled.append(min(count, left))
                left -= count
    if left > 0 and per_node is None and ranks is not None and sum(filled) < ranks:
        draft.refuse(origin, f"the hosts have {sum(slots.values())} slots")
    elif len(set(filled)) != 1 or len(filled) > len(slots):
        shown = ", ".join(map(str, filled)) or "none"
        draft.refuse(origin, f"every node has as many ranks as the others, but here: {shown}")
    else:
        draft.key(origin, "nodes", len(filled))
        draft.key(origin, "gpus_per_node", filled[0])
