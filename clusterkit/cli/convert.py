"""clusterkit convert"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from clusterkit import api, convert, shell
from clusterkit.cli.common import COMMAND, WordsCommand, json_option, print_json
from clusterkit.convert.files import add_cluster
from clusterkit.errors import BadInput
from clusterkit.files import write_atomic
from clusterkit.ui.formatting import terminal_filter


@click.command(
    "convert",
    cls=WordsCommand,
    epilog="Examples: clusterkit convert train.sbatch -o job.yaml;  "
    "clusterkit convert -- torchrun --nproc-per-node 8 train.py --lr 1",
)
@click.argument("file", required=False, type=click.Path())
@click.option("--from", "kind", type=click.Choice(list(convert.KINDS)),
              help="What FILE is, where it does not say so.")  # fmt: skip
@click.option("-o", "--out", metavar="FILE", type=click.Path(), help="Write the job file there.")
@click.option("--clusters-out", metavar="FILE", type=click.Path(),
              help="Write the cluster's entry there, or add it to that file.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace a job file that exists.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    file: str | None,
    kind: str | None,
    out: str | None,
    clusters_out: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write a job file that does what a command line, script or manifest of another tool does.

    What became of every option is said on stderr; one that has no equivalent is an error that
    names its line, and nothing is written. An entry for the cluster file, where there is one,
    follows the job as a comment, unless --clusters-out says where it goes.
    """
    words = ctx.meta.get(COMMAND, ())
    if file is None and not words:
        raise click.UsageError("Give a file, or a command after --.", ctx)
    found = api.convert(file, words, kind=kind)
    shown = terminal_filter(sys.stderr)
    for note in found.notes:
        click.echo(shown(str(note)), err=True)
    what = shell.join(["clusterkit", "convert", *([file] if file else ["--", *words])])
    text = found.job_text(f"Written by: {what}") if found.job is not None else ""
    if found.cluster is not None and not text:
        text = found.cluster_text()
    elif found.cluster is not None and clusters_out is None:
        lines = ["For clusters.yaml:", *found.cluster_text().splitlines()]
        text += "".join(f"# {line}\n" for line in lines)
    if out is not None and Path(out).exists() and not force:
        raise BadInput(f"{out} exists already", hint="--force replaces it")
    if clusters_out is not None and found.cluster is not None:
        add_cluster(found.cluster, clusters_out)
        click.echo(f"cluster {next(iter(found.cluster))} written to {clusters_out}", err=True)
    if as_json:
        print_json(found)
    elif out is None:
        click.echo(text, nl=False)
    if out is not None:
        write_atomic(Path(out), text.encode())
        cluster = ["--cluster", next(iter(found.cluster))] if found.cluster else []
        following = shell.join(["clusterkit", "plan", out, *cluster])
        click.echo(f"job written to {out}; next: {following}", err=True)
