"""The ssh backend: plans from made-up facts, and probing with every host on this machine."""

import json
import os
import posixpath
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from clusterkit import api, backends
from clusterkit.backends import placing
from clusterkit.backends.ssh import observe
from clusterkit.backends.ssh.backend import SshBackend
from clusterkit.backends.ssh.config import LoginRefused
from clusterkit.backends.ssh.hosts import choose_hosts
from clusterkit.backends.ssh.known_hosts import HostKeyProblem
from clusterkit.cluster import Facts, Gpu, Host, HostFacts, Project, SshCluster
from clusterkit.errors import BadInput, PortTaken, Unavailable
from clusterkit.hosts import host_probe
from clusterkit.hosts.addresses import check_hosts
from clusterkit.lifecycle.outcome import without_spares
from clusterkit.output import mirror
from clusterkit.output.mirror import NodeView
from clusterkit.run.folder import RunFolder, RunHandle, node_dir
from clusterkit.run.status import RunStatus, State
from clusterkit.spec import CheckpointSpec, JobSpec
from clusterkit.sync import snapshot
from clusterkit.sync.upload import Upload
from clusterkit.transport import LocalTransport
from tests.conftest import noted

SSH = SshBackend()
PROJECT = Project(root="/home/me/my project", digest="d" * 32, files=3, bytes=4_200_000, how="all")
OWN = Project(root="/opt/site", digest="c" * 32, files=9, bytes=1000, how="clusterkit's own")


def job(**fields):
    given = {"name": "demo", "program": "train.py", "workdir": "/home/me/my project"}
    return JobSpec(**(given | fields))


def gpus(*indexes, name="NVIDIA H100"):
    return tuple(Gpu(str(index), name, 81559) for index in indexes)


def host_facts(number, **fields):
    given = {
        "host": f"h{number}", "address": f"10.0.0.{number}", "cpus": 8, "memory_mib": 1 << 16,
        "python": "/opt/venv/bin/python",
        "versions": {"torch": "2.13.0", "deepspeed": "0.19.8", "clusterkit": "0"},
        "tools": {"mpirun": "/usr/bin/mpirun"}, "interface": "eth0",
    }  # fmt: skip
    return HostFacts(**(given | fields))


def facts(*hosts, **fields):
    given = {
        "home": "/home/u/cluster kit", "port": 29501, "port_origin": "free", "interface": "eth0",
        "project": PROJECT,
    }  # fmt: skip
    return Facts(hosts=hosts or (host_facts(0), host_facts(1)), **(given | fields))


def cluster(number=2, **fields):
    return SshCluster(hosts=tuple(Host(name=f"h{n}") for n in range(number)), **fields)


def plan(found, entry=None, **fields):
    return SSH.plan(job(**fields), entry or cluster(len(found.hosts)), found, "demo-1")


def script(made, name="node.sh"):
    (file,) = (file for file in made.files if file.path.endswith(f"/{name}"))
    return file.content().decode()


def exported(made, step=0):
    """The environment that one node's launcher starts with, by running its script for real."""
    text = script(made)
    end = text.index("\nexec '/opt") if "\nexec '/opt" in text else text.rindex("\nexec ")
    lines = [line for line in text[:end].splitlines() if not line.startswith(("mkdir", "exec <"))]
    done = subprocess.run(
        ["env", "-i", "PATH=/usr/bin:/bin", *(f"{k}={v}" for k, v in made.steps[step].env.items()),
         "sh", "-c", "\n".join([*lines, "env -0"])],
        capture_output=True, check=True,
    )  # fmt: skip
    return dict(item.split("=", 1) for item in done.stdout.decode().split("\0") if "=" in item)


# ---------------------------------------------------------------- where


def test_plan_starts_every_node_on_own_host_from_copied_project():
    made = plan(facts(), nodes=2)
    assert [(s.kind, s.host, s.node, s.env["NODE_RANK"]) for s in made.steps] == [
        ("start", "h0", 0, "0"),
        ("start", "h1", 1, "1"),
    ]
    assert made.hosts == ("h0", "h1")
    assert made.run_dir == "/home/u/cluster kit/runs/demo-1"
    (tree,) = made.trees
    assert tree.path == f"/home/u/cluster kit/projects/my-project/{'d' * 16}"
    assert (tree.source, tree.digest) == (PROJECT.root, PROJECT.digest)
    assert tree.what == "3 files, 4.2 MB; all"
    assert f"--workdir '{tree.path}'" in script(made)
    assert made.address == "10.0.0.0"
    assert exported(made)["MASTER_ADDR"] == "10.0.0.0"
    assert "/home/me" not in script(made)


def test_plan_workdir_below_project_root_maps_into_copy():
    made = plan(facts(), nodes=2, workdir=f"{PROJECT.root}/deep/er")
    assert f"--workdir '{made.trees[0].path}/deep/er'" in script(made)


def test_plan_absolute_program_inside_project_maps_into_copy():
    made = plan(facts(), nodes=2, program=f"{PROJECT.root}/deep/train.py")
    assert f"{made.trees[0].path}/deep/train.py" in script(made)
    assert PROJECT.root not in script(made)


def test_plan_without_sync_uses_local_project_path_on_hosts():
    made = plan(facts(project=None), cluster(sync=False), nodes=2)
    assert made.trees == ()
    assert "--workdir '/home/me/my project'" in script(made)
    assert noted(made, "workdir") == "/home/me/my project"
    absolute = plan(facts(project=None), cluster(sync=False), nodes=2, program="/srv/train.py")
    assert " /srv/train.py" in script(absolute)


def test_plan_ships_clusterkit_package_on_pythonpath():
    made = plan(facts(shipped=OWN), nodes=2)
    assert made.trees[1].path == f"/home/u/cluster kit/projects/clusterkit/{'c' * 16}"
    assert exported(made)["PYTHONPATH"] == made.trees[1].path


@pytest.mark.parametrize("where", ["job", "cluster"])
def test_plan_keeps_pythonpath_of_job_or_cluster(where):
    own = {"PYTHONPATH": "/mine"}
    entry = cluster(env=own if where == "cluster" else {})
    made = plan(facts(shipped=OWN), entry, nodes=2, env=own if where == "job" else {})
    assert exported(made)["PYTHONPATH"] == "/mine"


@pytest.mark.parametrize(
    ("root", "name"),
    [
        ("/home/me/my project", "my-project"),
        ("/", "project"),
        ("/日本", "-"),
        ("/a/..b", "..b"),
        ("/a/x;rm -rf", "x-rm--rf"),
    ],
)
def test_project_tree_path_contains_sanitized_project_name(root, name):
    path = placing.project_tree(facts(), msgspec.structs.replace(PROJECT, root=root)).path
    assert path == f"/home/u/cluster kit/projects/{name}/{'d' * 16}"


def test_project_tree_path_differs_for_different_digests():
    other = msgspec.structs.replace(PROJECT, digest="e" * 32)
    assert placing.project_tree(facts(), PROJECT).path != placing.project_tree(facts(), other).path


def test_plan_puts_relative_checkpoint_dir_on_shared_folder():
    point = CheckpointSpec(dir="ckpt")
    made = plan(facts(), cluster(shared="/mnt/nfs"), nodes=2, checkpoint=point)
    assert exported(made)["CLUSTERKIT_CHECKPOINT_DIR"] == "/mnt/nfs/runs/demo-1/ckpt"
    made = plan(facts(), nodes=2, checkpoint=point)
    assert exported(made)["CLUSTERKIT_CHECKPOINT_DIR"] == f"{made.run_dir}/ckpt"
    absolute = CheckpointSpec(dir="/big/ckpt")
    made = plan(facts(), cluster(shared="/mnt/nfs"), nodes=2, checkpoint=absolute)
    assert exported(made)["CLUSTERKIT_CHECKPOINT_DIR"] == "/big/ckpt"


@pytest.mark.parametrize("shared", ["nfs", "~/nfs", "./x", ""])
def test_cluster_entry_refuses_relative_shared_folder(shared):
    with pytest.raises(BadInput, match=r"shared: .* is not an absolute path"):
        SSH.resolved(cluster(shared=shared), Path("/"), None, None)


# ---------------------------------------------------------------- how many


def test_plan_takes_first_hosts():
    hosts = [host_facts(n) for n in range(4)]
    made = plan(facts(*hosts), nodes=2)
    assert made.hosts == ("h0", "h1")
    assert made.nodes == 2


@pytest.mark.parametrize("nodes", [3, "3:8", 100])
def test_plan_and_probe_refuse_more_nodes_than_hosts(nodes):
    least = int(str(nodes).partition(":")[0])
    with pytest.raises(BadInput) as error:
        plan(facts(), nodes=nodes)
    assert error.value.message == f"nodes: {least} needed, the cluster has 2 hosts (h0, h1)"
    assert error.value.hint == "--nodes 2, or more hosts in the inventory"
    with pytest.raises(BadInput, match="needed, the cluster has 2 hosts"):
        SSH.probe(cluster(), Hosts(), job(nodes=nodes))


def test_plan_elastic_job_takes_all_available_hosts():
    made = plan(facts(host_facts(0), host_facts(1), host_facts(2)), nodes="2:8")
    assert made.topology == {"min_nodes": 2, "nodes": 3, "nproc_per_node": 1}
    assert "8 nodes requested, 3 hosts available" in [str(note) for note in made.notes]
    assert "--nnodes 2:3" in script(made)


def test_plan_elastic_job_on_minimum_hosts_has_fixed_nnodes():
    made = plan(facts(), nodes="2:8")
    assert "--nnodes 2 " in script(made)


def test_plan_takes_next_hosts_as_spares():
    found = facts(*(host_facts(n) for n in range(4)))
    made = plan(found, nodes=2, spares=1)
    assert made.hosts == ("h0", "h1", "h2")
    assert [step.env["NODE_RANK"] for step in made.steps] == ["0", "1", "2"]
    assert (made.nodes, made.world_size) == (3, 2)
    assert made.summary.startswith("2 nodes x 1 rank and 1 spare on h0, h1, h2, started by")
    assert plan(found, nodes="2:8", on_node_loss="shrink", spares=1).topology["nodes"] == 3
    with pytest.raises(BadInput, match=r"2 and 3 spares needed, the cluster has 4 hosts") as no:
        plan(found, nodes=2, spares=3)
    assert (no.value.hint or "").startswith("--nodes 1, or")


def test_plan_nproc_per_node_follows_host_with_fewest_gpus():
    found = facts(host_facts(0, gpus=gpus(0, 1, 2, 3)), host_facts(1, gpus=gpus(0, 1)))
    made = plan(found, nodes=2)
    assert made.topology["nproc_per_node"] == 2
    assert "the fewest GPUs of a host: h1" in {note.origin for note in made.notes}
    assert made.world_size == 4
    assert [step.env["CUDA_VISIBLE_DEVICES"] for step in made.steps] == ["0,1", "0,1"]


def test_plan_exports_chosen_gpus_per_host():
    found = facts(
        host_facts(0, gpus=gpus(2, 5), slots=2), host_facts(1, gpus=gpus(7, 6, 1), slots=3)
    )
    made = plan(found, nodes=2)
    assert [step.env["CUDA_VISIBLE_DEVICES"] for step in made.steps] == ["2,5", "7,6"]
    assert [step.env["CLUSTERKIT_GPUS"] for step in made.steps] == ["2,5", "7,6"]
    assert exported(made, 1)["CUDA_VISIBLE_DEVICES"] == "7,6"


@pytest.mark.parametrize(
    ("first", "second", "nproc", "origin"),
    [
        ({"slots": 4}, {"slots": 2}, 2, "inventory: slots"),
        ({"slots": 4}, {}, 4, "inventory: slots"),
        ({}, {}, 1, "without GPUs one rank per node"),
        (
            {"gpus": gpus(*range(8)), "slots": 3},
            {"gpus": gpus(*range(8))},
            3,
            "the fewest GPUs of a host: h0",
        ),
        ({"gpus": gpus(0), "slots": 8}, {"gpus": gpus(0, 1)}, 1, "the fewest GPUs of a host: h0"),
    ],
)
def test_plan_nproc_per_node_follows_slots_and_gpus(first, second, nproc, origin):
    made = plan(facts(host_facts(0, **first), host_facts(1, **second)), nodes=2)
    assert made.topology["nproc_per_node"] == nproc
    assert next(n for n in made.notes if n.name == "nproc_per_node").origin == origin


@pytest.mark.parametrize(
    ("hosts", "said", "hint"),
    [
        (
            [{}, {"slots": 2}],
            "gpus_per_node: 4, but h1 has 2 slots in the inventory",
            "--gpus 2, or slots: 4 for h1",
        ),
        (
            [{"gpus": gpus(*range(8))}, {"gpus": gpus(0)}],
            "gpus_per_node: 4, but h1 has 1 GPU",
            "--gpus 1, or --exclude h1",
        ),
    ],
)
def test_plan_refuses_more_ranks_than_slots_or_gpus(hosts, said, hint):
    found = facts(*(host_facts(n, **fields) for n, fields in enumerate(hosts)))
    with pytest.raises(BadInput) as error:
        plan(found, nodes=2, gpus_per_node=4)
    assert (error.value.message, error.value.hint) == (said, hint)


def test_plan_refuses_host_without_gpu_only_when_job_uses_host():
    found = facts(host_facts(0, gpus=gpus(0)), host_facts(1))
    assert plan(found, nodes=1).topology["nproc_per_node"] == 1
    with pytest.raises(BadInput, match="h1 has no GPU, but h0 does") as error:
        plan(found, nodes=2)
    assert "--exclude" in (error.value.hint or "")
    with pytest.raises(BadInput, match="device: cuda, but h1 has no GPU"):
        plan(found, nodes=2, device="cuda")
    made = plan(found, nodes=2, device="cpu")
    assert [step.env.get("CUDA_VISIBLE_DEVICES") for step in made.steps] == ["", None]


def test_plan_threads_per_rank_follow_smallest_host():
    made = plan(facts(host_facts(0, cpus=64), host_facts(1, cpus=6)), nodes=2, gpus_per_node=4)
    assert noted(made, "threads_per_rank") == "1"


# ---------------------------------------------------------------- what differs


@pytest.mark.parametrize(
    ("packages", "fields", "said"),
    [
        (
            {},
            {"launcher": "torchrun"},
            "launcher: torchrun needs torch, which /opt/venv/bin/python on h1",
        ),
        ({"torch": "2"}, {"launcher": "deepspeed"}, "launcher: deepspeed needs deepspeed"),
        ({"torch": "2"}, {"deepspeed": {}}, "the job's deepspeed section needs deepspeed"),
    ],
)
def test_plan_names_host_that_lacks_required_package(packages, fields, said):
    with pytest.raises(Unavailable) as error:
        plan(facts(host_facts(0), host_facts(1, versions=packages)), nodes=2, **fields)
    assert said in error.value.message
    assert "h1" in error.value.message


def test_plan_mpirun_requires_open_mpi_on_every_host():
    with pytest.raises(Unavailable, match="mpirun needs Open MPI, which h1 does not have"):
        plan(facts(host_facts(0), host_facts(1, tools={})), nodes=2, launcher="mpirun")


def test_plan_refuses_different_python_paths_across_hosts():
    with pytest.raises(BadInput) as error:
        plan(facts(host_facts(0), host_facts(1, python="/usr/bin/python3")), nodes=2)
    assert error.value.message == ("python: /opt/venv/bin/python on h0, but /usr/bin/python3 on h1")
    assert plan(facts(host_facts(0), host_facts(1, python="/usr/bin/python3")), nodes=1)


def test_plan_remarks_on_package_versions_that_differ_across_hosts():
    versions = {"torch": "2.12.0", "deepspeed": "0.19.8", "transformers": "5"}
    made = plan(facts(host_facts(0), host_facts(1, versions=versions)), nodes=2)
    remarks = [note.value for note in made.notes if not note.name]
    assert "the hosts differ in torch: 2.13.0 on h0; 2.12.0 on h1" in remarks
    assert "the hosts differ in transformers: none on h0; 5 on h1" in remarks
    assert not [remark for remark in remarks if "deepspeed" in remark]


# ---------------------------------------------------------------- the network


def test_plan_exports_common_interface_to_gloo_and_nccl():
    made = plan(facts(), nodes=2)
    for number in (0, 1):
        env = exported(made, number)
        assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == ("eth0", "eth0")
    assert noted(made, "interface") == "eth0"


def test_plan_exports_own_interface_per_host_when_names_differ():
    hosts = (host_facts(0, interface="eth0"), host_facts(1, interface="ens5"))
    made = plan(facts(*hosts, interface=""), nodes=2)
    for number, interface in enumerate(("eth0", "ens5")):
        env = exported(made, number)
        assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == (interface, interface)
    assert noted(made, "interface") == "h0 eth0, h1 ens5"


@pytest.mark.parametrize("where", ["job", "cluster"])
@pytest.mark.parametrize("common", ["eth0", ""])
def test_plan_keeps_nccl_interface_of_job_or_cluster(where, common):
    own = {"NCCL_SOCKET_IFNAME": "ib0"}
    hosts = (host_facts(0), host_facts(1, interface="eth0" if common else "ens5"))
    made = plan(
        facts(*hosts, interface=common),
        cluster(env=own if where == "cluster" else {}),
        nodes=2,
        env=own if where == "job" else {},
    )
    assert exported(made, 1)["NCCL_SOCKET_IFNAME"] == "ib0"
    assert exported(made, 1)["GLOO_SOCKET_IFNAME"] == (common or "ens5")


def test_plan_remarks_on_address_without_interface():
    hosts = (host_facts(0, interface=None), host_facts(1))
    made = plan(facts(*hosts, interface=""), nodes=2)
    (remark,) = [note.value for note in made.notes if "no interface" in note.value]
    assert remark.startswith("no interface of h0 carries the address")
    assert "GLOO_SOCKET_IFNAME" not in exported(made, 0)
    assert exported(made, 1)["GLOO_SOCKET_IFNAME"] == "eth0"


def test_plan_notes_origin_of_master_addr():
    made = plan(facts(), nodes=2)
    assert "master_addr=10.0.0.0 (first host, h0, interface eth0)" in map(str, made.notes)
    entry = SshCluster(hosts=(Host(name="h0", cluster_address="10.0.0.0"), Host(name="h1")))
    made = plan(facts(), entry, nodes=2)
    assert any("as the inventory says" in str(note) for note in made.notes)


# ---------------------------------------------------------------- mpirun


def test_plan_starts_mpirun_on_first_host_for_all_hosts():
    made = plan(facts(), nodes=2, gpus_per_node=2, launcher="mpirun")
    (step,) = made.steps
    assert step.host == "h0"
    assert made.hosts == ("h0", "h1")  # their files and trees are needed on both
    assert made.nodes == 1
    assert made.world_size == 4
    assert script(made, "hostfile") == "10.0.0.0 slots=2\n10.0.0.1 slots=2\n"
    env = exported(made)
    assert env["OMPI_MCA_btl_tcp_if_include"] == env["OMPI_MCA_oob_tcp_if_include"] == "eth0"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        assert f"-x {name} " in script(made)


def test_plan_refuses_gpu_choice_mpirun_cannot_restrict():
    first, second = host_facts(0, gpus=gpus(2, 3)), host_facts(1, gpus=gpus(2, 3))
    with pytest.raises(BadInput, match="mpirun cannot restrict h1 to GPUs 2,3"):
        plan(facts(first, second), nodes=2, launcher="mpirun")
    assert plan(facts(first, host_facts(1, gpus=gpus(0, 1))), nodes=2, launcher="mpirun")
    assert plan(facts(first, second), nodes=2, launcher="mpirun", device="cpu")
    assert plan(facts(first, second), nodes=2)


# ---------------------------------------------------------------- entries


def write(path, text):
    path.write_text(text)
    return path


def resolved(tmp_path, **fields):
    options = {key: fields.pop(key, None) for key in ("include", "exclude")}
    return SSH.resolved(SshCluster(**fields), tmp_path, **options)


def test_resolved_entry_no_longer_needs_inventory_file(tmp_path):
    write(tmp_path / "hosts.yaml", "nodes: {hosts: {h0: , h1: {slots: 4}, h2: }}")
    found = resolved(tmp_path, inventory="hosts.yaml", group="nodes", exclude="h0@h2")
    assert found == SshCluster(hosts=(Host(name="h1", slots=4),))
    again = SSH.resolved(found, Path("/nowhere"), None, None)
    assert again == found


def test_include_and_exclude_flags_override_entry_include(tmp_path):
    write(tmp_path / "hosts", "h0 slots=2\nh1 slots=2\nh2 slots=2\n")
    entry = SshCluster(inventory="hosts", include="h0")
    for options, names in (
        ({"include": None, "exclude": None}, ["h0"]),
        ({"include": "h1:1", "exclude": None}, ["h1"]),
        ({"include": None, "exclude": "h0"}, ["h1", "h2"]),
    ):
        found = SSH.resolved(entry, tmp_path, options["include"], options["exclude"])
        assert [host.name for host in found.hosts] == names


def test_host_file_paths_resolve_relative_to_cluster_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    host = Host(name="h0", identity="keys/id", known_hosts="../known", ssh_config="~/config")
    found = resolved(tmp_path / "project", hosts=(host,))
    assert found.hosts == (
        Host(
            name="h0",
            identity=f"{tmp_path}/project/keys/id",
            known_hosts=f"{tmp_path}/known",
            ssh_config="/home/me/config",
        ),
    )
    assert SSH.resolved(found, Path("/nowhere"), None, None) == found


def test_inventory_path_accepts_tilde_and_absolute_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "hosts", "h0\n")
    for path in ("~/hosts", str(tmp_path / "hosts")):
        assert SSH.resolved(SshCluster(inventory=path), Path("/"), None, None).hosts


CLUSTERS = """\
lab:
  backend: ssh
  inventory: hosts.yaml
  group: nodes
{}
"""


@pytest.fixture
def entry(cwd):
    """Read one entry of a clusters.yaml whose text is given; gives the error's message."""

    def read(text, hosts="nodes: {hosts: {h0: , h1: {slots: 4}}}", **options):
        (cwd / "clusters.yaml").write_text(text)
        if hosts is not None:
            (cwd / "hosts.yaml").write_text(hosts)
        with pytest.raises(BadInput) as error:
            api.resolved_cluster("lab", **options)
        assert error.value.exit_code == 125
        return error.value.message.replace(f"{cwd}/", "")

    return read


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (CLUSTERS.format("  include: h9"), "clusters.yaml:5: lab.include h9: host 'h9' is unknown"),
        (
            CLUSTERS.format("  exclude: h0@h1"),
            "clusters.yaml:5: lab.exclude h0@h1: no host is left",
        ),
        (
            CLUSTERS.format("  shared: nfs"),
            "clusters.yaml:5: lab.shared: nfs is not an absolute path",
        ),
        (CLUSTERS.format("  hosts: [{name: x}]"), "clusters.yaml:3: lab.inventory: a cluster has"),
        ("lab: {backend: ssh}", "clusters.yaml:1: lab.inventory: a cluster has either"),
        (CLUSTERS.format("  worker: x"), "clusters.yaml:5: lab.worker: unknown key (did you mean"),
        (CLUSTERS.format("  port: 99999"), "clusters.yaml:5: lab.port: 99999: "),
        (CLUSTERS.format("  sync: maybe"), "clusters.yaml:5: lab.sync: 'maybe' is text, not true"),
        (CLUSTERS.format("  connect_timeout: 0"), "clusters.yaml:5: lab.connect_timeout: 0: "),
        (
            CLUSTERS.format("  lost_after: .nan"),
            "clusters.yaml:5: lab.lost_after: nan is not a finite",
        ),
        (CLUSTERS.format("  workdir: ''"), "clusters.yaml:5: lab.workdir: "),
        (CLUSTERS.format("  env: {A=B: c}"), "clusters.yaml:5: lab.env: "),
        (
            "lab:\n  backend: ssh\n  hosts:\n  - name: a\n  - nam: b\n",
            "clusters.yaml:5: lab.hosts[1]",
        ),
        (
            "lab:\n  backend: ssh\n  hosts:\n  - name: a;id\n",
            "clusters.yaml:3: lab.hosts: host 'a;id': 'a;id' is neither a host name",
        ),
        (
            "lab:\n  backend: ssh\n  hosts: [{name: a}, {name: b, address: a}]\n",
            "clusters.yaml:3: lab.hosts: hosts a and b have the same address a",
        ),
        (
            "lab:\n  backend: ssh\n  hosts: [{name: a, port: 0}]\n",
            "clusters.yaml:3: lab.hosts[0].port: 0: ",
        ),
        (
            "lab:\n  backend: ssh\n  hosts:\n  - name: a\n    known_hosts: /dev/null\n",
            "clusters.yaml:5: lab.hosts[0].known_hosts: /dev/null holds no key, and a host's key",
        ),
        ("lab:\n  backend: shh\n", "clusters.yaml:2: lab.backend: 'shh' is not a backend"),
    ],
)
def test_invalid_cluster_entry_is_reported_with_file_line_and_key(entry, text, said):
    message = entry(text)
    assert message.startswith(said), message


def test_invalid_inventory_is_reported_with_inventory_file(entry):
    assert entry(CLUSTERS.format(""), "a: {hosts: {h0: }}") == (
        "hosts.yaml: there is no group 'nodes'"
    )
    assert entry(CLUSTERS.format(""), "nodes:\n  hosts: [h0]").startswith(
        "hosts.yaml:2: nodes.hosts: a mapping is needed"
    )
    assert entry(CLUSTERS.format(""), "") == "hosts.yaml: the file is empty"
    (Path.cwd() / "hosts.yaml").unlink()
    assert entry(CLUSTERS.format(""), None) == "hosts.yaml: no such file or directory"


def test_unknown_host_in_include_or_exclude_flag_names_flag(entry):
    for flag in ("include", "exclude"):
        message = entry(CLUSTERS.format("  include: h0"), **{flag: "h7"})
        assert message == f"--{flag} h7: host 'h7' is unknown"


@pytest.mark.parametrize(
    ("hosts", "options", "said"),
    [
        ("", (), "error: hosts.yaml: the file is empty"),
        ("all: {hosts", (), "error: hosts.yaml:1: not YAML"),
        ("a: {hosts: {h0: }}", (), "error: hosts.yaml: there is no group 'nodes'"),
        ("nodes: {hosts: {h0: }}", ("--nodes", "2"), "error: --nodes: 2 needed, the cluster"),
        ("nodes: {hosts: {h0: }}", ("--include", "h1"), "error: --include h1: host 'h1' is unkn"),
        ("nodes: {hosts: {h0: {ansible_password: x}}}", (), "error: hosts.yaml:1: host h0: ans"),
    ],
)
def test_submit_and_plan_refuse_bad_inventory_or_flags(
    write_job, refused, cwd, hosts, options, said
):
    name = write_job("launcher: forkserver\n")
    (cwd / "clusters.yaml").write_text(CLUSTERS.format(""))
    (cwd / "hosts.yaml").write_text(hosts)
    for verb in ("submit", "plan"):
        told = refused(verb, name, "--cluster", "lab", *options).replace(f"{cwd}/", "")
        assert told.startswith(said), told


def test_submit_reports_unreachable_host(write_job, refused, cwd, monkeypatch):
    name = write_job("launcher: forkserver\n")
    monkeypatch.setenv("HOME", str(cwd))
    host = f"{{name: h0, address: 127.0.0.1, port: 1, identity: {cwd}/gone}}"
    (cwd / "clusters.yaml").write_text(f"lab: {{backend: ssh, hosts: [{host}]}}")
    told = refused("submit", name, "--cluster", "lab")
    assert "host h0 (127.0.0.1 port 1) refuses connections on port 1" in told


def test_choose_hosts_handles_5000_hosts_within_2_s():
    hosts = [Host(name=f"h{n}", slots=8) for n in range(5000)]
    began = time.process_time()
    found = choose_hosts(hosts, None, "@".join(f"h{n}:0" for n in range(2500)))
    check_hosts(found, "hosts")
    assert len(found) == 5000
    assert time.process_time() - began < 2


# ---------------------------------------------------------------- probing


class Hosts(LocalTransport):
    """Every host is this machine, in a container and reached at an address of its own."""

    def __init__(self, **told):
        self.told = told
        """Host to what its probe says otherwise."""
        self.asked = []

    def run(self, host, argv, *, env=None, timeout=None, stdin=b""):
        self.asked.append((host, tuple(argv), dict(env or {})))
        changes = self.told.get(host, {})
        if isinstance(changes, Exception):
            raise changes
        reached = {"SSH_CONNECTION": f"10.9.9.9 5 10.0.0.{host[1:]} 22"}
        done = super().run(host, argv, env={**(env or {}), **reached}, timeout=timeout, stdin=stdin)
        if done.stdout.startswith("{"):
            document = json.loads(done.stdout) | {"machine": host} | changes
            done = type(done)(done.argv, done.exit_code, json.dumps(document), done.stderr)
        return done


@pytest.fixture
def entry_of(tmp_path, no_gpus):
    def make(number=2, **fields):
        given = {"python": sys.executable, "workdir": str(tmp_path / "my work"), "sync": False}
        return cluster(number, **(given | fields))

    return make


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


# ---------------------------------------------------------------- judging


def view(
    number, *, begun=True, alive=True, ended=False, silent=None, known=True, files=(), error=None
):
    made = NodeView(number, f"h{number}", known=known, begun=begun, alive=alive, ended=ended)
    made.files = dict(files)
    if silent is not None:
        made.error = error or Unavailable(f"host h{number} does not answer")
        made.silent_since = mirror.awake() - silent
    return made


def judged(*views, patience=30.0):
    made = plan(facts(*map(host_facts, range(len(views)))), nodes=len(views))
    handle = RunHandle(RunFolder(Path("no", "folder")), made)
    seen = observe.observation(handle, list(views), patience)
    return None if seen is None else [(node.state, node.reason) for node in seen.nodes]


def test_status_of_host_silent_beyond_patience_is_unknown():
    (state, reason), other = judged(view(0, silent=31), view(1))
    assert state is State.UNKNOWN
    assert reason == "host h0 does not answer (no answer for 31 s)"
    assert other == (State.RUNNING, None)
    (state, reason), _ = judged(view(0, silent=29), view(1))
    assert state is State.RUNNING
    assert "no answer for 29 s" in reason
    (state, _), _ = judged(view(0, silent=5, begun=False, alive=False), view(1))
    assert state is State.PENDING


def test_status_is_unknown_when_all_hosts_are_silent():
    assert [state for state, _ in judged(view(0, silent=99), view(1, silent=99))] == [
        State.UNKNOWN,
        State.UNKNOWN,
    ]


def test_status_of_single_silent_host_is_unknown_not_final():
    ((state, reason),) = judged(view(0, silent=999))
    assert state is State.UNKNOWN  # which ends nothing
    assert "no answer for 999 s" in reason


def test_succeeded_node_leaves_silent_node_unknown():
    files = {"exit.json": b'{"exit_code": 0, "at": 1.0, "reason": null}'}
    done = view(0, alive=False, ended=True, files=files)
    assert [state for state, _ in judged(done, view(1, silent=99))] == [
        State.SUCCEEDED,
        State.UNKNOWN,
    ]


def test_host_silence_counts_from_submitter_return():
    """The first host answers seconds before the others do."""
    now = [1000.0]
    views = [view(0, silent=0), view(1, silent=0), view(2, silent=0)]
    for each in views:
        each.clock, each.silent_since = (lambda: now[0]), 1000.0
    handle = RunHandle(RunFolder(Path("no", "folder")), plan(facts(*map(host_facts, range(3)))))
    now[0] += 600
    observe.observation(handle, views, 30.0)
    views[0].take({"begun": True, "alive": True, "ended": False}, b"")
    for seconds, state in ((0, State.RUNNING), (29, State.RUNNING), (1, State.UNKNOWN)):
        now[0] += seconds
        seen = observe.observation(handle, views, 30.0)
        assert [node.state for node in seen.nodes] == [State.RUNNING, state, state]


@pytest.mark.parametrize(
    "error",
    [
        HostKeyProblem("host h1: its host key has changed", hint="ssh-keygen -R h1"),
        LoginRefused("host h1 does not let user me in", hint="ssh-copy-id h1"),
        mirror.Unreadable("a node's report cannot be read: 'motd'", hint="look at it"),
    ],
)
def test_host_that_sends_no_report_is_unknown_with_cause_and_hint(error):
    _, (state, reason) = judged(view(0), view(1, silent=600, error=error))
    assert state is State.UNKNOWN
    assert reason.startswith(f"{error.message} (it answers, but sends no report for 600 s); ")
    assert reason.endswith(error.hint)


def test_pause_of_submitter_does_not_count_as_host_silence():
    """SIGSTOP, a suspended machine: the hosts have spoken, this process has not listened."""
    now = [100.0]
    clock = mirror.PauseAwareClock(lambda: now[0])
    views = [view(0), view(1)]
    for each in views:
        each.clock = clock
        each.take({}, b"")
        each.take({"begun": True, "alive": True, "ended": False}, b"")
    now[0] += 3600
    views[0].lost(Unavailable("host h0 does not answer"))  # its connection broke off meanwhile
    assert judged(*views)[0][0] is State.RUNNING
    for _ in range(31):
        now[0] += 1
        clock()
    assert judged(*views)[0][0] is State.UNKNOWN


def test_exit_file_of_silent_live_node_counts_as_success():
    files = {"exit.json": b'{"exit_code": 0, "at": 1.0, "reason": null}'}
    half_heard = view(0, alive=True, ended=False, silent=99, files=files)
    assert judged(half_heard, view(1))[0][0] is State.SUCCEEDED


def test_status_with_zero_patience_is_unknown_for_silent_host():
    assert judged(view(0, silent=0.1), view(1), patience=0.0)[0][0] is State.UNKNOWN


def test_ended_node_stays_succeeded_when_host_becomes_silent():
    files = {"exit.json": b'{"exit_code": 0, "at": 1.0, "reason": null}'}
    ended = view(0, alive=False, ended=True, silent=99, files=files)
    assert judged(ended, view(1))[0][0] is State.SUCCEEDED


def test_started_node_counts_as_running_until_host_answers(tmp_path):
    """Else whoever attaches would end it, where others succeeded: it may be saving its work."""
    made = plan(facts(), nodes="1:2", launcher="torchrun")
    handle = RunHandle(RunFolder(tmp_path), made)
    ended = b'{"exit_code": 0, "at": 1.0, "reason": null}'
    for node, files in enumerate(({"exit.json": ended}, {"started.json": b'{"host": "h1"}'})):
        handle.folder.node_dir(1, node).mkdir(parents=True)
        for name, content in files.items():
            (handle.folder.node_dir(1, node) / name).write_bytes(content)
    views = observe.views(handle)
    seen = without_spares(made, observe.observation(handle, views, 30.0))
    assert [node.state for node in seen.nodes] == [State.SUCCEEDED, State.RUNNING]
    assert seen.state is State.RUNNING
    views[1].take({"begun": True, "alive": False, "ended": True}, b"")
    seen = without_spares(made, observe.observation(handle, views, 30.0))
    assert [node.state for node in seen.nodes] == [State.SUCCEEDED, State.FAILED]


def test_hosts_without_run_files_yield_no_status_or_unknown():
    assert judged(view(0, known=False), view(1, known=False)) is None
    (state, reason), _ = judged(view(0, known=False), view(1))
    assert state is State.UNKNOWN
    assert reason == "nothing is left of the run on host h0"


# ---------------------------------------------------------------- for real


def test_ssh_run_on_two_simulated_hosts_mirrors_logs_and_cleans_up(tmp_path, entry_of, cwd):
    """Project sent, nodes started, files mirrored, leftovers ended, all gone: no sshd needed."""
    program = "import os, sys\nprint('rank', os.environ['RANK'], 'in', os.getcwd())\n"
    (cwd / "train.py").write_text(program + "sys.exit(int(os.environ['RANK']) * 3)\n")
    transport = Hosts()
    entry = entry_of(sync=True)
    mine = job(workdir=str(cwd), launcher="forkserver", nodes=2, env={"ODD": "it's $HOME"})
    found = SSH.probe(entry, transport, mine)
    made = SSH.plan(mine, entry, found, "demo-1")
    sent = snapshot.take(cwd, "train.py")
    for host in made.hosts:
        for tree in made.trees[:1]:
            Upload(sent, tree).send(host, made.python, transport)
    SSH.submit(made, transport)
    handle = RunHandle(RunFolder(tmp_path / "mirror"), made)
    watcher = SSH.watch(handle, transport)
    deadline = time.monotonic() + 120
    while True:
        seen = watcher.status()
        if {node.state for node in seen.nodes} <= {State.SUCCEEDED, State.FAILED}:
            break
        assert time.monotonic() < deadline, seen
        time.sleep(0.05)
    watcher.close()
    assert [(node.state, node.exit_code) for node in seen.nodes] == [
        (State.SUCCEEDED, 0),
        (State.FAILED, 3),
    ]
    assert sorted((end.rank, end.exit_code) for end in seen.rank_exits) == [(0, 0), (1, 3)]
    lines = [line.text for batch in handle.folder.log(1, (0, 1)) for line in batch]
    assert sorted(lines) == [f"rank {n} in {made.trees[0].path}" for n in range(2)]
    local = tmp_path / "mirror" / "attempts" / "1" / "node-1" / "log"
    assert local.read_bytes() == Path(node_dir(made.run_dir, 1, 1), "log").read_bytes()
    SSH.cancel(handle, transport)
    SSH.remove_remote_files(handle, transport)
    SSH.remove_remote_files(handle, transport)
    assert not Path(made.run_dir).exists()
    assert Path(made.trees[0].path).exists()
    assert SSH.status(RunHandle(RunFolder(tmp_path / "other"), made), transport) is None
    assert posixpath.dirname(made.run_dir) == str(tmp_path / "my work" / "runs")


# ---------------------------------------------------------------- when hosts are gone


def test_remove_remote_files_on_shared_folder_deletes_each_path_once(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    script = f'#!/bin/sh\necho "$3" >>{tmp_path}/asked\nexec /bin/rm "$@"\n'
    (tmp_path / "bin/rm").write_text(script)
    (tmp_path / "bin/rm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    made = plan(facts(*map(host_facts, range(8))), nodes=8)
    made = msgspec.structs.replace(made, run_dir=str(tmp_path / "runs/demo-1"), shared=None)
    handle = RunHandle(RunFolder(tmp_path / "here"), made)
    for number in range(300):
        path = Path(made.run_dir, "attempts", str(number % 10), f"node-{number}", "log")
        path.parent.mkdir(parents=True)
        path.write_text("line\n")
    SSH.remove_remote_files(handle, LocalTransport())
    assert os.listdir(tmp_path / "runs") == []
    # Two that remove the same files would each report those that the other has removed.
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == len(set(asked))


class Gone(LocalTransport):
    """No host answers."""

    def open(self, host, argv, *, env=None):
        raise Unavailable(f"host {host} does not answer")


def brought(node, handle, text, exit_json=b'{"exit_code": 0, "at": 1.0, "reason": null}'):
    """What a node has written, as it is in the run's folder here."""
    path = handle.folder.node_dir(handle.attempt, node)
    path.mkdir(parents=True)
    (path / "log").write_text(f"2026-11-21T20:11:58.{node:06d}Z {node} {text}\n")
    if exit_json is not None:
        (path / "exit.json").write_bytes(exit_json)


def test_status_takes_known_node_exit_from_mirror_when_hosts_are_gone():
    handle = RunHandle(RunFolder.create("demo-1"), plan(facts(), nodes=2))
    brought(0, handle, "zero")
    brought(1, handle, "one", exit_json=None)
    seen = SSH.status(handle, Gone())
    assert [node.state for node in seen.nodes] == [State.SUCCEEDED, State.UNKNOWN]
    brought(1, replace(handle, attempt=2), "one")
    (handle.folder.node_dir(1, 1) / "exit.json").write_bytes(
        b'{"exit_code": 3, "at": 1.0, "reason": null}'
    )
    seen = SSH.status(handle, Gone())
    assert [(node.state, node.exit_code) for node in seen.nodes] == [
        (State.SUCCEEDED, 0),
        (State.FAILED, 3),
    ]
    watcher = SSH.watch(handle, Gone())
    assert watcher.status().nodes == seen.nodes
    watcher.close()


def test_finished_run_reads_logs_and_metrics_without_hosts(monkeypatch):
    monkeypatch.setattr(backends, "transport_for", lambda cluster: pytest.fail("asks the hosts"))
    folder = RunFolder.create("demo-1")
    made = plan(facts(), nodes=2)
    folder.save_plan(facts(), made)
    folder.write_json(
        "state.json",
        RunStatus(run="demo-1", job="demo", cluster="lab", backend="ssh", state=State.SUCCEEDED),
    )
    brought(0, RunHandle(folder, made), '@clusterkit {"event": "metrics", "step": 1, "loss": 2.0}')
    brought(1, RunHandle(folder, made), "hello")
    run = api.get("demo-1")
    assert [(line.node, line.rank) for line in run.logs()] == [(0, 0), (1, 1)]
    assert [line.text for line in run.logs(node=1, follow=True)] == ["hello"]
    assert run.metrics() == [{"step": 1, "loss": 2.0}]
