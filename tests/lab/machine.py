"""What the lab needs of this machine: tools, a cgroup, a free network, mounts."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from clusterkit.errors import ClusterkitError, Unavailable

_PACKAGES = {
    "sh": "dash",
    "ip": "iproute2",
    "tc": "iproute2",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "pivot_root": "util-linux",
    "mount": "mount",
    "umount": "mount",
}
_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"))
NETNS = Path("/run/netns")
"""Where iproute2 keeps named network namespaces."""


# From linux/capability.h.
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21

_held: list[int] = []


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Hold a folder's lock; gives its descriptor.

    The programs that :func:`call` runs hold it too: when this process is killed, whoever waits for
    the lock gets it once they have ended, and finds nothing half done that goes on by itself.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        _held.append(handle)
        yield handle
    finally:
        with contextlib.suppress(ValueError):
            _held.remove(handle)
        os.close(handle)


def tool(name: str) -> str:
    """The full path of a program; also from the sbin folders.

    Raises:
        Unavailable: it is not installed.
    """
    found = shutil.which(name, path=_PATH)
    if found is None:
        raise Unavailable(f"the lab needs {name}", hint=f"apt-get install {_PACKAGES[name]}")
    return found


def problem() -> Unavailable | None:
    """What keeps this machine from having a lab, or None."""
    if not _is_able():
        return Unavailable(
            "the lab needs root: it makes network namespaces and mounts",
            hint="run it with sudo, or in a container started with --privileged",
        )
    missing = [name for name in _PACKAGES if shutil.which(name, path=_PATH) is None]
    if missing:
        packages = sorted({_PACKAGES[name] for name in missing})
        return Unavailable(
            f"the lab needs {', '.join(missing)}", hint=f"apt-get install {' '.join(packages)}"
        )
    try:
        cgroups()
    except Unavailable as error:
        return error
    return None


def _is_able() -> bool:
    """Whether this process may make namespaces and mounts; root of a plain container may not."""
    status = Path("/proc/self/status").read_text()
    capabilities = int(status.partition("CapEff:")[2].split()[0], 16)
    return all(capabilities >> number & 1 for number in (_CAP_NET_ADMIN, _CAP_SYS_ADMIN))


def call(*argv: str, text: str | None = None) -> str:
    """Run a program of :data:`_PACKAGES`; gives its stdout.

    Raises:
        ClusterkitError: it failed; the message holds its command and what it said.
    """
    done = subprocess.run(
        [tool(argv[0]), *argv[1:]],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        pass_fds=_held,
    )
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise ClusterkitError(f"{' '.join(argv)}: exit status {done.returncode}: {said}")
    return done.stdout


def ip(*lines: str, netns: str | None = None) -> None:
    """Carry out lines of ``ip`` in one process, in a network namespace."""
    where = ["-netns", netns] if netns else []
    call("ip", *where, "-batch", "-", text="\n".join(lines) + "\n")


def new_key(path: Path, comment: str) -> None:
    """An ed25519 key pair without a passphrase."""
    call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path))


# ---------------------------------------------------------------- cgroups


def cgroups() -> Path:
    """Where cgroup v2 is mounted.

    Raises:
        Unavailable: nowhere.
    """
    for point, kind in _mounts():
        if kind == "cgroup2":
            return point
    raise Unavailable(
        "the lab needs cgroup v2, and it is not mounted",
        hint="mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 none /sys/fs/cgroup/unified",
    )


def says(cgroup: Path, event: str) -> bool:
    """Whether ``populated 1`` or ``frozen 1`` is so; of no cgroup nothing is."""
    try:
        return event in (cgroup / "cgroup.events").read_text()
    except FileNotFoundError:
        return False


def wait_for(cgroup: Path, event: str, seconds: float = 30.0) -> None:
    """Return once a cgroup says ``populated 0``, ``frozen 1`` or the like.

    Raises:
        ClusterkitError: it does not within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    with open(cgroup / "cgroup.events", "rb") as events:
        poll = select.poll()
        poll.register(events, select.POLLPRI)
        while event.encode() not in os.pread(events.fileno(), 4096, 0):
            left = deadline - time.monotonic()
            if left <= 0:
                raise ClusterkitError(f"{cgroup}: is not {event!r} after {seconds:.0f} s")
            poll.poll(min(left, 0.5) * 1000)


def kill(cgroup: Path) -> None:
    """SIGKILL to all of a cgroup, frozen ones too; returns when they are gone."""
    with contextlib.suppress(FileNotFoundError):
        (cgroup / "cgroup.kill").write_text("1")
        wait_for(cgroup, "populated 0")


def remove_cgroup(cgroup: Path) -> None:
    """Remove an empty cgroup and those below it."""
    if not cgroup.exists():
        return
    for child in cgroup.iterdir():
        if child.is_dir():
            remove_cgroup(child)
    deadline = time.monotonic() + 10
    while True:
        try:
            return cgroup.rmdir()
        except OSError:
            # The last process is counted out a moment before it lets go of its cgroup.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)


# ---------------------------------------------------------------- mounts


def _mounts(pid: int | str = "self") -> Iterator[tuple[Path, str]]:
    """Mount points that a process sees, and the kind of file system there."""
    for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
        head, _, tail = line.partition(" - ")
        yield Path(_unescape(head.split(" ")[4])), tail.split(" ")[0]


def mount_points(pid: int | str = "self") -> list[Path]:
    """Where something is mounted, in the order it was done; for a process."""
    return [point for point, _ in _mounts(pid)]


def _unescape(path: str) -> str:
    for escaped, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(escaped, char)
    return path


def escape(path: str | Path) -> str:
    """A path as a field of an fstab."""
    text = str(path)
    for escaped, char in (("\\134", "\\"), ("\\040", " "), ("\\011", "\t"), ("\\012", "\n")):
        text = text.replace(char, escaped)
    return text


def mounts_below(folder: Path) -> list[Path]:
    """Mount points in a folder, the innermost first."""
    return [point for point in reversed(mount_points()) if folder in point.parents]


def unmount_below(folder: Path) -> None:
    """Unmount all in a folder; what someone still has open goes as soon as it is closed."""
    for point in mounts_below(folder):
        try:
            call("umount", str(point))
        except ClusterkitError:
            call("umount", "--lazy", str(point))


# ---------------------------------------------------------------- network


def _taken() -> list[ipaddress.IPv4Network]:
    """Networks that this machine has a route or an address in."""
    found = []
    for route in json.loads(call("ip", "-4", "-json", "route", "show", "table", "all") or "[]"):
        if route["dst"] != "default":
            network = ipaddress.IPv4Network(route["dst"], strict=False)
            # 0.0.0.0/1 and the like are a VPN's way to say "default".
            if network.prefixlen > 4:
                found.append(network)
    return found


def free_network() -> ipaddress.IPv4Network:
    """A /24 that this machine has no route to, other than the default.

    Raises:
        Unavailable: there is none among those the lab tries.
    """
    taken = _taken()
    for block in ("10.77.0.0/16", "198.18.0.0/16", "192.168.0.0/16", "172.31.0.0/16"):
        for network in ipaddress.IPv4Network(block).subnets(new_prefix=24):
            if not any(network.overlaps(other) for other in taken):
                return network
    raise Unavailable(
        "no free network for a lab: this machine has routes to all that it tries",
        hint="`ip route` shows them; `python -m tests.lab status` lists labs that can go",
    )


def namespaces(lab: str) -> list[str]:
    """Named network namespaces of a lab."""
    try:
        return sorted(name for name in os.listdir(NETNS) if name.startswith(f"{lab}-"))
    except FileNotFoundError:
        return []


def links(prefix: str) -> dict[str, str]:
    """Links of this machine whose name begins so, and their aliases."""
    shown: Sequence[dict[str, str]] = json.loads(call("ip", "-json", "-details", "link") or "[]")
    return {
        link["ifname"]: link.get("ifalias", "")
        for link in shown
        if link.get("ifname", "").startswith(prefix)
    }
