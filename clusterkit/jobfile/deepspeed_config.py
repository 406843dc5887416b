"""Check a job's ``deepspeed`` section: its keys, values and batch sizes. Pure.

The keys are those of one version: ``deepspeed_keys.json``, made by ``python -m
tests.deepspeed_table``. `clusterkit.lifecycle.deepspeed_probe` asks the version on the hosts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from clusterkit import batch as batches
from clusterkit.errors import BadInput, KeyPath, did_you_mean, dotted

_TABLE = json.loads(Path(__file__).with_name("deepspeed_keys.json").read_bytes())
VERSION: str = _TABLE["version"]
KEYS: dict[str, Any] = _TABLE["keys"]
REMOVED: dict[str, list[str]] = _TABLE["removed"]

INSTEAD = {
    "amp": "use bf16, fp16 or torch_autocast",
    "elasticity": "use an elastic job: nodes: MIN:MAX",
    "curriculum_learning": "use data_efficiency.data_sampling.curriculum_learning",
}
"""Replacements of removed keys; a key without one is simply left out."""
_OWN_AUTO = {("pipeline", "stages"), ("data_types", "keep_in_fp32_modules")}
"""Keys for which ``auto`` is a value of DeepSpeed itself."""
_FILLED = ("optimizer", "scheduler", "gradient_clipping")
"""Sections in which a Trainer replaces ``auto``, besides the batch sizes."""
_SIGNS = {">": float.__gt__, ">=": float.__ge__, "<": float.__lt__, "<=": float.__le__}
_BOOLEANS = ("true", "false", "yes", "no", "on", "off", "t", "f", "y", "n", "1", "0")


def _error(place: KeyPath, message: str, hint: str | None = None) -> BadInput:
    at = ("deepspeed", *place)
    return BadInput(f"{dotted(at)}: {message}", hint, job=at)


def check_keys(config: Mapping[str, Any]) -> list[str]:
    """Check the keys and values of a config against DeepSpeed `VERSION`.

    Returns:
        Remarks on unknown top-level keys: DeepSpeed ignores them, and a program may read its own.

    Raises:
        BadInput: an unknown or removed key, or a value of a wrong type.
    """
    remarks: list[str] = []
    _check(config, KEYS, (), remarks)
    halves = [name for name in ("fp16", "bf16") if _enabled(config.get(name))]
    if len(halves) > 1:
        raise _error(("bf16", "enabled"), "fp16 and bf16 are both enabled", "enable one of them")
    return remarks


def precision(config: Mapping[str, Any]) -> Literal["fp32", "bf16", "fp16"]:
    """Return the number format that a config enables."""
    for name in ("bf16", "fp16"):
        section = config.get(name)
        if isinstance(section, dict) and section.get("enabled"):
            return "bf16" if name == "bf16" else "fp16"
    return "fp32"


def _enabled(section: Any) -> bool:
    return isinstance(section, Mapping) and section.get("enabled") is True


def _check(
    config: Mapping[str, Any], keys: Mapping[str, Any], place: KeyPath, remarks: list[str]
) -> None:
    for key, value in config.items():
        at = (*place, key)
        if key in REMOVED.get(dotted(place), ()):
            hint = INSTEAD.get(key, "leave it out")
            raise _error(at, f"DeepSpeed {VERSION} no longer has `{key}`", hint)
        if key not in keys and "" not in keys:
            # DeepSpeed ignores unknown top-level keys; one similar to a known key is a typo.
            near = did_you_mean(key, keys, 0.6 if place else 0.8)
            if not (place or near):
                remarks.append(
                    f"deepspeed.{key} is not a key of DeepSpeed {VERSION}, which ignores it"
                )
                continue
            raise _error(
                at, "unknown key" + (f" ({near})" if near else ""),
                None if near else f"allowed: {', '.join(keys)}",
            )  # fmt: skip
        kind = keys.get(key, "any")
        if value == "auto":
            continue
        if isinstance(kind, str):
            if not _fits(value, kind, lax=bool(place)):
                raise _error(at, f"{value!r} is not {_in_words(kind)}")
        elif isinstance(value, Mapping):
            _check(value, kind, at, remarks)
        elif (value is not None or not place) and not (
            key == "zero_optimization" and isinstance(value, bool)
        ):
            raise _error(at, f"{value!r} is not a mapping")


def _fits(value: Any, kind: str, *, lax: bool) -> bool:
    """Return whether a value is of a kind such as ``int? >=0``, ``bool``, ``cpu|nvme``.

    Args:
        lax: convert as pydantic does: ``"5"`` is a number, 0 is false.
    """
    name, *bounds = kind.replace("?", "").split()
    if name == "any" or value is None:
        return name == "any" or "?" in kind
    if name == "bool":
        return isinstance(value, bool) or (
            lax and isinstance(value, str | int | float) and str(value).lower() in _BOOLEANS
        )
    if name in ("int", "number"):
        if not isinstance(value, (int, float, str) if lax else (int, float)):
            return False
        try:
            number = float(value)
        except (ValueError, OverflowError):
            return False
        return (number.is_integer() if name == "int" else math.isfinite(number)) and all(
            _SIGNS[match[1]](number, float(match[2]))
            for bound in bounds
            if (match := re.match("([<>]=?)(.*)", bound))
        )
    if name in ("list", "text"):
        return isinstance(value, list if name == "list" else str)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return (str(value) if lax else str(value).lower()) in name.split("|")


def _in_words(kind: str) -> str:
    name, *bounds = kind.replace("?", "").split()
    words = {"bool": "true or false", "int": "a whole number", "number": "a number",
             "list": "a list", "text": "text"}  # fmt: skip
    return " ".join([words.get(name, f"one of {', '.join(name.split('|'))}"), *bounds])


def walk(config: Mapping[str, Any], place: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the path and the value of every key, of all sections."""
    for key, value in config.items():
        yield (*place, key), value
        if isinstance(value, Mapping):
            yield from walk(value, (*place, key))


def autos(config: Mapping[str, Any]) -> list[KeyPath]:
    """Return the places of ``auto`` that the program has to replace by a number."""
    return [at for at, value in walk(config) if value == "auto" and at not in _OWN_AUTO]


def check_sizes(config: Mapping[str, Any], ranks: int) -> None:
    """Check the config of a program that passes it to ``deepspeed.initialize`` unchanged.

    Args:
        config: the config, with the batch sizes of the job.
        ranks: world size of the run.

    Raises:
        BadInput: ``auto`` where DeepSpeed has no default, or batch sizes that do not divide.
    """
    for place in autos(config):
        if place[0] in {*batches.DEEPSPEED_KEYS.values(), *_FILLED}:
            raise _error(
                place, "auto, but nothing in the program seems to fill it in",
                "give a value; the Trainer of transformers, accelerate and lightning fill it in",
            )  # fmt: skip
    sizes = {name: config.get(key) for name, key in batches.DEEPSPEED_KEYS.items()}
    if sizes["global_size"] is None and sizes["micro"] is None:
        raise _error((), "no batch size", "batch: {global: 64, micro: 8}, in the job file")
    given = next(key for name, key in batches.DEEPSPEED_KEYS.items() if sizes[name] is not None)
    try:
        batches.solve(data_parallel=ranks // (config.get("sequence_parallel_size") or 1), **sizes)
    except BadInput as error:
        raise _error((given,), error.message.removeprefix("batch: "), error.hint) from None
