"""What a node's ranks use of CPUs, memory and GPUs: ``usage.json``, for `clusterkit top`."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

from clusterkit.agent import limits
from clusterkit.agent.files import write_json
from clusterkit.agent.host import nvidia_smi
from clusterkit.agent.node_log import NodeLog
from clusterkit.agent.processes import load
from clusterkit.agent.protocol import Document

_COLUMNS = ("index", "uuid", "utilization.gpu", "memory.used")  # percent, MiB
_NVIDIA_SMI_SECONDS = 10.0


class Usage(threading.Thread):
    """Writes it every USAGE_SECONDS, in larger runs more rarely.

    A thread of its own, since a GPU that is ill keeps nvidia-smi waiting.

    Args:
        log: the node's, which knows the folder of the attempt that runs now.
        ranks: gives the newest line of ``ranks.jsonl`` of each rank.
        nodes: how many the run has.
    """

    def __init__(self, log: NodeLog, ranks: Callable[[], list[Document]], nodes: int) -> None:
        super().__init__(daemon=True)
        self._log, self._ranks = log, ranks
        self._pause = max(limits.USAGE_SECONDS, nodes / limits.USAGE_NODES)
        self._before: dict[int, tuple[float, float]] = {}

    def run(self) -> None:
        while True:
            found = self.look()
            with contextlib.suppress(OSError):  # a full disk
                if found:
                    write_json(self._log.folder / "usage.json", found)
            time.sleep(self._pause if found else 1.0)

    def look(self) -> Document:
        """By rank: CPUs that were kept busy since the look before (None: there was none), bytes of
        memory, and of its GPU, where it has one, the percentage of the time and bytes."""
        ranks = sorted(self._ranks(), key=lambda each: int(each["rank"]))
        has_gpus = ranks and os.path.exists("/dev/nvidiactl")
        gpus = own_gpus(nvidia_smi(_COLUMNS, _NVIDIA_SMI_SECONDS)) if has_gpus else []
        before, self._before = self._before, {}
        found: Document = {}
        for place, each in enumerate(ranks):
            if (seen := load(each)) is None:
                continue
            now, (seconds, memory) = time.monotonic(), seen
            last = before.get(each["pid"])
            self._before[each["pid"]] = now, seconds
            cpus = None if last is None else round((seconds - last[1]) / (now - last[0]), 2)
            found[str(each["rank"])] = [cpus, memory, *(gpus[place] if place < len(gpus) else ())]
        return found


def own_gpus(table: str) -> list[tuple[int, ...]]:
    """Of what nvidia-smi lists, use and bytes of this node's GPUs, in the order of its ranks."""
    every: dict[str, tuple[int, ...]] = {}
    for line in table.splitlines():
        index, *cells = (cell.strip() for cell in line.split(","))
        if len(cells) < 3:  # nvidia-smi says here, too, that it cannot reach the driver or a GPU
            continue
        uuid, *cells = cells
        every[index] = every[uuid] = ()
        with contextlib.suppress(ValueError):  # [N/A], as of one that is divided by MIG
            use, memory = map(int, cells)
            every[index] = every[uuid] = use, memory << 20
    share = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name for name in every if name.isdigit()] if share is None else share.split(",")
    return [every.get(name, ()) for name in names]
