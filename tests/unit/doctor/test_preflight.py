"""Examining hosts: who is asked what and when, and that nothing stays behind."""

import dataclasses
import os
import sys
import threading
import time

import msgspec
import pytest

from clusterkit import api, doctor
from clusterkit.backends import backend
from clusterkit.cluster import Host, LocalCluster, SshCluster
from clusterkit.doctor.hosts.base import HostSubject, Machine, Needs, Output
from clusterkit.doctor.hosts.examine import CHECKS, completed
from clusterkit.errors import BadInput, CapabilityError, SubmitFailed, Unavailable
from clusterkit.spec import JobSpec
from clusterkit.transport import Completed, LocalTransport
from tests.unit.doctor.conftest import make_answer, make_subject

QUIET = ("user", "python", "shm")


class Hosts(LocalTransport):
    """Every host is this machine, but where a test says otherwise."""

    def __init__(self, **special):
        self.special = special
        self.asked = []
        self._lock = threading.Lock()

    def run(self, host, argv, *, env=None, timeout=None, stdin=b""):
        with self._lock:
            self.asked.append(host)
            times = self.asked.count(host)
        special = self.special.get(host)
        if special is not None:
            answer = special(times)
            if answer is not None:
                return answer
        # As over SSH: the host tells at which of its addresses it was reached.
        own = {"SSH_CONNECTION": f"10.9.9.9 1 127.0.0.{int(host[1:]) + 1} 22"}
        return super().run(host, argv, env=own, timeout=timeout, stdin=stdin)


def fails(error, *times):
    """Raises ``error``, always or the so manieth time it is asked."""

    def answer(number):
        if not times or number in times:
            raise error
        return None

    return answer


def says(stdout="", stderr="", exit_code=0):
    return lambda times: Completed((), exit_code, stdout, stderr)


def subject(number=3, **fields):
    return HostSubject(**{
        "cluster": "lab",
        "hosts": tuple(Machine(name=f"h{i}", python=sys.executable) for i in range(number)),
        "workdir": "/tmp",
        "over_ssh": True,
        **fields,
    })  # fmt: skip


def level(report, check, host):
    return doctor_level([f.level for f in report.findings if (f.check, f.host) == (check, host)])


def doctor_level(levels):
    assert levels, "nothing was said"
    return "+".join(sorted(set(levels)))


# ---------------------------------------------------------------- choosing


def test_quick_option_leaves_out_slow_checks():
    everything = doctor.chosen(CHECKS, quick=False, only=None)
    quick = doctor.chosen(CHECKS, quick=True, only=None)
    assert everything == list(CHECKS)
    assert {check.name for check in everything} - {check.name for check in quick} == {
        "compiler", "mesh", "shared", "gpu-diagnosis",
    }  # fmt: skip


def test_only_option_includes_slow_check_despite_quick():
    found = doctor.chosen(CHECKS, quick=True, only=["mesh", "user"])
    assert [check.name for check in found] == [
        "user", "mesh",
    ]  # fmt: skip


def test_only_option_refuses_unknown_check_with_suggestion():
    with pytest.raises(BadInput, match="check 'clok' is unknown") as refused:
        doctor.chosen(CHECKS, quick=False, only=["user", "clok"])
    assert refused.value.hint == "did you mean clock?"
    with pytest.raises(BadInput, match="no check was named"):
        doctor.chosen(CHECKS, quick=False, only=[])


# ---------------------------------------------------------------- for real


def test_examine_passes_on_three_hosts_and_finds_addresses_and_port():
    hosts = Hosts()
    report = doctor.examine(
        subject(), hosts, only=["reachable", "user", "python", "clock", "interface", "head-port",
                                "mesh", "port"],
    )  # fmt: skip
    for check in ("reachable", "user", "python", "clock", "head-port", "mesh"):
        for host in report.hosts:
            assert level(report, check, host) == "ok", report.table()
    # The addresses were found out, the port was chosen.
    place = next(f.cause for f in report.findings if (f.check, f.host) == ("head-port", "h2"))
    assert place.startswith("127.0.0.1:")
    assert 20000 <= int(place.rpartition(":")[2]) < 32000
    assert sorted(hosts.asked) == ["h0", "h0", "h1", "h1", "h2", "h2"]


def test_examine_visits_each_host_once_without_network_checks():
    hosts = Hosts()
    doctor.examine(subject(), hosts, only=QUIET)
    assert sorted(hosts.asked) == ["h0", "h1", "h2"]


def test_examine_runs_every_check_and_leaves_no_files(tmp_path):
    """No script fails here, and none leaves anything."""
    work, shared = tmp_path / "work dir", tmp_path / "shared"
    work.mkdir()
    shared.mkdir()
    report = doctor.examine(
        subject(2, workdir=str(work), shared=str(shared), needs=Needs(deepspeed=True)), Hosts()
    )
    unseen = ("could not run", "invalid output", "truncated")
    assert not [f for f in report.findings if any(words in f.cause for words in unseen)]
    assert level(report, "shared", "h0") == level(report, "shared", "h1") == "ok"
    assert level(report, "workdir", "h0") == "ok"
    assert os.listdir(work) == []
    assert os.listdir(shared) == []


def test_examine_leaves_no_process(tmp_path):
    before = set(os.listdir("/proc"))
    doctor.examine(subject(2, shared=str(tmp_path)), Hosts(), only=["mesh", "shared", "user"])
    mine = str(os.getpid())
    for _ in range(100):
        left = [pid for pid in set(os.listdir("/proc")) - before if _runs_the_doctor(pid, mine)]
        if not left:
            return
        time.sleep(0.05)
    raise AssertionError(left)


def _runs_the_doctor(pid, mine):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as line, open(f"/proc/{pid}/environ", "rb") as env:
            return pid != mine and b"zlib.decompress" in line.read() and b"10.9.9.9" in env.read()
    except OSError:
        return False


# ---------------------------------------------------------------- hosts that fail


def test_examine_asks_dead_host_once_and_checks_others():
    hosts = Hosts(h1=fails(Unavailable("host h1 does not answer", hint="is it up?")))
    report = doctor.examine(subject(), hosts, only=["reachable", "user", "mesh"])
    assert level(report, "reachable", "h1") == "fail"
    assert level(report, "user", "h1") == "skip"
    assert level(report, "user", "h0") == level(report, "mesh", "h2") == "ok"
    assert hosts.asked.count("h1") == 1
    refusal = doctor.refusal(report)
    assert isinstance(refusal, Unavailable)
    assert "host h1 does not answer" in refusal.message


def test_examine_skips_meeting_but_runs_other_checks_without_head():
    hosts = Hosts(h0=fails(SubmitFailed("sh on h0 did not end within 25 s")))
    report = doctor.examine(subject(), hosts, only=["user", "head-port", "mesh", "port"])
    assert level(report, "user", "h1") == "ok"
    assert level(report, "mesh", "h1") == level(report, "head-port", "h2") == "skip"


def test_examine_reports_host_lost_before_second_visit():
    hosts = Hosts(h2=fails(Unavailable("host h2: the connection was lost"), 2))
    report = doctor.examine(subject(), hosts, only=["user", "interface"])
    assert level(report, "user", "h2") == "ok"
    told = [f for f in report.findings if (f.check, f.host) == ("interface", "h2")]
    assert [(f.level, f.cause) for f in told] == [("fail", "host h2: the connection was lost")]


@pytest.mark.parametrize(
    "answer",
    [says(), says("<html>proxy error</html>"), says("\0" * 100, "Segmentation fault", 139),
     says(stderr="This account is currently not available.", exit_code=1)],
)  # fmt: skip
def test_examine_fails_python_check_on_garbage_answer(answer):
    report = doctor.examine(subject(), Hosts(h1=answer), only=["reachable", "python", "user"])
    assert level(report, "python", "h1") == "fail"
    assert level(report, "user", "h1") == "skip"
    assert level(report, "user", "h0") == "ok"


def test_examine_treats_truncated_output_as_unreachable_host():
    class Torn(Hosts):
        def run(self, host, argv, **how):
            done = super().run(host, argv, **how)
            return dataclasses.replace(done, stdout=done.stdout[: len(done.stdout) // 2])

    report = doctor.examine(subject(1), Torn(), only=["reachable", "python", "shm"])
    causes = [(f.check, f.level, f.cause) for f in report.findings]
    assert causes == [
        ("reachable", "fail", "host h0: its answer was truncated"),
        ("python", "skip", "it did not answer"), ("shm", "skip", "it did not answer"),
    ]  # fmt: skip


def test_examine_runs_other_checks_when_rank_python_is_missing():
    machines = (
        Machine(name="h0", python=sys.executable), Machine(name="h1", python="/nope/bin/python"),
    )  # fmt: skip
    report = doctor.examine(subject(hosts=machines), Hosts(), only=["python", "shm", "packages"])
    assert level(report, "python", "h1") == "fail"
    assert level(report, "packages", "h1") == "skip"
    assert level(report, "shm", "h1") == "ok"


def test_examine_raises_unexpected_exceptions():
    with pytest.raises(ZeroDivisionError):
        doctor.examine(subject(), Hosts(h1=fails(ZeroDivisionError())), only=["user"])


# ---------------------------------------------------------------- the shared folder


def test_shared_check_fails_on_folder_local_to_one_host(tmp_path):
    """h1 has its own folder of the same name: a relative path, and another home."""
    for name in ("a", "b"):
        (tmp_path / name / "shared").mkdir(parents=True)

    class Homes(Hosts):
        def run(self, host, argv, **options):
            home = tmp_path / ("b" if host == "h1" else "a")
            return LocalTransport().run(
                host, argv, **options | {"env": {"HOME": str(home), "SSH_CONNECTION": "a 1 b 2"}}
            )

    report = doctor.examine(subject(3, shared="~/shared"), Homes(), only=["shared"])
    assert level(report, "shared", "h2") == "ok"
    assert level(report, "shared", "h1") == "fail"
    assert os.listdir(tmp_path / "a" / "shared") == []


def test_shared_token_is_removed_when_second_visit_fails(tmp_path):
    hosts = Hosts(h1=fails(ZeroDivisionError(), 2))
    with pytest.raises(ZeroDivisionError):
        doctor.examine(subject(2, shared=str(tmp_path)), hosts, only=["shared"])
    assert os.listdir(tmp_path) == []


def test_examine_removes_old_shared_token_and_keeps_recent_one(tmp_path):
    old, young = (tmp_path / f".clusterkit-doctor-shared-{name}" for name in ("old", "young"))
    other = tmp_path / "data"
    for path in (old, young, other):
        path.write_text("x")
        if path != young:
            os.utime(path, (1, 1))
    doctor.examine(subject(2, shared=str(tmp_path)), Hosts(), only=["shared"])
    assert sorted(os.listdir(tmp_path)) == [young.name, "data"]


# ---------------------------------------------------------------- progress, what is found out


def test_progress_lists_awaited_hosts_per_phase():
    told = []
    doctor.examine(
        subject(2), Hosts(), only=["head-port"], progress=lambda *words: told.append(words)
    )
    assert told[0] == (1, ["h0", "h1"])
    assert (1, []) in told
    assert told[-1] == (2, [])
    assert len(told) == 6


def test_completed_subject_takes_addresses_and_port_from_answers():
    def there(address):
        return {"eth1": {"mtu": 1500, "up": True, "speed": None, "addresses": [address]}}

    answers = {
        "h0": make_answer({"port": {"port": 20001, "error": None, "taken": False, "holders": []},
                           "interfaces": there("10.1.0.1")}, reached_at="192.168.0.1"),
        "h1": make_answer({"interfaces": {}}, reached_at="192.168.0.2"),
        "h2": make_answer({"interfaces": Output(error="x")}, reached_at=""),
    }  # fmt: skip
    unknown = subject(3)
    auto = completed(unknown, answers)
    assert [machine.address for machine in auto.hosts] == ["192.168.0.1", "192.168.0.2", None]
    assert [machine.at for machine in auto.hosts] == ["192.168.0.1", "192.168.0.2", "h2"]
    assert auto.port == 20001
    named = completed(msgspec.structs.replace(unknown, interface="eth1"), answers)
    assert [machine.address for machine in named.hosts] == ["10.1.0.1", "192.168.0.2", None]
    given = make_subject(3)
    assert completed(given, answers) == given


# ---------------------------------------------------------------- what backends say


def test_local_backend_subject_is_one_host(clusterkit_home):
    job = JobSpec(name="j", program="t.py", nodes="1:2", gpus_per_node=4, device="cuda",
                  deepspeed={}, launcher="torchrun")  # fmt: skip
    found = backend("local").subject("here", LocalCluster(port=29500, python="/x/python"), job)
    assert found == HostSubject(
        cluster="here",
        hosts=(Machine(name="localhost", address="127.0.0.1", python="/x/python", slots=8),),
        workdir=str(clusterkit_home),
        port=29500,
        interface="lo",
        needs=Needs(device="cuda", launcher="torchrun", deepspeed=True, elastic=True),
    )
    plain = backend("local").subject("local", LocalCluster())
    assert (plain.port, plain.hosts[0].slots, plain.needs) == (None, None, Needs())
    assert plain.hosts[0].python == sys.executable


def test_ssh_backend_subject_takes_hosts_that_job_uses():
    cluster = SshCluster(
        hosts=(Host(name="a", slots=4), Host(name="b", cluster_address="10.0.0.2"), Host(name="c")),
        workdir="~/w", shared="/s", python="/p", port=29500,
    )  # fmt: skip
    job = JobSpec(name="j", program="t.py", nodes=2, launcher="mpirun")
    found = backend("ssh").subject("lab", cluster, job)
    assert [(machine.name, machine.address, machine.slots) for machine in found.hosts] == [
        ("a", None, 4), ("b", "10.0.0.2", None),
    ]  # fmt: skip
    assert (found.workdir, found.shared, found.port, found.over_ssh) == ("~/w", "/s", 29500, True)
    assert found.needs == Needs(launcher="mpirun", without_torch="warn")


def test_doctor_refuses_backend_without_checks(tmp_path):
    (tmp_path / "clusters.yaml").write_text("box: {backend: compose}\n")
    with pytest.raises(CapabilityError, match="backend compose has no doctor yet"):
        api.doctor(cluster="box", clusters_file=tmp_path / "clusters.yaml")
