"""The hosts of a cluster from an Ansible inventory or a DeepSpeed hostfile.

YAML inventories are read here; other forms that Ansible knows (INI, scripts, plugins, folders,
with ``group_vars``, with vaults) are read by ``ansible-inventory``. Of a host's variables these
count: ``ansible_host ansible_port ansible_user ansible_ssh_private_key_file ansible_ssh_args
ansible_ssh_common_args ansible_ssh_extra_args`` (and the older names that Ansible still takes for
them) and clusterkit's own ``slots clusterkit_python clusterkit_address clusterkit_devices``.
"""

from __future__ import annotations

import contextlib
import difflib
import ipaddress
import json
import math
import os
import re
import shutil
import string
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from clusterkit.cluster import Host
from clusterkit.errors import BadInput, Unavailable, counted
from clusterkit.files import read_file, why
from clusterkit.shell import split
from clusterkit.yaml_file import Document, parse_yaml

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9])?\Z")
_RANGE = re.compile(r"\[([A-Za-z0-9]*):([A-Za-z0-9]+)(?::([0-9]+))?\]")
_WITH_PORT = re.compile(r"(?:\[([^\[\]]*:[^\[\]]*)\]|((?:\[[^\]]*\]|[^:\[\]])+)):([0-9]+)\Z")
_USER = re.compile(r"""[^\s\x00-\x1f'"`$;&<>|(){}\-][^\s\x00-\x1f'"`$;&<>|(){}]*\Z""")
"""What OpenSSH's client takes; `me@corp.example` and `CORP\\me` are users of directories."""
_BRACKETED = re.compile(r"\[([^\[\]]*:[^\[\]]*)\](?::(.*))?\Z")
_NUMBERS = re.compile(r"\s*[0-9]{1,6}\s*(,\s*[0-9]{1,6}\s*)*\Z")
_SLOTS = re.compile(r"(\S+)\s+slots\s*=\s*(\S+)(?:\s.*)?\Z")
_INI = re.compile(
    r"""^\[[^\],]+\]\s*([#;].*)?$        # [group]
      | ^(?![#;\-])\S*[^\s:]\s+\w+\s*=   # host name=value
    """,
    re.MULTILINE | re.VERBOSE,
)
_FOR_ANSIBLE = re.compile(
    r"\A\$ANSIBLE_VAULT;|^plugin:|:\s+!(vault|unsafe|vault-encrypted)\b", re.M
)
"""Encrypted as a whole, settings of an inventory plugin, tags of Ansible's own."""
_CONNECTIONS = ("ssh", "smart", "paramiko", "paramiko_ssh", "ansible.builtin.ssh")
_SECRETS = {
    "ansible_password": "passwords",
    "ansible_ssh_pass": "passwords",
    "ansible_ssh_password": "passwords",
    "ansible_private_key": "keys",
    "ansible_ssh_private_key": "keys",
    "ansible_private_key_passphrase": "passphrases",
    "ansible_ssh_private_key_passphrase": "passphrases",
}
MOST_HOSTS = 100_000


def read_hosts(path: Path, group: str) -> tuple[Host, ...]:
    """The hosts of one group, in the file's order.

    Raises:
        BadInput: no such file, not an inventory, no such group, no hosts, the same host or
            address twice, a value that cannot be used; the message names file and host.
        Unavailable: a form that needs ``ansible-inventory``, which is not installed.
    """
    text = _text(path)
    if text is not None and (lines := _hostfile_lines(text)) is not None:
        if group != "all":
            raise BadInput(f"{path}: a hostfile has no group {group!r}", hint="leave `group` out")
        hosts = _hostfile(path, lines)
    elif text is None or _needs_ansible(text) or _has_variable_folders(path):
        hosts = _by_ansible(path, group)
    else:
        hosts = _yaml(path, text, group)
    if not hosts:
        where = "" if group == "all" else f" in group {group}"
        raise BadInput(f"{path}: no hosts{where}", hint="add hosts below `hosts:`")
    return check_hosts(hosts, str(path))


def check_hosts(hosts: Sequence[Host], where: str) -> tuple[Host, ...]:
    """The hosts themselves.

    Raises:
        BadInput: a name that no host or no user has, the same name or the same address twice.
    """
    names: set[str] = set()
    addresses: dict[tuple[str, int, str | None], str] = {}
    for host in hosts:
        for text in (host.name, host.address):
            if text is not None and not (_NAME.match(text) or _is_address(text)):
                raise BadInput(
                    f"{where}: host {host.name!r}: {text!r} is neither a host name nor an address",
                    hint="letters, digits, '-', '.', '_' and, in IPv6 addresses, ':'",
                )
        if host.user is not None and not _USER.match(host.user):
            raise BadInput(
                f"{where}: host {host.name}: user {host.user!r} is not the name of a user",
                hint="no '-' in front, no blanks, quotes or other characters of the shell",
            )
        if host.name in names:
            raise BadInput(f"{where}: host {host.name} is listed twice")
        names.add(host.name)
        # Behind two jump hosts, two machines may well have one address.
        key = ((host.address or host.name).lower(), host.port or 22, host.jump)
        if key in addresses:
            raise BadInput(
                f"{where}: hosts {addresses[key]} and {host.name} have the same address {key[0]}",
                hint="two nodes need two machines, or two SSH ports",
            )
        addresses[key] = host.name
    return tuple(hosts)


def absolute(path: str | None, folder: Path) -> str | None:
    """A path that a file names: ``~`` is the home, and what is relative is so to the folder."""
    return None if path is None else os.path.normpath(folder / os.path.expanduser(path))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def chosen(hosts: Sequence[Host], include: str | None, exclude: str | None) -> tuple[Host, ...]:
    """The hosts that ``--include`` names or ``--exclude`` leaves; those without slots never.

    The form is DeepSpeed's: ``host1@host2:0,2`` is all of host1 and GPUs 0 and 2 of host2. A host
    that is named several times means all GPUs that were named. IPv6 addresses stand in brackets.

    Raises:
        BadInput: both are given, an unknown host, a GPU that the host does not have, nothing left.
    """
    if include and exclude:
        raise BadInput("include and exclude: only one of the two can be given")
    usable = [host for host in hosts if host.slots != 0]
    if not include and not exclude:
        if hosts and not usable:
            raise BadInput("every host has slots=0", hint="slots=8")
        return tuple(usable)
    flag, text = ("include", include) if include else ("exclude", exclude)
    named = _filter(flag, text or "", {host.name: host for host in hosts})
    found = []
    for host in usable:
        devices = named.get(host.name)
        if flag == "include":
            if devices is not None:
                found.append(_with_devices(host, devices) if devices else host)
        elif devices is None:
            found.append(host)
        elif devices:
            rest = [device for device in _all_devices(host) if device not in devices]
            if rest:
                found.append(_with_devices(host, rest))
    if not found:
        raise BadInput(f"{flag} {text}: no host is left")
    return tuple(found)


def _filter(flag: str, text: str, hosts: Mapping[str, Host]) -> dict[str, list[int]]:
    """Host to the GPUs that are named of it; none where the host alone is."""
    named: dict[str, set[int]] = {}
    for part in text.split("@"):
        name, numbers = _named_host(part.strip(), hosts)
        if name not in hosts:
            near = difflib.get_close_matches(name, hosts, 1)
            raise BadInput(
                f"{flag} {text}: host {name!r} is unknown",
                hint=f"did you mean {near[0]}?" if near else f"known: {_listed(hosts)}",
            )
        if numbers is not None and not _NUMBERS.match(numbers):
            raise BadInput(f"{flag} {text}: {numbers!r} is not a list of GPUs", hint=f"{name}:0,1")
        devices = sorted(map(int, numbers.split(","))) if numbers else []
        there = hosts[name]
        if devices and (there.slots is not None or there.devices is not None):
            its = _all_devices(there)
            if gone := [device for device in devices if device not in its]:
                raise BadInput(
                    f"{flag} {text}: {name} has {counted(len(its), 'slot')}, no number {gone[0]}",
                    hint=f"its numbers: {', '.join(map(str, its)) or 'none'}",
                )
        named.setdefault(name, set()).update(devices)
    return {name: sorted(devices) for name, devices in named.items()}


def _named_host(part: str, hosts: Mapping[str, Host]) -> tuple[str, str | None]:
    """The host and what stands behind its colon, if there is one."""
    if part in hosts:
        return part, None
    if match := _BRACKETED.match(part):
        return match[1], match[2]
    name, colon, numbers = part.partition(":")
    return name, numbers if colon else None


def _all_devices(host: Host) -> list[int]:
    if host.devices is not None:
        return list(host.devices)
    if host.slots is None:
        raise BadInput(
            f"exclude: it is not known how many GPUs {host.name} has",
            hint="give it `slots` in the inventory, or name the wanted ones with include",
        )
    return list(range(host.slots))


def _with_devices(host: Host, devices: Sequence[int]) -> Host:
    return msgspec.structs.replace(host, devices=tuple(devices), slots=len(devices))


def _listed(names: Iterable[str], most: int = 8) -> str:
    everyone = list(names)
    more = f" and {len(everyone) - most} more" if len(everyone) > most else ""
    return ", ".join(everyone[:most]) + more


# ---------------------------------------------------------------- hostfiles


def _text(path: Path) -> str | None:
    """The file's text; None for what only Ansible can read: a folder, a program."""
    program = False
    try:
        if path.is_dir():
            return None
        program = os.access(path, os.X_OK)
        text = read_file(path, 64 << 20).decode("utf-8-sig")
        return None if program and text.startswith("#!") else text
    except UnicodeDecodeError as error:
        if program:
            return None
        raise BadInput(
            f"{path}: not a text file (byte {error.start} is not UTF-8)", hint=_FORMS
        ) from None
    except OSError as error:
        raise BadInput(f"{path}: {why(error)}", hint=_FORMS) from None


_FORMS = "`inventory` names an Ansible inventory or a DeepSpeed hostfile (`host slots=N`)"


def _hostfile_lines(text: str) -> list[tuple[int, str]] | None:
    """Numbered lines without comments, if this looks like a hostfile."""
    lines = [
        (number, line)
        for number, raw in enumerate(text.splitlines(), 1)
        if (line := raw.partition("#")[0].strip())
    ]
    words = [line.split() for _, line in lines]
    if not lines or words[0][0].startswith(("---", "{", "$ANSIBLE_VAULT;")):
        return None
    if any(_INI_LINE.match(line) and not _BRACKETED.match(line) for _, line in lines):
        return None
    with_slots = any(re.search(r"\sslots?\s*=", line, re.IGNORECASE) for _, line in lines)
    bare = all(len(found) == 1 and not found[0].endswith(":") for found in words)
    return lines if with_slots or bare else None


_INI_LINE = re.compile(r"\[[^\]]*\]\Z|\S+\s.*\b(ansible|clusterkit)_\w+\s*=")
"""A line of an INI inventory that no hostfile has: a group, variables of Ansible's or ours."""


def _hostfile(path: Path, lines: Sequence[tuple[int, str]]) -> list[Host]:
    """``[user@]host[:port] slots=N`` on each line, or no slots on any.

    Raises:
        BadInput: naming file and line.
    """
    hosts = []
    without = all(len(line.split()) == 1 for _, line in lines)
    for number, line in lines:
        match = _SLOTS.match(line)
        if match is None and not without:
            raise BadInput(
                f"{path}:{number}: {line!r} is not `host slots=N`",
                hint="slots on every line, or names alone on every line",
            )
        if match is not None and not re.fullmatch(r"[0-9]{1,6}", match[2]):
            raise BadInput(
                f"{path}:{number}: slots={match[2]}: not a number of ranks", hint="slots=8"
            )
        user, at, place = (match[1] if match else line).rpartition("@")
        name, port = _without_port(place)
        if bracketed := _BRACKETED.match(name):
            name = bracketed[1]
        if port and not 0 < port["ansible_port"] < 1 << 16:
            raise BadInput(f"{path}:{number}: {place!r}: not a port", hint="1 to 65535")
        hosts.append(
            Host(
                name=name,
                port=port.get("ansible_port"),
                user=user if at else None,
                slots=int(match[2]) if match else None,
            )
        )
    return hosts


def _needs_ansible(text: str) -> bool:
    return bool(_INI.search(text) or _FOR_ANSIBLE.search(text))


def _has_variable_folders(path: Path) -> bool:
    return any((path.parent / name).is_dir() for name in ("group_vars", "host_vars"))


# ---------------------------------------------------------------- YAML inventories


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
    """Their own variables, by name, in the file's order."""


def _yaml(path: Path, text: str, group: str) -> list[Host]:
    document = parse_yaml(text, str(path))
    if document.data is None:
        raise BadInput(f"{path}: the file is empty")
    if not isinstance(document.data, dict):
        raise BadInput(f"{path}: not an inventory", hint=_FORMS)
    found = _Inventory(str(path))
    for name, body in document.data.items():
        _collect(document, (name,), name, body, found)
    return _members(found, group)


def _collect(
    document: Document, place: tuple[str, ...], name: str, body: Any, into: _Inventory
) -> None:
    """One group and all below it; as for Ansible, what the file says later of a host wins."""
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
                _collect(document, at, item, value, into)
            elif value is not None and not isinstance(value, dict):
                raise document.error(at, "a host holds variables")
            else:
                pattern, port = _without_port(item)
                for host in _expanded(document, at, pattern):
                    group.hosts[host] = None
                    own = into.hosts.setdefault(host, port)
                    into.hosts[host] = own | (value or {})


def _without_port(pattern: str) -> tuple[str, dict[str, Any]]:
    """``host:2222`` and ``[2001:db8::1]:2222`` taken apart, the port as a variable."""
    match = _WITH_PORT.match(pattern)
    if match is None:
        return pattern, {}
    return match[1] or match[2], {"ansible_port": int(match[3])}


def _expanded(document: Document, place: tuple[str, ...], pattern: str) -> Iterator[str]:
    """``gpu[01:03]`` as gpu01, gpu02, gpu03; ``[a:c]`` as letters; ``[0:8:2]`` in steps.

    Raises:
        BadInput: no range, or far too many names.
    """
    items = {}
    for match in _RANGE.finditer(pattern):
        items[match.span()] = found = _range(match[1] or "0", match[2], int(match[3] or 1))
        if not found or math.prod(map(len, items.values())) > MOST_HOSTS:
            raise document.error(place, f"{match[0]} is not a range", hint="gpu[01:16]")
    rest = list(items.items())

    def names(head: str, start: int, number: int) -> Iterator[str]:
        if number == len(rest):
            yield head + pattern[start:]
            return
        (begin, end), choices = rest[number]
        for choice in choices:
            yield from names(head + pattern[start:begin] + choice, end, number + 1)

    return names("", 0, 0)


def _range(first: str, last: str, step: int) -> Sequence[str]:
    """Both ends included; nothing where this is not a range that Ansible would take."""
    letters = string.ascii_letters
    if not step:
        return ()
    if len(first) == len(last) == 1 and first in letters and last in letters:
        return letters[letters.index(first) : letters.index(last) + 1 : step]
    padded = len(first) if first.startswith("0") and len(first) > 1 else 0
    if not (first.isdecimal() and last.isdecimal()) or (padded and padded != len(last)):
        return ()
    if int(last) - int(first) >= MOST_HOSTS * step:
        return ()
    return [str(number).zfill(padded) for number in range(int(first), int(last) + 1, step)]


def _members(found: _Inventory, wanted: str) -> list[Host]:
    """The hosts of one group with the variables of all groups that they are in."""
    groups = found.groups
    names = {*groups, "all"}
    if wanted not in names:
        near = difflib.get_close_matches(wanted, names, 1)
        raise BadInput(
            f"{found.where}: there is no group {wanted!r}",
            hint=(f"did you mean {near[0]}? " if near else "")
            + f"groups: {_listed(sorted(names))}",
        )
    above = _above(found)
    groups_of: dict[str, list[str]] = {host: [] for host in found.hosts}
    for name, group in groups.items():
        for host in group.hosts:
            groups_of[host].append(name)
    shared: dict[tuple[str, ...], dict[str, Any]] = {}
    hosts = found.hosts if wanted == "all" else _below(groups, wanted)
    result = []
    for host in hosts:
        direct = tuple(groups_of[host])
        if direct not in shared:
            ancestors = {"all": 0} | {n: d for name in direct for n, d in above[name].items()}
            shared[direct] = _variables(found, ancestors)
        result.append(host_of(found.where, host, shared[direct] | found.hosts[host]))
    return result


def _variables(found: _Inventory, depths: Mapping[str, int]) -> dict[str, Any]:
    """As Ansible does: the deeper group wins, then the one of higher priority, then by name."""

    def rank(name: str) -> tuple[int, int, str]:
        priority = found.groups[name].variables.get("ansible_group_priority", 1)
        if not re.fullmatch(r"-?[0-9]{1,9}", str(priority)):
            raise BadInput(
                f"{found.where}: group {name}: ansible_group_priority: {priority!r} is not a number"
            )
        return depths[name], int(priority), name

    merged: dict[str, Any] = {}
    for name in sorted((name for name in depths if name in found.groups), key=rank):
        merged |= found.groups[name].variables
    return merged


def _above(found: _Inventory) -> dict[str, dict[str, int]]:
    """For every group itself and the groups above it, each with its depth below ``all``.

    Raises:
        BadInput: a group that is its own descendant.
    """
    parents: dict[str, list[str]] = {name: [] for name in found.groups}
    for name, group in found.groups.items():
        for child in group.children:
            parents[child].append(name)
    waiting = {name: len(above) for name, above in parents.items()}
    ready = [name for name, number in waiting.items() if not number]
    result: dict[str, dict[str, int]] = {}
    for name in ready:  # grows meanwhile
        depth = 0 if name == "all" else 1 + max((result[p][p] for p in parents[name]), default=0)
        result[name] = {n: d for parent in parents[name] for n, d in result[parent].items()}
        result[name][name] = depth
        for child in found.groups[name].children:
            waiting[child] -= 1
            if not waiting[child]:
                ready.append(child)
    if looped := [name for name in parents if name not in result]:
        raise BadInput(f"{found.where}: group {looped[0]} is its own child, or below one that is")
    return result


def _below(groups: Mapping[str, _Group], name: str) -> dict[str, None]:
    """The hosts of a group and its descendants, each once: its own first."""
    hosts: dict[str, None] = {}
    seen = set()
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current not in seen:
            seen.add(current)
            hosts |= groups[current].hosts
            waiting += reversed(groups[current].children)
    return hosts


def _by_ansible(path: Path, group: str) -> list[Host]:
    tool = shutil.which("ansible-inventory", path=os.pathsep.join([
        os.path.dirname(sys.executable), os.environ.get("PATH", "")]))  # fmt: skip
    if tool is None:
        raise Unavailable(
            f"{path}: only Ansible can read an inventory of this form, and it is not installed",
            hint="pip install 'clusterkit[ansible]', or write the inventory in YAML",
        )
    done = subprocess.run(
        [tool, "--inventory", str(path), "--list"], capture_output=True, stdin=subprocess.DEVNULL,
        env={**os.environ, **_ANSIBLE_ENVIRONMENT},
    )  # fmt: skip
    try:
        listing = json.loads(done.stdout) if done.returncode == 0 else None
    except ValueError:
        listing = None
    if not isinstance(listing, dict):
        raise BadInput(
            f"{path}: ansible-inventory cannot read it: "
            + _complaint(done.stderr.decode(errors="replace"))
        )
    # ansible-inventory has merged the groups' variables into the hosts' already.
    variables = listing.pop("_meta", {}).get("hostvars", {})
    found = _Inventory(str(path))
    for name, body in listing.items():
        hosts, children = dict.fromkeys(body.get("hosts", ())), body.get("children", ())
        found.groups[name] = _Group(hosts=hosts, children=dict.fromkeys(children))
        for child in children:
            found.groups.setdefault(child, _Group())
    if "all" in found.groups:
        found.hosts = {host: variables.get(host, {}) for host in _below(found.groups, "all")}
    return _members(found, group)


_ANSIBLE_ENVIRONMENT = {
    "ANSIBLE_INVENTORY_UNPARSED_FAILED": "true",
    "ANSIBLE_INVENTORY_EXPORT": "false",
    "ANSIBLE_NOCOLOR": "true",
    # It refuses to start in any other.
    "LC_ALL": "C.UTF-8",
}


def _complaint(stderr: str) -> str:
    """What Ansible says went wrong, without what it tried before."""
    parts = re.split(r"^(?:\[?(?:WARNING|ERROR)\]?): ", stderr, flags=re.MULTILINE)
    told = [" ".join(part.split()) for part in parts if part.strip()]
    return " / ".join(told[-3:])[:600] or "no output"


# ---------------------------------------------------------------- one host


def host_of(where: str, name: str, variables: Mapping[str, Any]) -> Host:
    """A host from its Ansible variables.

    Raises:
        BadInput: a value that cannot be used.
    """
    its = _Variables(where, name, variables)
    for key, what in _SECRETS.items():
        if variables.get(key):
            raise its.refuse(
                key, f"clusterkit takes no {what} from files", "use a key file and the SSH agent"
            )
    connection = its.text("ansible_connection")
    if connection is not None and connection not in _CONNECTIONS:
        raise its.refuse("ansible_connection", f"{connection!r}: only SSH reaches a node")
    options = its.ssh_options()
    devices = its.devices()
    slots = its.number("slots", 1, 999999)
    return Host(
        name=name,
        address=its.text("ansible_host", "ansible_ssh_host") or options.get("hostname"),
        port=its.number("ansible_port", 1, 65535, "ansible_ssh_port") or its.port_of(options),
        user=its.text("ansible_user", "ansible_ssh_user") or options.get("user"),
        identity=its.path(
            its.text("ansible_ssh_private_key_file", "ansible_private_key_file")
            or options.get("identityfile")
        ),
        known_hosts=its.path(options.get("userknownhostsfile")),
        jump=options.get("proxyjump") or its.proxy(options),
        ssh_config=its.path(options.get("configfile")),
        slots=len(devices) if devices is not None and slots is None else slots,
        devices=devices,
        python=its.text("clusterkit_python"),
        cluster_address=its.text("clusterkit_address"),
    )


@dataclass
class _Variables:
    """One host's variables as what they should be."""

    where: str
    host: str
    given: Mapping[str, Any]

    def refuse(self, key: str, why: str, hint: str | None = None) -> BadInput:
        return BadInput(f"{self.where}: host {self.host}: {key}: {why}", hint)

    def text(self, *keys: str) -> str | None:
        """The first of these that is set, with ``{{ inventory_dir }}`` and its kind filled in."""
        for key in keys:
            value = self.given.get(key)
            if isinstance(value, dict) and "__ansible_unsafe" in value:
                value = value["__ansible_unsafe"]
            if value is None or value == "":
                continue
            if isinstance(value, (dict, list)):
                kind = "in a vault" if "__ansible_vault" in value else "no text"
                raise self.refuse(key, f"the value is {kind}", "write it out here")
            return self._filled(key, str(value))
        return None

    def _filled(self, key: str, value: str) -> str:
        if "{{" not in value and "{%" not in value:
            return value
        known = {"inventory_dir": str(self._folder()), "inventory_hostname": self.host}
        filled = re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: known.get(found[1], found[0]), value)
        if "{{" in filled or "{%" in filled:
            raise self.refuse(
                key,
                f"{value!r} is a template, which only a playbook can fill in",
                f"of variables in templates only {' and '.join(known)} are known here",
            )
        return filled

    def _folder(self) -> Path:
        place = Path(self.where).absolute()
        return place if place.is_dir() else place.parent

    def number(self, key: str, least: int, most: int, *older: str) -> int | None:
        value = self.text(key, *older)
        if value is None:
            return None
        if not (re.fullmatch(r"[0-9]{1,9}", value) and least <= int(value) <= most):
            raise self.refuse(key, f"{value!r} is not a number from {least} to {most}")
        return int(value)

    def path(self, value: str | None) -> str | None:
        """Absolute; what is relative is so to the inventory's folder."""
        return None if value == "none" else absolute(value, self._folder())

    def devices(self) -> tuple[int, ...] | None:
        value = self.given.get("clusterkit_devices")
        if value is None:
            return None
        listed: Any = value.split(",") if isinstance(value, str) else value
        if type(listed) is int:
            listed = [listed]
        numbers = [str(item).strip() for item in listed] if isinstance(listed, list) else []
        if not numbers or not all(re.fullmatch(r"[0-9]{1,6}", number) for number in numbers):
            raise self.refuse("clusterkit_devices", f"{value!r} is not a list of GPUs", "[0, 1]")
        devices = tuple(map(int, numbers))
        if len(set(devices)) < len(devices):
            raise self.refuse("clusterkit_devices", f"{value!r} names a GPU twice")
        return devices

    # -- arguments for ssh --------------------------------------------------

    def ssh_options(self) -> dict[str, str]:
        """What the arguments for ``ssh`` say, by lower-case name; the first of a kind counts."""
        words = []
        for key in ("ansible_ssh_args", "ansible_ssh_common_args", "ansible_ssh_extra_args"):
            try:
                words += split(self.text(key) or "")
            except BadInput as error:
                raise self.refuse(key, error.message) from None
        options, _ = _ssh_options(words)
        if options.get("userknownhostsfile") == "/dev/null":
            # Said so that any host is believed; here the usual file counts.
            del options["userknownhostsfile"]
        if options.get("configfile") == "none":
            options["configfile"] = os.devnull
        return options

    def port_of(self, options: Mapping[str, str]) -> int | None:
        if "port" not in options:
            return None
        return _Variables(self.where, self.host, {"ssh port": options["port"]}).number(
            "ssh port", 1, 65535
        )

    def proxy(self, options: Mapping[str, str]) -> str | None:
        """The jump host of a ``ProxyCommand=ssh -W %h:%p [user@]host``."""
        command = options.get("proxycommand", "none")
        if command.lower() == "none":
            return None
        key = self.text("ansible_ssh_private_key_file", "ansible_private_key_file")
        own = {"identityfile": key, **options} if key else options
        with contextlib.suppress(BadInput):
            found, words = _ssh_options(split(command))
            same = all(found.get(name, own.get(name)) == own.get(name) for name in _FOR_BOTH)
            forwarded = found.get("forward") in ("%h:%p", "[%h]:%p")
            if len(words) == 2 and os.path.basename(words[0]) == "ssh" and forwarded and same:
                user = f"{found['user']}@" if "user" in found else ""
                port = f":{found['port']}" if "port" in found else ""
                return f"{user}{words[1]}{port}"
        raise self.refuse(
            "ansible_ssh_common_args",
            f"ProxyCommand {command!r} is not understood",
            "-J [user@]host[:port], or a ProxyCommand in ~/.ssh/config",
        )


_SWITCHES = {
    "-F": "configfile",
    "-i": "identityfile",
    "-p": "port",
    "-l": "user",
    "-J": "proxyjump",
    "-W": "forward",
}
_WITH_VALUE = frozenset("BbcDEeILmOoQRSw")
"""Switches of ssh(1) whose value says nothing about how to reach a host."""
_OPTION = re.compile(r"\s*(\w+)(?:\s*=\s*|\s+)(.*)\Z", re.DOTALL)
_FOR_BOTH = ("configfile", "identityfile")
"""What a jump host shares with the host behind it."""


def _ssh_options(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Options by lower-case name, and the words that are no options."""
    found: dict[str, str] = {}
    others = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            others.append(word)
            continue
        switch, value = word[:2], word[2:]
        if switch in _SWITCHES or switch[1:] in _WITH_VALUE:
            value = value or (words.pop(0) if words else "")
        if switch in _SWITCHES:
            found.setdefault(_SWITCHES[switch], value)
        elif switch == "-o" and (option := _OPTION.match(value)):
            found.setdefault(
                option[1].lower(), option[2].strip().removeprefix('"').removesuffix('"')
            )
    return found, others
