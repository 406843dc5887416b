"""clusterkit bench"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from clusterkit import api
from clusterkit.bench import bandwidth
from clusterkit.bench.slow_links import figure
from clusterkit.cli.common import (
    cluster_options,
    gpus_option,
    host_options,
    json_option,
    print_json,
    table,
    verb,
)
from clusterkit.errors import EXIT_FAILURE, pluralize
from clusterkit.run.status import RunStatus
from clusterkit.ui.spinner import spinner

PLAIN_LINES = 20
"""How many progress lines are printed if stderr is not a terminal."""


@verb(
    "bench",
    "clusterkit bench --nodes 2 --sizes 1K:1M -o bus.png",
    "clusterkit bench --cluster lab --pairwise",
)
@cluster_options("Where to run: an entry of the cluster file.", "local")
@click.option("-n", "--nodes", type=int, metavar="N",
              help="Number of nodes. Default: every host of the cluster.")  # fmt: skip
@gpus_option
@host_options
@click.option("--collectives", metavar="A,B,...",
              help=f"Which of {', '.join(bandwidth.FACTORS)}. Default: all.")  # fmt: skip
@click.option("--sizes", metavar="SIZES",
              help="Message sizes in bytes: a list 1K,1M or a range 1K:64M:x2, which doubles (K, "
              "M, G are powers of 1024; without :x2 a size is 4 times the one before). "
              f"Default: {bandwidth.SIZES}, on GPUs to 8G as memory allows; with --pairwise "
              f"{bandwidth.PAIR_SIZES}.")  # fmt: skip
@click.option("--pairwise", is_flag=True,
              help="Measure every pair of nodes; find slow links and hosts.")  # fmt: skip
@click.option("--sequential", is_flag=True,
              help="With --pairwise: one pair at a time, not disjoint pairs at once.")  # fmt: skip
@click.option("--iterations", type=int, metavar="N",
              help="Timed operations per measurement. Default: 20, fewer if slow.")  # fmt: skip
@click.option("--warmup", type=int, metavar="N",
              help="Untimed operations first, at least 2. Default: 5, fewer if slow.")  # fmt: skip
@click.option("--dtype", default="float32", show_default=True, metavar="TYPE",
              help="Element type, as torch names it.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE",
              help="Draw bandwidth over size, or the pairs: .png, .svg or .pdf.")  # fmt: skip
@json_option
def command(output: Path | None, as_json: bool, **options: Any) -> int:
    """Measure bandwidth and latency between nodes, and find the slow link or host.

    Starts a run that uses NCCL between GPUs, gloo between CPUs. Prints time, algorithm bandwidth
    and bus bandwidth (as nccl-tests defines them) for every collective and size, and how many
    elements of the results were wrong. With --pairwise it prints bandwidth and latency between all
    pairs of nodes instead, and which links and hosts are slow. The exit code is 1 if a result was
    wrong, and the run's own if the run failed.
    """
    if output is not None:
        from clusterkit.ui import plots

        plots.check_output(output)
    with contextlib.ExitStack() as stack:
        stack.enter_context(spinner(f"looking at cluster {options['cluster']}"))

        def watch(run: api.Run) -> RunStatus:
            stack.close()
            return _watch(run)

        report = api.bench(watch=watch, **options)
    if as_json:
        print_json(report)
    elif report.pairs is None:
        _print_rows(report)
    else:
        _print_pairs(report, report.pairs)
    if output is not None:
        click.echo(f"drawn: {plots.draw_bandwidth(report, output)}", err=True)
    if report.wrong:
        click.echo(
            f"{pluralize(report.wrong, 'element')} had wrong results: do not train on this cluster",
            err=True,
        )
        return EXIT_FAILURE
    return 0


# ---------------------------------------------------------------- progress


def _watch(run: api.Run) -> RunStatus:
    """Show on stderr what is being measured, until the run ends."""
    from clusterkit.ui import follow
    from clusterkit.ui.formatting import source

    click.echo(f"{run.id}: {run.plan.summary}", err=True)
    for note in run.plan.notes:
        if not note.name:
            click.echo(f"note: {note}", err=True)
    view = follow.View()
    try:
        with _progress() as show:
            for line in run.logs(follow=True):
                # Rank 0's other output, such as warnings of NCCL.
                for shown in view.feed(line):
                    click.echo(f"{source(shown)} {shown.text}", err=True)
                event = line.event
                if event is not None and event["event"] == "bench_doing":
                    show(event["number"], event["of"], bandwidth.doing_text(event))
        return run.wait()
    except KeyboardInterrupt:
        click.echo(f"cancelling {run.id}", err=True)
        raise


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """Give a function of number, total and text: a bar in a terminal, otherwise a few lines."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    if not sys.stderr.isatty():  # rich's is_terminal is true for any file with FORCE_COLOR
        yield _print_some
        return
    columns = (
        SpinnerColumn(),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda number, of, text: bar.update(
            task, completed=number, total=of, description=text
        )


def _print_some(number: int, of: int, text: str) -> None:
    every = max(1, of // PLAIN_LINES)
    if number % every == 0 or number in (1, of):
        click.echo(f"{number}/{of} {text}", err=True)


# ---------------------------------------------------------------- results


def _print_rows(report: bandwidth.Report) -> None:
    header = ("collective", "bytes", "elements", "iterations", "median us", "min us", "max us",
              "algbw GB/s", "busbw GB/s", "wrong")  # fmt: skip
    rows = [
        (row.collective, row.size, row.elements, row.iterations,
         *map(figure, (row.median_us, row.min_us, row.max_us,
                                 row.algorithm_gb_per_s, row.bus_gb_per_s)), row.wrong)
        for row in report.rows
    ]  # fmt: skip
    rest = ("elements", "iterations", "max us", "min us", "wrong", "algbw GB/s", "median us")
    click.echo(table(rows, header, drop=rest, numbers=True))
    _print_setup(report)
    smallest = {row.collective: row.size for row in reversed(report.rows)}
    latencies = [
        f"{name} {figure(us)} us at {bandwidth.size_text(smallest[name])}"
        for name, us in report.latency_us.items()
    ]
    click.echo(f"latency: {', '.join(latencies)}", err=True)


def _print_pairs(report: bandwidth.Report, pairs: bandwidth.Pairs) -> None:
    for title, matrix in (
        (f"GB/s in messages of {bandwidth.size_text(pairs.size)}", pairs.gb_per_s),
        (f"latency in us, {bandwidth.size_text(pairs.latency_size)}", pairs.latency_us),
    ):
        rows = [
            (host, *("-" if one is None else figure(one) for one in line))
            for host, line in zip(pairs.hosts, matrix, strict=True)
        ]
        click.echo(f"{title}; from the row's host to the column's")
        click.echo(table(rows, ("", *pairs.hosts), drop=(), numbers=True) + "\n")
    click.echo(pairs.judgement)
    _print_setup(report)


def _print_setup(report: bandwidth.Report) -> None:
    click.echo(
        f"{pluralize(report.world_size, 'rank')} on {pluralize(len(report.nodes), 'node')}: "
        f"{report.backend} on {report.device}, {report.dtype}, torch {report.torch}",
        err=True,
    )
