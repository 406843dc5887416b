"""The flags of the programs that a job's `estimate` key can name, their types and defaults.

A new flag of one of these programs goes into `PROGRAMS`: into ``flags`` if memory depends on it
(`clusterkit.estimate.jobs` reads it), else by its name alone into ``values``, if it takes a value,
or ``switches``. tests/unit/estimate/test_flags.py compares them with the programs' own parsers.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, get_args

from clusterkit.errors import BadInput, did_you_mean, dotted
from clusterkit.estimate.mesh import STRATEGIES
from clusterkit.estimate.setup import Precision

ENV = "env"
"""In a table: the variable of clusterkit's, without its prefix, with the default of a flag."""


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


_POSITIVE = {"type": _positive}
_SWITCH = {"action": "store_true"}


@dataclass(frozen=True)
class _Program:
    path: str
    """The program that has all of these flags."""
    flags: Mapping[str, Mapping[str, Any]]
    """Those that memory depends on, with the arguments of ``add_argument``."""
    values: str
    """The others that take a value."""
    switches: str = ""
    """The others that take none."""
    abbreviates: bool = False
    """Whether ``--glob`` is short for ``--global-batch``."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Of its own, for flags that several programs have."""


# settings.py
_TRAINING: dict[str, Mapping[str, Any]] = {
    "--strategy": {"choices": STRATEGIES, "default": "ddp"},
    "--mesh": {},
    "--sequence-parallel": _SWITCH,
    "--schedule": {"choices": ("gpipe", "1f1b"), "default": "1f1b"},
    "--activation-checkpointing": _SWITCH,
    "--reshard-after-forward": {"action": argparse.BooleanOptionalAction},
    "--offload": _SWITCH,
    "--deepspeed-config": {ENV: "DEEPSPEED_CONFIG"},
    "--dtype": {"choices": get_args(Precision)},
    "--global-batch": {**_POSITIVE, ENV: "GLOBAL_BATCH"},
    "--micro-batch": {**_POSITIVE, ENV: "MICRO_BATCH"},
}
_TRAINING_VALUES = (
    "--profile --clip --checkpoint-dir --checkpoint-every --checkpoint-keep --checkpoint-resume"
)
_TRAINING_SWITCHES = "--compile --zero-init --stop-at-nan --checkpoint-async"

PROGRAMS: dict[str, _Program] = {
    "gpt": _Program(
        "jobs/train/gpt/train.py",
        {**_TRAINING, "--model": {"default": "tiny"}, "--context": _POSITIVE},
        values=f"{_TRAINING_VALUES} --data --steps --learning-rate --warmup --weight-decay --seed "
        "--log-every --eval-every",
        switches=f"{_TRAINING_SWITCHES} --pretrained",
    ),
    "qwen": _Program(
        "jobs/train/gpt/gpt_hugging_face.py",
        {**_TRAINING, "--model": {}, "--context": {**_POSITIVE, "default": 128}},
        values=f"{_TRAINING_VALUES} --data --steps --learning-rate --seed",
        switches=_TRAINING_SWITCHES,
        defaults={"strategy": "deepspeed"},
    ),
    "sentiment": _Program(
        "jobs/sentiment/sentiment_trainer.py",
        {
            "--batch": {**_POSITIVE, "default": 16, ENV: "MICRO_BATCH"},
            "--model": {},
            "--max-length": {**_POSITIVE, "default": 64},
            # Those of sentiment_trainer.py alone:
            "--accumulation": {"type": int, "default": 1, ENV: "ACCUMULATION"},
            "--deepspeed-config": {ENV: "DEEPSPEED_CONFIG"},
        },
        values="--data --separator --encoding --epochs --learning-rate --validation --seed "
        "--output",
        abbreviates=True,
    ),
}
"""Value of the job's `estimate` key to program."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def make_parser(name: str, environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return a parser with the flags of a program.

    Args:
        name: a key of `PROGRAMS`.
        environ: the variables of a rank.
    """
    program = PROGRAMS[name]
    parser = _Parser(
        program.path, add_help=False, allow_abbrev=program.abbreviates, exit_on_error=False
    )
    for flag, options in program.flags.items():
        known = dict(options)
        given = environ.get(f"CLUSTERKIT_{known.pop(ENV, '')}")
        parser.add_argument(flag, **(known | ({"default": given} if given else {})))
    for flag in program.values.split():
        parser.add_argument(flag)
    for flag in program.switches.split():
        parser.add_argument(flag, action="store_true")
    parser.set_defaults(**program.defaults)
    return parser


def parse(name: str, words: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a program's flags, also of those that are not given.

    Raises:
        BadInput: an argument that the program does not take.
    """
    parser, program = make_parser(name, environ), PROGRAMS[name]
    try:
        known, others = parser.parse_known_args(list(words))
    except argparse.ArgumentError as error:
        flag = error.argument_name
        at = max(
            (n for n, word in enumerate(words) if word.partition("=")[0] == flag), default=None
        )
        what = f"{flag}: {error.message}" if flag else error.message
        raise _refusal(words, at, what, f"python {program.path} --help") from None
    if others:
        names = [each for action in parser._actions for each in action.option_strings]
        flag = others[0].partition("=")[0]
        near = did_you_mean(flag, names) if flag.startswith("-") else ""
        what = f"{flag}: {program.path} takes no such argument"
        raise _refusal(
            words, list(words).index(others[0]), what, near or f"python {program.path} --help"
        )
    return vars(known)


def _refusal(words: Sequence[str], at: int | None, what: str, hint: str) -> BadInput:
    place = ("args",) if at is None else ("args", at)
    return BadInput(f"{dotted(place)}: {what}", hint, job=place)
