"""What all launchers' options share: keys by a table, variables of the ranks. Pure."""

from __future__ import annotations

import re

from clusterkit.command import Used
from clusterkit.convert.sheet import LOGS, Sheet
from clusterkit.launcher_options import BINDING, BY_ENVIRONMENT, COMMAND, MODULE, OURS
from clusterkit.launcher_options import LOGS as OF_LOGS

RENDEZVOUS = frozenset(
    {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
     "NODE_RANK", "GROUP_RANK", "RDZV_ENDPOINT", "RDZV_ID", "RDZV_BACKEND"}
)  # fmt: skip
"""Variables that clusterkit gives every rank itself."""
_DEVICES = frozenset({"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"})


def by_meaning(sheet: Sheet, used: Used) -> None:
    """An option as the table of its launcher has it."""
    key, is_set, constant = used.meaning.partition("=")
    value = constant if is_set else used.value
    if used.meaning == OURS:
        sheet.drop(used.written)
    elif used.meaning in (MODULE, COMMAND) and not used.value:
        sheet.note(used.written, f"the program is a {used.meaning}", "job")
    elif used.meaning == BY_ENVIRONMENT:
        sheet.drop(used.written, "LOCAL_RANK stands in the environment")
    elif used.meaning == OF_LOGS:
        sheet.drop(used.written, LOGS)
    elif used.meaning == BINDING:
        sheet.refuse(used.written, "ranks are not bound to cores")
    elif used.meaning.startswith("!"):
        sheet.refuse(used.written, used.meaning[1:] or "clusterkit has no equivalent")
    elif used.meaning.startswith("-"):
        sheet.drop(used.written, used.meaning[1:])
    elif used.meaning.startswith("?"):
        sheet.yours(used.written, used.meaning[1:])
    elif key.startswith("entry.") and key.endswith("+"):
        sheet.more(used.written, key[6:-1], value)
    elif key.startswith("entry."):
        sheet.entry(used.written, key[6:], {"true": True, "false": False}.get(constant, value))
    elif key in ("nodes", "gpus_per_node", "threads_per_rank"):
        sheet.number(used.written, key, value)
    elif key == "restarts":
        sheet.number(used.written, key, value, least=0)
    elif key.startswith("env."):
        sheet.env(used.written, key[4:], value)
    else:
        sheet.key(used.written, key, value)


def job_name(text: str) -> str:
    """A job's name made of any text."""
    return re.sub(r"[^\w. -]+", "-", text).strip("-. ")[:40] or "job"


def assigned(sheet: Sheet, what: str, name: str, value: str) -> None:
    """A variable that was set for the ranks."""
    if name in RENDEZVOUS:
        sheet.drop(what)
    elif name == "OMP_NUM_THREADS":
        sheet.number(what, "threads_per_rank", value)
    elif name in _DEVICES:
        sheet.yours(what, f"set {name} where you submit: this machine's visible GPUs are used")
    else:
        sheet.env(what, name, value)
