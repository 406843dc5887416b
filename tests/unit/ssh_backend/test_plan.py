"""Plans over SSH: where, how many, on what network."""

import subprocess
from pathlib import Path

import msgspec
import pytest

from clusterkit.backends import placing
from clusterkit.cluster import Gpu, Host, Project, SshCluster
from clusterkit.errors import BadInput, Unavailable
from clusterkit.spec import CheckpointSpec
from tests.conftest import noted
from tests.unit.ssh_backend.hosts import PROJECT, SSH, Hosts, cluster, facts, host_facts, job, plan

OWN = Project(root="/opt/site", digest="c" * 32, files=9, bytes=1000, how="clusterkit's own")


def gpus(*indexes, name="NVIDIA H100"):
    return tuple(Gpu(str(index), name, 81559) for index in indexes)


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
