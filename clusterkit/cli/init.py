"""clusterkit init"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from clusterkit import backends, shell
from clusterkit.cli.common import TrailingVerb, complete_cluster, json_option, print_json, verb
from clusterkit.errors import BadInput
from clusterkit.jobfile import loader
from clusterkit.lifecycle import scaffold


def _complete_where(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    kinds = [name for name in backends.NAMES if name.startswith(incomplete)]
    return list(dict.fromkeys([*complete_cluster(ctx, param, incomplete), *kinds]))


class _Init(TrailingVerb):
    trailing_metavar = "ARGS..."


@verb(
    "init",
    "clusterkit init",
    "clusterkit init train.py --nodes 2 -- --epochs 3",
    "clusterkit init train.py --cluster ssh --hosts gpu1,gpu2",
    cls=_Init,
)
@click.argument("script", required=False, type=click.Path())
@click.option("-c", "--cluster", "where", metavar="WHERE", shell_complete=_complete_where,
              help="Where to run: local, ssh, compose, kubernetes, slurm, or an entry of "
              "clusters.yaml.")  # fmt: skip
@click.option("-n", "--nodes", metavar="N|MIN:MAX", help="Number of nodes, or a range.")
@click.option("--hosts", metavar="HOSTS", default="",
              help="For ssh: [user@]host[:port],... or an Ansible inventory file.")  # fmt: skip
@click.option("-y", "--yes", is_flag=True, help="Ask nothing, use what was found.")
@json_option
def command(
    script: str | None,
    trailing: list[str],
    where: str | None,
    nodes: str | None,
    hosts: str,
    yes: bool,
    as_json: bool,
) -> None:
    """Write a first job.yaml and clusters.yaml in this folder.

    Reads the program's source (which distributed library it uses, which arguments it needs) and
    looks at this machine (GPUs, a Python with torch, docker, kubectl, sbatch). Then asks which
    program to start, where, and on how many nodes or which hosts, unless an option answers that;
    without a terminal it asks nothing. Prints the command that starts the job. Existing files are
    not overwritten. The words after -- are arguments of the program.
    """
    asks = not yes and not as_json and sys.stdin.isatty() and sys.stderr.isatty()
    if script is None and trailing and trailing[0].endswith(".py"):
        raise BadInput(
            f"{trailing[0]} stands after --, where the program's arguments are",
            hint=shell.join(["clusterkit", "init", trailing[0], "--", *trailing[1:]]),
        )
    program = scaffold.inspect(script) if script else _program(asks)
    machine = scaffold.machine()
    known = scaffold.known_clusters()
    if where is None:
        where = _where(machine.backends, known) if asks and not hosts else None
    if asks and where and where not in known and scaffold.takes_hosts(where) and not hosts:
        hosts = click.prompt("Which hosts? [user@]host[:port],... or an inventory file", err=True)
    elif asks and nodes is None and not hosts:
        nodes = click.prompt("How many nodes?", default="1", err=True)
    made = scaffold.write(program, machine, where=where, nodes=nodes, hosts=hosts, args=trailing)
    if as_json:
        print_json(made)
        return
    for note in made.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(f"written: {', '.join(made.files)}; to start the job:", err=True)
    click.echo(shell.join(made.command))


def _program(asks: bool) -> scaffold.Script:
    if not asks:
        return scaffold.only_script()
    found = scaffold.scripts()
    for script in found[:9]:
        click.echo(f"  {script.path:<24} {script.distributed or 'on its own'}", err=True)
    first = found[0].path if found else None
    return scaffold.inspect(click.prompt("Which program?", default=first, err=True))


def _where(reachable: Sequence[str], known: Sequence[str]) -> str:
    for name in known or backends.NAMES:
        kind = backends.backend_type(loader.read_cluster(name).cluster.backend if known else name)
        missing = "" if kind.name in reachable else f" (there is no {kind.command} here)"
        click.echo(f"  {name:<12} {kind.summary}{missing}", err=True)
    names = click.Choice([*known] or backends.NAMES)
    answer: str = click.prompt(
        "Where does it run?", default="local", type=names, show_choices=False, err=True
    )
    return answer
