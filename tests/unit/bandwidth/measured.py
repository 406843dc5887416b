"""Measurements, made up, and reports of them."""

from __future__ import annotations

from typing import Any

SETUP: dict[str, Any] = {
    "event": "bench_setup", "world_size": 4, "backend": "gloo", "device": "cpu",
    "dtype": "float32", "torch": "2.13.0", "measurements": 2,
    "nodes": [{"node": 0, "host": "a", "ranks": [0, 1]}, {"node": 1, "host": "b", "ranks": [2, 3]}],
}  # fmt: skip


def row(collective: str = "all_reduce", size: int = 4096, **fields: Any) -> dict[str, Any]:
    return {
        "event": "bench_row", "collective": collective, "size": size, "elements": size // 4,
        "iterations": 20, "median_us": 100.0, "min_us": 90.0, "max_us": 200.0, "wrong": 0,
    } | fields  # fmt: skip


def exchange(source: int, target: int, **fields: Any) -> dict[str, Any]:
    return {
        "event": "bench_pair", "from": source, "to": target, "size": 1 << 20, "latency_size": 1024,
        "iterations": 20, "median_us": 1050.0, "min_us": 1000.0, "max_us": 1100.0,
        "latency_us": 50.0, "wrong": 0,
    } | fields  # fmt: skip
