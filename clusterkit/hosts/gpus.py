"""The GPUs that a host's ranks may use: nvidia-smi's list, read as CUDA_VISIBLE_DEVICES is by CUDA.

What cannot be understood is named, so that nobody trains on a CPU, or on seven GPUs of eight,
without having been told.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from clusterkit.agent.visible import visible_gpus
from clusterkit.cluster import Gpu

GPU_QUERY = (
    "nvidia-smi",
    "--query-gpu=index,uuid,name,memory.total,mig.mode.current",
    "--format=csv,noheader,nounits",
)
CORRUPT_INFOROM = 14
"""Its exit code where all GPUs work: the memory with a card's own data is damaged."""
_HIDDEN = re.compile(r"\s*(-1|none|void|NoDevFiles)?\s*", re.IGNORECASE)
"""Values of CUDA_VISIBLE_DEVICES that say: no GPU."""


class Found(NamedTuple):
    """GPUs, and what is wrong with others or with all of them."""

    gpus: tuple[Gpu, ...]
    trouble: str = ""
    """Why a GPU of this host cannot be used, which somebody may count on."""
    remark: str = ""
    """What nvidia-smi says of GPUs that can be used."""


def read_gpus(csv: str, complaint: str = "", visible: str | None = None) -> Found:
    """Return the GPUs in the output of `GPU_QUERY`.

    Args:
        csv: the output; lines that are none of its rows are ignored.
        complaint: as of `clusterkit.hosts.host_probe.gpus`.
        visible: CUDA_VISIBLE_DEVICES: which GPUs and in which order, by index or UUID.
    """
    listed: dict[str, Gpu] = {}
    trouble = []
    for line in csv.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) not in (4, 5) or not fields[0].isdigit():
            continue
        index, uuid, name, memory, *mig = fields
        bad = next((each for each in (uuid, name, memory) if is_error(each)), None)
        if bad is not None:
            trouble.append(f"GPU {index}: {bad}")
        elif mig == ["Enabled"]:
            trouble.append(f"GPU {index} is divided by MIG: CUDA_VISIBLE_DEVICES=MIG-UUID, as "
                           "`nvidia-smi -L` shows it, names a slice")  # fmt: skip
        else:
            # GB10 and other chips share the host's memory, and report none of their own.
            listed[index] = Gpu(index, name, int(memory) if memory.isdigit() else 0)
            listed[uuid] = listed[index]
    harmless = (
        bool(listed) and complaint.split(":")[0] == f"nvidia-smi exited with {CORRUPT_INFOROM}"
    )
    if complaint and not harmless:
        trouble.insert(0, complaint)
    remark = complaint if harmless else ""
    if visible is None:
        return Found(tuple(dict.fromkeys(listed.values())), "; ".join(trouble), remark)
    if _HIDDEN.fullmatch(visible):
        return Found(())
    seen = visible_gpus({name: gpu.index for name, gpu in listed.items()}, visible)
    gpus = tuple(listed.get(name) or Gpu(name, "MIG slice", 0) for name in seen)
    if not gpus:
        trouble.append(f"CUDA_VISIBLE_DEVICES={visible} names no GPU of this host as CUDA reads it")
    return Found(gpus, "" if gpus else "; ".join(trouble), remark)


def is_error(field: str) -> bool:
    """Return whether nvidia-smi gives an error instead of a value, as ``[GPU is lost]``."""
    known = ("[N/A]", "[Not Supported]", "[Insufficient Permissions]")
    return field == "ERR!" or (field.startswith("[") and field not in known)


def names(gpus: Iterable[str]) -> str:
    """Return how many GPUs there are of each name: ``8 x NVIDIA H100 80GB HBM3``."""
    return ", ".join(f"{count} x {name}" for name, count in Counter(gpus).items())
