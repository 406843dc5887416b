"""clusterkit convert"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from clusterkit import api, convert, shell
from clusterkit.cli.common import TrailingVerb, json_option, print_json, verb
from clusterkit.convert.files import add_cluster
from clusterkit.files import check_output, write_atomic
from clusterkit.ui.formatting import terminal_filter


@verb(
    "convert",
    "clusterkit convert train.sbatch -o job.yaml",
    "clusterkit convert -- torchrun --nproc-per-node 8 train.py --lr 1",
    cls=TrailingVerb,
)
@click.argument("file", required=False, type=click.Path())
@click.option("--from", "kind", type=click.Choice(list(convert.KINDS)),
              metavar="KIND",
              help=f"Kind of FILE, if not recognized: {', '.join(convert.KINDS)}.")  # fmt: skip
@click.option(
    "-o", "--output", "out", metavar="FILE", type=click.Path(), help="Write the job file to FILE."
)
@click.option("--clusters-out", metavar="FILE", type=click.Path(),
              help="Write the entry of the cluster file to FILE, or add it there.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace an existing job file.")
@json_option
def command(
    file: str | None,
    trailing: list[str],
    kind: str | None,
    out: str | None,
    clusters_out: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write a job file that does what a command, script or manifest of another tool does.

    FILE is a batch script, a manifest or a config; a command goes after --. Prints on stderr how
    every option was converted. An option without an equivalent is an error that names its line,
    and nothing is written. If the cluster file needs an entry, too, it is added to the job file as
    a comment, unless --clusters-out is given.
    """
    if file is None and not trailing:
        raise click.UsageError("Give a file, or a command after --.")
    if out is not None:
        check_output(Path(out), force=force)
    if clusters_out is not None:
        check_output(Path(clusters_out))
    found = api.convert(file, trailing, kind=kind)
    clean = terminal_filter(sys.stderr)
    for note in found.notes:
        click.echo(clean(str(note)), err=True)
    call = shell.join(["clusterkit", "convert", *([file] if file else ["--", *trailing])])
    text = found.job_text(f"Written by: {call}") if found.job is not None else ""
    if found.cluster is not None and not text:
        text = found.cluster_text()
    elif found.cluster is not None and clusters_out is None:
        lines = ["For clusters.yaml:", *found.cluster_text().splitlines()]
        text += "".join(f"# {line}\n" for line in lines)
    if clusters_out is not None and found.cluster is not None:
        add_cluster(found.cluster, clusters_out)
        click.echo(f"cluster {next(iter(found.cluster))} written to {clusters_out}", err=True)
    if as_json:
        print_json(found)
    elif out is None:
        click.echo(text, nl=False)
    if out is not None:
        write_atomic(Path(out), text.encode(), output=True)
        cluster = ["--cluster", next(iter(found.cluster))] if found.cluster else []
        next_step = shell.join(["clusterkit", "plan", out, *cluster])
        click.echo(f"job written to {out}; next: {next_step}", err=True)
