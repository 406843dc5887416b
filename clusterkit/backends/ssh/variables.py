"""Makes a host from its Ansible variables.

It reads ``ansible_host ansible_port ansible_user ansible_ssh_private_key_file ansible_ssh_args
ansible_ssh_common_args ansible_ssh_extra_args`` (and their older names, which Ansible still
accepts) and clusterkit's own ``slots clusterkit_python clusterkit_address clusterkit_devices``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from getopt import GetoptError, gnu_getopt
from pathlib import Path
from typing import Any

from clusterkit.cluster import Host
from clusterkit.errors import BadInput
from clusterkit.shell import split

CONNECTIONS = ("ssh", "smart", "paramiko", "paramiko_ssh", "ansible.builtin.ssh")
SECRETS = {
    "ansible_password": "passwords",
    "ansible_ssh_pass": "passwords",
    "ansible_ssh_password": "passwords",
    "ansible_private_key": "keys",
    "ansible_ssh_private_key": "keys",
    "ansible_private_key_passphrase": "passphrases",
    "ansible_ssh_private_key_passphrase": "passphrases",
}
"""Variables that are refused, and the secret that each holds."""
SSH_SWITCHES = "1246ab:c:e:fgi:kl:m:no:p:qstvxyAB:CD:E:F:GI:J:KL:MNO:PQ:R:S:TVw:W:XY"
"""The options of ssh(1), in the syntax of getopt."""
_NAMED_SWITCHES = {
    "-F": "configfile",
    "-i": "identityfile",
    "-p": "port",
    "-l": "user",
    "-J": "proxyjump",
}
_OPTION = re.compile(r"\s*(\w+)(?:\s*=\s*|\s+)(.*)\Z", re.DOTALL)


def host_of(
    where: str,
    name: str,
    variables: Mapping[str, Any],
    line_of: Callable[[str, str], str] | None = None,
) -> Host:
    """Return a host from its Ansible variables; relative paths start at the inventory's folder.

    Args:
        where: the inventory.
        line_of: gives inventory and line of a host's variable, for errors.

    Raises:
        BadInput: a value cannot be used; the message names the inventory, host and variable.
    """
    line_of = line_of or (lambda host, variable: where)
    reader = _Variables(where, name, variables, line_of)
    for variable, secret in SECRETS.items():
        if variables.get(variable):
            raise reader.error(
                variable,
                f"clusterkit takes no {secret} from files",
                "use a key file and the SSH agent",
            )
    connection = reader.text("ansible_connection")
    if connection is not None and connection not in CONNECTIONS:
        raise reader.error("ansible_connection", f"{connection!r}: only SSH reaches a node")
    options = reader.ssh_options()
    key = reader.text("ansible_ssh_private_key_file", "ansible_private_key_file")
    devices = reader.devices()
    slots = reader.number("slots", 1, 999999)
    port = reader.number("ansible_port", 1, 65535, "ansible_ssh_port")
    if port is None and "port" in options:
        given = {"ssh port": options["port"]}
        port = _Variables(where, name, given, line_of).number("ssh port", 1, 65535)
    return Host(
        name=name,
        address=reader.text("ansible_host", "ansible_ssh_host") or options.get("hostname"),
        port=port,
        user=reader.text("ansible_user", "ansible_ssh_user") or options.get("user"),
        identity=reader.path(key or options.get("identityfile")),
        known_hosts=reader.path(options.get("userknownhostsfile")),
        jump=reader.jump(options),
        ssh_config=reader.path(options.get("configfile")),
        slots=len(devices) if devices is not None and slots is None else slots,
        devices=devices,
        python=reader.text("clusterkit_python"),
        cluster_address=reader.text("clusterkit_address"),
    )


def absolute(path: str | None, folder: Path) -> str | None:
    """Return the absolute path of what a file in the folder names; ``~`` is the user's home."""
    return None if path is None else os.path.normpath(folder / os.path.expanduser(path))


@dataclass
class _Variables:
    """Reads the variables of one host, each as a type."""

    where: str
    host: str
    given: Mapping[str, Any]
    line_of: Callable[[str, str], str]

    def error(self, key: str, reason: str, hint: str | None = None) -> BadInput:
        where = self.line_of(self.host, key)
        return BadInput(f"{where}: host {self.host}: {key}: {reason}", hint)

    def text(self, *keys: str) -> str | None:
        """Return the first of these that is set, with its templates filled in; None: none is."""
        for key in keys:
            value = self.given.get(key)
            if isinstance(value, dict) and "__ansible_unsafe" in value:
                value = value["__ansible_unsafe"]
            if value is None or value == "":
                continue
            if isinstance(value, (dict, list)):
                kind = "in a vault" if "__ansible_vault" in value else "no text"
                raise self.error(key, f"the value is {kind}", "write it out here")
            return self._fill_templates(key, str(value))
        return None

    def _fill_templates(self, key: str, value: str) -> str:
        # The output of ansible-inventory has templates as well.
        if "{{" not in value and "{%" not in value:
            return value
        known = {"inventory_dir": str(self._folder()), "inventory_hostname": self.host}
        filled = re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: known.get(match[1], match[0]), value)
        if "{{" in filled or "{%" in filled:
            raise self.error(
                key,
                f"{value!r} is a template, which only a playbook can fill in",
                f"of variables in templates only {' and '.join(known)} are known here",
            )
        return filled

    def _folder(self) -> Path:
        path = Path(self.where).absolute()
        return path if path.is_dir() else path.parent

    def number(self, key: str, least: int, most: int, *older: str) -> int | None:
        value = self.text(key, *older)
        if value is None:
            return None
        if not (re.fullmatch(r"[0-9]{1,9}", value) and least <= int(value) <= most):
            hint = f"{key}: {22 if most == 65535 else 8}"
            raise self.error(key, f"{value!r} is not a number from {least} to {most}", hint)
        return int(value)

    def path(self, value: str | None) -> str | None:
        return None if value == "none" else absolute(value, self._folder())

    def devices(self) -> tuple[int, ...] | None:
        value = self.given.get("clusterkit_devices")
        if value is None:
            return None
        listed = value.split(",") if isinstance(value, str) else value
        if type(listed) is int:
            listed = [listed]
        numbers = [str(item).strip() for item in listed] if isinstance(listed, list) else []
        if not numbers or not all(re.fullmatch(r"[0-9]{1,6}", number) for number in numbers):
            raise self.error("clusterkit_devices", f"{value!r} is not a list of GPUs", "[0, 1]")
        devices = tuple(map(int, numbers))
        if len(set(devices)) < len(devices):
            raise self.error("clusterkit_devices", f"{value!r} names a GPU twice", "[0, 1]")
        return devices

    def ssh_options(self) -> dict[str, str]:
        """Return the options in the arguments for ``ssh``, by lower-case name.

        As for ssh itself, the first of several values counts.
        """
        options: dict[str, str] = {}
        for key in ("ansible_ssh_args", "ansible_ssh_common_args", "ansible_ssh_extra_args"):
            try:
                options = _ssh_options(split(self.text(key) or "")) | options
            except BadInput as error:
                raise self.error(key, error.message) from None
            except GetoptError as error:
                raise self.error(key, f"not arguments of ssh: {error}") from None
        if options.get("userknownhostsfile") == "/dev/null":
            # It would disable the check of host keys: the default file is used instead.
            del options["userknownhostsfile"]
        if options.get("configfile") == "none":
            options["configfile"] = os.devnull
        return options

    def jump(self, options: Mapping[str, str]) -> str | None:
        """Return the jump host.

        Raises:
            BadInput: a ProxyCommand, of which only ssh itself knows what it does.
        """
        command = options.get("proxycommand", "none")
        if "proxyjump" not in options and command.lower() != "none":
            raise self.error(
                "ansible_ssh_common_args",
                f"ProxyCommand {command!r} is not read here",
                "-J [user@]host[:port], or a ProxyCommand in ~/.ssh/config",
            )
        return options.get("proxyjump")


def _ssh_options(arguments: Sequence[str]) -> dict[str, str]:
    """Return the options of ``ssh`` by lower-case name."""
    options: dict[str, str] = {}
    for switch, value in gnu_getopt(list(arguments), SSH_SWITCHES)[0]:
        if switch in _NAMED_SWITCHES:
            options.setdefault(_NAMED_SWITCHES[switch], value)
        elif switch == "-o" and (option := _OPTION.match(value)):
            options.setdefault(
                option[1].lower(), option[2].strip().removeprefix('"').removesuffix('"')
            )
    return options
