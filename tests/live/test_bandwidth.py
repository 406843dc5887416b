"""`clusterkit bench` for real, on simulated nodes of this machine."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clusterkit import agent, api
from clusterkit.bench import bandwidth
from clusterkit.run.status import State

SOON = 120.0
"""Seconds after which a test says that something hangs."""

pytestmark = pytest.mark.live

Bench = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def bench(clusterkit: list[str], tmp_path: Path) -> Iterator[Bench]:
    """``bench("-n", 2)``: the verb in a process of its own; nothing of it is left afterwards."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*clusterkit, "bench", *map(str, arguments)],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={name: text for name, text in os.environ.items() if name != "CLUSTERKIT_RUN_ID"},
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
    for status in api.runs():
        run = api.get(status.run)
        run.cancel()
        assert agent.processes_of(str(run.path)) == []


def measuring(process: subprocess.Popen[str]) -> api.Run:
    """The run, once it has begun to measure."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("1/"):
            return api.get("last")
    pytest.fail("it ended before it measured")


def test_bench_measures_every_collective_on_two_nodes(bench: Bench, tmp_path: Path) -> None:
    process = bench("-n", 2, "--sizes", "4,64K", "--json", "-o", tmp_path / "bus.svg")
    out, err = process.communicate(timeout=SOON)
    assert process.returncode == 0, err
    report = json.loads(out)
    assert report["world_size"] == 2
    assert report["wrong"] == 0
    measured = {(row["collective"], row["size"]) for row in report["rows"]}
    smallest = {"all_gather": 8, "reduce_scatter": 8}
    assert measured == {
        (name, size)
        for name in bandwidth.FACTORS
        for size in (smallest.get(name, 4), 65536)
    }  # fmt: skip
    for row in report["rows"]:
        algorithm = row["size"] / row["median_us"] / 1e3
        assert row["algorithm_gb_per_s"] == pytest.approx(algorithm)
        factor = bandwidth.FACTORS[row["collective"]](2)
        assert row["bus_gb_per_s"] == pytest.approx(algorithm * factor)
    assert set(report["latency_us"]) == set(bandwidth.FACTORS)
    assert "10/10 sendrecv of 64 KiB" in err
    assert (tmp_path / "bus.svg").exists()
    assert api.get(report["run"]).status().state is State.SUCCEEDED


def test_bench_pairwise_measures_every_pair_of_three_nodes(bench: Bench) -> None:
    process = bench("-n", 3, "--pairwise", "--sizes", "1K,64K", "--json")
    out, err = process.communicate(timeout=SOON)
    assert process.returncode == 0, err
    pairs = json.loads(out)["pairs"]
    assert len(set(pairs["hosts"])) == 3
    for matrix in (pairs["gb_per_s"], pairs["latency_us"]):
        for sender, receiver in itertools.product(range(3), repeat=2):
            assert (matrix[sender][receiver] is None) == (sender == receiver)
            assert sender == receiver or matrix[sender][receiver] > 0
    assert pairs["judgement"].endswith(".")


def test_bench_names_rank_that_was_killed(bench: Bench) -> None:
    process = bench("-n", 2, "--iterations", 100000)
    run = measuring(process)
    ranks = [
        json.loads(line)
        for path in run.path.glob("attempts/1/node-1/ranks.jsonl")
        for line in path.read_text().splitlines()
    ]
    os.kill(ranks[0]["pid"], signal.SIGKILL)
    out, err = process.communicate(timeout=SOON)
    assert process.returncode == 128 + signal.SIGKILL
    assert out == ""
    assert f"error: run {run.id} is FAILED: rank 1 on node 1 failed first: SIGKILL: the rank" in err


def test_bench_ends_run_and_processes_on_ctrl_c(bench: Bench) -> None:
    process = bench("-n", 2, "--iterations", 100000)
    run = measuring(process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=SOON)
    assert process.returncode == 130
    assert run.status().state is State.CANCELLED
    assert agent.processes_of(str(run.path)) == []


def test_bench_explains_lack_of_memory_on_ranks(bench: Bench) -> None:
    """A size that fits into the machine's memory, but not into what is free of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    process = bench("-n", 2, "--sizes", total // 2 - (64 << 20), "--collectives", "broadcast")
    out, err = process.communicate(timeout=SOON)
    assert process.returncode == 1
    assert out == ""
    assert "failed first: exit code 1: error: not enough memory on " in err
    assert "Traceback" not in err
