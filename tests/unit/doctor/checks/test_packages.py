"""Checks of Python, packages and the compiler."""

import re
import subprocess
import sys

import pytest

from clusterkit.doctor.hosts.base import Machine, Needs
from clusterkit.doctor.hosts.checks.packages import PACKAGES, Packages
from clusterkit.spec import JobSpec
from tests.unit.doctor.checks.answers import EIGHT, NO_GPU, nvidia
from tests.unit.doctor.conftest import PYTHON, make_answer, make_subject, named, needs


def python(version=(3, 11, 7), bits=64):
    return {"version": list(version), "bits": bits}


@pytest.mark.parametrize(
    ("version", "level"),
    [((3, 11, 7), "ok"), ((3, 11, 2), "warn"), ((3, 12, 1), "fail"), ((3, 10, 13), "fail"),
     ((4, 0, 0), "fail")],
)  # fmt: skip
def test_python_check_judges_version_against_other_hosts(judged, version, level):
    found = judged("python", make_subject(3), python(), h1=python(version))
    assert found["h0"].level == "ok"
    assert found["h1"].level == level


def test_python_check_fails_for_32_bit_python(judged):
    assert judged("python", make_subject(2), python(), h1=python(bits=32))["h1"].level == "fail"


def test_python_check_fails_when_all_hosts_are_too_old(judged):
    found = judged("python", make_subject(2), python((3, 9, 2)))
    assert found.levels() == {"h0": ["fail"], "h1": ["fail"]}
    assert "python3.11" in found["h0"].remedy


def test_python_check_quotes_output_of_broken_interpreter(judged):
    another = make_answer(
        {"python": python()}, interpreter="python3", stderr="sh: 2: /opt/venv/bin/python: not found"
    )
    none = make_answer(interpreter="", began=None, ended=None, stderr="")
    found = judged("python", make_subject(3), python(), h1=another, h2=none)
    assert "does not work: sh: 2: /opt/venv/bin/python: not found" in found["h1"].cause
    assert found["h1"].remedy == (
        "python3 -m venv /opt/venv && /opt/venv/bin/python -m pip install torch"
    )
    assert "no output" in found["h2"].cause


@pytest.mark.parametrize(
    ("interpreter", "begins", "installs"),
    [
        ("/opt/venv/bin/python", "python3 -m venv /opt/venv && ", "/opt/venv/bin/python"),
        ("/opt/a b/bin/python", "python3 -m venv '/opt/a b' && ", "'/opt/a b/bin/python'"),
        ("python3", "sudo apt-get install -y python3 python3-venv && sudo python3 -m venv "
         "/opt/clusterkit/python3 && ", "sudo /opt/clusterkit/python3/bin/python"),
    ],
)  # fmt: skip
def test_python_remedy_installs_packages_of_other_hosts(judged, interpreter, begins, installs):
    there = {"python": python(), "packages": packages(deepspeed=None)}
    machines = tuple(
        Machine(name=f"h{i}", address=f"10.0.0.{i}", python=interpreter) for i in range(3)
    )
    whole = make_answer(there, interpreter=interpreter)
    none = make_answer(interpreter="", began=None, ended=None, stderr="")
    found = judged("python", make_subject(hosts=machines), h0=whole, h1=whole, h2=none)
    remedy = found["h2"].remedy
    assert remedy.startswith(begins)
    assert f"{installs} -m pip install torch==2.13.0 transformers==5.23.0" in remedy
    named = "python: /opt/clusterkit/python3/bin/python in the cluster entry"
    assert (named in remedy) == (interpreter == "python3")


def test_remedies_use_package_manager_of_host(judged):
    no_driver = nvidia(devices=8) | {"query": None}
    outputs = {"python": python((3, 9, 1)), "packages": packages(), "nvidia": no_driver,
               "compiler": tools(compiler=None, ninja=None, headers=False)}  # fmt: skip
    late = {"sent": 0.0, "received": 0.2, "began": 900.1, "ended": 900.1}
    remedies = {}
    for installer in ("", "apt-get", "dnf"):
        host = make_answer(outputs, installer=installer, **late)
        subject = make_subject(1, needs=needs(deepspeed=True))
        for check in ("python", "compiler", "clock", "gpu-driver"):
            told = judged(check, subject, host)["h0"]
            assert told.remedy, told
            remedies[installer, check] = told.remedy.split("  # ")[0]
    make = (
        "&& sudo python3.11 -m venv /opt/clusterkit/python3.11 && "
        "sudo /opt/clusterkit/python3.11/bin/python -m pip install torch==2.13.0"
    )
    assert remedies["dnf", "python"].startswith(f"sudo dnf install -y python3.11 {make}")
    apt = "sudo apt-get install -y "
    assert remedies["apt-get", "python"].startswith(f"{apt}python3.11 python3.11-venv {make}")
    assert remedies["dnf", "compiler"] == "sudo dnf install -y gcc-c++ ninja-build python3-devel"
    assert remedies["apt-get", "compiler"] == f"{apt}g++ ninja-build python3-dev"
    assert remedies["dnf", "clock"] == (
        "sudo dnf install -y chrony && sudo systemctl enable --now chronyd && sudo chronyc makestep"
    )
    assert remedies["apt-get", "clock"] == f"{apt}chrony && sudo chronyc makestep"
    assert remedies["dnf", "gpu-driver"] == (
        "sudo dnf install -y nvidia-driver-cuda kmod-nvidia-open-dkms"
    )
    # Not Debian's own, which torch's CUDA then finds too old.
    assert remedies["apt-get", "gpu-driver"] == f"{apt}nvidia-driver-580"
    for check in ("python", "compiler", "clock", "gpu-driver"):
        assert remedies["", check] == remedies["apt-get", check]


def test_python_remedy_for_old_version_also_installs_torch(judged):
    whole = make_answer({"python": python(), "packages": packages()})
    old = make_answer({"python": python((3, 10, 1)), "packages": packages()})
    remedy = judged("python", make_subject(3), h0=whole, h1=old, h2=whole)["h1"].remedy
    assert remedy.startswith(
        "sudo apt-get install -y python3.11 python3.11-venv && sudo python3.11"
    )
    assert "pip install torch==2.13.0 deepspeed==0.19.8 transformers==5.23.0" in remedy


def packages(**versions):
    there = {"torch": "2.13.0+cu130", "deepspeed": "0.19.8", "transformers": "5.23.0"}
    there |= {name.replace("_", "-"): version for name, version in versions.items()}
    return {
        "versions": {name: version for name, version in there.items() if version},
    }


def test_packages_check_passes_when_hosts_agree(judged):
    found = judged("packages", make_subject(3), packages())
    assert found["h0"].cause == "torch 2.13.0+cu130, deepspeed 0.19.8, transformers 5.23.0"


@pytest.mark.parametrize(
    ("name", "version", "level", "remedy"),
    [
        ("torch", "2.12.0+cu130", "fail", "torch==2.13.0"),
        ("torch", "2.13.0+cu126", "fail", "torch==2.13.0"),
        ("torch", None, "fail", "torch==2.13.0"),
        ("deepspeed", "0.18.0", "fail", "deepspeed==0.19.8"),
        ("deepspeed", None, "fail", "deepspeed==0.19.8"),
        ("transformers", "4.0", "warn", "transformers==5.23.0"),
        ("transformers", None, "warn", "transformers==5.23.0"),
    ],
)
def test_packages_check_reports_differing_or_missing_package_with_remedy(
    judged, name, version, level, remedy
):
    found = judged("packages", make_subject(3), packages(), h1=packages(**{name: version}))
    assert found["h1"].level == level
    assert name in found["h1"].cause
    assert found["h1"].remedy == f"{PYTHON} -m pip install {remedy}"


def test_packages_check_fails_on_differing_nccl(judged):
    usual = packages(nvidia_nccl_cu12="2.27.3")
    found = judged("packages", make_subject(3), usual, h2=packages(nvidia_nccl_cu12="2.21.5"))
    assert found["h2"].level == "fail"
    assert found["h2"].cause == "nvidia-nccl-cu12 2.21.5, but 2.27.3 on the other hosts"


def test_packages_check_fails_on_listed_package_that_cannot_be_imported(judged):
    found = judged("packages", make_subject(3), packages(), h1=packages() | {"gone": ["torch"]})
    assert found["h0"].level == "ok"
    assert found["h1"].level == "fail"
    assert found["h1"].cause == (f"pip lists torch 2.13.0+cu130, but {PYTHON} cannot import it")
    assert found["h1"].remedy == (
        f"{PYTHON} -m pip install --force-reinstall --no-deps torch==2.13.0"
    )


def test_packages_collector_finds_metadata_without_module_without_import(tmp_path):
    """In an interpreter of its own: this one may have imported them."""
    for name in ("torch", "deepspeed", "numpy"):
        (tmp_path / f"{name}-1.dist-info").mkdir()
        (tmp_path / f"{name}-1.dist-info" / "METADATA").write_text("Version: 1\n")
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("raise SystemExit('it was imported')\n")
    (tmp_path / "deepspeed").mkdir()  # without a file: pip leaves caches behind
    text = (
        "import sys\n"
        "from clusterkit.doctor.hosts.collect.packages import packages\n"
        f"sys.path[:] = [{str(tmp_path)!r}, *(p for p in sys.path if 'site-' not in p)]\n"
        "print(sorted(packages({})['gone']))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", text], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("['deepspeed', 'torch']\n", "")


def test_packages_check_accepts_extra_package_on_one_host(judged):
    found = judged("packages", make_subject(3), packages(), h1=packages(numpy="2.0"))
    assert found["h1"].level == "ok"


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        ({}, {"torch"}),
        ({"without_torch": "ok"}, set()),
        ({"without_torch": "ok", "deepspeed": True}, {"deepspeed"}),
        ({"launcher": "deepspeed"}, {"torch", "deepspeed"}),
        ({"deepspeed": True}, {"torch", "deepspeed"}),
    ],
)
def test_packages_check_fails_when_job_needs_missing_package(judged, fields, missing):
    nothing = packages(torch=None, deepspeed=None, transformers=None)
    found = judged("packages", make_subject(2, needs=needs(**fields)), nothing)
    told = found.all("h0")
    assert {finding.level for finding in told} == ({"fail"} if missing else {"ok"})
    assert set(re.findall(r" needs (\w+),", " ".join(finding.cause for finding in told))) == missing


@pytest.mark.parametrize(
    ("fields", "level"),
    [
        ({"program": "train.py"}, "warn"),
        ({"command": ("./train.sh",)}, "ok"),
        ({"program": "train.py", "launcher": "torchrun"}, "fail"),
        ({"program": "train.py", "nodes": "1:2"}, "fail"),
    ],
)
def test_packages_check_level_for_missing_torch_depends_on_launcher(judged, fields, level):
    job = JobSpec(name="demo", **fields)
    subject = make_subject(1, needs=Needs.of(job))
    found = judged("packages", subject, packages(torch=None, deepspeed=None, transformers=None))
    assert found["h0"].level == level


def test_packages_check_skips_other_interpreter(judged):
    other = make_answer({"packages": packages(torch="1.0")}, interpreter="python3")
    assert judged("packages", make_subject(3), packages(), h1=other)["h1"].level == "skip"


@pytest.mark.parametrize(
    ("versions", "cuda"),
    [
        ({"torch": "2.13.0+cu130"}, (13, 0)),
        ({"torch": "2.6.0+cu118"}, (11, 8)),
        ({"torch": "2.13.0+cpu"}, None),
        ({"torch": "2.13.0", "nvidia-cuda-runtime-cu12": "12.8.90"}, (12, 8)),
        ({"torch": "2.13.0", "nvidia-cuda-runtime": "13.0.48"}, (13, 0)),
        ({"torch": "2.9.0a0+git1234"}, None),
        ({"torch": "", "nvidia-cuda-runtime": "²"}, None),
        ({}, None),
    ],
)
def test_packages_cuda_is_version_torch_is_built_for(versions, cuda):
    assert Packages(versions).cuda() == cuda


def test_packages_collector_reads_versions_from_pip_metadata(tmp_path, monkeypatch):
    def metadata(name, text, file="METADATA"):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)

    metadata("torch-2.13.0.dist-info", "Metadata-Version: 2.1\nName: torch\nVersion: 9.9+cu1\n\nx")
    metadata("nvidia_nccl_cu12-2.27.dist-info", "Version: 2.27.3\n")
    metadata("DeepSpeed-0.1.egg-info", "Name: deepspeed\nVersion: 0.1\n", "PKG-INFO")
    metadata("transformers-5.dist-info", "no version here")
    metadata("torchvision-1.0.dist-info", "Version: 1.0\n")
    (tmp_path / "numpy-1.0.egg-info").write_text("Version: 1.0\n")
    monkeypatch.setattr("sys.path", ["/nope", str(tmp_path / "torch-2.13.0.dist-info" / "METADATA"),
                                     str(tmp_path)])  # fmt: skip
    assert PACKAGES.collect({})["versions"] == {
        "torch": "9.9+cu1", "nvidia-nccl-cu12": "2.27.3", "deepspeed": "0.1", "numpy": "1.0",
    }  # fmt: skip


def tools(**changed):
    there = {"compiler": "/usr/bin/c++", "ninja": "/usr/bin/ninja", "nvcc": None, "headers": True,
             "locks": [], "building": False, "release": ""}  # fmt: skip
    return there | changed


LOCK = {"path": "/home/ann/.cache/torch_extensions/py311_cpu/cpu_adam/lock", "age": 3600.0}


@pytest.mark.parametrize(
    ("changed", "level", "words"),
    [
        ({}, "ok", "/usr/bin/c++"),
        ({"compiler": None}, "warn", "no C++ compiler"),
        ({"compiler": None, "ninja": None, "headers": False}, "warn", "no ninja and no Python.h"),
        ({"locks": [LOCK]}, "fail", "cpu_adam/lock"),
        ({"locks": [LOCK], "building": True}, "ok", ""),
        ({"locks": [LOCK | {"age": 60.0}]}, "ok", ""),
        ({"locks": [LOCK | {"age": -5.0}]}, "ok", ""),
    ],
)
def test_compiler_check_judges_toolchain_and_build_locks(judged, changed, level, words):
    found = judged("compiler", make_subject(1, needs=needs(deepspeed=True)), tools(**changed))
    found.says("h0", level, words)


def test_compiler_remedy_quotes_stale_lock_path(judged):
    lock = {"path": "/home/a b/$x/lock", "age": 3600.0}
    found = judged("compiler", make_subject(1, needs=needs(deepspeed=True)), tools(locks=[lock]))
    assert found["h0"].remedy == "rm '/home/a b/$x/lock'"


CU13 = {"torch": "2.13.0", "nvidia-cuda-runtime": "13.0.96", "cuda-toolkit": "13.0.3.0"}
PIP13 = "-m pip install 'cuda-toolkit[nvcc,cccl,profiler]==13.0.3.0' && cd "


@pytest.mark.parametrize(
    ("versions", "found", "cause", "remedy"),
    [
        (CU13, {}, "no nvcc: DeepSpeed cannot compile", PIP13),
        (CU13, {"nvcc": "/usr/bin/nvcc", "release": "11.8"},
         "/usr/bin/nvcc is of CUDA 11.8, torch of CUDA 13.0: DeepSpeed cannot compile", PIP13),
        (CU13, {"nvcc": "/usr/local/cuda/bin/nvcc", "release": "13.1"}, "of CUDA 13.1", PIP13),
        (CU13, {"nvcc": "/usr/local/cuda/bin/nvcc", "release": "13.0"}, "", None),
        (CU13, {"nvcc": "/usr/local/cuda/bin/nvcc"}, "", None),
        ({"torch": "2.13.0+cu128"}, {"nvcc": "/usr/bin/nvcc", "release": "12.4"},
         "/usr/bin/nvcc is of CUDA 12.4, torch of CUDA 12.8: operators that", "toolkit 12.8"),
        ({"torch": "2.9.0a0+git1"}, {}, "no nvcc", "torch.version.cuda"),
        ({"torch": "2.9.0a0+git1"}, {"nvcc": "/usr/bin/nvcc", "release": "12.4"}, "", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_compiler_check_warns_unless_nvcc_fits_torch_cuda(
    judged, device, versions, found, cause, remedy
):
    subject = make_subject(1, needs=needs(deepspeed=True, device=device))
    outputs = {"compiler": tools(**found), "nvidia": nvidia(*EIGHT),
               "packages": {"versions": versions}}  # fmt: skip
    told = judged("compiler", subject, make_answer(outputs))["h0"]
    assert told.level == ("warn" if cause else "ok")
    assert cause in told.cause
    assert remedy is None or remedy in told.remedy
    assert "apt-get" not in (told.remedy or "")


def test_compiler_check_needs_no_nvcc_without_gpus(judged):
    outputs = {"compiler": tools(), "nvidia": NO_GPU, "packages": {"versions": {}}}
    subject = make_subject(1, needs=needs(deepspeed=True))
    assert judged("compiler", subject, make_answer(outputs))["h0"].level == "ok"


def test_compiler_collector_finds_nvcc_by_cuda_home_then_path(tmp_path, monkeypatch):
    def nvcc(folder, release):
        (tmp_path / folder / "bin").mkdir(parents=True)
        path = tmp_path / folder / "bin" / "nvcc"
        path.write_text(
            f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'"
        )
        path.chmod(0o755)
        return str(path)

    on_path, in_home, of_job = (
        nvcc(folder, release) for folder, release in (("a", "11.8"), ("b", "12.4"), ("c", "13.0"))
    )
    collect = named("compiler").collectors[0].collect
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}/a/bin:/usr/bin:/bin")
    seen = [collect({"cuda_home": None})]
    monkeypatch.setenv("CUDA_HOME", f"{tmp_path}/b")
    seen += [collect({"cuda_home": None}), collect({"cuda_home": f"{tmp_path}/c"})]
    monkeypatch.setenv("CUDA_HOME", f"{tmp_path}/none")
    seen += [collect({"cuda_home": None})]
    assert [(each["nvcc"], each["release"]) for each in seen] == [
        (on_path, "11.8"), (in_home, "12.4"), (of_job, "13.0"), (None, ""),
    ]  # fmt: skip


def test_needs_take_cuda_home_from_job_env():
    job = JobSpec(name="x", program="x.py", env={"CUDA_HOME": "/opt/cuda"})
    assert Needs.of(job).cuda_home == "/opt/cuda"


def test_compiler_check_skips_without_deepspeed(judged):
    assert judged("compiler", make_subject(1))["h0"].level == "skip"
