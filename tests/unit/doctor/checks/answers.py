"""What collectors answer, and the findings of it."""

from clusterkit import errors
from tests.unit.doctor.conftest import make_answer


def silent(message, hint=None):
    error = errors.Unavailable(message, hint)
    return make_answer(error=error, began=None, ended=None, interpreter="", received=1010.0)


COLUMNS = (
    "index, uuid, name, memory.total [MiB], memory.used [MiB], driver_version, "
    "ecc.errors.uncorrected.volatile.total, retired_pages.pending, mig.mode.current, "
    "compute_mode, clocks_event_reasons.active"
)
H100 = "NVIDIA H100 80GB HBM3"


def gpu(index, *, name=H100, total="81559", used="4", driver="550.54.15", ecc="0",
        retired="[N/A]", mig="Disabled", mode="Default", reasons="0x0000000000000001"):  # fmt: skip
    uuid = f"GPU-{index:08d}-aaaa-bbbb-cccc-0123456789ab"
    cells = (index, uuid, name, total, used, driver, ecc, retired, mig, mode, reasons)
    return ", ".join(map(str, cells))


def smi(*rows, columns=COLUMNS, exit_code=0, stderr="", complaint=""):
    lines = [*([columns] if columns else []), *rows, *([complaint] if complaint else [])]
    return {"exit_code": exit_code, "stdout": "\n".join(lines) + "\n", "stderr": stderr}


def nvidia(
    *rows,
    apps=None,
    owners=None,
    xids=(),
    devices=None,
    pci=(),
    user="root",
    remapped=None,
    log=True,
    **changed,
):
    return {
        "devices": len(rows) if devices is None else devices,
        "query": smi(*rows, **changed),
        "apps": apps, "owners": owners or {}, "xids": list(xids), "user": user,
        "remapped": remapped, "log": log, "pci": list(pci),
    }  # fmt: skip


NO_GPU = {"devices": 0, "query": None}
EIGHT = [gpu(i) for i in range(8)]
