"""What several verbs share: the options that shape a plan, run names, JSON on stdout."""

from __future__ import annotations

import math
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from clusterkit.errors import BadInput

if TYPE_CHECKING:
    from clusterkit.jobfile.catalogue import CatalogueEntry

Function = TypeVar("Function", bound=Callable[..., Any])

COMMAND = "clusterkit.command"
"""Key in ``ctx.meta`` for the words after ``--``."""


class WordsCommand(click.Command):
    """A command that takes words after ``--`` as they are, whatever options they have."""

    words = "COMMAND..."
    """What they are, for ``--help``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            split = args.index("--")
            args, ctx.meta[COMMAND] = args[:split], args[split + 1 :]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), f"[-- {self.words}]"]


class PlanCommand(WordsCommand):
    """A command that takes a job file, and words after ``--``: see `job_of`."""

    words = "ARGS...|COMMAND..."

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from clusterkit import shell
        from clusterkit.jobfile.command import instead_of_a_job

        split = args.index("--") if "--" in args else len(args)
        after = args[split + 1 :]
        own, others = self._divided(ctx, args[:split])
        if others and (words := instead_of_a_job([*others, *after])) is not None:
            raise BadInput(
                f"{others[0]} is not a job file: a command stands after --",
                hint=shell.join(["clusterkit", str(ctx.info_name), *own, "--", *words]),
            )
        return super().parse_args(ctx, args)

    def _divided(self, ctx: click.Context, args: Sequence[str]) -> tuple[list[str], list[str]]:
        """This command's options with their values, and all other words.

        Click's own parser would read `-epochs`, which is the program's, as `-e -p -o chs`.
        """
        takes = {
            name: isinstance(param, click.Option) and not (param.is_flag or param.count)
            for param in self.get_params(ctx)
            for name in (*param.opts, *param.secondary_opts)
        }
        own, others = [], []
        rest = list(args)
        while rest:
            word = rest.pop(0)
            name, equals, _ = word.partition("=")
            short = word[:2] if word[:2] in takes and not word.startswith("--") else ""
            if not word.startswith("-") or not (name in takes or short):
                others.append(word)
                continue
            own.append(word)
            if rest and takes.get(word, False) and not equals:
                own.append(rest.pop(0))
        return own, others


def complete_run(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Run ids that begin so."""
    from clusterkit.run import folder as run_folder

    names = [folder.run_id for folder in run_folder.all_runs()]
    return [name for name in [*names, run_folder.LAST] if name.startswith(incomplete)]


def complete_cluster(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Cluster names that begin so."""
    from clusterkit.jobfile import loader

    return [name for name in loader.cluster_names() if name.startswith(incomplete)]


run_argument = click.argument("run", metavar="RUN", shell_complete=complete_run)
"""A run's id, the beginning of one, or ``last``."""

runs_argument = click.argument(
    "runs", metavar="RUN...", nargs=-1, required=True, shell_complete=complete_run
)

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")


def options(*each: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """Several options as one decorator, in the order in which ``--help`` shows them."""

    def apply(function: Function) -> Function:
        for option in reversed(each):
            function = option(function)
        return function

    return apply


def cluster_options(meaning: str, default: str | None = None) -> Callable[[Function], Function]:
    """``--cluster``, which means ``meaning``, and ``--clusters``."""
    name = click.option("-c", "--cluster", default=default, show_default=True, metavar="NAME",
                        help=meaning, shell_complete=complete_cluster)  # fmt: skip
    file = click.option("--clusters", "clusters_file", metavar="FILE", type=click.Path(),
                        help="Cluster file; by default clusters.yaml here or above.")  # fmt: skip
    return options(name, file)


set_option = click.option("--set", "settings", multiple=True, metavar="KEY=VALUE",
                          help="Change a key of the job file, e.g. batch.micro=4.")  # fmt: skip
facts_option = click.option("--facts", "facts_file", metavar="FILE", type=click.Path(),
                            help="Facts of an earlier run (facts.json) instead of probing."
                            )  # fmt: skip


host_options = options(
    click.option("--include", metavar="HOSTS", help="Only these hosts (and GPUs): h1@h2:0,1."),
    click.option("--exclude", metavar="HOSTS", help="All hosts (and GPUs) but these."),
)
plan_options = options(
    click.argument("job", required=False, type=click.Path()),
    cluster_options("Entry of the cluster file.", "local"),
    click.option("-n", "--nodes", metavar="N|MIN:MAX", help="How many nodes."),
    click.option("-g", "--gpus", type=int, metavar="N", help="Ranks per node."),
    set_option,
    host_options,
    facts_option,
    click.option("--run-id", metavar="ID", help="Instead of a new id."),
    click.option("--no-doctor", "doctor", is_flag=True, flag_value=False, default=True,
                 help="Do not check first whether the hosts are fit."),
)  # fmt: skip
"""What `submit` and `plan` have in common."""


def job_of(ctx: click.Context, job: str | None) -> dict[str, Any]:
    """``job`` and ``more_args`` for `clusterkit.api.prepare`.

    What stands after ``--`` is more arguments for a job file's program, or without a job file
    the command itself.

    Raises:
        click.UsageError: neither is there.
    """
    words: list[str] | None = ctx.meta.get(COMMAND)
    if job is not None:
        return {"job": job, "more_args": words or ()}
    if words is None:
        raise click.UsageError("Give a job file, or a command after --.", ctx)
    return {"job": words}


def prepare_options(facts_file: str | None, **options: Any) -> dict[str, Any]:
    """Options for `clusterkit.api.prepare` from those of `plan_options`."""
    if facts_file is not None:
        from clusterkit.cluster import Facts
        from clusterkit.files import read_file, reason

        try:
            options["facts"] = msgspec.json.decode(read_file(facts_file, 64 << 20), type=Facts)
        except OSError as error:
            raise BadInput(f"--facts {facts_file}: {reason(error)}") from None
        except msgspec.MsgspecError as error:
            raise BadInput(f"--facts {facts_file}: not a facts.json: {error}") from None
    return options


def print_json(document: Any) -> None:
    """A struct, or a list of them, as indented JSON on stdout."""
    click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


STATE_COLOURS = {
    "SUCCEEDED": "green", "FAILED": "red", "RUNNING": "cyan", "RESTARTING": "yellow",
    "PENDING": "yellow", "CANCELLED": "magenta", "UNKNOWN": "red",
}  # fmt: skip


def table(
    rows: Iterable[Iterable[object]],
    header: Sequence[str],
    *,
    indent: int = 0,
    numbers: bool = False,
) -> str:
    """Columns two spaces apart, wrapped to the terminal less ``indent``, aligned to the left, or of
    ``numbers`` all but the first to the right. None is shown as ``-``."""
    from clusterkit.ui.formatting import terminal_filter

    shown = terminal_filter(sys.stdout, colours=False)
    everything = [tuple(header), *(tuple(shown(_cell(each)) for each in row) for row in rows)]
    gap, widths = _layout(everything, _room() - indent)
    lines = []
    for row in everything:
        cells = [
            [cell] if len(cell) <= width else textwrap.wrap(cell, width)
            for cell, width in zip(row, widths, strict=True)
        ]
        for parts in zip_longest(*cells, fillvalue=""):
            padded = [
                part.rjust(width) if numbers and column else part.ljust(width)
                for column, (part, width) in enumerate(zip(parts, widths, strict=True))
            ]
            lines.append((" " * gap).join(padded).rstrip())
    return "\n".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "-" if value is None else str(value)


def catalogue_table(jobs: Sequence[CatalogueEntry]) -> str:
    """Job files, and what each needs."""
    rows = [
        (job.name, job.nodes, job.ranks, job.device, ", ".join(job.packages), job.description)
        for job in jobs
    ]
    return table(rows, ("JOB", "NODES", "RANKS", "DEVICE", "PACKAGES", "WHAT IT DOES"))


def _room() -> float:
    """How wide a table may be: a file or pipe has no width, unless COLUMNS gives it one."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return shutil.get_terminal_size().columns
    return math.inf


def _layout(rows: Sequence[Sequence[str]], room: float) -> tuple[int, list[int]]:
    """The space between columns, and the widths with which they fit.

    The widest give way first, down to their longest words. Only if nothing else helps are words
    broken, down to 4 characters: with less nothing is readable, and the table does not fit.
    """
    columns = list(zip(*rows, strict=True))
    natural = [max(map(len, column)) for column in columns]
    words = [
        max((len(word) for cell in column for word in cell.replace("-", "- ").split()), default=0)
        for column in columns
    ]
    widths = list(natural)
    for gap, size, least in (
        (2, widths, words),
        (1, widths, words),
        (1, natural, [4] * len(words)),
    ):
        while sum(widths) + gap * (len(widths) - 1) > room:
            able = [number for number, width in enumerate(widths) if width > least[number]]
            if not able:
                break
            widths[max(able, key=size.__getitem__)] -= 1
        else:
            break
    return gap, widths
