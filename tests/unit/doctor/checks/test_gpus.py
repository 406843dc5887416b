"""Checks of GPUs and their drivers."""

import json
import os

import msgspec
import pytest

from clusterkit.hosts import host_probe
from tests.unit.doctor.checks.answers import COLUMNS, EIGHT, H100, NO_GPU, gpu, nvidia, smi
from tests.unit.doctor.conftest import PYTHON, make_answer, make_subject, named, needs

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
