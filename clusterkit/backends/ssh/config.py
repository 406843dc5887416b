"""Where and as whom to connect to a host: the inventory, and OpenSSH's configuration behind it.

paramiko reads configurations; here is what it does not do as ssh_config(5) says: ``Include``, and
``Match exec`` without our standard input.
"""

from __future__ import annotations

import contextlib
import getpass
import glob
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import paramiko

from clusterkit import shell
from clusterkit.addresses import host_from
from clusterkit.cluster import Host
from clusterkit.errors import BadInput, Unavailable

_CONFIG = "~/.ssh/config"
_MOST_INCLUDES = 16
_INCLUDE = re.compile(r"\s*include(?:\s*=\s*|\s+)(.+)\Z", re.IGNORECASE)
_BLOCK = re.compile(r"\s*(?:host|match)(?:\s*=\s*|\s+)", re.IGNORECASE)


class HostUnreachable(Unavailable):
    """A host does not answer, or lets nobody in; the message names it."""


@dataclass(frozen=True)
class Target:
    """Where and as whom to connect: a `Host` with the SSH configuration applied."""

    host: Host
    address: str
    port: int
    user: str
    identities: tuple[str, ...]
    identities_only: bool
    known_hosts: tuple[str, ...]
    key_name: str
    """Under which name the host's key is known."""
    jump: str | None = None
    proxy_command: str | None = None

    @property
    def login(self) -> str:
        """User and address as a word of a shell command, for hints that people copy."""
        return shell.quote(f"{self.user}@{self.address}")

    def __str__(self) -> str:
        if self.address == self.host.name and self.port == 22:
            return f"host {self.host.name}"
        port = "" if self.port == 22 else f" port {self.port}"
        return f"host {self.host.name} ({self.address}{port})"


def resolve(host: Host) -> Target:
    """Apply ``~/.ssh/config`` (or the host's own file) to what the inventory says of a host.

    Raises:
        Unavailable: the configuration cannot be read.
    """
    asked = host.address or host.name
    found = _looked_up(host, asked)
    address = found.get("hostname", asked)
    port = host.port or int(found.get("port", 22))
    identities = [host.identity] if host.identity else list(found.get("identityfile", ()))
    usual = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
    own = [host.known_hosts] if host.known_hosts else _paths(found.get("userknownhostsfile", usual))
    shared = _paths(found.get("globalknownhostsfile", "/etc/ssh/ssh_known_hosts"))
    proxy = found.get("proxycommand")
    jump = host.jump or found.get("proxyjump")
    name = address if port == 22 else f"[{address}]:{port}"
    return Target(
        host=host,
        address=address,
        port=port,
        user=host.user or found.get("user") or getpass.getuser(),
        identities=tuple(os.path.expanduser(path) for path in identities),
        identities_only=bool(host.identity) or found.get("identitiesonly", "no") == "yes",
        known_hosts=tuple(os.path.expanduser(path) for path in [*own, *shared]),
        key_name=found.get("hostkeyalias") or name,
        jump=None if jump == "none" else jump,
        proxy_command=None if host.jump or proxy == "none" else proxy,
    )


def jump_host(hop: str, final: Host) -> Host:
    """``[user@]host[:port]`` on the way to a host, entered with the same key and files.

    Raises:
        BadInput: a port that there is not.
    """
    return msgspec.structs.replace(
        host_from(hop), known_hosts=final.known_hosts, ssh_config=final.ssh_config,
        identity=final.identity,
    )  # fmt: skip


def _paths(text: str) -> list[str]:
    """Several files in one value; a path with spaces is quoted there."""
    with contextlib.suppress(BadInput):
        return shell.split(text)
    return text.split()


def _looked_up(host: Host, asked: str) -> Mapping[str, Any]:
    path = host.ssh_config or _CONFIG
    try:
        text = _config_text(Path(path).expanduser())
        found = _config(text).lookup(asked)
        if "proxycommand" in found and (host.port or host.user):
            # Its %p and %r are what the inventory says.
            first = f"Port {host.port}\n" if host.port else ""
            first += f"User {host.user}\n" if host.user else ""
            found = _config(f"{first}Host *\n{text}").lookup(asked)
        if not 0 < int(found.get("port", 22)) < 1 << 16:
            raise ValueError(f"Port {found['port']}")
        return found
    except FileNotFoundError:
        if host.ssh_config is None:
            return {}
        raise Unavailable(f"{path}: no such file", hint="the hosts' ssh_config names it") from None
    except (OSError, ValueError, KeyError, paramiko.SSHException) as error:
        raise Unavailable(f"{path}: cannot be read as an SSH configuration: {error}") from None


class _Config(paramiko.SSHConfig):
    """Runs the command of a ``Match exec`` itself: paramiko's way would read our standard input."""

    # This and _tokenize are methods of paramiko 5.1 that it neither documents nor types.
    def _does_match(
        self, criteria: Any, target: str, canonical: Any, final: Any, options: Any
    ) -> Any:
        commands = [one for one in criteria if one["type"] == "exec"]
        others = [one for one in criteria if one["type"] != "exec"]
        if others or not commands:
            matched = super()._does_match(others, target, canonical, final, options)  # type: ignore[misc]
            if not matched or not commands:
                return matched
        for one in commands:
            command = self._tokenize(options, target, "match-exec", one["param"])  # type: ignore[attr-defined]
            nothing = subprocess.DEVNULL
            ended = subprocess.run(["/bin/sh", "-c", command], stdin=nothing, stdout=nothing)
            if (ended.returncode == 0) == one["negate"]:
                return False
        return True


@cache
def _config(text: str) -> paramiko.SSHConfig:
    return _Config.from_text(text)


def config_text(path: Path, depth: int = 0) -> str:
    """A configuration, with what its ``Include`` lines name in their places.

    Raises:
        OSError, UnicodeDecodeError: ``path`` cannot be read.
        ValueError: files include each other without end.
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
            for found in sorted(glob.glob(pattern)):
                with contextlib.suppress(OSError):
                    lines.append(config_text(Path(found), depth + 1))
        # The blocks of an included file end with it.
        lines.append(block)
    return "\n".join(lines) + "\n"


_config_text = cache(config_text)
