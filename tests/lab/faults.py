"""What can go wrong with a host, for real, and how it is mended again.

Every fault can be set when it is there already, and mended when it is not.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clusterkit.errors import BadInput, ClusterkitError, Unavailable
from tests.lab import machine

if TYPE_CHECKING:
    from tests.lab import Lab

_FAKETIME = "/usr/local/lib/lab-faketime.so"
_SSHD_CONFIG = "/etc/ssh/sshd_config"
# A clock that is set wrong runs no faster: only the time of day is another one.
_CLOCK = (
    f"SetEnv LD_PRELOAD={_FAKETIME} FAKETIME_DONT_FAKE_MONOTONIC=1 DONT_FAKE_MONOTONIC=1 FAKETIME="
)
_OTHER = "/var/lib/lab/torch"
_HOST_KEY = "/etc/ssh/ssh_host_ed25519_key"
OTHER_TORCH = "2.9.1"
_MARK = "X-lab.torch"
_SAID = re.compile(r"(?m)^(Version: |__version__ = ['\"])[0-9][^'\"\n]*")


def crash(lab: Lab, host: str) -> None:
    machine.kill(lab.cgroup(host))


def boot(lab: Lab, host: str) -> None:
    if not lab.running(host):
        lab.start(host)


def cut(lab: Lab, host: str) -> None:
    machine.ip(f"link set {host} down", netns=lab.netns("sw"))


def heal(lab: Lab, host: str) -> None:
    machine.ip(f"link set {host} up", netns=lab.netns("sw"))


def freeze(lab: Lab, host: str) -> None:
    lab.pid(host)
    _freeze(lab.cgroup(host), True)


def thaw(lab: Lab, host: str) -> None:
    _freeze(lab.cgroup(host), False)


def _freeze(cgroup: Path, frozen: bool) -> None:
    (cgroup / "cgroup.freeze").write_text("1" if frozen else "0")
    machine.wait_for(cgroup, f"frozen {int(frozen)}")


def restart_sshd(lab: Lab, host: str) -> None:
    """A new server with the key that is there now; connections break, other processes stay."""
    _reload_sshd(lab, host)
    first = lab.pid(host)
    program = os.readlink(f"/proc/{first}/exe")
    for pid in map(int, (lab.cgroup(host) / "cgroup.procs").read_text().split()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if pid != first and os.readlink(f"/proc/{pid}/exe") == program:
                os.kill(pid, signal.SIGKILL)
    lab.wait_for_ssh(host)


def _reload_sshd(lab: Lab, host: str) -> None:
    """Have the server start itself anew; returns when it listens again."""
    first = lab.pid(host)
    before = _listeners(first)
    os.kill(first, signal.SIGHUP)
    deadline = time.monotonic() + 30
    while not (now := _listeners(first)) or now == before:
        if time.monotonic() > deadline or not lab.running(host):
            raise ClusterkitError(f"host {host}: sshd did not restart; see {lab.log(host)}")
        time.sleep(0.005)


def _listeners(pid: int) -> set[str]:
    """Inodes of the sockets on port 22 in the network of a process."""
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    fields = (line.split() for line in lines)
    return {f[9] for f in fields if f[1].endswith(":0016") and f[3] == "0A"}


def new_host_key(lab: Lab, host: str) -> None:
    """As after a host was installed anew: nobody's known_hosts has the key."""
    key = lab.root(host) / _HOST_KEY[1:]
    fresh = lab.dir / "keys" / f"{host}.fresh"
    try:
        machine.new_key(fresh, host)
        _replace(key, fresh.read_text(), 0o600)
    finally:
        fresh.unlink(missing_ok=True)
        fresh.with_suffix(".fresh.pub").unlink(missing_ok=True)
    restart_sshd(lab, host)


def old_host_key(lab: Lab, host: str) -> None:
    key = lab.root(host) / _HOST_KEY[1:]
    original = (lab.dir / "keys" / host).read_text()
    if key.read_text() != original:
        _replace(key, original, 0o600)
        restart_sshd(lab, host)


def full_disk(lab: Lab, host: str) -> None:
    """The disk shrinks to what is on it: not one byte more fits, whatever is open already."""
    folder = lab.disk(host).folder
    for _ in range(100):
        about = os.statvfs(folder)
        used = (about.f_blocks - about.f_bfree) * about.f_frsize
        with contextlib.suppress(ClusterkitError):  # the host wrote meanwhile
            machine.call("mount", "-o", f"remount,size={used}", str(folder))
            return
    raise ClusterkitError(f"host {host}: writes faster than its disk can be made full")


def free_disk(lab: Lab, host: str) -> None:
    machine.call("mount", "-o", "remount,size=50%", str(lab.disk(host).folder))


def clock(lab: Lab, host: str, offset: str) -> None:
    """Whatever is started over SSH from now on sees the time plus ``offset`` seconds.

    sshd itself keeps the true time: its sandbox does not let libfaketime work.
    """
    try:
        seconds = float(offset)
    except ValueError:
        seconds = math.nan
    if not abs(seconds) < 1e9:
        raise BadInput(f"clock {offset!r}: is no number of seconds", hint="clock h1 600, or -3.5")
    root = lab.root(host)
    config = root / _SSHD_CONFIG[1:]
    text = re.sub(f"(?m)^{_CLOCK}.*\n", "", config.read_text())
    if seconds != 0:
        shutil.copy(faketime(), root / _FAKETIME[1:])
        text += f"{_CLOCK}{seconds:+f}\n"
    if text != config.read_text():
        _replace(config, text, 0o644)
        _reload_sshd(lab, host)
    for left in (root / "dev" / "shm").glob("*faketime_s*"):
        left.unlink(missing_ok=True)


def faketime() -> Path:
    """libfaketime, of Debian's package or of PyPI's in this checkout's .venv.

    Raises:
        Unavailable: neither is there.
    """
    from tests.lab import CHECKOUT

    # Of Debian's two, the one for programs with threads.
    found = [
        *Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"),
        *CHECKOUT.glob(".venv/lib/python*/site-packages/libfaketime/**/libfaketime.so.1"),
    ]
    if not found:
        raise Unavailable(
            "a clock can be shifted only with libfaketime", hint="apt-get install libfaketime"
        )
    return found[0]


def slow(lab: Lab, host: str, rate: str) -> None:
    """A link of this rate, both ways; ``none`` for the machine's own."""
    for netns, link in ((lab.netns("sw"), host), (lab.netns(host), "eth0")):
        there = ("tc", "-n", netns, "qdisc")
        if rate != "none":
            try:
                machine.call(
                    *there, *f"replace dev {link} root tbf burst 128k latency 100ms rate".split(),
                    rate,
                )  # fmt: skip
            except ClusterkitError as error:
                said = error.message.splitlines()[0].split(": ", 2)[-1]
                raise BadInput(
                    f"slow {rate!r}: tc says {said}", hint="slow h1 100mbit, 1gbit, 512kbit, none"
                ) from None
        elif _rate(netns, link):
            machine.call(*there, "delete", "dev", link, "root")


def _rate(netns: str, link: str) -> str:
    """What a link is limited to, as tc writes it; empty without a limit."""
    shown = json.loads(machine.call("tc", "-n", netns, "-json", "qdisc", "show", "dev", link))
    rates = [each["options"]["rate"] for each in shown if each["kind"] == "tbf"]  # bytes per second
    return f"{rates[0] * 8 / 1e6:g}mbit" if rates else ""


def versions(lab: Lab, host: str, version: str) -> None:
    """Python says that torch is another one; ``none`` for the one that is there."""
    if not re.fullmatch(r"[0-9][0-9A-Za-z.+!]*|none", version):
        raise BadInput(f"versions {version!r}: is no version", hint=f"versions h1 {OTHER_TORCH}")
    pid, disk = lab.pid(host), lab.disk(host)
    root = lab.root(host)
    enter = ("nsenter", f"--target={pid}", "--mount", "--pid")
    files = _torch_files()
    for point in machine.mount_points(pid):
        if point in files:
            machine.call(*enter, "umount", str(point))
    # The fstab brings it back with the next boot.
    lines = [line for line in disk.fstab.read_text().splitlines() if _MARK not in line]
    if version != "none":
        for place, text in files.items():
            copy = Path(_OTHER, place.name)
            (root / _OTHER[1:]).mkdir(parents=True, exist_ok=True)
            (root / str(copy)[1:]).write_text(_SAID.sub(rf"\g<1>{version}", text))
            machine.call(*enter, "mount", "--bind", str(copy), str(place))
            source = machine.escape(disk.upper / str(copy)[1:])
            lines.append(f"{source} {machine.escape(f'{disk.root}{place}')} none bind,{_MARK}")
    disk.fstab.write_text("\n".join(lines) + "\n")


def _torch_files() -> dict[Path, str]:
    """The files that say which torch this is, as hosts see them, and what is in them."""
    from tests.lab import CHECKOUT

    packages = CHECKOUT / ".venv" / "lib"
    found = (
        *packages.glob("python*/site-packages/torch-*.dist-info/METADATA"),
        *packages.glob("python*/site-packages/torch/version.py"),
    )
    if len(found) != 2:
        raise Unavailable(f"no torch in {packages.parent}", hint="make venv")
    return {path: path.read_text() for path in found}


def repair(lab: Lab, host: str) -> None:
    """Mend all of the above."""
    thaw(lab, host)
    heal(lab, host)
    free_disk(lab, host)
    slow(lab, host, "none")
    boot(lab, host)
    clock(lab, host, "0")
    versions(lab, host, "none")
    old_host_key(lab, host)


def _replace(path: Path, text: str, mode: int) -> None:
    """Write a file whole: whoever opens it meanwhile gets the old or the new one."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(text)
    fresh.chmod(mode)
    fresh.replace(path)


@dataclass(frozen=True)
class Fault:
    """One fault, or its mending.

    Args:
        what: what happens to the host.
        value: what its value is called; None when it takes none.
        default: the value when none is given; None when it must be.
    """

    what: str
    carry_out: Callable[..., None]
    value: str | None = None
    default: str | None = None


FAULTS = {
    "crash": Fault("all its processes are killed at once; its disk stays", crash),
    "boot": Fault("it starts again", boot),
    "cut": Fault("its network cable is pulled", cut),
    "heal": Fault("and plugged in", heal),
    "freeze": Fault("all its processes stand still; its network answers", freeze),
    "thaw": Fault("they go on", thaw),
    "restart-sshd": Fault("all SSH connections break, sshd starts anew, jobs go on", restart_sshd),
    "new-host-key": Fault("its SSH host key is one that nobody knows", new_host_key),
    "old-host-key": Fault("its first host key is back", old_host_key),
    "full-disk": Fault("not a byte more fits on its disk", full_disk),
    "free-disk": Fault("its disk has space again", free_disk),
    "clock": Fault("what SSH starts from now on sees a clock so many seconds off; 0: the true one",
                   clock, "SECONDS"),
    "slow": Fault("its link has this rate, both ways: 100mbit; none: no limit", slow, "RATE"),
    "versions": Fault("its Python says that torch is this version; none: the true one",
                      versions, "VERSION", OTHER_TORCH),
    "repair": Fault("undoes all of these", repair),
}  # fmt: skip


def carry_out(lab: Lab, name: str, host: str, value: str | None) -> None:
    """Do one of :data:`FAULTS`.

    Raises:
        BadInput: no such fault, a value too many or none where one is needed.
    """
    if name not in FAULTS:
        near = difflib.get_close_matches(name, FAULTS, 1)
        raise BadInput(
            f"there is no fault {name!r}",
            hint=f"did you mean {near[0]}?" if near else f"there are: {', '.join(FAULTS)}",
        )
    fault = FAULTS[name]
    if fault.value is None:
        if value is not None:
            raise BadInput(f"{name} takes no value, and got {value!r}")
        fault.carry_out(lab, host)
        return
    value = fault.default if value is None else value
    if value is None:
        raise BadInput(f"{name} needs a value: {fault.value}", hint=fault.what)
    fault.carry_out(lab, host, value)


def present(lab: Lab, host: str) -> list[str]:
    """What is wrong with a host now, in words of :data:`FAULTS`."""
    wrong = []
    port = json.loads(machine.call("ip", "-n", lab.netns("sw"), "-json", "link", "show", host))
    if "UP" not in port[0]["flags"]:
        wrong.append("cut")
    if rate := _rate(lab.netns("sw"), host):
        wrong.append(f"slow {rate}")
    about = os.statvfs(lab.disk(host).folder)
    if about.f_bavail == 0:
        wrong.append("full-disk")
    if not lab.running(host):
        return ["crash", *wrong]
    if machine.says(lab.cgroup(host), "frozen 1"):
        wrong.append("freeze")
    root = lab.root(host)
    if (root / _HOST_KEY[1:]).read_text() != (lab.dir / "keys" / host).read_text():
        wrong.append("new-host-key")
    if shifted := re.search(f"(?m)^{_CLOCK}(.*)$", (root / _SSHD_CONFIG[1:]).read_text()):
        wrong.append(f"clock {float(shifted[1]):+g}")
    if _MARK in lab.disk(host).fstab.read_text():
        wrong.append("versions")
    return wrong
