"""Ports on hosts that other programs use as well: one that was free may be taken by now."""

from __future__ import annotations

import msgspec

from clusterkit.cluster import ClusterSpec, Facts
from clusterkit.errors import ClusterkitError
from clusterkit.transport import Transport

_LAST_PORT = 65535


def watch_port(cluster: ClusterSpec, host: str, port: int, transport: Transport) -> int:
    """Where the nodes watch each other, beside the run's port on that host."""
    if cluster.port == "auto":
        return port + 1  # beside one that was chosen it is free: that saves a round trip
    return transport.free_port(host, port + 1 if port < _LAST_PORT else port - 1)


def ports_taken(
    cluster: ClusterSpec, facts: Facts, transport: Transport
) -> tuple[Facts, str] | None:
    """Facts with other ports where one of theirs has been taken on the first host meanwhile, and a
    sentence about it; None: they are still free.

    Raises:
        ClusterkitError: the cluster entry asks for the port that is taken.
    """
    host = facts.hosts[0].host
    free = transport.free_port(host, facts.port)
    if free != facts.port:
        return moved_port(cluster, facts, free, f"port {facts.port} was taken meanwhile")
    if (watch := facts.watch_port) is None:
        return None
    free = transport.free_port(host, watch)
    if free == watch:
        return None
    words = f"port {watch} was taken meanwhile; the nodes watch each other at {free}"
    return msgspec.structs.replace(facts, watch_port=free), words


def moved_port(cluster: ClusterSpec, facts: Facts, port: int, why: str) -> tuple[Facts, str]:
    """Facts with this port, and a sentence that says why.

    Raises:
        ClusterkitError: the cluster entry asks for the one that they have.
    """
    if cluster.port != "auto":
        raise ClusterkitError(
            f"{why}, and the cluster entry asks for that one",
            hint="port: auto, or end the program that listens there",
        )
    moved = msgspec.structs.replace(
        facts,
        port=port,
        port_origin=f"{why}; free when probed again",
        watch_port=facts.watch_port and port + 1,
    )
    return moved, f"{why}; {port} chosen instead"
