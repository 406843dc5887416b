"""Who is slower than the others: when ranks came to collectives in, words out."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from clusterkit.agent import host, identity, limits, rank_state
from clusterkit.agent.host import Sample, gpu_clocks
from clusterkit.agent.messages import EndHang, ExamineHosts, Note, Order, QueryArrivals, Warn
from clusterkit.agent.node_files import NodeFiles
from clusterkit.agent.node_log import NodeLog
from clusterkit.agent.recorder import arrival_times
from clusterkit.agent.standstill import WORLD
from clusterkit.agent.stragglers import Clock, Stragglers
from clusterkit.agent.watch import Watch
from clusterkit.backends.node_status import judge_running
from clusterkit.run.status import RunStatus, State
from clusterkit.ui.formatting import remark_lines
from tests import nvidia_smi

RECORDED = json.loads((Path(__file__).parents[1] / "data/arrivals.json").read_text())
"""Reports of real DDP runs with gloo (8 linear layers, several buckets, 0.07 to 0.2 s a step) on 2
CPUs at a load of 20, by `rank_state.arrivals`. ``slow``: rank 1 sleeps 0.05 s in each step;
``checkpoint``: rank 0 sleeps 0.8 s in each 40th."""


class Run:
    """Nodes that answer at once with what a test gives."""

    def __init__(self, nodes: int, nproc: int) -> None:
        self.slow, self.nodes, self.nproc = Stragglers(nproc), nodes, nproc
        self.slow.begin(range(nodes), 0.0)
        self.now = 0.0
        self.looked: list[tuple[int, ...]] = []

    def report(self, ranks: list[dict[str, Any]], ahead: float = 0.0, error: float = 0.0,
               knows: str = "") -> list[str]:  # fmt: skip
        """What people are told after the next report; all clocks but node 0's are ``ahead``."""
        while not (orders := self.slow.tick(self.now)):
            self.now += 1.0
        (query,) = orders
        assert isinstance(query, QueryArrivals)
        for node in range(self.nodes):
            mine = [each for each in ranks if each["rank"] // self.nproc == node]
            if node:
                mine = [{**each, "since": each["since"] + ahead} for each in mine]
            causes = knows if node else ""
            answer = {"records": mine, "number": query.number, "causes": causes}
            times = {"asked": self.now, "query_received": self.now + error + ahead,
                     "answered": self.now + error + ahead,
                     "received": self.now + 2 * error}  # fmt: skip
            self.slow.receive(node, {**answer, **times})
        told = self.slow.tick(self.now)
        self.looked += [each.ranks for each in told if isinstance(each, ExamineHosts)]
        notes = [each for each in told if isinstance(each, Note)]
        assert {each.subject for each in notes} <= {"slow"}
        return [each.text for each in notes]


def steps(*works: float, number: int = 1, count: int = 20) -> list[dict[str, Any]]:
    """Ranks that work so long before each collective, which all leave together."""
    pace = max(works)
    return [
        {"rank": rank, "group": WORLD, "first": number, "since": number * pace + work,
         "steps": [0] + [round(pace * 1e4)] * (count - 1)}
        for rank, work in enumerate(works)
    ]  # fmt: skip


def test_stragglers_name_slow_rank_of_recorded_run_in_third_report() -> None:
    run = Run(1, 2)
    told = [run.report(report) for report in RECORDED["slow-2"]]
    named = "rank 1 is slower than the others, which wait for it at least 34% of the time"
    assert told == [[], [], [named], []]
    assert run.looked == [(1,)]
    assert run.now == 15 + 5 + 5 + 15


@pytest.mark.parametrize("name", [name for name in RECORDED if name != "slow-2"])
def test_stragglers_report_nothing_for_healthy_recorded_runs(name: str) -> None:
    run = Run(1, len(RECORDED[name][0]))
    assert [run.report(report) for report in RECORDED[name]] == [[]] * 4
    assert run.looked == []


def test_slow_rank_note_is_withdrawn_after_two_clean_reports() -> None:
    run = Run(2, 1)
    for number in (1, 21):
        assert run.report(steps(0.1, 0.15, number=number)) == []
    told = run.report(steps(0.1, 0.15, number=41), knows="it swaps")
    assert told == ["rank 1 on node 1 is slower than the others, which wait for it at least 25% "
                    "of the time; node 1: it swaps"]  # fmt: skip
    for number in (61, 81):
        assert run.report(steps(0.1, 0.15, number=number)) == []
    assert run.report(steps(0.1, 0.1, number=101)) == []
    assert run.report(steps(0.1, 0.15, number=121)) == []
    assert run.report(steps(0.1, 0.1, number=141)) == []
    assert run.report(steps(0.1, 0.1, number=161)) == [""]


@pytest.mark.parametrize(
    ("works", "named"),
    [
        ([0.1, 0.1, 0.15, 0.15], "ranks 2-3 on node 1 are slower"),  # a whole node
        ([0.1, 0.15, 0.1, 0.1], "rank 1 on node 0 is slower"),
        ([0.1, 0.15, 0.15, 0.15], None),  # one is fast: the others are as they should be
        ([0.1, 0.1, 0.13, 0.15], None),  # times vary
        ([0.1, 0.1, 0.1, 0.11], None),
    ],
)
@pytest.mark.parametrize("ahead", [0.0, -7200.0])
def test_stragglers_name_only_clearly_slow_ranks(
    works: list[float], named: str | None, ahead: float
) -> None:
    run = Run(2, 2)
    told = [run.report(steps(*works, number=20 * k + 1), ahead) for k in range(3)]
    assert told[:2] == [[], []]
    assert told[2] == [] if named is None else told[2][0].startswith(named)


def test_stragglers_accuse_no_rank_when_clock_error_is_large() -> None:
    run = Run(2, 1)
    for k in range(5):
        assert run.report(steps(0.1, 0.15, number=20 * k + 1), error=0.03) == []


def test_clock_offset_bounds_tighten_drift_and_reset() -> None:
    clock = Clock()
    clock.update(100.0, 103.001, 103.1, 100.2)  # the question came at once
    assert (clock.least, clock.most) == pytest.approx((2.9, 3.001))
    clock.update(115.0, 118.1, 118.199, 115.2)  # the answer did
    assert (clock.least, clock.most) == pytest.approx((2.999, 3.004))
    clock.update(130.0, 143.0, 143.0, 130.1)  # it was set
    assert (clock.least, clock.most) == pytest.approx((12.9, 13.0))


def test_stragglers_skip_repeated_or_too_few_steps() -> None:
    run = Run(1, 2)
    for _ in range(5):
        assert run.report(steps(0.1, 0.15)) == []  # the same steps
    for k in range(5):
        assert run.report(steps(0.1, 0.15, number=21 + k, count=7)) == []
    assert run.looked == [(1,)]


def test_stragglers_accuse_no_rank_after_missing_answer_or_new_round() -> None:
    run = Run(2, 1)
    for k in range(5):
        assert run.report(steps(0.1, 0.15, number=20 * k + 1)[:1]) == []
        run.now += limits.PEER_SECONDS
        run.slow.tick(run.now)
    for k in range(4):
        run.slow.begin(range(2), run.now)
        assert run.report(steps(0.1, 0.15, number=20 * k + 1)) == []


def test_stragglers_query_nothing_for_single_rank() -> None:
    slow = Stragglers(1)
    slow.begin(range(1), 0.0)
    assert slow.tick(1e9) == []


def entry(number: int, seconds: float, group: str = "default_pg", p2p: bool = False) -> Any:
    return {"collective_seq_id": number, "is_p2p": p2p, "process_group": ["3", group],
            "profiling_name": "gloo:all_reduce",
            "time_created_ns": round(seconds * 1e9)}  # fmt: skip


def test_arrival_times_of_all_ranks_cover_same_collectives() -> None:
    until: dict[str, int] = {}
    dump = {"entries": [entry(k, 900 + k) for k in range(1, 101)] + [entry(9, 1000, p2p=True),
            entry(5, 1000, "mesh_tp")]}  # fmt: skip
    first = arrival_times(dump, 1001.0, until)
    assert until == {WORLD: 100}
    # Those of the last 15 s.
    assert first == {"group": WORLD, "first": 86, "since": 986.0, "steps": [0] + [10_000] * 14}
    ahead = arrival_times({"entries": [entry(k, 900 + k) for k in range(1, 111)]}, 1001.0, until)
    assert ahead["first"] + len(ahead["steps"]) - 1 == 100
    behind = arrival_times({"entries": [entry(k, 10 * k) for k in range(1, 99)]}, 1001.0, until)
    assert (behind["first"], len(behind["steps"])) == (91, 8)  # slow steps, fewer but enough
    fast = arrival_times(
        {"entries": [entry(k, 1000 + k / 1e3) for k in range(1, 101)]}, 1001.0, until
    )
    assert (fast["first"], len(fast["steps"])) == (37, 64)


def test_host_describe_names_slowdown_causes_between_samples() -> None:
    before = Sample(10.0, {1: 5.0}, {(7, "cc1plus"): 3.0, (8, "sh"): 9.0}, 1.0, 100, 3)
    assert host.describe(before, Sample(20.0, {1: 5.5}, {(8, "sh"): 9.5}, 1.2, 150, 3)) == ""
    after = Sample(
        20.0, {1: 9.0}, {(7, "cc1plus"): 11.0, (8, "sh"): 9.5, (9, "new"): 4.0}, 5.5, 1100, 4,
        ("CPU frequency: 1.2 of 3.6 GHz",),
    )  # fmt: skip
    assert host.describe(before, after).split("; ") == [
        "CPU quota: its processes were throttled 45% of the time",
        "rank 1 waited for a CPU 40% of the time",
        "process 7 (cc1plus), not part of the run, uses 0.8 CPUs",
        "process 9 (new), not part of the run, uses 0.4 CPUs",
        "swapping: 100 pages/s read from swap",
        "thermal throttling: its CPUs are too hot",
        "CPU frequency: 1.2 of 3.6 GHz",
    ]


def test_gpu_clocks_names_throttled_gpu_and_reasons() -> None:
    table = (
        "0, 1980, 1980, 0x0000000000000000\n1, 345, 1980, 0x0000000000000001\n"
        "2, 705, 1980, 0x0000000000000068\n3, [N/A], [N/A], 0x0000000000000004\n"
    )
    said = (
        "GPU 2 throttled to 705 of 1980 MHz: HW slowdown, SW thermal slowdown, HW thermal slowdown"
    )
    assert gpu_clocks(table) == [said]
    assert gpu_clocks("Failed to initialize NVML\n") == []


@pytest.mark.parametrize("driver", ["hot", "hot525"])
def test_host_sample_reads_throttle_reasons_of_old_and_new_drivers(driver, tmp_path, monkeypatch):
    nvidia_smi.put_into(tmp_path, driver)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    said = host.sample({}, str(tmp_path), gpus=True).now
    assert said[-8:] == tuple(
        f"GPU {i} throttled to 1200 of 1980 MHz: HW thermal slowdown" for i in range(8)
    )


def test_host_sample_of_this_machine_lists_other_processes(tmp_path: Path) -> None:
    found = host.sample({0: 1}, str(tmp_path), gpus=False)
    assert found.others
    assert host.describe(found, found) == "; ".join(found.now)


def test_slow_note_shows_in_status_and_log_until_cleared(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path, 1, echo=False)
    files.set_note("slow", "rank 1 is slower")
    node = judge_running(0, "h", (tmp_path / "started.json").read_bytes())
    run = RunStatus(run="r", job="j", cluster="c", backend="b", state=State.RUNNING, nodes=(node,))
    assert remark_lines(run) == ["slow: rank 1 is slower"]
    files.set_note("slow", None)
    assert judge_running(0, "h", (tmp_path / "started.json").read_bytes()).slow is None
    lines = [line.partition(" - ")[2] for line in (tmp_path / "log").read_text().splitlines()]
    assert lines == ["slow: rank 1 is slower", "no rank is slower than the others any more"]


T = TypeVar("T")


class Link:
    """The threads that watch two nodes of one rank, with messages as JSON between them."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.orders: dict[int, queue.SimpleQueue[Order]] = {}
        self.watches: dict[int, Watch] = {}
        self.logs: list[NodeLog] = []
        options = argparse.Namespace(nproc=1, hang_timeout=0.2, tagged=False, nodes=2)
        monkeypatch.setenv("CLUSTERKIT_RUN_DIR", str(tmp_path))
        for node in range(2):
            monkeypatch.setenv("NODE_RANK", str(node))
            folder = tmp_path / str(node)
            folder.mkdir()
            log = NodeLog(folder)
            log.ranks.append({"rank": node, **identity(os.getpid())})
            self.logs.append(log)
            orders = self.orders[node] = queue.SimpleQueue()
            self.watches[node] = Watch(options, folder, log, orders.put)
            self.watches[node].send = partial(self.send, node)

    def send(self, sender: int, message: dict[str, Any]) -> None:
        line = json.dumps({**message, "sent": time.time()})
        if len(line) <= limits.LINE_BYTES:  # `Line` closes the connection at a longer one
            self.watches[1 - sender].receive(sender, json.loads(line))

    def begin(self) -> None:
        for node, watch in self.watches.items():
            watch.begin(node, 2)

    def order(self, node: int) -> Order:
        return self.orders[node].get(timeout=60)

    def order_of(self, kind: type[T], node: int) -> T:
        while not isinstance(order := self.order(node), kind):
            pass
        return order

    def close(self) -> None:
        """Leave the threads, which never end, without ranks."""
        for log in self.logs:
            log.ranks.clear()


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    found = Link(tmp_path, monkeypatch)
    yield found
    found.close()


def test_node_0_reports_slow_rank_from_answers_of_other_nodes(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ARRIVALS_SECONDS", 0.1)
    monkeypatch.setattr(limits, "LATE_SECONDS", 0.01)
    number = itertools.count(1, 20)
    monkeypatch.setattr(host, "describe", lambda before, after: "it swaps")

    def arrivals(rank: dict[str, Any], folder: Path, until: dict[str, int]) -> dict[str, Any]:
        first = until.setdefault(WORLD, next(number))
        return {**steps(0.1, 0.15, number=first)[rank["rank"]], "rank": rank["rank"]}

    monkeypatch.setattr(rank_state, "arrivals", arrivals)
    link.begin()
    assert [link.order(0) for _ in range(2)] == [Note("hang"), Note("slow")]
    note = link.order(0)
    assert isinstance(note, Note)
    assert note.text.startswith("rank 1 on node 1 is slower than the others")
    assert note.text.endswith("; node 1: it swaps")


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_hang_is_ended_even_after_error_in_watch_thread(
    link: Link, monkeypatch: pytest.MonkeyPatch, failing: int | None
) -> None:
    """Also after an error in the thread of one of them, which that node's run shows."""
    monkeypatch.setattr(limits, "WORKER_PAUSE", 0.0)
    errors = [] if failing is None else [TypeError("_handle")]
    for name in ("STILL_SECONDS", "STILL_LOOK_SECONDS", "STILL_AGAIN_SECONDS"):
        monkeypatch.setattr(limits, name, 0.05)
    monkeypatch.setattr(rank_state, "context_switches", lambda pid: b"")
    began = time.monotonic()

    def record(rank: dict[str, Any], folder: Path, **_: bool) -> dict[str, Any]:
        if errors and rank["rank"] == failing:
            raise errors.pop()
        if rank["rank"]:
            return {"rank": 1, "at": "train.py:44 in load()", "last": {WORLD: 56}, "waits": []}
        wait = (WORLD, 57, "all_reduce", time.monotonic() - began, 0.001, 1800.0)
        return {"rank": 0, "at": "train.py:51", "last": {WORLD: 57}, "waits": [wait]}

    monkeypatch.setattr(rank_state, "record", record)
    link.begin()
    if failing is not None:
        failure = link.order_of(Warn, failing)
        assert failure.text.startswith("TypeError: _handle (test_stragglers.py:")
    end = link.order_of(EndHang, 1)  # the rank that does not come is on node 1
    assert "rank 1 on node 1 has not entered all_reduce #57" in end.reason
    assert [link.order_of(Note, 0).subject for _ in range(2)] == ["hang", "slow"]


def test_overlong_hang_reason_is_shortened_for_other_node(link: Link) -> None:
    link.begin()
    assert [link.order(1) for _ in range(2)] == [Note("hang"), Note("slow")]
    reason = "no progress for 120 s: " + "; rank 7 on node 1 is at père.py:44 in load()" * 1000
    link.watches[0]._carry_out(EndHang(1, reason))
    end = link.order(1)
    assert isinstance(end, EndHang)
    assert len(end.reason) > 4000
    assert reason.startswith(end.reason.removesuffix(" ..."))


def test_longest_rank_records_fit_in_message_lines(link: Link) -> None:
    """A rank's record with the longest names, of as many groups as there may be."""
    groups = {f"{place:é>40}": 10**7 for place in range(11)}
    waits = [
        (group, 10**7, "é" * 40, 12345.6, 1.234567890123456, 12345.6) for group in [*groups][:2]
    ]
    longest = {
        "rank": 10**5, "at": "é" * 80 + ":12345 in " + "é" * 60, "busy": False, "doing": 2**32,
        "last": groups, "waits": waits,
    }  # fmt: skip
    lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    link.watches[1].send = lines.put
    link.watches[1]._report([longest] * 7, number=10**6)
    sent = [lines.get(timeout=60) for _ in range(2)]
    assert all(len(json.dumps(line)) <= limits.LINE_BYTES for line in sent)
