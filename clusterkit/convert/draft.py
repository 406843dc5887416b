"""The state of a conversion: keys of a job, a cluster entry, and a note for each option. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import asdict, replace

from clusterkit import shell
from clusterkit.cluster import Host
from clusterkit.errors import BadInput, KeyPath, dotted
from clusterkit.hosts import addresses
from clusterkit.jobfile.command import Used
from clusterkit.jobfile.yaml_file import Document

Outcome = Literal["job", "cluster", "dropped", "yours"]
"""A key of the job, a key of the cluster entry, dropped (with the reason), or left to the user."""

OURS = "dropped, clusterkit works it out"
LOGS = "dropped, every rank's lines are kept: `clusterkit logs`"
HINT = "take it out, or write the job file by hand: docs/job-file.md"

Read = Callable[[str], str | None]
"""Returns the text of a file, relative to the current folder; None if it cannot be read."""

_VARIABLE = "\ue000{}\ue001"
_VARIABLES = re.compile("\ue000(.*?)\ue001", re.DOTALL)


class Note(Struct, frozen=True, omit_defaults=True):
    """The outcome of one option."""

    what: str
    """The option, or the path of the key, as written."""
    became: str
    fate: Outcome
    where: str = ""
    """``file:line``; empty for a command line."""

    def __str__(self) -> str:
        where = f"{self.where}: " if self.where else ""
        return f"{where}{self.what}: {self.became}"


def variable(name: str) -> str:
    """Return a marker for a shell variable of unknown value."""
    return _VARIABLE.format(name)


def shown(text: str) -> str:
    """Return a text with each `variable` marker as ``$NAME``."""
    return _VARIABLES.sub(r"$\1", text)


def unknown_in(text: str) -> str | None:
    """Return the name of the first `variable` marker in a text, if any."""
    found = _VARIABLES.search(text)
    return found[1] if found else None


def all_unknown(text: str) -> list[str]:
    """Return the names of all `variable` markers in a text."""
    return _VARIABLES.findall(text)


def hosts_of(path: str, text: str) -> list[Host]:
    """Read a hostfile; a line without slots has one slot.

    Raises:
        BadInput: as `addresses.hostfile`; no hosts, a host without ranks.
    """
    lines = addresses.hostfile_lines(text)
    hosts = addresses.hostfile(path, lines, mixed=True)
    if not hosts:
        raise BadInput(f"{path}: no hosts", hint="`host slots=N` on each line")
    for (number, line), host in zip(lines, hosts, strict=True):
        if host.slots == 0:
            raise BadInput(f"{path}:{number}: {line}: no rank runs there", hint="take it out")
    return [replace(host, slots=host.slots or 1) for host in hosts]


class Draft:
    """Collects the result of a conversion. ``at`` is the place of the option being read."""

    def __init__(self, name: str, read: Read = lambda path: None) -> None:
        self.name = name
        self.read = read
        self.job: dict[str, Any] = {}
        self.cluster: dict[str, Any] = {}
        self.cluster_name = ""
        self.notes: list[Note] = []
        self.refused: list[str] = []
        self.instead = (0, "")
        """How many options of a launcher's line were refused, and what to type without them."""
        self.at = ""
        self.origins: dict[tuple[Outcome, str], str] = {}
        """The option that set each key of the job or of the cluster entry."""
        self.hosts: dict[str, Used] = {}
        """A launcher's options about hosts, which `finish` reads together."""
        self.settings: dict[str, tuple[str, str]] = {}
        """Settings of accelerate, of the command or its config file: value, and as written."""
        self.places: dict[str, str] = {}
        """The place of each setting in the config file."""
        self.slots: dict[str, int] = {}
        """Ranks by host, of the launcher's hostfile or host list."""

    # ------------------------------------------------------------ fates

    def key(self, origin: str, key: str, value: Any, became: str = "") -> None:
        """Set a key of the job. Another value for the same key is refused."""
        self._set(origin, "job", key, value, became or f"{key}: {_short(value)}")

    def env(self, origin: str, name: str, value: str) -> None:
        """Set a variable of the ranks."""
        if self._is_no_name(origin, name) or self._has_no_value(origin, value):
            return
        self.job.setdefault("env", {})[name] = value
        self.note(origin, f"env.{name}: {_short(value)}", "job")

    def secret(self, origin: str, name: str) -> None:
        """Add a variable that is taken from the submitter's environment."""
        if self._is_no_name(origin, name):
            return
        secrets = self.job.setdefault("secrets", [])
        if name not in secrets:
            secrets.append(name)
        self.note(origin, f"secrets: {name}, taken from your environment when you submit", "job")

    def entry(self, origin: str, key: str, value: Any, became: str = "") -> None:
        """Set a key of the cluster entry, as `key`."""
        self._set(origin, "cluster", key, value, became or f"cluster entry, {key}: {_short(value)}")

    def _set(
        self, origin: str, where: Literal["job", "cluster"], key: str, value: Any, became: str
    ) -> None:
        keys, of = (self.job, "") if where == "job" else (self.cluster, " of the cluster")
        if key in keys and keys[key] != value:
            before = self.origins.get((where, key), "another")
            self.refuse(origin, f"{key}{of} is {keys[key]} by {before}")
        elif not self._has_no_value(origin, value):
            keys[key] = value
            self.origins[where, key] = self._place(origin)
            self.note(origin, became, where)

    def append(self, origin: str, key: str, value: Any) -> None:
        """Append an item to a list of the cluster entry."""
        if self._has_no_value(origin, value):
            return
        self.cluster.setdefault(key, []).append(value)
        self.note(origin, f"cluster entry, {key}: {_short(value)}", "cluster")

    def drop(self, origin: str, why: str = OURS) -> None:
        """Record an option that is not needed, with the reason."""
        self.note(origin, why if why.startswith("dropped") else f"dropped, {why}", "dropped")

    def todo(self, origin: str, todo: str) -> None:
        """Record an option that is left to the user, with what to do."""
        self.note(origin, f"left to you: {todo}", "yours")

    def refuse(self, origin: str, why: str) -> None:
        """Record an option without equivalent; `check` then raises."""
        where = f"{self.at}: " if self.at else ""
        self.refused.append(f"{where}{shown(origin)}: {why}")

    def note(self, origin: str, became: str, fate: Outcome) -> None:
        self.notes.append(Note(shown(origin), shown(became), fate, self.at))

    def _has_no_value(self, origin: str, value: Any) -> bool:
        if bad := _unknown(value):
            self.refuse(origin, _no_value(bad))
        return bad is not None

    def _is_no_name(self, origin: str, name: str) -> bool:
        if bad := not shell.is_name(name):
            self.refuse(origin, f"{name!r} is not a valid name of an environment variable")
        return bad

    def _place(self, origin: str) -> str:
        return f"{self.at}: {origin}" if self.at else origin

    # ------------------------------------------------------------ helpers

    def integer(self, origin: str, text: Any, least: int = 1) -> int | None:
        """Parse a whole number; refuse anything else."""
        if re.fullmatch(r"[0-9]{1,9}", str(text)) and int(str(text)) >= least:
            return int(str(text))
        if not self._has_no_value(origin, text):
            self.refuse(origin, f"{_short(text)!r} is not a whole number, {least} or more")
        return None

    def words(self, origin: str, value: str | list[Any] | None) -> list[str]:
        """Split a command that is a line or a list of words."""
        try:
            return shell.split(value) if isinstance(value, str) else [str(e) for e in value or ()]
        except BadInput as error:
            raise BadInput(f"{self._place(origin)}: {error.message}", "end the quote") from None

    def ssh(self, origin: str, hosts: Sequence[Host]) -> None:
        """Make the cluster entry one over SSH, with these hosts and their slots."""
        self.cluster["backend"] = "ssh"
        self.cluster_name = "hosts"
        names = ", ".join(host.name for host in addresses.check_hosts(hosts, self._place(origin)))
        entry = [
            {key: value for key, value in asdict(host).items() if value is not None}
            for host in hosts
        ]
        self.entry(origin, "hosts", entry, f"cluster entry, hosts: {names}")

    def hostfile(self, origin: str, path: str) -> list[Host]:
        """Read the hosts of a hostfile; refuse one that cannot be read."""
        text = self.file(origin, path)
        return [] if text is None else hosts_of(path, text)

    def number(self, origin: str, key: str, text: Any, least: int = 1) -> None:
        """Set a key of the job that takes a whole number."""
        if (value := self.integer(origin, text, least)) is not None:
            self.key(origin, key, value)

    def file(self, origin: str, path: str) -> str | None:
        """Read a file; refuse one that cannot be read."""
        text = None if _unknown(path) else self.read(path)
        if text is None:
            self.refuse(origin, f"{shown(path)} cannot be read here")
        return text

    def check(self) -> None:
        """Raise `BadInput` with all refused options, if there are any."""
        if self.refused:
            count = len(self.refused)
            first = "" if count == 1 else f"{count} options have no equivalent:\n  "
            hint = self.instead[1] if count == self.instead[0] else HINT
            raise BadInput(first + "\n  ".join(self.refused), hint)


class Tree:
    """A parsed YAML file that records which keys were read; `rest` refuses the others."""

    def __init__(self, draft: Draft, document: Document) -> None:
        self.draft = draft
        self.document = document
        self.seen: set[KeyPath] = set()

    def expect(self, *tables: Mapping[str, type | tuple[type, ...]]) -> None:
        """Check the types of values.

        Args:
            tables: types by path; ``*`` in a path is every key or item. A parent comes before
                its children. Missing keys are fine.

        Raises:
            BadInput: a value has another type.
        """
        for table in ({"": dict}, *tables):
            for path, types in table.items():
                for place, value in _below((), self.document.data, path.split(".") if path else []):
                    one_of = types if isinstance(types, tuple) else (types,)
                    if not isinstance(value, one_of):
                        wanted = " or ".join(_TYPES[each] for each in one_of)
                        message = (
                            f"{'null' if value is None else _short(repr(value))} is not {wanted}"
                        )
                        raise self.document.error(place, message, f"write {wanted} here")

    def get(self, *place: str | int) -> Any:
        """Return the value at a place and mark it as read; None if missing."""
        value = self._find(place)
        if value is _ABSENT:
            return None
        self.seen.add(place)
        self.draft.at = self.document.where(place)
        return value

    def each(self, *place: str | int) -> Iterator[tuple[str, Any]]:
        """Yield keys and values of a mapping; mark each as read and move the draft there."""
        value = self.peek(*place)
        if isinstance(value, dict):
            for key in value:
                yield key, self.get(*place, key)
        elif value is not None:
            self.get(*place)
            self.draft.refuse(dotted(place), f"{_short(value)} is not a mapping")

    def peek(self, *place: str | int) -> Any:
        """Return the value at a place without marking it as read."""
        value = self._find(place)
        return None if value is _ABSENT else value

    def _find(self, place: KeyPath) -> Any:
        value: Any = self.document.data
        for part in place:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                return _ABSENT
        return value

    def rest(self, why: str = "clusterkit does not have this key") -> None:
        """Refuse every key that was not read."""
        self._rest((), self.document.data, why)

    def _rest(self, place: KeyPath, value: Any, why: str) -> None:
        if place in self.seen:
            return
        if not any(seen[: len(place)] == place for seen in self.seen):
            self.draft.at = self.document.where(place)
            self.draft.refuse(dotted(place), why)
            return
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, below in items:
            self._rest((*place, key), below, why)


_ABSENT = object()
_TYPES: dict[type, str] = {dict: "a mapping", list: "a list", str: "text"}


def _below(place: KeyPath, value: Any, parts: list[str]) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the places and values that a pattern matches, without null values."""
    if not parts:
        yield place, value
        return
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, below in items if isinstance(value, (dict, list)) else ():
        if parts[0] == "*" or (key == parts[0] and below is not None):
            yield from _below((*place, key), below, parts[1:])


def _unknown(value: Any) -> str | None:
    if isinstance(value, str):
        return unknown_in(value)
    if isinstance(value, (list, tuple)):
        return next((bad for each in value if (bad := _unknown(each))), None)
    if isinstance(value, dict):
        return next((bad for each in value.values() if (bad := _unknown(each))), None)
    return None


def _no_value(name: str) -> str:
    return f"${name} has no value here, and no shell reads a job file: write its value instead"


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    text = text.replace("\n", "\\n")
    return text if len(text) <= 100 else text[:97] + "..."
