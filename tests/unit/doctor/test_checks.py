"""Every judgement, from recorded outputs: what is well, what is wrong, what is ugly."""

import ipaddress
import json
import os
import re
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterkit import errors
from clusterkit.doctor.base import LEVELS
from clusterkit.doctor.hosts.base import Machine, Needs, Output
from clusterkit.doctor.hosts.checks import CHECKS
from clusterkit.doctor.hosts.checks.packages import PACKAGES, Packages
from clusterkit.doctor.hosts.checks.ports import MEETING
from clusterkit.doctor.hosts.checks.system import agreed, offset
from clusterkit.doctor.hosts.collect import meeting
from clusterkit.doctor.hosts.examine import judge
from clusterkit.doctor.hosts.helpers import most_common, parsed_address
from clusterkit.hosts import host_probe
from clusterkit.spec import JobSpec
from tests.unit.doctor.conftest import PYTHON, make_answer, make_subject, named, needs, raw

GIB = 1 << 30
LOOKING = [check for check in CHECKS if check.collectors]
"""The others judge the connection alone."""
COLLECTORS = {each.name: each for check in CHECKS for each in check.collectors}


# ---------------------------------------------------------------- all of them


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_every_check_has_valid_name_and_purpose(check):
    assert re.fullmatch(r"[a-z][a-z-]*", check.name)
    assert check.purpose.endswith(".")
    assert "\n" not in check.purpose


def test_check_names_are_unique():
    assert len({check.name for check in CHECKS}) == len(CHECKS)


@pytest.mark.parametrize("check", LOOKING, ids=lambda check: check.name)
@pytest.mark.parametrize(
    ("output", "level", "words"),
    [
        (Output(timed_out="D"), "fail", "a disk or a mount does not answer"),
        (Output(timed_out="S"), "warn", "the host is slow"),
        (Output(error="OSError: [Errno 24] Too many open files"), "warn", "Too many open files"),
        (Output(value=msgspec.Raw(b'"gar')), "warn", "invalid output"),
        (Output(value=msgspec.Raw(b'"text"')), "warn", "invalid output"),
        (None, "warn", "truncated"),
    ],
    ids=["hangs", "slow", "error", "torn", "of another shape", "nothing"],
)
def test_every_check_reports_missing_or_broken_output(check, output, level, words):
    subject = make_subject(2, shared="/shared", needs=needs(deepspeed=True, device="cuda"))
    outputs = {} if output is None else dict.fromkeys(COLLECTORS, output)
    findings = judge(check, {"h0": make_answer(outputs), "h1": make_answer(outputs)}, subject)
    told = [finding for finding in findings if words in finding.cause]
    assert told
    assert {finding.level for finding in told} == {level}
    assert not [finding for finding in findings if finding.level == "ok"]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_checks_skip_unreachable_host_except_reachable_which_fails(check):
    subject = make_subject(2, shared="/shared", needs=needs(deepspeed=True))
    dead = make_answer(error=errors.Unavailable("no"), began=None, ended=None, interpreter="")
    findings = judge(check, {"h0": dead, "h1": dead}, subject)
    levels = {finding.level for finding in findings}
    assert levels == ({"fail"} if check.name == "reachable" else {"skip"})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.text(max_size=20)
    | st.sampled_from(["10.0.0.1", "::1", "0x40", "²", "1,2,3,4", "index, uuid, name"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)  # fmt: skip


@given(value=JSON, data=st.data())
def test_judge_handles_arbitrary_collector_values(value, data):
    check = data.draw(st.sampled_from(CHECKS))
    subject = make_subject(
        data.draw(st.integers(1, 3)),
        shared="/shared",
        slots=data.draw(st.sampled_from([None, 1, 8])),
        needs=needs(deepspeed=True, device=data.draw(st.sampled_from(["auto", "cuda"]))),
    )
    hosts = [machine.name for machine in subject.hosts]
    answers = {
        host: make_answer({name: Output(raw(value)) for name in COLLECTORS}) for host in hosts
    }
    for finding in judge(check, answers, subject):
        assert finding.level in LEVELS
        assert finding.host in hosts
        assert finding.level in ("ok", "skip") or finding.cause


def test_most_common_prefers_first_among_equals():
    assert most_common([1, 2, 2], 0) == 2
    assert most_common([1, 2], 0) == 1
    assert most_common([], 0) == 0


@pytest.mark.parametrize(
    ("text", "address"),
    [("10.0.0.1", "10.0.0.1"), ("::ffff:10.0.0.1", "10.0.0.1"), ("fe80::1%eth0", "fe80::1"),
     ("h1", None), ("", None), ("10.0.0", None), ("10.0.0.256", None)],
)  # fmt: skip
def test_parsed_address_normalizes_ip_and_rejects_names(text, address):
    assert parsed_address(text) == (None if address is None else ipaddress.ip_address(address))


# ---------------------------------------------------------------- the connection


def silent(message, hint=None):
    error = errors.Unavailable(message, hint)
    return make_answer(error=error, began=None, ended=None, interpreter="", received=1010.0)


def test_reachable_fails_with_transport_error_and_hint(judged):
    found = judged("reachable", make_subject(2), h1=silent("host h1 refuses", "is sshd running?"))
    assert found["h0"].level == "ok"
    assert (found["h1"].level, found["h1"].cause) == ("fail", "host h1 refuses")
    assert found["h1"].remedy == "is sshd running?"


def test_reachable_warns_of_host_slow_to_begin(judged):
    slow = make_answer(sent=0.0, received=12.0, began=11.0, ended=11.5)
    busy = make_answer(sent=0.0, received=12.0, began=0.5, ended=11.5)
    found = judged("reachable", make_subject(2), h0=slow, h1=busy)
    assert found["h0"].level == "warn"
    assert found["h1"].level == "ok"


def test_changed_host_key_fails_host_key_check_only(judged):
    subject = make_subject(3)
    changed = silent("host h1: its host key has changed: known is A, now it offers B", "remove it")
    answers = {"h1": changed, "h2": silent("host h2 does not answer")}
    keys = judged("host-key", subject, **answers)
    assert keys["h0"].level == "ok"
    assert (keys["h1"].level, keys["h1"].remedy) == ("fail", "remove it")
    assert keys["h2"].level == "skip"
    assert judged("reachable", subject, **answers)["h1"].level == "skip"


def test_host_key_check_skips_without_ssh(judged):
    found = judged("host-key", make_subject(1, over_ssh=False))
    assert (found["h0"].level, found["h0"].cause) == ("skip", "not reached over SSH")


USER = {
    "user": "ann", "uid": 1000, "home": "/home/ann", "home_exists": True, "home_writable": True,
    "sudo": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "level", "words"),
    [
        ({}, "ok", "ann, no sudo"),
        ({"sudo": "bob"}, "warn", "through sudo by bob"),
        ({"user": ""}, "fail", "has no passwd entry"),
        ({"home_exists": False}, "warn", "is not there"),
        ({"home_writable": False}, "warn", "cannot be written to"),
        ({"uid": 1001}, "fail", "has uid 1001, but 1000"),
    ],
)
def test_user_check_judges_sudo_home_and_uid(judged, changed, level, words):
    found = judged("user", make_subject(3, shared="/shared"), USER, h2=USER | changed)
    assert found["h0"].level == "ok"
    found.says("h2", level, words)


def test_user_check_accepts_other_uid_without_shared_folder(judged):
    assert judged("user", make_subject(2), USER, h1=USER | {"uid": 1001})["h1"].level == "ok"


def test_user_check_accepts_local_sudo(judged):
    local = make_subject(1, over_ssh=False)
    assert judged("user", local, USER | {"sudo": "bob"})["h0"].level == "ok"


SYSTEM = {"machine": "x86_64", "kernel": "6.1", "system": "debian 12", "libc": "glibc 2.36"}


@pytest.mark.parametrize(
    ("changed", "levels"),
    [
        ({}, ["ok"]),
        ({"machine": "aarch64"}, ["fail"]),
        ({"kernel": "5.15"}, ["warn"]),
        ({"system": "ubuntu 24.04", "libc": "glibc 2.39"}, ["warn", "warn"]),
        ({"system": "linux", "libc": "not glibc"}, ["warn", "warn"]),
    ],
)
def test_system_check_reports_differing_host(judged, changed, levels):
    found = judged("system", make_subject(3), SYSTEM, h1=SYSTEM | changed)
    assert found.levels() == {"h0": ["ok"], "h1": levels, "h2": ["ok"]}


# ---------------------------------------------------------------- clocks


def clocked(ahead, took=0.2, worked=0.0):
    """A host whose clock is ahead of ours, whose answer took so long, of which it worked."""
    way = (took - worked) / 2
    return make_answer(
        sent=1000.0, received=1000.0 + took,
        began=1000.0 + ahead + way, ended=1000.0 + ahead + way + worked,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ahead", "levels", "fields"),
    [
        ((0, 0.3, -0.4), ["ok", "ok", "ok"], {}),
        ((600, 0), ["fail", "ok"], {}),  # our own clock decides
        ((600, 600.1), ["ok", "ok"], {}),  # it is our own that is off
        ((600,), ["warn"], {}),  # nobody to disagree with
        ((0, 3, 0), ["ok", "warn", "ok"], {}),
        ((0, 3, 0), ["ok", "fail", "ok"], {"elastic": True}),
    ],
)
def test_clock_check_finds_wrong_host_among_disagreeing_clocks(judged, ahead, levels, fields):
    answers = {f"h{i}": clocked(seconds) for i, seconds in enumerate(ahead)}
    found = judged("clock", make_subject(len(ahead), needs=needs(**fields)), **answers)
    assert [finding.level for finding in found.findings] == levels


@pytest.mark.parametrize(
    ("ahead", "level", "words"),
    [(600, "fail", "10 min ahead"), (-600, "fail", "10 min behind"), (3, "warn", "2.9 s ahead"),
     (86400 * 365, "fail", "8760 h ahead"), (-45, "fail", "45 s behind")],
)  # fmt: skip
def test_clock_check_names_host_and_offset(judged, ahead, level, words):
    found = judged("clock", make_subject(3), h0=clocked(0), h1=clocked(ahead), h2=clocked(0))
    assert found["h0"].level == found["h2"].level == "ok"
    assert found["h1"].level == level
    assert f"at least {words}" in found["h1"].cause


def test_clock_check_accepts_slow_answers(judged):
    late = make_answer(sent=1000.0, received=1030.0, began=1029.0, ended=1029.5)
    early = make_answer(sent=1000.0, received=1030.0, began=1000.5, ended=1001.0)
    found = judged("clock", make_subject(3), h0=clocked(0), h1=late, h2=early)
    assert {finding.level for finding in found.findings} == {"ok"}


def test_clock_check_subtracts_collector_run_time(judged):
    found = judged("clock", make_subject(3), clocked(0), h1=clocked(3, took=30.2, worked=30))
    assert found["h1"].level == "warn"


@pytest.mark.parametrize("ended", [None, 1000.1])
def test_clock_offset_has_lower_and_upper_bound(ended):
    answer = make_answer(sent=1000.0, received=1000.2, began=1000.1, ended=ended)
    assert offset(answer) == pytest.approx((-0.1, 0.1))


def test_clock_offset_is_none_when_host_never_began():
    assert offset(make_answer(began=None)) is None


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0, 100)), max_size=8))
def test_agreed_offset_lies_within_some_clock_bounds(spans):
    spans = [(low, low + width) for low, width in spans]
    value = agreed(spans)
    assert value == 0.0 or any(low <= value <= high for low, high in spans)


# ---------------------------------------------------------------- Python and packages


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


# ---------------------------------------------------------------- the network


def interfaces(address, mtu=1500, up=True, speed=10000, name="eth0"):
    return {
        "lo": {"mtu": 65536, "up": True, "speed": None, "addresses": ["127.0.0.1", "::1"]},
        name: {"mtu": mtu, "up": up, "speed": speed, "addresses": [address]},
    }


def network(host, there=None, routes=None, **changed):
    address = f"10.0.0.{10 + host}"
    return make_answer({
        "interfaces": there or interfaces(address, **changed),
        "routes": routes or {f"h{i}": address for i in range(3)},
    })  # fmt: skip


def judge_network(judged, subject=None, **h1):
    return judged(
        "interface", subject or make_subject(3),
        h0=network(0), h1=network(1, **h1), h2=network(2),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "level", "words"),
    [
        ({}, "ok", "eth0, MTU 1500"),
        ({"mtu": 9000}, "warn", "MTU 9000, the others 1500"),
        ({"speed": 1000}, "warn", "1000 Mbit/s, the others at 10000"),
        ({"speed": None}, "ok", ""),
        ({"up": False}, "fail", "eth0 is down"),
        ({"name": "ens5"}, "warn", "uses interface ens5, the others eth0"),
        ({"routes": {"h0": "10.0.0.11", "h1": "127.0.0.1", "h2": None}}, "fail", "no route to h2"),
        ({"there": interfaces("192.168.0.1")}, "fail", "none of its interfaces reaches"),
    ],
)
def test_interface_check_compares_mtu_speed_name_and_routes(judged, changed, level, words):
    found = judge_network(judged, **changed)
    assert found["h0"].level == "ok"
    found.says("h1", level, words)


def test_interface_check_fails_when_named_interface_is_missing(judged):
    found = judge_network(judged, make_subject(3, interface="ib0"))
    assert found["h1"].cause == "has no interface ib0; it has eth0, lo"
    assert found["h1"].remedy == "interface: auto"


def test_interface_check_accepts_extra_interface_when_one_is_named(judged):
    both = interfaces("10.0.0.11") | {"eth1": interfaces("x")["eth0"]}
    found = judged(
        "interface", make_subject(3, interface="eth0"),
        h0=network(0), h1=network(1, there=both), h2=network(2),
    )  # fmt: skip
    assert found["h1"].level == "ok"


def test_interface_check_reports_address_not_on_any_interface(judged):
    hosts = tuple(Machine(name=f"h{i}", address=f"52.0.0.{i}", python=PYTHON) for i in range(3))
    found = judge_network(judged, make_subject(3, hosts=hosts))
    assert "52.0.0.1 to reach it, an address that none of eth0, lo has" in found["h1"].cause


def test_interface_check_reports_loopback_address(judged):
    hosts = tuple(Machine(name=f"h{i}", address="127.0.0.1", python=PYTHON) for i in range(3))
    found = judge_network(judged, make_subject(3, hosts=hosts))
    assert "where the other hosts cannot reach it" in found["h1"].cause


def test_interface_check_accepts_host_name_as_address(judged):
    hosts = tuple(Machine(name=f"h{i}", python=PYTHON) for i in range(3))
    assert judge_network(judged, make_subject(3, hosts=hosts))["h1"].level == "ok"


def holder(pid=4711, user="ann", command="python train.py"):
    return {"pid": pid, "user": user, "command": command}


@pytest.mark.parametrize(
    ("port", "level", "words", "remedy"),
    [
        ({"error": None, "taken": False, "holders": []}, "ok", "29500 is free", None),
        ({"error": "Address already in use", "taken": True, "holders": [holder()], "user": "ann"},
         "fail", "in use by python train.py (process 4711 of ann)", "kill 4711"),
        ({"error": "Address already in use", "taken": True, "holders": [holder()], "user": "bob"},
         "fail", "(process 4711 of ann)", "ask ann to end process 4711 (python train.py)"),
        ({"error": "Address already in use", "taken": True, "holders": []}, "fail",
         "only root can see", "sudo ss -ltnp"),
        ({"error": "Permission denied", "taken": False, "holders": []}, "fail",
         "cannot be used: Permission denied", "port: auto"),
    ],
)  # fmt: skip
def test_port_check_passes_or_names_holder_of_port(judged, port, level, words, remedy):
    found = judged("port", make_subject(2), {"port": 29500} | port)
    found.says("h0", level, words, remedy)
    assert found.all("h1") == []


def met(head=None, listening=None, came=(), peers=None, rates=None):
    told = {"head_error": head, "listen_error": listening, "arrived": list(came),
            "peer_errors": peers}  # fmt: skip
    return told | {"rates": rates or {}}


@pytest.mark.parametrize(
    ("why", "remedy"),
    [
        ("timed out", "on h0: sudo ufw allow from 10.0.0.11"),
        ("connection refused", "on h0: sudo ufw allow from 10.0.0.11"),
        ("no route to host", "ip route get 10.0.0.10"),
        ("network is unreachable", "ip route get 10.0.0.10"),
        ("its address does not resolve", "getent hosts 10.0.0.10"),
        ("another program answers there", "on h0: sudo ss -ltnp 'sport = :29500'"),
    ],
)
def test_head_port_check_names_reason_and_remedy(judged, why, remedy):
    found = judged("head-port", make_subject(3), met(), h1=met(head=why))
    assert found["h0"].level == found["h2"].level == "ok"
    assert found["h1"].cause == f"cannot connect to h0 (10.0.0.10:29500): {why}"
    assert found["h1"].remedy == remedy


def test_head_port_remedy_admits_all_blocked_hosts_in_one_command(judged):
    found = judged("head-port", make_subject(3), met(head="timed out"), h0=met())
    assert found["h1"].remedy == found["h2"].remedy
    assert "for a in 10.0.0.11 10.0.0.12;" in found["h1"].remedy


def test_head_port_check_blames_only_head_that_cannot_listen(judged):
    busy = met(listening="address already in use")
    found = judged("head-port", make_subject(3), met(head="another program answers there"), h0=busy)
    assert found.levels() == {"h0": ["fail"], "h1": ["skip"], "h2": ["skip"]}


@pytest.mark.parametrize("check", ["head-port", "mesh"])
def test_head_port_and_mesh_checks_skip_when_head_is_unreachable(judged, check):
    found = judged(check, make_subject(3), met(), h0=silent("dead"))
    assert found.levels() == {"h0": ["skip"], "h1": ["skip"], "h2": ["skip"]}


def test_mesh_check_names_unreachable_peer_per_host(judged):
    well = {"h1": None, "h2": None, "h3": None, "h0": None}
    found = judged(
        "mesh", make_subject(4),
        h0=met(peers=well | {"h2": "timed out"}), h1=met(peers=well | {"h2": "timed out"}),
        h2=met(peers=well), h3=met(head="timed out"),
    )  # fmt: skip
    assert found.levels() == {"h0": ["fail"], "h1": ["fail"], "h2": ["ok"], "h3": ["skip"]}
    assert found["h0"].cause == "cannot connect to h2 on ports above 32767: timed out"
    assert found["h0"].remedy == found["h1"].remedy
    assert "on h2: for a in 10.0.0.10 10.0.0.11;" in found["h0"].remedy


def test_mesh_check_reports_widespread_failure_as_one_fault(judged):
    """As 64 hosts on one kernel were found, whose table of neighbours holds 1024."""
    by_host = {
        f"h{i}": met(peers={
            f"h{j}": None if (i + j) % 4 == 0 else "timed out" for j in range(64) if j != i
        })
        for i in range(64)
    }  # fmt: skip
    found = judged("mesh", make_subject(64), **by_host)
    assert len({(finding.cause, finding.remedy) for finding in found.findings}) == 1
    assert "most other hosts" in found["h7"].cause
    assert "gc_thresh3" in found["h7"].remedy


def test_mesh_check_reports_each_reason_separately(judged):
    peers = {"h1": "timed out", "h2": "connection refused"}
    found = judged("mesh", make_subject(3), met(peers={"h0": None}), h0=met(peers=peers))
    assert {finding.cause.rpartition(": ")[2] for finding in found.all("h0")} == set(peers.values())


def rated(**rates):
    """Hosts in a ring, each with the rate at which the next took what it sent."""
    names = list(rates)
    peers = {name: {other: None for other in names if other != name} for name in names}
    return {
        name: met(peers=peers[name], rates={names[(place + 1) % len(names)]: rate})
        for place, (name, rate) in enumerate(rates.items())
    }  # fmt: skip


def test_mesh_check_blames_slow_link_on_host_at_both_slow_links(judged):
    found = judged("mesh", make_subject(4), **rated(h0=2.14, h1=1.9, h2=940, h3=9400))
    assert found.levels() == {"h0": ["ok"], "h1": ["warn"], "h2": ["ok"], "h3": ["ok"]}
    assert found["h1"].cause == "its link is slow: 2.1 Mbit/s from h0, 1.9 Mbit/s to h2"
    assert found["h1"].remedy.startswith("clusterkit bench --cluster lab --pairwise")


def test_mesh_check_warns_both_hosts_when_only_two_share_slow_link(judged):
    found = judged("mesh", make_subject(2), **rated(h0=2.0, h1=2.0))
    assert found.levels() == {"h0": ["warn"], "h1": ["warn"]}
    found = judged("mesh", make_subject(3), **rated(h0=900, h1=900, h2=5))
    assert found.levels() == {"h0": ["ok"], "h1": ["ok"], "h2": ["warn"]}


def test_mesh_check_reports_slow_link_beside_unreachable_peer(judged):
    answers = rated(h0=2.0, h1=900, h2=900)
    answers["h0"]["peer_errors"]["h2"] = "timed out"
    assert [f.level for f in judged("mesh", make_subject(3), **answers).all("h0")] == [
        "warn", "fail"]  # fmt: skip


def test_mesh_check_skips_host_without_peers(judged):
    assert judged("mesh", make_subject(2), met(peers={}))["h0"].level == "skip"


def test_meeting_deadlines_end_before_collector_timeout():
    arrived = meeting.ARRIVAL_SECONDS + meeting.CONNECT_SECONDS
    assert arrived < meeting.END_SECONDS < MEETING.timeout


# ---------------------------------------------------------------- GPUs

COLUMNS = (
    "index, uuid, name, memory.total [MiB], memory.used [MiB], driver_version, "
    "ecc.errors.uncorrected.volatile.total, retired_pages.pending, mig.mode.current, "
    "compute_mode, clocks_event_reasons.active"
)
H100 = "NVIDIA H100 80GB HBM3"


def gpu(index, *, name=H100, total="81559", used="4", driver="550.54.15", ecc="0",
        retired="[N/A]", mig="Disabled", mode="Default", reasons="0x0000000000000001"):  # fmt: skip
    uuid = f"GPU-{index:08d}-aaaa-bbbb-cccc-0123456789ab"
    cells = (index, uuid, name, total, used, driver, ecc, retired, mig, mode, reasons)
    return ", ".join(map(str, cells))


def smi(*rows, columns=COLUMNS, exit_code=0, stderr="", complaint=""):
    lines = [*([columns] if columns else []), *rows, *([complaint] if complaint else [])]
    return {"exit_code": exit_code, "stdout": "\n".join(lines) + "\n", "stderr": stderr}


def nvidia(
    *rows,
    apps=None,
    owners=None,
    xids=(),
    devices=None,
    pci=(),
    user="root",
    remapped=None,
    log=True,
    **changed,
):
    return {
        "devices": len(rows) if devices is None else devices,
        "query": smi(*rows, **changed),
        "apps": apps, "owners": owners or {}, "xids": list(xids), "user": user,
        "remapped": remapped, "log": log, "pci": list(pci),
    }  # fmt: skip


NO_GPU = {"devices": 0, "query": None}
EIGHT = [gpu(i) for i in range(8)]
PCI = [f"0000:{number:02x}:00.0" for number in range(8)]
SMI_FAILS = {
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that "
    "the latest NVIDIA driver is installed and running.": "sudo modprobe nvidia",
    "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.90":
        "sudo reboot",
    "Failed to initialize NVML: Unknown Error": "restart the container",
    "Failed to initialize NVML: Insufficient Permissions": "ls -l /dev/nvidia*",
    "No devices were found": "lspci",
    "nvidia-smi did not end within 20 s": "reboot",
    "Something never seen before": "nvidia-smi",
}  # fmt: skip


def test_gpu_driver_check_reports_cpu_torch_on_gpu_host(judged):
    value = gpu_answer(nvidia(*EIGHT), {"torch": "2.13.0+cpu"})
    told = judged("gpu-driver", make_subject(1), value)["h0"]
    assert told.cause == "torch 2.13.0+cpu is built without CUDA: no rank can use the GPUs"
    assert told.remedy.startswith(f"{PYTHON} -m pip install --force-reinstall torch==2.13.0  # ")
    job_on_cpus = make_subject(1, needs=needs(device="cpu"))
    assert judged("gpu-driver", job_on_cpus, value)["h0"].level == "skip"


def test_gpus_collector_omits_pci_gpus_bound_elsewhere(tmp_path, monkeypatch):
    """Of a virtual machine, and in a container those of its host."""
    bus, bound = tmp_path / "sys/bus/pci/devices", tmp_path / "proc/driver/nvidia/gpus"
    drivers = {"0000:01:00.0": "nvidia", "0000:02:00.0": "nvidia", "0000:03:00.0": "vfio-pci",
               "0000:04:00.0": ""}  # fmt: skip
    for address, driver in drivers.items():
        (bus / address).mkdir(parents=True)
        (bus / address / "vendor").write_text("0x10de\n")
        (bus / address / "class").write_text("0x030200\n")
        if driver:
            (tmp_path / "drivers" / driver).mkdir(parents=True, exist_ok=True)
            (bus / address / "driver").symlink_to(tmp_path / "drivers" / driver)
    (bound / "0000:01:00.0").mkdir(parents=True)
    monkeypatch.setattr(host_probe, "ROOT", f"{tmp_path}/")
    monkeypatch.setenv("PATH", "")
    assert named("gpus").collectors[0].collect({})["pci"] == ["0000:01:00.0", "0000:04:00.0"]


@pytest.mark.parametrize("check", ["gpu-driver", "gpus", "gpu-processes"])
def test_gpu_checks_skip_without_gpus_or_for_cpu_jobs(judged, check):
    found = judged(check, make_subject(2), NO_GPU)
    assert found["h0"].level == "skip"
    cpu = make_subject(2, needs=needs(device="cpu"))
    assert judged(check, cpu, nvidia(*EIGHT))["h0"].cause == "the job runs on CPU threads"


def gpu_answer(value, versions=None):
    return make_answer({
        "nvidia": value, "packages": {"versions": versions or {}},
    })  # fmt: skip


@pytest.mark.parametrize(("complaint", "remedy"), list(SMI_FAILS.items()))
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_gpu_driver_check_quotes_nvidia_smi_error_with_remedy(judged, complaint, remedy, stream):
    query = {"exit_code": 9, "stdout": "", "stderr": ""} | {stream: complaint + "\n"}
    broken = {"devices": 8, "query": query}
    found = judged("gpu-driver", make_subject(2), gpu_answer(nvidia(*EIGHT)), h1=gpu_answer(broken))
    assert found["h0"].level == "ok"
    assert found["h1"].level == "fail"
    assert complaint.split("\n")[0][:40] in found["h1"].cause
    assert remedy in found["h1"].remedy


@pytest.mark.parametrize(
    ("versions", "driver", "level"),
    [
        ({"torch": "2.13.0+cu130"}, "550.54.15", "fail"),
        ({"torch": "2.13.0+cu130"}, "580.82.07", "ok"),
        ({"torch": "2.13.0+cu128"}, "550.54.15", "ok"),
        ({"torch": "2.13.0+cu128"}, "470.1", "fail"),
        ({"torch": "2.13.0+cpu"}, "580.82.07", "fail"),
        ({"torch": "2.13.0"}, "470.1", "ok"),
        ({"torch": "2.13.0+cu130"}, "[N/A]", "ok"),
    ],
)
def test_gpu_driver_check_compares_driver_with_torch_cuda(judged, versions, driver, level):
    value = gpu_answer(nvidia(gpu(0, driver=driver)), versions)
    found = judged("gpu-driver", make_subject(2), value)
    assert found["h0"].level == level


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (nvidia(gpu(0, driver="535.1")), "driver 535.1, but 550.54.15 on the other hosts"),
        ({"devices": 8, "query": None}, "there is no nvidia-smi, though /dev has 8 GPUs"),
        (nvidia(), "nvidia-smi lists no GPU"),
    ],
)
def test_gpu_driver_check_reports_differing_or_missing_driver(judged, value, cause):
    usual = gpu_answer(nvidia(*EIGHT))
    found = judged("gpu-driver", make_subject(3), usual, h1=gpu_answer(value))
    assert found["h1"].cause == cause


def test_gpus_check_passes_with_healthy_gpus(judged):
    found = judged("gpus", make_subject(2, slots=8), nvidia(*EIGHT))
    assert (found["h0"].level, found["h0"].cause) == ("ok", f"8 x {H100}")


@pytest.mark.parametrize(
    ("changed", "level", "words", "remedy"),
    [
        ({"ecc": "3"}, "fail", "GPU 0: 3 memory errors that could", "--gpu-reset -i 0"),
        ({"ecc": "1"}, "fail", "GPU 0: 1 memory error that could", "--gpu-reset -i 0"),
        ({"retired": "Yes"}, "fail", "page retirement pending", "--gpu-reset -i 0"),
        ({"mode": "Prohibited"}, "fail", "compute mode: Prohibited", "-c DEFAULT"),
        ({"mig": "Enabled"}, "warn", "MIG is enabled", "-mig 0"),
        ({"reasons": "0x0000000000000040"}, "warn", "slowed down by heat", "PERFORMANCE"),
        ({"reasons": "0x00000000000000C8"}, "warn",
         "by hardware slowdown and heat and its power supply", "PERFORMANCE"),
        ({"total": "[GPU requires reset]"}, "fail", "GPU 0: [GPU requires reset]", "reset"),
        ({"used": "[Unknown Error]"}, "fail", "GPU 0: [Unknown Error]", "reset"),
        ({"total": "[GPU is lost]"}, "fail", "GPU 0: [GPU is lost]", "Xid 79"),
        ({"used": "ERR!"}, "fail", "GPU 0: ERR!", "reset"),
    ],
)  # fmt: skip
def test_gpus_check_names_faulty_gpu_with_remedy(judged, changed, level, words, remedy):
    found = judged("gpus", make_subject(1, slots=1), nvidia(gpu(0, **changed), *EIGHT[1:]))
    told = found.all("h0")
    assert told[0].level == level
    assert words in told[0].cause
    assert remedy in told[0].remedy


@pytest.mark.parametrize(
    "changed",
    [{"reasons": "0x0000000000000004"}, {"reasons": "[N/A]"}, {"reasons": "Not Active"},
     {"total": "[N/A]", "used": "[N/A]"},  # GB10 has the host's memory
     {"ecc": "[N/A]"}, {"ecc": "[Not Supported]"}, {"mig": "[N/A]"}, {"mode": "Exclusive_Process"},
     {"retired": "No"}],
)  # fmt: skip
def test_gpus_check_accepts_unsupported_values_and_power_cap(judged, changed):
    assert judged("gpus", make_subject(1, slots=1), nvidia(gpu(0, **changed)))["h0"].level == "ok"


def test_gpus_check_reads_throttle_reasons_of_older_driver(judged):
    columns = COLUMNS.replace("clocks_event_reasons", "clocks_throttle_reasons")
    value = nvidia(gpu(0, reasons="0x40"), columns=columns)
    assert "heat" in judged("gpus", make_subject(1, slots=1), value)["h0"].cause


def test_gpus_check_passes_with_basic_columns_of_ancient_driver(judged):
    columns = ", ".join(COLUMNS.split(", ")[:6])
    value = nvidia(", ".join(gpu(0).split(", ")[:6]), columns=columns)
    assert judged("gpus", make_subject(1, slots=1), value)["h0"].level == "ok"


def test_gpu_checks_report_gpu_lost_from_bus(judged):
    lost = "Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost.  Reboot the system to recover this GPU"  # noqa: E501
    value = nvidia(*EIGHT[:7], complaint=lost, devices=8, exit_code=15)
    found = judged("gpus", make_subject(2, slots=8), nvidia(*EIGHT), h1=value)
    assert "7 healthy GPUs, 8 needed" in found["h1"].cause
    driver = judged("gpu-driver", make_subject(2), gpu_answer(nvidia(*EIGHT)), h1=gpu_answer(value))
    assert "GPU is lost. Reboot the system" in driver["h1"].cause


def test_gpus_check_fails_for_cuda_job_without_gpus(judged):
    found = judged("gpus", make_subject(2, needs=needs(device="cuda")), NO_GPU)
    assert found.levels() == {"h0": ["fail"], "h1": ["fail"]}


@pytest.mark.parametrize(
    ("slots", "value", "level", "cause"),
    [
        (8, nvidia(*EIGHT[:7], devices=8), "fail",
         "7 healthy GPUs, 8 needed; /dev has 8, nvidia-smi lists 7"),
        (None, nvidia(*EIGHT[:7], pci=PCI), "warn", "PCI has 8, nvidia-smi lists 7"),
        (4, nvidia(*EIGHT[:7], devices=8, pci=PCI), "warn",
         "/dev has 8, PCI has 8, nvidia-smi lists 7"),
        (None, NO_GPU, "fail", "0 healthy GPUs, at least 1 needed"),
        (None, nvidia(*EIGHT[:4]), "warn", "4 healthy GPUs, but 8 on other hosts"),
        (8, nvidia(*(gpu(i, name="A100") for i in range(8))), "warn",
         f"A100, but {H100} on the other hosts: the slowest GPU limits all"),
    ],
)  # fmt: skip
def test_gpus_check_reports_too_few_or_differing_gpus(judged, slots, value, level, cause):
    found = judged("gpus", make_subject(3, slots=slots), nvidia(*EIGHT), h1=value)
    assert (found["h1"].level, found["h1"].cause) == (level, cause)


XID = "[Thu Nov 21 10:00:00 2026] NVRM: Xid (PCI:0000:3b:00): {}, pid='<unknown>', GPU gone"


@pytest.mark.parametrize(
    ("number", "level"), [(79, "warn"), (48, "warn"), (119, "warn"), (13, "ok"), (43, "ok")]
)
def test_gpus_check_warns_of_hardware_xids_only(judged, number, level):
    value = nvidia(gpu(0), xids=[XID.format(number), "NVRM: Xid", "\0", XID.format("x")])
    found = judged("gpus", make_subject(1, slots=1), value)
    assert found["h0"].level == level
    assert level == "ok" or f"Xid {number}" in found["h0"].cause


REMAPPED = "gpu_uuid, remapped_rows.pending, remapped_rows.failure"


@pytest.mark.parametrize(
    ("pending", "failure", "level", "words"),
    [("No", "No", "ok", ""), ("0", "0", "ok", ""), ("[N/A]", "[N/A]", "ok", ""),
     ("Yes", "No", "warn", "GPU 0: ECC: row remapping pending"), ("1", "0", "warn", "pending"),
     ("No", "Yes", "fail", "GPU 0: ECC: row remapping failed")],
)  # fmt: skip
def test_gpus_check_judges_row_remapping(judged, pending, failure, level, words):
    rows = [f"{one.split(', ')[1]}, No, No" for one in EIGHT[1:]]
    rows.insert(0, f"{EIGHT[0].split(', ')[1]}, {pending}, {failure}")
    value = nvidia(*EIGHT, remapped=smi(*rows, columns=REMAPPED))
    found = judged("gpus", make_subject(1, slots=1), value)["h0"]
    assert found.level == level
    assert words in found.cause


@pytest.mark.parametrize(
    ("state", "status", "level"),
    [("Completed", "Success", "ok"), ("[N/A]", "[N/A]", "ok"), ("N/A", "N/A", "ok"),
     ("In Progress", "[N/A]", "fail"), ("Not Started", "[N/A]", "fail"),
     ("Completed", "Insufficient Resources", "fail")],
)  # fmt: skip
def test_gpus_check_fails_until_nvswitch_fabric_is_ready(judged, state, status, level):
    value = nvidia(
        f"{gpu(0)}, {state}, {status}", columns=f"{COLUMNS}, fabric.state, fabric.status"
    )
    found = judged("gpus", make_subject(1, slots=0), value)["h0"]
    assert found.level == level
    assert level == "ok" or "nvidia-fabricmanager" in found.remedy


def test_gpus_check_mentions_unreadable_kernel_log(judged):
    found = judged("gpus", make_subject(1, slots=1), nvidia(gpu(0), log=False))
    assert found["h0"].level == "ok"
    assert found["h0"].cause.endswith("; Xid errors: not allowed to read the kernel's log")


@pytest.mark.parametrize(("journal", "log"), [(XID.format(79), True), ("", False)])
def test_gpus_collector_reads_journal_when_dmesg_is_denied(tmp_path, monkeypatch, journal, log):
    programs = {
        "dmesg": "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1",
        "journalctl": f'cat <<"END"\n{journal}\nEND' if log else "exit 1",
        "nvidia-smi": "exit 9",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("glob.glob", lambda pattern: ["/dev/nvidia0"])
    seen = named("gpus").collectors[0].collect({})
    assert seen["log"] is log
    assert seen["xids"] == ([XID.format(79)] if log else [])


def diagnosis(*tests, before="", version=4):
    """What ``dcgmi diag -r 1 -j`` prints, in the form of DCGM 3 or 4."""
    key = "DCGM Diagnostic" if version == 4 else "DCGM GPU Diagnostic"
    document = {key: {"test_categories": [{"category": "Deployment", "tests": list(tests)}]}}
    text = before + json.dumps(document, indent=2)
    return {"command": {"exit_code": 0, "stdout": text, "stderr": ""}}


WELL = {
    "name": "software", "test_summary": {"status": "Pass"},
    "results": [{"entity_group": "GPU", "entity_id": 0, "status": "Pass"}],
}  # fmt: skip
ILL = {
    "name": "memory", "test_summary": {"status": "Fail"},
    "results": [
        {"entity_group": "GPU", "entity_id": 0, "status": "Pass"},
        {"entity_group": "GPU", "entity_id": 3, "status": "Fail",
         "warnings": [{"error_id": 31, "warning": "3 ECC errors"}]},
    ],
}  # fmt: skip
ILL_3 = {
    "name": "Page Retirement/Row Remap",
    "results": [{"gpu_ids": "0,1,2", "status": "Fail", "warnings": "pending page retirements"}],
}


@pytest.mark.parametrize(
    ("value", "level", "words"),
    [
        ({"command": None}, "skip", "dcgmi is not installed"),
        (diagnosis(WELL), "ok", "finds nothing"),
        (diagnosis(WELL, ILL), "fail", "memory fails on GPU 3: "),
        (diagnosis(ILL_3, version=3, before="Successfully ran diagnostic for group.\n"), "fail",
         'Page Retirement/Row Remap fails on GPU 0,1,2: "pending page retirements"'),
        ({"command": {"exit_code": 255, "stdout": "", "stderr": "Error: unable to establish a "
          "connection to the specified host: localhost"}}, "warn", "unable to establish"),
    ],
    ids=["none", "well", "ill", "ill, DCGM 3", "no daemon"],
)  # fmt: skip
def test_gpu_diagnosis_check_judges_dcgmi_output(judged, value, level, words):
    found = judged("gpu-diagnosis", make_subject(1), value)["h0"]
    assert found.level == level
    assert words in found.cause


APPS = "pid, process_name, gpu_uuid, used_gpu_memory [MiB]"


def apps(*rows):
    return smi(*rows, columns=APPS)


def app(pid, index, name="python", used="70000"):
    return f"{pid}, {name}, GPU-{index:08d}-aaaa-bbbb-cccc-0123456789ab, {used}"


def test_gpu_processes_check_passes_with_free_gpus(judged):
    found = judged("gpu-processes", make_subject(1, slots=8), nvidia(*EIGHT, apps=apps()))
    assert (found["h0"].level, found["h0"].cause) == ("ok", "none")


@pytest.mark.parametrize(
    ("slots", "level"), [(8, "fail"), (None, "fail"), (7, "warn"), (1, "warn")]
)
def test_gpu_processes_check_names_process_and_fails_if_gpu_is_needed(judged, slots, level):
    value = nvidia(
        *EIGHT, apps=apps(app(4711, 3, "/opt/a, b/python")), owners={"4711": {"user": "bob"}},
        user="bob",
    )  # fmt: skip
    found = judged("gpu-processes", make_subject(1, slots=slots), value)
    assert found["h0"].level == level
    assert "GPU 3 by /opt/a,b/python (process 4711 of bob)" in found["h0"].cause
    assert found["h0"].remedy == "kill 4711"


@pytest.mark.parametrize(
    ("held", "owners", "remedy"),
    [
        # Those of others are not killed, but their owners asked.
        ([app(1, 0), app(2, 1, "train"), app(3, 1)],
         {"1": {"user": "ann"}, "2": {"user": "bob", "run": "theirs"}, "3": {}},
         "kill 1; ask bob to end process 2 (train)"),
        ([app(3, 1)], {"3": {}}, "sudo fuser -v /dev/nvidia*"),
        # A run of ours is cancelled and not killed.
        ([app(1, 0), app(2, 1)], {"1": {"user": "ann", "run": "ddp-1"}, "2": {}},
         "clusterkit cancel ddp-1"),
    ],
)  # fmt: skip
def test_gpu_processes_remedy_fits_owner_of_process(judged, held, owners, remedy):
    value = nvidia(*EIGHT, apps=apps(*held), owners=owners, user="ann")
    assert judged("gpu-processes", make_subject(1, slots=8), value)["h0"].remedy == remedy


def test_gpu_processes_check_reports_memory_of_invisible_process(judged):
    value = nvidia(gpu(0, used="40000"), *EIGHT[1:], apps=apps())
    found = judged("gpu-processes", make_subject(1, slots=8), value)
    assert "a process that is not visible here" in found["h0"].cause


def test_gpu_processes_check_truncates_long_list(judged):
    value = nvidia(*(gpu(i, used="70000") for i in range(8)), apps=apps())
    found = judged("gpu-processes", make_subject(1, slots=8), value)
    assert found["h0"].cause.endswith("and 4 more")


SMI = """#!/bin/sh
case "$1" in
  *clocks_event_reasons*) echo 'Field "clocks_event_reasons.active" is not a valid field to query.'; exit 2;;
  *query-gpu*clocks_throttle*) cat <<'END'
{gpus}
END
  ;;
  *query-compute-apps*) printf '%s\\n' '{apps}' '{app}';;
  *) exit 2;;
esac
"""  # noqa: E501


def test_gpus_collector_retries_older_nvidia_smi_columns(tmp_path, monkeypatch):
    import os

    columns = COLUMNS.replace("clocks_event_reasons", "clocks_throttle_reasons")
    script = SMI.format(gpus=f"{columns}\n{gpu(0)}", apps=APPS, app=app(os.getpid(), 0))
    (tmp_path / "nvidia-smi").write_text(script)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CLUSTERKIT_RUN_ID", "of-this-process")
    seen = named("gpus").collectors[0].collect({})
    assert seen["query"]["exit_code"] == 0
    assert "NVIDIA H100" in seen["query"]["stdout"]
    assert set(seen["owners"]) == {str(os.getpid())}
    assert seen["owners"][str(os.getpid())]["user"]


@pytest.mark.parametrize(
    "script", ["#!/bin/sh\nexit 9\n", "#!/nope\n", "#!/bin/sh\nprintf '\\377\\000'\n", ""]
)
def test_gpus_check_fails_with_broken_nvidia_smi(tmp_path, monkeypatch, script, judged):
    import os

    (tmp_path / "nvidia-smi").write_text(script)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    seen = named("gpus").collectors[0].collect({})
    found = judged("gpus", make_subject(1, needs=needs(device="cuda")), msgspec.to_builtins(seen))
    assert found["h0"].level == "fail"


# ---------------------------------------------------------------- resources


@pytest.mark.parametrize(
    ("total", "available", "limit", "level"),
    [(24, 20, None, "ok"), (24, 3, None, "warn"), (24, 0.5, None, "fail"), (24, 0, None, "fail"),
     (512, 500, 2, "warn")],
)  # fmt: skip
def test_memory_check_judges_available_memory_and_limit(judged, total, available, limit, level):
    value = {
        "total": total * GIB,
        "available": int(available * GIB),
        "limit": limit and limit * GIB,
    }
    assert judged("memory", make_subject(1, slots=4), value)["h0"].level == level


def test_memory_check_reports_host_with_less_memory(judged):
    usual = {"total": 64 * GIB, "available": 60 * GIB, "limit": None}
    small = {"total": 32 * GIB, "available": 30 * GIB, "limit": None}
    found = judged("memory", make_subject(3), usual, h1=small)
    assert found["h1"].cause == "32 GiB of memory, but 64 GiB on other hosts"


def shm(free, total=16 * GIB, exists=True, writable=True):
    return {"exists": exists, "writable": writable, "free": free, "total": total}


@pytest.mark.parametrize(
    ("value", "level", "remedy"),
    [
        (shm(16 * GIB), "ok", None),
        (shm(64 << 20, 64 << 20), "warn", "remount"),
        (shm(63 << 20, 64 << 20), "fail", "remount"),
        (shm(1 << 20), "fail", "ls -la /dev/shm"),
        (shm(0, 0, exists=False, writable=False), "fail", "mount -t tmpfs"),
        (shm(16 * GIB, writable=False), "fail", "mode=1777"),
    ],
)
def test_shm_check_judges_size_and_access(judged, value, level, remedy):
    judged("shm", make_subject(1), value).says("h0", level, remedy=remedy)


def limits(**changed):
    return {"nofile": 1 << 20, "nproc": None, "memlock": 8 << 20, "core": 0, "root": False,
            "infiniband": False, "core_pattern": "core", "cpus": 64} | changed  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "level", "words"),
    [
        ({}, "ok", "memlock 8192 KiB"),
        ({"nofile": None, "memlock": None}, "ok", "nofile unlimited"),
        ({"nofile": 300}, "fail", "nofile 300"),
        ({"nofile": 1024}, "warn", "nofile 1024"),
        ({"nproc": 100}, "fail", "nproc 100"),
        ({"nproc": 100, "root": True}, "ok", ""),
        ({"infiniband": True}, "fail", "memlock 8192 KiB"),
        ({"infiniband": True, "memlock": None}, "ok", ""),
        ({"core": None}, "warn", "core: a rank that aborts"),
        ({"core": None, "core_pattern": "|/usr/lib/systemd/systemd-coredump %P"}, "ok", ""),
    ],
)
def test_limits_check_judges_ulimits(judged, changed, level, words):
    found = judged("limits", make_subject(2, slots=8), limits(**changed))
    found.says("h0", level, words)
    if level != "ok":
        assert "/etc/security/limits.d/" in found["h0"].remedy


def test_limits_check_needs_more_nofile_for_more_ranks(judged):
    value = limits(nofile=2000)
    assert judged("limits", make_subject(2, slots=8), value)["h0"].level == "warn"
    assert judged("limits", make_subject(64, slots=8), value)["h0"].level == "fail"


def disk(path="/srv", free=100 * GIB, total=200 * GIB, inodes_free=10**7, inodes=10**8, ro=False):
    return {"path": path, "free": free, "total": total, "inodes_free": inodes_free,
            "inodes": inodes, "read_only": ro}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "level", "words"),
    [
        ({}, "ok", "/srv 100 GiB"),
        ({"free": 2 * GIB}, "warn", "/srv has 2.0 GiB left of 200 GiB"),
        ({"free": 0}, "fail", "/srv has 0 B left"),
        ({"inodes_free": 10}, "fail", "room for 10 more files (inodes)"),
        ({"inodes_free": 20_000}, "warn", "20000 more files"),
        ({"inodes_free": 0, "inodes": 0}, "ok", ""),
        ({"ro": True}, "fail", "mounted read-only"),
        ({"free": 0, "total": 0}, "ok", ""),
        ({"free": 2 * GIB, "inodes_free": 5}, "fail", "5 more files"),
    ],
)
def test_disk_check_judges_space_inodes_and_read_only_mounts(judged, changed, level, words):
    judged("disk", make_subject(1), [disk("/tmp"), disk(**changed)]).says("h0", level, words)


def test_disk_check_reports_every_full_disk(judged):
    found = judged("disk", make_subject(1), [disk("/a b", free=0), disk("/c", free=0)])
    assert [finding.cause.split()[0] for finding in found.all("h0")] == ["/a", "/c"]
    assert found.all("h0")[0].remedy.startswith("df -h '/a b'")


def folder(**changed):
    return {"path": "/srv/work", "exists": True, "parent": "/srv/work", "error": None,
            "error_name": None, "pipe_error": None, "user": "ann"} | changed  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "level", "words", "remedy"),
    [
        ({}, "ok", "/srv/work", None),
        ({"exists": False, "parent": "/srv"}, "ok", "can be made", None),
        ({"error": "Permission denied", "error_name": "EACCES"}, "fail",
         "/srv/work cannot be written to by ann: Permission denied",
         "sudo install -d -o ann /srv/work"),
        ({"exists": False, "parent": "/", "error": "Permission denied", "error_name": "EACCES"},
         "fail", "/srv/work cannot be made by ann", "sudo install -d -o ann /srv/work"),
        ({"error": "No space left on device", "error_name": "ENOSPC"}, "fail",
         "No space left", "df -h"),
        ({"error": "Disk quota exceeded", "error_name": "EDQUOT"}, "fail", "quota", "df -h"),
        ({"error": "Read-only file system", "error_name": "EROFS"}, "fail", "Read-only", "findmnt"),
        ({"exists": False, "parent": "/srv/f", "error": "/srv/f is not a folder"}, "fail",
         "/srv/f is not a folder", "ls -ld /srv/f"),
        ({"pipe_error": "Operation not permitted"}, "fail", "not support named pipes", "workdir"),
    ],
)  # fmt: skip
def test_workdir_check_judges_creation_writing_and_named_pipes(
    judged, changed, level, words, remedy
):
    judged("workdir", make_subject(1), folder(**changed)).says("h0", level, words, remedy)


# ---------------------------------------------------------------- the shared folder


def shared(subject, written, **read):
    return {
        machine.name: make_answer(
            ({"shared_write": written} if machine.name == "h0" else {})
            | ({"shared_read": read[machine.name]} if machine.name in read else {})
        )
        for machine in subject.hosts
    }


FOUND = {"text": "token", "error": None, "file_system": "nfs4"}


@pytest.mark.parametrize(
    ("changed", "level", "words"),
    [
        ({}, "ok", "/shared"),
        (
            {"text": None, "file_system": "ext4"},
            "fail",
            "files that h0 writes do not appear (it is ext4)",
        ),
        ({"text": None, "file_system": ""}, "fail", "is not shared"),
        ({"text": None, "error": "No such directory"}, "fail", "cannot be read: No such directory"),
        ({"text": None, "error": "Stale file handle"}, "fail", "Stale file handle"),
        ({"text": ""}, "warn", "empty for a while"),
    ],
)
def test_shared_check_fails_unless_hosts_read_file_of_head(judged, changed, level, words):
    subject = make_subject(3, shared="/shared")
    answers = shared(subject, {"error": None}, h1=FOUND | changed, h2=FOUND)
    found = judged("shared", subject, **answers)
    assert found["h0"].level == found["h2"].level == "ok"
    found.says("h1", level, words)


def test_shared_check_blames_only_head_that_cannot_write(judged):
    subject = make_subject(3, shared="/shared")
    found = judged("shared", subject, **shared(subject, {"error": "Read-only file system"}))
    assert found.levels() == {"h0": ["fail"], "h1": ["skip"], "h2": ["skip"]}


def test_shared_check_skips_without_shared_folder(judged):
    assert judged("shared", make_subject(2))["h0"].level == "skip"
