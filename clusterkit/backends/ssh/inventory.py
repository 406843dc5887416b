"""Reads hosts from an Ansible inventory or a DeepSpeed hostfile.

Hostfiles and plain YAML inventories are parsed here. Plain is: groups of hosts with their ``vars``,
at the top or as ``children`` of ``all``; every host written out and in one group at most, besides
``all``. There variables have one order: those of ``all``, of the group, of the host.

All else that Ansible reads (groups in groups, hosts in several, INI, ranges, plugins, programs,
folders, ``group_vars``, vaults) goes to ``ansible-inventory``, which takes a second or two.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterkit.backends.ssh.variables import host_of
from clusterkit.cluster import Host
from clusterkit.errors import BadInput, KeyPath, Unavailable, did_you_mean, join_some
from clusterkit.files import read_file, reason
from clusterkit.hosts import addresses
from clusterkit.hosts.addresses import check_hosts
from clusterkit.jobfile.yaml_file import Document, parse_yaml

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
            hosts = tuple(addresses.hostfile(str(path), lines))
        else:
            raise BadInput(f"{path}: a hostfile has no group {group!r}", hint="leave `group` out")
    except _NeedsAnsible as needs:
        hosts = _by_ansible(path, group, *needs.args)
    if not hosts:
        where = "" if group == "all" else f" in group {group}"
        raise BadInput(f"{path}: no hosts{where}", hint="add hosts below `hosts:`")
    return hosts


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


def _members(
    where: str,
    groups: Mapping[str, Any],
    variables: Mapping[str, Any],
    wanted: str,
    line_of: Callable[[str, str], str] | None = None,
) -> tuple[Host, ...]:
    """Return the hosts of a group.

    Args:
        groups: by name, as ``ansible-inventory`` lists them: ``hosts`` and ``children``.
        variables: of each host, those of its groups included.
        line_of: gives file and line of a variable of a host, or of the host itself.
    """
    if wanted not in (names := {*groups, "all"}):
        raise BadInput(
            f"{where}: there is no group {wanted!r}",
            hint=f"{did_you_mean(wanted, names)} groups: {join_some(sorted(names), 8)}".lstrip(),
        )
    hosts: dict[str, None] = {}
    visited, stack = set(), [wanted]
    while stack:
        if (current := stack.pop()) not in visited:
            visited.add(current)
            hosts |= dict.fromkeys(groups.get(current, {}).get("hosts", ()))
            stack += reversed(groups.get(current, {}).get("children", ()))
    found = [host_of(where, host, variables.get(host, {}), line_of) for host in hosts]
    return check_hosts(found, where, {host: line_of(host, "") for host in hosts if line_of})


def _yaml(path: Path, text: str, group: str) -> tuple[Host, ...]:
    for form, pattern in _ONLY_ANSIBLE.items():
        if match := pattern.search(text):
            line = text.count("\n", 0, match.start()) + 1
            raise _NeedsAnsible(f"{path}:{line}", form)
    for name in ("group_vars", "host_vars"):
        if (path.parent / name).is_dir():
            raise _NeedsAnsible(str(path), f"there is a folder {name} beside it")
    document = parse_yaml(text, str(path)) if addresses.hostfile_lines(text) else None
    if document is None or document.data is None:
        raise BadInput(f"{path}: the file is empty", hint=_FORMS)
    if not isinstance(document.data, dict):
        raise BadInput(f"{path}: not an inventory", hint=_FORMS)
    plain = _Plain(document)
    for name, body in document.data.items():
        plain.add_group((name,), name, body)
    return _members(str(path), plain.groups, plain.variables(), group, plain.line_of)


@dataclass
class _Plain:
    """The groups of a plain YAML inventory. Of several values for one variable of a host, or of a
    group, the last one in the file counts, as in Ansible."""

    document: Document
    groups: dict[str, dict[str, Any]] = field(default_factory=lambda: {"all": {"hosts": {}}})
    """The hosts of ``all`` are all of them, in the file's order, with variables of their own."""
    vars: dict[str, dict[str, Any]] = field(default_factory=dict)
    group_of: dict[str, str] = field(default_factory=dict)
    places: dict[tuple[str, str], KeyPath] = field(default_factory=dict)
    """Of the variables of hosts and groups; and of each host, under an empty name."""

    def line_of(self, host: str, variable: str) -> str:
        owners = (host, self.group_of.get(host, ""), "all")
        found = [self.places[key] for owner in owners if (key := (owner, variable)) in self.places]
        return self.document.where([*found, self.places[host, ""]][0])

    def variables(self) -> dict[str, dict[str, Any]]:
        everyone = self.vars.get("all", {})
        return {
            host: everyone | self.vars.get(self.group_of.get(host, ""), {}) | own
            for host, own in self.groups["all"]["hosts"].items()
        }

    def add_group(self, place: tuple[str, ...], name: str, body: Any) -> None:
        self.groups.setdefault(name, {"hosts": {}})
        if body is not None and not isinstance(body, dict):
            raise self.document.error(place, "a group holds hosts, children and vars")
        for key, inner in (body or {}).items():
            here = (*place, key)
            if key not in ("hosts", "children", "vars"):
                hint = "hosts, children or vars"
                raise self.document.error(here, "unknown key of a group", hint=hint)
            if isinstance(inner, str):
                raise self._needs_ansible(here, f"`{key}` is text")
            if inner is not None and not isinstance(inner, dict):
                raise self.document.error(
                    here, "a mapping is needed: `name:` on lines of their own"
                )
            if key == "vars":
                self.vars.setdefault(name, {}).update(inner or {})
                self.places |= {(name, item): (*here, item) for item in inner or {}}
            for item, value in (inner or {}).items() if key != "vars" else ():
                if key == "hosts":
                    self._add_host((*here, item), name, item, value)
                elif name == "all" != item:
                    self.add_group((*here, item), item, value)
                else:
                    raise self._needs_ansible((*here, item), f"group {name} holds group {item}")

    def _add_host(self, place: tuple[str, ...], group: str, name: str, body: Any) -> None:
        host, port = addresses.host_and_port(name)
        if "[" in host:
            hosts = 1
            for match in _RANGE.finditer(host):
                hosts *= max(0, int(match[2]) - int(match[1] or 0) + 1)
            # Ansible ignores an empty range, and dies of a huge one.
            if not 0 < hosts <= MOST_HOSTS:
                problem = f"more than {MOST_HOSTS} hosts" if hosts else "a range without hosts"
                raise self.document.error(place, problem, hint="gpu[01:16]")
            raise self._needs_ansible(place, f"{host!r} is a range of hosts")
        if body is not None and not isinstance(body, dict):
            raise self.document.error(place, "a host holds variables")
        self.places |= {(host, item): (*place, item) for item in body or {}}
        self.places.setdefault((host, ""), place)
        own = self.groups["all"]["hosts"]
        own[host] = own.get(host, {} if port is None else {"ansible_port": port}) | (body or {})
        if group != "all":
            self.groups[group]["hosts"][host] = None
            if (other := self.group_of.setdefault(host, group)) != group:
                raise self._needs_ansible(place, f"{host} is in groups {other} and {group}")

    def _needs_ansible(self, place: tuple[str, ...], form: str) -> _NeedsAnsible:
        return _NeedsAnsible(self.document.where(place), form)


def _by_ansible(path: Path, group: str, where: str, form: str) -> tuple[Host, ...]:
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
    for body in [*listing.values()]:
        for child in body.get("children", ()):
            listing.setdefault(child, {})
    return _members(str(path), listing, variables, group)


def _last_errors(stderr: str) -> str:
    """Return Ansible's last messages: earlier ones are of parsers that it tried in vain."""
    parts = re.split(r"^(?:\[?(?:WARNING|ERROR)\]?): ", stderr, flags=re.MULTILINE)
    messages = [" ".join(part.split()) for part in parts if part.strip()]
    return " / ".join(messages[-3:])[:600] or "no output"
