"""YAML of SkyPilot and of dstack: the job on machines that somebody has. Pure.

They rent machines, which clusterkit does not: what says which to rent is left to whoever converts.
Sources: the reference pages of SkyPilot 0.10 and dstack 0.19.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from clusterkit.convert import lines
from clusterkit.convert.options import assigned, job_name, meant, variables
from clusterkit.convert.script import Script, left
from clusterkit.convert.sheet import Sheet, Tree
from clusterkit.errors import counted
from clusterkit.jobfile.launcher_options import each
from clusterkit.yaml_file import parse_yaml

_RENT = "?a cluster entry names machines that you have"
_LISTENS = "-nothing is asked of a run from outside"
_SKY_RESOURCES = {"ports": _LISTENS} | each(
    "cloud infra region zone instance_type use_spot disk_size disk_tier network_tier image_id "
    "labels autostop accelerator_args any_of ordered cpus memory job_recovery spot_recovery "
    "priority local_disk", _RENT,
)  # fmt: skip
_DSTACK_RESOURCES = each("cpu memory disk shm_size", _RENT)
_DSTACK = (
    each("python image docker nvcc user privileged home_dir shell entrypoint registry_auth volumes "
         "files repos repo", "?the machines, or the entry's image, have it")
    | each("ports inactivity_duration stop_duration single_branch", _LISTENS)
    | each("availability_zones backends creation_policy fleets idle_duration instance_types "
           "instances max_price priority regions reservation schedule spot_policy startup_order "
           "stop_criteria tags utilization_policy", _RENT)
)  # fmt: skip


def skypilot(sheet: Sheet, text: str, words: Sequence[str]) -> None:
    """A task of SkyPilot."""
    tree = Tree(sheet, parse_yaml(text, sheet.name))
    tree.expect({"run": str, "setup": str})
    _name(sheet, tree)
    nodes = _nodes(sheet, tree, "num_nodes")
    unknown = "!clusterkit knows no such key of SkyPilot"
    gpus = None
    for key, value in tree.each("resources"):
        what = f"resources.{key}: {value}"
        if key == "accelerators":
            gpus = _gpus(sheet, what, value)
        else:
            meant(sheet, what, _SKY_RESOURCES.get(key, unknown), value)
    known = {"SKYPILOT_NUM_NODES": str(nodes)}
    if gpus:
        known["SKYPILOT_NUM_GPUS_PER_NODE"] = str(gpus)
    for name, value in tree.each("envs"):
        _variable(sheet, f"envs.{name}", name, value, known)
    for name, _ in tree.each("secrets"):
        sheet.secret(f"secrets.{name}", name)
    _folder(sheet, tree, "workdir")
    for target, source in tree.each("file_mounts"):
        sheet.yours(f"file_mounts.{target}: {_short(source)}", "put it on the machines")
    for key in ("volumes", "config", "service", "pool"):
        if tree.get(key) is not None:
            sheet.refuse(key, "clusterkit has no equivalent")
    _once(sheet, tree, "setup")
    _script(sheet, tree, known, "run", str(tree.get("run") or ""))
    tree.rest(unknown[1:])


def dstack(sheet: Sheet, text: str, words: Sequence[str]) -> None:
    """A task of dstack."""
    tree = Tree(sheet, parse_yaml(text, sheet.name))
    tree.expect({"commands": list, "commands.*": str, "env": (list, dict)})
    kind = tree.get("type")
    if kind != "task":
        sheet.refuse(f"type: {kind}", "a job is a task")
        return
    _name(sheet, tree)
    nodes = _nodes(sheet, tree, "nodes")
    unknown = "!clusterkit knows no such key of dstack"
    gpus = None
    for key, value in tree.each("resources"):
        what = f"resources.{key}: {_short(value)}"
        if key == "gpu":
            count = value.get("count", 1) if isinstance(value, dict) else value
            gpus = _gpus(sheet, what, count)
        else:
            meant(sheet, what, _DSTACK_RESOURCES.get(key, unknown), value)
    known = {"DSTACK_NODES_NUM": str(nodes)}
    if gpus:
        known |= {"DSTACK_GPUS_PER_NODE": str(gpus), "DSTACK_GPUS_NUM": str(gpus * nodes)}
    for name, value in variables(tree.get("env")):
        _variable(sheet, f"env.{name}", name, value, known)
    for key, meaning in _DSTACK.items():
        if (value := tree.get(key)) is not None:
            meant(sheet, f"{key}: {_short(value)}", meaning, value)
    _folder(sheet, tree, "working_dir")
    if (limit := tree.get("max_duration")) is not None:
        if str(limit) in ("off", "False"):
            sheet.drop(f"max_duration: {limit}", "as without it")
        else:
            sheet.key(f"max_duration: {limit}", "time_limit", limit)
    if (retry := tree.get("retry")) is not None:
        if retry:
            said = "restarts: 3; it has no number there, and a job needs one"
            sheet.key("retry", "restarts", 3, said)
        else:
            sheet.drop("retry: false", "as without it")
    commands = tree.get("commands") or []
    _script(sheet, tree, known, "commands", "\n".join(map(str, commands)), listed=True)
    tree.rest(unknown[1:])


def _variable(sheet: Sheet, what: str, name: str, value: Any, known: dict[str, str]) -> None:
    """A variable of the ranks, which their commands may name."""
    if value is not None:
        known[name] = value = str(value)
    assigned(sheet, what, name, value)


def _nodes(sheet: Sheet, tree: Tree, key: str) -> int:
    nodes = tree.get(key)
    nodes = 1 if nodes is None else nodes
    sheet.number(f"{key}: {nodes}", "nodes", nodes)
    return int(sheet.job.get("nodes", 1))


def _folder(sheet: Sheet, tree: Tree, key: str) -> None:
    if (folder := tree.get(key)) in (".", "./"):
        sheet.drop(f"{key}: {folder}", "the project's folder is copied anyway")
    elif folder is not None:
        sheet.key(f"{key}: {folder}", "workdir", folder)


def _name(sheet: Sheet, tree: Tree) -> None:
    if name := tree.get("name"):
        sheet.key(f"name: {name}", "name", job_name(str(name)))


def _once(sheet: Sheet, tree: Tree, key: str) -> None:
    for line in str(tree.get(key) or "").splitlines():
        if line.strip() and not line.strip().startswith("#"):
            sheet.yours(f"{key}: {line.strip()}", "run it once on every machine")


def _script(
    sheet: Sheet, tree: Tree, known: Mapping[str, str], key: str, text: str,
    *, listed: bool = False,
) -> None:  # fmt: skip
    """The commands of every node."""
    line = int((re.search(r":(\d+)$", tree.document.where((key,))) or ["", "1"])[1])
    # The text of a block begins in the next line.
    script = Script(sheet, known, lines.convert, left("run it once on every machine"))
    script.read(text, line + (1 if listed or "\n" in text else 0))
    if not script.launched and not sheet.refused:
        sheet.refuse(key, "no line starts ranks: torchrun, accelerate launch, python, ...")


def _gpus(sheet: Sheet, what: str, value: Any) -> int | None:
    gpus = _count(value)
    meant(sheet, what, f"?the machines need {counted(gpus, 'GPU')} each" if gpus else _RENT, value)
    return gpus


def _count(value: Any) -> int | None:
    """GPUs of ``H100:8``, ``{H100: 8}``, ``8``, ``80GB:8``; None: it does not say."""
    if isinstance(value, bool):
        return None
    if isinstance(value, dict):
        value = next(iter(value.values()), None)
    if isinstance(value, list):
        return None
    if isinstance(value, int):
        return value
    numbers = [part for part in str(value).split(":")[1:] if part.isdecimal()]
    if numbers:
        return int(numbers[0])
    return int(str(value)) if str(value).isdecimal() else 1


def _short(value: Any) -> str:
    return str(value)[:60]
