"""NCCL's flight recorder: answers that torch 2.13 gave in, records and words out.

tests/data/gpu/nccl_recorder has what the recorder of the CUDA build answered without a GPU, with
events that a stand-in completes: of 4 ranks, that have queued 6 collectives and completed 4 (rank
3, in ``r3-4-4``: queued 4), without and with TORCH_NCCL_ENABLE_TIMING (``t0``, ``t1``).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import pickle
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterkit.agent import clock, identity, rank_state, watch
from clusterkit.agent.node_files import NodeFiles
from clusterkit.agent.node_log import NodeLog
from clusterkit.agent.protocol import DUMP_FILE, HANG
from clusterkit.agent.recorder import from_flight_recorder, joined, read_dumps, settings
from clusterkit.agent.standstill import compare
from clusterkit.lifecycle.live import standstill
from clusterkit.run.status import NodeStatus, RunStatus, State

DATA = Path(__file__).parents[1] / "data/gpu/nccl_recorder"
HUNG = ("r0-6-4-t0", "r1-6-4-t0", "r2-6-4-t0", "r3-4-4-t0")
TIMED = ("r0-6-4-t1", "r0-6-4-t1", "r0-6-4-t1", "r3-6-4-t1")
Dump = dict[str, Any]


def recorded(name: str) -> Dump:
    found: Dump = json.loads((DATA / f"{name}.json").read_text())
    return found


def record(rank: int, *dumps: Dump, after: float = 6.0, **more: Any) -> dict[str, Any]:
    """The rank's record so many seconds after its newest collective, as it comes from a node."""
    entries = [entry for dump in dumps for entry in dump.get("entries", [])]
    now = max((entry["time_created_ns"] for entry in entries), default=0) / 1e9 + after
    found = {"rank": rank, "at": "a.py:1", **from_flight_recorder(joined(*dumps), now), **more}
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def said(*records: dict[str, Any]) -> str:
    found = compare({each["rank"]: each for each in records}, range(1), len(records), 0.5)
    assert found is not None
    return found.text.partition("; ranks ")[0].partition("; rank ")[0]


def entry(dump: Dump, number: int, group: str = "0") -> dict[str, Any]:
    found: dict[str, Any] = next(
        each for each in dump["entries"]
        if each["collective_seq_id"] == number and each["process_group"][0] == group
    )  # fmt: skip
    return found


def test_rank_that_has_not_entered_collective_is_named() -> None:
    records = [record(rank, recorded(name)) for rank, name in enumerate(HUNG)]
    assert said(*records) == "rank 3 has not entered all_reduce #5, which ranks 0-2 wait in"
    name, number, what, seconds, _, timeout = records[0]["waits"][0]
    assert (name, number, what, round(seconds), timeout) == ("nccl world", 5, "all_reduce", 6, 600)
    # Operations inside a coalesced group stay "scheduled": nobody waits in them.
    assert records[3]["waits"] == []
    assert records[3]["last"] == {"nccl world": 4, "nccl 3 (mesh_tp)": 1}


def test_incomplete_coalesced_group_counts_as_one_collective() -> None:
    dump = recorded("r3-4-4-t0")
    (whole,) = (each for each in dump["entries"] if each["profiling_name"] == "nccl:coalesced")
    whole |= {"state": "scheduled", "retired": False, "time_discovered_completed_ns": 0}
    ((group, number, name, *_),) = record(0, dump)["waits"]
    assert (group, number, name) == ("nccl 3 (mesh_tp)", 1, "_all_gather_base")
    whole["state"] = "started"
    entry(dump, 4)["time_discovered_started_ns"] = 1  # starts are recorded
    assert record(0, dump)["unstarted"] == {"nccl 3 (mesh_tp)": 0}


def test_gpu_that_has_not_started_queued_collective_is_named() -> None:
    dumps = [recorded(name) for name in TIMED]
    started = [record(rank, dump) for rank, dump in enumerate(dumps)]
    assert said(*started) == "ranks 0-3 wait in all_reduce #5, which does not complete"
    for dump in dumps[2:]:
        entry(dump, 5).update(state="scheduled", time_discovered_started_ns=0)
    behind = [record(rank, dump) for rank, dump in enumerate(dumps)]
    text = said(*behind)
    assert text == (
        "ranks 2-3 have queued all_reduce #5, which ranks 0-1 wait in, but their GPUs have not "
        "started it: kernels that were queued before it still run"
    )
    node = NodeStatus(node=0, host="h", state=State.RUNNING, hang=text)
    run = RunStatus(run="r", job="j", cluster="c", backend="b", state=State.RUNNING, nodes=(node,))
    shown = standstill(run)
    assert shown is not None
    assert (sorted(shown.missing), sorted(shown.waiting)) == ([2, 3], [0, 1])
    assert said(*started[:3], behind[3]).startswith(
        "rank 3 has queued all_reduce #5, which ranks 0"
    )
    assert "but its GPU has not started it" in said(*started[:3], behind[3])
    assert "which no GPU has started" in said(*(record(rank, dumps[2]) for rank in range(4)))
    # Without TORCH_NCCL_ENABLE_TIMING all of them look as if they had not started.
    same = said(*(record(rank, recorded("r0-6-4-t0")) for rank in range(4)))
    assert same == (
        "ranks 0-3 wait in all_reduce #5, which does not complete (which GPU has not started it is "
        "known with TORCH_NCCL_ENABLE_TIMING=1)"
    )


def test_only_group_members_are_named_as_missing() -> None:
    """Also one that has never come to a collective of it."""
    whole = recorded("r3-4-4-t0")
    waiting, never = copy.deepcopy(whole), copy.deepcopy(whole)
    never["entries"] = [each for each in whole["entries"] if each["process_group"][0] == "0"]
    waiting["entries"] = [
        {**each, "state": "scheduled", "retired": False}
        if each["process_group"][0] == "3"
        else each
        for each in whole["entries"]
    ]
    waiting["pg_config"]["3"]["ranks"] = "[0, 1, 4, 5]"
    records = [record(rank, never if rank else waiting) for rank in range(8)]
    assert records[0]["members"] == {"nccl 3 (mesh_tp)": [[0, 1, 1], [4, 5, 1]]}
    assert said(*records) == (
        "ranks 1 and 4-5 have not entered _all_gather_base #1 of group 3 (mesh_tp), which rank 0 "
        "waits in"
    )


@pytest.mark.parametrize(
    ("ranks", "rows"),
    [([0, 1], [[0, 1, 1]]), ([7], [[7, 7, 1]]), (range(1, 4096, 8), [[1, 4089, 8]]),
     ([n * n for n in range(99)], None), ([], None)],
)  # fmt: skip
def test_group_members_are_reported_as_ranges_or_omitted(
    ranks: list[int], rows: list[list[int]] | None
) -> None:
    dump = recorded("r0-6-4-t0")
    dump["pg_config"]["0"]["ranks"] = str(list(ranks))
    assert record(0, dump).get("members") == (rows and {"nccl world": rows})


def test_gloo_and_nccl_collectives_of_one_group_are_not_compared() -> None:
    """``cpu:gloo,cuda:nccl`` is torch's default; each numbers its own."""
    gloo = {
        "collective_seq_id": 9, "profiling_name": "gloo:barrier", "input_sizes": [],
        "process_group": ["0", "default_pg"], "retired": True, "state": "scheduled",
        "is_p2p": False, "time_created_ns": 1, "timeout_ms": 1_800_000,
    }  # fmt: skip
    both = [record(rank, {"entries": [gloo]}, recorded(name)) for rank, name in enumerate(HUNG)]
    assert both[3]["last"]["world"] == 9
    assert said(*both) == "rank 3 has not entered all_reduce #5, which ranks 0-2 wait in"
    # An empty recorder has no entries at all.
    assert record(0, {"version": "2.10"}, {"pg_config": {}})["last"] == {}


def test_wait_begins_when_gpu_completes_previous_collective() -> None:
    """The CPU may queue collectives minutes before the GPU gets there."""
    dump = recorded("r0-6-4-t0")
    newest = entry(dump, 5)["time_created_ns"]
    entry(dump, 3)["time_discovered_completed_ns"] = newest + 4 * 10**9
    last = max(each["time_created_ns"] for each in dump["entries"])
    found = record(0, dump, after=5.0 - (last - newest) / 1e9)
    assert found["waits"][0][3] == 1.0
    # This query itself has found #4 complete, whenever it was.
    entry(dump, 4)["time_discovered_completed_ns"] = newest + 5 * 10**9
    assert record(0, dump, after=5.0)["waits"][0][3] == pytest.approx(1.0, abs=0.1)


def test_rank_with_advancing_collectives_is_not_named_as_missing() -> None:
    records = [record(rank, recorded(name)) for rank, name in enumerate(HUNG[:3])]
    assert said(*records, {"rank": 3, "at": "a.py:9", "moves": True, "waits": []}) == (
        "ranks 0-2 wait in all_reduce #5; the collectives of rank 3 advance meanwhile"
    )


class Server:
    """A rank's worker server, that gives recorded answers; in torch's words where it has none."""

    def __init__(self, path: Path, answers: dict[str, Any]) -> None:
        self.answers, self.asked = answers, list[str]()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with connection:
                line = connection.recv(1 << 16).partition(b" HTTP/")[0].decode()
                handler = line.removeprefix("POST /handler/")
                if handler == "end":
                    return
                self.asked.append(handler)
                answer = self.answers.get(handler)
                status, body = "200 OK", json.dumps(answer)
                if answer is None:
                    status, body = "404 Not Found", f"Handler {handler} not found:\n"
                connection.sendall(f"HTTP/1.1 {status}\r\n\r\n{body}".encode())

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._socket.getsockname())
            connection.sendall(b"POST /handler/end HTTP/1.0\r\n\r\n")
        self._thread.join()
        self._socket.close()


FULL, COUNTERS = "dump_nccl_trace_json", "dump_nccl_trace_json?includecollectives=false"
RANK = {"rank": 0, **identity(os.getpid())}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    dump = recorded("r0-6-4-t0")
    answers = {"fr_trace_json": {"version": "2.10"}, FULL: dump,
               COUNTERS: {"pg_status": dump["pg_status"]}}  # fmt: skip
    found = Server(tmp_path / "rank-0.sock", answers)
    yield found
    found.close()


def test_record_of_rank_queries_gloo_and_nccl_recorders(server: Server, tmp_path: Path) -> None:
    found = rank_state.record(RANK, tmp_path, place=False)
    assert [wait[:3] for wait in found["waits"]] == [
        ("nccl world", 5, "all_reduce"), ("nccl world", 6, "all_reduce")
    ]  # fmt: skip
    assert server.asked == ["fr_trace_json", FULL]  # not with onlyactive=true
    server.answers = {"fr_trace_json": {"entries": [
        {**entry(recorded("r0-6-4-t0"), 5), "profiling_name": "gloo:all_reduce"}
    ]}}  # fmt: skip
    found = rank_state.record(RANK, tmp_path, place=False)  # a torch without NCCL
    assert [wait[:3] for wait in found["waits"]] == [("world", 5, "all_reduce")]
    del server.answers["fr_trace_json"]
    assert rank_state.record(RANK, tmp_path, place=False)["waits"] == []


def test_nccl_entries_are_read_only_after_counters_stop_advancing(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read them torch queries CUDA events, which breaks a CUDA graph that is just captured."""
    monkeypatch.setattr(watch, "_HAS_GPUS", True)
    options = argparse.Namespace(nproc=1, hang_timeout=None, tagged=False, nodes=1)
    monkeypatch.setenv("CLUSTERKIT_RUN_DIR", str(tmp_path))
    log = NodeLog(tmp_path)
    log.ranks.append(RANK)
    now = 100.0
    monkeypatch.setattr(clock, "awake", lambda: now)
    watched = watch.Watch(options, tmp_path, log, lambda order: None)
    reports: list[list[dict[str, Any]]] = []
    monkeypatch.setattr(watched, "_report", lambda records, **_: reports.append(records))
    switches = iter(range(1000))
    monkeypatch.setattr(rank_state, "context_switches", lambda pid: b"%d" % next(switches))
    counters = server.answers[COUNTERS]["pg_status"]
    for number in range(20):  # it trains, and waits for its GPU all the time
        counters["0"]["last_completed_collective"] = str(number)
        watched._check_ranks()
        assert watched._records(place=False)[0]["moves"]
        now += 1.0
    assert FULL not in server.asked
    assert not reports
    for _ in range(4):
        watched._check_ranks()
        now += 1.0
    watched._check_ranks()
    assert FULL in server.asked
    ((found,),) = reports
    assert "moves" not in found
    assert found["waits"][0][:2] == ("nccl world", 5)
    # All that was queued is complete: it does not wait for its GPU.
    for each in counters.values():
        each["last_completed_collective"] = each["last_enqueued_collective"]
    assert "moves" not in watched._records(place=False)[0]


def test_arrivals_do_not_query_nccl_recorder(server: Server, tmp_path: Path) -> None:
    assert rank_state.arrivals(RANK, tmp_path, {}) == {"rank": 0}
    assert server.asked == ["fr_trace_json"]


@pytest.mark.parametrize(
    ("own", "added"),
    [
        ({}, {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
              "TORCH_FR_DUMP_TEMP_FILE": "/run/node-{0}/nccl_trace_rank_"}),
        # torch prefers the new name: it would hide the old one.
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
          "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": ""}, {}),
        ({"TORCH_FR_BUFFER_SIZE": "9", "TORCH_FR_DUMP_TEMP_FILE": "/t/x"},
         {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}),
    ],
)  # fmt: skip
def test_flight_recorder_settings_keep_variables_of_user(
    own: dict[str, str], added: dict[str, str]
) -> None:
    assert settings({"PATH": "/bin", **own}, "/run/node-{0}") == added


def dumped(path: Path, name: str) -> None:
    """As torch pickles it: tuples, and None where its JSON has 0."""
    dump = recorded(name)
    for each in dump["entries"]:
        each["process_group"] = tuple(each["process_group"])
        for key in ("time_discovered_started_ns", "time_discovered_completed_ns"):
            each[key] = each[key] or None
    path.write_bytes(pickle.dumps(dump, protocol=2))


class Foreign:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("foreign",)


@pytest.mark.parametrize("shared", [True, False])
def test_hang_is_named_from_dumps_of_nccl_watchdog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """Where nothing was queried before: ranks of another launcher."""
    monkeypatch.chdir(tmp_path)
    options = argparse.Namespace(nproc=2, nodes=2)
    nodes = [tmp_path / "attempts/1" / f"node-{node}" for node in range(2)]
    for node in nodes:
        node.mkdir(parents=True)
    for rank, name in enumerate(HUNG):
        if shared or rank < 2:
            dumped(nodes[rank // 2] / f"{DUMP_FILE}{rank}", name)
    files = NodeFiles(nodes[0], 1, echo=False)
    failure = {"timed_out": True}
    text = files.hang_behind(failure, None, options)
    begins = f"{HANG}rank 3 on node 1 has not entered all_reduce #5, which ranks 0-2 wait in"
    if not shared:  # nothing is known of ranks 2 and 3
        begins = f"{HANG}ranks 0-1 on node 0 wait in all_reduce #5, which does not complete"
    assert text.startswith(begins)
    assert text.endswith(f"; recorded in {nodes[0]}/nccl_trace_rank_*")
    assert files.hang_behind({"timed_out": False}, None, options) == ""
    assert files.hang_behind(None, "rank 3 failed", options) == ""

    whole = (nodes[0] / f"{DUMP_FILE}1").read_bytes()
    (nodes[0] / f"{DUMP_FILE}1").write_bytes(whole[:-100])
    (nodes[0] / f"{DUMP_FILE}7").write_bytes(pickle.dumps(Foreign(), protocol=2))
    assert set(read_dumps(nodes[0])) == {0}
    assert not Path("foreign").exists()
    (nodes[0] / f"{DUMP_FILE}1").write_bytes(whole)
    os.utime(nodes[0] / f"{DUMP_FILE}0", (1.0, 1.0))  # of an earlier failure
    assert set(read_dumps(nodes[0])) == {1}
