"""Address, user and keys of a host: from its `Host`, and below that OpenSSH's configuration.

OpenSSH itself reads the configuration, in ``ssh -G``: so ``Match``, ``Include`` and
``/etc/ssh/ssh_config`` count as for ``ssh HOST``. As for ``ssh``, ``~`` is the home folder of the
user database, whatever HOME says. (With the file of HOME as ``-F``, ``/etc/ssh/ssh_config`` would
not count, and ``Include conf.d/*`` in that file would still start at the other home's ``.ssh``.)
"""

from __future__ import annotations

import os
import pwd
import re
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from clusterkit import shell
from clusterkit.cluster import Host
from clusterkit.errors import Unavailable
from clusterkit.files import user_name
from clusterkit.hosts.addresses import host_from

CONFIG_SECONDS = 60.0
"""How long an answer of ``ssh -G`` is used: it takes 5 to 13 ms of a processor for each host, and
hosts share jump hosts. A supervisor, for which the configuration may change, runs for days."""
CONFIG_TIMEOUT = 60.0
"""For ``ssh -G``, which runs the commands of ``Match exec``, and may ask DNS."""
_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
_Options = Mapping[str, tuple[str, ...]]
"""The values of each option, by lower-case name."""
_WITHOUT_OPENSSH: _Options = {
    "identityfile": ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa"),
    "userknownhostsfile": (" ".join(_KNOWN_HOSTS),),
    "globalknownhostsfile": ("/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2",),
}


class HostUnreachable(Unavailable):
    """A host does not answer, or refuses the login; the message names it."""


class LoginRefused(HostUnreachable):
    """A host answers, and lets this user open no session."""

    answered = True


class _NoOpenSsh(Exception):
    """OpenSSH's client cannot run here; why, and the remedy."""


@dataclass(frozen=True)
class Target:
    """A `Host` with the SSH configuration applied."""

    host: Host
    address: str
    port: int
    user: str
    identities: tuple[str, ...]
    """Key files that the host or the configuration names."""
    default_identities: tuple[str, ...]
    """Key files that OpenSSH tries where none is named."""
    identities_only: bool
    certificates: tuple[str, ...]
    agent: str | None
    """The SSH agent's socket."""
    known_hosts: tuple[str, ...]
    key_name: str
    """The name of the host's key in ``known_hosts``."""
    jump: str | None = None
    proxy_command: str | None = None
    control_path: str | None = None
    """The socket of a connection that ``ssh`` holds open for others, if there is one."""

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
    """Apply OpenSSH's configuration, or the host's own configuration file, to a host.

    Raises:
        Unavailable: the configuration cannot be read, or no user is named.
    """
    name = host.address or host.name
    options = _options(host, name)

    def option(key: str, default: str = "none") -> str:
        return options.get(key, (default,))[0]

    user = host.user or option("user", user_name() or "")
    if not user:
        raise Unavailable(
            f"host {host.name}: no user name: uid {os.getuid()} has no passwd entry here",
            hint="set `user` of the host, or LOGNAME",
        )
    address = option("hostname", name)
    port = host.port or int(option("port", "22"))
    alias = option("hostkeyalias", "")
    machine = socket.gethostname()
    tokens = {
        "%": "%", "h": address, "n": name, "p": str(port), "r": user, "u": user_name() or "",
        "i": str(os.getuid()), "d": _home(), "l": machine, "L": machine.partition(".")[0],
        "k": alias or name,
    }  # fmt: skip

    def files(key: str) -> tuple[str, ...]:
        paths = options.get(key, ())
        return tuple(_path(_fill(path, tokens)) for path in paths if path != "none")

    named = (host.identity,) if host.identity else files("identityfile")
    default = not host.identity and options["identityfile"] == _default_keys()
    known = [host.known_hosts] if host.known_hosts else _paths(option("userknownhostsfile"))
    shared = _paths(option("globalknownhostsfile"))
    if known == [os.devnull]:  # it would disable the check of host keys
        known = []
    jump, proxy = host.jump or option("proxyjump"), option("proxycommand")
    control = option("controlpath")
    return Target(
        host=host,
        address=address,
        port=port,
        user=user,
        identities=() if default else named,
        default_identities=named if default else (),
        identities_only=bool(host.identity) or option("identitiesonly") == "yes",
        certificates=files("certificatefile"),
        agent=_agent(option("identityagent", "SSH_AUTH_SOCK")),
        known_hosts=tuple(map(_path, [*(known or _KNOWN_HOSTS), *shared])),
        key_name=alias or (address if port == 22 else f"[{address}]:{port}"),
        jump=None if jump == "none" else _fill(jump, tokens),
        proxy_command=None if host.jump or proxy == "none" else _fill(proxy, tokens),
        control_path=control if os.path.exists(control) else None,
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


def _options(host: Host, name: str) -> _Options:
    arguments = ["-F", _path(host.ssh_config)] if host.ssh_config else []
    # `Match user`, %p and %r are about the host's own user and port.
    arguments += ["-l", host.user] if host.user else []
    arguments += ["-p", str(host.port)] if host.port else []
    try:
        return _ask_openssh((*arguments, "--", name))
    except _NoOpenSsh as why:
        # Without a configuration nothing is lost. Another parser would read it in another way.
        path = _path(host.ssh_config or "~/.ssh/config")
        if os.path.exists(path) and path != os.devnull:
            raise Unavailable(
                f"{path}: only OpenSSH's `ssh -G` can read it, and {why}",
                hint="install OpenSSH's client (apt install openssh-client); or move the file away "
                "and give the hosts their settings in the inventory",
            ) from None
        return _WITHOUT_OPENSSH


def _default_keys() -> tuple[str, ...]:
    try:
        return _ask_openssh(("-F", "none", "--", "localhost"))["identityfile"]
    except _NoOpenSsh:
        return _WITHOUT_OPENSSH["identityfile"]


def _ask_openssh(arguments: tuple[str, ...]) -> _Options:
    return _ask_once(arguments, int(time.monotonic() // CONFIG_SECONDS))


@lru_cache(4096)
def _ask_once(arguments: tuple[str, ...], period: int) -> _Options:
    """Return what ``ssh -G`` prints: all options, also those with their default values."""
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        raise _NoOpenSsh(f"it refuses uid {os.getuid()}, which has no passwd entry here") from None
    try:
        done = subprocess.run(
            ["ssh", "-G", "-T", *arguments], stdin=subprocess.DEVNULL, capture_output=True,
            text=True, errors="surrogateescape", timeout=CONFIG_TIMEOUT,
        )  # fmt: skip
    except FileNotFoundError:
        raise _NoOpenSsh("`ssh` is not in PATH") from None
    except subprocess.TimeoutExpired:
        raise Unavailable(
            f"`{shell.join(['ssh', '-G', *arguments])}` has not ended within {CONFIG_TIMEOUT:g} s",
            hint="a command of `Match exec` in the SSH configuration may hang, or DNS",
        ) from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "terminating, " not in line]
        raise Unavailable(
            f"{'; '.join(said)[:500] or f'exit code {done.returncode}'}: OpenSSH refuses the "
            f"configuration of {arguments[-1]}",
            hint=f"`{shell.join(['ssh', '-G', *arguments])}` shows it",
        )
    options: dict[str, tuple[str, ...]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        options[key.lower()] = (*options.get(key.lower(), ()), value)
    return options


def _home() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return os.path.expanduser("~")


def _path(path: str) -> str:
    """Expand ``~`` and ``${VARIABLE}``, as ``ssh`` does."""
    path = re.sub(r"\$\{(\w+)\}", lambda match: os.environ.get(match[1], match[0]), path)
    return os.path.expanduser(_home() + path[1:] if path.startswith("~/") else path)


def _paths(value: str) -> list[str]:
    # Spaces in a path are not quoted in it; each path begins with / or ~.
    return [] if value == "none" else re.split(r" (?=[/~])", value)


def _agent(value: str) -> str | None:
    """Return the agent's socket from IdentityAgent, which may name a variable."""
    if value == "SSH_AUTH_SOCK" or value.startswith("$"):
        value = os.environ.get(value.strip("${}"), "none")
    return None if value in ("", "none") else value


def _fill(text: str, tokens: Mapping[str, str]) -> str:
    """Fill in the tokens (%h and others) that ``ssh -G`` leaves in a value.

    Raises:
        Unavailable: it has one that is not known.
    """

    def known(match: re.Match[str]) -> str:
        if match[1] in tokens:
            return tokens[match[1]]
        raise Unavailable(
            f"{text!r} in the SSH configuration: {match[0]} is not known here",
            hint=f"known are {' '.join(f'%{token}' for token in tokens)}",
        )

    return re.sub(r"%(.?)", known, text)
