"""The lab itself: its hosts are hosts, its faults happen, and nothing of it stays."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from clusterkit.errors import BadInput, ClusterkitError
from tests import tested
from tests.lab import CHECKOUT, Lab, faults, labs, machine
from tests.lab import python as lab_python
from tests.lab.__main__ import main
from tests.lab.fixtures import made

pytestmark = [pytest.mark.live, tested.when_changed("lab")]

SOON = 60.0
LAB = [sys.executable, "-m", "tests.lab"]
Session = Callable[[Lab, str, str], "subprocess.Popen[str]"]
IMPATIENT = ("-o", "ConnectTimeout=2")


@pytest.fixture(scope="module")
def session_lab() -> Iterator[Lab]:
    """Hosts that no run has been on."""
    yield from made(2)


@pytest.fixture(autouse=True)
def able() -> None:
    if (problem := machine.problem()) is not None:
        pytest.skip(f"no lab: {problem.message}; {problem.hint}")


def eventually(what: str, true: Callable[[], object]) -> None:
    """Return once it is so."""
    deadline = time.monotonic() + SOON
    while not true():
        assert time.monotonic() < deadline, f"not within {SOON:.0f} s: {what}"
        time.sleep(0.01)


def said(lab: Lab, host: str, *command: str) -> str:
    """The stdout of a command that succeeds on a host."""
    done = lab.ssh(host, *command)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def session() -> Iterator[Session]:
    """Shell commands that run on a host while the test goes on."""
    with contextlib.ExitStack() as stack:

        def start(lab: Lab, host: str, command: str) -> subprocess.Popen[str]:
            argv = ["ssh", "-F", str(lab.ssh_config), "-o", "BatchMode=yes", host, command]
            pipe = subprocess.PIPE
            process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def send(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{text}\n")
    process.stdin.flush()


class Traces:
    """What a lab has put on this machine; looked at again when it should be gone."""

    def __init__(self, lab: Lab) -> None:
        self.name, self.paths = lab.name, [lab.dir, lab.cgroup()]

    def left(self) -> list[str]:
        """Everything that is still there."""
        found = [f"namespace {name}" for name in machine.namespaces(self.name)]
        found += [f"link {name}" for name in machine.links(self.name)]
        for path in self.paths:
            found += [f"mount {point}" for point in machine.mounts_below(path)]
            found += [str(path)] if path.exists() else []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                # Of the dead, init takes a moment to read the exit code.
                alive = "\nState:\tZ" not in (process / "status").read_text()
                if alive and f"/{self.name}/" in (process / "cgroup").read_text():
                    found.append(f"process {process.name}")
        return found

    def assert_gone(self) -> None:
        assert self.left() == []


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Lab]:
    """A lab of one host, not made yet, that a test may treat as it likes."""
    lab = Lab(tmp_path / "own", 1)
    yield lab
    lab.down()


# ---------------------------------------------------------------- what a host is


def test_each_host_has_own_name_processes_and_disk(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "of-this-machine").touch()
    assert [said(lab, host.name, "hostname") for host in lab.hosts] == ["h0", "h1"]
    assert said(lab, "h0", "cat", "/etc/hostname", "/proc/1/comm").split() == ["h0", "sshd"]
    processes = said(lab, "h0", "sh", "-c", "echo /proc/[0-9]*").split()
    assert len(processes) < 10
    assert lab.ssh("h0", "ls", str(tmp_path)).returncode == 2
    said(lab, "h0", "sh", "-c", "echo mine >/root/f; echo mine >/tmp/f; echo mine >/etc/f")
    for path in ("/root/f", "/tmp/f", "/etc/f"):
        assert lab.ssh("h1", "cat", path).returncode == 1
        assert not Path(path).exists()
    assert said(lab, "h0", "sh", "-c", "rm /root/f /tmp/f /etc/f; ls -A /root /home /srv") != ""


def test_host_does_not_see_user_files_of_machine(lab: Lab) -> None:
    shown = said(lab, "h0", "find", "/root", "/home", "/srv", "/tmp", "-type", "f", "-not",
                 "-path", "*/.pyenv/*", "-not", "-path", "*/.local/share/uv/*",
                 "-not", "-path", f"{CHECKOUT}/*")  # fmt: skip
    assert {Path(path).name for path in shown.split()} == {
        ".bashrc", "authorized_keys", "id_ed25519", "id_ed25519.pub", "known_hosts"
    }  # fmt: skip
    assert said(lab, "h0", "ls", "-A", str(CHECKOUT)).split() == [".venv", "clusterkit"]
    assert said(lab, "h0", "ls", "/etc/ssh").split() == ["ssh_host_ed25519_key", "sshd_config"]


def test_host_sees_checkout_python_read_only(lab: Lab) -> None:
    code = "import clusterkit, importlib.metadata as m; print(m.version('torch'), clusterkit)"
    here = subprocess.run([lab_python(), "-c", code], capture_output=True, text=True, check=True)
    assert said(lab, "h1", str(lab_python()), "-c", code) == here.stdout.strip()
    refused = lab.ssh("h1", "touch", str(lab_python().parent / "x"))
    assert "Read-only file system" in refused.stderr


def test_host_cannot_change_its_machine(lab: Lab) -> None:
    assert "Read-only" in lab.ssh("h0", "sh", "-c", "echo 9 >/proc/sys/vm/swappiness").stderr
    assert "not permitted" in lab.ssh("h0", "date", "-s", "@0").stderr
    assert "Read-only" in lab.ssh("h0", "chmod", "0755", "/sys/kernel").stderr
    said(lab, "h0", "sh", "-c", "rm /dev/full && echo 1 >/proc/sys/net/ipv4/ip_forward")
    assert Path("/dev/full").exists()
    before = Path("/proc/sys/net/ipv4/ip_forward").read_text().strip()
    assert said(lab, "h1", "cat", "/proc/sys/net/ipv4/ip_forward") == "0" or before == "1"


def test_hosts_reach_each_other_by_ssh_without_prompts(lab: Lab) -> None:
    for name in (lab.host("h1").name, lab.host("h1").address):
        assert said(lab, "h0", "ssh", "-o", "BatchMode=yes", name, "hostname") == "h1"
    assert said(lab, "h0", "getent", "ahostsv4", "h1").split()[0] == lab.host("h1").address


def test_name_lookup_does_not_wait_for_dns(lab: Lab) -> None:
    """torch's TCPStore asks for the name of the v4-mapped address, for 10 s where DNS is tried."""
    code = (
        "import socket, time; start = time.monotonic()\n"
        "for name in ('nobody.example', 'h9'):\n"
        "    try: socket.getaddrinfo(name, 1)\n"
        "    except socket.gaierror: pass\n"
        f"print(socket.getnameinfo(('::ffff:{lab.host('h1').address}', 1), 0)[0])\n"
        "print(time.monotonic() - start)"
    )
    assert float(said(lab, "h0", "python3", "-c", code).split()[1]) < 4


def test_every_boot_has_new_boot_id_and_hosts_own_machine_id(lab: Lab) -> None:
    def boot_id(host: str) -> str:
        return said(lab, host, "cat", "/proc/sys/kernel/random/boot_id")

    here = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    before = [boot_id("h0"), boot_id("h1")]
    assert len({here, *before}) == 3
    lab.fault("crash", "h1")
    lab.fault("boot", "h1")
    assert boot_id("h0") == before[0]
    assert boot_id("h1") not in (here, *before)
    assert said(lab, "h0", "cat", "/etc/machine-id") != said(lab, "h1", "cat", "/etc/machine-id")


def test_host_has_working_terminal_and_devices(lab: Lab) -> None:
    code = "echo hidden >/dev/null; head -c 3 /dev/zero | wc -c; tty"
    done = lab.ssh("h0", "sh", "-c", code, options=("-tt",))
    assert done.stdout.split() == ["3", "/dev/pts/0"]
    assert said(lab, "h0", "sh", "-c", "echo x >/dev/shm/x; cat /dev/stdin </dev/shm/x") == "x"


def test_shared_folder_is_same_on_all_hosts_and_survives_reboot(tmp_path: Path) -> None:
    with Lab(tmp_path / "lab", 2, shared=True) as lab:
        said(lab, "h0", "sh", "-c", "echo from h0 >/srv/shared/f")
        assert said(lab, "h1", "cat", "/srv/shared/f") == "from h0"
        assert (lab.shared / "f").read_text() == "from h0\n"
        lab.fault("crash", "h1")
        lab.fault("boot", "h1")
        assert said(lab, "h1", "cat", "/srv/shared/f") == "from h0"


# ---------------------------------------------------------------- the files


def test_inventory_hostfile_and_ssh_config_reach_hosts(lab: Lab) -> None:
    group = yaml.safe_load(lab.inventory.read_text())["nodes"]
    assert group["hosts"] == {host.name: {"ansible_host": host.address} for host in lab.hosts}
    assert group["vars"]["clusterkit_python"] == str(lab_python())
    assert group["vars"]["ansible_ssh_private_key_file"] == str(lab.key)
    assert lab.hostfile.read_text() == "".join(f"{host.address} slots=1\n" for host in lab.hosts)
    assert lab.key.stat().st_mode & 0o777 == 0o600
    by_inventory = [
        "ssh", "-F", "none", "-i", group["vars"]["ansible_ssh_private_key_file"],
        *group["vars"]["ansible_ssh_common_args"].split(), "-o", "BatchMode=yes",
        "-o", "StrictHostKeyChecking=yes", f"root@{lab.hosts[1].address}", "hostname",
    ]  # fmt: skip
    done = subprocess.run(by_inventory, capture_output=True, text=True, check=True)
    assert done.stdout == "h1\n"
    assert said(lab, lab.hosts[1].address, "hostname") == "h1"


def test_known_hosts_has_keys_that_hosts_present(lab: Lab) -> None:
    for host in lab.hosts:
        scan = subprocess.run(
            ["ssh-keyscan", "-t", "ed25519", host.address],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        key = scan.stdout.split()[2]
        assert f"{host.name},{host.address} ssh-ed25519 {key}\n" in lab.known_hosts.read_text()
    assert len(set(lab.known_hosts.read_text().split())) == 2 * 2 + 1


# ---------------------------------------------------------------- up and down


def test_down_leaves_no_trace_and_is_repeatable(own: Lab, session: Session) -> None:
    assert own.up()
    said(own, "h0", "true")
    running = session(own, "h0", "echo here; exec sleep 600")
    assert line(running) == "here"
    traces = Traces(own)
    assert len(traces.left()) >= 8
    assert own.down()
    traces.assert_gone()
    assert running.wait(SOON) == 255
    assert not own.down()


def test_down_removes_lab_with_frozen_crashed_full_and_cut_hosts(own: Lab) -> None:
    own.size = 4
    own.up()
    for fault, host in (("freeze", "h0"), ("crash", "h1"), ("full-disk", "h2"), ("cut", "h3")):
        own.fault(fault, host)
    traces = Traces(own)
    own.down()
    traces.assert_gone()


def test_second_up_reuses_lab_and_refuses_other_size(own: Lab) -> None:
    assert own.up()
    name = own.name
    again = Lab(own.dir, 1)
    assert not again.up()
    assert again.name == name
    with pytest.raises(BadInput, match="there is a lab of 1 host"):
        Lab(own.dir, 2).up()
    assert said(own, "h0", "hostname") == "h0"


@pytest.mark.parametrize(
    "there",
    ["state.json", f"{machine.NETNS}/*-h7", "hosts/h3/upper", "hosts/h7/fstab", "logs/h0.log"],
)
def test_down_removes_lab_whose_creation_was_killed(own: Lab, there: str) -> None:
    creator = subprocess.Popen([*LAB, "up", "8", "--dir", str(own.dir)], cwd=CHECKOUT)

    def so_far() -> bool:
        own._read()
        if there.startswith("/"):
            return f"{own.name}-h7" in machine.namespaces(own.name)
        return bool(own.name) and (own.dir / there).exists()

    eventually(f"{there} is there", lambda: so_far() or creator.poll() is not None)
    creator.kill()
    assert creator.wait() == -signal.SIGKILL
    traces = Traces(own)
    assert traces.left() != []
    assert main(["down", "--dir", str(own.dir)]) == 0
    traces.assert_gone()


def test_up_replaces_incomplete_lab(own: Lab) -> None:
    own.up()
    traces = Traces(own)
    own._state["ready"] = False
    own._write_state()
    assert Lab(own.dir, 1).up()
    fresh = Lab.open(own.dir)
    assert fresh.name != traces.name
    traces.paths.remove(own.dir)
    traces.assert_gone()
    assert said(fresh, "h0", "hostname") == "h0"


def test_up_replaces_lab_lost_in_machine_restart(own: Lab) -> None:
    own.up()
    machine.kill(own.cgroup())
    machine.remove_cgroup(own.cgroup())
    machine.call("ip", "link", "delete", own.name)
    machine.ip(*(f"netns delete {space}" for space in machine.namespaces(own.name)))
    machine.unmount_below(own.dir)
    with pytest.raises(BadInput, match="there is no lab"):
        Lab.open(own.dir)
    assert Lab(own.dir, 1).up()
    assert said(Lab.open(own.dir), "h0", "hostname") == "h0"


def test_failed_up_leaves_no_trace(own: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = machine.tool, []

    def tool(name: str) -> str:
        if name == "sshd":
            seen.append(Traces(own))
            return "/bin/false"
        return real(name)

    monkeypatch.setattr(machine, "tool", tool)
    with pytest.raises(ClusterkitError, match="host h0 ended at once"):
        own.up()
    assert seen[0].name
    seen[0].assert_gone()


def test_two_labs_are_isolated_from_each_other(lab: Lab, own: Lab) -> None:
    own.up()
    assert own.network != lab.network
    assert {lab.name, own.name} <= set(labs())
    assert labs()[own.name] == own.dir
    other = own.hosts[0].address
    blocked = lab.ssh("h0", "ssh", *IMPATIENT, "-o", "BatchMode=yes", other, "true")
    assert "Network is unreachable" in blocked.stderr
    assert said(own, "h0", "hostname") == "h0"
    own.down()
    assert [said(lab, host.name, "hostname") for host in lab.hosts] == ["h0", "h1"]


def test_labs_created_concurrently_get_different_networks(tmp_path: Path) -> None:
    folders = [tmp_path / f"lab{i}" for i in range(3)]
    makers = [
        subprocess.Popen([*LAB, "up", "1", "--dir", str(folder)], cwd=CHECKOUT)
        for folder in folders
    ]
    try:
        assert [maker.wait(SOON) for maker in makers] == [0, 0, 0]
        made = [Lab.open(folder) for folder in folders]
        assert len({lab.network for lab in made}) == 3
        assert [said(lab, "h0", "hostname") for lab in made] == ["h0"] * 3
    finally:
        for folder in folders:
            assert main(["down", "--dir", str(folder)]) == 0


def test_concurrent_ups_of_same_folder_make_one_lab(tmp_path: Path) -> None:
    command = [*LAB, "up", "1", "--dir", str(tmp_path / "lab")]
    makers = [
        subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    try:
        told = [maker.communicate(timeout=SOON)[0] for maker in makers]
        assert [maker.returncode for maker in makers] == [0, 0, 0]
        assert sorted("is up already" in text for text in told) == [False, True, True]
    finally:
        main(["down", "--dir", str(tmp_path / "lab")])


def in_a_fresh_network(script: str) -> str:
    """A shell script in network and mount namespaces of its own; gives its stdout."""
    done = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-euc", script],
        cwd=CHECKOUT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_first_lab_of_machine_leaves_no_mount_or_link_after_down(tmp_path: Path) -> None:
    lab = f"{sys.executable} -m tests.lab"
    told = in_a_fresh_network(
        f"mount -t tmpfs none /run; mkdir /run/mount; cp /proc/self/mountinfo '{tmp_path}/before'\n"
        f"{lab} up 2 --dir '{tmp_path}/a' >/dev/null; {lab} up 1 --dir '{tmp_path}/b' >/dev/null\n"
        f"ls /run; {lab} down --dir '{tmp_path}/b' >/dev/null; ls /run\n"
        f"{lab} down --dir '{tmp_path}/a' >/dev/null; ls /run\n"
        f"grep -vxFf '{tmp_path}/before' /proc/self/mountinfo || :; ip -br link | wc -l\n"
    )
    # mount keeps notes in /run/mount. Then mounts that were not there before; others may be gone:
    # removing a folder elsewhere unmounts it here. The last line: only the loopback is there.
    assert told.split() == ["mount", "netns", "mount", "netns", "mount", "1"]


def test_up_avoids_networks_in_use(tmp_path: Path) -> None:
    lab = f"{sys.executable} -m tests.lab"
    told = in_a_fresh_network(
        "ip link add there type veth peer name peer; ip address add 10.77.0.1/24 dev there\n"
        "ip link set there up; ip route add 10.77.1.128/25 via 10.77.0.9 dev there onlink\n"
        f"{lab} up 1 --dir '{tmp_path}/a'; {lab} down --dir '{tmp_path}/a'\n"
        "ip route add 10.0.0.0/8 via 10.77.0.9 dev there onlink\n"
        f"{lab} up 1 --dir '{tmp_path}/b'; {lab} down --dir '{tmp_path}/b'\n"
    )
    assert re.findall(r"1 host, (\S+)\.10,", told) == ["10.77.2", "198.18.0"]


def test_hosts_reach_each_other_despite_drop_policy_for_forwarding(tmp_path: Path) -> None:
    """docker sets this policy, and with br_netfilter it holds for bridges of the machine too."""
    if shutil.which("iptables") is None:
        pytest.skip("iptables is not installed: apt-get install iptables")
    lab = f"{sys.executable} -m tests.lab"
    told = in_a_fresh_network(
        "iptables -P FORWARD DROP; ip6tables -P FORWARD DROP\n"
        "sysctl -qw net.bridge.bridge-nf-call-iptables=1 2>/dev/null || :\n"
        f"{lab} up 2 --dir '{tmp_path}/lab' >/dev/null; trap \"{lab} down --dir '{tmp_path}/lab'"
        ' >/dev/null" EXIT\n'
        f"ssh -F '{tmp_path}/lab/ssh_config' h0 ssh -o ConnectTimeout=5 h1 hostname\n"
    )
    assert told == "h1\n"


@pytest.mark.parametrize("name", ["with space", "a,comma", "colon:semi;", "naïve-日本", "&#!()*"])
def test_lab_works_in_folder_with_unusual_name(tmp_path: Path, name: str) -> None:
    with Lab(tmp_path / name, 1) as lab:
        assert said(lab, "h0", "hostname") == "h0"
        group = yaml.safe_load(lab.inventory.read_text())["nodes"]
        assert group["vars"]["ansible_ssh_private_key_file"] == str(lab.key)
        lab.fault("versions", "h0")
        lab.fault("full-disk", "h0")
        traces = Traces(lab)
    traces.assert_gone()


# ---------------------------------------------------------------- faults


def test_crash_stops_host_and_boot_keeps_its_disk(lab: Lab, session: Session) -> None:
    said(lab, "h1", "sh", "-c", "echo kept >/root/kept; echo lost >/dev/shm/lost")
    running = session(lab, "h1", "echo here; exec sleep 600")
    assert line(running) == "here"
    lab.fault("crash", "h1")
    assert running.wait(SOON) == 255
    assert not lab.running("h1")
    assert "Connection refused" in lab.ssh("h1", "true").stderr
    assert faults.present(lab, "h1") == ["crash"]
    lab.fault("crash", "h1")
    lab.fault("boot", "h1")
    lab.fault("boot", "h1")
    assert said(lab, "h1", "cat", "/root/kept") == "kept"
    assert lab.ssh("h1", "cat", "/dev/shm/lost").returncode == 1
    assert said(lab, "h0", "hostname") == "h0"


def test_crash_and_boot_keep_disk_eight_times_in_row(lab: Lab) -> None:
    for i in range(8):
        said(lab, "h1", "sh", "-c", f"echo {i} >>/root/boots")
        lab.fault("crash", "h1")
        lab.fault("boot", "h1")
    assert said(lab, "h1", "cat", "/root/boots").split() == [str(i) for i in range(8)]
    said(lab, "h1", "rm", "/root/boots")


def test_cut_blocks_network_and_heal_resumes_open_connection(lab: Lab, session: Session) -> None:
    open_before = session(lab, "h1", "echo here; read -r word; echo got $word")
    assert line(open_before) == "here"
    lab.fault("cut", "h1")
    assert re.search("timed out|No route", lab.ssh("h1", "true", options=IMPATIENT).stderr)
    from_peer = lab.ssh("h0", "ssh", *IMPATIENT, "-o", "BatchMode=yes", "h1", "true")
    assert re.search("timed out|No route", from_peer.stderr)
    assert said(lab, "h0", "hostname") == "h0"
    send(open_before, "word")
    assert open_before.poll() is None
    lab.fault("heal", "h1")
    assert line(open_before) == "got word"
    assert open_before.wait(SOON) == 0


def test_freeze_stops_processes_and_thaw_resumes_them(lab: Lab, session: Session) -> None:
    counting = session(lab, "h1", "i=0; while :; do i=$((i+1)); echo $i; sleep 0.01; done")
    assert line(counting) == "1"
    lab.fault("freeze", "h1")
    assert "timed out" in lab.ssh("h1", "true", options=IMPATIENT).stderr
    before = subprocess.run(
        ["cat", lab.cgroup("h1") / "cpu.stat"], capture_output=True, text=True, check=True
    ).stdout
    assert counting.poll() is None
    assert (lab.cgroup("h1") / "cpu.stat").read_text() == before
    lab.fault("thaw", "h1")
    assert said(lab, "h1", "hostname") == "h1"
    assert int(line(counting)) > 1


def test_restart_sshd_breaks_connections_only(lab: Lab, session: Session) -> None:
    said(lab, "h1", "sh", "-c", "setsid sleep 600 </dev/null >/dev/null 2>&1 & echo $! >/root/pid")
    running = session(lab, "h1", "echo here; exec sleep 601")
    assert line(running) == "here"
    before = said(lab, "h1", "cat", "/proc/sys/kernel/random/boot_id")
    lab.fault("restart-sshd", "h1")
    assert running.wait(SOON) == 255
    assert said(lab, "h1", "cat", "/proc/sys/kernel/random/boot_id") == before
    said(lab, "h1", "sh", "-c", "kill $(cat /root/pid); rm /root/pid")


def test_new_host_key_is_refused_until_old_key_is_back(lab: Lab) -> None:
    lab.fault("new-host-key", "h1")
    refused = lab.ssh("h1", "true")
    assert refused.returncode == 255
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in refused.stderr
    from_peer = lab.ssh("h0", "ssh", "-o", "BatchMode=yes", "h1", "true")
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in from_peer.stderr
    assert said(lab, "h0", "hostname") == "h0"
    lab.fault("old-host-key", "h1")
    assert said(lab, "h1", "hostname") == "h1"


def test_full_disk_fails_writes_to_new_and_open_files(lab: Lab, session: Session) -> None:
    writing = session(
        lab, "h1",
        "exec 3>/root/log; echo first >&3; echo here; read -r go;"
        " head -c 100000 /dev/zero >&3 || echo failed; read -r go; echo more >&3 && echo written",
    )  # fmt: skip
    assert line(writing) == "here"
    lab.fault("full-disk", "h1")
    send(writing, "go")
    assert line(writing) == "failed"
    for folder in ("/root", "/tmp", "/srv", "/var/tmp", "/etc"):
        failed = lab.ssh("h1", "bash", "-c", f"echo x >{folder}/x")
        assert "No space left on device" in failed.stderr, folder
    assert said(lab, "h1", "sh", "-c", "df --output=avail / | tail -1") == "0"
    said(lab, "h0", "sh", "-c", "echo x >/root/x; rm /root/x")
    lab.fault("crash", "h1")
    lab.fault("boot", "h1")
    assert faults.present(lab, "h1") == ["full-disk"]
    lab.fault("free-disk", "h1")
    said(lab, "h1", "sh", "-c", "head -c 1000000 /dev/zero >/root/x; rm /root/x /root/log")


def test_clock_fault_shifts_wall_clock_of_one_host_only(lab: Lab) -> None:
    try:
        faults.faketime()
    except ClusterkitError as missing:
        pytest.skip(f"{missing.message}: {missing.hint}")

    def ahead(host: str, *command: str) -> float:
        """Seconds; a bit too few, by what the call takes."""
        now = float(said(lab, host, *(command or ("date", "+%s.%N"))))
        return now - time.time()

    for offset in (600, -600.5):
        lab.fault("clock", "h1", offset)
        assert offset - 30 < ahead("h1") <= offset
        in_python = (str(lab_python()), "-c", "import time; print(time.time())")
        assert offset - 30 < ahead("h1", *in_python) <= offset
        assert -30 < ahead("h0") <= 0
        assert faults.present(lab, "h1") == [f"clock {offset:+g}"]
    monotonic = "import time; print(time.monotonic())"
    start = time.monotonic()
    assert start < float(said(lab, "h1", "python3", "-c", monotonic)) < time.monotonic()
    lab.fault("clock", "h1", 0)
    assert -30 < ahead("h1") <= 0
    assert said(lab, "h1", "ls", "/dev/shm") == ""


def test_slow_fault_limits_bandwidth_in_both_directions(lab: Lab) -> None:
    def seconds(*command: str, data: bytes | None = None) -> float:
        start = time.monotonic()
        argv = ["ssh", "-F", str(lab.ssh_config), "-o", "BatchMode=yes", "h1", *command]
        subprocess.run(argv, input=data, stdout=subprocess.DEVNULL, check=True, timeout=SOON)
        return time.monotonic() - start

    lab.fault("slow", "h1", "8mbit")
    # 2 MB at 1 MB/s, less what may pass at once.
    assert seconds("head -c 2000000 /dev/urandom") > 1.5
    assert seconds("cat >/dev/null", data=os.urandom(2_000_000)) > 1.5
    assert faults.present(lab, "h1") == ["slow 8mbit"]
    lab.fault("slow", "h1", "none")
    lab.fault("slow", "h1", "none")
    assert faults.present(lab, "h1") == []
    # At the old rate, a minute.
    seconds("head -c 60000000 /dev/zero")


def test_versions_fault_changes_torch_version_of_one_host(lab: Lab) -> None:
    def torch(host: str) -> list[str]:
        code = (
            "import importlib.metadata as m, runpy, sysconfig; print(m.version('torch'), "
            "runpy.run_path(sysconfig.get_path('purelib') + '/torch/version.py')['__version__'])"
        )
        return said(lab, host, str(lab_python()), "-c", code).split()

    true = torch("h0")
    lab.fault("versions", "h1", "1.2.3+cu999")
    assert torch("h1") == ["1.2.3+cu999"] * 2
    lab.fault("versions", "h1")
    assert torch("h1") == [faults.OTHER_TORCH] * 2
    assert torch("h0") == true
    lab.fault("crash", "h1")
    lab.fault("boot", "h1")
    assert torch("h1") == [faults.OTHER_TORCH] * 2
    lab.fault("versions", "h1", "none")
    assert torch("h1") == true


def test_repair_removes_all_faults(lab: Lab) -> None:
    broken = ["cut", "slow 8mbit", "full-disk", "freeze", "new-host-key", "versions"]
    for fault in ("versions", "new-host-key", "full-disk", "cut", "freeze"):
        lab.fault(fault, "h1")
    lab.fault("slow", "h1", "8mbit")
    assert faults.present(lab, "h1") == broken
    lab.fault("crash", "h1")
    lab.repair()
    assert [faults.present(lab, host.name) for host in lab.hosts] == [[], []]
    assert said(lab, "h1", "hostname") == "h1"


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("fault", "host", "value", "words"),
    [
        ("freze", "h0", None, "no fault 'freze'\n  hint: did you mean freeze"),
        ("cut", "h2", None, "no host 'h2'\n  hint: its hosts: h0, h1"),
        ("cut", "h0; id", None, "no host 'h0; id'"),
        ("cut", "h0", "now", "takes no value"),
        ("clock", "h0", None, "needs a value: SECONDS"),
        ("clock", "h0", "soon", "no number of seconds"),
        ("clock", "h0", "nan", "no number of seconds"),
        ("slow", "h0", "apple", 'illegal value for "rate": "apple"'),
        ("slow", "h0", None, "needs a value: RATE"),
        ("versions", "h0", "2.0; id", "no version"),
    ],
)
def test_fault_refuses_unknown_name_host_or_value(
    lab: Lab, fault: str, host: str, value: str | None, words: str
) -> None:
    with pytest.raises(BadInput) as refused:
        lab.fault(fault, host, value)
    assert words in str(refused.value)
    assert [faults.present(lab, each.name) for each in lab.hosts] == [[], []]


@pytest.mark.parametrize("fault", ["freeze", "restart-sshd", "new-host-key", "versions"])
def test_fault_refuses_host_that_is_down(lab: Lab, fault: str) -> None:
    lab.fault("crash", "h1")
    with pytest.raises(BadInput, match="host h1 is down"):
        lab.fault(fault, "h1")


@pytest.mark.parametrize("size", [0, -1, 65])
def test_up_refuses_size_outside_1_to_64(tmp_path: Path, size: int) -> None:
    with pytest.raises(BadInput, match="1 to 64"):
        Lab(tmp_path / "lab", size).up()
    assert not (tmp_path / "lab").exists()


@pytest.mark.parametrize("name", ["it's", 'a"b', "$HOME", "50%", "new\nline", "back\\slash"])
def test_up_refuses_folder_name_that_openssh_would_interpret(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="means something to OpenSSH"):
        Lab(tmp_path / name, 1).up()
    assert not (tmp_path / name).exists()


def test_up_and_down_refuse_folder_with_other_content(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(BadInput, match="is not empty, and no lab"):
        Lab(tmp_path, 1).up()
    with pytest.raises(BadInput, match="is no lab, and is left as it is"):
        Lab(tmp_path).down()
    with pytest.raises(BadInput, match=r"Not a directory|File exists"):
        Lab(tmp_path / "thesis.txt", 1).up()
    with pytest.raises(BadInput, match="Not a directory"):
        Lab(tmp_path / "thesis.txt").down()
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


# ---------------------------------------------------------------- the command line


def test_lab_command_handles_up_status_fault_and_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--dir", str(tmp_path / "lab"))
    assert main(["down", *where]) == 0
    assert "there is no lab" in capsys.readouterr().out
    assert main(["status", *where]) == 125
    assert main(["fault", "cut", "h0", *where]) == 125
    capsys.readouterr()
    assert main(["up", "1", *where]) == 0
    try:
        told = capsys.readouterr().out
        reach = re.search(r"ssh -F (\S+) h0", told)
        assert reach
        assert Path(reach[1]).exists()
        assert main(["up", "1", *where]) == 0
        assert "is up already" in capsys.readouterr().out
        assert main(["up", "2", *where]) == 125
        assert "error: " in capsys.readouterr().err
        assert main(["fault", "cut", "h0", *where]) == 0
        capsys.readouterr()
        assert main(["status", *where]) == 0
        assert re.search(r"h0 +10\.\S+ +cut\n", capsys.readouterr().out)
        assert main(["fault", "nothing", "h0", *where]) == 125
    finally:
        assert main(["down", *where]) == 0
    assert "removed" in capsys.readouterr().out
    assert not (tmp_path / "lab").exists()


def test_down_removes_lab_with_lost_folder_by_name(
    own: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    own.up()
    traces = Traces(own)
    (own.dir / "state.json").unlink()
    main(["status", "--dir", str(own.dir)])
    assert f"{own.name} in {own.dir} (its folder is lost)" in capsys.readouterr().out
    assert main(["down", "--name", "cklab-none"]) == 125
    assert main(["down", "--name", own.name]) == 0
    traces.assert_gone()


def test_up_refuses_non_root_user(tmp_path: Path) -> None:
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--clear-groups", "/usr/bin/python3", "-m", "tests.lab",
         "up", "1", "--dir", str(tmp_path / "lab")],
        cwd=CHECKOUT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 125
    assert done.stderr.startswith("error: the lab needs root")
    assert "sudo" in done.stderr


def test_up_refuses_root_without_capabilities(tmp_path: Path) -> None:
    done = subprocess.run(
        ["setpriv", "--bounding-set=-sys_admin", *LAB, "up", "1", "--dir", str(tmp_path / "lab")],
        cwd=CHECKOUT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 125
    assert "--privileged" in done.stderr
    assert not (tmp_path / "lab").exists()


def test_up_names_missing_programs_and_their_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in machine._PACKAGES:
        if name not in ("sshd", "ip"):
            (programs / name).symlink_to(machine.tool(name))
    monkeypatch.setattr(machine, "_PATH", str(programs))
    assert main(["up", "1", "--dir", str(tmp_path / "lab")]) == 125
    told = capsys.readouterr().err
    assert "the lab needs ip, sshd" in told
    assert "apt-get install iproute2 openssh-server" in told
    assert not (tmp_path / "lab").exists()


def test_fault_help_lists_every_fault(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fault", "--help"])
    told = capsys.readouterr().out
    assert all(f"  {name} HOST" in told for name in faults.FAULTS)
