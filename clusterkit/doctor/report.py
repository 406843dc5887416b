"""The report of an examination: a table, a document for ``--json``, the error of a submit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec import Struct

from clusterkit.doctor.base import LEVELS, Finding, Level, shortened, worst
from clusterkit.errors import BadInput, ClusterkitError, Unavailable, pluralize

WIDTH = 100
Progress = Callable[[int, Sequence[str]], None]
"""Called with the phase (1, 2, 3) and the hosts that have not answered yet."""
Style = Callable[[str, Level], str]
"""Colours a text by level."""
_NAMED = 5
"""Most faults in the error of a submit; the table has them all."""
_CELL: dict[Level, str] = {"ok": "ok", "warn": "warn", "fail": "FAIL", "skip": "-"}
_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)\Z", re.DOTALL)


class Report(Struct, frozen=True, kw_only=True):
    """Every finding of one examination."""

    cluster: str
    hosts: tuple[str, ...]
    checks: tuple[str, ...]
    findings: tuple[Finding, ...]
    everything: str = ""
    """Name for all of the hosts together, instead of ``N hosts``."""

    def __repr__(self) -> str:
        verdict = "ok" if self.ok else "not ok"
        return f"<Report on {self.cluster}: {pluralize(len(self.hosts), 'host')}, {verdict}>"

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return self.worst != "fail"

    @property
    def worst(self) -> Level:
        return worst(finding.level for finding in self.findings)

    def document(self) -> dict[str, object]:
        """For ``--json``."""
        return {**msgspec.structs.asdict(self), "ok": self.ok, "worst": self.worst}

    def table(self, *, width: int = WIDTH, style: Style = lambda text, level: text) -> str:
        """Return checks x hosts, with hosts that agree in one column; then every fault once."""
        faults = []
        for finding, hosts in self.faults():
            text = fault_text(finding, hosts, self.hosts, self.everything)
            fix = "\n  fix: " + finding.remedy.replace("\n", "\n       ") if finding.remedy else ""
            faults.append(f"{style(_CELL[finding.level], finding.level)}  {text}{fix}")
        return "\n\n".join([self._matrix(width, style), *faults, self.summary()])

    def summary(self) -> str:
        """Return one line: the number of hosts, of checks, and of those that warn or fail."""
        where = self.everything or pluralize(len(self.hosts), "host")
        where += f", {pluralize(len(self.checks), 'check')}"
        bad = []
        for level, one, several in (("fail", "fails", "fail"), ("warn", "warns", "warn")):
            number = len({finding.check for finding in self.findings if finding.level == level})
            if number:
                bad.append(f"{pluralize(number, 'check')} {one if number == 1 else several}")
        return f"{self.cluster}: {where}: {', '.join(bad) if bad else 'all is well'}"

    def _matrix(self, width: int, style: Style) -> str:
        levels: dict[tuple[str, str], Level] = {}
        for finding in self.findings:
            key = (finding.check, finding.host)
            levels[key] = worst((levels.get(key, "skip"), finding.level))
        groups: dict[tuple[str, ...], list[str]] = {}
        for host in self.hosts:
            # Hosts with the same faults share a column, whatever else differs.
            faults = tuple(
                f"{check} {level}"
                for check in self.checks
                if (level := levels.get((check, host), "skip")) in ("warn", "fail")
            )
            groups.setdefault(faults, []).append(host)
        names = max(map(len, self.checks), default=0)
        columns = self._columns(list(groups.items()), width - names)
        room = width - names - sum(2 + max(len(title), 4) for title, _ in columns) - 2
        remarks = self._remarks() if room >= 20 else {}
        lines = ["  ".join([" " * names, *(f"{title:<4}" for title, _ in columns)]).rstrip()]
        for check in self.checks:
            cells: list[tuple[str, Level | None]] = [(f"{check:<{names}}", None)]
            for title, hosts in columns:
                level = worst(levels.get((check, host), "skip") for host in hosts)
                cells.append((f"{_CELL[level]:<{max(len(title), 4)}}", level))
            if check in remarks:
                cells.append((shortened(remarks[check], room), "skip"))
            else:
                cells[-1] = (cells[-1][0].rstrip(), cells[-1][1])
            lines.append(
                "  ".join(text if level is None else style(text, level) for text, level in cells)
            )
        return "\n".join(lines)

    def _columns(
        self, groups: list[tuple[tuple[str, ...], list[str]]], room: int
    ) -> list[tuple[str, list[str]]]:
        """Return titles and hosts of the columns: the healthy hosts first, then the largest groups.
        Hosts for which there is no room are together in ``N others``."""
        columns: list[tuple[str, list[str]]] = []
        others: list[str] = []
        room -= 2 + len("100000 others")
        for _, hosts in sorted(groups, key=lambda group: (bool(group[0]), -len(group[1]))):
            title = ranges(hosts, self.hosts, self.everything)
            if len(title) > 30 and len(hosts) > 3:
                title = pluralize(len(hosts), "host")
            room -= 2 + max(len(title), 4)
            if room >= 0 or not columns:
                columns.append((title, hosts))
            else:
                others += hosts
        if others:
            columns.append((pluralize(len(others), "other"), others))
        return columns

    def _remarks(self) -> dict[str, str]:
        """Return the cause by check, for checks with the same result on every host."""
        results: dict[str, set[tuple[str, str]]] = {}
        for finding in self.findings:
            results.setdefault(finding.check, set()).add((finding.level, finding.cause))
        return {
            check: cause
            for check, found in results.items()
            if len(found) == 1
            for level, cause in found
            if level in ("ok", "skip") and cause
        }

    def faults(self) -> list[tuple[Finding, list[str]]]:
        """Return every fault once, the worst first, with the hosts that have it."""
        found: dict[tuple[str, ...], tuple[Finding, list[str]]] = {}
        order = {check: number for number, check in enumerate(self.checks)}
        bad = [finding for finding in self.findings if finding.level in ("warn", "fail")]
        known = Counter(map(_key, bad))
        for finding in sorted(bad, key=lambda f: (-LEVELS.index(f.level), order[f.check])):
            key = _key(finding)
            if known[key] == 1:
                # The same text with another host's name is the same fault.
                key = tuple(text.replace(finding.host, "\0") for text in key)
            _, hosts = found.setdefault(key, (finding, []))
            if finding.host not in hosts:
                hosts.append(finding.host)
        return list(found.values())


def _key(finding: Finding) -> tuple[str, ...]:
    return finding.check, finding.level, finding.cause, finding.remedy or ""


def fault_text(
    finding: Finding, hosts: Sequence[str], everyone: Sequence[str], everything: str = ""
) -> str:
    """Format one fault: ``clock on h1, h4-h6: ...``."""
    return f"{finding.check} on {ranges(hosts, everyone, everything)}: {finding.cause}"


def refusal(report: Report) -> ClusterkitError | None:
    """Return the error of a submit to these hosts; None: no check fails.

    It is `Unavailable` if a host does not answer, otherwise `BadInput`.
    """
    bad = [(finding, hosts) for finding, hosts in report.faults() if finding.level == "fail"]
    if not bad:
        return None
    lines = [fault_text(finding, hosts, report.hosts) for finding, hosts in bad[:_NAMED]]
    if len(bad) > _NAMED:
        lines.append(f"and {len(bad) - _NAMED} more")
    remedies = [
        f"{ranges(hosts, report.hosts)}: {finding.remedy}"
        for finding, hosts in bad[:_NAMED]
        if finding.remedy
    ]
    command = (
        f"clusterkit doctor --cluster {report.cluster} says more; "
        "submit and plan skip this with --no-doctor"
    )
    kind = Unavailable if bad[0][0].check in ("reachable", "host-key") else BadInput
    return kind(
        f"cluster {report.cluster} failed its checks: " + "\n  ".join(lines),
        hint="\n       ".join([*remedies, command]),
    )


def ranges(hosts: Iterable[str], everyone: Sequence[str] = (), everything: str = "") -> str:
    """Format names, consecutive numbers as ranges: ``h1-h3, h7, gpu``.

    Args:
        hosts: in order.
        everyone: all hosts of the cluster; if these are all, and more than two, the result is
            ``all 64 hosts``.
        everything: the result in that case, instead.
    """
    names = list(dict.fromkeys(hosts))
    if len(names) > 2 and len(names) == len(everyone):
        return everything or f"all {len(names)} hosts"
    parts: list[list[str]] = []
    for name in names:
        if parts and _follows(parts[-1][-1], name):
            parts[-1].append(name)
        else:
            parts.append([name])
    return ", ".join(
        f"{part[0]}-{part[-1]}" if len(part) > 2 else ", ".join(part) for part in parts
    )


def _follows(before: str, name: str) -> bool:
    first, second = _NUMBERED.match(before), _NUMBERED.match(name)
    return (
        first is not None
        and second is not None
        and (first[1], first[3]) == (second[1], second[3])
        and (len(first[2]) == len(second[2]) or first[2][0] != "0")
        and int(second[2]) == int(first[2]) + 1
    )
