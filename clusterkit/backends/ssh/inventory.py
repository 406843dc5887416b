"""Reads hosts from an Ansible inventory or a DeepSpeed hostfile.

Hostfiles and plain YAML inventories (``hosts``, ``children`` and ``vars``, every host written out)
are parsed here. All else that Ansible reads (INI, ranges, plugins, programs, folders,
``group_vars``, vaults) goes to ``ansible-inventory``, which takes 0.5 s.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from clusterkit import addresses
from clusterkit.addresses import check_hosts
from clusterkit.backends.ssh.variables import host_of
from clusterkit.cluster import Host
from clusterkit.errors import BadInput, Unavailable, did_you_mean, listed
from clusterkit.files import read_file, reason
from clusterkit.yaml_file import Document, parse_yaml

MOST_HOSTS = 100_000
ANSIBLE_SECONDS = 120.0
"""Timeout of ``ansible-inventory``, whose plugins may query a cloud."""
_FORMS = "`inventory` names an Ansible inventory or a DeepSpeed hostfile (`host slots=N`)"
BRACKETED = re.compile(r"\[([^\[\]]*:[^\[\]]*)\](?::(.*))?\Z")
"""An IPv6 address in brackets, and what follows a colon behind them."""
_RANGE = re.compile(r"\[([0-9]*):([0-9]+)(?::[0-9]+)?\]")
_INI_LINE = re.compile(r"\[[^\]]*\]\Z|\S+\s.*\b(ansible|clusterkit)_\w+\s*=")
"""A line of an INI inventory that no hostfile has: a group, or variables of a host."""
_ONLY_ANSIBLE = {
    "it is encrypted": re.compile(r"\A\$ANSIBLE_VAULT;"),
    "it configures an inventory plugin": re.compile(r"^plugin:", re.MULTILINE),
    "a value with a tag of Ansible's": re.compile(r":\s+!(vault|unsafe|vault-encrypted)\b"),
    "a group's `ansible_group_priority`": re.compile(r"\bansible_group_priority\b"),
    "it is in INI form": re.compile(
        r"""^\[[^\],]+\]\s*([#;].*)?$        # [group]
          | ^(?![#;\-])\S*[^\s:]\s+\w+\s*=   # host name=value
        """,
        re.MULTILINE | re.VERBOSE,
    ),
}
"""Forms that only Ansible can read, and the patterns that show them."""


class _NeedsAnsible(Exception):
    """The inventory has a form that only Ansible can read: file and line, and the form."""


def read_hosts(path: Path, group: str) -> tuple[Host, ...]:
    """Return the hosts of one group, in the file's order.

    Raises:
        BadInput: no such file, not an inventory, no such group, no hosts, the same host or
            address twice, an unusable value; the message names file and host.
        Unavailable: the file needs ``ansible-inventory``, which is not installed.
    """
    try:
        text = _text(path)
        if (lines := _hostfile_lines(text)) is None:
            hosts = _yaml(path, text, group)
        elif group == "all":
            hosts = addresses.hostfile(str(path), lines)
        else:
            raise BadInput(f"{path}: a hostfile has no group {group!r}", hint="leave `group` out")
    except _NeedsAnsible as needs:
        hosts = _by_ansible(path, group, *needs.args)
    if not hosts:
        where = "" if group == "all" else f" in group {group}"
        raise BadInput(f"{path}: no hosts{where}", hint="add hosts below `hosts:`")
    return check_hosts(hosts, str(path))


def _text(path: Path) -> str:
    try:
        if path.is_dir():
            raise _NeedsAnsible(str(path), "it is a folder")
        program = os.access(path, os.X_OK)
        data = read_file(path, 64 << 20)
    except OSError as error:
        raise BadInput(f"{path}: {reason(error)}", hint=_FORMS) from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if program:
            raise _NeedsAnsible(str(path), "it is a program") from None
        raise BadInput(
            f"{path}: not a text file (byte {error.start} is not UTF-8)", hint=_FORMS
        ) from None
    # The mode alone does not tell: on some disks all files are executable.
    if program and text.startswith("#!"):
        raise _NeedsAnsible(str(path), "it is a program")
    return text


def _hostfile_lines(text: str) -> list[tuple[int, str]] | None:
    """Return the numbered lines without comments; None: this is no hostfile."""
    lines = addresses.hostfile_lines(text)
    words = [line.split() for _, line in lines]
    if not lines or words[0][0].startswith(("---", "{", "$ANSIBLE_VAULT;")):
        return None
    if any(_INI_LINE.match(line) and not BRACKETED.match(line) for _, line in lines):
        return None
    with_slots = any(re.search(r"\sslots?\s*=", line, re.IGNORECASE) for _, line in lines)
    names_only = all(len(each) == 1 and not each[0].endswith(":") for each in words)
    return lines if with_slots or names_only else None


@dataclass
class _Group:
    hosts: dict[str, None] = field(default_factory=dict)
    variables: dict[str, Any] = field(default_factory=dict)
    children: dict[str, None] = field(default_factory=dict)


@dataclass
class _Inventory:
    where: str
    groups: dict[str, _Group] = field(default_factory=dict)
    hosts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The variables of each host itself, in the file's order."""

    def members(self, wanted: str) -> list[Host]:
        """Return the hosts of one group, with the variables of all groups that hold them."""
        names = {*self.groups, "all"}
        if wanted not in names:
            raise BadInput(
                f"{self.where}: there is no group {wanted!r}",
                hint=f"{did_you_mean(wanted, names)} groups: {listed(sorted(names), 8)}".lstrip(),
            )
        depth, ancestors = self._ancestors()
        groups_of = {host: {"all"} & depth.keys() for host in self.hosts}
        for name, group in self.groups.items():
            for host in group.hosts:
                groups_of[host] |= ancestors[name]
        hosts = []
        for host in self.hosts if wanted == "all" else self.below(wanted):
            variables: dict[str, Any] = {}
            # As in Ansible: deeper groups override others, equal depths go by name, and the
            # host's own variables override all.
            for name in sorted(groups_of[host], key=lambda name: (depth[name], name)):
                variables |= self.groups[name].variables
            hosts.append(host_of(self.where, host, variables | self.hosts[host]))
        return hosts

    def below(self, name: str) -> dict[str, None]:
        """Return the hosts of a group and of its descendants, each once, depth first."""
        hosts: dict[str, None] = {}
        visited = set()
        stack = [name]
        while stack:
            if (current := stack.pop()) not in visited:
                visited.add(current)
                hosts |= self.groups[current].hosts
                stack += reversed(self.groups[current].children)
        return hosts

    def _ancestors(self) -> tuple[dict[str, int], dict[str, set[str]]]:
        """Return the depth of every group, and the groups that hold it, itself included."""
        parents: dict[str, list[str]] = {name: [] for name in self.groups}
        for name, group in self.groups.items():
            for child in group.children:
                parents[child].append(name)
        depth: dict[str, int] = {}
        ancestors: dict[str, set[str]] = {}
        try:
            for name in TopologicalSorter(parents).static_order():
                depths = (depth[parent] for parent in parents[name])
                depth[name] = 0 if name == "all" else 1 + max(depths, default=0)
                ancestors[name] = {name}.union(*(ancestors[parent] for parent in parents[name]))
        except CycleError as error:
            raise BadInput(
                f"{self.where}: a group is its own child: {' > '.join(error.args[1])}"
            ) from None
        return depth, ancestors


def _yaml(path: Path, text: str, group: str) -> list[Host]:
    for form, pattern in _ONLY_ANSIBLE.items():
        if match := pattern.search(text):
            line = text.count("\n", 0, match.start()) + 1
            raise _NeedsAnsible(f"{path}:{line}", form)
    for name in ("group_vars", "host_vars"):
        if (path.parent / name).is_dir():
            raise _NeedsAnsible(str(path), f"there is a folder {name} beside it")
    document = parse_yaml(text, str(path))
    if document.data is None:
        raise BadInput(f"{path}: the file is empty")
    if not isinstance(document.data, dict):
        raise BadInput(f"{path}: not an inventory", hint=_FORMS)
    inventory = _Inventory(str(path))
    for name, body in document.data.items():
        _add_group(document, (name,), name, body, inventory)
    return inventory.members(group)


def _add_group(
    document: Document, place: tuple[str, ...], name: str, body: Any, into: _Inventory
) -> None:
    """Add a group and its descendants; as in Ansible, later variables of a host override."""
    group = into.groups.setdefault(name, _Group())
    if body is None:
        return
    if not isinstance(body, dict):
        raise document.error(place, "a group holds hosts, children and vars")
    for key, inner in body.items():
        if key not in ("hosts", "children", "vars"):
            raise document.error(
                (*place, key), "unknown key of a group", hint="hosts, children or vars"
            )
        if isinstance(inner, str) and key != "vars":
            inner = {inner: None}
        if inner is not None and not isinstance(inner, dict):
            raise document.error(
                (*place, key), "a mapping is wanted: `name:` on lines of their own"
            )
        for item, value in (inner or {}).items():
            at = (*place, key, item)
            if key == "vars":
                group.variables[item] = value
            elif key == "children":
                group.children[item] = None
                _add_group(document, at, item, value, into)
            elif value is not None and not isinstance(value, dict):
                raise document.error(at, "a host holds variables")
            else:
                host, port = addresses.host_and_port(item)
                if "[" in host:
                    raise _range(document, at, host)
                group.hosts[host] = None
                own = into.hosts.setdefault(host, {} if port is None else {"ansible_port": port})
                into.hosts[host] = own | (value or {})


def _range(document: Document, place: tuple[str, ...], pattern: str) -> Exception:
    """Return the exception for ``gpu[01:16]``, which Ansible expands.

    Empty ranges, which it ignores, and huge ones, which kill it, are errors.
    """
    hosts = 1
    for match in _RANGE.finditer(pattern):
        hosts *= max(0, int(match[2]) - int(match[1] or 0) + 1)
    if not 0 < hosts <= MOST_HOSTS:
        problem = f"more than {MOST_HOSTS} hosts" if hosts else "a range without hosts"
        return document.error(place, problem, hint="gpu[01:16]")
    return _NeedsAnsible(document.where(place), f"{pattern!r} is a range of hosts")


def _by_ansible(path: Path, group: str, where: str, form: str) -> list[Host]:
    folders = [os.path.dirname(sys.executable), os.environ.get("PATH", "")]
    tool = shutil.which("ansible-inventory", path=os.pathsep.join(folders))
    if tool is None:
        raise Unavailable(
            f"{where}: {form}: only Ansible can read such an inventory, and it is not installed",
            hint="pip install 'clusterkit[ansible]', or list every host in plain YAML",
        )
    with tempfile.TemporaryDirectory(prefix="clusterkit-ansible-") as scratch:
        environment = {
            **os.environ,
            "ANSIBLE_INVENTORY_UNPARSED_FAILED": "true",
            "ANSIBLE_INVENTORY_EXPORT": "false",
            "ANSIBLE_INVENTORY_CACHE": "false",
            "ANSIBLE_LOCAL_TEMP": scratch,
            "ANSIBLE_NOCOLOR": "true",
            "LC_ALL": "C.UTF-8",  # Ansible refuses to start in a locale that is not UTF-8
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        try:
            done = subprocess.run(
                [tool, "--inventory", str(path), "--list"], env=environment,
                stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSIBLE_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise Unavailable(
                f"{path}: ansible-inventory did not end within {ANSIBLE_SECONDS:g} s",
                hint=f"ansible-inventory -i {path} --list",
            ) from None
    listing = None
    with contextlib.suppress(ValueError):
        listing = json.loads(done.stdout) if done.returncode == 0 else None
    if not isinstance(listing, dict):
        raise BadInput(
            f"{path}: ansible-inventory cannot read it: "
            + _last_errors(done.stderr.decode(errors="replace"))
        )
    # ansible-inventory has already merged the groups' variables into those of the hosts.
    variables = listing.pop("_meta", {}).get("hostvars", {})
    inventory = _Inventory(str(path))
    for name, body in listing.items():
        hosts, children = dict.fromkeys(body.get("hosts", ())), body.get("children", ())
        inventory.groups[name] = _Group(hosts=hosts, children=dict.fromkeys(children))
        for child in children:
            inventory.groups.setdefault(child, _Group())
    if "all" in inventory.groups:
        inventory.hosts = {host: variables.get(host, {}) for host in inventory.below("all")}
    return inventory.members(group)


def _last_errors(stderr: str) -> str:
    """Return Ansible's last messages: earlier ones are of parsers that it tried in vain."""
    parts = re.split(r"^(?:\[?(?:WARNING|ERROR)\]?): ", stderr, flags=re.MULTILINE)
    messages = [" ".join(part.split()) for part in parts if part.strip()]
    return " / ".join(messages[-3:])[:600] or "no output"
