"""A lab: real SSH hosts on one machine, made of Linux namespaces. Root only.

    with Lab(Path("/tmp/lab"), hosts=2) as lab:
        lab.ssh("h0", "hostname")
        lab.fault("cut", "h1")

Each host has a network, processes, a host name, an SSH server with a key, and a disk of its own; on
its disk it sees this machine's programs and nothing of its users. ``python -m tests.lab`` is the
same from a shell. Several labs can exist at once: each has names and a network of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from clusterkit.errors import BadInput, ClusterkitError, Unavailable, pluralize
from tests.lab import faults, machine
from tests.lab.disk import Contents, Disk

PREFIX = "cklab"
MOST_HOSTS = 64
CHECKOUT = Path(__file__).resolve().parents[2]
BOOT_SECONDS = 60.0
"""How long a host may take to answer on its SSH port."""

_FILES = (
    *("hosts", "keys", "logs", "shared", "id_ed25519", "id_ed25519.pub", "known_hosts"),
    *("ssh_config", "inventory.yaml", "hostfile", "state.json"),
)

_T = TypeVar("_T")
_U = TypeVar("_U")


@dataclass(frozen=True)
class Host:
    """One host as its users know it."""

    name: str
    address: str
    port: int = 22


class Lab:
    """A lab in a folder: its keys, its inventory, its hosts.

    Args:
        dir: the folder; made by :meth:`up`, removed by :meth:`down` with all that is in it.
        hosts: how many, 1 to 64.
        shared: all hosts see one folder as /srv/shared, as if by NFS.
    """

    def __init__(self, dir: str | Path = ".lab", hosts: int = 2, *, shared: bool = False) -> None:
        self.dir = Path(os.path.abspath(dir))
        self.size = hosts
        self.with_shared = shared
        self._state: dict[str, Any] = {}

    @classmethod
    def open(cls, dir: str | Path = ".lab") -> Lab:
        """A lab that is up.

        Raises:
            BadInput: there is none in this folder.
        """
        lab = cls(dir)
        lab._read()
        if not lab.is_up():
            raise BadInput(
                f"{lab.dir}: there is no lab", hint="python -m tests.lab up 2, or make lab HOSTS=2"
            )
        return lab

    # ------------------------------------------------------------ what there is

    @property
    def name(self) -> str:
        """What its namespaces, link and cgroup are called; empty when there is no lab."""
        return str(self._state.get("name", ""))

    @property
    def hosts(self) -> tuple[Host, ...]:
        return tuple(Host(name, address) for name, address in self._addresses().items())

    @property
    def network(self) -> str:
        return str(self._state["network"])

    @property
    def gateway(self) -> str:
        """This machine's address in the lab."""
        return str(self._state["gateway"])

    @property
    def ssh_config(self) -> Path:
        return self.dir / "ssh_config"

    @property
    def inventory(self) -> Path:
        return self.dir / "inventory.yaml"

    @property
    def hostfile(self) -> Path:
        return self.dir / "hostfile"

    @property
    def known_hosts(self) -> Path:
        return self.dir / "known_hosts"

    @property
    def key(self) -> Path:
        return self.dir / "id_ed25519"

    @property
    def shared(self) -> Path:
        """This machine's way to /srv/shared of the hosts."""
        return self.dir / "shared"

    def host(self, name: str) -> Host:
        """A host by its name.

        Raises:
            BadInput: the lab has none of this name.
        """
        for host in self.hosts:
            if host.name == name:
                return host
        known = ", ".join(host.name for host in self.hosts)
        raise BadInput(f"the lab has no host {name!r}", hint=f"its hosts: {known}")

    def netns(self, host: str) -> str:
        """The name of a host's network namespace; of the switch's, for ``sw``."""
        return f"{self.name}-{host}"

    def cgroup(self, host: str = "") -> Path:
        return Path(self._state["cgroup"]) / host

    def disk(self, host: str) -> Disk:
        return Disk(self.dir / "hosts" / host)

    def log(self, host: str) -> Path:
        """What its sshd says."""
        return self.dir / "logs" / f"{host}.log"

    def running(self, host: str) -> bool:
        """Whether it has processes: it has not crashed."""
        return machine.says(self.cgroup(host), "populated 1")

    def pid(self, host: str) -> int:
        """The process id, on this machine, of a host's process 1.

        Raises:
            BadInput: the host is down.
        """
        with contextlib.suppress(FileNotFoundError):
            for pid in (self.cgroup(host) / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                        if line.startswith("NSpid:") and line.split()[2:] == ["1"]:
                            return int(pid)
        raise BadInput(f"host {host} is down", hint=f"python -m tests.lab fault boot {host}")

    def root(self, host: str) -> Path:
        """A running host's ``/`` as a folder of this machine, to read and to write."""
        return Path(f"/proc/{self.pid(host)}/root")

    def ssh(
        self, host: str, *command: str, timeout: float = 60.0, options: Iterable[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host with the OpenSSH client; never asks, never raises on failure."""
        argv = [machine.tool("ssh"), "-F", str(self.ssh_config), "-o", "BatchMode=yes"]
        argv += [*options, host, shlex.join(command)]
        return subprocess.run(
            argv, capture_output=True, text=True, timeout=timeout, check=False, stdin=-3
        )

    def is_up(self) -> bool:
        """Whether it was made whole and this machine has not been restarted since."""
        return bool(self._state.get("ready")) and self.netns("sw") in machine.namespaces(self.name)

    # ------------------------------------------------------------ up and down

    def up(self) -> bool:
        """Make it; False when it is there already.

        Raises:
            BadInput: a number of hosts that cannot be, the folder holds something else, or a lab
                of another size.
            Unavailable: this machine cannot have one.
        """
        if (problem := machine.problem()) is not None:
            raise problem
        if not 1 <= self.size <= MOST_HOSTS:
            raise BadInput(f"{self.size} hosts: a lab has 1 to {MOST_HOSTS}")
        if bad := re.search(r"""["'\\$%\n\r\t]""", str(self.dir)):
            raise BadInput(
                f"{str(self.dir)!r}: {bad[0]!r} means something to OpenSSH",
                hint="name another folder with --dir",
            )
        with self._locked(make=True):
            self._read()
            if self.is_up():
                if self.size != len(self.hosts):
                    raise BadInput(
                        f"{self.dir}: there is a lab of {pluralize(len(self.hosts), 'host')}",
                        hint="take it down first: python -m tests.lab down, or make lab-down",
                    )
                return False
            if self._state:
                self._remove(keep_folder=True)
            elif any(self.dir.iterdir()):
                raise BadInput(
                    f"{self.dir}: is not empty, and no lab", hint="name another folder with --dir"
                )
            try:
                self._make()
            except BaseException:
                self._remove()
                raise
        return True

    def down(self) -> bool:
        """Remove all of it, however little or much there is; False when there was nothing.

        Raises:
            Unavailable: not root.
            BadInput: the folder holds something that is no lab.
        """
        if not self.dir.exists():
            return False
        if (problem := machine.problem()) is not None:
            raise problem
        with self._locked() as there:
            self._read()
            if self._state:
                self._remove()
                return True
            if there and any(self.dir.iterdir()):
                raise BadInput(f"{self.dir}: is no lab, and is left as it is")
            if there:
                self.dir.rmdir()
        return False

    def __enter__(self) -> Lab:
        self.up()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()

    # ------------------------------------------------------------ faults

    def fault(self, name: str, host: str, value: str | float | None = None) -> None:
        """Break something of a host, or mend it; :data:`faults.FAULTS` lists what.

        Raises:
            BadInput: no such fault or host, a value that cannot be, the host is down.
            Unavailable: this machine lacks what the fault needs.
        """
        self.host(host)
        faults.carry_out(self, name, host, None if value is None else str(value))

    def repair(self, host: str | None = None) -> None:
        """Undo every fault, of one host or of all."""
        for each in [host] if host else [host.name for host in self.hosts]:
            self.fault("repair", each)

    def start(self, host: str) -> None:
        """Boot a host that is down; returns when its SSH server answers."""
        self._launch(host)
        self.wait_for_ssh(host)

    def wait_for_ssh(self, host: str, seconds: float = BOOT_SECONDS) -> None:
        """Return once a host's SSH server answers.

        Raises:
            ClusterkitError: it ended, or did not within ``seconds``; the message holds its log.
        """
        there = self.host(host)
        deadline = time.monotonic() + seconds
        while True:
            with (
                contextlib.suppress(OSError),
                socket.create_connection((there.address, there.port), timeout=2) as connection,
            ):
                if connection.recv(4) == b"SSH-":
                    return
            alive = self.running(host)
            if not alive or time.monotonic() > deadline:
                what = f"does not answer after {seconds:.0f} s" if alive else "ended at once"
                said = "".join(
                    f"\n  {line}" for line in self.log(host).read_text().split("\n")[-9:]
                )
                raise ClusterkitError(f"host {host} {what}; {self.log(host)} ends:{said}")
            time.sleep(0.005)

    # ------------------------------------------------------------ making it

    def _make(self) -> None:
        name = PREFIX + secrets.token_hex(3)
        names = [f"h{i}" for i in range(self.size)]
        self._state = {
            "name": name,
            "cgroup": str(machine.cgroups() / name),
            "made_netns_folder": not machine.NETNS.exists(),
            "ready": False,
        }
        self._write_state()
        self._make_network(names)
        try:
            for host in names:
                self.cgroup(host).mkdir(parents=True)
        except OSError as error:
            raise Unavailable(
                f"no cgroup can be made in {machine.cgroups()}: {error.strerror}",
                hint="in a container: start it with --privileged",
            ) from None
        (self.dir / "logs").mkdir()
        if self.with_shared:
            self.shared.mkdir(mode=0o1777)
        self._make_disks()
        _each(self._launch, names)
        for host in names:
            self.wait_for_ssh(host)
        self._write_files()
        self._state["ready"] = True
        self._write_state()

    def _make_network(self, names: list[str]) -> None:
        """A switch in a namespace of its own, and a cable from it to each host and to here.

        In this machine's own namespace, docker's firewall would drop what hosts send each other.
        """
        switch = self.netns("sw")
        spaces = [self.netns(host) for host in names]
        # One lab at a time chooses its network: a route is taken once its address is there.
        with machine.locked(Path("/run")):
            network = machine.free_network()
            gateway = str(network[1])
            addresses = {host: str(network[10 + i]) for i, host in enumerate(names)}
            self._state |= {"network": str(network), "gateway": gateway, "addresses": addresses}
            self._write_state()
            machine.ip(
                f"netns add {switch}",
                f"link add {self.name} type veth peer name uplink netns {switch}",
                f"address add {gateway}/{network.prefixlen} dev {self.name}",
                f"link set {self.name} up",
                *(f"netns add {space}" for space in spaces),
            )
        # An alias holds 255 characters; `status` finds the lab's folder by it.
        machine.call("ip", "link", "set", self.name, "alias", str(self.dir)[:255])
        machine.ip(
            "link add switch type bridge",
            "link set switch up",
            "link set uplink master switch up",
            *(
                f"link add {host} type veth peer name eth0 netns {space}\n"
                f"link set {host} master switch up"
                for host, space in zip(names, spaces, strict=True)
            ),
            netns=switch,
        )
        _each(
            lambda host: machine.ip(
                "link set lo up",
                f"address add {addresses[host]}/{network.prefixlen} dev eth0",
                "link set eth0 up",
                netns=self.netns(host),
            ),
            names,
        )

    def _make_disks(self) -> None:
        keys = self.dir / "keys"
        keys.mkdir(mode=0o700)
        hosts = list(self._addresses())
        pairs = {name: keys / name for name in hosts} | {"user": self.key, "peer": keys / "peer"}
        _each(lambda name: machine.new_key(pairs[name], name), list(pairs))
        self._write_known_hosts()
        contents = Contents(
            addresses=self._addresses(),
            public_key=pairs["user"].with_suffix(".pub").read_text(),
            peer_key=pairs["peer"].read_text(),
            peer_public_key=pairs["peer"].with_suffix(".pub").read_text(),
            known_hosts=self.known_hosts.read_text(),
            hidden=(CHECKOUT, self.dir),
            shown=tuple(_shown()),
            shared=self.shared if self.with_shared else None,
        )

        def make(name: str) -> None:
            disk = self.disk(name)
            disk.make()
            contents.fill(disk, name, pairs[name].read_text())

        _each(make, hosts)

    def _launch(self, host: str) -> None:
        """Start a host; nothing of this process's environment or terminal reaches it."""
        disk = self.disk(host)
        disk.before_boot()
        argv = ["sh", str(Path(__file__).with_name("host.sh")), "launch", str(self.cgroup(host))]
        argv += [self.netns(host), str(self.log(host)), host, str(disk.folder)]
        argv += [machine.tool("sshd")]
        environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        done = subprocess.run(
            argv, env=environment, start_new_session=True, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise ClusterkitError(f"host {host} does not start: {done.stderr.strip()}")

    def _write_known_hosts(self) -> None:
        lines = []
        for name, address in self._addresses().items():
            public = (self.dir / "keys" / f"{name}.pub").read_text().split()
            lines.append(f"{name},{address} {public[0]} {public[1]}\n")
        self.known_hosts.write_text("".join(lines))

    def _write_files(self) -> None:
        """What clients read: ssh_config, inventory.yaml, hostfile."""
        hosts = self.hosts
        self.ssh_config.write_text(
            "".join(
                f"Host {host.name} {host.address}\n"
                f"    HostName {host.address}\n"
                "    User root\n"
                f"    IdentityFile {_quoted(self.key)}\n"
                f"    UserKnownHostsFile {_quoted(self.known_hosts)}\n"
                "    IdentitiesOnly yes\n"
                for host in hosts
            )
        )
        known = shlex.quote(f"UserKnownHostsFile={_quoted(self.known_hosts)}")
        variables = {
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(self.key),
            "ansible_ssh_common_args": f"-o {known} -o IdentitiesOnly=yes",
            "ansible_python_interpreter": _system_python(),
            "clusterkit_python": str(python()),
        }
        lines = ["# The lab's hosts; goes with the lab.", "nodes:", "  hosts:"]
        for host in hosts:
            lines += [f"    {host.name}:", f"      ansible_host: {host.address}"]
        lines.append("  vars:")
        # A JSON string is a YAML string.
        lines += [f"    {key}: {json.dumps(value)}" for key, value in variables.items()]
        self.inventory.write_text("\n".join(lines) + "\n")
        self.hostfile.write_text("".join(f"{host.address} slots=1\n" for host in hosts))

    # ------------------------------------------------------------ unmaking it

    def _remove(self, *, keep_folder: bool = False) -> None:
        """All of it, in an order that no half-made lab can break."""
        _remove(self.name, self.cgroup())
        machine.unmount_below(self.dir)
        if self._state["made_netns_folder"]:
            _remove_netns_folder()
        for path in self.dir.iterdir():
            # Last of all: until then another `down` can finish the work.
            if path.name != "state.json":
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        (self.dir / "state.json").unlink()
        if not keep_folder:
            self.dir.rmdir()
        self._state = {}

    # ------------------------------------------------------------ state.json

    def _addresses(self) -> dict[str, str]:
        return dict(self._state.get("addresses", {}))

    def _read(self) -> None:
        try:
            self._state = json.loads((self.dir / "state.json").read_text())
        except FileNotFoundError:
            self._state = {}
        except ValueError as error:
            raise BadInput(
                f"{self.dir}/state.json: {error}",
                hint="find the lab with `python -m tests.lab status`, remove it with `down --name`",
            ) from None
        self.with_shared = self.with_shared or (bool(self._state) and self.shared.exists())

    def _write_state(self) -> None:
        fresh = self.dir / "state.json.new"
        fresh.write_text(json.dumps(self._state, indent=1) + "\n")
        fresh.replace(self.dir / "state.json")

    @contextlib.contextmanager
    def _locked(self, *, make: bool = False) -> Iterator[bool]:
        """Hold the folder's lock: one command at a time works on a lab.

        Gives False, and holds nothing, when there is no folder and none is to be made.

        Raises:
            BadInput: there cannot be one.
        """
        with contextlib.ExitStack() as stack:
            while True:
                try:
                    if make:
                        self.dir.mkdir(parents=True, exist_ok=True)
                    held = stack.enter_context(machine.locked(self.dir))
                    # Another command may have removed the folder while this one waited for it.
                    if os.path.samestat(os.fstat(held), self.dir.stat()):
                        break
                except FileNotFoundError:
                    if not make:
                        yield False
                        return
                except OSError as error:
                    raise BadInput(f"{self.dir}: {error.strerror}") from None
                stack.close()
            # Left by a command that was killed while it wrote.
            (self.dir / "state.json.new").unlink(missing_ok=True)
            yield True


def labs() -> dict[str, Path]:
    """Every lab on this machine, by its name, and the folder it was made in."""
    return {name: Path(folder) for name, folder in machine.links(PREFIX).items()}


def remove_by_name(name: str) -> Path:
    """Remove a lab whose ``state.json`` is lost; gives its folder, which goes if it can.

    Raises:
        BadInput: there is no such lab.
    """
    if (problem := machine.problem()) is not None:
        raise problem
    folder = labs().get(name)
    if folder is None:
        raise BadInput(
            f"there is no lab {name!r}", hint=f"there are: {', '.join(labs()) or 'none'}"
        )
    lab = Lab(folder)
    with lab._locked():
        lab._read()
        _remove(name, machine.cgroups() / name)
        # Since then another lab may have been made there.
        if lab.name in ("", name):
            machine.unmount_below(folder)
            for path in (folder / each for each in _FILES):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()
    return folder


def _remove(name: str, cgroup: Path) -> None:
    """A lab's processes, namespaces and link; idempotent."""
    machine.kill(cgroup)
    machine.remove_cgroup(cgroup)
    if name in machine.links(name):
        machine.call("ip", "link", "delete", name)
    if spaces := machine.namespaces(name):
        machine.ip(*(f"netns delete {space}" for space in spaces))


def _remove_netns_folder() -> None:
    """/run/netns, which the first ``ip netns add`` makes and mounts, if nobody else uses it."""
    with machine.locked(Path("/run")), contextlib.suppress(OSError, ClusterkitError):
        if not any(machine.NETNS.iterdir()):
            machine.call("umount", str(machine.NETNS))
            machine.NETNS.rmdir()


def python() -> Path:
    """The Python of this checkout, which hosts have too."""
    return CHECKOUT / ".venv" / "bin" / "python"


def _system_python() -> str:
    """The Python that a bare machine has for Ansible."""
    return "/usr/bin/python3" if Path("/usr/bin/python3").exists() else str(python())


def _shown() -> Iterator[Path]:
    """Folders of this machine that hosts see, to read: the checkout's Python and clusterkit.

    Bound and not only overlaid, so that what is edited here is there at once.
    """
    yield CHECKOUT / "clusterkit"
    if not python().exists():
        return
    venv = python().parent.parent
    yield venv
    for link in {_home_of(python()), python().resolve()}:
        prefix = link.parent.parent
        if prefix not in (Path("/usr"), Path("/usr/local"), Path("/"), venv):
            yield prefix


def _home_of(program: Path) -> Path:
    """The first place outside its folder that a chain of links leads to."""
    folder = program.parent
    while program.is_symlink() and program.parent == folder:
        program = folder / program.readlink()
    return program


def _quoted(path: Path) -> str:
    """A path as a value for OpenSSH."""
    return f'"{path}"' if " " in str(path) else str(path)


def _each(work: Callable[[_T], _U], items: list[_T]) -> list[_U]:
    """Do it for each, some at a time; the first error is raised once all are done."""
    with ThreadPoolExecutor(max_workers=8) as pool:
        return list(pool.map(work, items))
