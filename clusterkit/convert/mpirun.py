"""``mpirun`` of Open MPI, and what other MPIs call the same. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from clusterkit.addresses import host_from
from clusterkit.cluster import Host
from clusterkit.convert.options import assigned, by_meaning
from clusterkit.convert.sheet import Sheet
from clusterkit.jobfile.command import Used

_HOSTS = ("-H", "-host", "--host")
_FILES = ("-hostfile", "--hostfile", "-machinefile", "--machinefile")
_BINDS = ("--map-by", "-map-by", "--bind-to", "-bind-to", "--rank-by")


def option(sheet: Sheet, used: Used) -> None:
    """One option of the command."""
    name, value = used.name, used.value
    if name in _HOSTS:
        found: dict[str, int] = {}
        for each in value.split(","):
            host, colon, count = each.strip().partition(":")
            if not host or (colon and not count.isdecimal()):
                sheet.refuse(used.written, f"{each} is not HOST or HOST:SLOTS")
                return
            found[host] = found.get(host, 0) + (int(count) if colon else 1)
        hosts = [replace(host_from(name), slots=count) for name, count in found.items()]
        _hosts(sheet, used, hosts)
    elif name in _FILES:
        _hosts(sheet, used, sheet.hostfile(used.written, value))
    elif used.meaning == "ranks":
        sheet.hosts["ranks"] = used
    elif name == "-x":
        variable, equals, text = value.partition("=")
        if variable == "PATH" and not equals:
            sheet.drop(used.written, "PATH begins with the folder of the ranks' Python")
        elif equals:
            assigned(sheet, used.written, variable, text)
        else:
            sheet.secret(used.written, variable)
    elif name in ("-genv",):
        variable, _, text = value.partition("=")
        assigned(sheet, used.written, variable, text)
    elif name in ("-mca", "--mca", "-gmca", "--gmca"):
        variable, _, text = value.partition("=")
        sheet.env(used.written, f"OMPI_MCA_{variable}", text)
    elif name in ("-wdir", "--wdir", "-wd"):
        sheet.key(used.written, "workdir", value)
    elif name in _BINDS and value in ("slot", "none", "node", "core", "ppr:1:node", "socket"):
        if value in ("slot", "none"):
            sheet.drop(used.written, "ranks are placed by slot and not bound")
        else:
            sheet.refuse(used.written, "ranks are placed by slot and not bound to cores")
    else:
        by_meaning(sheet, used)


def _hosts(sheet: Sheet, used: Used, hosts: list[Host]) -> None:
    sheet.slots = {host.name: host.slots or 1 for host in hosts}
    if list(sheet.slots) in (["localhost"], ["127.0.0.1"]):
        sheet.drop(used.written, "this machine, as without it")
    elif hosts:
        sheet.ssh(used.written, hosts)


def finish(sheet: Sheet) -> None:
    """Nodes and ranks, of all options together: mpirun fills one host after the other."""
    used, slots = sheet.hosts.get("ranks"), sheet.slots
    ranks = None if used is None else sheet.whole(used.written, used.value)
    what = used.written if used else "slots of the hosts"
    if used is not None and ranks is None:
        return
    per_node = sheet.job.get("gpus_per_node")
    if not slots:
        if ranks is None:
            if per_node is None:
                sheet.refuse("mpirun", "without -np it starts a rank per core: write the number")
            return
        if per_node is None:
            sheet.key(what, "gpus_per_node", ranks)
        elif ranks % int(per_node):
            sheet.refuse(what, f"{ranks} ranks cannot be divided by {per_node} per node")
        else:
            sheet.key(what, "nodes", ranks // int(per_node))
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
        sheet.refuse(what, f"the hosts have {sum(slots.values())} slots")
    elif len(set(filled)) != 1 or len(filled) > len(slots):
        shown = ", ".join(map(str, filled)) or "none"
        sheet.refuse(what, f"every node has as many ranks as the others, but here: {shown}")
    else:
        sheet.key(what, "nodes", len(filled))
        sheet.key(what, "gpus_per_node", filled[0])
