"""What probing hosts finds."""

import json
import os
import socket
import sys
from pathlib import Path

import msgspec
import pytest

from clusterkit import api, backends
from clusterkit.cluster import Host
from clusterkit.errors import BadInput, PortTaken, Unavailable
from clusterkit.hosts import host_probe
from clusterkit.sync import snapshot
from clusterkit.transport import LocalTransport
from tests.unit.ssh_backend.hosts import SSH, Hosts, cluster, job


def test_probe_returns_facts_of_every_host(entry_of, tmp_path):
    found = SSH.probe(entry_of(), Hosts())
    assert found.home == str(tmp_path / "my work")
    assert [(host.host, host.address) for host in found.hosts] == [
        ("h0", "10.0.0.0"),
        ("h1", "10.0.0.1"),
    ]
    for host in found.hosts:
        assert host.cpus == len(os.sched_getaffinity(0))
        assert host.python == sys.executable
        assert "torch" in host.versions
    assert 20000 <= found.port < 32000
    assert found.port_origin == "free on h0 when probed"
    assert found.project is None
    assert not (tmp_path / "my work").exists()


def test_probe_refuses_two_names_of_one_machine(entry_of):
    same = {f"h{n}": {"machine": host_probe.machine()} for n in range(2)}
    with pytest.raises(BadInput, match="host h1 is the same machine as h0") as refused:
        SSH.probe(entry_of(3), Hosts(**same))
    assert "--exclude h1" in refused.value.hint
    # Cloned machines have addresses of their own; where nothing tells, nothing is refused.
    network = [{"name": "eth0", "address": "10.0.0.9"}]
    SSH.probe(entry_of(), Hosts(h0=same["h0"], h1=same["h1"] | {"interfaces": network}))
    SSH.probe(entry_of(), Hosts(h0={"machine": ""}, h1={"machine": ""}))


def test_probe_finds_free_watch_port(entry_of):
    port = LocalTransport().free_port("h0")
    found = SSH.probe(entry_of(port=port), Hosts())
    assert (found.port, found.watch_port) == (port, port + 1)
    with socket.create_server(("", port + 1)):
        found = SSH.probe(entry_of(port=port), Hosts())
    assert found.port == port
    assert found.watch_port not in (port, port + 1)


def test_probe_asks_only_hosts_job_takes(entry_of):
    transport = Hosts(h2=Unavailable("host h2 does not answer"))
    found = SSH.probe(entry_of(3), transport, job(nodes=2))
    assert len(found.hosts) == 2
    assert "h2" not in {host for host, _, _ in transport.asked}
    with pytest.raises(Unavailable, match="h2 does not answer"):
        SSH.probe(entry_of(3), transport)


def test_probe_names_all_hosts_that_do_not_answer(entry_of):
    away = {f"h{n}": Unavailable(f"host h{n} does not answer") for n in (0, 2, 3)}
    with pytest.raises(Unavailable) as error:
        SSH.probe(entry_of(4), Hosts(**away))
    assert error.value.message == "host h0 does not answer (and 2 further hosts: h2, h3)"


def test_probe_reports_broken_python_with_host_and_key(entry_of, tmp_path):
    with pytest.raises(Unavailable, match=r"host h0: python: /nope/python .*: cannot start /nope"):
        SSH.probe(entry_of(1, python="/nope/python"), Hosts())
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho out of order >&2; exit 3\n")
    broken.chmod(0o755)
    with pytest.raises(Unavailable) as error:
        SSH.probe(entry_of(1, python=str(broken)), Hosts())
    assert error.value.message == (
        f"host h0: python: {broken} is not a working Python interpreter: out of order"
    )
    assert "clusterkit_python" in (error.value.hint or "")


def test_probe_refuses_too_old_python(entry_of):
    with pytest.raises(Unavailable, match=r"host h1: .* is Python 3\.9\.2"):
        SSH.probe(entry_of(), Hosts(h1={"python_version": [3, 9, 2]}))


def test_probe_uses_python_of_host(entry_of, tmp_path):
    link = tmp_path / "other python"
    link.symlink_to(sys.executable)
    entry = msgspec.structs.replace(
        entry_of(), hosts=(Host(name="h0"), Host(name="h1", python=str(link)))
    )
    found = SSH.probe(entry, Hosts())
    assert [host.python for host in found.hosts] == [sys.executable, str(link)]
    assert [host.python_origin for host in found.hosts] == ["cluster: python", "the host's own"]


def test_probe_uses_python_of_job(entry_of, tmp_path):
    link = tmp_path / "other python"
    link.symlink_to(sys.executable)
    named = job(python=str(link))
    (host,) = SSH.probe(entry_of(1, sync=False), Hosts(), named).hosts
    assert (host.python, host.python_origin) == (str(link), "job: python")
    assert SSH.subject("lab", entry_of(1), named).hosts[0].python == str(link)


def test_probe_counts_user_site_packages_and_ignores_home_folder_modules(
    entry_of, tmp_path, monkeypatch
):
    base = tmp_path / "userbase"
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    dist = base / "lib" / version / "site-packages" / "deepspeed-77.7.dist-info"
    dist.mkdir(parents=True)
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 77.7\n")
    home = tmp_path / "home"
    home.mkdir()
    (home / "json.py").write_text("raise SystemExit('a module of the home folder')\n")
    monkeypatch.chdir(home)
    # Not this checkout's virtual environment: it has no packages of the user's.
    python = Path(sys.executable).resolve()
    monkeypatch.setenv("PYTHONUSERBASE", str(base))
    (host,) = SSH.probe(entry_of(1, python=str(python)), Hosts()).hosts
    assert host.versions["deepspeed"] == "77.7"


def test_probe_finds_packages_on_pythonpath_of_cluster_or_job(entry_of, tmp_path):
    dist = tmp_path / "lib" / "transformers-66.6.dist-info"
    dist.mkdir(parents=True)
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 66.6\n")
    path = {"PYTHONPATH": str(tmp_path / "lib")}
    (host,) = SSH.probe(entry_of(1, env=path), Hosts()).hosts
    assert host.versions["transformers"] == "66.6"
    (host,) = SSH.probe(entry_of(1), Hosts(), job(env=path)).hosts
    assert host.versions["transformers"] == "66.6"


def test_cluster_workdir_error_names_cluster_file_not_job(cwd, write_job, entry_of, monkeypatch):
    text = "lab:\n  backend: ssh\n  hosts: [{name: h0}, {name: h1}]\n  workdir: ~/clusterkit\n"
    (cwd / "clusters.yaml").write_text(f"{text}  python: {json.dumps(sys.executable)}\n")
    transport = Hosts(h1={"workdir": "/home/other/clusterkit"})
    monkeypatch.setattr(backends, "transport_for", lambda cluster: transport)
    with pytest.raises(BadInput) as error:
        api.plan(write_job("workdir: .\nnodes: 2\n"), cluster="lab", doctor=False)
    assert error.value.message.startswith(f"{cwd}/clusters.yaml:4: lab.workdir: ~/clusterkit is ")
    assert (error.value.key, error.value.source) == (("workdir",), "cluster")
    assert error.value.where == f"{cwd}/clusters.yaml:4"


def test_probe_refuses_home_workdir_that_differs_across_hosts(entry_of):
    transport = Hosts(h1={"workdir": "/home/other/clusterkit"})
    with pytest.raises(BadInput) as error:
        SSH.probe(entry_of(workdir="~/clusterkit"), transport)
    assert error.value.message.startswith("workdir: ~/clusterkit is ")
    assert "/home/other/clusterkit on h1" in error.value.message
    assert error.value.hint == "give an absolute path"


def test_probe_refuses_fixed_port_in_use(entry_of):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {taken} on host h0 is in use"):
            SSH.probe(entry_of(port=taken), Hosts())
    found = SSH.probe(entry_of(port=taken), Hosts())
    assert (found.port, found.port_origin) == (taken, "cluster: port")


INTERFACES = [
    {"name": "lo", "address": "127.0.0.1", "mtu": 65536},
    {"name": "eth0", "address": "10.0.0.0", "mtu": 1500},
    {"name": "ib0", "address": "192.168.7.7", "mtu": 4096},
]


def on_network(number=2, **changes):
    told = {}
    for n in range(number):
        mine = [dict(one) for one in INTERFACES]
        mine[1]["address"], mine[2]["address"] = f"10.0.0.{n}", f"192.168.7.{n}"
        told[f"h{n}"] = {"interfaces": mine} | changes.get(f"h{n}", {})
    return Hosts(**told)


def test_probe_picks_interface_that_carries_address(entry_of):
    found = SSH.probe(entry_of(), on_network())
    assert found.interface == "eth0"
    assert [host.address for host in found.hosts] == ["10.0.0.0", "10.0.0.1"]


def test_probe_takes_address_from_interface_of_entry(entry_of):
    found = SSH.probe(entry_of(interface="ib0"), on_network())
    assert found.interface == "ib0"
    assert [host.address for host in found.hosts] == ["192.168.7.0", "192.168.7.1"]
    with pytest.raises(BadInput, match="interface: host h0 has no ib9 with an address") as error:
        SSH.probe(entry_of(interface="ib9"), on_network())
    assert error.value.hint == "it has lo, eth0, ib0"


def test_probe_supports_ipv6_only_hosts(entry_of):
    told = {
        f"h{n}": {
            "reached_at": f"fd00::1{n}",
            "interfaces": [
                {"name": "lo", "address": "127.0.0.1"},
                {"name": "lo", "address": "::1"},
                {"name": "eth0", "address": f"fd00::1{n}"},
            ],
        }
        for n in range(2)
    }
    for entry in (entry_of(), entry_of(interface="eth0")):
        found = SSH.probe(entry, Hosts(**told))
        assert found.interface == "eth0"
        assert [host.address for host in found.hosts] == ["fd00::10", "fd00::11"]


def test_probe_prefers_cluster_address_of_inventory(entry_of):
    hosts = (Host(name="h0", cluster_address="192.168.7.0"), Host(name="h1", cluster_address="dns"))
    entry = msgspec.structs.replace(entry_of(), hosts=hosts)
    found = SSH.probe(entry, on_network())
    assert [(host.address, host.interface) for host in found.hosts] == [
        ("192.168.7.0", "ib0"),
        ("dns", None),
    ]
    assert found.interface == ""


def test_probe_refuses_loopback_host_in_multi_node_job(entry_of):
    loop = {"reached_at": "127.0.0.1"}
    with pytest.raises(BadInput, match="h1: it was reached at 127") as error:
        SSH.probe(entry_of(), on_network(h1=loop))
    assert "clusterkit_address" in (error.value.hint or "")
    # A job on that host alone has no others to be reached by.
    entry = msgspec.structs.replace(entry_of(), hosts=(Host(name="h1"), Host(name="h0")))
    found = SSH.probe(entry, on_network(h1=loop), job(nodes=1))
    assert found.hosts[0].address == "127.0.0.1"


CSV = "".join(f"{n}, GPU-{n}, NVIDIA H100, 81559\n" for n in range(4))


def test_probe_takes_gpus_from_inventory_devices_or_visible_devices(entry_of):
    hosts = (Host(name="h0", devices=(3, 1), slots=2), Host(name="h1"))
    entry = msgspec.structs.replace(entry_of(), hosts=hosts)
    transport = Hosts(h0={"gpus": CSV, "visible": None}, h1={"gpus": CSV, "visible": "2,0"})
    found = SSH.probe(entry, transport)
    assert [[gpu.index for gpu in host.gpus] for host in found.hosts] == [["3", "1"], ["2", "0"]]
    assert found.hosts[0].slots == 2


def test_probe_refuses_device_host_does_not_have(entry_of):
    entry = msgspec.structs.replace(entry_of(1), hosts=(Host(name="h0", devices=(0, 7)),))
    with pytest.raises(BadInput, match="host h0: GPU 7 is asked for, it has 4 GPUs"):
        SSH.probe(entry, Hosts(h0={"gpus": CSV, "visible": None}))
    assert SSH.probe(entry, Hosts(h0={"gpus": "No devices were found\n"})).hosts[0].gpus == ()


def test_probe_snapshots_project_and_clusterkit_only_when_needed(entry_of, cwd, write_job):
    write_job()
    lacks = Hosts(h1={"versions": {"torch": "2"}})
    mine = job(workdir=str(cwd), nodes=2)
    found = SSH.probe(entry_of(sync=True), lacks, mine)
    assert found.project == snapshot.take(cwd, "train.py").facts()
    assert found.shipped == snapshot.own_package().facts()
    found = SSH.probe(entry_of(sync=True), Hosts(), mine)
    assert found.project is not None
    assert (found.shipped is None) == ("clusterkit" in found.hosts[0].versions)
    found = SSH.probe(entry_of(sync=False), lacks, mine)
    assert (found.project, found.shipped) == (None, None)
    found = SSH.probe(entry_of(sync=True), lacks)
    assert (found.project, found.shipped) == (None, None)


def test_probe_refuses_entry_without_hosts(entry_of):
    with pytest.raises(BadInput, match="hosts: the cluster entry names none"):
        SSH.probe(entry_of(0), Hosts())


def test_ssh_backend_without_paramiko_hints_pip_install(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "paramiko"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "clusterkit.backends.ssh.transport", raising=False)
    monkeypatch.setitem(sys.modules, "paramiko", None)
    with pytest.raises(Unavailable, match="backend ssh needs paramiko") as error:
        backends.transport_for(cluster())
    assert error.value.hint == "pip install 'clusterkit[ssh]'"
