"""The playbook on real hosts: it makes nodes of them, and a second run changes nothing.

The hosts of a lab have no way to a package archive or index. So they get one of their own: every
package that a role installs, made here, empty but for the commands that roles call. apt, dpkg and
pip are real.
"""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import io
import json
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from clusterkit import api
from tests import tested
from tests.lab import CHECKOUT, Lab, machine

# The first test that needs it pays for one to three runs of the whole playbook.
# A play took 9 minutes beside four other test processes on two cores.
pytestmark = [pytest.mark.live, pytest.mark.timeout(2400)]
# What the roles alone do and refuse; the rest is run with every change of clusterkit.
WHEN_CHANGED = tested.when_changed("ansible")

PLAYBOOK = CHECKOUT / "ansible" / "site.yml"
BIN = Path(sys.executable).parent
DEVICES = (
    ("0000:17:00.0", "0x10de", "0x030200"),
    ("0000:3d:00.0", "0x10de", "0x030200"),
    ("0000:3e:00.0", "0x10de", "0x068000"),
    ("0000:3f:00.0", "0x15b3", "0x020700"),
)
"""Of h1: two GPUs, an NVSwitch and InfiniBand."""
VENV = "/opt/clusterkit/venv"
NODES = ("h0", "h1")
PACKAGES = ["transformers", "PyYAML"]
"""What pip installs beside torch: few, as each wheel is copied to each host. One has capitals."""

SLURMD = """#!/bin/sh
test "$*" = -C || exit 2
echo "NodeName=$(hostname) CPUs=16 Boards=1 SocketsPerBoard=2 CoresPerSocket=4 ThreadsPerCore=2 \
RealMemory=64000"
echo "UpTime=0-00:00:01"
"""
NVIDIA_CTK = """#!/usr/bin/python3
import json, pathlib, sys
assert sys.argv[1:] == ["runtime", "configure", "--runtime=docker"], sys.argv
file = pathlib.Path("/etc/docker/daemon.json")
settings = json.loads(file.read_text()) if file.exists() else {}
settings.setdefault("runtimes", {})["nvidia"] = {"path": "nvidia-container-runtime"}
file.write_text(json.dumps(settings, indent=4))
"""
MUNGE = """#!/bin/sh
set -e
getent passwd munge >/dev/null || useradd --system --no-create-home munge
mkdir -p /etc/munge
test -e /etc/munge/munge.key || head -c 1024 /dev/urandom >/etc/munge/munge.key
chown -R munge: /etc/munge
chmod 0400 /etc/munge/munge.key
"""
PERSISTENCED = """[Unit]
StopWhenUnneeded=true
[Service]
Type=forking
ExecStart=/usr/bin/nvidia-persistenced --user nvidia-persistenced --no-persistence-mode --verbose
"""
"""As Ubuntu has it."""
PROGRAMS = {
    "slurmd": {"usr/sbin/slurmd": SLURMD, "etc/slurm/.keep": ""},
    "nvidia-container-toolkit": {"usr/bin/nvidia-ctk": NVIDIA_CTK},
    # No kernel module is loaded before the restart.
    "nvidia-driver-cuda": {"usr/bin/nvidia-smi": "#!/bin/sh\nexit 9\n"},
    "nvidia-persistenced": {"usr/lib/systemd/system/nvidia-persistenced.service": PERSISTENCED},
    "docker.io": {"usr/bin/dockerd": "#!/bin/sh\nexit 1\n"},
}
"""Files of packages that roles look for or call."""
NEW = "999:1"
"""Newer than any: others break with old ones."""
NVIDIAS = [
    ("nvidia-driver-cuda", "580.95.05-1"),
    ("nvidia-driver-pinning-580", "580-1"),
    ("nvidia-fabricmanager", "580.95.05-1"),
    ("nvidia-fabricmanager", "590.44.01-1"),
    ("nvidia-kernel-open-dkms", "580.95.05-1"),
    ("nvidia-persistenced", "580.95.05-1"),
]
"""Of NVIDIA's package source, where the newest fabric manager is not the driver's."""
OTHERS = [("nvidia-driver-old", "535.261.03-1"), ("nvidia-fabricmanager-580", "580.65.06-1")]
"""What the distribution has of them."""
SOURCE = "Types: deb\nURIs: file:/srv/archive\nSuites: {}\nComponents: main\nTrusted: yes\n"


def defaults(role: str) -> dict[str, Any]:
    text = (CHECKOUT / "ansible" / "roles" / role / "defaults" / "main.yml").read_text()
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def headers() -> str:
    """The package of kernel headers that the driver's role asks for on this machine."""
    processor = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    return f"linux-headers-{'cloud-' if 'cloud' in platform.release() else ''}{processor}"


def make_deb(folder: Path, name: str, version: str) -> Path:
    """A package that holds next to nothing."""
    tree = folder / name
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN" / "control").write_text(
        f"Package: {name}\nVersion: {version}\nArchitecture: all\n"
        "Maintainer: test <test@example.org>\nDescription: made for a test\n"
    )
    for path, text in PROGRAMS.get(name, {}).items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
        (tree / path).chmod(0o755)
    if name == "munge":
        (tree / "DEBIAN" / "postinst").write_text(MUNGE)
        (tree / "DEBIAN" / "postinst").chmod(0o755)
    file = folder / f"{name}_{version.replace(':', '-')}.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "--build", tree, file], check=True,
                   capture_output=True)  # fmt: skip
    shutil.rmtree(tree)
    return file


def make_archive(folder: Path) -> None:
    """An archive of all that roles install, as Debian's are made, and NVIDIA's beside it."""
    names = {"docker.io", "docker-cli", "docker-compose", "python3-packaging", headers()}
    names |= set(defaults("base")["base_packages"])
    for role in ("chrony", "docker", "nfs", "nvidia_container_toolkit", "rdma", "slurm"):
        for key, value in defaults(role).items():
            if key.endswith("_packages") and isinstance(value, list):
                names |= set(value)
    (folder / "pool").mkdir(parents=True)
    make_suite(folder, "stable", {"main": [*((n, NEW) for n in names), *OTHERS], "contrib": []})
    make_suite(folder, "nvidia", {"main": NVIDIAS})


def make_suite(folder: Path, name: str, components: dict[str, list[tuple[str, str]]]) -> None:
    suite = folder / "dists" / name
    sums = ""
    architecture = subprocess.run(["dpkg", "--print-architecture"], check=True, text=True,
                                  capture_output=True).stdout.strip()  # fmt: skip
    for part, packages in components.items():
        index = ""
        for package, version in sorted(packages):
            deb = make_deb(folder / "pool", package, version)
            control = subprocess.run(["dpkg-deb", "--field", deb], check=True, capture_output=True,
                                     text=True).stdout  # fmt: skip
            index += (
                f"{control.strip()}\nFilename: pool/{deb.name}\nSize: {deb.stat().st_size}\n"
                f"SHA256: {hashlib.sha256(deb.read_bytes()).hexdigest()}\n\n"
            )
        file = suite / part / f"binary-{architecture}" / "Packages.gz"
        file.parent.mkdir(parents=True)
        for path, data in (
            (file, gzip.compress(index.encode())),
            (file.with_suffix(""), index.encode()),
        ):
            path.write_bytes(data)
            sums += f" {hashlib.sha256(data).hexdigest()} {len(data)} {path.relative_to(suite)}\n"
    (suite / "Release").write_text(
        f"Suite: {name}\nCodename: {name}\nComponents: {' '.join(components)}\n"
        f"Architectures: {architecture}\nDate: Sat, 01 Jan 2022 00:00:00 UTC\nSHA256:\n{sums}"
    )


def make_wheel(folder: Path, name: str, version: str) -> None:
    """A package for pip that holds nothing."""
    stem = f"{name.lower()}-{version}"
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    kind = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {
        f"{name.lower()}/__init__.py": b"",
        f"{stem}.dist-info/METADATA": about.encode(),
        f"{stem}.dist-info/WHEEL": kind.encode(),
    }
    record = io.StringIO()
    rows = csv.writer(record)
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.writerow([path, f"sha256={digest}", len(data)])
    rows.writerow([f"{stem}.dist-info/RECORD", "", ""])
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for path, data in files.items():
            wheel.writestr(path, data)
        wheel.writestr(f"{stem}.dist-info/RECORD", record.getvalue())


def pinned() -> dict[str, str]:
    """The versions that the interpreter of the ranks must have, by package."""
    lines = (CHECKOUT / "constraints.txt").read_text().splitlines()
    versions = {k.lower(): v for k, v in (line.split("==") for line in lines if "==" in line)}
    names = [*defaults("python_env")["python_env_torch"], *PACKAGES]
    return {name: versions[name.lower()] for name in names}


def make_wheelhouse(folder: Path) -> None:
    """torch with a local version, as the index has it; a newer transformers that is not wanted."""
    folder.mkdir()
    for name, version in pinned().items():
        make_wheel(folder, name, f"{version}+cpu" if name == "torch" else version)
    make_wheel(folder, "transformers", "99.0")


# ---------------------------------------------------------------- running it


@dataclass(frozen=True)
class Play:
    """What a run of the playbook did and said."""

    code: int
    said: str

    @property
    def recap(self) -> dict[str, dict[str, int]]:
        """``ok``, ``changed``, ``failed`` ... of every host."""
        found = {}
        for host, counts in re.findall(r"^(\S+) +: (ok=.*)$", self.said, re.MULTILINE):
            pairs = (count.split("=") for count in counts.split())
            found[host] = {name: int(number) for name, number in pairs}
        return found

    def changes(self) -> dict[str, int]:
        return {host: counts["changed"] for host, counts in self.recap.items()}

    def flat(self) -> str:
        """What it said, without line breaks: Ansible breaks long messages."""
        return re.sub(r"\s+", " ", self.said)


def packages_changed_at() -> int:
    """When dpkg last worked on this machine."""
    dpkg = Path("/var/lib/dpkg")
    return max((dpkg / name).stat().st_mtime_ns for name in ("status", "updates"))


@dataclass(frozen=True)
class Site:
    """A lab and a way to run the playbook on it."""

    lab: Lab
    folder: Path
    variables: Path
    ansible_home: Path
    packages: int = field(default_factory=packages_changed_at)

    def play(self, *words: str, **variables: object) -> Play:
        argv = [str(BIN / "ansible-playbook"), "-i", str(self.lab.inventory), str(PLAYBOOK)]
        argv += ["-e", f"@{self.variables}", *words]
        if variables:
            argv += ["-e", json.dumps(variables)]
        done = subprocess.run(argv, cwd=self.folder, env=self.environment(), text=True,
                              stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)  # fmt: skip
        # The hosts see this machine's files and its list of packages, half-unpacked ones too.
        if done.returncode != 0 and packages_changed_at() != self.packages:
            pytest.fail(f"apt or dpkg ran on this machine meanwhile: run this again\n{done.stdout}")
        return Play(done.returncode, done.stdout)

    def environment(self) -> dict[str, str]:
        """For Ansible: nothing of the user's own settings, and the patience of a busy machine."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("ANSIBLE_")}
        return kept | {
            "ANSIBLE_HOME": str(self.ansible_home),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_SSH_ARGS": "-o ControlMaster=auto -o ControlPersist=60s",
            "ANSIBLE_TIMEOUT": "60",
            # Ansible starts in no locale but those of UTF-8.
            "LC_ALL": "C.UTF-8",
            "PWD": str(self.folder),
        }

    def hang_up(self) -> None:
        """End the connections that Ansible keeps open for its next run."""
        for socket in (self.ansible_home / "cp").glob("*"):
            subprocess.run(["ssh", "-o", f"ControlPath={socket}", "-O", "exit", "host"],
                           capture_output=True, timeout=60, check=True)  # fmt: skip

    def read(self, host: str, path: str) -> str:
        return (self.lab.root(host) / path.lstrip("/")).read_text()

    def written(self, host: str) -> dict[str, tuple[int, str]]:
        """What a host has written, mode and contents, in folders that the playbook writes to.

        Read from the disk of its own, not from all that it sees: most of that is this machine's,
        tens of thousands of files, and whoever else works here may be changing them.
        """
        disk = self.lab.disk(host).upper
        found = {}
        for top in ("etc", "root", "opt", "srv", "usr", "var/lib/dpkg"):
            for path in sorted((disk / top).rglob("*")):
                name = path.relative_to(disk)
                about = path.lstat()
                if stat.S_ISDIR(about.st_mode) or ".ansible" in name.parts:
                    continue
                if stat.S_ISREG(about.st_mode):
                    text = path.read_bytes()
                    theirs = Path("/") / name
                    # Opened to be written and left as it was, as dpkg's locks are.
                    if theirs.is_file() and theirs.read_bytes() == text:
                        continue
                    found[str(name)] = (about.st_mode, hashlib.sha256(text).hexdigest())
                else:
                    link = str(path.readlink()) if path.is_symlink() else ""
                    found[str(name)] = (about.st_mode, link)
        return found


@dataclass(frozen=True)
class Check:
    """A check of hosts that are not prepared yet, with what they held before and after."""

    play: Play
    before: dict[str, dict[str, tuple[int, str]]]
    after: dict[str, dict[str, tuple[int, str]]]


@dataclass(frozen=True)
class Story:
    """The playbook has run on two hosts, once or, where a test compares the two, twice."""

    site: Site
    first: Play
    second: Play | None

    @property
    def last(self) -> Play:
        return self.second or self.first


def skip_without_lab() -> None:
    """Skip, with a reason, where there can be no lab, or none that is Debian."""
    if (problem := machine.problem()) is not None:
        pytest.skip(f"no lab: {problem.message}; {problem.hint}")
    # Its hosts see the packages of this machine, and their archive here has neither of these.
    ready = [
        ("python3-apt", ["/usr/bin/python3", "-c", "import apt"]),
        ("python3-venv", ["/usr/bin/python3", "-c", "import ensurepip, venv"]),
    ]
    for package, argv in ready:
        there = shutil.which(argv[0]) and subprocess.run(argv, capture_output=True).returncode == 0
        if not there:
            pytest.skip(f"a host for Ansible needs {package}: apt-get install {package}")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two hosts as an installer leaves them: no sources but one, and Debian's 127.0.1.1."""
    skip_without_lab()
    folder = tmp_path_factory.mktemp("ansible")
    make_wheelhouse(folder / "wheels")
    archive = folder / "archive"
    make_archive(archive)
    variables = folder / "variables.yaml"
    variables.write_text(
        yaml.safe_dump(
            {
                "base_authorized_keys": ["ssh-ed25519 AAAAC3Nza someone@example.org"],
                "base_keys_between_hosts": True,
                "chrony_follow_first_host": True,
                "cluster_aliases": ["{{ inventory_hostname }}.cluster.example"],
                "cluster_containers": True,
                "cluster_pci_devices": "/srv/pci",
                "network_limits": {"nofile": 8192, "memlock": "unlimited"},
                "network_mtu": 1400,
                "network_sysctl": {
                    "net.ipv4.tcp_rmem": "4096 131072 33554432",
                    "kernel.ostype": "Minix",
                    "net.no.such": 1,
                },
                "nfs_enabled": True,
                "nvidia_driver_secure_boot": "/srv/secure-boot",
                "nvidia_driver_source": SOURCE.format("nvidia"),
                "python_env_packages": PACKAGES,
                "python_env_python": f"{VENV}/bin/python",
                "python_env_wheelhouse_source": str(folder / "wheels"),
                "slurm_enabled": True,
            }
        )
    )
    # A short one: the name of a socket may have 108 characters.
    # The lab not in pytest's folder, which pytest removes although a lab that was killed is there.
    place = tempfile.mkdtemp(prefix="clusterkit-lab-")
    with tempfile.TemporaryDirectory(prefix="cka") as home, Lab(place, hosts=2) as lab:
        for host in NODES:
            root = lab.root(host)
            sources = root / "etc/apt/sources.list.d"
            for old in [*sources.iterdir(), root / "etc/apt/sources.list"]:
                old.unlink(missing_ok=True)
            shutil.rmtree(root / "var/lib/apt/lists")
            # The role leaves an engine alone that is there, and this machine may have one.
            if (root / "usr/bin/dockerd").exists():
                (root / "usr/bin/dockerd").unlink()
                gone = lab.ssh(host, "dpkg", "--force-all", "--remove", "docker.io")
                assert gone.returncode == 0, gone.stderr
            shutil.copytree(archive, root / "srv/archive")
            (sources / "debian.sources").write_text(SOURCE.format("stable"))
            # One that has no plugins, whatever this machine has.
            docker = root / "usr/local/bin/docker"
            docker.write_text("#!/bin/sh\nexit 1\n")
            docker.chmod(0o755)
            updated = lab.ssh(host, "apt-get", "update")
            assert updated.returncode == 0, updated.stderr
            hosts = root / "etc/hosts"
            hosts.write_text(f"127.0.1.1\t{host}.site.example {host}\n{hosts.read_text()}")
            (root / "etc/docker").mkdir(exist_ok=True)
            (root / "etc/docker/daemon.json").write_text('{"mtu": 1400, "log-opts": {"tag": "x"}}')
        (lab.root("h1") / "etc/cloud/cloud.cfg.d").mkdir(parents=True)
        for name, vendor, kind in DEVICES:
            device = lab.root("h1") / "srv/pci" / name
            device.mkdir(parents=True)
            (device / "vendor").write_text(f"{vendor}\n")
            (device / "class").write_text(f"{kind}\n")
        (lab.root("h1") / "srv/secure-boot").write_bytes(b"\x06\0\0\0\x01")
        made = Site(lab, folder, variables, Path(home))
        yield made
        made.hang_up()


@pytest.fixture(scope="module")
def check(site: Site) -> Check:
    before = {host: site.written(host) for host in NODES}
    known_hosts = site.lab.known_hosts.read_text()
    play = site.play("--check", "--diff")
    after = {host: site.written(host) for host in NODES}
    assert site.lab.known_hosts.read_text() == known_hosts
    return Check(play, before, after)


@pytest.fixture(scope="module")
def story(site: Site, request: pytest.FixtureRequest) -> Story:
    wanted = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    if "check" in wanted:
        request.getfixturevalue("check")  # its test may come later, and it must come first
    first = site.play()
    assert first.code == 0, first.said
    return Story(site, first, site.play() if "second" in wanted else None)


@pytest.fixture
def second(story: Story) -> Play:
    """The second run of the playbook, directly after the first."""
    assert story.second is not None
    return story.second


@pytest.fixture
def read(story: Story) -> Callable[[str, str], str]:
    """A file of a host, after the runs."""
    return story.site.read


# ---------------------------------------------------------------- twice


@WHEN_CHANGED
def test_second_play_changes_nothing(story: Story, second: Play) -> None:
    assert all(count > 20 for count in story.first.changes().values()), story.first.said
    assert second.code == 0, second.said
    assert second.changes() == {"h0": 0, "h1": 0}, second.said
    assert all(counts["failed"] == 0 for counts in second.recap.values())


@WHEN_CHANGED
def test_check_mode_passes_and_writes_nothing(check: Check) -> None:
    assert check.play.code == 0, check.play.said
    assert all(count > 10 for count in check.play.changes().values())
    assert "+::ffff:" in check.play.said
    assert check.after == check.before


@WHEN_CHANGED
def test_ansible_lint_passes_production_profile(tmp_path: Path) -> None:
    # On a copy: it leaves a folder of its own beside what it reads.
    copy = tmp_path / "ansible"
    shutil.copytree(CHECKOUT / "ansible", copy)
    argv = [str(BIN / "ansible-lint"), "--offline", "--profile", "production", "--nocolor"]
    argv += ["site.yml", "lab.yml", "inventory.yaml"]
    environment = os.environ | {
        "ANSIBLE_HOME": str(tmp_path / "home"),
        "LC_ALL": "C.UTF-8",
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }
    done = subprocess.run(argv, cwd=copy, env=environment, capture_output=True, text=True,
                          timeout=600, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Profile 'production' was required, and it passed" in done.stdout + done.stderr


# ---------------------------------------------------------------- what the hosts hold then


@pytest.mark.parametrize("host", NODES)
def test_host_names_resolve_to_their_address_instead_of_loopback(story: Story, host: str) -> None:
    lab = story.site.lab
    for other in lab.hosts:
        for name in (other.name, f"{other.name}.cluster.example"):
            found = lab.ssh(host, "getent", "ahosts", name).stdout
            assert {line.split()[0] for line in found.splitlines()} <= {
                other.address,
                f"::ffff:{other.address}",
            }
        assert lab.ssh(host, "getent", "hosts", f"::ffff:{other.address}").stdout.split()[1] == (
            other.name
        )
    assert "127.0.1.1" not in story.site.read(host, "/etc/hosts")
    # Kept from the installer's line.
    assert f"{host}.site.example" in story.site.read(host, "/etc/hosts")


def test_cloud_init_is_configured_to_leave_hosts_file_alone(
    read: Callable[[str, str], str],
) -> None:
    assert "manage_etc_hosts: false" in read("h1", "/etc/cloud/cloud.cfg.d/99-clusterkit.cfg")
    with pytest.raises(FileNotFoundError):
        read("h0", "/etc/cloud/cloud.cfg.d/99-clusterkit.cfg")


def test_written_known_hosts_suffice_for_strict_host_key_checking(
    story: Story, tmp_path: Path
) -> None:
    lab = story.site.lab
    block = re.search(
        r"# BEGIN clusterkit nodes\n(.*)# END", lab.known_hosts.read_text(), re.DOTALL
    )
    assert block
    only = tmp_path / "known_hosts"
    only.write_text(block[1])
    strict = ["-o", f"UserKnownHostsFile={only}", "-o", "StrictHostKeyChecking=yes"]
    for host in lab.hosts:
        argv = [
            "ssh",
            "-F",
            "none",
            "-i",
            str(lab.key),
            *strict,
            f"root@{host.address}",
            "hostname",
        ]
        assert subprocess.check_output(argv, text=True).strip() == host.name


def test_hosts_reach_each_other_over_ssh(story: Story) -> None:
    lab = story.site.lab
    one, two = lab.hosts
    for here, there in ((one, two), (two, one)):
        for target in (there.name, f"{there.name}.cluster.example", there.address):
            done = lab.ssh(
                here.name, "ssh", "-o", "BatchMode=yes", "-o", "UserKnownHostsFile=/dev/null",
                "-o", "StrictHostKeyChecking=yes", target, "hostname",
            )  # fmt: skip
            assert done.stdout.strip() == there.name, done.stderr


def test_authorized_keys_are_added_to_existing_keys(story: Story) -> None:
    for host in NODES:
        keys = story.site.read(host, "/root/.ssh/authorized_keys")
        assert "someone@example.org" in keys
        assert story.site.lab.key.with_suffix(".pub").read_text().split()[1] in keys
        assert (story.site.lab.root(host) / "root/clusterkit").is_dir()


def test_network_settings_are_written_and_applied(story: Story) -> None:
    lab = story.site.lab
    for host in NODES:
        assert story.site.read(host, "/etc/nccl.conf").splitlines()[1:] == [
            "NCCL_SOCKET_IFNAME==eth0"
        ]
        assert "GLOO_SOCKET_IFNAME=eth0" in story.site.read(host, "/etc/environment")
        set_to = lab.ssh(host, "cat", "/proc/sys/net/ipv4/tcp_rmem").stdout.split()
        assert set_to == ["4096", "131072", "33554432"]
        assert "mtu 1400" in lab.ssh(host, "ip", "link", "show", "eth0").stdout


def test_settings_that_host_cannot_apply_are_reported_and_skipped(story: Story) -> None:
    for host in NODES:
        assert f"{host} keeps its own value of kernel.ostype, net.no.such" in story.last.flat()
        assert f"{host} has no systemd" in story.last.flat()
        limits = story.site.read(host, "/etc/security/limits.d/90-clusterkit.conf")
        assert "* - nofile 8192\nroot - nofile 8192\n" in limits
        allowed = story.site.lab.ssh(host, "prlimit", "--memlock=unlimited:unlimited", "true")
        assert ("memlock" in limits) == (allowed.returncode == 0)


def test_chrony_of_other_hosts_follows_first_host(story: Story) -> None:
    first, second = (story.site.read(h, "/etc/chrony/conf.d/clusterkit.conf") for h in NODES)
    one, two = story.site.lab.hosts
    assert f"allow {two.address}" in first
    assert "local stratum 10" in first
    assert "server" not in first
    assert f"server {one.address} iburst" in second
    assert "local" not in second


def test_gpu_roles_act_only_on_host_with_gpu(story: Story) -> None:
    assert "h0: no NVIDIA GPU" in story.first.flat()
    assert "h1: no NVIDIA GPU" not in story.first.flat()
    assert "h1 must be restarted before its GPUs can be used" in story.last.flat()
    for host, there in (("h0", False), ("h1", True)):
        assert (story.site.lab.root(host) / "usr/bin/nvidia-ctk").exists() is there
        sources = story.site.read(host, "/etc/apt/sources.list.d/debian.sources")
        assert ("Components: main contrib\n" in sources) is there


def installed(story: Story, host: str) -> dict[str, str]:
    """The packages of a host, with their versions."""
    form = "${Package} ${Version} ${db:Status-Status}\\n"
    listed = story.site.lab.ssh(host, "dpkg-query", "--show", "--showformat", form)
    assert listed.returncode == 0, listed.stderr
    rows = (line.split() for line in listed.stdout.splitlines())
    return {row[0]: row[1] for row in rows if row[-1] == "installed"}


def test_nvidia_driver_is_installed_with_fabric_manager_of_same_version(story: Story) -> None:
    packages = installed(story, "h1")
    assert (
        packages.items()
        >= {
            "nvidia-driver-cuda": "580.95.05-1",
            "nvidia-driver-pinning-580": "580-1",
            "nvidia-fabricmanager": "580.95.05-1",
            headers(): NEW,
        }.items()
    )
    assert not [name for name in installed(story, "h0") if name.startswith("nvidia")]
    assert "h1 has Secure Boot on" in story.first.flat()
    assert "h0 has Secure Boot on" not in story.first.flat()


def test_persistence_daemon_keeps_persistence_mode_on(story: Story) -> None:
    units = story.site.lab.root("h1") / "etc/systemd/system"
    lines = (units / "nvidia-persistenced.service.d/clusterkit.conf").read_text().splitlines()
    start = "ExecStart=/usr/bin/nvidia-persistenced --user nvidia-persistenced --verbose"
    assert lines[lines.index("ExecStart=") + 1] == start
    assert "StopWhenUnneeded=no" in lines
    wanted = units / "multi-user.target.wants/nvidia-persistenced.service"
    assert wanted.readlink() == Path("/lib/systemd/system/nvidia-persistenced.service")


def test_rdma_packages_are_installed_only_on_host_with_infiniband(story: Story) -> None:
    packages = defaults("rdma")["rdma_packages"]
    assert all(installed(story, "h1").get(name) for name in packages)
    assert "infiniband-diags" not in installed(story, "h0")


def test_compose_plugin_is_installed_or_reported_missing(story: Story) -> None:
    if platform.freedesktop_os_release().get("VERSION_ID") == "12":
        assert "h0 has no compose plugin of 2.20 or newer, and Debian 12 packages none" in (
            story.first.flat()
        )
    else:
        assert "docker-compose" in installed(story, "h0")


def test_docker_settings_are_merged_into_existing_daemon_json(
    read: Callable[[str, str], str],
) -> None:
    ours = defaults("docker")["docker_daemon"]
    for host in NODES:
        settings = json.loads(read(host, "/etc/docker/daemon.json"))
        assert settings["mtu"] == 1400
        assert settings["log-opts"] == {"tag": "x"} | ours["log-opts"]
        assert ("nvidia" in settings.get("runtimes", {})) == (host == "h1")


def test_first_host_exports_nfs_folder_and_others_list_mount_in_fstab(story: Story) -> None:
    one, two = story.site.lab.hosts
    exports = story.site.read("h0", "/etc/exports.d/clusterkit.exports").splitlines()[1:]
    assert exports == [f'"/srv/clusterkit" {two.address}(rw,sync,no_subtree_check,root_squash)']
    mounts = story.site.read("h1", "/etc/fstab").splitlines()
    assert [line for line in mounts if "/srv/clusterkit" in line] == [
        f"{one.address}:/srv/clusterkit /srv/clusterkit nfs rw,hard,vers=4.2,noatime,_netdev 0 0"
    ]
    assert "/srv/clusterkit is in fstab and not mounted" in story.last.flat()


def test_slurm_hosts_share_munge_key_and_configuration(story: Story) -> None:
    first, second = (story.site.read(host, "/etc/slurm/slurm.conf") for host in NODES)
    one, two = story.site.lab.hosts
    assert first == second
    assert f"SlurmctldHost=h0({one.address})" in first
    # The machine's own slurmd, where Slurm is installed, says what there is.
    told = dict(re.findall(r"(\w+)=(\S+)", story.site.lab.ssh("h0", "slurmd", "-C").stdout))
    names = ("CPUs", "Boards", "SocketsPerBoard", "CoresPerSocket", "ThreadsPerCore")
    hardware = " ".join(f"{name}={told[name]}" for name in names)
    hardware += f" RealMemory={int(told['RealMemory']) * 95 // 100}"
    assert f"NodeName=h0 NodeAddr={one.address} {hardware}\n" in first
    assert f"NodeName=h1 NodeAddr={two.address} {hardware} Gres=gpu:2\n" in first
    assert story.site.read("h0", "/etc/slurm/gres.conf").splitlines()[1:] == [
        "NodeName=h1 Name=gpu File=/dev/nvidia[0-1]"
    ]
    keys = {(story.site.lab.root(h) / "etc/munge/munge.key").read_bytes() for h in NODES}
    assert [len(key) >= 128 for key in keys] == [True]  # as its package made it
    for host in NODES:
        owner = story.site.lab.ssh(host, "stat", "-c", "%U %a", "/etc/munge/munge.key").stdout
        assert owner in ("munge 400\n", "munge 600\n")
    assert base64.b64encode(keys.pop()).decode()[:40] not in story.first.said


def test_python_environment_has_pinned_versions_on_every_host(story: Story) -> None:
    wanted = pinned() | {"torch": f"{pinned()['torch']}+cpu"}
    for host in NODES:
        listed = story.site.lab.ssh(host, f"{VENV}/bin/pip", "list", "--format=json").stdout
        found = {row["name"]: row["version"] for row in json.loads(listed)}
        assert {name: found.get(name) for name in wanted} == wanted


# ---------------------------------------------------------------- what it refuses


@pytest.fixture(scope="module")
def later(story: Story) -> dict[str, Play]:
    """Plays on hosts that are prepared. None changes anything, so they run side by side."""
    first, second = (story.site.lab.root(host) / "srv" for host in NODES)
    report = {"python": "3.11.2"} | pinned()
    for root, torch in ((first, "2.13.0"), (second, "2.12.1")):
        python = root / "theirs/bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/bin/sh\necho '{json.dumps(report | {'torch': torch})}'\n")
        python.chmod(0o755)
    (second / "python3.9").write_text("#!/bin/sh\necho 'Python 3.9.2' >&2\nexit 1\n")
    (second / "python3.9").chmod(0o755)
    plays: dict[str, tuple[str, dict[str, object]]] = {
        "one host": ("--limit h0 --tags hosts,known_hosts", {}),
        "one role": ("--limit h1 --tags docker", {}),
        "package": ("--limit h1 --tags base", {"base_packages": ["no-such-package"]}),
        "toolkit": (
            "--tags nvidia_container_toolkit",
            {"nvidia_container_toolkit_packages": ["no-such-toolkit"]},
        ),
        "no containers": ("--limit h1 --tags docker,nvidia", {"cluster_containers": False}),
        "old driver": (
            "--limit h1 --tags nvidia_driver",
            {
                "nvidia_driver_components": [],
                "nvidia_driver_packages": ["nvidia-driver-old"],
                "nvidia_driver_source": "",
            },
        ),
        "fabric": (
            "--limit h1 --tags nvidia_driver",
            {"nvidia_driver_fabric_packages": ["nvidia-fabricmanager-580"]},
        ),
        "address": ("--tags hosts", {"clusterkit_address": story.site.lab.hosts[0].address}),
        "names": ("--tags hosts", {"cluster_aliases": ["node"]}),
        "theirs": ("--tags python_env", {"python_env_python": "/srv/theirs/bin/python"}),
        "old python": (
            "--limit h1 --tags python_env",
            {
                "python_env_base_python": "/srv/python3.9",
                "python_env_python": "/srv/new/bin/python",
            },
        ),
    }
    with ThreadPoolExecutor(max_workers=3) as pool:
        started = {
            name: pool.submit(story.site.play, *words.split(), **variables)
            for name, (words, variables) in plays.items()
        }
        return {name: play.result() for name, play in started.items()}


@WHEN_CHANGED
def test_play_names_host_left_out_by_limit(later: dict[str, Play]) -> None:
    play = later["one host"]
    assert play.code == 2
    assert "left out by --limit: h1." in play.flat()
    assert play.changes() == {"h0": 0}


@WHEN_CHANGED
def test_single_role_runs_alone_on_one_host(later: dict[str, Play]) -> None:
    play = later["one role"]
    assert play.code == 0, play.said
    assert play.changes() == {"h1": 0}
    assert "TASK [docker : " in play.said
    assert "TASK [base : Make the user]" not in play.said


@WHEN_CHANGED
def test_base_role_names_package_that_apt_cannot_install(later: dict[str, Play]) -> None:
    play = later["package"]
    assert play.code == 2
    assert "h1 needs no-such-package, and apt cannot install them" in play.flat()


@WHEN_CHANGED
def test_container_toolkit_without_package_source_is_refused(later: dict[str, Play]) -> None:
    play = later["toolkit"]
    assert play.code == 2
    assert "apt on h1 knows no no-such-toolkit. Set nvidia_container_toolkit_source" in play.flat()
    assert play.recap["h0"]["failed"] == 0


@WHEN_CHANGED
def test_gpu_host_without_containers_needs_no_container_toolkit(later: dict[str, Play]) -> None:
    play = later["no containers"]
    assert play.code == 0, play.said
    assert play.flat().count("h1: containers are not wanted (cluster_containers)") == 2
    assert play.changes() == {"h1": 0}


@WHEN_CHANGED
def test_too_old_driver_is_refused_before_installation(
    story: Story, later: dict[str, Play]
) -> None:
    play = later["old driver"]
    assert play.code == 2
    assert (
        "h1: apt knows driver 535.261.03 (nvidia-driver-old), and torch's CUDA needs 580 "
        "(nvidia_driver_minimum). Set nvidia_driver_source"
    ) in play.flat()
    assert play.changes() == {"h1": 0}
    assert "nvidia-driver-old" not in installed(story, "h1")


@WHEN_CHANGED
def test_fabric_manager_of_other_driver_version_is_refused(later: dict[str, Play]) -> None:
    play = later["fabric"]
    assert play.code == 2
    assert "h1 has NVSwitches and driver 580.95.05: without the fabric manager" in play.flat()
    assert "apt knows nvidia-fabricmanager-580=580.65.06-1." in play.flat()
    assert play.changes() == {"h1": 0}


@WHEN_CHANGED
def test_address_without_interface_is_refused(story: Story, later: dict[str, Play]) -> None:
    play = later["address"]
    assert play.code == 2
    address = story.site.lab.hosts[0].address
    assert f"h1: no interface has the address {address}" in play.flat()
    assert play.recap["h1"]["changed"] == 0


@WHEN_CHANGED
def test_two_hosts_with_same_name_are_refused(later: dict[str, Play]) -> None:
    play = later["names"]
    assert play.code == 2
    assert "h0 has the address or a name of h1" in play.flat()
    assert set(play.changes().values()) == {0}


@WHEN_CHANGED
def test_foreign_python_environment_is_compared_and_left_unchanged(
    later: dict[str, Play],
) -> None:
    play = later["theirs"]
    assert play.code == 2
    assert "h0: /srv/theirs/bin/python was not made here and is left alone." in play.flat()
    assert "h1 has other versions than h0: {'torch': '2.12.1'} against {'torch': '2.13.0'}" in (
        play.flat()
    )
    assert set(play.changes().values()) == {0}


@WHEN_CHANGED
def test_too_old_python_is_refused(story: Story, later: dict[str, Play]) -> None:
    play = later["old python"]
    assert play.code == 2
    assert "h1: /srv/python3.9 is not Python 3.11 or newer (Python 3.9.2)" in play.flat()
    assert not (story.site.lab.root("h1") / "srv/new").exists()


def test_failed_preflight_fails_play(story: Story) -> None:
    play = story.site.play("--tags", "preflight", clusterkit_cluster="no-such-cluster")
    assert play.code == 2
    assert "doctor --cluster no-such-cluster: exit code 125" in play.flat()
    # What doctor said stands above the refusal.
    assert "no-such-cluster" in play.said.split("Refuse a cluster that is not fit")[0]


# ---------------------------------------------------------------- what it is all for


@pytest.fixture
def no_gpus_in_h1(story: Story) -> Iterator[None]:
    """The GPUs that h1 pretends to have never come up, and a preflight says so: out with them."""
    there = story.site.lab.root("h1") / "usr/bin/nvidia-smi"
    aside = there.rename(there.with_name("nvidia-smi.aside"))
    yield
    aside.rename(there)


@pytest.mark.usefixtures("no_gpus_in_h1")
def test_prepared_hosts_pass_preflight_and_run_torchrun_job(
    story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = story.site.folder / "clusters.yaml"
    clusters.write_text(
        f"lab: {{backend: ssh, inventory: {story.site.lab.inventory}, group: nodes}}\n"
    )
    play = story.site.play("--tags", "preflight", clusterkit_cluster="lab")
    assert play.code == 0, play.said
    assert "lab: 2 hosts" in play.said
    assert re.search(r"reachable +ok", play.said)
    project = tmp_path / "project"
    project.mkdir()
    shutil.copy(CHECKOUT / "tests/live/programs/beat.py", project)
    (project / "job.yaml").write_text(
        "program: beat.py\nargs: ['3']\nlauncher: torchrun\nnodes: 2\ngpus_per_node: 1\n"
    )
    monkeypatch.chdir(project)
    monkeypatch.setenv("CLUSTERKIT_CLUSTERS", str(clusters))
    run = api.submit("job.yaml", cluster="lab")
    try:
        assert run.wait(120).state.name == "SUCCEEDED", list(run.logs())
        # Each rank adds 1.
        beats = [line.text for line in run.logs() if line.text.startswith("beat")]
        assert beats == ["beat 0 2", "beat 1 2", "beat 2 2"]
    finally:
        run.cancel()


@WHEN_CHANGED
def test_lab_variables_file_suffices_for_play_on_lab(tmp_path: Path) -> None:
    skip_without_lab()
    place = tempfile.mkdtemp(prefix="clusterkit-lab-")
    with tempfile.TemporaryDirectory(prefix="cka") as home, Lab(place, hosts=1) as lab:
        fresh = Site(lab, tmp_path, CHECKOUT / "ansible" / "lab.yml", Path(home))
        # The roles that the file sets something for, and what has to be there for them.
        play = fresh.play("--tags", "base,hosts,chrony,docker,nvidia,python_env")
        fresh.hang_up()
        assert play.code == 0, play.said
        assert "was not made here and is left alone" in play.flat()
        assert "# BEGIN clusterkit" in fresh.read("h0", "/etc/hosts")
