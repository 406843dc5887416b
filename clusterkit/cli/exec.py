"""clusterkit exec"""

from __future__ import annotations

from collections.abc import Sequence

import click

from clusterkit import api
from clusterkit.cli.common import Verb, run_argument, verb
from clusterkit.errors import BadInput


class _CommandVerb(Verb):
    """A command whose words from the second argument on, or after ``--``, are ``trailing``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        flags = {name for each in self.get_params(ctx) for name in each.opts
                 if isinstance(each, click.Option) and each.is_flag}  # fmt: skip
        own: list[str] = []
        rest, runs = list(args), 0
        while rest and rest[0] != "--" and (rest[0].startswith("-") or not runs):
            word = rest.pop(0)
            own.append(word)
            if not word.startswith("-"):
                runs += 1
            elif word not in flags and "=" not in word and word.startswith("--") and rest:
                own.append(rest.pop(0))
        ctx.params["trailing"] = rest[1:] if rest[:1] == ["--"] else rest
        return super().parse_args(ctx, own)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[--] COMMAND..."]


@verb(
    "exec",
    "clusterkit exec last --all nvidia-smi -L",
    "clusterkit exec last --rank 3 -- python -c 'import os; print(os.environ[\"LOCAL_RANK\"])'",
    cls=_CommandVerb,
)
@run_argument
@click.option("--node", type=click.IntRange(0), metavar="N", help="On this node. Default: 0.")
@click.option("--rank", type=click.IntRange(0), metavar="R",
              help="On this rank's node, with its environment.")  # fmt: skip
@click.option("--all", "everywhere", is_flag=True, help="On all nodes that run, at once.")
@click.option("-t", "--tty", "terminal", is_flag=True, help="Give the command a terminal.")
def command(
    run: str,
    node: int | None,
    rank: int | None,
    everywhere: bool,
    terminal: bool,
    trailing: Sequence[str],
) -> int:
    """Run a command beside the ranks of a run.

    It runs as the user of the ranks, in their container, folder and environment: with --rank that
    of this rank, otherwise of its node. Standard input, signals and the exit code are passed on;
    125 is a refusal of clusterkit's. It ends when this terminal does, or the run is cancelled.

    With --all it has no input, each line begins with its node, and the exit code is the highest of
    all nodes.
    """
    if not trailing:
        raise click.UsageError("Give a command after the run.")
    found = api.get(run)
    if everywhere:
        if node is not None or rank is not None or terminal:
            raise BadInput("--all: not together with --node, --rank or --tty")
        return found.exec_on_all(trailing, lambda error: click.echo(f"error: {error}", err=True))
    return found.exec_here(trailing, node=node, rank=rank, terminal=terminal)
