"""clusterkit web"""

from __future__ import annotations

import ipaddress
from pathlib import Path

import click

from clusterkit import api
from clusterkit.cli.common import complete_run, verb
from clusterkit.ui.spinner import spinner


@verb("web", "clusterkit web last", "clusterkit web last -o report.html")
@click.argument("runs", metavar="[RUN]...", nargs=-1, shell_complete=complete_run)
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS",
              help="Address to listen on; by default, from this machine only.")  # fmt: skip
@click.option("--port", default=0, show_default=True, type=click.IntRange(0, 65535), metavar="N",
              help="Port to listen on; 0: any free one.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(), metavar="FILE",
              help="Write one HTML file that works offline, and start no server.")  # fmt: skip
def command(runs: tuple[str, ...], host: str, port: int, output: str | None) -> None:
    """Show runs live in a browser, or write them into one HTML file.

    RUN is a run's id, the beginning of one, or `last`; several runs are drawn on one chart. Prints
    the page's address; the token in it allows to read logs and cancel runs. To open the page of
    another machine on a laptop, forward its port: `ssh -L 8000:127.0.0.1:PORT HOST`.
    """
    if output is not None:
        with spinner(f"writing {output}"):
            written = api.report(runs or ("last",), Path(output))
        click.echo(written)
        return
    with api.web(runs, host=host, port=port) as server:
        if not _is_loopback(host):
            click.echo(
                f"note: {host} can be reached from other machines, and nothing is encrypted",
                err=True,
            )
        click.echo(server.url)
        click.echo("Ctrl-C stops the server; the runs continue.", err=True)
        server.serve_forever()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
