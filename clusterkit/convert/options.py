"""Shared by all sources: options by a table of meanings, variables of the ranks. Pure."""

from __future__ import annotations

import re
from typing import Any

from clusterkit.convert.draft import LOGS, Draft
from clusterkit.jobfile.command import Used
from clusterkit.jobfile.launcher_options import BINDING, BY_ENVIRONMENT, COMMAND, MODULE, OURS
from clusterkit.jobfile.launcher_options import LOGS as OF_LOGS

RENDEZVOUS = frozenset(
    {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
     "NODE_RANK", "GROUP_RANK", "RDZV_ENDPOINT", "RDZV_ID", "RDZV_BACKEND"}
)  # fmt: skip
"""Variables that clusterkit sets for every rank."""
_DEVICES = frozenset({"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"})


def apply_option(draft: Draft, used: Used) -> None:
    """Convert an option by the table of its launcher."""
    apply_meaning(draft, used.written, used.meaning, used.value)


def apply_meaning(draft: Draft, origin: str, meaning: str, value: Any) -> None:
    """Record a value by its meaning, as `clusterkit.jobfile.launcher_options.Tool` writes it."""
    key, is_set, constant = meaning.partition("=")
    value = constant if is_set else value
    if meaning == OURS:
        draft.drop(origin)
    elif meaning in (MODULE, COMMAND):
        draft.note(origin, f"the program is {meaning}", "job")
    elif meaning == BY_ENVIRONMENT:
        draft.drop(origin, "LOCAL_RANK is set in the environment")
    elif meaning == OF_LOGS:
        draft.drop(origin, LOGS)
    elif meaning == BINDING:
        draft.refuse(origin, BINDING[1:])
    elif meaning.startswith("!"):
        draft.refuse(origin, meaning[1:] or "clusterkit has no equivalent")
    elif meaning.startswith("-"):
        draft.drop(origin, meaning[1:])
    elif key.startswith("entry."):
        draft.entry(origin, key[6:], {"true": True, "false": False}.get(constant, value))
    elif key in ("nodes", "gpus_per_node", "threads_per_rank"):
        draft.number(origin, key, value)
    elif key == "restarts":
        draft.number(origin, key, value, least=0)
    elif key.startswith("env."):
        draft.env(origin, key[4:], value)
    else:
        draft.key(origin, key, value)


def job_name(text: str) -> str:
    """Return a valid job name made from any text."""
    return re.sub(r"[^\w. -]+", "-", text).strip("-. ")[:40] or "job"


def assigned(draft: Draft, origin: str, name: str, value: str | None) -> None:
    """Convert a variable of the ranks. None: taken from the submitter's environment."""
    if name.startswith("PET_"):
        draft.refuse(origin, "an option of torchrun: write it as an option")
    elif value is None:
        draft.secret(origin, name)
    elif name in RENDEZVOUS:
        draft.drop(origin)
    elif name == "OMP_NUM_THREADS":
        draft.number(origin, "threads_per_rank", value)
    elif name in _DEVICES:
        draft.todo(origin, f"set {name} where you submit: this machine's visible GPUs are used")
    else:
        draft.env(origin, name, value)
