"""Checks of the network."""

import pytest

from clusterkit.doctor.hosts.base import Machine
from clusterkit.doctor.hosts.checks.ports import MEETING
from clusterkit.doctor.hosts.collect import meeting
from tests.unit.doctor.checks.answers import silent
from tests.unit.doctor.conftest import PYTHON, make_answer, make_subject


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
