"""Is the rendezvous port free on the head, and if not, who has it?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from clusterkit.doctor.base import Process, Verdict, end_processes, fail, ok
from clusterkit.doctor.check import Answers, Check, Script
from clusterkit.doctor.driver import text_of, user_of


class PortSeen(Struct):
    """Whether the port can be had, and who has it otherwise."""

    port: int
    error: str | None
    taken: bool
    holders: list[Process]
    me: str = ""
    """The user who asked."""


def collect(given: dict[str, Any]) -> Any:
    import errno
    import glob
    import os
    import random
    import socket

    def refused(port: int) -> Any:
        """The error that listening there gives, or None."""
        for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
            try:
                with socket.socket(family, socket.SOCK_STREAM) as probe:
                    # As torch does it: a port that only waits for old packets can be had.
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    if family == socket.AF_INET6:
                        probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    probe.bind((address, port))
                    probe.listen(1)
            except OSError as error:
                if family == socket.AF_INET or error.errno == errno.EADDRINUSE:
                    return error
        return None

    wanted = given["port"]
    # Below Linux's range for outgoing connections; at random, so that two at a time differ.
    ports = random.sample(range(20000, 32000), 200) if wanted is None else [wanted]
    port = next((port for port in ports if refused(port) is None), ports[0])
    problem = refused(port)
    if problem is None:
        return {"port": port, "error": None, "taken": False, "holders": []}
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in text_of(table).splitlines()[1:]:
            cells = line.split()
            if int(cells[1].rpartition(":")[2], 16) == port and cells[3] == "0A":
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
        "port": port,
        "error": problem.strerror or str(problem),
        "taken": problem.errno == errno.EADDRINUSE,
        "holders": list(holders.values()),
        "me": user_of(os.geteuid()),
    }


PORT = Script("port", collect, PortSeen, where="head", safe=True)


def judge(answers: Answers) -> Iterator[Verdict]:
    wanted = answers.subject.port
    for host, port in answers.read(PORT).items():
        if port.error is None:
            yield ok(host, f"{wanted} is free")
        elif not port.taken:
            yield fail(host, f"port {wanted} cannot be used: {port.error}", "port: auto")
        else:
            who = ", ".join(f"{h.command} (process {h.pid} of {h.user})" for h in port.holders)
            cause = f"port {wanted} is in use by {who or 'a process that only root can see'}"
            mend = end_processes(port.holders, port.me) or f"sudo ss -ltnp 'sport = :{wanted}'"
            yield fail(host, cause, f"{mend}, or `port: auto`")


CHECK = Check("port", "The rendezvous port is free on the head.", judge, (PORT,))
