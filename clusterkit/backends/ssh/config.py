"""Address, user and keys of a host: from its `Host`, and below that OpenSSH's configuration.

paramiko parses the configuration. This module adds what it lacks of ssh_config(5): ``Include``, and
``Match exec`` commands that do not read our standard input.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import paramiko

from clusterkit import shell
from clusterkit.cluster import Host
from clusterkit.errors import BadInput, Unavailable
from clusterkit.files import user_name
from clusterkit.hosts.addresses import host_from

_CONFIG = "~/.ssh/config"
_MOST_INCLUDES = 16
CONFIG_SECONDS = 10.0
"""How long a configuration that was read is used."""
_INCLUDE = re.compile(r"\s*include(?:\s*=\s*|\s+)(.+)\Z", re.IGNORECASE)
_BLOCK = re.compile(r"\s*(?:host|match)(?:\s*=\s*|\s+)", re.IGNORECASE)


class HostUnreachable(Unavailable):
    """A host does not answer, or refuses the login; the message names it."""


class LoginRefused(HostUnreachable):
    """A host answers, and lets this user open no session."""

    answered = True


@dataclass(frozen=True)
class Target:
    """A `Host` with the SSH configuration applied."""

    host: Host
    address: str
    port: int
    user: str
    identities: tuple[str, ...]
    identities_only: bool
    known_hosts: tuple[str, ...]
    key_name: str
    """The name of the host's key in ``known_hosts``."""
    jump: str | None = None
    proxy_command: str | None = None

    @property
    def login(self) -> str:
        """``user@address``, quoted for a shell: for commands in hints."""
        return shell.quote(f"{self.user}@{self.address}")

    def __str__(self) -> str:
        if self.address == self.host.name and self.port == 22:
            return f"host {self.host.name}"
        port = "" if self.port == 22 else f" port {self.port}"
        return f"host {self.host.name} ({self.address}{port})"


def resolve(host: Host) -> Target:
    """Apply ``~/.ssh/config``, or the host's own configuration file, to a host.

    Raises:
        Unavailable: the configuration cannot be read, or no user is named.
    """
    name = host.address or host.name
    options = _options(host, name)
    user = host.user or options.get("user") or user_name()
    if user is None:
        raise Unavailable(
            f"host {host.name}: no user to log in as: user id {os.getuid()} has no name here",
            hint="set `user` of the host, or LOGNAME",
        )
    address = options.get("hostname", name)
    port = host.port or int(options.get("port", 22))
    identities = [host.identity] if host.identity else list(options.get("identityfile", ()))
    user_files = options.get("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2")
    own = [host.known_hosts] if host.known_hosts else _paths(user_files)
    shared = _paths(options.get("globalknownhostsfile", "/etc/ssh/ssh_known_hosts"))
    proxy = options.get("proxycommand")
    jump = host.jump or options.get("proxyjump")
    key_name = address if port == 22 else f"[{address}]:{port}"
    return Target(
        host=host,
        address=address,
        port=port,
        user=user,
        identities=tuple(os.path.expanduser(path) for path in identities),
        identities_only=bool(host.identity) or options.get("identitiesonly", "no") == "yes",
        known_hosts=tuple(os.path.expanduser(path) for path in [*own, *shared]),
        key_name=options.get("hostkeyalias") or key_name,
        jump=None if jump == "none" else jump,
        proxy_command=None if host.jump or proxy == "none" else proxy,
    )


def jump_host(hop: str, final: Host) -> Host:
    """Return the jump host ``[user@]host[:port]``, with the key and files of the final host.

    Raises:
        BadInput: the port is not from 1 to 65535.
    """
    return msgspec.structs.replace(
        host_from(hop),
        known_hosts=final.known_hosts,
        ssh_config=final.ssh_config,
        identity=final.identity,
    )


def _paths(text: str) -> list[str]:
    """Split a value that lists files; paths with spaces are quoted in it."""
    with contextlib.suppress(BadInput):
        return shell.split(text)
    return text.split()


def _options(host: Host, name: str) -> Mapping[str, Any]:
    path = host.ssh_config or _CONFIG
    try:
        # Read once for many hosts, and again: a supervisor runs for days.
        text = _config_text(Path(path).expanduser(), int(time.monotonic() // CONFIG_SECONDS))
        options = _config(text).lookup(name)
        if "proxycommand" in options and (host.port or host.user):
            # The command's %p and %r are the host's own port and user.
            first = f"Port {host.port}\n" if host.port else ""
            first += f"User {host.user}\n" if host.user else ""
            options = _config(f"{first}Host *\n{text}").lookup(name)
        if not 0 < int(options.get("port", 22)) < 1 << 16:
            raise ValueError(f"Port {options['port']}")
        return options
    except FileNotFoundError:
        if host.ssh_config is None:
            return {}
        raise Unavailable(f"{path}: no such file", hint="the hosts' ssh_config names it") from None
    except (OSError, ValueError, KeyError, paramiko.SSHException) as error:
        raise Unavailable(f"{path}: cannot be read as an SSH configuration: {error}") from None


class _Config(paramiko.SSHConfig):
    """Runs ``Match exec`` commands without standard input; paramiko's would read ours."""

    # `_does_match` and `_tokenize` are undocumented, untyped methods of paramiko 5.1.
    def _does_match(
        self, criteria: Any, target: str, canonical: Any, final: Any, options: Any
    ) -> Any:
        commands = [each for each in criteria if each["type"] == "exec"]
        others = [each for each in criteria if each["type"] != "exec"]
        if others or not commands:
            matched = super()._does_match(others, target, canonical, final, options)  # type: ignore[misc]
            if not matched or not commands:
                return matched
        for each in commands:
            command = self._tokenize(options, target, "match-exec", each["param"])  # type: ignore[attr-defined]
            null = subprocess.DEVNULL
            done = subprocess.run(["/bin/sh", "-c", command], stdin=null, stdout=null)
            if (done.returncode == 0) == each["negate"]:
                return False
        return True


@lru_cache(64)
def _config(text: str) -> paramiko.SSHConfig:
    return _Config.from_text(text)


def config_text(path: Path, depth: int = 0) -> str:
    """Return a configuration with its ``Include`` lines replaced by the files that they name.

    Raises:
        OSError, UnicodeDecodeError: ``path`` cannot be read.
        ValueError: files include each other more than 16 deep.
    """
    if depth > _MOST_INCLUDES:
        raise ValueError(f"more than {_MOST_INCLUDES} files include each other")
    block = "Host *"
    lines = []
    for line in path.read_text().splitlines():
        if (include := _INCLUDE.match(line)) is None:
            if _BLOCK.match(line):
                block = line
            lines.append(line)
            continue
        for name in shell.split(include[1]):
            pattern = os.path.join(os.path.expanduser("~/.ssh"), os.path.expanduser(name))
            for included in sorted(glob.glob(pattern)):
                with contextlib.suppress(OSError):
                    lines.append(config_text(Path(included), depth + 1))
        # A block of an included file does not go beyond it.
        lines.append(block)
    return "\n".join(lines) + "\n"


@lru_cache(8)
def _config_text(path: Path, period: int) -> str:
    return config_text(path)
