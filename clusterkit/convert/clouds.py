"""Task files of SkyPilot and of dstack. Pure.

They rent machines, which clusterkit does not: keys that choose machines are left to the user.
Sources: the reference pages of SkyPilot 0.10 and dstack 0.19.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from clusterkit.convert import lines
from clusterkit.convert.draft import Draft, Tree
from clusterkit.convert.options import apply_meaning, assigned, job_name, variables
from clusterkit.convert.script import Script, left
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


def skypilot(draft: Draft, text: str, words: Sequence[str]) -> None:
    """Convert a task of SkyPilot."""
    tree = Tree(draft, parse_yaml(text, draft.name))
    tree.expect({"run": str, "setup": str})
    _name(draft, tree)
    nodes = _nodes(draft, tree, "num_nodes")
    unknown = "!clusterkit knows no such key of SkyPilot"
    gpus = None
    for key, value in tree.each("resources"):
        origin = f"resources.{key}: {value}"
        if key == "accelerators":
            gpus = _gpus(draft, origin, value)
        else:
            apply_meaning(draft, origin, _SKY_RESOURCES.get(key, unknown), value)
    known = {"SKYPILOT_NUM_NODES": str(nodes)}
    if gpus:
        known["SKYPILOT_NUM_GPUS_PER_NODE"] = str(gpus)
    for name, value in tree.each("envs"):
        _variable(draft, f"envs.{name}", name, value, known)
    for name, _ in tree.each("secrets"):
        draft.secret(f"secrets.{name}", name)
    _folder(draft, tree, "workdir")
    for target, source in tree.each("file_mounts"):
        draft.todo(f"file_mounts.{target}: {_short(source)}", "put it on the machines")
    for key in ("volumes", "config", "service", "pool"):
        if tree.get(key) is not None:
            draft.refuse(key, "clusterkit has no equivalent")
    _once(draft, tree, "setup")
    _script(draft, tree, known, "run", str(tree.get("run") or ""))
    tree.rest(unknown[1:])


def dstack(draft: Draft, text: str, words: Sequence[str]) -> None:
    """Convert a task of dstack."""
    tree = Tree(draft, parse_yaml(text, draft.name))
    tree.expect({"commands": list, "commands.*": str, "env": (list, dict)})
    kind = tree.get("type")
    if kind != "task":
        draft.refuse(f"type: {kind}", "a job is a task")
        return
    _name(draft, tree)
    nodes = _nodes(draft, tree, "nodes")
    unknown = "!clusterkit knows no such key of dstack"
    gpus = None
    for key, value in tree.each("resources"):
        origin = f"resources.{key}: {_short(value)}"
        if key == "gpu":
            count = value.get("count", 1) if isinstance(value, dict) else value
            gpus = _gpus(draft, origin, count)
        else:
            apply_meaning(draft, origin, _DSTACK_RESOURCES.get(key, unknown), value)
    known = {"DSTACK_NODES_NUM": str(nodes)}
    if gpus:
        known |= {"DSTACK_GPUS_PER_NODE": str(gpus), "DSTACK_GPUS_NUM": str(gpus * nodes)}
    for name, value in variables(tree.get("env")):
        _variable(draft, f"env.{name}", name, value, known)
    for key, meaning in _DSTACK.items():
        if (value := tree.get(key)) is not None:
            apply_meaning(draft, f"{key}: {_short(value)}", meaning, value)
    _folder(draft, tree, "working_dir")
    if (limit := tree.get("max_duration")) is not None:
        if str(limit) in ("off", "False"):
            draft.drop(f"max_duration: {limit}", "as without it")
        else:
            draft.key(f"max_duration: {limit}", "time_limit", limit)
    if (retry := tree.get("retry")) is not None:
        if retry:
            became = "restarts: 3; it has no number there, and a job needs one"
            draft.key("retry", "restarts", 3, became)
        else:
            draft.drop("retry: false", "as without it")
    commands = tree.get("commands") or []
    _script(draft, tree, known, "commands", "\n".join(map(str, commands)), listed=True)
    tree.rest(unknown[1:])


def _variable(draft: Draft, origin: str, name: str, value: Any, known: dict[str, str]) -> None:
    """Set a variable of the ranks, and record its value for their commands."""
    if value is not None:
        known[name] = value = str(value)
    assigned(draft, origin, name, value)


def _nodes(draft: Draft, tree: Tree, key: str) -> int:
    nodes = tree.get(key)
    nodes = 1 if nodes is None else nodes
    draft.number(f"{key}: {nodes}", "nodes", nodes)
    return int(draft.job.get("nodes", 1))


def _folder(draft: Draft, tree: Tree, key: str) -> None:
    if (folder := tree.get(key)) in (".", "./"):
        draft.drop(f"{key}: {folder}", "the project's folder is copied anyway")
    elif folder is not None:
        draft.key(f"{key}: {folder}", "workdir", folder)


def _name(draft: Draft, tree: Tree) -> None:
    if name := tree.get("name"):
        draft.key(f"name: {name}", "name", job_name(str(name)))


def _once(draft: Draft, tree: Tree, key: str) -> None:
    for line in str(tree.get(key) or "").splitlines():
        if line.strip() and not line.strip().startswith("#"):
            draft.todo(f"{key}: {line.strip()}", "run it once on every machine")


def _script(
    draft: Draft, tree: Tree, known: Mapping[str, str], key: str, text: str,
    *, listed: bool = False,
) -> None:  # fmt: skip
    """Convert the commands of every node."""
    line = int((re.search(r":(\d+)$", tree.document.where((key,))) or ["", "1"])[1])
    # The text of a block begins in the next line.
    script = Script(draft, known, lines.convert, left("run it once on every machine"))
    script.read(text, line + (1 if listed or "\n" in text else 0))
    if not script.launched and not draft.refused:
        draft.refuse(key, "no line starts ranks: torchrun, accelerate launch, python, ...")


def _gpus(draft: Draft, origin: str, value: Any) -> int | None:
    gpus = _count(value)
    apply_meaning(
        draft, origin, f"?the machines need {counted(gpus, 'GPU')} each" if gpus else _RENT, value
    )
    return gpus


def _count(value: Any) -> int | None:
    """Return the GPUs of ``H100:8``, ``{H100: 8}``, ``8`` or ``80GB:8``; None: not given."""
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
