"""The disk of one host: what differs there from the machine that it lives on.

A host sees this machine's root folder through an overlay whose upper half is a tmpfs of its own,
mounted at the host's folder in the lab. Everything that a host writes is on that one file system:
it survives a crash of the host, goes with one umount, and can be made full.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from tests.lab import machine

HIDDEN = ("/root", "/home", "/srv", "/tmp", "/var/tmp", "/etc/ssh")
"""Folders of this machine that no host sees; each has empty ones of its own."""

SSHD_CONFIG = """\
# As Debian ships it, without PAM, and ready for many logins at once.
HostKey /etc/ssh/ssh_host_ed25519_key
UsePAM no
UseDNS no
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
MaxStartups 500:30:1000
AcceptEnv LANG LC_*
Subsystem sftp internal-sftp
"""


@dataclass(frozen=True)
class Disk:
    """The tmpfs at ``folder``."""

    folder: Path

    @property
    def upper(self) -> Path:
        return self.folder / "upper"

    @property
    def root(self) -> Path:
        """Where the host's root is put together before the host moves into it."""
        return self.folder / "root"

    @property
    def fstab(self) -> Path:
        return self.folder / "fstab"

    @property
    def boot_id(self) -> Path:
        """Another one with each boot, as on a real host. Beside the disk, which may be full."""
        return self.folder.with_name(f"{self.folder.name}.boot_id")

    def before_boot(self) -> None:
        """What is new with each boot."""
        work = self.folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        self.boot_id.write_text(f"{uuid.uuid4()}\n")

    def make(self) -> None:
        """Mount it, empty; half of the memory is its size, and what is written is its price."""
        self.folder.mkdir(parents=True)
        machine.call("mount", "-t", "tmpfs", "-o", "mode=755", "clusterkit-lab", str(self.folder))
        self.root.mkdir()
        self.upper.mkdir()
        shutil.copystat("/", self.upper)

    def mkdir(self, path: str | Path, *, follow: bool = True) -> Path:
        """A folder of the host, with the owner and mode that it has here; gives its real place.

        Args:
            path: absolute; as on the host.
            follow: go where symbolic links of this machine lead; else make folders of them.
        """
        place = self.upper
        for part in Path(os.path.realpath(path) if follow else path).parts[1:]:
            place = place / part
            if not place.exists():
                place.mkdir()
                model = Path("/") / place.relative_to(self.upper)
                if model.exists():
                    about = model.stat()
                    os.chown(place, about.st_uid, about.st_gid)
                    place.chmod(about.st_mode & 0o7777)
        return place

    def hide(self, path: str | Path) -> Path:
        """The same, and nothing that this machine has there is seen."""
        place = self.mkdir(path)
        os.setxattr(place, "trusted.overlay.opaque", b"y")
        return place

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """A file of the host, instead of this machine's."""
        file = self.mkdir(os.path.dirname(path)) / os.path.basename(path)
        file.write_text(text)
        file.chmod(mode)


@dataclass(frozen=True)
class Contents:
    """What all hosts of a lab have on their disks."""

    addresses: dict[str, str]
    public_key: str
    peer_key: str
    peer_public_key: str
    known_hosts: str
    hidden: tuple[Path, ...]
    shown: tuple[Path, ...]
    shared: Path | None

    def fill(self, disk: Disk, name: str, host_key: str) -> None:
        """Write all of it for one host."""
        gone: list[Path] = []
        for path in (*map(Path, HIDDEN), *self.hidden):
            if not any(other in path.parents for other in gone):
                disk.hide(path)
                gone.append(path)
        self._write_etc(disk, name, host_key)
        _make_devices(disk.hide("/dev"))
        home = "/root"
        disk.mkdir(home).chmod(0o700)
        disk.mkdir(f"{home}/.ssh").chmod(0o700)
        # bash reads it for every command that comes over SSH.
        disk.write(f"{home}/.bashrc", "")
        disk.write(f"{home}/.ssh/authorized_keys", self.public_key + self.peer_public_key, 0o600)
        disk.write(f"{home}/.ssh/id_ed25519", self.peer_key, 0o600)
        disk.write(f"{home}/.ssh/id_ed25519.pub", self.peer_public_key)
        disk.write(f"{home}/.ssh/known_hosts", self.known_hosts)
        disk.fstab.write_text(self._fstab(disk))

    def _write_etc(self, disk: Disk, name: str, host_key: str) -> None:
        lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
        lines += [f"{address} {host}" for host, address in self.addresses.items()]
        disk.write("/etc/hosts", "\n".join(lines) + "\n")
        disk.write("/etc/hostname", f"{name}\n")
        disk.write("/etc/machine-id", f"{os.urandom(16).hex()}\n", 0o444)
        # No name server is to be reached, and each question to one would wait for 10 s.
        disk.write("/etc/resolv.conf", "# this lab has no name server\n")
        switch = Path("/etc/nsswitch.conf")
        services = switch.read_text() if switch.exists() else "hosts: files\n"
        disk.write("/etc/nsswitch.conf", re.sub(r"(?m)^hosts:.*$", "hosts: files", services))
        # Without PAM, sshd turns away an account whose password is locked with "!".
        shadow = Path("/etc/shadow").read_text()
        disk.write("/etc/shadow", re.sub(r"(?m)^root:[^:]*:", "root:*:", shadow), 0o640)
        disk.write("/etc/ssh/sshd_config", SSHD_CONFIG)
        disk.write("/etc/ssh/ssh_host_ed25519_key", host_key, 0o600)

    def _fstab(self, disk: Disk) -> str:
        root = machine.escape(disk.root)
        lines = [
            f"overlay {root} overlay lowerdir=/,upperdir=upper,workdir=work",
            f"tmpfs {root}/run tmpfs mode=755",
            f"sysfs {root}/sys sysfs ro",
            f"proc {root}/proc proc defaults",
            # What a host changes there, it must not change for the whole machine.
            f"{root}/proc/sys {root}/proc/sys none bind,ro",
            f"{root}/proc/sys/net {root}/proc/sys/net none bind",
            f"{machine.escape(disk.boot_id)} {root}/proc/sys/kernel/random/boot_id none bind,ro",
            f"devpts {root}/dev/pts devpts newinstance,gid=5,mode=620,ptmxmode=666",
            f"tmpfs {root}/dev/shm tmpfs mode=1777",
        ]
        if Path("/proc/sysrq-trigger").exists():
            lines.append(f"{root}/proc/sysrq-trigger {root}/proc/sysrq-trigger none bind,ro")
        for path in self.shown:
            disk.mkdir(path, follow=False)
            source = machine.escape(path)
            lines.append(f"{source} {root}{source} none bind,ro")
        if self.shared is not None:
            disk.mkdir("/srv/shared")
            lines.append(f"{machine.escape(self.shared)} {root}/srv/shared none bind")
        return "\n".join(lines) + "\n"


def _make_devices(folder: Path) -> None:
    """The devices that a container has, and GPUs; none of this machine's disks."""
    names = ["null", "zero", "full", "random", "urandom", "tty", "fuse"]
    for pattern in ("nvidia*", "nvidia-caps/*", "infiniband/*"):
        names += [str(path.relative_to("/dev")) for path in Path("/dev").glob(pattern)]
    for name in names:
        here, there = Path("/dev", name), folder / name
        if here.is_char_device():
            there.parent.mkdir(exist_ok=True)
            about = here.stat()
            os.mknod(there, about.st_mode, about.st_rdev)
            there.chmod(about.st_mode & 0o777)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        (folder / name).symlink_to(f"/proc/self/fd{target}")
    (folder / "ptmx").symlink_to("pts/ptmx")
    (folder / "pts").mkdir()
    (folder / "shm").mkdir()
