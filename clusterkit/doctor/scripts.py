"""Scripts that several checks judge."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from clusterkit import shell
from clusterkit.doctor import meeting
from clusterkit.doctor.base import Answers, Finding, Script, Subject, read, shortened

# ---------------------------------------------------------------- the meeting


class Met(Struct):
    """What `clusterkit.doctor.meeting.meet` gives."""

    head: str | None
    listening: str | None
    came: list[str]
    peers: dict[str, str | None] | None
    rates: dict[str, float] = {}


MEET = Script(
    "meet", meeting.meet, limit=meeting.END + 3, phase=2, with_head=True, whole_module=True
)


def open_firewall(hosts: Sequence[str], subject: Subject, most: int = 8) -> str:
    """The command that lets hosts in; ranks talk on ports that nobody knows beforehand."""
    addresses = [machine.at for machine in subject.hosts if machine.name in hosts]
    more = f"  # and {len(addresses) - most} more" if len(addresses) > most else ""
    if len(addresses) == 1:
        return f"sudo ufw allow from {addresses[0]}"
    return f"for a in {' '.join(addresses[:most])}; do sudo ufw allow from $a; done{more}"


# ---------------------------------------------------------------- network


class Interface(Struct):
    """One network interface."""

    mtu: int
    up: bool
    speed: int | None
    """Mbit/s; None where the driver does not tell."""
    addresses: list[str]


def collect_interfaces(given: dict[str, Any]) -> Any:
    import array
    import fcntl
    import os
    import socket
    import struct

    def read(name: str, entry: str) -> str:
        try:
            with open(f"/sys/class/net/{name}/{entry}", encoding="ascii") as file:
                return file.read().strip()
        except (OSError, ValueError):
            return ""

    interfaces: dict[str, Any] = {}
    for name in os.listdir("/sys/class/net"):
        flags, speed = read(name, "flags"), read(name, "speed")
        if not flags:
            continue  # a file of the bonding driver's
        interfaces[name] = {
            "mtu": int(read(name, "mtu") or 0),
            # IFF_UP, and not without a carrier.
            "up": bool(int(flags, 16) & 1)
            and read(name, "operstate") not in ("down", "lowerlayerdown"),
            "speed": int(speed) if speed.isdigit() else None,
            "addresses": [],
        }
    # SIOCGIFCONF: every IPv4 address with its interface, 40 bytes each.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        room = array.array("B", bytes(40 * 1024))
        size = struct.unpack(
            "iL",
            fcntl.ioctl(
                probe.fileno(), 0x8912, struct.pack("iL", len(room), room.buffer_info()[0])
            ),
        )[0]
    data = room.tobytes()[:size]
    for start in range(0, size, 40):
        name = data[start : start + 16].partition(b"\0")[0].decode().partition(":")[0]
        if name in interfaces:
            interfaces[name]["addresses"].append(socket.inet_ntoa(data[start + 20 : start + 24]))
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as file:
            for line in file:
                words = line.split()
                if words[-1] in interfaces:
                    text = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0]))
                    interfaces[words[-1]]["addresses"].append(text)
    except OSError:
        pass
    return interfaces


INTERFACES = Script("interfaces", collect_interfaces, safe=True)


class Holder(Struct):
    """A process that listens."""

    pid: int
    user: str
    command: str


class PortSeen(Struct):
    """Whether the port can be had, and who has it otherwise."""

    port: int

    error: str | None
    taken: bool
    holders: list[Holder]


def collect_port(given: dict[str, Any]) -> Any:
    import errno
    import glob
    import os
    import pwd
    import random
    import socket

    def refused(port: int) -> Any:
        """The error that listening there gives, or None."""
        for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
            try:
                with socket.socket(family, socket.SOCK_STREAM) as probe:
                    # As torch does it: a port that only waits for old packets can be had.
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    if family == socket.AF_INET6:
                        probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    probe.bind((address, port))
                    probe.listen(1)
            except OSError as error:
                if family == socket.AF_INET or error.errno == errno.EADDRINUSE:
                    return error
        return None

    wanted = given["port"]
    # Below Linux's range for outgoing connections; at random, so that two at a time differ.
    ports = random.sample(range(20000, 32000), 200) if wanted is None else [wanted]
    port = next((port for port in ports if refused(port) is None), ports[0])
    problem = refused(port)
    if problem is None:
        return {"port": port, "error": None, "taken": False, "holders": []}
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as lines:
                for line in list(lines)[1:]:
                    cells = line.split()
                    if int(cells[1].rpartition(":")[2], 16) == port and cells[3] == "0A":
                        sockets.add(f"socket:[{cells[9]}]")
        except OSError:
            pass
    holders = {}
    for handle in glob.iglob("/proc/[0-9]*/fd/*"):
        try:
            if os.readlink(handle) not in sockets:
                continue
            pid = int(handle.split("/")[2])
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read().rstrip(b"\0").replace(b"\0", b" ")
            uid = os.stat(f"/proc/{pid}").st_uid
        except OSError:
            continue
        try:
            user = pwd.getpwuid(uid).pw_name
        except KeyError:
            user = str(uid)
        words = command.decode("utf-8", "replace")[:80]
        holders[pid] = {"pid": pid, "user": user, "command": words}
    return {
        "port": port,
        "error": problem.strerror or str(problem),
        "taken": problem.errno == errno.EADDRINUSE,
        "holders": list(holders.values()),
    }


PORT = Script("port", collect_port, where="head", safe=True)


# ---------------------------------------------------------------- packages


class Packages(Struct):
    """Versions in the interpreter of the ranks."""

    interpreter: str
    versions: dict[str, str]
    gone: list[str] = []
    """Those that pip knows of and Python does not find."""

    def cuda(self) -> int | None:
        """CUDA's major version that torch was built for; None: a CPU build, or not told."""
        suffix = re.search(r"\+cu(\d\d)\d", self.versions.get("torch", ""))
        if suffix:
            return int(suffix[1])
        for package, version in self.versions.items():
            if package.startswith("nvidia-cuda-runtime") and version.partition(".")[0].isdecimal():
                return int(version.partition(".")[0])
        return None


def collect_packages(given: dict[str, Any]) -> Any:
    import importlib.util
    import os
    import re
    import sys

    def there(name: str) -> bool:
        try:
            found = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return False
        # A folder without the package's own files has no origin.
        return found is not None and found.origin is not None

    # What importlib.metadata does, which takes 20 ms to import.
    wanted = r"(torch|deepspeed|transformers|numpy|nvidia-(nccl|cuda-runtime)(-cu\d+)?)\Z"
    versions: dict[str, str] = {}
    for folder in sys.path:
        try:
            entries = os.listdir(folder)
        except OSError:
            continue
        for entry in entries:
            stem, _, kind = entry.rpartition(".")
            name = re.sub("[-_.]+", "-", stem.partition("-")[0]).lower()
            if kind not in ("dist-info", "egg-info") or not re.match(wanted, name):
                continue
            for file_name in ("METADATA", "PKG-INFO", ""):
                try:
                    path = os.path.join(folder, entry, file_name).rstrip("/")
                    with open(path, encoding="utf-8", errors="replace") as file:
                        found = re.search(r"^Version:\s*(\S+)", file.read(4096), re.MULTILINE)
                except OSError:
                    continue
                if found is not None:
                    versions.setdefault(name, found[1])
                break
    gone = [name for name in versions if not name.startswith("nvidia-") and not there(name)]
    return {"interpreter": sys.executable, "versions": versions, "gone": gone}


PACKAGES = Script("packages", collect_packages)


def needed_packages(subject: Subject) -> dict[str, str]:
    """Package to what of the job needs it."""
    needs = subject.needs
    found = {}
    if needs.launcher in ("torchrun", "deepspeed"):
        found["torch"] = f"launcher: {needs.launcher}"
    if needs.launcher == "deepspeed":
        found["deepspeed"] = "launcher: deepspeed"
    elif needs.deepspeed:
        found["deepspeed"] = "the job's deepspeed section"
    return found


def pip_install(python: str, versions: Mapping[str, str], *flags: str) -> str:
    """The command that installs packages; one of no certain version has ``""``."""
    # What stands behind a + says which index it came from; pip finds it where it found the rest.
    pinned = [
        f"{name}=={version.partition('+')[0]}" if version else name
        for name, version in versions.items()
    ]
    return shell.join([python, "-m", "pip", "install", *flags, *pinned])


# ---------------------------------------------------------------- nvidia-smi


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
        _, said = _parsed(self.query, _GPU_COLUMNS)
        if said:
            return shortened(" ".join(said))
        return f"nvidia-smi exited with {self.query.exit_code}" if self.query.exit_code else None


_GPU_COLUMNS = ("index", "uuid", "name", "memory.total", "memory.used", "driver_version")
_PROCESS_COLUMNS = ("pid", "process_name", "gpu_uuid")


def _parsed(
    command: Command | None, columns: Sequence[str]
) -> tuple[list[dict[str, str]], list[str]]:
    """Rows of CSV under a header that begins with these columns, and all lines that are none."""
    rows: list[dict[str, str]] = []
    said: list[str] = []
    header: list[str] = []
    if command is None:
        return rows, said
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
            said.append(line)
    return rows, said + [line for line in command.stderr.splitlines() if line.strip()]


def collect_nvidia(given: dict[str, Any]) -> Any:
    import glob
    import os
    import pwd
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
    owners = {}
    if found is not None and found["exit_code"] == 0:
        apps = query("compute-apps", "pid", "process_name", "gpu_uuid", "used_memory")
        for line in (apps or {"stdout": ""})["stdout"].splitlines():
            pid = line.split(",")[0].strip()
            if not pid.isdigit():
                continue
            owner = {}
            try:
                owner["user"] = pwd.getpwuid(os.stat(f"/proc/{pid}").st_uid).pw_name
                with open(f"/proc/{pid}/environ", "rb") as file:
                    for entry in file.read().split(b"\0"):
                        if entry.startswith(b"CLUSTERKIT_RUN_ID="):
                            owner["run"] = entry.partition(b"=")[2].decode("utf-8", "replace")
            except (OSError, KeyError):
                pass
            owners[pid] = owner
    xids = []
    if devices:
        kernel = run("dmesg")
        lines = (kernel or {"stdout": ""})["stdout"].splitlines()
        xids = [line[-300:] for line in lines if "NVRM: Xid" in line][-20:]
    return {"devices": devices, "query": found, "apps": apps, "owners": owners, "xids": xids}


NVIDIA = Script("nvidia", collect_nvidia, limit=45)


def gpus_of(
    check: str, answers: Answers, subject: Subject
) -> tuple[dict[str, Nvidia], list[Finding]]:
    """What `NVIDIA` collected. With no trace of a GPU anywhere, every host is skipped."""
    seen, findings = read(check, NVIDIA, answers, subject, Nvidia)
    if subject.needs.device != "cuda" and not any(
        nvidia.devices or nvidia.query for nvidia in seen.values()
    ):
        findings += [Finding(check, host, "skip", "no GPU on any host") for host in seen]
        return {}, findings
    return seen, findings


def no_gpus_wanted(subject: Subject) -> str | None:
    return "the job runs on CPU threads" if subject.needs.device == "cpu" else None
