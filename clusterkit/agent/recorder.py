"""What torch's flight recorders know of a rank's collectives: gloo's, and NCCL's.

Gloo's entries have no events: ``state`` stays "scheduled", ``retired`` tells what is complete.
NCCL's know what the GPU has done, its starts only with TORCH_NCCL_ENABLE_TIMING=1. The CPU has
queued them at ``time_created_ns``, long before they run. `standstill` documents a record's fields.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from clusterkit.agent import limits
from clusterkit.agent.protocol import DUMP_FILE, Document
from clusterkit.agent.standstill import NCCL, WORLD, median

_GROUPS_MOST = 8  # process groups in a record
_SPANS_MOST = 16  # rows of the ranks of a group in a record: a message between nodes has a bound


def settings(env: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return the variables by which torch records collectives, and keeps in ``folder`` what is
    recorded when NCCL's watchdog ends ranks; by default it is in ``~/.cache``, of the last run.

    None that the user has set. Only NCCL reads the last two: for ranks on CPUs they do nothing.
    """
    # torch 2.13 prefers these names: one that is set would hide an older one that the user has set.
    wanted = {
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "2000",
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"): f"{folder}/{DUMP_FILE}",
    }
    return {names[0]: value for names, value in wanted.items() if not env.keys() & {*names}}


def joined(*dumps: Document) -> Document:
    """Return the recordings of several backends as one, without what will never complete.

    Operations inside a coalesced group of NCCL are recorded without events: their state stays
    "scheduled". NCCL runs a group's collectives in order: those up to the newest completed one are
    complete.
    """
    entries: list[Document] = []
    groups: Document = {}
    for dump in dumps:
        new = dump.get("entries", [])  # torch 2.13 leaves the key out when there are none
        done: dict[str, int] = {}
        for entry in new:
            if entry["state"] == "completed" and not entry["is_p2p"]:
                number = int(entry["collective_seq_id"])
                done[_group(entry)] = max(number, done.get(_group(entry), 0))
        entries += [
            entry for entry in new
            if entry["state"] == "completed" or not _is_nccl(entry)
            or int(entry["collective_seq_id"]) > done.get(_group(entry), 0)
        ]  # fmt: skip
        groups |= dump.get("pg_config") or {}
    entries.sort(key=lambda entry: int(entry["time_created_ns"]))
    return {"entries": entries, "pg_config": groups}


def from_flight_recorder(dump: Document, now: float) -> Document:
    """Return ``last``, ``waits``, ``members`` and ``unstarted`` of a record.

    Args:
        dump: as of `joined`.
        now: Unix time.
    """
    last: dict[str, int] = {}
    began: dict[tuple[str, str, str], list[float]] = {}
    noticed: dict[str, float] = {}  # by group of NCCL: when its newest completion was
    timed = False  # whether NCCL's starts are recorded
    pending: dict[tuple[str, int], tuple[Document, list[float], int]] = {}
    started: dict[tuple[str, int], bool] = {}  # those of NCCL that are pending
    for entry in dump["entries"]:
        group, number = _group(entry), int(entry["collective_seq_id"])
        like = began.setdefault((group, _name(entry), str(entry["input_sizes"])), [])
        like.append(int(entry["time_created_ns"]) / 1e9)
        timed |= bool(entry.get("time_discovered_started_ns"))
        if entry["is_p2p"]:
            continue
        last.pop(group, None)
        last[group] = number  # the newest group last
        if not (entry["retired"] or entry["state"] == "completed"):
            # The operations of a coalesced group have its number; its own entry is the last.
            pending.setdefault((group, number), (entry, like, len(like)))
            if _is_nccl(entry):
                started[group, number] = entry["state"] == "started"
        elif entry["retired"] and (at := entry.get("time_discovered_completed_ns")):
            # By torch's watchdog; what is not retired yet, this very query has found complete.
            noticed[group] = max(noticed.get(group, 0.0), int(at) / 1e9)
    waits = []
    members: dict[str, list[list[int]]] = {}
    for (group, number), (entry, like, count) in itertools.islice(pending.items(), 2):
        before = [later - earlier for earlier, later in itertools.pairwise(like[:count])]
        every = median(before) if len(before) > 1 else 0.0
        # The CPU may have queued it while the GPU was steps behind.
        seconds = round(max(0.0, now - max(like[count - 1], noticed.get(group, 0.0))), 1)
        timeout = int(entry.get("timeout_ms") or 0) / 1000  # torch 2.4 and later
        waits.append((group, number, _name(entry)[:40], seconds, every, timeout))
        config = dump["pg_config"].get(entry["process_group"][0]) if _is_nccl(entry) else None
        if config and (spans := _spans(json.loads(config["ranks"]))):
            members[group] = spans
    newest = dict(list(last.items())[-_GROUPS_MOST:])
    wanted = (WORLD, f"{NCCL} {WORLD}", *(wait[0] for wait in waits))
    newest.update((group, last[group]) for group in wanted if group in last)
    found: Document = {"last": newest, "waits": waits}
    if members:
        found["members"] = members
    if timed:
        found["unstarted"] = {
            group: next((number for (its, number), has in started.items()
                         if its == group and not has), 0)
            for group, _ in started
        }  # fmt: skip
    return found


def arrival_times(dump: Document, now: float, until: dict[str, int]) -> Document:
    """Return when a rank entered the newest collectives of its busiest process group.

    ``group``; ``first``: the number of the first collective; ``since``: when the rank entered it,
    Unix time; ``steps``: tenths of milliseconds since the previous collective, 0 for the first.

    Args:
        dump: of gloo's recorder.
        now: Unix time.
        until: the newest collective to report, by group. A group without one gets this rank's
            newest, so that all ranks report the same collectives.
    """
    groups: dict[str, dict[int, int]] = {}
    for entry in dump.get("entries", []):
        if not (entry["is_p2p"] or _is_nccl(entry)):
            times = groups.setdefault(_group(entry), {})
            times[int(entry["collective_seq_id"])] = int(entry["time_created_ns"])
    group, times = max(groups.items(), key=lambda item: len(item[1]))
    number = min(until.setdefault(group, max(times)), max(times))
    found: list[int] = []
    while number in times and len(found) < limits.ARRIVALS_MOST:
        old = times[number] / 1e9 < now - limits.ARRIVALS_SECONDS
        if old and len(found) >= limits.ARRIVALS_LEAST:
            break
        found.insert(0, times[number])
        number -= 1
    tenths = [round((at - found[0]) / 1e5) for at in found]
    steps = [later - earlier for earlier, later in itertools.pairwise([0, *tenths])]
    return {"group": group, "first": number + 1, "since": found[0] / 1e9, "steps": steps}


def _is_nccl(entry: Document) -> bool:
    return str(entry["profiling_name"]).startswith(f"{NCCL}:")


def _group(entry: Document) -> str:
    """Return the name of its process group; each backend of one numbers its collectives itself."""
    short, described = entry["process_group"]
    group = WORLD if described == "default_pg" else str(short)[:40]
    if described not in ("default_pg", "undefined", ""):
        group += f" ({str(described)[:40]})"
    backend = str(entry["profiling_name"]).rpartition(":")[0]
    return f"{backend} {group}" if backend and backend != "gloo" else group


def _name(entry: Document) -> str:
    return str(entry["profiling_name"]).rpartition(":")[2]


def _spans(ranks: Sequence[int]) -> list[list[int]]:
    """Return ranks as rows of first, last and step; none if they are too many for a message."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and (spans[-1][0] == spans[-1][1] or rank - spans[-1][1] == spans[-1][2]):
            spans[-1][1:] = rank, rank - spans[-1][1]
        else:
            spans.append([rank, rank, 1])
    return spans if len(spans) <= _SPANS_MOST else []


def read_dumps(folder: Path) -> dict[int, Document]:
    """Return the records of a node's ranks whose recordings NCCL's watchdog has written there.

    It has all ranks write theirs within a minute: older files are of an earlier failure.
    """
    import pickle  # seldom needed, and slow to import

    class Plain(pickle.Unpickler):
        """Reads what torch writes: numbers, texts, lists and dictionaries."""

        def find_class(self, module: str, name: str) -> NoReturn:
            raise pickle.UnpicklingError(f"{module}.{name}")

    found: dict[int, tuple[float, Document]] = {}
    for path in folder.glob(f"{DUMP_FILE}*"):
        # Also torn ones: the disk may be full.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError,
                                 EOFError, pickle.UnpicklingError):  # fmt: skip
            rank, at = int(path.name.removeprefix(DUMP_FILE)), path.stat().st_mtime
            with path.open("rb") as file:
                dump = joined(Plain(file).load())
            found[rank] = at, {"rank": rank, "at": None, **from_flight_recorder(dump, at)}
    newest = max((at for at, _ in found.values()), default=0.0)
    return {rank: each for rank, (at, each) in found.items() if at > newest - limits.DUMP_SECONDS}
