"""What a host tells of itself, as its Python says it: a real process each time."""

import json
import os
import pwd
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest

from clusterkit.hosts import host_probe, python_text
from clusterkit.hosts.gpus import GPU_QUERY, read_gpus
from tests.forked import at_start

TEXT = python_text.program(Path(host_probe.__file__).read_bytes())


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """Run the probe as a host would; gives its document."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("SSH_CONNECTION", raising=False)

    def run(python=sys.executable, env=None, **asked):
        given = {"workdir": "~/work", "packages": [], "tools": [], "gpu_query": list(GPU_QUERY)}
        done = subprocess.run(
            [python, "-", json.dumps(given | asked)], input=TEXT, capture_output=True, cwd=tmp_path,
            env={**os.environ, **(env or {})},
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.count(b"\n") == 1
        return json.loads(done.stdout)

    return run


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Programs of the test's own, first on PATH."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)

    def make(name, script):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
        return str(folder / name)

    return make


def test_probe_creates_no_file_or_folder(probe, tmp_path):
    before = sorted(tmp_path.iterdir())
    probe(workdir=str(tmp_path / "not there yet"))
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("variables", [{}, {"PYTHONPATH": "."}])
def test_probe_ignores_shadow_modules_in_working_folder(variables, probe, tmp_path):
    for name in ("array", "fcntl", "glob", "json", "random", "shutil", "socket", "struct"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(9)\n")
    assert probe(env=variables)["python"] == sys.executable


@pytest.mark.parametrize(
    "name",
    ["array", "contextlib", "enum", "fcntl", "functools", "glob", "json", "random", "re",
     "selectors", "shutil", "signal", "socket", "struct", "subprocess", "threading", "types",
     "typing", "warnings"],
)  # fmt: skip
def test_probe_ignores_modules_that_python_imported_as_it_started(name, probe, tmp_path):
    for path, text in at_start(name).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert probe(env={"PYTHONPATH": "site"})["python"] == sys.executable


def test_probe_reports_python_cpus_and_memory(probe):
    told = probe()
    assert told["python"] == sys.executable
    assert told["python_version"] == list(sys.version_info[:3])
    assert told["cpus"] == len(os.sched_getaffinity(0))
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1])
    assert abs(told["memory_mib"] - total / 1024) < 64


def test_probe_counts_only_cpus_in_process_affinity(probe):
    one = min(os.sched_getaffinity(0))
    done = subprocess.run(
        ["taskset", "-c", str(one), sys.executable, "-", json.dumps(
            {"workdir": "x", "packages": [], "tools": [], "gpu_query": ["nvidia-smi"]})],
        input=TEXT, capture_output=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["cpus"] == 1


@pytest.mark.parametrize(
    ("workdir", "expected"),
    [
        ("/a/b", "/a/b"),
        ("/a b/../c", "/c"),
        ("~/x y", "HOME/x y"),
        ("~", "HOME"),
        ("relative", "CWD/relative"),
        ("~nobody-of-this-name/x", "CWD/~nobody-of-this-name/x"),
        ("/日本/$HOME", "/日本/$HOME"),
    ],
)
def test_probe_expands_workdir_to_absolute_path(probe, tmp_path, workdir, expected):
    told = probe(workdir=workdir, env={"HOME": "/home/of mine"})
    expected = expected.replace("HOME", "/home/of mine") if workdir[0] == "~" else expected
    assert told["workdir"] == expected.replace("CWD", str(tmp_path))


def test_probe_without_home_variable_uses_home_of_user_database(probe):
    # As `env` would run it; None is what subprocess cannot say.
    asked = {"workdir": "~/w", "packages": [], "tools": [], "gpu_query": ["nvidia-smi"]}
    done = subprocess.run(
        ["env", "-u", "HOME", sys.executable, "-", json.dumps(asked)],
        input=TEXT, capture_output=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["workdir"] == f"{pwd.getpwuid(os.getuid()).pw_dir}/w"


# ---------------------------------------------------------------- the network


@pytest.mark.needs("ip")
def test_probe_lists_same_interface_addresses_as_ip(probe):
    done = subprocess.run(["ip", "-j", "address"], capture_output=True)
    if done.returncode:
        pytest.skip("this ip has no -j")
    theirs = {}
    for link in json.loads(done.stdout):
        theirs[link["ifname"]] = {a["local"] for a in link["addr_info"] if a["scope"] != "link"}
    ours = {}
    for one in probe()["interfaces"]:
        ours.setdefault(one["name"], []).append(one["address"])
    assert {name: set(each) for name, each in ours.items()} == {
        name: each for name, each in theirs.items() if each
    }
    assert ours["lo"][0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("connection", "reached"),
    [
        ("10.0.0.9 50000 10.0.0.1 22", "10.0.0.1"),
        ("2001:db8::9 50000 2001:db8::1 22", "2001:db8::1"),
        ("", ""),
        ("UNKNOWN", ""),
        ("10.0.0.9 50000", ""),
    ],
)
def test_probe_takes_reached_address_from_ssh_connection(probe, connection, reached):
    assert probe(env={"SSH_CONNECTION": connection})["reached_at"] == reached
    assert probe()["reached_at"] == ""


# ---------------------------------------------------------------- packages and tools


def test_probe_reports_versions_of_installed_packages_only(probe):
    told = probe(packages=["pytest", "msgspec", "no-such-package", ""])["versions"]
    import msgspec

    assert told == {"pytest": pytest.__version__, "msgspec": msgspec.__version__}


@pytest.mark.parametrize("metadata", [None, "", "Name: half\n", b"\xff\xfe", "Version:\n"])
def test_probe_omits_package_without_readable_version(probe, tmp_path, metadata):
    folder = tmp_path / "lib" / "half-1.0.dist-info"
    folder.mkdir(parents=True)
    if metadata is not None:
        data = metadata if isinstance(metadata, bytes) else metadata.encode()
        (folder / "METADATA").write_bytes(data)
    told = probe(packages=["half"], env={"PYTHONPATH": str(tmp_path / "lib")})
    assert told["versions"] == {}


def test_probe_reports_paths_of_executable_tools_only(probe, tools):
    mine = tools("mpirun", "")
    Path(tools("ninja", "")).chmod(0o644)
    told = probe(tools=["mpirun", "ninja", "no such tool"], env={"PATH": str(Path(mine).parent)})
    assert told["tools"] == {"mpirun": mine}


# ---------------------------------------------------------------- GPUs

CSV = "0, GPU-aa, NVIDIA H100 80GB HBM3, 81559\n1, GPU-bb, NVIDIA H100 80GB HBM3, 81559\n"


def visible_gpus(told):
    found = read_gpus(told["gpus"], told["gpu_complaint"], told["visible"])
    return [gpu.index for gpu in found.gpus]


def test_probe_lists_gpus_from_nvidia_smi(probe, tools):
    tools("nvidia-smi", f'[ "$*" = "{" ".join(GPU_QUERY[1:])}" ] && printf "{CSV}"')
    told = probe()
    assert visible_gpus(told) == ["0", "1"]


def test_probe_reports_cuda_visible_devices(probe, tools):
    tools("nvidia-smi", f'printf "{CSV}"')
    for visible, indexes in (("1", ["1"]), ("", []), ("GPU-bb,GPU-aa", ["1", "0"])):
        told = probe(env={"CUDA_VISIBLE_DEVICES": visible})
        assert visible_gpus(told) == indexes
    assert probe()["visible"] is None


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 9", "nvidia-smi exited with 9"),
        (
            "echo 'NVIDIA-SMI has failed' ; exit 12",
            "nvidia-smi exited with 12: NVIDIA-SMI has failed",
        ),
        ("printf '\\377\\376' ; exit 1", "nvidia-smi exited with 1: \ufffd\ufffd"),
        ("kill -9 $$", "nvidia-smi exited with -9"),
        ("echo 'No devices were found'", "nvidia-smi exited with 0: No devices were found"),
    ],
)
def test_probe_reports_exit_code_and_output_of_failed_nvidia_smi(probe, tools, script, said):
    tools("nvidia-smi", script)
    told = probe()
    assert (visible_gpus(told), told["gpu_complaint"]) == ([], said)


def test_probe_reports_nvidia_smi_that_cannot_be_executed(probe, tools):
    path = Path(tools("nvidia-smi", ""))
    path.write_bytes(b"\x7fELF of another machine")
    assert probe()["gpu_complaint"] == "nvidia-smi: Exec format error"


def test_probe_stops_waiting_for_hung_nvidia_smi(tools, monkeypatch):
    tools("nvidia-smi", "exec sleep 60")
    monkeypatch.setattr(host_probe, "NVIDIA_SECONDS", 0.2)
    assert host_probe.gpus(["nvidia-smi"])[1] == "nvidia-smi does not answer within 0.2 s"


def test_probe_reads_nvidia_smi_output_that_is_not_utf8(probe, tools):
    tools("nvidia-smi", r"printf '0, GPU-aa, Caf\351, 100\n'")
    assert [gpu.memory_mib for gpu in read_gpus(probe()["gpus"]).gpus] == [100]


def test_probe_without_nvidia_smi_reports_no_gpus(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(host_probe, "ROOT", "/nowhere/")
    assert host_probe.gpus(list(GPU_QUERY)) == ("", "")


# ---------------------------------------------------------------- as text for any Python


def test_probe_text_runs_without_module_file():
    module = types.ModuleType("host_probe")
    exec(compile(TEXT, "<stdin>", "exec"), module.__dict__)
    assert module.addresses()


@pytest.mark.parametrize("taken", [False, True])
def test_probe_finds_port_in_range_even_if_wanted_port_is_taken(taken):
    with socket.create_server(("", 0)) as server:
        wanted = server.getsockname()[1] if taken else None
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-", json.dumps({"port": wanted})],
            input=TEXT, capture_output=True,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert int(done.stdout) in host_probe.PORTS
