"""The TCP ports of a run: one for the rendezvous, one on which the agents watch each other."""

from __future__ import annotations

from typing import Literal

import msgspec

from clusterkit.cluster import ClusterSpec, Facts
from clusterkit.errors import ClusterkitError, PortTaken
from clusterkit.transport import Transport

_LAST_PORT = 65535


def default_ports(port: int | Literal["auto"]) -> tuple[int, int]:
    """Return both ports where each node has an address of its own, so that nothing else listens.

    Args:
        port: of the cluster entry.
    """
    chosen = 29500 if port == "auto" else port
    return chosen, 29501 if chosen != 29501 else 29502


def free_ports(
    cluster: ClusterSpec, host: str, transport: Transport, *, shown_as: str
) -> tuple[int, int]:
    """Return both ports, free on the host: the cluster entry's, or others.

    Args:
        shown_as: the host's name in the error.

    Raises:
        PortTaken: the cluster entry's port is not free.
    """
    port = transport.free_port(host, None if cluster.port == "auto" else cluster.port)
    if cluster.port not in ("auto", port):
        raise PortTaken(int(cluster.port), shown_as)
    return port, watch_port(cluster, host, port, transport)


def watch_port(cluster: ClusterSpec, host: str, port: int, transport: Transport) -> int:
    """Return a free port beside ``port`` on the host, on which the agents watch each other."""
    if cluster.port == "auto":
        return port + 1  # `Transport.free_port` has found it free: that saves a round trip
    return transport.free_port(host, port + 1 if port < _LAST_PORT else port - 1)


def replace_taken_ports(
    cluster: ClusterSpec, facts: Facts, transport: Transport
) -> tuple[Facts, str] | None:
    """Look whether the run's ports are still free on its first host.

    Returns:
        Facts with other ports, and a sentence for the user about the change; None: both are free.

    Raises:
        ClusterkitError: the port is taken, and the cluster entry asks for that one.
    """
    host = facts.hosts[0].host
    free = transport.free_port(host, facts.port)
    if free != facts.port:
        return move_port(cluster, facts, free, f"port {facts.port} was taken meanwhile")
    if (watch := facts.watch_port) is None:
        return None
    free = transport.free_port(host, watch)
    if free == watch:
        return None
    message = f"port {watch} was taken meanwhile; the nodes watch each other at {free}"
    return msgspec.structs.replace(facts, watch_port=free), message


def move_port(cluster: ClusterSpec, facts: Facts, port: int, reason: str) -> tuple[Facts, str]:
    """Return facts with another rendezvous port, and a sentence for the user with the reason.

    Raises:
        ClusterkitError: the cluster entry asks for the port that the facts have.
    """
    if cluster.port != "auto":
        raise ClusterkitError(
            f"{reason}, and the cluster entry asks for that one",
            hint="port: auto, or end the program that listens there",
        )
    moved = msgspec.structs.replace(
        facts,
        port=port,
        port_origin=f"{reason}; free when probed again",
        watch_port=facts.watch_port and port + 1,
    )
    return moved, f"{reason}; {port} chosen instead"
