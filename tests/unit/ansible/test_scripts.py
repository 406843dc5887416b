"""Scripts, package lists and regular expressions of the roles, tried out."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment

from tests.unit.ansible.playbook import filled_in, role, tasks


def task(name: str, path: Path) -> dict[str, Any]:
    """The task that begins so."""
    (found,) = (task for task in tasks(path) if task["name"].startswith(name))
    return found


# ---------------------------------------------------------------- scripts that run on hosts


@pytest.fixture
def gpus_of(tmp_path: Path) -> Any:
    """The GPUs that the role finds: ``gpus_of({"0000:01:00.0": ("0x10de", "0x030200")})``."""
    script = task("Look for NVIDIA GPUs", role("cluster", "tasks", "main.yml"))
    text = script["ansible.builtin.shell"]

    def find(devices: dict[str, tuple[str | None, str | None]] | None) -> list[str]:
        folder = tmp_path / "de vices $HOME 'q'"
        if devices is not None:
            folder.mkdir()
        for name, ids in (devices or {}).items():
            (folder / name).mkdir()
            for part, value in zip(("vendor", "class"), ids, strict=True):
                if value is not None:
                    (folder / name / part).write_text(f"{value}\n")
        environment = Environment()
        environment.filters["quote"] = lambda value: "'" + value.replace("'", "'\\''") + "'"
        rendered = environment.from_string(text).render(cluster_pci_devices=str(folder))
        done = subprocess.run(["sh", "-c", rendered], capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return done.stdout.splitlines()

    return find


def test_cluster_role_finds_gpus_nvswitches_and_rdma_by_pci_ids(gpus_of: Any) -> None:
    found = gpus_of(
        {
            "0000:01:00.0": ("0x10de", "0x030000"),
            "0000:01:00.1": ("0x10de", "0x040300"),  # its audio
            "0000:07:00.0": ("0x10de", "0x068000"),  # an NVSwitch
            "0000:08:00.0": ("0x8086", "0x068000"),
            "0000:0a:00.0": ("0x10de", "0x030200"),
            "0000:0b:00.0": ("0x1002", "0x030000"),
            "0000:0c:00.0": ("0x15b3", "0x020700"),  # InfiniBand
            "0000:0c:00.1": ("0x15b3", "0x020000"),  # its Ethernet
            "0000:0c:00.2": ("0x8086", "0x020000"),
            "0000:0d:00.0": (None, "0x030200"),
            "0000:0e:00.0": ("0x10de", None),
            "0000:0f:00.0": ("", ""),
        }
    )
    assert found == [
        "gpu 0000:01:00.0",
        "nvswitch 0000:07:00.0",
        "gpu 0000:0a:00.0",
        "rdma 0000:0c:00.0",
        "rdma 0000:0c:00.1",
    ]


@pytest.mark.parametrize("devices", [None, {}])
def test_cluster_role_finds_no_gpus_on_empty_or_missing_pci_bus(gpus_of: Any, devices: Any) -> None:
    assert gpus_of(devices) == []


@pytest.mark.parametrize(
    ("there", "wanted", "check", "said", "after"),
    [
        ("4096\n", "4096", "", "same", "4096\n"),
        ("4096\t131072\t6291456\n", "4096 131072 6291456", "", "same", "4096\t131072\t6291456\n"),
        ("128\n", "4096", "", "changed", "4096\n"),
        ("4096\t1\t2\n", "4096 131072 67108864", "", "changed", "4096 131072 67108864\n"),
        # A check writes back what is there.
        ("4096\t1\t2\n", "4096 131072 67108864", "yes", "changed", "4096 1 2\n"),
        (None, "1", "", "not there", None),
        (None, "1", "yes", "not there", None),
    ],
)
def test_kernel_settings_are_compared_word_by_word(
    tmp_path: Path, there: str | None, wanted: str, check: str, said: str, after: str | None
) -> None:
    file = tmp_path / "a setting"
    if there is not None:
        file.write_text(there)
    assert set_kernel(file, wanted, check) == said
    assert (file.read_text() if file.exists() else None) == after


@pytest.mark.parametrize("check", ["", "yes"])
def test_unwritable_kernel_setting_is_reported_without_failure(check: str) -> None:
    # Not even root can write it.
    assert set_kernel(Path("/proc/sys/kernel/ostype"), "Minix", check) == "not writable"


def set_kernel(file: Path, value: str, check: str) -> str:
    step = task("Set the kernel's settings now", role("network", "tasks", "sysctl.yml"))
    assert set(step["environment"]) == {"FILE", "VALUE", "CHECK"}
    done = subprocess.run(
        ["sh", "-c", step["ansible.builtin.shell"]],
        env={"PATH": "/usr/bin:/bin", "FILE": str(file), "VALUE": value, "CHECK": check},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.strip()


# ---------------------------------------------------------------- packages by distribution


DEBIAN = {"distribution": "Debian", "architecture": "x86_64", "kernel": "6.1.0-41-amd64"}
UBUNTU = {"distribution": "Ubuntu", "architecture": "x86_64", "kernel": "6.8.0-90-generic"}
SYSTEMS: dict[str, dict[str, Any]] = {
    "bookworm": DEBIAN | {"distribution_major_version": "12"},
    "trixie": DEBIAN | {"distribution_major_version": "13", "kernel": "6.12.57+deb13-cloud-amd64"},
    "arm": DEBIAN
    | {
        "distribution_major_version": "13",
        "architecture": "aarch64",
        "kernel": "6.12.57-arm64-16k",
    },
    "self-built": DEBIAN | {"distribution_major_version": "13", "kernel": "6.18.44"},
    "jammy": UBUNTU | {"distribution_major_version": "22"},
    "noble": UBUNTU | {"distribution_major_version": "24"},
}


def test_docker_packages_follow_distribution_and_source() -> None:
    # What their archives had in November 2026; docker-compose of Debian 12 is 1.29, no plugin.
    names = ["docker_packages", "docker_compose_packages"]
    hosts: dict[str, dict[str, Any]] = {host: {"facts": facts} for host, facts in SYSTEMS.items()}
    hosts["own"] = {"facts": SYSTEMS["bookworm"], "docker_source": "Types: deb"}
    found = filled_in("docker", names, hosts)
    assert {host: tuple(found[host].values()) for host in found} == {
        "bookworm": (["docker.io"], []),
        "trixie": (["docker.io", "docker-cli"], ["docker-compose"]),
        "arm": (["docker.io", "docker-cli"], ["docker-compose"]),
        "self-built": (["docker.io", "docker-cli"], ["docker-compose"]),
        "jammy": (["docker.io"], ["docker-compose-v2"]),
        "noble": (["docker.io"], ["docker-compose-v2"]),
        "own": (["docker-ce", "docker-ce-cli", "containerd.io", "docker-compose-plugin"], []),
    }


HEADERS = {
    "bookworm": "linux-headers-amd64",
    "trixie": "linux-headers-cloud-amd64",
    "arm": "linux-headers-arm64-16k",
    "self-built": "linux-headers-amd64",
}
KERNELS = {
    "none": ("noble", [], []),  # and is refused
    "generic": ("noble", ["generic"], ["generic"]),
    "newer": ("jammy", ["generic", "generic-hwe-22.04"], ["generic", "generic-hwe-22.04"]),
    "cloud": ("noble", ["aws"], ["aws"]),
    "guest": ("noble", ["virtual", "generic"], ["generic"]),
}
IMAGES = [
    "linux-image-6.8.0-90-generic installed",
    "linux-image-unsigned-6.11.0-19-generic installed",
    "linux-image-gcp config-files",
    "linux-image-extra-virtual installed",
]


def test_driver_packages_follow_distribution_kernel_and_source() -> None:
    hosts: dict[str, dict[str, Any]] = {}
    for host in HEADERS:
        hosts[host] = {"facts": SYSTEMS[host]}
        hosts[f"{host}-source"] = {"facts": SYSTEMS[host], "nvidia_driver_source": "Types: deb"}
    for host, (system, kernels, _) in KERNELS.items():
        lines = [*IMAGES, *(f"linux-image-{kernel} installed" for kernel in kernels)]
        images = {"stdout_lines": lines}
        hosts[host] = {"facts": SYSTEMS[system], "nvidia_driver_images": images}
    names = ["nvidia_driver_packages", "nvidia_driver_pinning", "nvidia_driver_components"]
    found = {k: tuple(v.values()) for k, v in filled_in("nvidia_driver", names, hosts).items()}
    for host, headers in HEADERS.items():
        packages, pinning, components = found[host]
        assert (packages[0], packages[-1]) == (headers, "nvidia-smi")
        assert (pinning, components) == ([], ALL.split()[1:])
        nvidias = ["nvidia-kernel-open-dkms", "nvidia-persistenced", "nvidia-driver-cuda"]
        pinning = ["nvidia-driver-pinning-580"]
        assert found[f"{host}-source"] == ([headers, *nvidias], pinning, ["contrib"])
    for host, (_, _, kernels) in KERNELS.items():
        assert found[host][0] == [
            *(f"linux-modules-nvidia-580-server-open-{kernel}" for kernel in kernels),
            "nvidia-headless-no-dkms-580-server-open",
            "nvidia-utils-580-server",
        ]


@pytest.mark.parametrize(
    ("license", "dmabuf", "loads", "said"),
    [
        (None, "yes", True, "no driver"),
        ("Dual MIT/GPL", "yes", False, "dma-buf"),
        ("Dual MIT/GPL", "no", True, "nvidia-peermem"),
        ("NVIDIA", "yes", True, "nvidia-peermem"),
        ("NVIDIA", "yes", False, "neither"),
    ],
)
def test_rdma_role_detects_infiniband_path_to_gpu_memory(
    tmp_path: Path, license: str | None, dmabuf: str, loads: bool, said: str
) -> None:
    step = task("Look how InfiniBand gets at", role("rdma", "tasks", "install.yml"))
    modinfo = f"echo '{license}'" if license else "exit 1"
    scripts = {
        "modinfo": f'test "$*" = "-F license nvidia" && {modinfo}',
        "modprobe": f'test "$*" = "--dry-run nvidia-peermem" && exit {0 if loads else 1}',
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", "-c", step["ansible.builtin.shell"]],
        env={"PATH": str(tmp_path), "DMABUF": dmabuf, "CHECK": "--dry-run"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout.strip(), done.stderr) == (said, "")


# ---------------------------------------------------------------- regular expressions


def off_loopback(text: str, *names: str) -> str:
    """/etc/hosts as the role leaves it, before it adds its block."""
    path = role("hosts", "tasks", "main.yml")
    taken = task("Take the host's own names", path)["ansible.builtin.replace"]
    dropped = task("Drop loopback lines", path)["ansible.builtin.lineinfile"]["regexp"]
    for name in names:
        pattern = taken["regexp"].replace("{{ item | regex_escape }}", re.escape(name))
        text = re.sub(pattern, taken["replace"], text, flags=re.MULTILINE)
    return "".join(
        line for line in text.splitlines(keepends=True) if not re.search(dropped, line.rstrip())
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("127.0.1.1\th1\n", ""),
        ("127.0.1.1 h1.example.org h1\n", ""),
        ("127.0.1.1 h1 h1.example.org # the installer's\n", ""),
        ("127.0.0.1 localhost h1\n", "127.0.0.1 localhost\n"),
        ("127.0.0.1\tlocalhost  h1 other\n", "127.0.0.1\tlocalhost other\n"),
        ("::1 localhost ip6-localhost h1\n", "::1 localhost ip6-localhost\n"),
        ("127.0.0.1 localhost # not h1\n", "127.0.0.1 localhost # not h1\n"),
        ("# 127.0.1.1 h1\n", "# 127.0.1.1 h1\n"),
        ("127.0.1.1 h10 xh1 h1x h1.other\n", "127.0.1.1 h10 xh1 h1x h1.other\n"),
        ("10.0.0.1 h1\n::ffff:10.0.0.1 h1\n", "10.0.0.1 h1\n::ffff:10.0.0.1 h1\n"),
        ("", ""),
    ],
)
def test_hosts_role_removes_own_names_from_loopback_addresses(before: str, after: str) -> None:
    once = off_loopback(before, "h1", "h1.example.org")
    assert once == after
    assert off_loopback(once, "h1", "h1.example.org") == once


def with_components(text: str, form: str) -> str:
    """A list of apt's sources as the driver's role leaves it."""
    path = role("nvidia_driver", "tasks", "install.yml")
    (step,) = (t for t in tasks(path) if form in t["name"])
    replace = step["ansible.builtin.replace"]
    for component in ALL.split()[1:]:
        text = re.sub(
            replace["regexp"].replace("{{ item }}", component),
            replace["replace"].replace("{{ item }}", component),
            text,
            flags=re.MULTILINE,
        )
    return text


ALL = "main contrib non-free non-free-firmware"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("deb http://m/debian bookworm main\n", f"deb http://m/debian bookworm {ALL}\n"),
        ("deb [arch=amd64] http://m b main\n", f"deb [arch=amd64] http://m b {ALL}\n"),
        (
            "deb http://m b main non-free-firmware\n",
            "deb http://m b main non-free-firmware contrib non-free\n",
        ),
        (f"deb http://m b {ALL}\n", f"deb http://m b {ALL}\n"),
        ("deb http://m b main # mirror\n", f"deb http://m b {ALL}\n"),
        ("# deb http://m b main\n", "# deb http://m b main\n"),
        ("deb-src http://m b main\n", "deb-src http://m b main\n"),
        ("deb http://other ./\n", "deb http://other ./\n"),
        ("deb http://other b stable\n", "deb http://other b stable\n"),
        ("deb http://other b mainline\n", "deb http://other b mainline\n"),
    ],
)
def test_one_line_apt_sources_get_missing_components(before: str, after: str) -> None:
    assert with_components(before, "one-line") == after
    assert with_components(after, "one-line") == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Components: main\n", f"Components: {ALL}\n"),
        ("Components: main contrib \n", f"Components: {ALL}\n"),
        (f"Components: {ALL}\n", f"Components: {ALL}\n"),
        ("Components: stable\n", "Components: stable\n"),
        ("# Components: main\n", "# Components: main\n"),
    ],
)
def test_deb822_apt_sources_get_missing_components(before: str, after: str) -> None:
    head = "Types: deb\nURIs: http://m/debian\nSuites: bookworm\n"
    assert with_components(head + before, "stanzas") == head + after
    assert with_components(head + after, "stanzas") == head + after
