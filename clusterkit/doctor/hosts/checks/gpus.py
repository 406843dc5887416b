"""GPUs, by nvidia-smi and the kernel's log: driver, health, processes that use them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from clusterkit.doctor.base import Level, Verdict, fail, ok, shortened, skip, warn
from clusterkit.doctor.hosts.base import Answers, Collector, HostSubject, check
from clusterkit.doctor.hosts.checks.packages import PACKAGES, Packages, with_cuda
from clusterkit.doctor.hosts.collect import gpus as collect
from clusterkit.doctor.hosts.helpers import (
    Process,
    end_processes,
    install_packages,
    most_common,
)
from clusterkit.errors import join_some, pluralize
from clusterkit.hosts.gpus import CORRUPT_INFOROM, is_error, names

_GPU_COLUMNS = ("index", "uuid", "name", "memory.total", "memory.used", "driver_version")
_PROCESS_COLUMNS = ("pid", "process_name", "gpu_uuid")
_REMAPPED_COLUMNS = ("gpu_uuid", "remapped_rows.pending", "remapped_rows.failure")


class Command(Struct):
    """The result of a command."""

    exit_code: int
    stdout: str
    stderr: str


class Owner(Struct):
    """User of a process and, if it can be read, its run of clusterkit."""

    user: str | None = None
    run: str | None = None


class Nvidia(Struct):
    """Output of nvidia-smi, and of the kernel, about the GPUs."""

    devices: int
    """Number of entries /dev/nvidia0, /dev/nvidia1, ..."""
    query: Command | None
    """None: there is no nvidia-smi."""
    apps: Command | None = None
    user: str = ""
    """The user who ran nvidia-smi."""
    owners: dict[str, Owner] = {}
    """By process id."""
    remapped: Command | None = None
    xids: list[str] = []
    """Lines of the kernel's log with an Xid error, the last 20."""
    log: bool = True
    """Whether this user may read the kernel's log."""
    pci: list[str] = []
    """Addresses of NVIDIA's GPUs on the PCI bus, without those that another driver has."""

    @property
    def gpus(self) -> list[dict[str, str]]:
        """One dict per GPU that nvidia-smi lists, by its names of the columns."""
        rows = {row["gpu_uuid"]: row for row in _parsed(self.remapped, _REMAPPED_COLUMNS)[0]}
        return [gpu | rows.get(gpu["uuid"], {}) for gpu in _parsed(self.query, _GPU_COLUMNS)[0]]

    @property
    def processes(self) -> list[dict[str, str]]:
        """One dict per process that computes on a GPU."""
        return _parsed(self.apps, _PROCESS_COLUMNS)[0]

    @property
    def complaint(self) -> str | None:
        """Error output of nvidia-smi; None: it listed all GPUs."""
        if self.query is None:
            return None
        _, complaints = _parsed(self.query, _GPU_COLUMNS)
        if complaints:
            return shortened(" ".join(complaints))
        return f"nvidia-smi exited with {self.query.exit_code}" if self.query.exit_code else None

    @property
    def missing(self) -> str:
        """Where GPUs show that nvidia-smi does not list; empty: it lists all."""
        shown = len(self.gpus)
        places = (("/dev", self.devices), ("PCI", len(self.pci)))
        seen = [f"{place} has {count}" for place, count in places if count > shown]
        return f"{', '.join(seen)}, nvidia-smi lists {shown}" if seen else ""


def _parsed(
    command: Command | None, columns: Sequence[str]
) -> tuple[list[dict[str, str]], list[str]]:
    """Return the rows of CSV under a header that begins with these columns, and all other lines."""
    rows: list[dict[str, str]] = []
    others: list[str] = []
    header: list[str] = []
    if command is None:
        return rows, others
    for line in command.stdout.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        titles = [cell.partition(" [")[0] for cell in cells]
        if not header and titles[: len(columns)] == list(columns):
            header = titles
        elif header and re.match(r"[0-9]+\Z|GPU-", cells[0]) and len(cells) >= len(header):
            # Only the name of a process, in the second column, can contain commas.
            more = len(cells) - len(header)
            cells[1 : more + 2] = [",".join(cells[1 : more + 2])]
            rows.append(dict(zip(header, cells, strict=True)))
        elif line.strip():
            others.append(line)
    return rows, others + [line for line in command.stderr.splitlines() if line.strip()]


NVIDIA = Collector(collect.nvidia, Nvidia, timeout=45)


def _seen(answers: Answers) -> dict[str, Nvidia]:
    """Return what was collected; skip every host if none has a GPU and the job needs none."""
    seen = answers.read(NVIDIA)
    if answers.subject.needs.device == "cuda" or any(
        nvidia.devices or nvidia.query for nvidia in seen.values()
    ):
        return seen
    answers.unread += [skip(host, "no GPU on any host") for host in seen]
    return {}


def no_gpus_needed(subject: HostSubject) -> str | None:
    return "the job runs on CPU threads" if subject.needs.device == "cpu" else None


# ---------------------------------------------------------------- the driver

OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""CUDA's major version to the oldest driver branch that runs it (NVIDIA, "CUDA Compatibility",
minor version compatibility)."""

_LOST = "sudo dmesg | grep 'NVRM: Xid'; sudo reboot  # Xid 79: the GPU has fallen off the bus"
_REMEDIES = (
    ("version mismatch", "sudo reboot  # the driver was upgraded while it was loaded"),
    ("couldn't communicate", "sudo modprobe nvidia || sudo dkms autoinstall"),
    ("insufficient permissions", "ls -l /dev/nvidia*  # and who is in group video or render"),
    ("nvml: unknown error", "restart the container: its access to the GPUs was lost"),
    ("no devices were found", "lspci -d 10de:  # then sudo dmesg | grep NVRM"),
    ("lost", _LOST),
    ("device handle", _LOST),
    ("did not end", "sudo dmesg | grep NVRM; sudo reboot"),
)
"""Words of nvidia-smi, and what fixes it; the first that fits."""


@check(NVIDIA, PACKAGES, skip_reason=no_gpus_needed)
def gpu_driver(answers: Answers) -> Iterator[Verdict]:
    """The NVIDIA driver works, is the same everywhere and new enough for the CUDA of torch, and
    torch is a build for CUDA."""
    seen = _seen(answers)
    versions = {
        host: nvidia.gpus[0]["driver_version"] for host, nvidia in seen.items() if nvidia.gpus
    }
    packages = answers.read_silently(PACKAGES)
    usual = most_common(versions.values(), "")
    for host, nvidia in seen.items():
        python = answers.machines[host].python
        installer = answers.of[host].installer
        yield _driver(
            host, nvidia, versions.get(host), usual, packages.get(host), python, installer
        )


def _driver(
    host: str, nvidia: Nvidia, version: str | None, usual: str, packages: Packages | None,
    python: str, installer: str,
) -> Verdict:  # fmt: skip
    cuda = packages.cuda() if packages is not None else None
    oldest = OLDEST_DRIVER.get(cuda[0] if cuda else 0)
    if nvidia.query is None:
        cause = "there is no nvidia-smi"
        if nvidia.devices or nvidia.pci:
            seen = f"/dev has {nvidia.devices}" if nvidia.devices else f"PCI has {len(nvidia.pci)}"
            cause += f", though {seen} GPUs"
        return fail(host, cause, _install(oldest or max(OLDEST_DRIVER.values()), installer))
    complaint = nvidia.complaint
    harmless = bool(nvidia.gpus) and nvidia.query.exit_code == CORRUPT_INFOROM
    if complaint is not None and not harmless:
        known = (remedy for words, remedy in _REMEDIES if words in complaint.lower())
        return fail(host, complaint, next(known, "nvidia-smi"))
    if version is None:
        return fail(host, "nvidia-smi lists no GPU", "lspci -d 10de:")
    torch = packages.versions.get("torch", "") if packages is not None else ""
    if torch.endswith("+cpu"):
        cause = f"torch {torch} is built without CUDA: no rank can use the GPUs"
        return fail(
            host, cause, f"{with_cuda(python, torch)}  # from an index that has it for CUDA"
        )
    branch = version.partition(".")[0]
    if cuda and oldest is not None and branch.isdecimal() and int(branch) < oldest:
        cause = f"driver {version} is too old for torch's CUDA {cuda[0]}: {oldest} is needed"
        return fail(host, cause, _install(oldest, installer))
    if version != usual:
        cause = f"driver {version}, but {usual} on the other hosts"
        return warn(host, cause, _install(usual.partition(".")[0], installer))
    if harmless and complaint is not None:
        return warn(
            host, f"{complaint}; the GPUs work", "nvidia-smi -q | grep -A 9 'Inforom Version'"
        )
    return ok(host, version)


def _install(branch: int | str, installer: str) -> str:
    if installer == "dnf":
        packages = install_packages(installer, ["nvidia-driver-cuda", "kmod-nvidia-open-dkms"])
        return f"{packages}  # branch {branch}, from NVIDIA's repository"
    return (
        f"{install_packages(installer, [f'nvidia-driver-{branch}'])}  # Ubuntu's name; Debian's own"
        " drivers are older: NVIDIA's repository has it"
    )


# ---------------------------------------------------------------- health

_RESET = "sudo nvidia-smi --gpu-reset -i {number}"
_FABRIC = "sudo systemctl restart nvidia-fabricmanager; systemctl status nvidia-fabricmanager"
_STATES: tuple[tuple[str, str, Level, str, str], ...] = (
    ("retired_pages.pending", "yes", "fail", "ECC: page retirement pending", _RESET),
    ("remapped_rows.pending", "yes|1", "warn", "ECC: row remapping pending",
     _RESET),
    ("remapped_rows.failure", "yes|1", "fail", "ECC: row remapping failed",
     "have the GPU replaced"),
    ("fabric.state", "not started|in progress", "fail",
     "fabric state: the fabric manager has not initialized it, so no CUDA program starts", _FABRIC),
    ("fabric.status", r"(?!success|\W*n/a|\W*not supported).+", "fail",
     "fabric state: the fabric manager failed to initialize it", _FABRIC),
    ("compute_mode", "prohibited", "fail", "compute mode: Prohibited",
     "sudo nvidia-smi -i {number} -c DEFAULT"),
    ("mig.mode.current", "enabled", "warn",
     "MIG is enabled; NCCL cannot use MIG instances together",
     "sudo nvidia-smi -i {number} -mig 0"),
)  # fmt: skip
"""Column of nvidia-smi, pattern of its bad values, and the level, cause and remedy of those."""
_SLOWED = {0x08: "hardware slowdown", 0x40: "heat", 0x80: "its power supply"}
"""Bits of clocks_event_reasons.active that indicate a fault (nvml.h, nvmlClocksEventReasons)."""
_SERIOUS = {48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140}
"""Xid numbers of faults of the hardware or the driver, not of a program (NVIDIA, "XID Errors")."""


@check(NVIDIA, skip_reason=no_gpus_needed)
def gpus(answers: Answers) -> Iterator[Verdict]:
    """There are as many GPUs as the job needs, of one kind, without memory errors, throttling
    or errors in the kernel's log."""
    seen = _seen(answers)
    healthy = {}
    for host, nvidia in seen.items():
        healthy[host] = len(nvidia.gpus)
        for gpu in nvidia.gpus:
            faults = list(_faults(host, gpu))
            healthy[host] -= any(fault.level == "fail" for fault in faults)
            yield from faults
        yield from _logged(host, nvidia)
    most = max(healthy.values(), default=0)
    kinds = {
        host: list(dict.fromkeys(gpu["name"] for gpu in nvidia.gpus))
        for host, nvidia in seen.items()
        if nvidia.gpus
    }
    usual = most_common((", ".join(names) for names in kinds.values()), "")
    for host, nvidia in seen.items():
        count = healthy[host]
        need = answers.machines[host].slots
        if count < (1 if need is None else need):
            cause = f"{pluralize(count, 'healthy GPU')}, {need or 'at least 1'} needed"
            yield fail(host, "; ".join(filter(None, [cause, nvidia.missing])), "nvidia-smi")
        elif nvidia.missing:
            yield warn(host, nvidia.missing, _LOST)
        elif need is None and count < most:
            cause = f"{pluralize(count, 'healthy GPU')}, but {most} on other hosts"
            yield warn(host, cause, "nvidia-smi")
        elif (own := ", ".join(kinds[host])) != usual:
            cause = f"{own}, but {usual} on the other hosts: the slowest GPU limits all"
            yield warn(host, cause, "nvidia-smi -L")
        elif len(kinds[host]) > 1:
            cause = f"{names(gpu['name'] for gpu in nvidia.gpus)}: the slowest GPU limits all"
            yield warn(
                host, cause, "nvidia-smi -L  # CUDA_VISIBLE_DEVICES chooses, by UUID or index"
            )
        else:
            unread = "" if nvidia.log else "; Xid errors: not allowed to read the kernel's log"
            yield ok(host, f"{names(gpu['name'] for gpu in nvidia.gpus)}{unread}")


def _faults(host: str, gpu: Mapping[str, str]) -> Iterator[Verdict]:
    """Judge one GPU."""
    number = gpu["index"]
    name, reset = f"GPU {number}", _RESET.format(number=number)
    if broken := [cell for cell in gpu.values() if is_error(cell)]:
        lost = "lost" in broken[0]  # a reset does not reach it
        yield fail(host, f"{name}: {broken[0]}", _LOST if lost else f"{reset} || sudo reboot")
        return
    errors = gpu.get("ecc.errors.uncorrected.volatile.total", "")
    if errors.isdecimal() and int(errors):
        found = pluralize(int(errors), "memory error")
        yield fail(host, f"{name}: {found} that could not be corrected", reset)
    for column, bad, level, cause, remedy in _STATES:
        if re.fullmatch(bad, gpu.get(column, "").lower()):
            yield Verdict(host, level, f"{name}: {cause}", remedy.format(number=number))
    reasons = gpu.get("clocks_event_reasons.active", gpu.get("clocks_throttle_reasons.active", ""))
    bits = int(reasons, 16) if re.fullmatch(r"0x[0-9a-fA-F]+", reasons) else 0
    if slowed := [cause for bit, cause in _SLOWED.items() if bits & bit]:
        cause = f"{name}: slowed down by {' and '.join(slowed)}"
        yield warn(host, cause, "nvidia-smi -q -d PERFORMANCE")


def _logged(host: str, nvidia: Nvidia) -> Iterator[Verdict]:
    """Judge the hardware errors in the kernel's log."""
    found = [(re.search(r"NVRM: Xid \(([^)]*)\): (\d+)", line), line) for line in nvidia.xids]
    serious = [(match[2], line) for match, line in found if match and int(match[2]) in _SERIOUS]
    if serious:
        numbers = ", ".join(dict.fromkeys(number for number, _ in serious))
        cause = f"the kernel has logged Xid {numbers}: {shortened(serious[-1][1])}"
        yield warn(host, cause, "sudo dmesg -T | grep NVRM")


# ---------------------------------------------------------------- NVIDIA's own diagnosis


class Diagnosis(Struct):
    """The result of dcgmi; None: it is not installed."""

    command: Command | None


DIAGNOSIS = Collector(collect.gpu_diagnosis, Diagnosis, timeout=45)


@check(DIAGNOSIS, quick=False, skip_reason=no_gpus_needed)
def gpu_diagnosis(answers: Answers) -> Iterator[Verdict]:
    """NVIDIA's own short diagnosis (`dcgmi diag -r 1`) finds nothing, where it is installed."""
    for host, found in answers.read(DIAGNOSIS).items():
        if (command := found.command) is None:
            yield skip(host, "dcgmi is not installed")
            continue
        try:
            # A line of text may come before the document.
            document = json.loads(command.stdout[command.stdout.index("{") :])
        except ValueError:
            output = shortened(f"{command.stdout} {command.stderr}")
            yield warn(host, f"dcgmi diag says: {output}", "sudo systemctl restart nvidia-dcgm")
            continue
        for name, result in _failed(document):
            ids = result.get("gpu_ids", result.get("entity_id"))
            where = "" if ids is None else f" on GPU {ids}"
            reason = shortened(json.dumps(result.get("warnings", result.get("info", ""))))
            yield fail(host, f"{name} fails{where}: {reason}", "dcgmi diag -r 1")
        yield ok(host, "dcgmi diag -r 1 finds nothing")


def _failed(part: Any, name: str = "a test") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and result of every test that failed; DCGM 3 and 4 nest them differently."""
    children = part if isinstance(part, list) else []
    if isinstance(part, dict):
        name, children = str(part.get("name", name)), list(part.values())
        if str(part.get("status")).lower() == "fail" and part.keys() - {"status"}:
            yield name, part
    for child in children:
        yield from _failed(child, name)


# ---------------------------------------------------------------- processes

FREE_MIB = 1024
"""A GPU that nobody uses has less memory in use: the driver's own, an idle context."""


@check(NVIDIA, skip_reason=no_gpus_needed)
def gpu_processes(answers: Answers) -> Iterator[Verdict]:
    """No leftover process, and none of another user, holds the GPUs that the job needs."""
    for host, nvidia in _seen(answers).items():
        with_process = {process["gpu_uuid"] for process in nvidia.processes}
        busy = [
            gpu
            for gpu in nvidia.gpus
            if gpu["uuid"] in with_process
            or (gpu["memory.used"].isdecimal() and int(gpu["memory.used"]) > FREE_MIB)
        ]
        if not busy:
            yield ok(host, "none")
            continue
        need = answers.machines[host].slots
        free = len(nvidia.gpus) - len(busy)
        held = [
            f"GPU {gpu['index']} by {_users(nvidia, gpu['uuid'])} ({gpu['memory.used']} MiB)"
            for gpu in busy
        ]
        cause = f"{pluralize(len(busy), 'GPU')} of {len(nvidia.gpus)} in use: {join_some(held, 4)}"
        enough = free >= (len(nvidia.gpus) if need is None else need)
        yield Verdict(host, "warn" if enough else "fail", cause, _free(nvidia))


def _users(nvidia: Nvidia, uuid: str) -> str:
    names = []
    for process in nvidia.processes:
        if process["gpu_uuid"] == uuid:
            owner = nvidia.owners.get(process["pid"])
            of = f" of {owner.user}" if owner and owner.user else ""
            names.append(f"{process['process_name']} (process {process['pid']}{of})")
    return ", ".join(names) or "a process that is not visible here"


def _free(nvidia: Nvidia) -> str:
    """Return the remedy: cancel the user's own runs, or kill the user's own processes, and ask the
    owners of others."""
    own = (owner.run for owner in nvidia.owners.values() if owner.user == nvidia.user)
    if runs := sorted({run for run in own if run}):
        return "; ".join(f"clusterkit cancel {run}" for run in runs)
    processes = {
        process["pid"]: Process(int(process["pid"]), owner.user, process["process_name"])
        for process in nvidia.processes
        if (owner := nvidia.owners.get(process["pid"])) is not None and owner.user
    }
    return end_processes(processes.values(), nvidia.user) or "sudo fuser -v /dev/nvidia*"
