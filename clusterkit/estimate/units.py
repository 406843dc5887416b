"""Parse and format sizes and counts: ``80GB``, ``40960MiB``, ``7B``."""

from __future__ import annotations

import re

from clusterkit.errors import BadInput

GIB = 1 << 30

_BYTES = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40,
}  # fmt: skip
_BYTES |= {unit[:-1]: factor for unit, factor in _BYTES.items() if len(unit) > 1}
_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\Z")
_LARGEST = 1 << 60
_SOLD: dict[float, int] = {
    16: 15360,  # T4
    24: 23028,  # A10G
    32: 32768,  # V100
    40: 40960,  # A100
    48: 46068,  # L40S
    80: 81559,  # H100
    94: 95830,  # H100 NVL
    96: 97871,  # GH200
    141: 143771,  # H200
}
"""GB that a card is sold with to MiB that nvidia-smi shows of the one that has least."""


def parse_size(text: str, what: str) -> int:
    """Return the bytes of ``80GB`` or ``80G`` (10^9), ``80GiB`` or ``80Gi`` (2^30), ``40960MiB``.

    Args:
        text: a number and a unit; upper or lower case.
        what: the flag or key, for the error.

    Raises:
        BadInput: not a number with a known unit, not above 0, or above 2^60.
    """
    number, factor = _split(text, what, _BYTES, "80GB, 80GiB or 40960MiB")
    if factor == 1:
        raise BadInput(f"{what}: {text!r} has no unit", hint=f"{what} {number:g}GB, or GiB")
    return _whole(number * factor, text, what)


def parse_memory(text: str, what: str) -> int:
    """Return the bytes of a GPU's memory; ``80GB`` is a card that is sold as one of 80 GB.

    nvidia-smi shows what a card has. Of cards of one size the one with the least counts (with
    ECC), and of a size that no card has, the decimal value, which is less than any has.

    Raises:
        BadInput: as `parse_size`.
    """
    size = parse_size(text, what)
    number, factor = _split(text, what, _BYTES, "")
    mib = _SOLD.get(number) if factor == 10**9 else None
    return size if mib is None else mib << 20


def parse_count(text: str, what: str) -> int:
    """Return the number of ``7B`` (10^9), ``350M`` or ``124439808``.

    Raises:
        BadInput: not a number with a known suffix, not above 0, or above 2^60.
    """
    number, factor = _split(text, what, _COUNTS, "7B, 350M or 124439808")
    return _whole(number * factor, text, what)


def _split(text: str, what: str, units: dict[str, int], example: str) -> tuple[float, int]:
    """Return the number and the factor of its unit."""
    match = _NUMBER.match(text.strip().replace(",", "").replace("_", ""))
    if match is None:
        raise BadInput(f"{what}: {text!r} is not of the form NUMBER UNIT", hint=example)
    factor = units.get(match[2].upper())
    if factor is None:
        hint = "K, M, B or T" if units is _COUNTS else "MB, GB, MiB, GiB, TB or TiB"
        raise BadInput(f"{what}: {text!r}: {match[2]!r} is not a unit", hint=hint)
    return float(match[1]), factor


def _whole(value: float, text: str, what: str) -> int:
    if value < 1:
        raise BadInput(f"{what}: {text!r}: it must be above 0")
    if value > _LARGEST:
        raise BadInput(f"{what}: {text!r}: it is too large")
    return round(value)


def gib(size: float) -> str:
    """Format bytes in GiB with two decimals; ``<0.01`` for less."""
    value = size / GIB
    if 0 < value < 0.005:
        return "<0.01"
    return f"{value:.2f}" if value < 99.95 else f"{value:,.0f}"
