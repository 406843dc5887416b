"""Host keys: ``known_hosts`` as sshd(8) describes it, and whether a host shows a key of those.

paramiko reads such files without patterns and revoked keys, and slowly where they have thousands
of lines.
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
    """A host's key is not known, or another than before."""


@dataclass(frozen=True)
class KnownKey:
    """One line's key: its type, and the key itself in base64."""

    kind: str
    text: str
    revoked: bool = False


class KnownHosts:
    """The lines of one file; what is no such line is passed over, as OpenSSH does."""

    def __init__(self, text: str) -> None:
        self._lines: list[tuple[str, KnownKey]] = []
        for line in text.splitlines():
            fields = line.split()
            marker = fields.pop(0) if line.lstrip().startswith("@") else ""
            if len(fields) >= 3 and not fields[0].startswith("#") and marker in ("", "@revoked"):
                key = KnownKey(fields[1], fields[2], marker == "@revoked")
                self._lines.append((fields[0], key))

    def keys(self, name: str) -> list[KnownKey]:
        """The keys of a host, called ``name`` or, for another port than 22, ``[name]:port``."""
        name = name.lower()
        return [key for names, key in self._lines if _is_among(name, names)]


def _is_among(name: str, names: str) -> bool:
    if names.startswith("|1|"):
        try:
            salt, digest = map(base64.b64decode, names[3:].split("|"))
        except ValueError:
            return False
        return hmac.compare_digest(hmac.digest(salt, name.encode(), hashlib.sha1), digest)
    patterns = names.lower().split(",")
    refused = any(pattern[0] == "!" and _fits(name, pattern[1:]) for pattern in patterns if pattern)
    return not refused and any(_fits(name, pattern) for pattern in patterns)


def _fits(name: str, pattern: str) -> bool:
    if "*" not in pattern and "?" not in pattern:
        return name == pattern
    # Brackets stand for themselves there.
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))


@cache
def _known(path: str, changed: float) -> KnownHosts:
    return KnownHosts(Path(path).read_text(errors="replace"))


def known_keys(target: Target, name: str) -> list[KnownKey]:
    """The keys that the target's files hold for this name."""
    found = []
    for path in target.known_hosts:
        with contextlib.suppress(OSError):
            found += _known(path, os.stat(path).st_mtime).keys(name)
    return found


def check_key(target: Target, key: paramiko.PKey, known: Sequence[KnownKey]) -> None:
    """Compare the key that a host shows with those it is known by.

    Raises:
        HostKeyProblem: it is not known, another than before, or revoked.
    """
    file = target.known_hosts[0]
    port = "" if target.port == 22 else f"-p {target.port} "
    kind = key.get_name()
    offered = f"{kind} {key.fingerprint}"
    same = [kept for kept in known if (kept.kind, kept.text) == (kind, key.get_base64())]
    if any(kept.revoked for kept in same):
        raise HostKeyProblem(
            f"{target}: its host key has been revoked: {offered}",
            hint="do not trust a host that has this key; the host needs a new one",
        )
    if same:
        return
    add = f"ssh-keyscan {port}{shell.quote(target.address)} >>{shell.quote(file)}"
    its_own = [kept for kept in known_keys(target, target.key_name) if not kept.revoked]
    if kept_ones := [kept for kept in its_own if kept.kind == kind]:
        fingerprints = ", ".join(_fingerprint(kept) for kept in kept_ones)
        raise HostKeyProblem(
            f"{target}: its host key has changed: known is {kind} {fingerprints}, "
            f"now it offers {offered}",
            hint="another machine answers there, or it was installed anew: only in the second "
            f"case, ssh-keygen -R {shell.quote(target.key_name)} -f {shell.quote(file)} && {add}",
        )
    if its_own:
        kinds = ", ".join(dict.fromkeys(kept.kind for kept in its_own))
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
