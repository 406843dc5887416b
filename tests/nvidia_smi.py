"""An nvidia-smi that answers as a recorded host: python tests/nvidia_smi.py HOST OPTION ...

What `tests/data/gpu` has of the host is given as it is; of other columns, what a sound H100 has.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

ANSWERS = Path(__file__).parent / "data" / "gpu"
RECORDED = ("index", "uuid", "name", "memory.total", "mig.mode.current")
UNITS = {"memory.total": "MiB", "memory.used": "MiB", "clocks.sm": "MHz", "clocks.max.sm": "MHz"}
TITLES = {"clocks.sm": "clocks.current.sm"}
SOUND = {
    "memory.used": "1", "driver_version": "580.95.05", "utilization.gpu": "0",
    "ecc.errors.uncorrected.volatile.total": "0", "retired_pages.pending": "[N/A]",
    "compute_mode": "Default", "clocks_event_reasons.active": "0x0000000000000001",
    "fabric.state": "Completed", "fabric.status": "Success", "clocks.sm": "1980",
    "clocks.max.sm": "1980",
}  # fmt: skip
HOT = {"clocks_event_reasons.active": "0x0000000000000040", "clocks.sm": "1200"}
OF_ALL = {
    "gb10": {"memory.used": "[N/A]", "ecc.errors.uncorrected.volatile.total": "[N/A]",
             "fabric.state": "[N/A]", "fabric.status": "[N/A]"},
    "old535": {"driver_version": "535.183.01"},
    "old570": {"driver_version": "570.172.08"},
    "hot": HOT,
    "hot525": HOT | {"driver_version": "525.147.05"},
}  # fmt: skip
"""What all GPUs of a host have otherwise."""
ALIKE = {"hot": "h100x8", "hot525": "h100x8"}
UNKNOWN = {
    "old535": ("fabric.state", "fabric.status"),
    "hot": ("clocks_throttle_reasons.active",),
    "hot525": ("fabric.state", "fabric.status", "clocks_event_reasons.active"),
}
RENAMED = {"clocks_throttle_reasons.active": "clocks_event_reasons.active"}


def put_into(folder: Path, host: str) -> None:
    """Make this host's nvidia-smi in a folder of PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    words = shlex.join([sys.executable, "-S", __file__, host])
    (folder / "nvidia-smi").write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    (folder / "nvidia-smi").chmod(0o755)


def main(host: str, options: list[str]) -> int:
    query, form = options[0].removeprefix("--query-"), options[1].removeprefix("--format=")
    kind, _, names = query.partition("=")
    columns = names.split(",")
    for name in columns:
        if name in UNKNOWN.get(host, ()):
            print(f'Field "{name}" is not a valid field to query.\n')
            return 2
    text = (ANSWERS / f"{ALIKE.get(host, host)}.txt").read_bytes().decode()
    end = "\r\n" if "\r\n" in text else "\n"
    *lines, last = text.splitlines()
    rows = [line.split(", ") for line in lines if line.partition(",")[0].isdigit()]
    said = [line for line in lines if not line.partition(",")[0].isdigit()]
    if rows and "noheader" not in form:
        print(*(title(name, "nounits" in form) for name in columns), sep=", ", end=end)
    for row in rows if kind == "gpu" else ():
        recorded = dict(zip(RECORDED, row, strict=True))
        error = recorded["memory.total"] if recorded["memory.total"].endswith("lost]") else None
        values = SOUND | OF_ALL.get(host, {}) | recorded
        cells = [values.get(RENAMED.get(name, name), "[N/A]") for name in columns]
        cells = [
            error if error and name not in (*RECORDED, "driver_version") else cell
            for name, cell in zip(columns, cells, strict=True)
        ]
        print(*cells, sep=", ", end=end)
    print(*said, sep=end, end=end if said else "")
    return int(last.removeprefix("exit "))


def title(name: str, bare: bool) -> str:
    # With "nounits" the header has the units all the same.
    return TITLES.get(name, name) + (f" [{UNITS[name]}]" if name in UNITS else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
