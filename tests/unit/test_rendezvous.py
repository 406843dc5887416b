"""The environment of every rank and the command line of every launcher."""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from clusterkit import agent, rendezvous
from clusterkit.agent import spawn, streams
from clusterkit.rendezvous import (
    Endpoint,
    Topology,
    launcher_argv,
    node_environment,
    rank_script,
)
from clusterkit.shell import Concat, Var, join
from clusterkit.spec import Launcher

LAUNCHERS = typing.get_args(Launcher)
ENDPOINT = Endpoint("10.0.0.1", 29501, "demo-1")
# What rank 5 sees of 2 nodes of 4 ranks, whatever the launcher and the backend.
CONTRACT = {
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29501",
    "RANK": "5",
    "LOCAL_RANK": "1",
    "NODE_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
}


def argv_of(launcher, topology, **more):
    argv = launcher_argv(
        launcher,
        topology,
        ENDPOINT,
        python="/venv/bin/python",
        hostfile="/run/hostfile",
        **more,
    )
    return [*argv, "sh", "rank.sh", "train.py"]


def test_torchrun_with_fixed_nodes_uses_static_rendezvous():
    argv = argv_of("torchrun", Topology(2, 2, 4))
    assert argv[:3] == ["/venv/bin/python", "-m", "torch.distributed.run"]
    line = join(argv)
    assert "--nnodes 2 --nproc-per-node 4" in line
    assert '--node-rank "$NODE_RANK" --master-addr 10.0.0.1 --master-port 29501' in line
    assert "--max-restarts 0" in line
    assert "rdzv" not in line
    assert argv[-4:] == ["--no-python", "sh", "rank.sh", "train.py"]


def test_torchrun_with_node_range_uses_c10d_rendezvous():
    argv = argv_of("torchrun", Topology(1, 4, 2))
    line = join(argv)
    assert "--nnodes 1:4 --nproc-per-node 2" in line
    assert "--rdzv-backend c10d --rdzv-id demo-1 --rdzv-endpoint 10.0.0.1:29501" in line
    assert "--node-rank" not in line
    assert "--master-addr" not in line
    (conf,) = [
        word for word in argv if isinstance(word, Concat) and rendezvous.IS_HOST in word.parts
    ]
    assert conf.parts[-1] == rendezvous.IS_HOST


def test_deepspeed_launcher_starts_one_node_without_ssh():
    argv = argv_of("deepspeed", Topology(2, 2, 4))
    assert argv[:3] == ["/venv/bin/python", "-m", "deepspeed.launcher.runner"]
    line = join(argv)
    assert '--hostfile /run/hostfile --no_ssh --node_rank "$NODE_RANK"' in line
    assert "--master_addr 10.0.0.1 --master_port 29501" in line
    assert argv[-4:] == ["--no_python", "sh", "rank.sh", "train.py"]


def test_deepspeed_over_openmpi_starts_all_nodes():
    argv = argv_of("deepspeed", Topology(2, 2, 4), exports=["TOKEN"], mpi_interface="eth1")
    line = join(argv)
    assert "--no_ssh " not in line
    assert "--hostfile /run/hostfile --force_multi --no_ssh_check --launcher openmpi" in line
    (more,) = (word for word in argv if str(word).startswith("--launcher_args="))
    assert shlex.split(str(more).partition("=")[2]) == [
        "--mca", "btl_tcp_if_include", "eth1", "--map-by", "slot", "--bind-to", "none",
        "--tag-output", "-x", "MASTER_ADDR", "-x", "MASTER_PORT", "-x", "CLUSTERKIT_ATTEMPT", "-x",
        "TOKEN",
    ]  # fmt: skip
    assert argv[-4:] == ["--no_python", "sh", "rank.sh", "train.py"]


def test_mpirun_starts_all_nodes_and_exports_variables_by_name():
    argv = argv_of("mpirun", Topology(2, 2, 4), exports=["NCCL_DEBUG", "TOKEN"])
    line = join(argv)
    assert line.startswith("mpirun -np 8 --hostfile /run/hostfile --map-by slot --bind-to none")
    for name in ("MASTER_ADDR", "MASTER_PORT", "NCCL_DEBUG", "TOKEN"):
        assert f"-x {name} " in line
    assert argv[-3:] == ["sh", "rank.sh", "train.py"]


def test_forkserver_launcher_argv_is_rank_command_alone():
    assert argv_of("forkserver", Topology(2, 2, 4)) == ["sh", "rank.sh", "train.py"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launcher_argv_ends_with_rank_command_and_varies_by_node_rank(launcher):
    argv = argv_of(launcher, Topology(2, 2, 1))
    assert argv[-3:] == ["sh", "rank.sh", "train.py"]
    variables = {word.name for word in argv if isinstance(word, Var)}
    assert variables <= {"NODE_RANK"}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_node_environment_names_master_address_and_port(launcher):
    env = node_environment(launcher, Topology(2, 2, 1), ENDPOINT)
    assert env["MASTER_ADDR"] == "10.0.0.1"
    assert env["MASTER_PORT"] == "29501"


def test_only_elastic_torchrun_disables_shared_rendezvous_store():
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    assert name in node_environment("torchrun", Topology(1, 2, 1), ENDPOINT)
    assert name not in node_environment("torchrun", Topology(2, 2, 1), ENDPOINT)


# What each launcher itself sets for rank 5: node 1 of 2, four ranks each.
SET_BY = {
    "torchrun": {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
    },
    "deepspeed": {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "CROSS_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_SIZE": "4",
    },
    # Both nodes are one host here: to Open MPI it is the sixth of eight ranks on it.
    "mpirun": {
        "OMPI_COMM_WORLD_RANK": "5",
        "OMPI_COMM_WORLD_LOCAL_RANK": "5",
        "OMPI_COMM_WORLD_SIZE": "8",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
    },
    "forkserver": {"NODE_RANK": "1", "LOCAL_RANK": "1"},
}
DUMP = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))"


TWO_NODES = Topology(2, 2, 4)


def script_of(launcher, *words, topology=TWO_NODES, python="python3"):
    words = words or (sys.executable, "-S", "-c", DUMP)
    return rank_script(launcher, topology, python, words, restarts=3)


def become(script: str, env: dict[str, str], cwd: Path):
    (cwd / "rank.sh").write_text(script)
    done = subprocess.run(
        ["sh", "rank.sh"], cwd=cwd, env={"PYTHONUTF8": "1", **env}, capture_output=True, check=True,
    )  # fmt: skip
    assert done.stderr == b""
    return json.loads(done.stdout)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_rank_script_sets_variables_that_launcher_leaves_out(launcher, tmp_path):
    topology = Topology(2, 2, 4)
    given_env = SET_BY[launcher] | node_environment(launcher, topology, ENDPOINT)
    seen, _ = become(script_of(launcher), given_env, tmp_path)
    assert {name: seen.get(name) for name in CONTRACT} == CONTRACT


@pytest.mark.parametrize(("nodes", "nproc"), [(1, 1), (1, 3), (3, 1), (3, 2)])
@pytest.mark.parametrize("launcher", ["forkserver", "mpirun"])
def test_ranks_are_numbered_node_by_node_without_gaps(launcher, nodes, nproc, tmp_path):
    script = script_of(launcher, topology=Topology(nodes, nodes, nproc))
    numbers = list(itertools.product(range(nodes), range(nproc)))
    for rank, (node, local) in enumerate(numbers):
        sets = {
            "forkserver": {"NODE_RANK": str(node), "LOCAL_RANK": str(local)},
            "mpirun": {
                "OMPI_COMM_WORLD_RANK": str(rank),
                "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
                "OMPI_COMM_WORLD_SIZE": str(len(numbers)),
            },
        }
        seen, _ = become(script, sets[launcher], tmp_path)
        told = [seen[n] for n in ("RANK", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")]
        assert told == [str(n) for n in (rank, node, local, len(numbers))]
        assert seen["LOCAL_WORLD_SIZE"] == str(nproc)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_rank_script_passes_arguments_unchanged(launcher, tmp_path, ugly_values):
    words = [*ugly_values.values(), "--", "-c", ":", "--r=16", "--log", "x", "--n", "3", "--"]
    script = script_of(launcher, sys.executable, "-S", "-c", DUMP, *words)
    _, argv = become(script, SET_BY[launcher], tmp_path)
    assert argv == words


def test_rank_script_sets_torchelastic_restart_counts(tmp_path):
    own = {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
    for launcher in ("torchrun", "forkserver"):
        env = SET_BY[launcher] | own | {"CLUSTERKIT_ATTEMPT": "3"}
        seen, _ = become(script_of(launcher), env, tmp_path)
        assert [seen[name] for name in own] == ["2", "3"]
    # There torchrun itself restarts the ranks, and counts.
    elastic = script_of("torchrun", topology=Topology(1, 2, 4))
    seen, _ = become(elastic, env | {"TORCHELASTIC_RESTART_COUNT": "1"}, tmp_path)
    assert [seen[name] for name in own] == ["1", "3"]


def test_rank_gets_pet_variables_that_are_hidden_from_launcher(tmp_path, ugly_values):
    pet = {f"PET_{number}": value for number, value in enumerate(ugly_values.values())}
    pet |= {"PET_NNODES": "7", "PET_LOG_DIR": "", "PET_STANDALONE": "1"}
    env = spawn.without_options(SET_BY["torchrun"] | pet)
    assert not [name for name in env if name.startswith("PET_")]
    seen, _ = become(script_of("torchrun"), env, tmp_path)
    assert {name: value for name, value in seen.items() if "PET" in name} == pet


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_rank_script_puts_interpreter_folder_first_on_path(launcher, weird_tmp_path):
    def path_with(python):
        script = script_of(launcher, python=python)
        seen, _ = become(script, SET_BY[launcher] | {"PATH": "/usr/bin:/bin"}, weird_tmp_path)
        return seen["PATH"]

    assert path_with("/opt/my venv/bin/python") == "/opt/my venv/bin:/usr/bin:/bin"
    # A name was found on the PATH as it is.
    assert path_with("python3") == "/usr/bin:/bin"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_rank_script_keeps_user_variables_named_like_its_own(launcher, tmp_path):
    theirs = {"slot": "7", "pipe": "dream", "node": "x", "rank": "y", "PIPE": "z"}
    seen, _ = become(script_of(launcher), SET_BY[launcher] | theirs, tmp_path)
    assert {name: seen.get(name) for name in theirs} == theirs


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_rank_writes_header_and_output_to_its_own_pipe(launcher, tmp_path):
    number = SET_BY[launcher].get("OMPI_COMM_WORLD_LOCAL_RANK", "1")
    os.mkfifo(tmp_path / f"p-{number}")
    (tmp_path / "rank.sh").write_text(script_of(launcher, "echo", "hello"))
    rank = subprocess.Popen(
        ["sh", "rank.sh"],
        cwd=tmp_path, stdout=subprocess.PIPE,
        env=SET_BY[launcher] | {"CLUSTERKIT_PIPE": str(tmp_path / "p"), "slot": "3"},
    )  # fmt: skip
    # Read and write: opening does not wait for a rank that chose another way.
    pipe = os.open(tmp_path / f"p-{number}", os.O_RDWR | os.O_NONBLOCK)
    try:
        out, _ = rank.communicate()
        assert out == b""
        # Under these the script stays its parent, and tells of its end.
        stays = launcher in ("deepspeed", "mpirun")
        pid, end = (r"[0-9]+", "@clusterkit-rank-ended 5 0\n") if stays else (rank.pid, "")
        written = os.read(pipe, 1000).decode()
        assert re.fullmatch(rf"@clusterkit-rank 5 {pid}\nhello\n{end}", written)
    finally:
        os.close(pipe)


def test_rank_script_exits_with_exit_code_of_program(tmp_path):
    (tmp_path / "rank.sh").write_text(script_of("forkserver", "sh", "-c", "exit 42"))
    done = subprocess.run(
        ["sh", "rank.sh"],
        cwd=tmp_path, env={"NODE_RANK": "0", "LOCAL_RANK": "0"}, check=False,
    )  # fmt: skip
    assert done.returncode == 42


@pytest.mark.parametrize(
    ("script", "told", "code"),
    [
        ("exit 0", "", 0),
        ("exit 7", "@clusterkit-rank-ended 5 7\n", 7),
        ("exit 255", "@clusterkit-rank-ended 5 255\n", 255),
        ("printf half; exit 7", "half@clusterkit-rank-ended 5 7\n", 7),
        ("echo err >&2; kill -9 $$", "@clusterkit-rank-ended 5 137\n", -9),
        ("ulimit -c 0; kill -SEGV $$", "@clusterkit-rank-ended 5 139\n", -11),
        # What is sent to the group is the program's to answer.
        ("trap 'exit 5' TERM; kill -TERM 0; sleep 9", "@clusterkit-rank-ended 5 5\n", 5),
        ("kill -TERM 0; sleep 9", "@clusterkit-rank-ended 5 143\n", -15),
    ],
)
@pytest.mark.parametrize("launcher", ["deepspeed", "mpirun"])
def test_rank_script_reports_failure_and_exits_like_program(script, told, code, launcher, tmp_path):
    (tmp_path / "rank.sh").write_text(script_of(launcher, "sh", "-c", script))
    done = subprocess.run(
        ["sh", "rank.sh"], cwd=tmp_path, env=SET_BY[launcher],
        capture_output=True, text=True, process_group=0, check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == (told, code)
    assert done.stderr == ("err\n" if "err" in script else "")


def test_deepspeed_ranks_keep_gpus_assigned_to_node(tmp_path):
    env = SET_BY["deepspeed"] | {"CLUSTERKIT_GPUS": "4,5,6,7", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    seen, _ = become(script_of("deepspeed"), env, tmp_path)
    assert seen["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


def test_agent_parses_rank_header_written_by_rank_script():
    header = streams.HEADER.match(f"{rendezvous.RANK_HEADER} 5 77".encode())
    assert header is not None
    assert header.groups() == (b"5", b"77")
    for launcher in LAUNCHERS:
        assert f'echo "{rendezvous.RANK_HEADER} $RANK $$"' in script_of(launcher)
    assert rendezvous.RANK_ENDED.encode() == agent.RANK_ENDED


def test_rank_variables_of_every_launcher_are_unset():
    for launcher in LAUNCHERS:
        completed = set(SET_BY[launcher]) - {"NODE_RANK"}
        assert {name for name in completed if not name.startswith("OMPI_")} <= set(
            rendezvous.VARIABLES_TO_UNSET
        )


def test_hostfile_has_line_per_host():
    assert rendezvous.hostfile(["a", "b"], 4) == "a slots=4\nb slots=4\n"


def test_hostfile_sums_slots_of_repeated_host():
    assert rendezvous.hostfile(["a", "b", "a"], 4) == "a slots=8\nb slots=4\n"


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        (Topology(1, 1, 1), "1 node x 1 rank"),
        (Topology(2, 2, 4), "2 nodes x 4 ranks"),
        (Topology(1, 4, 2), "1:4 nodes x 2 ranks"),
    ],
)
def test_topology_is_formatted_as_nodes_and_ranks(topology, words):
    assert str(topology) == words
