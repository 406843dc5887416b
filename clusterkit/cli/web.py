"""clusterkit web"""

from __future__ import annotations

import ipaddress
from pathlib import Path

import click

from clusterkit import api
from clusterkit.cli.common import complete_run
from clusterkit.ui.spinner import spinner


@click.command("web", epilog="Example: clusterkit web last; clusterkit web last -o report.html")
@click.argument("runs", metavar="[RUN]...", nargs=-1, shell_complete=complete_run)
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS",
              help="Where to listen; by default on this machine alone.")  # fmt: skip
@click.option("--port", default=0, show_default=True, type=click.IntRange(0, 65535), metavar="N",
              help="0: one that is free.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(), metavar="FILE",
              help="Write one HTML file that works offline, instead of serving.")  # fmt: skip
def command(runs: tuple[str, ...], host: str, port: int, output: str | None) -> None:
    """Show runs live in a browser, or write them into one HTML file.

    RUN is a run's id, the beginning of one, or `last`; several are drawn on one chart. The
    address that is printed holds a token: whoever has it may read logs and cancel runs. From a
    laptop, `ssh -L 8000:127.0.0.1:PORT HOST` brings a server of another machine here.
    """
    if output is not None:
        with spinner(f"writing {output}"):
            written = api.report(runs or ("last",), Path(output))
        click.echo(written)
        return
    if not _is_loopback(host):
        click.echo(f"note: whoever reaches {host} may ask, and nothing is encrypted", err=True)
    with api.web(runs, host=host, port=port) as server:
        click.echo(server.url)
        click.echo("Ctrl-C ends it; the runs go on.", err=True)
        server.serve_forever()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
