"""A compose file whose services are the nodes of one job. Pure.

Source: the Compose Specification.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from typing import Any

from clusterkit.convert import lines
from clusterkit.convert.kubernetes import run_in_image
from clusterkit.convert.options import assigned, job_name, meant, variables
from clusterkit.convert.sheet import OURS, Sheet, Tree
from clusterkit.errors import dotted
from clusterkit.yaml_file import parse_yaml

_OWN = frozenset(
    {"container_name", "hostname", "depends_on", "ports", "expose", "networks", "profiles",
     "healthcheck", "restart", "stdin_open", "tty", "init", "stop_grace_period"}
)  # fmt: skip
"""Of one node, or what clusterkit does its own way."""
_KEYS = {
    "image": "entry.image", "mem_limit": "entry.memory", "cpus": "entry.cpus",
    "build": "?docker build it first, and name it as the entry's `image`",
}  # fmt: skip
_RANK = re.compile(r"^--(node|machine)[-_]rank(=.*)?$")
_RANK_VARIABLES = frozenset({"NODE_RANK", "RANK", "GROUP_RANK"})

_TYPES: dict[str, type | tuple[type, ...]] = {
    "services": dict, "services.*": dict, "services.*.volumes": list,
    "services.*.environment": (list, dict), "services.*.command": (str, list),
    "services.*.entrypoint": (str, list), "services.*.ulimits": dict, "services.*.deploy": dict,
    "services.*.deploy.resources": dict, "services.*.deploy.resources.*.devices": list,
    "services.*.deploy.resources.*.devices.*": dict,
    "services.*.deploy.resources.*.devices.*.device_ids": list, "volumes": dict,
}  # fmt: skip
"""What stands where in the keys that are read here."""


def file(sheet: Sheet, text: str, words: Sequence[str]) -> None:
    """A whole file."""
    tree = Tree(sheet, parse_yaml(text, sheet.name))
    tree.expect(_TYPES)
    sheet.cluster["backend"] = sheet.cluster_name = "compose"
    services = tree.peek("services") or {}
    if not services:
        sheet.refuse("services", "there are none")
        return
    first = next(iter(services))
    nodes = 0
    for name, service in services.items():
        count = _replicas(tree, "services", name)
        nodes += count
        if name != first:
            _alike(sheet, tree, name, service, first, services[first])
    tree.get("services", first)
    tree.seen.discard(("services", first))
    sheet.key(f"services: {', '.join(services)}", "nodes", nodes)
    if project := tree.get("name"):
        sheet.key(f"name: {project}", "name", job_name(str(project)))
    for key in ("version", "networks"):
        if tree.peek(key) is not None:
            tree.get(key)
            sheet.drop(key, "a run has a network of its own" if key == "networks" else "not used")
    for name in list(tree.peek("volumes") or {}):
        tree.get("volumes", name)
        sheet.yours(f"volumes.{name}", f"docker volume create {name}")
    tree.get("volumes")
    _service(sheet, tree, "services", first)
    tree.rest()


def _replicas(tree: Tree, *place: str) -> int:
    value = tree.get(*place, "scale") or tree.get(*place, "deploy", "replicas")
    return int(value) if isinstance(value, int) else 1


def _alike(sheet: Sheet, tree: Tree, name: str, service: Any, first: str, model: Any) -> None:
    """Refuse what another node has that the first one has not."""
    tree.get("services", name)
    for key in sorted({*service, *model} - _OWN):
        one, other = (_plain(sheet, each.get(key), key) for each in (service, model))
        if one != other:
            tree.get("services", name, key)
            sheet.refuse(f"services.{name}.{key}", f"all nodes are alike, and {first}'s is another")
    tree.get("services", name)
    sheet.note(f"services.{name}", f"a node, as {first}", "job")


def _plain(sheet: Sheet, value: Any, key: str) -> Any:
    """A value without what numbers its node."""
    if key in ("command", "entrypoint") and value is not None:
        words = [
            word
            for each in sheet.words(key, value)
            for word in (each.split() if " " in each else [each])
        ]
        found, skip = [], False
        for word in words:
            if skip:
                skip = False
            elif match := _RANK.match(word):
                skip = match[2] is None
            else:
                found.append(word)
        return found
    if key == "environment":
        return {name: text for name, text in variables(value) if name not in _RANK_VARIABLES}
    return value


def _service(sheet: Sheet, tree: Tree, *place: str) -> None:
    """The first node, which speaks for all of them."""
    service = tree.peek(*place)
    code = ""
    for number, volume in enumerate(service.get("volumes") or ()):
        tree.get(*place, "volumes", number)
        code = _volume(sheet, volume, dotted(("volumes", number))) or code
    folder = str(tree.get(*place, "working_dir") or "")
    if folder and code and (folder + "/").startswith(code + "/"):
        sheet.drop(f"working_dir: {folder}", "the project's folder is mounted as it is")
    elif folder:
        sheet.refuse(f"working_dir: {folder}", "say WORKDIR in the image")
    for key in service:
        if key in ("volumes", "working_dir", "command", "entrypoint", "deploy", "scale"):
            continue
        _key(sheet, key, tree.get(*place, key))
    _deploy(sheet, tree, *place)
    tree.get(*place, "scale")
    words: list[str] = []
    for key in ("entrypoint", "command"):
        words += sheet.words(key, tree.get(*place, key))
    if filled := next((word for word in words if re.search(r"(?<!\$)\$\{?\w", word)), None):
        sheet.refuse(filled, "write the value that compose puts in")
    words = [word.replace("$$", "$") for word in words]
    if not words:
        sheet.refuse("command", "without it the image's own runs, which is not known here")
    elif code:
        words = [_below(word, code) for word in words]
        if (script := lines.script_of(words)) is not None:
            words = sheet.words("command", script)
        lines.convert(sheet, words)
    else:
        sheet.entry("no volume holds the program", "code", "baked")
        run_in_image(sheet, words)


def _below(word: str, code: str) -> str:
    """A path below the mounted project, as it is on this machine."""
    return posixpath.relpath(word, code) if word.startswith(code + "/") else word


def _volume(sheet: Sheet, volume: Any, what: str) -> str | None:
    """One volume; of the project's own folder, where it is in the container."""
    if isinstance(volume, dict):
        text = f"{volume.get('source')}:{volume.get('target')}"
        text += ":ro" if volume.get("read_only") else ""
    else:
        text = str(volume)
    source, _, target = text.partition(":")
    if source in (".", "./"):
        sheet.drop(f"{what}: {text}", "the project's folder is mounted anyway")
        return target.partition(":")[0].rstrip("/")
    sheet.more(f"{what}: {text}", "volumes", text)
    return None


def _key(sheet: Sheet, key: str, value: Any) -> None:
    what = f"{key}: {value}"
    if key in _KEYS:
        meant(sheet, what if key != "build" else key, _KEYS[key], value)
    elif key == "environment":
        for name, text in variables(value):
            if "${" in (text or ""):
                sheet.refuse(f"environment.{name}: {text}", "write its value instead")
            else:
                assigned(sheet, f"environment.{name}", name, text)
    elif key == "shm_size":
        sheet.entry(what, "shm_size", str(value))
    elif key == "ulimits":
        limits = {name: each.get("soft") if isinstance(each, dict) else each
                  for name, each in (value or {}).items()}  # fmt: skip
        sheet.entry(what, "ulimits", limits)
    elif key == "gpus":
        sheet.entry(what, "gpus", "auto" if value == "all" else value)
    elif key in _OWN or key in ("runtime", "ipc"):
        sheet.drop(what if isinstance(value, (str, int, bool)) else key, OURS)
    else:
        sheet.refuse(key, "containers of a run have no such key")


def _deploy(sheet: Sheet, tree: Tree, *place: str) -> None:
    for field in ("limits", "reservations"):
        for key, value in tree.each(*place, "deploy", "resources", field):
            what = f"{field}.{key}: {value}"
            if key in ("cpus", "memory"):
                if key in sheet.cluster:
                    sheet.drop(what, "the limit counts")
                else:
                    number = key == "cpus" and re.fullmatch(r"[0-9]+(\.[0-9]+)?", str(value))
                    sheet.entry(what, key, float(value) if number else str(value))
            elif key == "devices":
                for device in value or ():
                    count = len(device.get("device_ids") or ()) or device.get("count", "all")
                    sheet.entry("devices", "gpus", "auto" if count == "all" else count)
            else:
                sheet.refuse(what, "containers of a run have no such key")
