"""What several verbs share: their click class, options, run names, JSON and tables on stdout."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from clusterkit.cli import unwritable
from clusterkit.errors import BadInput, did_you_mean

if TYPE_CHECKING:
    from clusterkit.cluster import Facts
    from clusterkit.jobfile.catalogue import CatalogueEntry

Function = TypeVar("Function", bound=Callable[..., Any])


_RENAMED = {"--clusters": "--cluster-file", "--out": "--output"}
"""Options of the release before, and their names now."""


def split_words(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line at ``--``: the words of the verb, and those after it."""
    at = args.index("--") if "--" in args else len(args)
    return list(args[:at]), list(args[at + 1 :])


class Verb(click.Command):
    """A command whose help ends with its examples, a line each."""

    acts = False
    """Whether it starts, follows or ends runs: its exit code says so where its output is lost."""

    def invoke(self, ctx: click.Context) -> Any:
        if ctx.obj is not None:
            ctx.obj()
        if self.acts:
            ctx.with_resource(unwritable.tolerated("stdout"))
        return super().invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = {name for param in self.get_params(ctx) for name in param.opts}
        own, _ = split_words(args)
        words = []
        for word in own:
            name, equals, value = word.partition("=")
            new = _RENAMED.get(name)
            if new in known and name not in known:
                click.echo(f"note: {name} has a new name: {new}", err=True)
                word = f"{new}{equals}{value}"
            words.append(word)
        try:
            return super().parse_args(ctx, words + args[len(own) :])
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # click's parser forgets which command's help to name
            raise

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(f"\n{self.epilog}\n")


def verb(
    name: str, *examples: str, cls: type[Verb] = Verb, acts: bool = False
) -> Callable[[Callable[..., Any]], Verb]:
    """Make a function the command ``clusterkit NAME``; its docstring is the help.

    Args:
        acts: as `Verb.acts`.
    """
    title = "Example" if len(examples) == 1 else "Examples"
    epilog = "\n".join([f"{title}:", *(f"  {example}" for example in examples)])

    def make(function: Callable[..., Any]) -> Verb:
        command = click.command(name, cls=cls, epilog=epilog)(function)
        command.acts = acts
        return command

    return make


class TrailingVerb(Verb):
    """A command whose parameter ``trailing`` is the list of words after ``--``, options or not."""

    trailing_metavar = "COMMAND..."

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own, trailing = split_words(args)
        rest = super().parse_args(ctx, own)
        ctx.params["trailing"] = trailing
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), f"[-- {self.trailing_metavar}]"]


class JobVerb(TrailingVerb):
    """A command that takes a job, and words after ``--``.

    They are the parameter ``more_args`` after a job file, and ``job`` itself, as a command, without
    one.
    """

    trailing_metavar = "ARGS...|COMMAND..."
    job_required = True
    before_job = 0
    """How many arguments stand before the job."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from clusterkit import shell
        from clusterkit.jobfile.command import instead_of_a_job

        own, after = split_words(args)
        options, others = self._split(ctx, own)
        first, others = others[: self.before_job], others[self.before_job :]
        if others and (command := instead_of_a_job([*others, *after])) is not None:
            raise BadInput(
                f"{others[0]} is not a job file: a command stands after --",
                hint=shell.join(
                    ["clusterkit", str(ctx.info_name), *first, *options, "--", *command]
                ),
            )
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if not others or "--" in args:
                raise
            names = [name.lstrip("-") for name in self._takes_value(ctx)]
            near = did_you_mean(error.option_name.lstrip("-"), names, 0.8)
            near = near.replace("mean ", "mean --")
            name, *more = others
            line = ["clusterkit", str(ctx.info_name), *first, *options, name, "--", *more]
            raise BadInput(
                f"No such option {error.option_name!r}. {near.capitalize()}".rstrip(),
                hint=f"if it is the program's: {shell.join(line)}",
            ) from None
        trailing = ctx.params.pop("trailing")
        if ctx.params["job"] is None:
            if self.job_required and not trailing and not ctx.resilient_parsing:
                raise click.UsageError("Give a job file, or a command after --.", ctx)
            ctx.params["job"], trailing = trailing or None, ()
        ctx.params["more_args"] = trailing
        return rest

    def _takes_value(self, ctx: click.Context) -> dict[str, bool]:
        return {
            name: isinstance(param, click.Option) and not (param.is_flag or param.count)
            for param in self.get_params(ctx)
            for name in (*param.opts, *param.secondary_opts)
        }

    def _split(self, ctx: click.Context, args: Sequence[str]) -> tuple[list[str], list[str]]:
        """Split words into this command's options with their values, and all others.

        Click's own parser would read `-epochs`, which is the program's, as `-e -p -o chs`.
        """
        takes_value = self._takes_value(ctx)
        options, others = [], []
        rest = list(args)
        while rest:
            word = rest.pop(0)
            name, equals, _ = word.partition("=")
            short = word[:2] if word[:2] in takes_value and not word.startswith("--") else ""
            if not word.startswith("-") or not (name in takes_value or short):
                others.append(word)
                continue
            options.append(word)
            if rest and takes_value.get(word, False) and not equals:
                options.append(rest.pop(0))
        return options, others


def read_facts(ctx: click.Context, param: click.Parameter, path: str | None) -> Facts | None:
    """Read the file that ``--facts`` names.

    Raises:
        BadInput: it cannot be read, or is not a file of facts.
    """
    if path is None:
        return None
    from clusterkit.cluster import Facts
    from clusterkit.files import read_file, reason

    try:
        return msgspec.json.decode(read_file(path, 64 << 20), type=Facts)
    except OSError as error:
        raise BadInput(f"--facts {path}: {reason(error)}") from None
    except msgspec.MsgspecError as error:
        raise BadInput(f"--facts {path}: not a facts.json: {error}") from None


def complete_run(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the run ids that begin with what was typed."""
    from clusterkit.run.find import all_runs
    from clusterkit.run.folder import LAST

    names = [folder.run_id for folder in all_runs()]
    return [name for name in [*names, LAST] if name.startswith(incomplete)]


def complete_cluster(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the cluster names that begin with what was typed."""
    from clusterkit.jobfile import loader

    return [name for name in loader.cluster_names() if name.startswith(incomplete)]


run_argument = click.argument("run", metavar="RUN", shell_complete=complete_run)
runs_argument = click.argument(
    "runs", metavar="RUN...", nargs=-1, required=True, shell_complete=complete_run
)

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document on stdout."
)


def options(*each: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """Combine options to one decorator; ``--help`` shows them in this order."""

    def apply(function: Function) -> Function:
        for option in reversed(each):
            function = option(function)
        return function

    return apply


def cluster_options(help: str, default: str | None = None) -> Callable[[Function], Function]:
    """Return a decorator that adds ``--cluster``, with this help, and ``--cluster-file``."""
    return options(
        click.option("-c", "--cluster", default=default, show_default=True, metavar="NAME",
                     help=help, shell_complete=complete_cluster),
        click.option("--cluster-file", "clusters_file", metavar="FILE", type=click.Path(),
                     help="Cluster file. Default: the nearest clusters.yaml, here or in a folder "
                     "above."),
    )  # fmt: skip


set_option = click.option("--set", "settings", multiple=True, metavar="KEY=VALUE",
                          help="Override a key of the job file, e.g. batch.micro=4.")  # fmt: skip
gpus_option = click.option("-g", "--ranks-per-node", "--gpus", "gpus", type=int, metavar="N",
                           help="Ranks per node.")  # fmt: skip
facts_option = click.option("--facts", metavar="FILE", type=click.Path(), callback=read_facts,
                            help="Facts of an earlier run (its facts.json), instead of probing "
                            "the cluster.")  # fmt: skip
host_options = options(
    click.option("--include", metavar="HOSTS",
                 help="Use only these hosts and GPUs: h1@h2:0,1 is h1, and GPUs 0 and 1 of h2."),
    click.option("--exclude", metavar="HOSTS", help="Do not use these hosts or GPUs."),
)  # fmt: skip
nodes_option = click.option(
    "-n", "--nodes", metavar="N|MIN:MAX", help="Number of nodes, or a range."
)
doctor_option = click.option(
    "--no-doctor", "doctor", is_flag=True, flag_value=False, default=True,
    help="Do not check the hosts first.",
)  # fmt: skip
job_options = options(
    click.argument("job", required=False, type=click.Path()),
    cluster_options("Where to run: an entry of the cluster file.", "local"),
    nodes_option,
    gpus_option,
    set_option,
    host_options,
)
"""The options of `submit`, `plan` and `export`."""
rare_options = options(
    facts_option,
    click.option("--run-id", metavar="ID", help="Id of the run. Default: a new one."),
)
"""Options that hardly anybody types: they stand last."""
follow_options = options(
    click.option("-d", "--detach", is_flag=True, help="Return once the run has started."),
    click.option("--top", is_flag=True, help="Follow the run in `clusterkit top`."),
)


def print_one_or_all(documents: Sequence[Any]) -> None:
    """Print one document as itself and several as a list: what verbs of several runs print."""
    print_json(documents[0] if len(documents) == 1 else documents)


STATE_COLOURS = {
    "SUCCEEDED": "green", "FAILED": "red", "RUNNING": "cyan", "RESTARTING": "yellow",
    "PENDING": "yellow", "CANCELLED": "magenta", "UNKNOWN": "red",
}  # fmt: skip

state_option = click.option(
    "--state", "states", multiple=True, metavar="STATE",
    type=click.Choice([*STATE_COLOURS], case_sensitive=False),
    help="Only runs in this state; may be given several times.",
)  # fmt: skip


def parse_duration(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Read a duration such as ``90``, ``5m`` or ``1.5h``; return seconds."""
    if value is None:
        return None
    units = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", value)
    if match is None:
        raise click.BadParameter(
            f"{value!r} is not a duration such as 90s, 5m, 2h or 30d", ctx, param
        )
    return float(match[1]) * units[match[2]]


def print_json(document: Any) -> None:
    """Print a struct, or a list of them, as indented JSON on stdout."""
    click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def table(
    rows: Iterable[Iterable[object]],
    header: Sequence[str],
    *,
    drop: Sequence[str] | None = None,
    wrap: bool = True,
    indent: int = 0,
    numbers: bool = False,
) -> str:
    """Format a table that fits the width of the terminal less ``indent``.

    Sentences are wrapped first, then columns left out; an id or a number is never broken, so a
    table of which no more columns may go can be wider.

    Args:
        rows: the cells; None is shown as ``-``.
        drop: columns that may be left out, in this order. Default: all but the first, from the
            right.
        wrap: wrap cells that are sentences.
        numbers: align all columns but the first to the right.
    """
    from clusterkit.ui.formatting import terminal_filter

    clean = terminal_filter(sys.stdout, colours=False)
    everything = [tuple(header), *(tuple(clean(_cell(each)) for each in row) for row in rows)]
    names = header[:0:-1] if drop is None else drop
    order = [header.index(name) for name in names]
    unbroken = _unbroken if wrap else len
    gap, widths = _layout(everything, terminal_width() - indent, order, unbroken)
    lines = []
    for row in everything:
        cells = [
            [row[at]] if len(row[at]) <= width
            else textwrap.wrap(row[at], width, break_on_hyphens=False)
            for at, width in widths.items()
        ]  # fmt: skip
        for parts in zip_longest(*cells, fillvalue=""):
            padded = [
                part.rjust(width) if numbers and column else part.ljust(width)
                for part, (column, width) in zip(parts, widths.items(), strict=True)
            ]
            lines.append((" " * gap).join(padded).rstrip())
    return "\n".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "-" if value is None else str(value)


def catalogue_table(jobs: Sequence[CatalogueEntry]) -> str:
    """Format a table of job files and what each needs."""
    rows = [
        (job.label, job.nodes, job.ranks, job.device, ", ".join(job.packages), job.description)
        for job in jobs
    ]
    header = ("JOB", "NODES", "RANKS", "DEVICE", "PACKAGES", "WHAT IT DOES")
    return table(rows, header, drop=("PACKAGES", "DEVICE", "NODES", "RANKS"))


def terminal_width() -> float:
    """Return how wide the output may be; infinity for a file or pipe, unless COLUMNS is set."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return shutil.get_terminal_size().columns
    return math.inf


_SHORT = 8
"""Length of a cell that is not broken at its spaces: ``12 min``."""
_LONGEST_WORD = 24
"""Longest word of a sentence that is not broken in a narrow column; longer ones are paths."""


def _layout(
    rows: Sequence[Sequence[str]],
    room: float,
    drop: Sequence[int],
    unbroken: Callable[[str], int],
) -> tuple[int, dict[int, int]]:
    """Return the space between columns, and the width of each that is shown, by its number.

    The widest column of sentences shrinks first, down to its longest word.

    Args:
        unbroken: how narrow a cell may be.
    """
    columns = list(zip(*rows, strict=True))
    natural = [max(map(len, column)) for column in columns]
    least = [max(map(unbroken, column)) for column in columns]
    shown, left = list(range(len(columns))), list(drop)
    while True:
        for gap in (2, 1):
            widths = {column: natural[column] for column in shown}
            excess = sum(widths.values()) + gap * (len(shown) - 1) - room
            while excess > 0:
                widest = max(shown, key=lambda column: (widths[column] > least[column],
                                                        widths[column]))  # fmt: skip
                if widths[widest] <= least[widest]:
                    break
                widths[widest] -= 1
                excess -= 1
            else:
                return gap, widths
        if not left:
            return gap, widths
        shown.remove(left.pop(0))


def _unbroken(cell: str) -> int:
    """Return how narrow a cell may be: a cell of one word is an id or a number."""
    words = cell.split(" ")
    whole = len(words) == 1 or len(cell) <= _SHORT
    return len(cell) if whole else min(max(map(len, words)), _LONGEST_WORD)
