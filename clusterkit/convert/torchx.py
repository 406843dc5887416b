"""``torchx run``: the component dist.ddp, and where it is to run. Pure.

Source: TorchX 0.7's built-in components and schedulers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from clusterkit import shell
from clusterkit.convert.options import assigned, by_meaning, job_name
from clusterkit.convert.sheet import OURS, Sheet
from clusterkit.jobfile.command import options
from clusterkit.jobfile.launcher_options import DIST_DDP, SPECIAL, TORCHX_RUN

_COMPONENTS = ("dist.ddp", "dist.spmd")
_KUBERNETES = ("namespace", "queue", "service_account", "priority_class")
_SCHEDULERS = {
    "slurm": ("slurm", ("partition", "time", "constraint")),
    "kubernetes": ("kubernetes", _KUBERNETES),
    "kubernetes_mcad": ("kubernetes", _KUBERNETES),
}
"""The backend of each, and those of its settings that its entry calls as TorchX does."""
_COUNT = re.compile(r"(?:(\d+)(?::(\d+))?x)?(\d+)\Z")


def command(sheet: Sheet, words: Sequence[str]) -> None:
    """A whole command line."""
    rest = list(words[1:])
    if rest[:1] != ["run"]:
        sheet.refuse(shell.join(words[:2]), "only `torchx run` starts something")
        return
    rest = _run_options(sheet, rest[1:])
    if not rest or rest[0] not in _COMPONENTS:
        sheet.refuse(rest[0] if rest else "torchx run", f"one of {', '.join(_COMPONENTS)} is known")
        return
    sheet.drop(rest[0], "clusterkit starts the ranks as it does")
    args = _component(sheet, rest[1:])
    sheet.key("torchx", "launcher", "torchrun")
    if "nodes" not in sheet.job:
        sheet.key("no -j", "nodes", 1)
    if "program" not in sheet.job and "module" not in sheet.job:
        sheet.refuse("torchx run", "--script or -m names what runs")
    elif "name" not in sheet.job:
        program = str(sheet.job.get("program") or sheet.job.get("module"))
        sheet.job["name"] = job_name(re.sub(r"\.py$", "", program).rpartition("/")[2])
    if args:
        sheet.job["args"] = args


def _run_options(sheet: Sheet, words: list[str]) -> list[str]:
    found, rest = options(TORCHX_RUN, words, "torchx run")
    scheduler, settings = "", []
    for used in found:
        if used.name == "-s":
            scheduler = used.value
        elif used.name == "-cfg":
            settings += [each for each in used.value.split(",") if each]
        else:
            by_meaning(sheet, used)
    if scheduler.startswith("local") or not scheduler:
        if scheduler:
            sheet.drop(f"-s {scheduler}", "this machine, as without it")
        for setting in settings:
            sheet.drop(f"-cfg {setting}", "a run has a folder and logs of its own")
        return rest
    if scheduler not in _SCHEDULERS:
        sheet.refuse(f"-s {scheduler}", "clusterkit has no such backend")
        return rest
    backend, keys = _SCHEDULERS[scheduler]
    sheet.cluster["backend"] = sheet.cluster_name = backend
    sheet.note(f"-s {scheduler}", f"cluster entry, backend: {backend}", "cluster")
    for setting in settings:
        name, _, value = setting.partition("=")
        if name in keys:
            sheet.entry(f"-cfg {setting}", name, value)
        elif name == "nomem" or name == "job_dir":
            sheet.drop(f"-cfg {setting}", OURS)
        elif name == "mail-type" or name == "mail-user":
            sheet.more(f"-cfg {setting}", "options", f"--{setting}")
        else:
            sheet.refuse(f"-cfg {setting}", "the cluster's entry has no such key")
    return rest


def _component(sheet: Sheet, rest: list[str]) -> list[str]:
    """Options of dist.ddp; gives the program's arguments."""
    found, args = options(DIST_DDP, rest, "dist.ddp")
    for used in found:
        name, value, written = used.name, used.value, used.written
        if used.meaning != SPECIAL:
            by_meaning(sheet, used)
        elif name == "-j":
            _shape(sheet, written, value)
        elif name == "--name":
            sheet.key(written, "name", job_name(value))
        elif name == "--env":
            for pair in re.split(r"[;,](?=[A-Za-z_]\w*=)", value):
                variable, _, text = pair.partition("=")
                assigned(sheet, written, variable, text)
        elif sheet.cluster_name == "kubernetes":
            sheet.entry(written, "image", value)
        else:
            sheet.yours(written, "the entry's image, where it has one")
    return args


def _shape(sheet: Sheet, written: str, value: str) -> None:
    """``[MIN:]NODESxRANKS``, or the ranks of one node."""
    match = _COUNT.match(value)
    if match is None:
        sheet.refuse(written, "not NODESxRANKS or MIN:MAXxRANKS")
        return
    low, high, ranks = match.groups()
    nodes = f"{low}:{high}" if high else int(low or 1)
    sheet.key(written, "nodes", nodes)
    sheet.key(written, "gpus_per_node", int(ranks))
