"""Labelled reviews for the sentiment programs: the CSV and its split.

The format is that of ChnSentiCorp: a header `label,review`, then a whole number and a text in each
row, quoted where it holds a comma, a quote or a line break. Labels count from 0.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

SHIPPED = Path(__file__).parents[1] / "data" / "reviews.csv"
_MISSING = {"", "nan", "null", "none", "n/a", "<na>"}


class BadInput(ValueError):
    """A file or a model that cannot be used: ``message``, and in brackets what helps."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(f"{message} ({hint})" if hint else message)


@dataclass(frozen=True)
class Reviews:
    """Texts and their labels; ``dropped`` rows had no text or no label."""

    texts: list[str]
    labels: list[int]
    dropped: int

    @property
    def classes(self) -> int:
        return max(self.labels) + 1

    def describe(self, training: int, validation: int) -> str:
        """One line about the rows and what became of them."""
        return (
            f"{training} reviews to train on, {validation} to validate on, "
            f"{self.dropped} rows without a label or a review dropped"
        )


def read_reviews(path: Path | str, *, separator: str = ",", encoding: str = "utf-8") -> Reviews:
    """Read a CSV with the columns ``label`` and ``review``; others may stand beside them.

    Rows without a text or a label (empty, or NaN) are dropped and counted.

    Raises:
        BadInput: the file, its encoding, its separator, its columns, a row or a label is not as it
            should be; the message names the file and the line.
    """
    texts, labels, dropped = [], [], 0
    for line, label, text in _rows(Path(path), separator, encoding):
        if label.lower() in _MISSING or text.lower() in _MISSING:
            dropped += 1
        else:
            texts.append(text)
            labels.append(_label(label, f"{path}:{line}"))
    if not labels:
        raise BadInput(f"{path}: it holds no row with a label and a review")
    missing = sorted(set(range(min(max(labels), len(labels)) + 1)) - set(labels))
    if missing:
        raise BadInput(
            f"{path}: no row has the label {missing[0]}, though the labels go up to {max(labels)}",
            hint="labels count from 0 without gaps",
        )
    if max(labels) == 0:
        raise BadInput(f"{path}: every label is 0: there is nothing to learn")
    return Reviews(texts, labels, dropped)


def _rows(path: Path, separator: str, encoding: str) -> Iterator[tuple[int, str, str]]:
    """Line, label and review of each row; both stripped, empty where the row ends early."""
    try:
        # A byte order mark, as spreadsheets write it, is no part of the first column's name.
        mark = "utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding
        with path.open(encoding=mark, newline="") as file:
            reader = csv.reader(file, delimiter=separator, strict=True)
            header = [name.strip().lower() for name in next(reader, [])]
            label_at, review_at = _columns(path, header, separator)
            for row in reader:
                if len(row) > len(header):
                    raise BadInput(
                        f"{path}:{reader.line_num}: {len(row)} columns instead of {len(header)}",
                        hint=f'a review with {separator!r} in it must stand in quotes: "..."',
                    )
                row += [""] * (len(header) - len(row))
                yield reader.line_num, row[label_at].strip(), row[review_at].strip()
    except UnicodeError as error:
        raise BadInput(
            f"{path} is not {encoding}: {error}",
            hint="--encoding gbk (or gb18030, utf-16); Chinese files often are",
        ) from None
    except csv.Error as error:
        raise BadInput(f"{path}:{reader.line_num}: not CSV: {error}") from None
    except LookupError:
        raise BadInput(f"--encoding {encoding}: Python knows none of that name") from None
    except OSError as error:
        raise BadInput(f"--data {path}: {error.strerror}") from None


def _columns(path: Path, header: list[str], separator: str) -> tuple[int, int]:
    missing = [name for name in ("label", "review") if name not in header]
    if not missing:
        return header.index("label"), header.index("review")
    if not any(header):
        raise BadInput(f"{path}: it has no header", hint="its first line must be label,review")
    for other, name in ((";", ";"), ("\t", "tab"), ("|", "|"), (",", ",")):
        if other != separator and {"label", "review"} <= set(other.join(header).split(other)):
            raise BadInput(
                f"{path}: the columns are separated by {name}, not by {separator!r}",
                hint=f"--separator {name}",
            )
    raise BadInput(
        f"{path}: there is no column {missing[0]!r}; the columns are {', '.join(header)[:200]}",
        hint="its first line must hold the names label and review",
    )


def _label(text: str, place: str) -> int:
    try:
        number = float(text)  # pandas writes 1.0 where a column has gaps
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise BadInput(
            f"{place}: the label {text[:40]!r} is not a whole number", hint="0, 1, 2 and so on"
        )
    if number < 0:
        raise BadInput(f"{place}: the label {text} is below 0", hint="labels count from 0")
    return int(number)


def split(count: int, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Numbers of the rows to train on and to validate on: the same for the same seed.

    Every rank calls it, so all must read the same file.

    Raises:
        BadInput: one of the parts would be empty.
    """
    held_out = round(count * fraction)
    if not 0 < held_out < count:
        raise BadInput(
            f"--validation {fraction:g} of {count} reviews leaves nothing to "
            f"{'train on' if held_out else 'validate on'}"
        )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return order[held_out:], order[:held_out]


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The flags that both sentiment programs have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, batch = parser.add_argument, os.environ.get("CLUSTERKIT_MICRO_BATCH") or 16
    add("--batch", type=_positive, default=batch, metavar="ROWS", help="of one rank (default: 16)")
    add("--data", default=str(SHIPPED), metavar="CSV", help="default: jobs/data/reviews.csv")
    add("--separator", type=_separator, default=",", help="between columns; tab (default: ,)")
    add("--encoding", default="utf-8", metavar="NAME", help="such as gbk (default: utf-8)")
    add("--model", metavar="NAME", help="Hugging Face name or folder (default: a small new BERT)")
    add("--epochs", type=_positive, default=2, help="default: 2")
    add("--learning-rate", type=float, metavar="RATE",
        help="at the start, falls to 0 (default: 5e-5 with --model, else 1e-3)")  # fmt: skip
    add("--max-length", type=_positive, default=64, metavar="TOKENS", help="default: 64")
    add("--validation", type=float, default=0.1, metavar="PART", help="held out (default: 0.1)")
    add("--seed", type=int, default=0, help="of split, order and weights (default: 0)")
    add("--output", metavar="FOLDER", help="where the trained model is saved (default: nowhere)")
    return parser


def learning_rate(args: argparse.Namespace) -> float:
    """The one that was given, or what suits the model."""
    if args.learning_rate is not None:
        return float(args.learning_rate)
    return 5e-5 if args.model else 1e-3


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 or more")
    return int(text)


def _separator(text: str) -> str:
    separator = {"tab": "\t", "\\t": "\t"}.get(text, text)
    if len(separator) != 1 or separator in '"\r\n':
        raise argparse.ArgumentTypeError(f"{text!r} is not one character")
    return separator
