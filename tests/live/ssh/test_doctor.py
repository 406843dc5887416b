"""The doctor on real hosts over SSH: every fault is named, with its host and its remedy."""

import re
from collections.abc import Callable

import pytest

from clusterkit import api
from clusterkit.doctor import Finding, Report
from tests.lab import CHECKOUT, Lab

pytestmark = pytest.mark.live
PYTHON = str(CHECKOUT / ".venv" / "bin" / "python")
QUIET = ("reachable", "host-key", "user", "system", "clock", "python", "packages",
         "interface", "port", "head-port", "mesh", "shm", "limits", "workdir")  # fmt: skip
"""Checks that are well on a lab, whatever else this machine does."""


@pytest.fixture
def examine(lab4: Lab, tmp_path) -> Callable[..., Report]:
    def call(*only: str, **entry: object) -> Report:
        entry = {"backend": "ssh", "inventory": str(lab4.inventory), "python": PYTHON,
                 "workdir": "/srv/clusterkit"} | entry  # fmt: skip
        lines = "".join(f"  {key}: {value}\n" for key, value in entry.items())
        (tmp_path / "clusters.yaml").write_text(f"lab:\n{lines}")
        return api.doctor(cluster="lab", clusters_file=tmp_path / "clusters.yaml", only=only)

    return call


def only_fault(report: Report, check: str, host: str) -> Finding:
    """The report's only fault."""
    bad = [finding for finding in report.findings if finding.level in ("warn", "fail")]
    assert [(finding.check, finding.host) for finding in bad] == [(check, host)], report.table()
    return bad[0]


def test_doctor_passes_on_healthy_hosts(examine):
    report = examine(*QUIET)
    assert report.ok
    assert {finding.level for finding in report.findings} == {"ok"}, report.table()


def test_doctor_reports_host_with_cut_link_as_unreachable(lab4, examine):
    lab4.fault("cut", "h1")
    found = only_fault(examine("reachable", "user", "mesh", connect_timeout=3), "reachable", "h1")
    assert found.level == "fail"
    assert "does not answer within 3 s" in found.cause


def test_doctor_checks_other_hosts_despite_frozen_host(lab4, examine):
    lab4.fault("freeze", "h3")
    report = examine("reachable", "user", connect_timeout=3)
    assert only_fault(report, "reachable", "h3").level == "fail"
    assert {f.host for f in report.findings if (f.check, f.level) == ("user", "ok")} == {
        "h0", "h1", "h2",
    }  # fmt: skip


def test_doctor_reports_crashed_host_refusing_connections(lab4, examine):
    lab4.fault("crash", "h2")
    assert "refuses connections" in only_fault(examine("reachable"), "reachable", "h2").cause


def test_doctor_reports_changed_host_key(lab4, examine):
    lab4.fault("new-host-key", "h3")
    found = only_fault(examine("reachable", "host-key"), "host-key", "h3")
    assert "its host key has changed" in found.cause
    assert "ssh-keygen -R" in found.remedy


def test_doctor_reports_clock_ten_minutes_ahead(lab4, examine):
    lab4.fault("clock", "h1", 600)
    found = only_fault(examine("clock"), "clock", "h1")
    assert found.level == "fail"
    assert "10 min ahead" in found.cause
    assert "chrony" in found.remedy


def test_doctor_warns_of_slow_link(lab4, examine):
    lab4.fault("slow", "h1", "2mbit")
    for _ in range(10):
        report = examine("mesh", "head-port")
        if report.worst != "ok":
            break  # otherwise hosts that were slow to answer, on a busy machine, did not measure
    found = only_fault(report, "mesh", "h1")
    assert found.level == "warn"
    assert re.match(r"its link is slow: \d\.\d Mbit/s from h0, \d\.\d Mbit/s to h2", found.cause)


def test_doctor_reports_different_torch_version(lab4, examine):
    lab4.fault("versions", "h2", "2.12.0")
    found = only_fault(examine("python", "packages"), "packages", "h2")
    assert found.level == "fail"
    assert found.cause.startswith("torch 2.12.0, but 2.13.0")
    assert found.remedy == f"{PYTHON} -m pip install torch==2.13.0"


def test_doctor_reports_full_disk(lab4, examine):
    lab4.fault("full-disk", "h1")
    found = only_fault(examine("disk"), "disk", "h1")
    assert found.level == "fail"
    assert "has 0 B left" in found.cause


def test_doctor_reports_folder_that_is_not_shared(lab4, examine):
    for host in lab4.hosts:
        assert lab4.ssh(host.name, "mkdir", "-p", "/srv/common").returncode == 0
    report = examine("shared", shared="/srv/common")
    assert {f.host: f.level for f in report.findings} == {
        "h0": "ok", "h1": "fail", "h2": "fail", "h3": "fail",
    }  # fmt: skip
    assert lab4.ssh("h0", "ls", "-A", "/srv/common").stdout == ""


@pytest.fixture
def on_host(lab4):
    """Run shell text on a host, and undo it after the test."""
    undo = []

    def run(host: str, text: str, afterwards: str) -> None:
        undo.append((host, afterwards))
        done = lab4.ssh(host, "sh", "-c", text)
        assert done.returncode == 0, done.stderr

    yield run
    for host, text in undo:
        assert lab4.ssh(host, "sh", "-c", text).returncode == 0


def test_doctor_reports_different_mtu(on_host, examine):
    on_host("h2", "ip link set eth0 mtu 9000", "ip link set eth0 mtu 1500")
    found = only_fault(examine("interface"), "interface", "h2")
    assert "MTU 9000, the others 1500" in found.cause


def test_doctor_reports_firewall_that_blocks_head_ports(lab4, on_host, examine):
    outside = lab4.host("h3").address
    rule = f"INPUT -p tcp -s {outside} --dport 20000:31999 -j DROP"
    on_host("h0", f"iptables -A {rule}", f"iptables -D {rule}")
    found = only_fault(examine("head-port", "mesh"), "head-port", "h3")
    assert found.cause.endswith("timed out")
    assert found.remedy == f"on h0: sudo ufw allow from {outside}"


def test_doctor_mesh_check_reports_firewall_that_opens_only_head_port(lab4, on_host, examine):
    rule = "INPUT -p tcp --syn --dport 32768: -j REJECT --reject-with tcp-reset"
    on_host("h2", f"iptables -A {rule}", f"iptables -D {rule}")
    report = examine("head-port", "mesh")
    assert {f.level for f in report.findings if f.check == "head-port"} == {"ok"}
    assert {f.host: f.level for f in report.findings if f.check == "mesh"} == {
        "h0": "fail", "h1": "fail", "h2": "ok", "h3": "fail",
    }  # fmt: skip
    assert len(report.faults()) == 1


def test_doctor_ignores_greeting_of_login_shell(on_host, examine):
    on_host("h1", "echo 'echo Welcome' >/root/.bashrc", "rm /root/.bashrc")
    report = examine("user", "python")
    assert report.worst == "ok", report.table()


def test_doctor_names_process_that_occupies_port(lab4, on_host, examine):
    code = (
        "import socket, time; s = socket.create_server(('', 29555)); "
        "open('/tmp/up', 'w'); time.sleep(99)"
    )
    on_host(
        "h0",
        f'{PYTHON} -c "{code}" >/dev/null 2>&1 & echo $! >/tmp/pid;'
        " while [ ! -e /tmp/up ]; do sleep 0.1; done",
        "kill $(cat /tmp/pid); rm /tmp/pid /tmp/up",
    )
    pid = lab4.ssh("h0", "cat", "/tmp/pid").stdout.strip()
    found = only_fault(examine("port", port=29555), "port", "h0")
    assert f"(process {pid} of root)" in found.cause
    assert found.remedy.startswith(f"kill {pid}")


def test_doctor_leaves_no_process_socket_or_file_on_hosts(lab4, examine):
    examine("mesh", "workdir", "user", port=29555)
    gone = (
        "for i in 1 2 3 4 5 6 7 8 9 10; do "
        "grep -sqal 'zlib[.]decompress' /proc/[0-9]*/cmdline || exit 0; sleep 0.2; done; exit 1"
    )
    for host in lab4.hosts:
        assert lab4.ssh(host.name, "sh", "-c", gone).returncode == 0
        assert ":29555" not in lab4.ssh(host.name, "ss", "-tan").stdout
        found = lab4.ssh(host.name, "find", "/srv", "/tmp", "/root", "-name", ".clusterkit-doctor*")
        assert found.stdout == ""
