"""clusterkit forward"""

from __future__ import annotations

import re

import click

from clusterkit import api
from clusterkit.cli.common import run_argument, verb


def _parse_ports(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, int]:
    match = re.fullmatch(r"(?:(\d{1,5}):)?(\d{1,5})", value)
    local, port = (int(match[1] or 0), int(match[2])) if match else (0, 0)
    if not (0 < port < 1 << 16 and local < 1 << 16):
        raise click.BadParameter(f"{value!r} is not PORT or LOCAL:PORT", ctx, param)
    return local, port


@verb("forward", "clusterkit forward last 6006", "clusterkit forward last 5678:5678 --node 1")
@run_argument
@click.argument("ports", metavar="[LOCAL:]PORT", callback=_parse_ports)
@click.option("--node", type=click.IntRange(0), metavar="N", help="Of this node. Default: 0.")
def command(run: str, ports: tuple[int, int], node: int | None) -> None:
    """Make a port of a node one of this machine, until Ctrl-C.

    Prints the address, which only this machine can connect to: LOCAL, or a free port. On the node a
    program listens on PORT, on the loopback or on all addresses.
    """
    local, port = ports

    def report(words: str) -> None:
        click.echo(f"note: {words}", err=True)

    with api.get(run).forward(port, local=local, node=node, report=report) as forward:
        click.echo(f"127.0.0.1:{forward.port}")
        click.echo(f"This is port {port} of node {node or 0}. Ctrl-C ends it.", err=True)
        forward.serve_forever()
