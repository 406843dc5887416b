"""Marked lines: how a rank reports through its log, the one channel that every backend has.

A marked line is ``@clusterkit`` and a JSON object with a key ``event``: ``start``, ``phase``,
``metrics``, ``checkpoint``, ``resumed``, ``optimizer``, ``end``, or those of
`clusterkit.runtime.bandwidth`. Any program writes them by printing;
whoever reads the log parses them.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

MARK = "@clusterkit "
_HUGE = 1e300
_NUMBERS = (int, float)


def parse_mark(text: str) -> dict[str, Any] | None:
    """The object of a marked line; None for any other line, a torn one included."""
    if not text.startswith(MARK):
        return None
    document = text[len(MARK) :]
    try:
        event = msgspec.json.decode(document)
    except msgspec.DecodeError:
        try:
            event = json.loads(document)  # takes the NaN that programs print, too
        except ValueError:
            return None
    return event if isinstance(event, dict) and "event" in event else None


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a number: neither text nor true, neither NaN nor beyond 1e300."""
    return type(value) in _NUMBERS and -_HUGE < value < _HUGE
