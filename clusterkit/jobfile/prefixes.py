"""What may stand in front of a command: variables, and programs that start another one. Pure."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from clusterkit import shell
from clusterkit.errors import BadInput
from clusterkit.spec import JobSpec

_ASSIGNMENT = re.compile(rf"({shell.NAME})=(.*)\Z", re.DOTALL)
_SECONDS = re.compile(r"(?=.*[1-9])\d+(\.\d+)?[smhd]?")
_INTERPRETED = re.compile(r"[$`;&|<>(){}*?\[\]!~#\n]")
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE",
               "LOCAL_WORLD_SIZE")  # fmt: skip
"""Variables that clusterkit sets for every rank, as a launcher does."""


class Peeled(NamedTuple):
    """What stands in front of a launcher and has an equivalent."""

    words: list[str]
    """The command line without it."""
    keys: dict[str, tuple[Any, str]]
    """Keys of the job: value, and the words that set it."""
    dropped: list[str]
    """What a run does anyway."""

    @property
    def env(self) -> dict[str, str]:
        """Return the variables of the ranks that the words set."""
        return {key[4:]: value for key, (value, _) in self.keys.items() if key.startswith("env.")}

    @property
    def remark(self) -> str | None:
        """Return a note on what a run does anyway; None: nothing."""
        return f"left out of the command: {' '.join(self.dropped)}" if self.dropped else None


def peel(words: Sequence[str], *, programs: bool = True) -> Peeled:
    """Take ``NAME=VALUE``, ``env``, ``nohup``, ``timeout`` and ``sh -c`` of plain words away.

    Not with options, and no script that a shell would interpret.

    Args:
        programs: also those that are programs, and so can be started as they are.
    """
    rest, keys, dropped = list(words), dict[str, tuple[Any, str]](), list[str]()
    while rest:
        name, second = posixpath.basename(rest[0]), "".join(rest[1:2])
        if match := _ASSIGNMENT.match(rest[0]):
            if match[1] in _RENDEZVOUS:
                dropped.append(rest[0])
            else:
                keys[f"env.{match[1]}"] = (match[2], rest[0])
            rest = rest[1:]
        elif name in ("nohup", "exec", "time") and second and not second.startswith("-"):
            dropped += [name] * (name != "exec")
            rest = rest[1:]
        elif not programs:
            break
        elif name == "timeout" and _SECONDS.fullmatch(second) and "time_limit" not in keys:
            keys["time_limit"] = (second, f"timeout {second}")
            rest = rest[2:]
        elif (inner := plain_script(rest)) is not None:
            rest = inner
        elif name == "env" and not second.startswith("-"):
            rest = rest[1:]
        else:
            break
    return Peeled(rest, keys, dropped)


def plain_script(words: Sequence[str]) -> list[str] | None:
    """Return the words of ``sh -c`` with nothing in them that a shell would interpret."""
    shells = ("sh", "bash", "dash")
    if len(words) != 3 or words[1] != "-c" or posixpath.basename(words[0]) not in shells:
        return None
    return None if _INTERPRETED.search(words[2]) else shell.split(words[2])


def check_peeled(peeled: Peeled, job: JobSpec) -> None:
    """Refuse variables that would not mean to a job what they mean to a launcher."""
    for key, (value, written) in peeled.keys.items():
        name = key.removeprefix("env.")
        if name.startswith("PET_"):
            raise BadInput(
                f"command: {written} is an option of torchrun",
                hint="write it as an option",
                job="command",
            )
        if name == "CUDA_VISIBLE_DEVICES":
            hint = f"{shell.join([written])} clusterkit submit ..."
            raise BadInput(
                f"command: {written}: each node's share of the GPUs is set here",
                hint=hint,
                job="command",
            )
        if key != name and job.env.get(name, value) != value:
            raise BadInput(
                f"{key}: {job.env[name]}, but the command says {written}",
                hint="leave one of the two out",
                job=("env", name),
            )
