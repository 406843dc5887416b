"""What all launchers' options share: keys by a table, variables of the ranks. Pure."""

from __future__ import annotations

import re
from typing import Any

from clusterkit.convert.sheet import LOGS, Sheet
from clusterkit.jobfile.command import Used
from clusterkit.jobfile.launcher_options import BINDING, BY_ENVIRONMENT, COMMAND, MODULE, OURS
from clusterkit.jobfile.launcher_options import LOGS as OF_LOGS

RENDEZVOUS = frozenset(
    {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
     "NODE_RANK", "GROUP_RANK", "RDZV_ENDPOINT", "RDZV_ID", "RDZV_BACKEND"}
)  # fmt: skip
"""Variables that clusterkit gives every rank itself."""
_DEVICES = frozenset({"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"})


def by_meaning(sheet: Sheet, used: Used) -> None:
    """An option as the table of its launcher has it."""
    meant(sheet, used.written, used.meaning, used.value)


def meant(sheet: Sheet, what: str, meaning: str, value: Any) -> None:
    """Record a value by its meaning, as `clusterkit.jobfile.launcher_options.Tool` writes it."""
    key, is_set, constant = meaning.partition("=")
    value = constant if is_set else value
    if meaning == OURS:
        sheet.drop(what)
    elif meaning in (MODULE, COMMAND):
        sheet.note(what, f"the program is {meaning}", "job")
    elif meaning == BY_ENVIRONMENT:
        sheet.drop(what, "LOCAL_RANK stands in the environment")
    elif meaning == OF_LOGS:
        sheet.drop(what, LOGS)
    elif meaning == BINDING:
        sheet.refuse(what, "ranks are not bound to cores")
    elif meaning.startswith("!"):
        sheet.refuse(what, meaning[1:] or "clusterkit has no equivalent")
    elif meaning.startswith("-"):
        sheet.drop(what, meaning[1:])
    elif meaning.startswith("?"):
        sheet.yours(what, meaning[1:])
    elif key.startswith("entry.") and key.endswith("+"):
        sheet.more(what, key[6:-1], value)
    elif key.startswith("entry."):
        sheet.entry(what, key[6:], {"true": True, "false": False}.get(constant, value))
    elif key in ("nodes", "gpus_per_node", "threads_per_rank"):
        sheet.number(what, key, value)
    elif key == "restarts":
        sheet.number(what, key, value, least=0)
    elif key.startswith("env."):
        sheet.env(what, key[4:], value)
    else:
        sheet.key(what, key, value)


def job_name(text: str) -> str:
    """A job's name made of any text."""
    return re.sub(r"[^\w. -]+", "-", text).strip("-. ")[:40] or "job"


def assigned(sheet: Sheet, what: str, name: str, value: str | None) -> None:
    """A variable that was set for the ranks; None: whoever starts it has the value."""
    if value is None:
        sheet.secret(what, name)
    elif name in RENDEZVOUS:
        sheet.drop(what)
    elif name == "OMP_NUM_THREADS":
        sheet.number(what, "threads_per_rank", value)
    elif name in _DEVICES:
        sheet.yours(what, f"set {name} where you submit: this machine's visible GPUs are used")
    else:
        sheet.env(what, name, value)


def variables(value: Any) -> list[tuple[str, str | None]]:
    """Variables as a mapping or a list of ``NAME=VALUE``; None: whoever starts it has the value."""
    if isinstance(value, dict):
        return [(name, None if text is None else str(text)) for name, text in value.items()]
    parts = [str(each).partition("=") for each in value or ()]
    return [(name, text if equals else None) for name, equals, text in parts]
