"""A compose file whose services are the nodes of one job. Pure.

Source: the Compose Specification.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from typing import Any

from clusterkit.convert import lines
from clusterkit.convert.draft import OURS, Draft, Tree
from clusterkit.convert.kubernetes import run_in_image
from clusterkit.convert.options import apply_meaning, assigned, job_name, variables
from clusterkit.errors import dotted
from clusterkit.yaml_file import parse_yaml

_OWN = frozenset(
    {"container_name", "hostname", "depends_on", "ports", "expose", "networks", "profiles",
     "healthcheck", "restart", "stdin_open", "tty", "init", "stop_grace_period"}
)  # fmt: skip
"""Keys that differ between nodes, or that clusterkit sets itself."""
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
"""Types of the keys that are read, by path."""


def file(draft: Draft, text: str, words: Sequence[str]) -> None:
    """Convert a compose file."""
    tree = Tree(draft, parse_yaml(text, draft.name))
    tree.expect(_TYPES)
    draft.cluster["backend"] = draft.cluster_name = "compose"
    services = tree.peek("services") or {}
    if not services:
        draft.refuse("services", "there are none")
        return
    first = next(iter(services))
    nodes = 0
    for name, service in services.items():
        count = _replicas(tree, "services", name)
        nodes += count
        if name != first:
            _alike(draft, tree, name, service, first, services[first])
    tree.get("services", first)
    tree.seen.discard(("services", first))
    draft.key(f"services: {', '.join(services)}", "nodes", nodes)
    if project := tree.get("name"):
        draft.key(f"name: {project}", "name", job_name(str(project)))
    for key in ("version", "networks"):
        if tree.peek(key) is not None:
            tree.get(key)
            draft.drop(key, "a run has a network of its own" if key == "networks" else "not used")
    for name in list(tree.peek("volumes") or {}):
        tree.get("volumes", name)
        draft.todo(f"volumes.{name}", f"docker volume create {name}")
    tree.get("volumes")
    _service(draft, tree, "services", first)
    tree.rest()


def _replicas(tree: Tree, *place: str) -> int:
    value = tree.get(*place, "scale") or tree.get(*place, "deploy", "replicas")
    return int(value) if isinstance(value, int) else 1


def _alike(draft: Draft, tree: Tree, name: str, service: Any, first: str, model: Any) -> None:
    """Refuse keys in which another node differs from the first one."""
    tree.get("services", name)
    for key in sorted({*service, *model} - _OWN):
        one, other = (_plain(draft, each.get(key), key) for each in (service, model))
        if one != other:
            tree.get("services", name, key)
            draft.refuse(f"services.{name}.{key}", f"all nodes are alike, and {first}'s is another")
    tree.get("services", name)
    draft.note(f"services.{name}", f"a node, as {first}", "job")


def _plain(draft: Draft, value: Any, key: str) -> Any:
    """Return a value without node rank and master address."""
    if key in ("command", "entrypoint") and value is not None:
        words = [
            word
            for each in draft.words(key, value)
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


def _service(draft: Draft, tree: Tree, *place: str) -> None:
    """Convert the first node; all others are like it."""
    service = tree.peek(*place)
    code = ""
    for number, volume in enumerate(service.get("volumes") or ()):
        tree.get(*place, "volumes", number)
        code = _volume(draft, volume, dotted(("volumes", number))) or code
    folder = str(tree.get(*place, "working_dir") or "")
    if folder and code and (folder + "/").startswith(code + "/"):
        draft.drop(f"working_dir: {folder}", "the project's folder is mounted as it is")
    elif folder:
        draft.refuse(f"working_dir: {folder}", "set WORKDIR in the image")
    for key in service:
        if key in ("volumes", "working_dir", "command", "entrypoint", "deploy", "scale"):
            continue
        _key(draft, key, tree.get(*place, key))
    _deploy(draft, tree, *place)
    tree.get(*place, "scale")
    words: list[str] = []
    for key in ("entrypoint", "command"):
        words += draft.words(key, tree.get(*place, key))
    if filled := next((word for word in words if re.search(r"(?<!\$)\$\{?\w", word)), None):
        draft.refuse(filled, "write the value that compose substitutes")
    words = [word.replace("$$", "$") for word in words]
    if not words:
        draft.refuse("command", "the image's default command is not known: write the command")
    elif code:
        words = [_below(word, code) for word in words]
        if (script := lines.script_of(words)) is not None:
            words = draft.words("command", script)
        lines.convert(draft, words)
    else:
        draft.entry("no volume holds the program", "code", "baked")
        run_in_image(draft, words)


def _below(word: str, code: str) -> str:
    """Return a path of the mounted project relative to the project's folder."""
    return posixpath.relpath(word, code) if word.startswith(code + "/") else word


def _volume(draft: Draft, volume: Any, origin: str) -> str | None:
    """Convert a volume. Return the mount path if it is the project's folder."""
    if isinstance(volume, dict):
        text = f"{volume.get('source')}:{volume.get('target')}"
        text += ":ro" if volume.get("read_only") else ""
    else:
        text = str(volume)
    source, _, target = text.partition(":")
    if source in (".", "./"):
        draft.drop(f"{origin}: {text}", "the project's folder is mounted anyway")
        return target.partition(":")[0].rstrip("/")
    draft.append(f"{origin}: {text}", "volumes", text)
    return None


def _key(draft: Draft, key: str, value: Any) -> None:
    origin = f"{key}: {value}"
    if key in _KEYS:
        apply_meaning(draft, origin if key != "build" else key, _KEYS[key], value)
    elif key == "environment":
        for name, text in variables(value):
            if "${" in (text or ""):
                draft.refuse(f"environment.{name}: {text}", "write its value instead")
            else:
                assigned(draft, f"environment.{name}", name, text)
    elif key == "shm_size":
        draft.entry(origin, "shm_size", str(value))
    elif key == "ulimits":
        limits = {name: each.get("soft") if isinstance(each, dict) else each
                  for name, each in (value or {}).items()}  # fmt: skip
        draft.entry(origin, "ulimits", limits)
    elif key == "gpus":
        draft.entry(origin, "gpus", "auto" if value == "all" else value)
    elif key in _OWN or key in ("runtime", "ipc"):
        draft.drop(origin if isinstance(value, (str, int, bool)) else key, OURS)
    else:
        draft.refuse(key, "containers of a run have no such key")


def _deploy(draft: Draft, tree: Tree, *place: str) -> None:
    for field in ("limits", "reservations"):
        for key, value in tree.each(*place, "deploy", "resources", field):
            origin = f"{field}.{key}: {value}"
            if key in ("cpus", "memory"):
                if key in draft.cluster:
                    draft.drop(origin, "the limit is used")
                else:
                    number = key == "cpus" and re.fullmatch(r"[0-9]+(\.[0-9]+)?", str(value))
                    draft.entry(origin, key, float(value) if number else str(value))
            elif key == "devices":
                for device in value or ():
                    count = len(device.get("device_ids") or ()) or device.get("count", "all")
                    draft.entry("devices", "gpus", "auto" if count == "all" else count)
            else:
                draft.refuse(origin, "containers of a run have no such key")
