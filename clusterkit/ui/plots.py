"""Plots as files: loss and tokens per second; bandwidth over size, or between pairs of nodes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterkit import files
from clusterkit.bench.bandwidth import Pairs, Report, size_text
from clusterkit.bench.slow_links import figure
from clusterkit.errors import BadInput, Unavailable
from clusterkit.files import write_atomic
from clusterkit.run.logs import is_number

SUFFIXES = (".png", ".svg", ".pdf")
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's palette, which people with any kind of colour vision can distinguish."""
_MARKERS = "os^Dv<>"


def draw(
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    output: Path,
    labels: Mapping[str, str] | None = None,
) -> Path:
    """Draw runs on the same axes over the steps: loss above, tokens/s below.

    Args:
        runs: id to metrics, a mapping per step with ``step``, ``loss``, ``tokens_per_second``.
        output: the file to write; one of SUFFIXES gives its format.
        labels: id to the run's name in the legend; by default its id.

    Raises:
        BadInput: a run reported no losses, or the suffix is none of SUFFIXES.
        Unavailable: matplotlib is not installed.
    """
    _check_name(output)
    without = [name for name, metrics in runs.items() if not _series(metrics, "loss")[0]]
    if without:
        raise BadInput(f"run {without[0]} reported no losses", hint=f"clusterkit logs {without[0]}")
    picture = _picture()
    loss, speed = picture.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for number, (run, metrics) in enumerate(runs.items()):
        name = (labels or {}).get(run, run)
        # Equal curves cover each other: the later ones are dashed, so that all can be seen.
        colour = _COLOURS[number % len(_COLOURS)]
        dashes = "-" if number == 0 else (0, (4, 2 + number))
        style: dict[str, Any] = {"color": colour, "linestyle": dashes, "linewidth": 1.6}
        loss.plot(*_series(metrics, "loss"), label=name, **style)
        steps, evaluated = _series(metrics, "eval_loss")
        if steps:
            # Hollow, and each larger than the one before: equal points can be seen, too.
            loss.plot(
                steps, evaluated, linestyle="", marker=_MARKERS[number % len(_MARKERS)],
                markersize=6 + 2 * number, markerfacecolor="none", color=colour,
                label=f"{name}, held out",
            )  # fmt: skip
        speed.plot(*_series(metrics, "tokens_per_second"), **style)
    loss.set_ylabel("loss (nats per token)")
    speed.set_ylabel("tokens/s")
    speed.set_xlabel("step")
    speed.set_ylim(bottom=0)
    speed.yaxis.set_major_formatter("{x:,.0f}")
    speed.xaxis.get_major_locator().set_params(integer=True)
    _plain_frame(loss, speed)
    loss.legend(frameon=False)
    return _save(picture, output)


def check_output(output: Path) -> None:
    """Check that a plot can be drawn, before the work for it is done. Raises as `draw`."""
    _check_name(output)
    _picture()


def draw_bandwidth(report: Report, output: Path) -> Path:
    """Draw bus bandwidth over message size, a line per collective; or the pairs as a matrix.

    Raises as `draw`.
    """
    _check_name(output)
    picture = _picture()
    axes = picture.subplots()
    where = f"{report.world_size} ranks on {len(report.nodes)} nodes, {report.backend}"
    if report.pairs is not None:
        _draw_pairs(picture, axes, report.pairs)
        axes.set_title(f"GB/s from row to column, {size_text(report.pairs.size)}; {where}")
        return _save(picture, output)
    for number, name in enumerate(report.latency_us):
        rows = sorted((row.size, row.bus_gb_per_s) for row in report.rows if row.collective == name)
        label = f"{name}, latency {figure(report.latency_us[name])} us"
        style = {"marker": "o", "markersize": 4, "linewidth": 1.6}
        colour = _COLOURS[number % len(_COLOURS)]
        axes.plot(*zip(*rows, strict=True), color=colour, label=label, **style)
    axes.set_title(f"{where}, {report.device}, {report.dtype}")
    axes.set_xlabel("size")
    axes.set_ylabel("bus bandwidth (GB/s)")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda size, place: size_text(round(size)))
    axes.set_ylim(bottom=0)
    _plain_frame(axes)
    axes.legend(frameon=False)
    return _save(picture, output)


def _plain_frame(*each: Any) -> None:
    for axes in each:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)


def _draw_pairs(picture: Any, axes: Any, pairs: Pairs) -> None:
    numbers = [[float("nan") if one is None else one for one in line] for line in pairs.gb_per_s]
    image = axes.imshow(numbers, cmap="viridis", vmin=0)
    picture.colorbar(image, ax=axes, label="GB/s")
    places = range(len(pairs.hosts))
    axes.set_xticks(places, pairs.hosts, rotation=45, ha="right")
    axes.set_yticks(places, pairs.hosts)
    middle = image.norm.vmax / 2
    for row, line in enumerate(pairs.gb_per_s):
        for column, one in enumerate(line):
            if one is not None:
                colour = "white" if one < middle else "black"
                axes.text(column, row, figure(one), ha="center", va="center", color=colour)


def _check_name(output: Path) -> None:
    if output.suffix not in SUFFIXES:
        raise BadInput(f"{output}: not the name of a picture", hint=f"one of {', '.join(SUFFIXES)}")
    files.check_output(output)


def _picture() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise Unavailable("drawing needs matplotlib", "pip install 'clusterkit[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    return Figure(figsize=(8, 6), layout="constrained")


def _save(picture: Any, output: Path) -> Path:
    drawn = io.BytesIO()
    picture.savefig(drawn, format=output.suffix[1:], dpi=150)
    write_atomic(output, drawn.getvalue(), output=True)
    return output


def _series(metrics: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Return steps and values; of a step reported twice (after a restart), the last value."""
    found = {
        row["step"]: row[key]
        for row in metrics
        if is_number(row.get("step")) and is_number(row.get(key))
    }
    return sorted(found), [found[step] for step in sorted(found)]
