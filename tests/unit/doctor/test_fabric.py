"""What doctor says of InfiniBand, NVSwitches and logind: recorded hosts, sound and sick ones."""

from __future__ import annotations

import msgspec
import pytest

from clusterkit.doctor.hosts.collect import gpus
from clusterkit.hosts import host_probe
from tests.sysfs import lay_out
from tests.unit.doctor.conftest import make_answer, make_subject, named, needs

IB = "sys/class/infiniband"
OPEN = "proc/driver/nvidia/version NVRM version: .*"
CLOSED = (
    "proc/driver/nvidia/version NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  "
    "Tue Sep 23 10:11:16 UTC 2025"
)
VERSION = "Fabric Manager version is : {}\n".format
SOUND = VERSION("580.95.05")
NO_CARD = (f"{IB}/.*", "")


def down(name, state="1: DOWN", physical="2: Polling"):
    return [
        (f"{IB}/{name}/ports/1/state .*", f"{IB}/{name}/ports/1/state {state}"),
        (f"{IB}/{name}/ports/1/phys_state .*", f"{IB}/{name}/ports/1/phys_state {physical}"),
    ]


def slow(*names):
    lines = [f"{IB}/{name}/ports/1/rate" for name in names]
    return [(f"{line} .*", f"{line} 100 Gb/sec (2X HDR)") for line in lines]


@pytest.fixture
def look(tmp_path, monkeypatch):
    """``look(changes, ...)``: the answers of hosts h0, h1, ..., and a subject of as many."""

    def collect(*hosts, manager=SOUND, active="active", **fields):
        answers = {}
        for number, changes in enumerate(hosts):
            folder = tmp_path / f"{len([*tmp_path.iterdir()])}"
            root = lay_out(folder, "h100x8", *changes)
            monkeypatch.setattr(host_probe, "ROOT", root)
            said = {"systemctl": active and f"{active}\n", "nv-fabricmanager": manager}
            monkeypatch.setattr(
                gpus,
                "run",
                lambda command, *_, said=said: (
                    None
                    if said[command] is None
                    else {"exit_code": 0, "stdout": said[command], "stderr": ""}
                ),
            )
            found = msgspec.to_builtins(named("infiniband").collectors[0].collect({}))
            answers[f"h{number}"] = make_answer({"fabric": found})
        return make_subject(len(hosts), **fields), answers

    return collect


def verdicts(judged, check, seen, host="h0"):
    subject, answers = seen
    return [
        (each.level, each.cause, each.remedy)
        for each in judged(check, subject, **answers).all(host)
    ]


def test_fabric_checks_pass_on_healthy_h100_host(judged, look):
    seen = look([])
    told = verdicts(judged, "infiniband", seen)
    assert told == [("ok", "8 active ports, 400 Gb/sec (4X NDR)", None)]
    told = verdicts(judged, "fabric-manager", seen)
    assert told == [("ok", "4 NVSwitch chips, fabric manager 580.95.05", None)]


@pytest.mark.parametrize(
    ("changes", "cause", "remedy"),
    [
        (down("mlx5_9"), "1 of 8 ports down: mlx5_9/1 (DOWN, Polling)", "ibstat mlx5_9"),
        (down("mlx5_4", "2: INIT", "5: LinkUp"), "mlx5_4/1: INIT: no subnet manager", "opensm"),
        (slow("mlx5_3"), "mlx5_3/1 runs at 100 Gb/sec (2X HDR), others at 400 Gb/sec", "mlx5_3"),
        ([(OPEN, CLOSED)], "no GPUDirect RDMA", "nvidia-peermem"),
    ],
)
def test_infiniband_warns_of_fault_that_slows_host(judged, look, changes, cause, remedy):
    for beside in ((), ([],)):
        ((level, said, mends),) = verdicts(judged, "infiniband", look(changes, *beside))
        assert level == "warn"
        assert said.startswith(cause)
        assert remedy in mends


def test_infiniband_accepts_port_down_on_all_hosts_and_slower_storage_ports(judged, look):
    unused, storage = down("mlx5_11"), slow("mlx5_3", "mlx5_9")
    for host in ("h0", "h1"):
        ((level, cause, _),) = verdicts(judged, "infiniband", look(unused, unused), host)
        assert (level, cause[:14]) == ("ok", "7 active ports")
    assert verdicts(judged, "infiniband", look(storage))[0][0] == "ok"


def test_infiniband_accepts_closed_driver_with_nvidia_peermem_module(judged, look):
    module = ("dev/nvidia0 ", "dev/nvidia0 \nsys/module/nvidia_peermem/refcnt 0")
    assert verdicts(judged, "infiniband", look([(OPEN, CLOSED), module]))[0][0] == "ok"


def test_infiniband_warns_of_host_without_cards_only_beside_others(judged, look):
    ((level, cause, remedy),) = verdicts(judged, "infiniband", look([NO_CARD], []))
    assert (level, remedy) == ("warn", "lspci | grep -i infiniband; sudo modprobe mlx5_ib")
    assert cause.startswith("no InfiniBand, but 8 ports on another host")
    assert verdicts(judged, "infiniband", look([NO_CARD]))[0][0] == "skip"
    ethernet = (r"(sys/\S*link_layer) InfiniBand", r"\1 Ethernet")
    assert verdicts(judged, "infiniband", look([ethernet]))[0][0] == "skip"


@pytest.mark.parametrize(
    ("manager", "active", "cause", "remedy"),
    [
        (None, "inactive", "4 NVSwitch chips, but no fabric manager: CUDA fails with error 802",
         "nvidia-fabricmanager-580 && "),
        (VERSION("575.57.08"), "failed",
         "fabric manager 575.57.08, but driver 580.95.05: they must be equal",
         "version 580.95.05"),
        (VERSION("580.95.05"), "inactive", "the fabric manager is inactive", "enable --now"),
    ],
)  # fmt: skip
def test_nvswitch_host_fails_without_matching_active_fabric_manager(
    judged, look, manager, active, cause, remedy
):
    seen = look([], manager=manager, active=active)
    ((level, said, mends),) = verdicts(judged, "fabric-manager", seen)
    assert level == "fail"
    assert said.startswith(cause)
    assert remedy in mends


def test_fabric_checks_skip_absent_hardware_and_pass_without_systemd(judged, look):
    bridges = (".*class 0x068000", "")
    assert verdicts(judged, "fabric-manager", look([bridges]))[0][:2] == ("skip", "no NVSwitch")
    unloaded = ("proc/driver/nvidia/version .*", "")
    assert verdicts(judged, "fabric-manager", look([unloaded]))[0][:2] == ("skip", "no driver")
    # Without systemd, as in a container, nobody knows whether it runs.
    assert verdicts(judged, "fabric-manager", look([], active=""))[0][0] == "ok"
    on_cpus = look(down("mlx5_9"), needs=needs(device="cpu"))
    assert verdicts(judged, "infiniband", on_cpus)[0][0] == "skip"


DEBIAN = 'b false\nas 0\nas 1 "root"\n'


@pytest.mark.parametrize(
    ("answer", "user", "level"),
    [
        (DEBIAN, "ann", "ok"),
        ("", "ann", "ok"),
        (DEBIAN.replace("false", "true"), "ann", "fail"),
        (DEBIAN.replace("false", "true"), "root", "ok"),
        ('b true\nas 1 "bob"\nas 1 "root"\n', "ann", "ok"),
        ('b true\nas 2 "ann" "bob"\nas 0\n', "ann", "fail"),
        ("Failed to get property", "ann", "ok"),
    ],
)
def test_logout_check_fails_when_logind_kills_user_processes(judged, answer, user, level):
    found = judged(
        "logout", make_subject(1), make_answer({"logout": {"user": user, "answer": answer}})
    )["h0"]
    assert found.level == level
    if level == "fail":
        assert found.cause == "KillUserProcesses=yes: systemd-logind ends the runs of ann at logout"
        assert "KillUserProcesses=no" in (found.remedy or "")
