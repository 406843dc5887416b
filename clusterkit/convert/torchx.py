"""``torchx run``: the component dist.ddp, and where it is to run. Pure.

Source: TorchX 0.7's built-in components and schedulers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from clusterkit import shell
from clusterkit.convert.options import assigned, job_name
from clusterkit.convert.sheet import LOGS, OURS, Sheet

_COMPONENTS = ("dist.ddp", "dist.spmd")
_KUBERNETES = ("namespace", "queue", "service_account", "priority_class")
_SCHEDULERS = {
    "slurm": ("slurm", ("partition", "time", "constraint")),
    "kubernetes": ("kubernetes", _KUBERNETES),
    "kubernetes_mcad": ("kubernetes", _KUBERNETES),
}
"""The backend of each, and those of its settings that its entry calls as TorchX does."""
_RUN_VALUES = {"-s", "--scheduler", "-cfg", "--scheduler_args", "--workspace", "--parent_run_id"}
_RUN_FLAGS = {"--dryrun", "--wait", "--log", "--tee_logs", "--stdin"}
_COUNT = re.compile(r"(\d+)(?::(\d+))?x(\d+)\Z")


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


def _run_options(sheet: Sheet, rest: list[str]) -> list[str]:
    scheduler, settings = "", ""
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        if name in _RUN_FLAGS:
            sheet.drop(name, "`clusterkit plan`, `submit` and `logs` do that")
            continue
        if name not in _RUN_VALUES:
            sheet.refuse(name, "clusterkit does not know this option of torchx run")
            continue
        if not equals and rest:
            value = rest.pop(0)
        if name in ("-s", "--scheduler"):
            scheduler = value
        elif name in ("-cfg", "--scheduler_args"):
            settings = f"{settings},{value}".strip(",")
        else:
            sheet.drop(f"{name} {value}", "the project's folder is copied anyway")
    if scheduler.startswith("local") or not scheduler:
        if scheduler:
            sheet.drop(f"-s {scheduler}", "this machine, as without it")
        for setting in filter(None, settings.split(",")):
            sheet.drop(f"-cfg {setting}", "a run has a folder and logs of its own")
        return rest
    if scheduler not in _SCHEDULERS:
        sheet.refuse(f"-s {scheduler}", "clusterkit has no such backend")
        return rest
    backend, keys = _SCHEDULERS[scheduler]
    sheet.cluster["backend"] = sheet.cluster_name = backend
    sheet.note(f"-s {scheduler}", f"cluster entry, backend: {backend}", "cluster")
    for setting in filter(None, settings.split(",")):
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
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if not equals and rest:
            value = rest.pop(0)
        written = word if equals else f"{word} {value}"
        if name == "-j":
            match = _COUNT.match(value)
            if match is None and value.isdecimal():
                sheet.key(written, "nodes", 1)
                sheet.key(written, "gpus_per_node", int(value))
            elif match is None:
                sheet.refuse(written, "not NODESxRANKS or MIN:MAXxRANKS")
            else:
                nodes = f"{match[1]}:{match[2]}" if match[2] else int(match[1])
                sheet.key(written, "nodes", nodes)
                sheet.key(written, "gpus_per_node", int(match[3]))
        elif name == "--script":
            sheet.key(written, "program", value)
        elif name in ("-m", "--module"):
            sheet.key(written, "module", value)
        elif name == "--name":
            sheet.key(written, "name", job_name(value))
        elif name == "--max_retries":
            sheet.number(written, "restarts", value, least=0)
        elif name == "--env":
            for pair in re.split(r"[;,](?=[A-Za-z_]\w*=)", value):
                variable, _, text = pair.partition("=")
                assigned(sheet, written, variable, text)
        elif name == "--image":
            if sheet.cluster_name == "kubernetes":
                sheet.entry(written, "image", value)
            else:
                sheet.yours(written, "the entry's image, where it has one")
        elif name in ("--cpu", "--memMB", "--gpu", "-h", "--host"):
            sheet.yours(written, "the cluster's entry says what a node gives")
        elif name in ("--rdzv_port", "--rdzv_backend", "--rdzv_conf"):
            sheet.drop(written)
        elif name in ("--tee", "--debug"):
            sheet.drop(written, LOGS)
        else:
            sheet.refuse(written, "clusterkit does not know this option of dist.ddp")
    return rest
