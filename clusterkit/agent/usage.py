"""The CPUs, memory and GPUs that a node's ranks use: ``usage.json``, for ``clusterkit top``."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

from clusterkit.agent import clock, limits
from clusterkit.agent.files import write_json
from clusterkit.agent.host import has_gpus, nvidia_smi
from clusterkit.agent.node_log import NodeLog
from clusterkit.agent.processes import load
from clusterkit.agent.protocol import Document
from clusterkit.agent.visible import visible_gpus
from clusterkit.agent.worker import Worker

_COLUMNS = ("index", "uuid", "utilization.gpu", "memory.used")  # percent, MiB
_NVIDIA_SMI_SECONDS = 10.0


class Usage:
    """Writes ``usage.json`` every USAGE_SECONDS, in larger runs less often.

    A thread of its own, because nvidia-smi may block on a broken GPU.

    Args:
        log: the node's, which has the folder of the current attempt.
        ranks: returns the newest line of ``ranks.jsonl`` of each rank.
        nodes: how many the run has.
        on_failure: as of `Worker`.
    """

    def __init__(
        self,
        log: NodeLog,
        ranks: Callable[[], list[Document]],
        nodes: int,
        on_failure: Callable[[str], object],
    ) -> None:
        self._worker = Worker(self._run, "measuring CPU, memory and GPU usage", on_failure)
        self.start = self._worker.start
        self._log, self._ranks = log, ranks
        self._pause = max(limits.USAGE_SECONDS, nodes / limits.USAGE_NODES)
        self._before: dict[int, tuple[float, float]] = {}
        """By process, when it was measured last, and its CPU seconds by then."""
        self.busy_at: dict[int, float] = {}
        """By process, when it was last seen to compute, by `clock.awake`."""

    def _run(self) -> None:
        while True:
            found = self.measure()
            with contextlib.suppress(OSError):  # a full disk
                if found:
                    # The agent may end at any time: what waits for a disk leaves its draft behind.
                    write_json(self._log.folder / "usage.json", found, durable=False)
            time.sleep(self._pause if found else 1.0)

    def measure(self) -> Document:
        """Return a list for each rank: CPUs in use since the last call (None: it is the first),
        bytes of memory; if the rank has a GPU, also its utilization in percent and bytes in use."""
        ranks = sorted(self._ranks(), key=lambda each: int(each["rank"]))
        look = ranks and has_gpus()
        gpus = own_gpus(nvidia_smi(_COLUMNS, _NVIDIA_SMI_SECONDS)) if look else []
        before, self._before = self._before, {}
        found: Document = {}
        for place, each in enumerate(ranks):
            if (measured := load(each)) is None:
                continue
            now, (seconds, memory) = time.monotonic(), measured
            last = before.get(each["pid"])
            self._before[each["pid"]] = now, seconds
            cpus = None if last is None else round((seconds - last[1]) / (now - last[0]), 2)
            if cpus is None or cpus >= limits.BUSY_CPUS:
                self.busy_at[each["pid"]] = clock.awake()
            found[str(each["rank"])] = [cpus, memory, *(gpus[place] if place < len(gpus) else ())]
        return found


def own_gpus(table: str) -> list[tuple[int, ...]]:
    """Return utilization and bytes of this node's GPUs in nvidia-smi's table, in rank order."""
    every: dict[str, tuple[int, ...]] = {}
    listed: dict[str, str] = {}
    for line in table.splitlines():
        index, *cells = (cell.strip() for cell in line.split(","))
        if len(cells) < 3:  # an error: nvidia-smi cannot reach the driver or a GPU
            continue
        uuid, *cells = cells
        listed[index] = listed[uuid] = index
        every[index] = ()
        with contextlib.suppress(ValueError):  # [N/A], for example of a GPU that MIG divides
            use, memory = map(int, cells)
            every[index] = use, memory << 20
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [
        every.get(name, ())
        for name in (every if visible is None else visible_gpus(listed, visible))
    ]
