"""Checks host keys against ``known_hosts`` files as sshd(8) describes them.

paramiko's `HostKeys` knows neither patterns nor revoked keys, and is slow with thousands of lines.
"""

from __future__ import annotations

import base64
import contextlib
import fnmatch
import hashlib
import hmac
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import paramiko

from clusterkit import shell
from clusterkit.backends.ssh.config import HostUnreachable, Target


class HostKeyProblem(HostUnreachable):
    """A host's key is not in ``known_hosts``, has changed, or is revoked."""

    answered = True


@dataclass(frozen=True)
class KnownKey:
    """A key of ``known_hosts``: its type, and the key in base64."""

    kind: str
    text: str
    revoked: bool = False


class KnownHosts:
    """One ``known_hosts`` file. Lines that cannot be parsed are ignored, as OpenSSH does."""

    def __init__(self, text: str) -> None:
        self._lines: list[tuple[str, KnownKey]] = []
        for line in text.splitlines():
            fields = line.split()
            marker = fields.pop(0) if line.lstrip().startswith("@") else ""
            if len(fields) >= 3 and not fields[0].startswith("#") and marker in ("", "@revoked"):
                key = KnownKey(fields[1], fields[2], marker == "@revoked")
                self._lines.append((fields[0], key))

    def keys(self, name: str) -> list[KnownKey]:
        """Return the keys of the host ``name``; with a port other than 22: ``[name]:port``."""
        name = name.lower()
        return [key for names, key in self._lines if _names_host(names, name)]


def _names_host(names: str, name: str) -> bool:
    if names.startswith("|1|"):
        try:
            salt, digest = map(base64.b64decode, names[3:].split("|"))
        except ValueError:
            return False
        return hmac.compare_digest(hmac.digest(salt, name.encode(), hashlib.sha1), digest)
    patterns = names.lower().split(",")
    if any(_matches(name, pattern[1:]) for pattern in patterns if pattern.startswith("!")):
        return False
    return any(_matches(name, pattern) for pattern in patterns)


def _matches(name: str, pattern: str) -> bool:
    if "*" not in pattern and "?" not in pattern:
        return name == pattern
    # Brackets are literal in known_hosts, but special to fnmatch.
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))


@cache
def _read_cached(path: str, changed: float) -> KnownHosts:
    return KnownHosts(Path(path).read_text(errors="replace"))


def known_keys(target: Target, name: str) -> list[KnownKey]:
    """Return the keys in the target's files for this name."""
    keys = []
    for path in target.known_hosts:
        with contextlib.suppress(OSError):
            keys += _read_cached(path, os.stat(path).st_mtime).keys(name)
    return keys


def check_key(target: Target, key: paramiko.PKey, known: Sequence[KnownKey]) -> None:
    """Check that the key that a host presents is one of its known keys.

    Raises:
        HostKeyProblem: it is not known, has changed, or is revoked.
    """
    file = target.known_hosts[0]
    port = "" if target.port == 22 else f"-p {target.port} "
    kind = key.get_name()
    offered = f"{kind} {key.fingerprint}"
    same = [each for each in known if (each.kind, each.text) == (kind, key.get_base64())]
    if any(each.revoked for each in same):
        raise HostKeyProblem(
            f"{target}: its host key has been revoked: {offered}",
            hint="do not trust a host that has this key; the host needs a new one",
        )
    if same:
        return
    add = f"ssh-keyscan {port}{shell.quote(target.address)} >>{shell.quote(file)}"
    valid = [each for each in known_keys(target, target.key_name) if not each.revoked]
    if previous := [each for each in valid if each.kind == kind]:
        fingerprints = ", ".join(map(_fingerprint, previous))
        raise HostKeyProblem(
            f"{target}: its host key has changed: known is {kind} {fingerprints}, "
            f"now it offers {offered}",
            hint="another machine answers there, or it was installed anew: only in the second "
            f"case, ssh-keygen -R {shell.quote(target.key_name)} -f {shell.quote(file)} && {add}",
        )
    if valid:
        kinds = ", ".join(dict.fromkeys(each.kind for each in valid))
        raise HostKeyProblem(
            f"{target}: its host key is not the known one: known_hosts has one of type {kinds}, "
            f"it offers {offered}",
            hint=f"compare the fingerprint on the host, then {add}",
        )
    missing = "" if os.path.exists(file) else f", there is no file {file}"
    raise HostKeyProblem(
        f"{target}: its host key is not known{missing}: it offers {offered}",
        hint="compare the fingerprint on the host (ssh-keygen -lf /etc/ssh/ssh_host_*.pub), "
        f"then {add}",
    )


def _fingerprint(key: KnownKey) -> str:
    try:
        digest = hashlib.sha256(base64.b64decode(key.text)).digest()
    except ValueError:
        return "(unreadable)"
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"
