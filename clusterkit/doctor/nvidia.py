"""What nvidia-smi and the kernel say of the GPUs of a host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from clusterkit.doctor.base import HostSubject, shortened, skip
from clusterkit.doctor.check import Answers, Script
from clusterkit.doctor.driver import text_of, user_of

_GPU_COLUMNS = ("index", "uuid", "name", "memory.total", "memory.used", "driver_version")
_PROCESS_COLUMNS = ("pid", "process_name", "gpu_uuid")


class Command(Struct):
    """How one command ended."""

    exit_code: int
    stdout: str
    stderr: str


class Owner(Struct):
    """Whose process it is; and which run of clusterkit's, if that can be seen."""

    user: str | None = None
    run: str | None = None


class Nvidia(Struct):
    """What nvidia-smi and the kernel say of the GPUs."""

    devices: int
    """Entries /dev/nvidia0, /dev/nvidia1, ..."""
    query: Command | None
    """None: there is no nvidia-smi."""
    apps: Command | None = None
    me: str = ""
    """The user who asked."""
    owners: dict[str, Owner] = {}
    xids: list[str] = []

    @property
    def gpus(self) -> list[dict[str, str]]:
        """A dict per GPU that nvidia-smi lists, by its own names of the columns."""
        return _parsed(self.query, _GPU_COLUMNS)[0]

    @property
    def processes(self) -> list[dict[str, str]]:
        """A dict per process that computes on a GPU."""
        return _parsed(self.apps, _PROCESS_COLUMNS)[0]

    @property
    def complaint(self) -> str | None:
        """What nvidia-smi says instead of listing all GPUs, or beside it."""
        if self.query is None:
            return None
        _, complaints = _parsed(self.query, _GPU_COLUMNS)
        if complaints:
            return shortened(" ".join(complaints))
        return f"nvidia-smi exited with {self.query.exit_code}" if self.query.exit_code else None


def _parsed(
    command: Command | None, columns: Sequence[str]
) -> tuple[list[dict[str, str]], list[str]]:
    """Rows of CSV under a header that begins with these columns, and all lines that are none."""
    rows: list[dict[str, str]] = []
    foreign: list[str] = []
    header: list[str] = []
    if command is None:
        return rows, foreign
    for line in command.stdout.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        titles = [cell.partition(" [")[0] for cell in cells]
        if not header and titles[: len(columns)] == list(columns):
            header = titles
        elif header and cells[0].isdecimal() and len(cells) >= len(header):
            # Only the name of a process, in the second column, may hold commas.
            more = len(cells) - len(header)
            cells[1 : more + 2] = [",".join(cells[1 : more + 2])]
            rows.append(dict(zip(header, cells, strict=True)))
        elif line.strip():
            foreign.append(line)
    return rows, foreign + [line for line in command.stderr.splitlines() if line.strip()]


def collect(given: dict[str, Any]) -> Any:
    import glob
    import os
    import shutil

    devices = len(glob.glob("/dev/nvidia[0-9]*"))
    if shutil.which("nvidia-smi") is None:
        return {"devices": devices, "query": None}

    import subprocess

    def run(*argv: str) -> Any:
        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=20,
                env={**os.environ, "LC_ALL": "C"},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"exit_code": -1, "stdout": "", "stderr": "nvidia-smi did not end within 20 s"}
        except OSError:
            return None
        texts = [text.decode("utf-8", "replace") for text in (done.stdout, done.stderr)]
        return {"exit_code": done.returncode, "stdout": texts[0], "stderr": texts[1]}

    def query(kind: str, *fields: str) -> Any:
        found = run("nvidia-smi", f"--query-{kind}={','.join(fields)}", "--format=csv,nounits")
        if found is not None:
            found.update(stdout=found["stdout"][:65536], stderr=found["stderr"][:4096])
        return found

    always = ["index", "uuid", "name", "memory.total", "memory.used", "driver_version"]
    health = [
        "ecc.errors.uncorrected.volatile.total", "retired_pages.pending", "mig.mode.current",
        "compute_mode",
    ]  # fmt: skip
    found = None
    # Drivers before 535 have the second name of the reasons; one unknown name spoils the query.
    for more in (["clocks_event_reasons.active"], ["clocks_throttle_reasons.active"], None):
        found = query("gpu", *always, *([] if more is None else health + more))
        if found is None or "not a valid field" not in found["stdout"] + found["stderr"]:
            break
    apps = None
    owners: dict[str, Any] = {}
    if found is not None and found["exit_code"] == 0:
        apps = query("compute-apps", "pid", "process_name", "gpu_uuid", "used_memory")
        for line in (apps or {"stdout": ""})["stdout"].splitlines():
            pid = line.split(",")[0].strip()
            if not pid.isdigit():
                continue
            owners[pid] = {}
            try:
                owners[pid]["user"] = user_of(os.stat(f"/proc/{pid}").st_uid)
            except OSError:
                continue  # gone, or of another process namespace
            for entry in text_of(f"/proc/{pid}/environ").split("\0"):
                if entry.startswith("CLUSTERKIT_RUN_ID="):
                    owners[pid]["run"] = entry.partition("=")[2]
    xids = []
    if devices:
        lines = (run("dmesg") or {"stdout": ""})["stdout"].splitlines()
        xids = [line[-300:] for line in lines if "NVRM: Xid" in line][-20:]
    return {
        "devices": devices, "query": found, "apps": apps, "owners": owners, "xids": xids,
        "me": user_of(os.geteuid()),
    }  # fmt: skip


NVIDIA = Script("nvidia", collect, Nvidia, limit=45)


def gpus_of(answers: Answers) -> dict[str, Nvidia]:
    """What `NVIDIA` collected. With no trace of a GPU anywhere, every host is skipped."""
    seen = answers.read(NVIDIA)
    if answers.subject.needs.device == "cuda" or any(
        nvidia.devices or nvidia.query for nvidia in seen.values()
    ):
        return seen
    answers.unread += [skip(host, "no GPU on any host") for host in seen]
    return {}


def no_gpus_wanted(subject: HostSubject) -> str | None:
    return "the job runs on CPU threads" if subject.needs.device == "cpu" else None
