"""Network: interfaces, routes, and whether the rendezvous port is free."""

from __future__ import annotations

import errno
import glob
import os
import socket
from typing import Any

from clusterkit.doctor.hosts.collect import text_of, user_of
from clusterkit.hosts.host_probe import addresses, bind_error, free_port


def interfaces(context: dict[str, Any]) -> dict[str, Any]:
    def read(name: str, entry: str) -> str:
        return text_of(f"/sys/class/net/{name}/{entry}").strip()

    found: dict[str, Any] = {}
    for name in os.listdir("/sys/class/net"):
        flags, speed = read(name, "flags"), read(name, "speed")
        if not flags:
            continue  # a file of the bonding driver
        found[name] = {
            "mtu": int(read(name, "mtu") or 0),
            # IFF_UP, and with a carrier.
            "up": bool(int(flags, 16) & 1)
            and read(name, "operstate") not in ("down", "lowerlayerdown"),
            "speed": int(speed) if speed.isdigit() else None,
            "addresses": [],
        }
    for name, address in addresses():
        if name in found:
            found[name]["addresses"].append(address)
    return found


def routes(context: dict[str, Any]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name, address in context["hosts"]:
        found[name] = None
        for family in (socket.AF_INET, socket.AF_INET6):
            try:
                # Connecting a datagram socket looks up the route and sends nothing.
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect((address, 9))
                    found[name] = probe.getsockname()[0]
                    break
            except OSError:
                continue
    return found


def port(context: dict[str, Any]) -> dict[str, Any]:
    wanted = context["port"]
    number = (free_port(None) or 20000) if wanted is None else wanted
    problem = bind_error(number)
    if problem is None:
        return {"port": number, "error": None, "taken": False, "holders": []}
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in text_of(table).splitlines()[1:]:
            cells = line.split()
            if int(cells[1].rpartition(":")[2], 16) == number and cells[3] == "0A":
                sockets.add(f"socket:[{cells[9]}]")
    holders = {}
    for handle in glob.iglob("/proc/[0-9]*/fd/*"):
        try:
            if os.readlink(handle) not in sockets:
                continue
            pid = int(handle.split("/")[2])
            user = user_of(os.stat(f"/proc/{pid}").st_uid)
        except OSError:
            continue
        command = text_of(f"/proc/{pid}/cmdline").rstrip("\0").replace("\0", " ")
        holders[pid] = {"pid": pid, "user": user, "command": command[:80]}
    return {
        "port": number,
        "error": problem.strerror or str(problem),
        "taken": problem.errno == errno.EADDRINUSE,
        "holders": list(holders.values()),
        "user": user_of(os.geteuid()),
    }
