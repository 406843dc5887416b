"""Loss and tokens per second as a picture."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterkit.errors import BadInput, RunFolderError, Unavailable
from clusterkit.marks import is_number

SUFFIXES = (".png", ".svg", ".pdf")
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's palette: told apart by people with any kind of colour vision."""


def draw(runs: Mapping[str, Sequence[Mapping[str, Any]]], output: Path) -> Path:
    """Draw several runs over one another: loss above, tokens/s below, both over steps.

    Args:
        runs: name to metrics, a mapping per step with ``step``, ``loss``, ``tokens_per_second``.
        output: the file to write; its suffix says which kind of picture.

    Raises:
        BadInput: no metrics, or a suffix that is no picture's.
        Unavailable: matplotlib is not installed.
    """
    if output.suffix not in SUFFIXES:
        raise BadInput(f"{output}: not a picture's name", hint=f"one of {', '.join(SUFFIXES)}")
    without = [name for name, metrics in runs.items() if not _series(metrics, "loss")[0]]
    if without:
        raise BadInput(f"run {without[0]} reported no losses", hint=f"clusterkit logs {without[0]}")
    try:
        import matplotlib
    except ImportError:
        raise Unavailable(
            "drawing needs matplotlib", hint="pip install 'clusterkit[plot]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    loss, speed = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for number, (name, metrics) in enumerate(runs.items()):
        # Runs that agree lie on one another: the later ones are dashed, so that both show.
        style: dict[str, Any] = {
            "color": _COLOURS[number % len(_COLOURS)],
            "linestyle": "-" if number == 0 else (0, (4, 2 + number)),
            "linewidth": 1.6,
        }
        loss.plot(*_series(metrics, "loss"), label=name, **style)
        steps, evaluated = _series(metrics, "eval_loss")
        if steps:
            loss.plot(steps, evaluated, "o", color=style["color"], label=f"{name}, held out")
        speed.plot(*_series(metrics, "tokens_per_second"), **style)
    loss.set_ylabel("loss (nats per token)")
    speed.set_ylabel("tokens/s")
    speed.set_xlabel("step")
    speed.set_ylim(bottom=0)
    speed.yaxis.set_major_formatter("{x:,.0f}")
    speed.xaxis.get_major_locator().set_params(integer=True)
    for axes in (loss, speed):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    loss.legend(frameon=False)
    temporary = output.with_name(f".{output.name}{output.suffix}")
    try:
        figure.savefig(temporary, dpi=150)
        temporary.replace(output)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise RunFolderError(f"cannot write {output}: {error.strerror}") from error
    return output


def _series(metrics: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps and values; a step told twice (after a restart) counts as told last."""
    found = {
        row["step"]: row[key]
        for row in metrics
        if is_number(row.get("step")) and is_number(row.get(key))
    }
    return sorted(found), [found[step] for step in sorted(found)]
