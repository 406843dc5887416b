"""The local backend: what it finds on this machine, and how it divides it."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import msgspec
import pytest

from clusterkit import api, backends
from clusterkit.agent.processes import process_start
from clusterkit.backends import probing
from clusterkit.backends.base import Backend, check_capabilities
from clusterkit.backends.local.backend import LocalBackend
from clusterkit.backends.node_status import NativeState, NodeFiles, judge_exit, judge_node
from clusterkit.cluster import Gpu, LocalCluster
from clusterkit.errors import BadInput, CapabilityError, PortTaken, Unavailable
from clusterkit.hosts.gpus import read_gpus
from clusterkit.run.folder import RunFolder, RunHandle
from clusterkit.run.status import State, overall
from clusterkit.spec import JobSpec
from clusterkit.transport import LocalTransport
from tests.conftest import noted

CSV = """\
0, GPU-aaaa-1, NVIDIA H100 80GB HBM3, 81559
1, GPU-bbbb-2, NVIDIA H100 80GB HBM3, 81559
10, GPU-cccc-3, NVIDIA A100, 40960
"""
LOCAL = LocalBackend()


def job(**fields):
    return JobSpec(**({"name": "demo", "program": "train.py", "workdir": "/w"} | fields))


def plan(facts, cluster=None, **fields):
    return LOCAL.plan(job(**fields), cluster or LocalCluster(), facts, "demo-1")


# ---------------------------------------------------------------- probing


def test_read_gpus_parses_nvidia_smi_csv():
    assert read_gpus(CSV).gpus == (
        Gpu("0", "NVIDIA H100 80GB HBM3", 81559),
        Gpu("1", "NVIDIA H100 80GB HBM3", 81559),
        Gpu("10", "NVIDIA A100", 40960),
    )


@pytest.mark.parametrize(
    ("visible", "indexes"),
    [
        ("", []),
        ("1", ["1"]),
        ("10,0", ["10", "0"]),
        (" 1 , 0 ", ["1", "0"]),
        ("GPU-bbbb-2", ["1"]),
        ("GPU-bbbb", ["1"]),
        ("7", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("01", ["1"]),
        ("1x", ["1"]),
        ("0,0", []),
        ("GPU-aaaa,0", []),
        ("GPU-", []),
        ("MIG-a1/7/0,0", ["MIG-a1/7/0", "0"]),
        # CUDA sees only what stands before the first one that is not there.
        ("0,-1,1", ["0"]),
        ("0,7,1", ["0"]),
    ],
)
def test_read_gpus_keeps_visible_devices_in_given_order(visible, indexes):
    assert [gpu.index for gpu in read_gpus(CSV, "", visible).gpus] == indexes


@pytest.mark.parametrize(
    "said",
    [
        "",
        "No devices were found\n",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
        "0, GPU-a, name, [GPU is lost]\n",
        "a, b, c, d\n",
    ],
)
def test_read_gpus_returns_none_for_unparsable_output(said):
    assert read_gpus(said).gpus == ()


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put a program called nvidia-smi on PATH that says what the test wants."""
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def says(text: str, code: int = 0) -> None:
        (tools / "said").write_text(text)
        script = f'#!/bin/sh\necho "$*" >"{tools}/asked"\ncat "{tools}/said"\nexit {code}\n'
        (tools / "nvidia-smi").write_text(script)
        (tools / "nvidia-smi").chmod(0o755)

    return says


def probe(**entry):
    return LOCAL.probe(LocalCluster(**entry), LocalTransport())


def test_probe_finds_gpus_listed_by_nvidia_smi(nvidia_smi, tmp_path):
    nvidia_smi(CSV)
    (host,) = probe().hosts
    assert [gpu.index for gpu in host.gpus] == ["0", "1", "10"]
    assert (tmp_path / "tools/asked").read_text() == (
        "--query-gpu=index,uuid,name,memory.total,mig.mode.current --format=csv,noheader,nounits\n"
    )


def test_probe_respects_cuda_visible_devices(nvidia_smi, monkeypatch):
    nvidia_smi(CSV)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "10,1")
    assert [gpu.index for gpu in probe().hosts[0].gpus] == ["10", "1"]


def test_probe_with_failed_nvidia_smi_finds_no_gpus(nvidia_smi):
    nvidia_smi("NVIDIA-SMI has failed\n", code=9)
    assert probe().hosts[0].gpus == ()


def test_cluster_gpus_limits_gpus_of_machine(nvidia_smi):
    nvidia_smi(CSV)
    assert len(probe(gpus=2).hosts[0].gpus) == 2
    assert probe(gpus=0).hosts[0].gpus == ()


def test_cluster_gpus_above_gpus_of_machine_is_refused(nvidia_smi):
    nvidia_smi(CSV)
    with pytest.raises(BadInput, match="gpus: 4 wanted, but this machine has 3"):
        probe(gpus=4)


def test_probe_finds_python_cpus_memory_and_free_port():
    facts = probe()
    (host,) = facts.hosts
    assert (host.python, host.address, facts.interface) == (sys.executable, "127.0.0.1", "lo")
    assert host.cpus >= 1
    assert host.memory_mib > 100
    assert "clusterkit" in host.versions
    assert facts.port_origin == "free when probed"


def test_probe_keeps_free_cluster_port():
    port = LocalTransport().free_port("localhost")
    facts = probe(port=port)
    assert (facts.port, facts.port_origin) == (port, "cluster: port")


def test_probe_refuses_cluster_port_in_use():
    import socket

    with socket.socket() as server:
        server.bind(("0.0.0.0", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port} on 127.0.0.1 is in use"):
            probe(port=port)


def test_probe_runs_with_cluster_interpreter(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    host = probe(python=str(python)).hosts[0]
    assert host.python == str(python)
    assert "clusterkit" in host.versions


@pytest.mark.parametrize("content", [None, "#!/bin/sh\nexit 3\n", "#!/bin/sh\necho hello\n"])
def test_broken_or_missing_interpreter_is_reported_by_path(tmp_path, content):
    python = tmp_path / "python"
    if content is not None:
        python.write_text(content)
        python.chmod(0o755)
    with pytest.raises(Unavailable, match=str(python)) as error:
        probe(python=str(python))
    assert error.value.exit_code == 125


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """Make an active environment of a kind: VIRTUAL_ENV, CONDA_PREFIX."""

    def make(variable):
        folder = tmp_path / variable
        (folder / "bin").mkdir(parents=True)
        python = folder / "bin/python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        monkeypatch.setenv(variable, str(folder))
        return str(python)

    return make


def test_interpreter_precedence_is_job_cluster_environment_clusterkit(environment, monkeypatch):
    def chosen(named=None, **entry):
        facts = LOCAL.probe(LocalCluster(**entry), LocalTransport(), job(python=named))
        host = facts.hosts[0]
        subject = LOCAL.subject("local", LocalCluster(**entry), job(python=named))
        assert subject.hosts[0].python == host.python
        return host.python, plan(facts, python=named).notes

    def origin(notes):
        return next(note.origin for note in notes if note.name == "python")

    python, notes = chosen()
    assert (python, origin(notes)) == (sys.executable, "clusterkit's own")
    conda = environment("CONDA_PREFIX")
    python, notes = chosen()
    assert (python, origin(notes)) == (conda, "the active environment, CONDA_PREFIX")
    virtual = environment("VIRTUAL_ENV")
    python, notes = chosen()
    assert (python, origin(notes)) == (virtual, "the active environment, VIRTUAL_ENV")
    python, notes = chosen(python=conda)
    assert (python, origin(notes)) == (conda, "cluster: python")
    python, notes = chosen(virtual, python=conda)
    assert (python, origin(notes)) == (virtual, "job: python")
    # clusterkit's own environment, and one that is gone.
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    assert chosen()[0] == sys.executable
    monkeypatch.setenv("VIRTUAL_ENV", "/nowhere")
    assert chosen()[0] == conda


def test_project_venv_is_chosen_if_python_of_clusterkit_has_no_torch(tmp_path, monkeypatch):
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, code in ((".venv", 1), ("venv", 0)):  # whether it has torch
        python = tmp_path / name / "bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/bin/sh\nexit {code}\n")
        python.chmod(0o755)
    here = job(workdir=str(tmp_path))
    own = (sys.executable, "clusterkit's own")
    monkeypatch.setattr(probing.importlib.util, "find_spec", lambda name: object())
    assert probing.local_interpreter(here, None) == own
    monkeypatch.setattr(probing.importlib.util, "find_spec", lambda name: None)
    chosen = (str(python), "the project's venv; clusterkit's own has no torch")
    assert probing.local_interpreter(here, None) == chosen
    assert probing.local_interpreter(here, "/p/python") == ("/p/python", "cluster: python")
    monkeypatch.chdir(tmp_path)
    assert probing.local_interpreter(None, None) == chosen
    python.write_text("#!/bin/sh\nexit 1\n")
    assert probing.local_interpreter(here, None) == own


def test_interpreter_path_with_tilde_is_refused():
    with pytest.raises(BadInput, match="python: ~/venv/bin/python: ~ is not expanded") as error:
        probing.interpreter(None, ("~/venv/bin/python", "cluster: python"))
    assert error.value.hint == "write the whole path, such as /home/NAME/venv/bin/python"


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        ("import torch", True),
        ("import os, torch.nn as nn", True),
        ("import own", True),
        ("print('no torch')", False),
        ("try:\n  import torch\nexcept ImportError:\n  torch = None", False),
        ("def f():\n  import torch", False),
        ("if 0:\n  import torch", False),
        ("import sys\nsys.exit(0)\nimport torch", False),
    ],
)
def test_interpreter_without_torch_is_refused_if_program_imports_torch(
    source, refused, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    venv.create(tmp_path / "bare", symlinks=True)
    (tmp_path / "train.py").write_text(source)
    (tmp_path / "own.py").write_text("from torch import nn")
    words = ["bare/bin/python", "train.py"]
    if not refused:
        assert api.plan(words).python == str(tmp_path / "bare/bin/python")
        return
    with pytest.raises(Unavailable, match=r"train\.py imports torch, which .*/bare/bin/python on "
                       r"localhost does not have \(job: python\)"):  # fmt: skip
        api.plan(words)
    assert api.plan(words, settings=["env.PYTHONPATH=/lib"]).world_size == 1


def test_interpreter_given_by_name_is_found_on_path(environment, monkeypatch):
    python = environment("VIRTUAL_ENV")
    os.symlink(python, f"{os.path.dirname(python)}/python3.99")
    monkeypatch.setenv("PATH", os.path.dirname(python), prepend=os.pathsep)
    found = LOCAL.probe(LocalCluster(), LocalTransport(), job(python="python3.99"))
    assert found.hosts[0].python == f"{os.path.dirname(python)}/python3.99"
    with pytest.raises(Unavailable, match=r"python: python3\.98 does not exist") as error:
        LOCAL.probe(LocalCluster(), LocalTransport(), job(python="python3.98"))
    assert error.value.exit_code == 125


def test_interpreter_path_with_parent_folder_is_accepted(environment, cwd):
    os.symlink(os.path.dirname(environment("VIRTUAL_ENV")), cwd.parent / "bin")
    assert api.plan(["../bin/python", "-c", "1"]).python == f"{cwd}/../bin/python"


def test_command_not_on_path_is_refused_by_submit_and_plan(cwd, monkeypatch):
    (cwd / "go").write_text("#!/bin/sh\n")
    with pytest.raises(BadInput, match="command: nope-x: not found on PATH") as error:
        api.submit(["nope-x", "1"])
    assert error.value.hint is None
    with pytest.raises(BadInput, match="command: go: not found on PATH") as error:
        api.plan(["go"])
    assert error.value.hint == "./go is the file in this folder"
    assert api.plan(["nope-x"], settings=[f"env.PATH={cwd}"]).world_size == 1
    assert api.plan(["python", "-c", "1"]).world_size == 1
    (cwd / "go").chmod(0o755)
    monkeypatch.setenv("PATH", str(cwd), prepend=os.pathsep)
    assert api.plan(["go"]).world_size == 1


def test_interpreter_older_than_supported_is_refused(tmp_path):
    python = tmp_path / "python3.9"
    python.write_text(
        f"#!/bin/sh\nsed 's/list(sys.version_info.:3.)/[3, 9, 2]/' | {sys.executable} \"$@\"\n"
    )
    python.chmod(0o755)
    with pytest.raises(Unavailable, match=r"localhost: python: .*/python3\.9 is Python 3\.9\.2"):
        LOCAL.probe(LocalCluster(), LocalTransport(), job(python=str(python)))


# ---------------------------------------------------------------- planning


@pytest.mark.parametrize(
    ("gpus", "fields", "ranks", "shares"),
    [
        (8, {}, 8, ["0,1,2,3,4,5,6,7"]),
        (8, {"nodes": 2}, 4, ["0,1,2,3", "4,5,6,7"]),
        (8, {"nodes": 3}, 2, ["0,1", "2,3", "4,5"]),
        (8, {"nodes": 2, "gpus_per_node": 1}, 1, ["0", "1"]),
        (8, {"nodes": "1:4"}, 2, ["0,1", "2,3", "4,5", "6,7"]),
        (0, {}, 1, [None]),
        (0, {"nodes": 2}, 1, [None, None]),
        (0, {"gpus_per_node": 4}, 4, [None]),
        (8, {"device": "cpu"}, 1, [""]),
        (8, {"device": "cpu", "gpus_per_node": 16}, 16, [""]),
    ],
)
def test_plan_divides_gpus_between_simulated_nodes(make_facts, gpus, fields, ranks, shares):
    found = plan(make_facts(gpus=gpus), **fields)
    assert found.topology["nproc_per_node"] == ranks
    assert [step.env.get("CUDA_VISIBLE_DEVICES") for step in found.steps] == shares


@pytest.mark.parametrize(
    ("gpus", "fields", "message", "hint"),
    [
        (4, {"gpus_per_node": 8}, "1 node x 8 = 8 GPUs, but localhost has 4", "--gpus 4"),
        (4, {"gpus_per_node": 4, "nodes": 2}, "2 nodes x 4 = 8 GPUs", "--gpus 2"),
        (2, {"nodes": 4}, "4 nodes cannot share 2 GPUs", "--nodes 2, or --set device=cpu"),
        (1, {"nodes": 2}, "2 nodes cannot share 1 GPU of", "--nodes 1, or --set device=cpu"),
        (0, {"device": "cuda"}, "cuda, but localhost has no GPU", "device: auto, or cpu"),
    ],
)
def test_plan_refuses_too_many_gpus_with_fitting_numbers_in_hint(
    make_facts, gpus, fields, message, hint
):
    with pytest.raises(BadInput, match=message) as error:
        plan(make_facts(gpus=gpus), **fields)
    assert (error.value.hint or "").startswith(hint)


def test_plan_notes_name_origin_of_derived_values(make_facts):
    notes = {note.name: str(note) for note in plan(make_facts(gpus=8), nodes=2).notes}
    assert notes["device"] == "device=cuda (8 x NVIDIA H100 80GB HBM3)"
    assert notes["nproc_per_node"] == "nproc_per_node=4 (8 GPUs / 2 nodes)"
    assert notes["master_port"] == "master_port=29501 (free when probed)"
    assert notes["threads_per_rank"] == "threads_per_rank=1 (8 cores / 8 ranks)"


@pytest.mark.parametrize(
    ("cpus", "fields", "threads"),
    [
        (64, {}, "64"),
        (64, {"nodes": 2, "gpus_per_node": 4}, "8"),
        (2, {"gpus_per_node": 8}, "1"),
        (64, {"threads_per_rank": 3}, "3"),
    ],
)
def test_plan_divides_cores_into_threads_per_rank(make_facts, cpus, fields, threads):
    found = plan(make_facts(cpus=cpus), **fields)
    assert noted(found, "threads_per_rank") == threads
    value = threads if "threads_per_rank" in fields else f'"${{OMP_NUM_THREADS-{threads}}}"'
    assert f"export OMP_NUM_THREADS={value}\n" in (found.files[0].text or "")


def test_plan_notes_omp_num_threads_of_host_or_job_environment(make_facts):
    facts = make_facts()
    host = msgspec.structs.replace(facts.hosts[0], omp_num_threads="3")
    facts = msgspec.structs.replace(facts, hosts=(host,))
    notes = [str(note) for note in plan(facts).notes]
    origin = f"the environment of {host.host}; --set threads_per_rank=N sets another"
    assert f"OMP_NUM_THREADS=3 ({origin})" in notes
    assert noted(plan(facts, threads_per_rank=2), "OMP_NUM_THREADS") is None
    notes = [str(note) for note in plan(facts, env={"OMP_NUM_THREADS": "5"}).notes]
    assert "OMP_NUM_THREADS=5 (job: env)" in notes


def test_probe_reads_omp_num_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert LOCAL.probe(LocalCluster(), LocalTransport(), None).hosts[0].omp_num_threads is None
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert LOCAL.probe(LocalCluster(), LocalTransport(), None).hosts[0].omp_num_threads == "3"


def test_plan_remarks_on_more_ranks_than_cores(make_facts):
    assert noted(plan(make_facts(cpus=2), gpus_per_node=8), "") == (
        "8 ranks share 2 cores: expect them slow"
    )


def test_deepspeed_hostfile_has_line_per_simulated_node(facts):
    found = plan(facts, launcher="deepspeed", nodes=2, gpus_per_node=4)
    (hostfile,) = [f.text for f in found.files if f.path.endswith("hostfile")]
    assert hostfile == "node-0 slots=4\nnode-1 slots=4\n"


def test_mpirun_plan_has_one_step_for_all_nodes(facts):
    found = plan(facts, launcher="mpirun", nodes=2, gpus_per_node=2)
    assert len(found.steps) == found.nodes == 1
    assert found.world_size == 4
    (hostfile,) = [f.text for f in found.files if f.path.endswith("hostfile")]
    assert hostfile == "localhost slots=4\n"


def test_mpirun_with_gpus_on_several_simulated_nodes_is_refused(make_facts):
    with pytest.raises(BadInput, match="cannot divide this machine's GPUs"):
        plan(make_facts(gpus=4), launcher="mpirun", nodes=2)


def test_plan_takes_env_and_stop_grace_of_cluster(facts):
    found = plan(facts, LocalCluster(env={"A": "1"}, stop_grace=3.5))
    assert "export A=1\n" in (found.files[0].text or "")
    assert "--grace 3.5 " in (found.files[0].text or "")
    assert found.stop_grace == 3.5


def test_plan_for_1000_nodes_has_one_step_per_node(facts):
    found = plan(facts, nodes=1000)
    assert [step.env["NODE_RANK"] for step in found.steps] == [str(n) for n in range(1000)]


# ---------------------------------------------------------------- judging


@pytest.mark.parametrize(
    ("states", "state"),
    [
        ({State.SUCCEEDED}, State.SUCCEEDED),
        ({State.SUCCEEDED, State.PENDING}, State.RUNNING),
        ({State.PENDING}, State.PENDING),
        ({State.RUNNING, State.FAILED}, State.RUNNING),
        ({State.FAILED, State.SUCCEEDED}, State.FAILED),
        ({State.CANCELLED, State.SUCCEEDED}, State.CANCELLED),
        ({State.CANCELLED, State.FAILED}, State.FAILED),
        ({State.UNKNOWN, State.RUNNING}, State.UNKNOWN),
    ],
    ids=lambda given: "+".join(sorted(given)) if isinstance(given, set) else given.value,
)
def test_run_state_follows_from_node_states(states, state):
    assert overall(states) is state


@pytest.mark.parametrize(
    ("ended", "state"),
    [
        ({"exit_code": 0, "reason": None}, State.SUCCEEDED),
        ({"exit_code": 1}, State.FAILED),
        ({"exit_code": 143, "reason": "stopped on request"}, State.CANCELLED),
        ({"exit_code": 127, "reason": "No such file"}, State.FAILED),
        ({}, State.UNKNOWN),
        ([], State.UNKNOWN),
        (b"torn", State.UNKNOWN),
        ({"exit_code": "0"}, State.UNKNOWN),
        ({"exit_code": None}, State.UNKNOWN),
        ({"exit_code": 0, "at": "noon"}, State.UNKNOWN),
        ({"exit_code": 0, "causes": 3}, State.UNKNOWN),
        ({"exit_code": 0, "a later version's": [1]}, State.SUCCEEDED),
    ],
    ids=str,
)
def test_node_state_follows_from_exit_file(ended, state):
    assert (
        judge_exit(
            0, "localhost", ended if isinstance(ended, bytes) else json.dumps(ended).encode()
        ).state
        is state
    )


@pytest.mark.parametrize("field", ["waits", "remarks", "hang", "host", "spare"])
def test_damaged_started_file_makes_node_state_unknown(field):
    """`"waits": 5` in started.json was an AttributeError, which cancelled the run."""
    document = json.dumps({field: 5}).encode()
    files = NodeFiles(begun=True, alive=True, started=document)
    found = judge_node(0, "h", files, NativeState.of_process(files))
    assert (found.state, found.reason) == (
        State.UNKNOWN, "started.json is damaged: it cannot be read"
    )  # fmt: skip
    assert files.host == ""


@pytest.mark.parametrize(
    ("stat", "ticks"),
    [
        (None, None),
        (b"", None),
        (b"1 (a b) R) S " + b" ".join(b"%d" % n for n in range(1, 40)), 19),
        (b"1 (x) Z " + b" ".join(b"%d" % n for n in range(1, 40)), None),
        (b"garbage", None),
    ],
)
def test_process_start_is_parsed_from_proc_stat(stat, ticks):
    assert process_start(stat) == ticks


# ---------------------------------------------------------------- cancelling


def test_cancel_kills_processes_of_run_with_damaged_run_file(facts):
    found = plan(facts)
    LocalTransport().put("localhost", f"{found.run_dir}/run.json", b"{}")
    left = subprocess.Popen(["sleep", "600"], env={"CLUSTERKIT_RUN_DIR": found.run_dir})
    try:
        LOCAL.cancel(RunHandle(RunFolder(Path(found.run_dir)), found), LocalTransport())
        assert left.poll() is not None
    finally:
        left.kill()
        left.wait()


# ---------------------------------------------------------------- registry and capabilities


def test_unknown_backend_is_refused_with_known_backends_in_hint():
    with pytest.raises(BadInput, match="backend 'slrum' is unknown") as error:
        backends.backend("slrum")
    assert "local" in (error.value.hint or "")


class Limited(LocalBackend):
    name = "limited"
    unsupported = {"restarts": "it has no supervisor", "launcher=mpirun": "there is no MPI"}  # noqa: RUF012


OTHERS: tuple[type[Backend], ...] = (Limited, LocalBackend)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"restarts": 1}, "backend limited does not support restarts: it has no supervisor"),
        ({"launcher": "mpirun"}, "does not support launcher=mpirun: there is no MPI"),
    ],
)
def test_field_unsupported_by_backend_is_refused(fields, message):
    with pytest.raises(CapabilityError, match=message) as error:
        check_capabilities(Limited, job(**fields), OTHERS)
    assert error.value.hint == "backends that do: local"
    assert error.value.exit_code == 125


def test_unsupported_field_at_default_is_accepted():
    check_capabilities(Limited, job(restarts=0, launcher="torchrun"), OTHERS)
