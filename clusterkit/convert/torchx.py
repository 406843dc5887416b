"""``torchx run``: the component dist.ddp and its scheduler. Pure.

Source: TorchX 0.7's built-in components and schedulers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from clusterkit import shell
from clusterkit.convert.draft import OURS, Draft
from clusterkit.convert.options import apply_option, assigned, job_name
from clusterkit.jobfile.command import options
from clusterkit.jobfile.launcher_options import DIST_DDP, SPECIAL, TORCHX_RUN

_COMPONENTS = ("dist.ddp", "dist.spmd")
_KUBERNETES = ("namespace", "queue", "service_account", "priority_class")
_SCHEDULERS = {
    "slurm": ("slurm", ("partition", "time", "constraint")),
    "kubernetes": ("kubernetes", _KUBERNETES),
    "kubernetes_mcad": ("kubernetes", _KUBERNETES),
}
"""Backend of each scheduler, and its settings that have the same name in a cluster entry."""
_COUNT = re.compile(r"(?:(\d+)(?::(\d+))?x)?(\d+)\Z")


def command(draft: Draft, words: Sequence[str]) -> None:
    """Convert a command line."""
    rest = list(words[1:])
    if rest[:1] != ["run"]:
        draft.refuse(shell.join(words[:2]), "only `torchx run` starts something")
        return
    rest = _run_options(draft, rest[1:])
    if not rest or rest[0] not in _COMPONENTS:
        draft.refuse(rest[0] if rest else "torchx run", f"one of {', '.join(_COMPONENTS)} is known")
        return
    draft.drop(rest[0], "clusterkit starts the ranks the same way")
    args = _component(draft, rest[1:])
    draft.key("torchx", "launcher", "torchrun")
    if "nodes" not in draft.job:
        draft.key("no -j", "nodes", 1)
    if "program" not in draft.job and "module" not in draft.job:
        draft.refuse("torchx run", "--script or -m names what runs")
    elif "name" not in draft.job:
        program = str(draft.job.get("program") or draft.job.get("module"))
        draft.job["name"] = job_name(re.sub(r"\.py$", "", program).rpartition("/")[2])
    if args:
        draft.job["args"] = args


def _run_options(draft: Draft, words: list[str]) -> list[str]:
    found, rest = options(TORCHX_RUN, words, "torchx run")
    scheduler, settings = "", []
    for used in found:
        if used.name == "-s":
            scheduler = used.value
        elif used.name == "-cfg":
            settings += [each for each in used.value.split(",") if each]
        else:
            apply_option(draft, used)
    if scheduler.startswith("local") or not scheduler:
        if scheduler:
            draft.drop(f"-s {scheduler}", "this machine is the default")
        for setting in settings:
            draft.drop(f"-cfg {setting}", "a run has a folder and logs of its own")
        return rest
    if scheduler not in _SCHEDULERS:
        draft.refuse(f"-s {scheduler}", "clusterkit has no such backend")
        return rest
    backend, keys = _SCHEDULERS[scheduler]
    draft.cluster["backend"] = draft.cluster_name = backend
    draft.note(f"-s {scheduler}", f"cluster entry, backend: {backend}", "cluster")
    for setting in settings:
        name, _, value = setting.partition("=")
        if name in keys:
            draft.entry(f"-cfg {setting}", name, value)
        elif name == "nomem" or name == "job_dir":
            draft.drop(f"-cfg {setting}", OURS)
        elif name == "mail-type" or name == "mail-user":
            draft.append(f"-cfg {setting}", "options", f"--{setting}")
        else:
            draft.refuse(f"-cfg {setting}", "the cluster's entry has no such key")
    return rest


def _component(draft: Draft, rest: list[str]) -> list[str]:
    """Convert the options of dist.ddp. Return the program's arguments."""
    found, args = options(DIST_DDP, rest, "dist.ddp")
    for used in found:
        name, value, written = used.name, used.value, used.written
        if used.meaning != SPECIAL:
            apply_option(draft, used)
        elif name == "-j":
            _shape(draft, written, value)
        elif name == "--name":
            draft.key(written, "name", job_name(value))
        elif name == "--env":
            for pair in re.split(r"[;,](?=[A-Za-z_]\w*=)", value):
                variable, _, text = pair.partition("=")
                assigned(draft, written, variable, text)
        elif draft.cluster_name == "kubernetes":
            draft.entry(written, "image", value)
        else:
            draft.todo(written, "the entry's image, where it has one")
    return args


def _shape(draft: Draft, written: str, value: str) -> None:
    """``[MIN:]NODESxRANKS``, or the ranks of one node."""
    match = _COUNT.match(value)
    if match is None:
        draft.refuse(written, "not NODESxRANKS or MIN:MAXxRANKS")
        return
    low, high, ranks = match.groups()
    nodes = f"{low}:{high}" if high else int(low or 1)
    draft.key(written, "nodes", nodes)
    draft.key(written, "gpus_per_node", int(ranks))
