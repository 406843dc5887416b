"""What a conversion has found so far: keys of a job, an entry of the cluster file, and of every
option what became of it. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import asdict, replace

from clusterkit import addresses, shell
from clusterkit.cluster import Host
from clusterkit.errors import BadInput, Place, dotted
from clusterkit.jobfile.command import Used
from clusterkit.yaml_file import Document

Fate = Literal["job", "cluster", "dropped", "yours"]
"""It became a key of the job, or of the cluster's entry; clusterkit does it anyway, or it has no
meaning there; or it is left to the person who converts."""

OURS = "dropped, clusterkit works it out"
LOGS = "dropped, every rank's lines are kept: `clusterkit logs`"
HINT = "take it out, or write the job file by hand: docs/job-file.md"

Read = Callable[[str], str | None]
"""The text of a file that the input names, relative to where the conversion runs; None: no such."""

_VARIABLE = "\ue000{}\ue001"
_VARIABLES = re.compile("\ue000(.*?)\ue001", re.DOTALL)


class Note(Struct, frozen=True, omit_defaults=True):
    """What became of one option."""

    what: str
    """The option, or the path of the key, as written."""
    became: str
    fate: Fate
    where: str = ""
    """``file:line``; empty for a command line."""

    def __str__(self) -> str:
        where = f"{self.where}: " if self.where else ""
        return f"{where}{self.what}: {self.became}"


def variable(name: str) -> str:
    """Stands in a text for a shell variable whose value is not known."""
    return _VARIABLE.format(name)


def shown(text: str) -> str:
    """A text with `variable` as a person would write it."""
    return _VARIABLES.sub(r"$\1", text)


def unknown_in(text: str) -> str | None:
    """The first `variable` in a text."""
    found = _VARIABLES.search(text)
    return found[1] if found else None


def hosts_of(path: str, text: str) -> list[Host]:
    """What a hostfile names; a line without slots is one slot.

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


class Sheet:
    """Collects a conversion; ``at`` says where the option that is being read stands."""

    def __init__(self, name: str, read: Read = lambda path: None) -> None:
        self.name = name
        self.read = read
        self.job: dict[str, Any] = {}
        self.cluster: dict[str, Any] = {}
        self.cluster_name = ""
        self.notes: list[Note] = []
        self.refused: list[str] = []
        self.at = ""
        self.origins: dict[tuple[Fate, str], str] = {}
        """What gave a key of the job, or of the cluster's entry."""
        self.hosts: dict[str, Used] = {}
        """A launcher's options about hosts, which mean something only all together."""
        self.settings: dict[str, tuple[str, str]] = {}
        """Options of accelerate that a config file may hold as well: value, and as written."""
        self.places: dict[str, str] = {}
        """Where the file has them."""
        self.slots: dict[str, int] = {}
        """Hosts that a launcher was given, and the ranks that each takes."""

    # ------------------------------------------------------------ fates

    def key(self, what: str, key: str, value: Any, said: str = "") -> None:
        """A key of the job; the same key with another value is refused."""
        self._set(what, "job", key, value, said or f"{key}: {_short(value)}")

    def env(self, what: str, name: str, value: str) -> None:
        """A variable of the ranks."""
        if self._is_no_name(what, name) or self._has_no_value(what, value):
            return
        self.job.setdefault("env", {})[name] = value
        self.note(what, f"env.{name}: {_short(value)}", "job")

    def secret(self, what: str, name: str) -> None:
        """A variable that the submitter's environment gives."""
        if self._is_no_name(what, name):
            return
        secrets = self.job.setdefault("secrets", [])
        if name not in secrets:
            secrets.append(name)
        self.note(what, f"secrets: {name}, taken from your environment when you submit", "job")

    def entry(self, what: str, key: str, value: Any, said: str = "") -> None:
        """A key of the cluster's entry, as `key`."""
        self._set(what, "cluster", key, value, said or f"cluster entry, {key}: {_short(value)}")

    def _set(
        self, what: str, where: Literal["job", "cluster"], key: str, value: Any, said: str
    ) -> None:
        keys, of = (self.job, "") if where == "job" else (self.cluster, " of the cluster")
        if key in keys and keys[key] != value:
            before = self.origins.get((where, key), "another")
            self.refuse(what, f"{key}{of} is {keys[key]} by {before}")
        elif not self._has_no_value(what, value):
            keys[key] = value
            self.origins[where, key] = self._place(what)
            self.note(what, said, where)

    def more(self, what: str, key: str, value: Any) -> None:
        """One more item of a list in the cluster's entry."""
        if self._has_no_value(what, value):
            return
        self.cluster.setdefault(key, []).append(value)
        self.note(what, f"cluster entry, {key}: {_short(value)}", "cluster")

    def drop(self, what: str, why: str = OURS) -> None:
        """Not needed."""
        self.note(what, why if why.startswith("dropped") else f"dropped, {why}", "dropped")

    def yours(self, what: str, todo: str) -> None:
        """Left to whoever converts."""
        self.note(what, f"left to you: {todo}", "yours")

    def refuse(self, what: str, why: str) -> None:
        """Cannot be said in a job file; the conversion fails when all has been read."""
        where = f"{self.at}: " if self.at else ""
        self.refused.append(f"{where}{shown(what)}: {why}")

    def note(self, what: str, became: str, fate: Fate) -> None:
        self.notes.append(Note(shown(what), shown(became), fate, self.at))

    def _has_no_value(self, what: str, value: Any) -> bool:
        if bad := _unknown(value):
            self.refuse(what, _no_value(bad))
        return bad is not None

    def _is_no_name(self, what: str, name: str) -> bool:
        if bad := not shell.is_name(name):
            self.refuse(what, f"{name!r} is not a valid name of an environment variable")
        return bad

    def _place(self, what: str) -> str:
        return f"{self.at}: {what}" if self.at else what

    # ------------------------------------------------------------ helpers

    def whole(self, what: str, text: Any, least: int = 1) -> int | None:
        """A whole number; anything else is refused."""
        if re.fullmatch(r"[0-9]{1,9}", str(text)) and int(str(text)) >= least:
            return int(str(text))
        if not self._has_no_value(what, text):
            self.refuse(what, f"{_short(text)!r} is not a whole number, {least} or more")
        return None

    def words(self, what: str, value: str | list[Any] | None) -> list[str]:
        """A command as one line, or as a list of words."""
        try:
            return shell.split(value) if isinstance(value, str) else [str(e) for e in value or ()]
        except BadInput as error:
            raise BadInput(f"{self._place(what)}: {error.message}", "end the quote") from None

    def ssh(self, what: str, hosts: Sequence[Host]) -> None:
        """Hosts, with the ranks that each takes."""
        self.cluster["backend"] = "ssh"
        self.cluster_name = "hosts"
        names = ", ".join(host.name for host in addresses.check_hosts(hosts, self._place(what)))
        entry = [
            {key: value for key, value in asdict(host).items() if value is not None}
            for host in hosts
        ]
        self.entry(what, "hosts", entry, f"cluster entry, hosts: {names}")

    def hostfile(self, what: str, path: str) -> list[Host]:
        """A hostfile's hosts; one that is not there is refused."""
        text = self.file(what, path)
        return [] if text is None else hosts_of(path, text)

    def number(self, what: str, key: str, text: Any, least: int = 1) -> None:
        """A key of the job that takes a whole number."""
        if (value := self.whole(what, text, least)) is not None:
            self.key(what, key, value)

    def file(self, what: str, path: str) -> str | None:
        """A file's text; one that is not there is refused."""
        text = None if _unknown(path) else self.read(path)
        if text is None:
            self.refuse(what, f"{shown(path)} cannot be read here")
        return text

    def check(self) -> None:
        """Raises:
        BadInput: something was refused.
        """
        if self.refused:
            count = len(self.refused)
            first = "" if count == 1 else f"{count} options have no equivalent:\n  "
            raise BadInput(first + "\n  ".join(self.refused), hint=HINT)


class Tree:
    """A parsed YAML file that says which of its keys have been read: what is left is refused."""

    def __init__(self, sheet: Sheet, document: Document) -> None:
        self.sheet = sheet
        self.document = document
        self.seen: set[Place] = set()

    def expect(self, *tables: Mapping[str, type | tuple[type, ...]]) -> None:
        """Look at the types, so that who reads the values need not.

        Args:
            tables: a place, with ``*`` for every key or item, to what stands there if anything
                does; what holds a place comes before it.

        Raises:
            BadInput: something else stands there.
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
        """What stands at a place, which counts as read; None if nothing does."""
        value = self._find(place)
        if value is _ABSENT:
            return None
        self.seen.add(place)
        self.sheet.at = self.document.where(place)
        return value

    def each(self, *place: str | int) -> Iterator[tuple[str, Any]]:
        """Keys and values of a mapping; each counts as read, and is where the sheet is."""
        value = self.peek(*place)
        if isinstance(value, dict):
            for key in value:
                yield key, self.get(*place, key)
        elif value is not None:
            self.get(*place)
            self.sheet.refuse(dotted(place), f"{_short(value)} is not a mapping")

    def peek(self, *place: str | int) -> Any:
        """As `get`, but it does not count."""
        value = self._find(place)
        return None if value is _ABSENT else value

    def _find(self, place: Place) -> Any:
        value: Any = self.document.data
        for part in place:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                return _ABSENT
        return value

    def rest(self, why: str = "clusterkit has no such key") -> None:
        """Refuse every key that nobody has read."""
        self._rest((), self.document.data, why)

    def _rest(self, place: Place, value: Any, why: str) -> None:
        if place in self.seen:
            return
        if not any(seen[: len(place)] == place for seen in self.seen):
            self.sheet.at = self.document.where(place)
            self.sheet.refuse(dotted(place), why)
            return
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, below in items:
            self._rest((*place, key), below, why)


_ABSENT = object()
_TYPES: dict[type, str] = {dict: "a mapping", list: "a list", str: "text"}


def _below(place: Place, value: Any, parts: list[str]) -> Iterator[tuple[Place, Any]]:
    """What stands at the places that a pattern names; a key without a value is as no key."""
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
