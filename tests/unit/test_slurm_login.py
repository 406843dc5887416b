"""A login node over SSH: what is asked there, what is copied there, and what comes back."""

import contextlib
import json
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from clusterkit import backends, doctor
from clusterkit.agent.protocol import GROWING_FILES, WHOLE_FILES
from clusterkit.backends.slurm import login, observe, probe, queue, tail
from clusterkit.backends.ssh.config import HostUnreachable
from clusterkit.cluster import Project, SlurmCluster, SlurmFacts
from clusterkit.errors import BadInput, SubmitFailed
from clusterkit.output import mirror
from clusterkit.run import folder as run_folder
from clusterkit.run.status import State
from clusterkit.spec import JobSpec
from clusterkit.transport import Completed, LocalTransport

NAME = "alice@login:2222"
MAIN = "main*|up|1:00:00|1-infinite|22.05.8|"


class LoginNode(LocalTransport):
    """Another machine with a Slurm; the disk that its nodes write to is this one's."""

    def __init__(self, **printed):
        self.printed = {
            "sinfo": f"{MAIN}n0|idle|8|1000|(null)\n{MAIN}n1|idle|8|1000|(null)\n", **printed,
        }  # fmt: skip
        self.asked = []
        self.away = False

    def run(self, host, argv, **options):
        assert host == NAME
        self.asked.append(tuple(argv))
        if "-c" not in argv:
            return super().run(host, argv, **options)
        name = argv[4] if len(argv) > 4 else ""
        if name not in self.printed:
            return super().run(host, argv, **options)
        return Completed(tuple(argv), 0, self.printed[name], "")

    def open(self, host, argv, **options):
        assert host == NAME
        if self.away:
            raise HostUnreachable("host login does not answer")
        return super().open(host, argv, **options)


@pytest.mark.parametrize(
    ("text", "address", "user", "port"),
    [
        ("login", "login", None, None), (NAME, "login", "alice", 2222),
        ("bob@[fe80::1]:22", "fe80::1", "bob", 22), ("me@localhost", "localhost", "me", None),
        ("::1", "::1", None, None), ("ssh://bob@login", "login", "bob", None),
        ("bob@corp.example@login", "login", "bob@corp.example", None),
    ],
)  # fmt: skip
def test_login_node_accepts_ssh_destination_forms(text, address, user, port):
    transport = backends.transport_for(SlurmCluster(ssh=text))
    host = transport._hosts[text]
    assert (host.address, host.user, host.port) == (address, user, port)


@pytest.mark.parametrize("text", ["localhost", "a b@c@d", "login:port", "login:0", "@login", "a;b"])
def test_transport_refuses_invalid_or_local_login_node(text):
    with pytest.raises(BadInput, match="not a login node on another machine"):
        backends.transport_for(SlurmCluster(ssh=text))


def test_probe_queries_login_node_and_scans_local_project(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    transport = LoginNode()
    (tmp_path / "project").mkdir()
    (tmp_path / "project/train.py").write_text("pass\n")
    job = JobSpec(name="demo", program="train.py", workdir=str(tmp_path / "project"))
    facts = backends.backend("slurm").probe(SlurmCluster(ssh=NAME), transport, job)
    assert facts.home == str(tmp_path / "clusterkit")
    assert facts.hosts[0].host == NAME
    assert facts.hosts[0].python.startswith("/")
    assert facts.project.files == 1
    assert backends.backend("slurm").home(facts) == run_folder.home()
    there = SlurmCluster(ssh=NAME, sync=False)
    assert backends.backend("slurm").probe(there, transport, job).project is None


def test_queue_command_is_found_through_login_shell_path(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/squeue-of-mine").write_text("#!/bin/sh\necho 7 of $1\n")
    (tmp_path / "bin/squeue-of-mine").chmod(0o755)
    (tmp_path / ".bash_profile").write_text(f"PATH={tmp_path}/bin:$PATH\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    found = queue.run(LocalTransport(), NAME, ["squeue-of-mine", "a b"])
    assert found.stdout == "7 of a b\n"


@pytest.fixture
def plan(make_facts, tmp_path):
    def make(cluster=None, **fields):
        slurm = SlurmFacts(version="22.05.8", partition="main", nodes=16)
        facts = msgspec.structs.replace(
            make_facts(host=NAME, home=str(tmp_path / "there")), slurm=slurm, **fields
        )
        job = JobSpec(name="demo", program="/here/a b/train.py", workdir="/here/a b", nodes=2)
        entry = SlurmCluster(ssh=NAME, **(cluster or {}))
        return backends.backend("slurm").plan(job, entry, facts, "demo-1")

    return make


def test_plan_copies_project_and_submits_in_login_shell(plan):
    def project(root, digest):
        return Project(root=root, digest=digest * 32, files=1, bytes=1, how="all")

    made = plan(project=project("/here/a b", "a"), shipped=project("/here/lib", "b"))
    (step,) = made.steps
    assert (step.host, step.argv[:2]) == (NAME, ("/bin/bash", "-l"))
    home = made.run_dir.partition("/runs/")[0]
    assert [tree.path for tree in made.trees] == [
        f"{home}/projects/a-b/{'a' * 16}", f"{home}/projects/clusterkit/{'b' * 16}",
    ]  # fmt: skip
    (node,) = (file.text for file in made.files if file.path.endswith("node.sh"))
    assert f"--workdir {home}/projects/a-b/{'a' * 16}" in node
    assert f"{home}/projects/a-b/{'a' * 16}/train.py" in node
    assert f"PYTHONPATH={home}/projects/clusterkit" in node
    env = {"env": {"PYTHONPATH": "/mine"}}
    made = plan(env, shipped=project("/here/lib", "b"))
    assert any("PYTHONPATH=/mine" in (file.text or "") for file in made.files)


# ---------------------------------------------------------------- what the nodes write


@pytest.fixture
def handle(plan):
    """A run whose folder here is not the one that its nodes write to, which is ``there``."""
    made = plan()
    folder = run_folder.RunFolder(run_folder.home() / "runs/demo-1")
    folder.path.mkdir(parents=True)
    folder.write("run.json", "{}")
    return run_folder.RunHandle(folder, made, 1)


@pytest.fixture
def write(handle):
    def write(name, data):
        path = Path(handle.plan.run_dir, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())

    return write


RUNS = {"pid": 1, "host": "gpu-3"}
DONE = {"exit_code": 0, "at": 1.0, "reason": None}


def listed(handle, state):
    """What `squeue` prints of the run's job."""
    return f"7|{state}|2026-11-23T12:00:00|None|{handle.plan.run_dir}\n"


def here(handle):
    found = handle.folder.path.rglob("*")
    return {
        str(path.relative_to(handle.folder.path)): path.read_bytes()
        for path in found if path.is_file() and path.name != ".mirror"
    }  # fmt: skip


def test_copy_once_mirrors_attempt_files_and_appends_growth(handle, write):
    files = {
        "job-1": b"7\n", "slurm-7.out": b"srun says\n", "attempts/1/node-0/log": b"one\n" * 999,
        "attempts/1/node-1/log": b"", "attempts/1/node-1/ranks.jsonl": b"{}\n",
        "attempts/1/node-1/usage.json": b"{}",
    }  # fmt: skip
    for name, data in files.items():
        write(name, data)
    write("attempts/1/node-0/checkpoint.pt", b"large")
    write("attempts/2/node-0/log", b"another attempt's")
    assert login.copy_once(handle, LoginNode()) is None
    files.pop("attempts/1/node-1/log")  # nothing of it has come
    assert here(handle) == {"run.json": b"{}", **files}
    write("attempts/1/node-0/log", b"one\n" * 999 + b"two\n")
    write("attempts/1/next", b"2\n")
    assert login.copy_once(handle, LoginNode()) is None
    assert here(handle)["attempts/1/node-0/log"] == b"one\n" * 999 + b"two\n"
    assert here(handle)["attempts/1/next"] == b"2\n"


def test_tail_sends_heartbeats_while_file_server_is_slow(handle, write, monkeypatch, capsysbinary):
    """A node's files take 5 s to read: whoever hears nothing for 8 s gives up."""
    for node in range(6):
        write(f"attempts/1/node-{node}/started.json", RUNS)
    monkeypatch.chdir(handle.plan.run_dir)
    now, read = [0.0], tail._read

    def slow(name, at=0):
        now[0] += 1.0
        return read(name, at)

    monkeypatch.setattr(tail, "_read", slow)
    monkeypatch.setattr(tail, "time", SimpleNamespace(monotonic=lambda: now[0]))
    sending = tail.Tail(1, {}, [*WHOLE_FILES], [*GROWING_FILES])
    sending.round()
    signs = [
        header["begun"]
        for header, _ in mirror.Frames().feed(capsysbinary.readouterr().out)
        if "file" not in header
    ]
    assert signs == [False] * 6 + [True]
    sending.round()
    assert capsysbinary.readouterr().out.count(b"\n") == 6


def test_copy_ignores_login_node_paths_outside_mirrored_files(handle):
    copy = login.Copy.of_run(handle)
    for name in ("../x", "run.json", "attempts/1/node-0/../../../x", "attempts/1/node-0/log/x"):
        copy.take({"file": name}, b"x")
    assert here(handle) == {"run.json": b"{}"}


def test_copy_refuses_log_chunk_after_gap(handle):
    copy = login.Copy.of_run(handle)
    copy.take({"file": "attempts/1/node-0/log", "at": 0}, b"one\n")
    with pytest.raises(SubmitFailed, match="a part of it is missing"):
        copy.take({"file": "attempts/1/node-0/log", "at": 9}, b"three\n")
    assert here(handle)["attempts/1/node-0/log"] == b"one\n"


def test_status_follows_mirrored_files_when_login_node_is_unreachable(handle, write):
    backend, transport = backends.backend("slurm"), LoginNode(squeue=listed(handle, "RUNNING"))
    Path(handle.plan.run_dir).mkdir(parents=True)
    assert backend.status(handle, transport).state is State.PENDING
    for node in (0, 1):
        write(f"attempts/1/node-{node}/started.json", RUNS)
    assert backend.status(handle, transport).state is State.RUNNING
    transport.away = True
    seen = backend.status(handle, transport)
    assert (seen.state, seen.nodes[0].reason) == (State.RUNNING, "host login does not answer")
    transport.away = False
    for node in (0, 1):
        write(f"attempts/1/node-{node}/exit.json", DONE)
    assert backend.status(handle, transport).state is State.SUCCEEDED


def test_status_reads_exit_files_written_during_squeue_query(handle, write):
    class Ends(LoginNode):
        def run(self, host, argv, **options):
            for node in (0, 1):
                write(f"attempts/1/node-{node}/exit.json", DONE)
            return super().run(host, argv, **options)

    for node in (0, 1):
        write(f"attempts/1/node-{node}/started.json", RUNS)
    transport = Ends(squeue=listed(handle, "COMPLETED"))
    assert backends.backend("slurm").status(handle, transport).state is State.SUCCEEDED


def test_monitor_reports_final_state_only_after_logs_are_mirrored(handle, write):
    transport = LoginNode(squeue="")  # Slurm has forgotten the job
    write("job-1", b"7\n")
    for node in (0, 1):
        write(f"attempts/1/node-{node}/started.json", RUNS)
        write(f"attempts/1/node-{node}/exit.json", DONE)
        write(f"attempts/1/node-{node}/log", b"x" * (3 << 20))
    monitor = backends.backend("slurm").watch(handle, transport)
    states = [State.PENDING]
    deadline = time.monotonic() + 60
    with contextlib.closing(monitor):
        while not states[-1].final and time.monotonic() < deadline:
            states.append(monitor.status().state)
            time.sleep(0.01)
    assert set(states[:-1]) <= {State.PENDING, State.RUNNING}
    assert states[-1] is State.SUCCEEDED
    assert len(here(handle)["attempts/1/node-1/log"]) == 3 << 20


def test_status_stays_pending_when_login_node_lacks_run_folder(handle):
    assert login.copy_once(handle, LoginNode()) is None
    assert backends.backend("slurm").status(handle, LoginNode(squeue="")).state is State.PENDING


def test_cancel_writes_reason_on_login_node_and_locally(handle, write):
    Path(handle.plan.run_dir).mkdir(parents=True)
    transport = LoginNode(squeue=listed(handle, "PENDING"), scancel="")

    class Ends(LoginNode):
        def run(self, host, argv, **options):
            done = super().run(host, argv, **options)
            if "scancel" in argv:
                self.printed["squeue"] = listed(handle, "CANCELLED")
            return done

    transport = Ends(squeue=listed(handle, "PENDING"), scancel="")
    backends.backend("slurm").cancel(handle, transport, "cancelled")
    assert Path(handle.plan.run_dir, "stop-7").read_text() == "cancelled\n"
    assert here(handle)["stop-7"] == b"cancelled\n"
    backends.backend("slurm").remove_remote_files(handle, transport)
    assert not Path(handle.plan.run_dir).exists()
    assert handle.folder.path.exists()


def test_local_slurm_run_copies_and_removes_nothing(handle):
    own = msgspec.structs.replace(handle.plan, run_dir=str(handle.folder.path))
    local = run_folder.RunHandle(handle.folder, own, 1)
    assert login.copy_once(local, LoginNode()) is None
    assert login.follow(local, LoginNode()) is None
    backends.backend("slurm").remove_remote_files(local, LoginNode())
    assert local.folder.path.exists()
    assert probe.folder(SlurmCluster()) == str(run_folder.home())
    assert observe.read(local) is not None


def test_doctor_checks_slurm_from_login_node(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    transport = LoginNode(sbatch="", srun="gpu-3\n")
    job = JobSpec(name="demo", command=("true",), workdir=str(tmp_path))
    (tmp_path / "train.py").write_text("")
    subject = backends.backend("slurm").subject("hpc", SlurmCluster(ssh=NAME), job)
    found = {each.check: each for each in doctor.examine(subject, transport).findings}
    assert found["compute"].cause == "seen on gpu-3"
    assert found["admission"].level == "ok", found
    assert str(tmp_path / "clusterkit") in found["folder"].cause
    (asked,) = (asked for asked in transport.asked if "srun" in asked)
    # The job's own folder is copied before it runs: it need not be there.
    assert asked[-3:] == ("python3", str(tmp_path / "clusterkit"), "/")
