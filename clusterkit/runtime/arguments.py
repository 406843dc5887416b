"""Kinds of numbers for argparse's ``type=``."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """A whole number above 0."""
    return count(text, at_least=1)


def count(text: str, at_least: int = 0) -> int:
    """A whole number, 0 or more."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < at_least:
        raise argparse.ArgumentTypeError(f"{number} is below {at_least}")
    return number
