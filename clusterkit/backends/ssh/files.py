"""OpenSSH's own files where paramiko reads less in them than OpenSSH does: ``known_hosts`` with
patterns, revoked keys and thousands of lines (sshd(8)), configurations with ``Include``
(ssh_config(5))."""

from __future__ import annotations

import base64
import binascii
import contextlib
import fnmatch
import glob
import hashlib
import hmac
import os
import re
from dataclasses import dataclass
from pathlib import Path

from clusterkit.shell import split

_MOST_INCLUDES = 16
_INCLUDE = re.compile(r"\s*include(?:\s*=\s*|\s+)(.+)\Z", re.IGNORECASE)
_BLOCK = re.compile(r"\s*(?:host|match)(?:\s*=\s*|\s+)", re.IGNORECASE)


@dataclass(frozen=True)
class KnownKey:
    """One line's key: its type, and the key itself in base64."""

    kind: str
    text: str
    revoked: bool = False


class KnownHosts:
    """The lines of one file; what is no such line is passed over, as OpenSSH does."""

    def __init__(self, text: str) -> None:
        self._by_name: dict[str, list[KnownKey]] = {}
        self._by_pattern: list[tuple[list[str], KnownKey]] = []
        self._hashed: list[tuple[bytes, bytes, KnownKey]] = []
        for line in text.splitlines():
            fields = line.split()
            if not fields or fields[0].startswith("#"):
                continue
            marker = fields.pop(0) if fields[0].startswith("@") else ""
            if len(fields) >= 3 and marker in ("", "@revoked"):
                self._add(fields[0], KnownKey(fields[1], fields[2], marker == "@revoked"))

    def _add(self, names: str, key: KnownKey) -> None:
        if names.startswith("|1|"):
            with contextlib.suppress(ValueError, binascii.Error):
                salt, digest = map(base64.b64decode, names[3:].split("|"))
                self._hashed.append((salt, digest, key))
            return
        patterns = names.lower().split(",")
        if any(set(pattern) & set("*?!") for pattern in patterns):
            self._by_pattern.append((patterns, key))
            return
        for name in patterns:
            self._by_name.setdefault(name, []).append(key)

    def keys(self, name: str) -> list[KnownKey]:
        """The keys of a host, called ``name`` or, for another port than 22, ``[name]:port``."""
        name = name.lower()
        found = list(self._by_name.get(name, ()))
        found += [key for patterns, key in self._by_pattern if _matches(name, patterns)]
        for salt, digest, key in self._hashed:
            if hmac.compare_digest(hmac.digest(salt, name.encode(), hashlib.sha1), digest):
                found.append(key)
        return found


def _matches(name: str, patterns: list[str]) -> bool:
    def fits(pattern: str) -> bool:
        # Brackets stand for themselves there.
        return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))

    if any(pattern.startswith("!") and fits(pattern[1:]) for pattern in patterns):
        return False
    return any(fits(pattern) for pattern in patterns if not pattern.startswith("!"))


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
        for name in split(include[1]):
            pattern = os.path.join(os.path.expanduser("~/.ssh"), os.path.expanduser(name))
            for found in sorted(glob.glob(pattern)):
                with contextlib.suppress(OSError):
                    lines.append(config_text(Path(found), depth + 1))
        # The blocks of an included file end with it.
        lines.append(block)
    return "\n".join(lines) + "\n"
