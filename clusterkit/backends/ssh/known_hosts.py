"""Checks host keys against ``known_hosts`` files as sshd(8) describes them.

paramiko's `HostKeys` knows neither patterns nor revoked keys, and is slow with thousands of lines;
paramiko takes a host's certificate for its key, and does not check who signed it.
"""

from __future__ import annotations

import base64
import contextlib
import fnmatch
import hashlib
import hmac
import os
import time
from collections.abc import Iterator, Sequence
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
    marker: str = ""
    """``@revoked``; or ``@cert-authority``: the key signs the certificates of hosts."""

    @property
    def revoked(self) -> bool:
        return self.marker == "@revoked"

    @property
    def authority(self) -> bool:
        return self.marker == "@cert-authority"


class KnownHosts:
    """One ``known_hosts`` file. Lines that cannot be parsed are ignored, as OpenSSH does."""

    def __init__(self, text: str) -> None:
        self._lines: list[tuple[str, KnownKey]] = []
        for line in text.splitlines():
            fields = line.split()
            marker = fields.pop(0) if line.lstrip().startswith("@") else ""
            known = marker in ("", "@revoked", "@cert-authority")
            if len(fields) >= 3 and not fields[0].startswith("#") and known:
                self._lines.append((fields[0], KnownKey(fields[1], fields[2], marker)))

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


_CERTIFICATE = "-cert-v01@openssh.com"
_KEY_FIELDS = {"ssh-rsa": 2, "ssh-ed25519": 1}
"""How many a certificate has of its key, by kind; ECDSA has 2."""
_HOST = 2


def certified(kinds: Sequence[str]) -> list[str]:
    """Return the names of certificates of these kinds of keys."""
    return [f"{kind}{_CERTIFICATE}" for kind in kinds]


@dataclass(frozen=True)
class Certificate:
    """A host's certificate (PROTOCOL.certkeys of OpenSSH), which paramiko does not check."""

    type: int
    id: str
    names: tuple[str, ...]
    valid: tuple[int, int]
    """From, and to: seconds since 1970."""
    critical: bytes
    authority: str
    """The public key that signed it, in base64."""
    signed: bytes
    signature: bytes

    @classmethod
    def of(cls, key: paramiko.PKey) -> Certificate | None:
        """Return the certificate of a host's key; None: it has none."""
        if key.public_blob is None or not key.public_blob.key_type.endswith(_CERTIFICATE):
            return None
        blob = key.public_blob.key_blob
        message = paramiko.Message(blob)
        for _ in range(2 + _KEY_FIELDS.get(key.get_name(), 2)):  # kind, nonce, the key's
            message.get_binary()
        _serial, type_, name = message.get_int64(), message.get_int(), message.get_binary()
        names = message.get_binary()
        valid = message.get_int64(), message.get_int64()
        critical, _extensions, _reserved = (message.get_binary() for _ in range(3))
        authority, signature = message.get_binary(), message.get_binary()
        return cls(
            type=type_,
            id=name.decode(errors="replace"),
            names=tuple(_strings(names)),
            valid=valid,
            critical=critical,
            authority=base64.b64encode(authority).decode(),
            signed=blob[: len(blob) - 4 - len(signature)],
            signature=signature,
        )

    def problem(self, name: str, now: float) -> str | None:
        """Return why it does not certify the host ``name``; None: it does."""
        if self.type != _HOST:
            return "it is a user's, not a host's"
        if name not in self.names:
            return f"it is for {', '.join(self.names) or 'no name'}, not for {name}"
        if not self.valid[0] <= now < self.valid[1]:
            return "it has expired" if now >= self.valid[1] else "it is not valid yet"
        if self.critical:
            return "it has critical options, and none is known"
        return None if self._is_signed() else "its signature is wrong"

    def _is_signed(self) -> bool:
        blob = base64.b64decode(self.authority)
        try:
            kind = paramiko.Message(blob).get_text()
            key = paramiko.PKey.from_type_string(kind, blob)
            signed: bool = key.verify_ssh_sig(self.signed, paramiko.Message(self.signature))
        except (paramiko.SSHException, paramiko.pkey.UnknownKeyType, ValueError):
            return False
        return signed and not kind.endswith(_CERTIFICATE)


def _strings(data: bytes) -> Iterator[str]:
    message = paramiko.Message(data)
    while message.get_remainder():
        yield message.get_binary().decode(errors="replace")


def check_key(target: Target, key: paramiko.PKey, known: Sequence[KnownKey]) -> None:
    """Check that the key that a host presents is one of its known keys.

    Raises:
        HostKeyProblem: it is not known, has changed, or is revoked.
    """
    file = target.known_hosts[0]
    port = "" if target.port == 22 else f"-p {target.port} "
    kind = key.get_name()
    offered = f"{kind} {key.fingerprint}"
    certificate = Certificate.of(key)
    same = [each for each in known if (each.kind, each.text) == (kind, key.get_base64())]
    authority = certificate.authority if certificate else ""
    if any(each.revoked and each.text in (key.get_base64(), authority) for each in known):
        raise HostKeyProblem(
            f"{target}: its host key has been revoked: {offered}",
            hint="do not trust a host that has this key; the host needs a new one",
        )
    if certificate and any(each.authority and each.text == authority for each in known):
        name = target.key_name.removeprefix("[").removesuffix(f"]:{target.port}").lower()
        if problem := certificate.problem(name, time.time()):
            raise HostKeyProblem(
                f"{target}: its host certificate {certificate.id!r} is not valid: {problem}",
                hint="the host needs a new one: ssh-keygen -s AUTHORITY -I ID -h -n "
                f"{shell.quote(name)} /etc/ssh/ssh_host_..._key.pub, on the authority's machine",
            )
        return
    if any(not each.authority for each in same):
        return
    add = f"ssh-keyscan {port}{shell.quote(target.address)} >>{shell.quote(file)}"
    valid = [each for each in known_keys(target, target.key_name) if not each.marker]
    if previous := [each for each in valid if each.kind == kind]:
        fingerprints = ", ".join(map(_fingerprint, previous))
        raise HostKeyProblem(
            f"{target}: its host key has changed: known_hosts has {kind} {fingerprints}, "
            f"the host offers {offered}",
            hint="another machine answers there, or the host was reinstalled. Only if it was "
            f"reinstalled: ssh-keygen -R {shell.quote(target.key_name)} -f {shell.quote(file)} "
            f"&& {add}",
        )
    if valid:
        kinds = ", ".join(dict.fromkeys(each.kind for each in valid))
        raise HostKeyProblem(
            f"{target}: host key verification failed: known_hosts has a key of type {kinds}, "
            f"the host offers {offered}",
            hint=f"compare the fingerprint on the host, then {add}",
        )
    missing = "" if os.path.exists(file) else f", there is no file {file}"
    if any(each.authority for each in known):
        missing = ", and it has no certificate of an authority (@cert-authority) in known_hosts"
    raise HostKeyProblem(
        f"{target}: host key verification failed: its key is not known{missing}; "
        f"it offers {offered}",
        hint="compare the fingerprint on the host (ssh-keygen -lf /etc/ssh/ssh_host_*.pub), "
        f"then {add}",
    )


def _fingerprint(key: KnownKey) -> str:
    try:
        digest = hashlib.sha256(base64.b64decode(key.text)).digest()
    except ValueError:
        return "(unreadable)"
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"
