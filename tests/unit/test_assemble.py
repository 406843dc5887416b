"""From a job to what a node runs."""

import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from clusterkit import agent
from clusterkit.assemble import (
    RESERVED_VARIABLES,
    Coordinator,
    NodePaths,
    Placement,
    assemble,
    require_packages,
)
from clusterkit.batch import Batch
from clusterkit.cluster import LocalCluster
from clusterkit.errors import BadInput, Unavailable
from clusterkit.program import deepspeed_config, program_argv, solve_batch
from clusterkit.rendezvous import Endpoint, Topology
from clusterkit.shell import Var
from clusterkit.spec import BatchSpec, CheckpointSpec, JobSpec

ONE = Topology(1, 1, 1)
PLACES = NodePaths("/runs/r1", "/work", "/venv/bin/python")


def job(**fields):
    return JobSpec(**({"name": "demo", "program": "train.py"} | fields))


def assembled(spec, topology=ONE, **options):
    return assemble(
        Placement(
            **(
                {
                    "job": spec,
                    "topology": topology,
                    "endpoint": Endpoint("10.0.0.1", 29501, "r1"),
                    "places": PLACES,
                    "device": "cpu",
                    "threads": 2,
                    "where": "here",
                    "hosts": ("h",) * topology.nodes,
                    "names": ("h",) * topology.nodes,
                    "cluster": LocalCluster(),
                    "network_env": {"GLOO_SOCKET_IFNAME": "lo"},
                }
                | options
            )
        ),
    )


def file_of(assembly, name):
    return next(f for f in assembly.files if f.path.endswith(f"/{name}"))


# ---------------------------------------------------------------- environment


def exported(assembly):
    lines = file_of(assembly, "node.sh").text.splitlines()
    pairs = [line.removeprefix("export ").partition("=") for line in lines if "export " in line]
    return {name: value for name, equals, value in pairs if equals}


def test_job_env_overrides_cluster_env_and_defaults():
    env = exported(
        assembled(
            job(env={"A": "job", "OMP_NUM_THREADS": "7"}),
            cluster=LocalCluster(
                env={"A": "cluster", "B": "cluster", "GLOO_SOCKET_IFNAME": "eth0"}
            ),
        )
    )
    assert (env["A"], env["B"]) == ("job", "cluster")
    assert env["OMP_NUM_THREADS"] == "7"
    assert env["GLOO_SOCKET_IFNAME"] == "eth0"
    assert env["PYTHONUNBUFFERED"] == "1"


@pytest.mark.parametrize("name", sorted(RESERVED_VARIABLES))
@pytest.mark.parametrize("where", ["job", "cluster"])
def test_env_refuses_reserved_rendezvous_variable(name, where):
    spec = job(env={name: "1"} if where == "job" else {})
    with pytest.raises(BadInput, match=rf"env\.{name}: clusterkit sets it"):
        assembled(spec, cluster=LocalCluster(env={name: "1"} if where == "cluster" else {}))


@pytest.mark.parametrize("name", ["CLUSTERKIT_RUN_DIR", "CLUSTERKIT_ATTEMPT", "CLUSTERKIT_PIPE"])
def test_env_refuses_clusterkit_process_variable(name):
    with pytest.raises(BadInput, match=rf"env\.{name}: clusterkit sets it"):
        assembled(job(env={name: "/elsewhere"}))


def test_rank_env_names_run_batch_and_checkpoint_settings():
    env = exported(
        assembled(
            job(
                batch=BatchSpec(global_size=64, micro=8),
                checkpoint=CheckpointSpec(every=7, keep=3, resume="never"),
            ),
            Topology(2, 2, 2),
        )
    )
    ours = {
        name.removeprefix("CLUSTERKIT_"): v for name, v in env.items() if name.startswith("CLUST")
    }
    assert ours == {
        "RUN_ID": "r1",
        "RUN_DIR": "/runs/r1",
        "JOB": "demo",
        "DEVICE": "cpu",
        "GLOBAL_BATCH": "64",
        "MICRO_BATCH": "8",
        "ACCUMULATION": "2",
        "CHECKPOINT_DIR": "/runs/r1/checkpoints",
        "CHECKPOINT_EVERY": "7",
        "CHECKPOINT_KEEP": "3",
        "CHECKPOINT_RESUME": "never",
    }


def test_node_script_passes_restarts_and_retry_on_to_agent():
    node = file_of(assembled(job(restarts=2, retry_on=(137, 75))), "node.sh")
    assert "--restarts 2 --retry-on 137,75" in node.text
    with pytest.raises(BadInput, match=r"^retry_on: "):
        # Nodes that do not watch each other.
        assembled(job(restarts=2, retry_on=(137,), nodes=2), Topology(2, 2, 1))


def test_shrinkable_run_passes_min_nodes_and_coordinator_to_agent():
    spec = job(nodes="2:3", on_node_loss="shrink", restarts=1, command=("train",), program=None)
    coordinator = Coordinator("10.0.0.1", 29502)
    made = assembled(spec, Topology(2, 3, 4), coordinator=coordinator)
    node = file_of(made, "node.sh").text
    assert "CLUSTERKIT_COORDINATOR=10.0.0.1:29502\n" in node
    assert "--lost-after 30 --rejoin 15 --min-nodes 2 --" in node
    assert "--restarts 1" in node
    assert "WORLD_SIZE=$((GROUP_WORLD_SIZE * 4))" in file_of(made, "rank.sh").text
    assert made.secrets == (agent.PEER_TOKEN,)
    fixed = assembled(spec, Topology(2, 2, 4), coordinator=coordinator)
    assert "--min-nodes" not in file_of(fixed, "node.sh").text


def test_node_script_passes_spares_and_coordinator_to_agent():
    spec = job(nodes=2, spares=1, command=("train",), program=None)
    coordinator = Coordinator("10.0.0.1", 29502)
    made = assembled(spec, Topology(2, 2, 4), coordinator=coordinator)
    node = file_of(made, "node.sh").text
    assert "--nodes 2 " in node
    assert "CLUSTERKIT_COORDINATOR=10.0.0.1:29502\n" in node
    assert "--lost-after 30 --rejoin 15 --spares 1 --" in node
    made = assembled(
        msgspec.structs.replace(spec, nodes=1), Topology(1, 1, 4), coordinator=coordinator
    )
    node = file_of(made, "node.sh").text
    assert "--nodes 1 " in node
    assert "CLUSTERKIT_COORDINATOR=10.0.0.1:29502\n" in node
    assert "--lost-after 30 --rejoin 15 --spares 1 --" in node


def test_checkpoint_bucket_url_is_kept():
    env = exported(assembled(job(checkpoint=CheckpointSpec(dir="s3://runs/a"))))
    assert env["CLUSTERKIT_CHECKPOINT_DIR"] == "s3://runs/a"


def test_absolute_checkpoint_folder_is_kept():
    env = exported(assembled(job(checkpoint=CheckpointSpec(dir="/big/disk"))))
    assert env["CLUSTERKIT_CHECKPOINT_DIR"] == "/big/disk"


def test_elastic_run_sets_no_accumulation_variable():
    env = exported(assembled(job(batch=BatchSpec(global_size=64, micro=8)), Topology(1, 2, 2)))
    assert (env["CLUSTERKIT_GLOBAL_BATCH"], env["CLUSTERKIT_MICRO_BATCH"]) == ("64", "8")
    assert "CLUSTERKIT_ACCUMULATION" not in env


# ---------------------------------------------------------------- batch and deepspeed


def test_deepspeed_config_holds_solved_batch_numbers():
    spec = job(batch=BatchSpec(global_size=144, micro=24), deepspeed={"fp16": {"enabled": True}})
    config = json.loads(file_of(assembled(spec), "deepspeed.json").text)
    assert config == {
        "fp16": {"enabled": True},
        "train_batch_size": 144,
        "train_micro_batch_size_per_gpu": 24,
        "gradient_accumulation_steps": 6,
        "gradient_clipping": 0.0,
    }


@pytest.mark.parametrize(
    ("topology", "accumulation"),
    [(Topology(1, 1, 1), 8), (Topology(1, 1, 4), 2), (Topology(2, 2, 4), 1)],
    ids=["1 GPU", "4 GPUs", "2 nodes of 4"],
)
def test_deepspeed_accumulation_follows_number_of_ranks(topology, accumulation):
    spec = job(batch=BatchSpec(global_size=64, micro=8), deepspeed={})
    config = json.loads(file_of(assembled(spec, topology), "deepspeed.json").text)
    assert config["gradient_accumulation_steps"] == accumulation
    assert config["train_batch_size"] == 64
    assert config["train_micro_batch_size_per_gpu"] == 8


def test_deepspeed_config_keeps_requested_gradient_clipping():
    config, notes = deepspeed_config({"gradient_clipping": 0.5}, None)
    assert config == {"gradient_clipping": 0.5}
    assert notes == []


def test_deepspeed_config_disables_unrequested_clipping_with_note():
    config, notes = deepspeed_config({}, None)
    assert config == {"gradient_clipping": 0.0}
    assert [str(note) for note in notes] == [
        "gradient_clipping=0.0 (not in the job; DeepSpeed's own default would be 1.0)"
    ]


def test_deepspeed_batch_numbers_must_agree_with_batch():
    sizes = Batch(64, 8, 2, 4)
    with pytest.raises(BadInput, match=r"deepspeed\.train_batch_size: 32, but batch gives 64"):
        deepspeed_config({"train_batch_size": 32}, sizes)
    config, _ = deepspeed_config({"train_batch_size": "auto"}, sizes)
    assert config["train_batch_size"] == 64


def test_deepspeed_config_leaves_job_config_unchanged():
    original = {"zero_optimization": {"stage": 3}}
    deepspeed_config(original, Batch(64, 8, 2, 4))
    assert original == {"zero_optimization": {"stage": 3}}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_deepspeed_config_refuses_non_finite_number(value):
    with pytest.raises(BadInput, match=r"deepspeed\.optimizer.*lr"):
        deepspeed_config({"optimizer": {"params": {"lr": value}}}, None)


def test_elastic_deepspeed_config_holds_micro_batch_as_only_size():
    config, _ = deepspeed_config({}, Batch(64, 8, 2, 4), elastic=True)
    assert config == {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0.0}


def test_elastic_batch_must_divide_for_every_node_count():
    spec = job(batch=BatchSpec(global_size=64, micro=8), nodes="1:3")
    with pytest.raises(BadInput, match="micro x ranks = 24 on 3 ranks"):
        solve_batch(spec, Topology(1, 3, 1))


def test_solve_batch_notes_factors_of_global_batch():
    spec = job(batch=BatchSpec(global_size=64, micro=8))
    _, notes = solve_batch(spec, Topology(2, 2, 2))
    assert [str(note) for note in notes] == [
        "batch=64 = 8 x 2 x 4 (global = micro x accumulation x ranks)"
    ]


def test_cpu_job_sets_accelerate_use_cpu_except_with_deepspeed():
    assert exported(assembled(job()))["ACCELERATE_USE_CPU"] == "true"
    assert "ACCELERATE_USE_CPU" not in exported(assembled(job(), device="cuda"))
    # The Trainer would leave DeepSpeed out.
    for fields in ({"deepspeed": {}}, {"launcher": "deepspeed"}, {"args": ("--deepspeed=x.json",)}):
        assert "ACCELERATE_USE_CPU" not in exported(assembled(job(**fields)))
    own = assembled(job(env={"ACCELERATE_USE_CPU": "false"}))
    assert exported(own)["ACCELERATE_USE_CPU"] == "false"


def test_cpu_job_sets_deepspeed_accelerator_to_cpu():
    assert exported(assembled(job(deepspeed={})))["DS_ACCELERATOR"] == "cpu"
    assert "DS_ACCELERATOR" not in exported(assembled(job(deepspeed={}), device="cuda"))


# ---------------------------------------------------------------- arguments


def run_env(**more):
    return {"CLUSTERKIT_RUN_ID": "r1", "CLUSTERKIT_RUN_DIR": "/runs/r1"} | more


@pytest.mark.parametrize("word", ["python", "python3"])
def test_python_in_command_becomes_rank_interpreter(word):
    spec = job(program=None, command=(word, "-c", "python"))
    assert program_argv(spec, "/v/bin/python", run_env(), ONE) == ["/v/bin/python", "-c", "python"]


def test_clusterkit_names_in_arguments_are_replaced():
    spec = job(args=("--id=${clusterkit.run_id}", "${clusterkit.run_dir}/${clusterkit.world_size}"))
    argv = program_argv(spec, "python", run_env(), Topology(2, 2, 4))
    assert argv == ["python", "-u", "train.py", "--id=r1", "/runs/r1/8"]


def test_other_dollar_signs_in_arguments_are_kept():
    words = ("${HOME}", "$x", "${clusterkit", "${clusterkit.run_id", "{}")
    assert program_argv(job(args=words), "python", run_env(), ONE)[3:] == list(words)


def test_replaced_value_is_not_expanded_again():
    env = run_env(CLUSTERKIT_CHECKPOINT_DIR="/${clusterkit.run_id}")
    spec = job(args=("${clusterkit.checkpoint_dir}",))
    assert program_argv(spec, "python", env, ONE)[3:] == ["/${clusterkit.run_id}"]


def test_unknown_name_in_arguments_is_refused_with_known_names():
    with pytest.raises(BadInput, match=r"args: \$\{clusterkit\.nope\} is unknown") as error:
        program_argv(job(args=("${clusterkit.nope}",)), "python", run_env(), ONE)
    assert "micro_batch" in (error.value.hint or "")


def test_name_without_value_in_job_is_refused():
    with pytest.raises(BadInput, match=r"\$\{clusterkit\.micro_batch\} has no value in this job"):
        program_argv(job(args=("${clusterkit.micro_batch}",)), "python", run_env(), ONE)


@pytest.mark.parametrize(
    ("fields", "topology", "name", "hint"),
    [
        ({"batch": {"global": 64}}, Topology(1, 2, 1), "micro_batch",
         "nodes: 1:2 is elastic, so it changes while the job runs; `batch: {micro: N}` fixes it"),
        ({"batch": {"micro": 8}}, Topology(1, 2, 1), "global_batch", "`batch: {global: N}` fixes"),
        ({"batch": {"micro": 8}}, Topology(1, 2, 1), "accumulation", "from WORLD_SIZE"),
        ({}, Topology(2, 4, 1), "world_size", "nodes: 2:4 is elastic"),
        ({}, Topology(2, 4, 1), "micro_batch", "the job has no batch: `batch: {micro: N}`"),
        ({}, ONE, "global_batch", "the job has no batch: `batch: {global: N}`"),
        ({}, ONE, "checkpoint_dir", "the job has no `checkpoint` section"),
        ({}, ONE, "deepspeed_config", "the job has no `deepspeed` section"),
    ],
)  # fmt: skip
def test_refusal_of_name_without_value_gives_reason(fields, topology, name, hint):
    fields = {k: msgspec.convert(v, BatchSpec) for k, v in fields.items()}
    spec = job(args=(f"${{clusterkit.{name}}}",), **fields)
    with pytest.raises(BadInput, match="has no value in this job") as error:
        program_argv(spec, "python", run_env(), topology)
    assert hint in (error.value.hint or "")


@pytest.mark.parametrize(
    ("fields", "argv"),
    [
        ({"program": "a b.py"}, ["/py", "-u", "a b.py", "x"]),
        ({"program": None, "module": "m.n"}, ["/py", "-u", "-m", "m.n", "x"]),
        ({"program": None, "command": ("./go", "--a")}, ["./go", "--a", "x"]),
    ],
)
def test_program_module_and_command_become_argument_lists(fields, argv):
    assert program_argv(job(args=("x",), **fields), "/py", run_env(), ONE) == argv


# ---------------------------------------------------------------- files


def test_mpirun_forwards_each_variable_once():
    text = file_of(assembled(job(launcher="mpirun", env={"A": "1"})), "node.sh").text
    words = text.split()
    forwarded = [name for flag, name in pairwise(words) if flag == "-x"]
    assert "A" in forwarded
    assert len(forwarded) == len(set(forwarded))


@pytest.mark.parametrize(
    ("launcher", "names"),
    [
        ("torchrun", {"node.sh", "rank.sh", "agent.pyz"}),
        ("forkserver", {"node.sh", "agent.pyz"}),
        ("python", {"node.sh", "agent.pyz"}),
        ("deepspeed", {"node.sh", "rank.sh", "agent.pyz", "hostfile"}),
        ("mpirun", {"node.sh", "rank.sh", "agent.pyz", "hostfile"}),
    ],
)
def test_each_launcher_gets_exactly_files_it_needs(launcher, names):
    paths = [file.path for file in assembled(job(launcher=launcher)).files]
    assert {path.removeprefix("/runs/r1/files/") for path in paths} == names


def test_node_and_rank_scripts_are_executable():
    modes = {f.path: f.mode for f in assembled(job(launcher="torchrun")).files}
    assert modes["/runs/r1/files/node.sh"] == modes["/runs/r1/files/rank.sh"] == 0o755


# ---------------------------------------------------------------- what a host lacks


@pytest.mark.parametrize(
    ("fields", "host", "message", "hint"),
    [
        ({"launcher": "torchrun"}, {"versions": {}}, "torchrun needs torch", "pip install"),
        ({"nodes": "1:2"}, {"versions": {}}, "launcher: torchrun needs torch", "pip install"),
        ({"launcher": "deepspeed"}, {"versions": {}}, "deepspeed needs deepspeed", "pip install"),
        (
            {"deepspeed": {}},
            {"versions": {"torch": "2"}},
            "deepspeed section needs deepspeed",
            "pip install",
        ),
        ({"launcher": "mpirun"}, {"tools": {}}, "mpirun needs Open MPI", "apt-get install openm"),
    ],
)
def test_missing_package_or_tool_is_named_with_remedy(fields, host, message, hint, make_facts):
    with pytest.raises(Unavailable, match=message) as error:
        require_packages(job(**fields), make_facts(**host).hosts[0])
    assert hint in (error.value.hint or "")
    assert error.value.exit_code == 125


def test_fork_server_needs_no_package_or_tool(make_facts):
    require_packages(job(), make_facts(versions={}, tools={}).hosts[0])


def test_assemble_leaves_job_unchanged():
    spec = job(batch=BatchSpec(global_size=64, micro=8), deepspeed={"a": {"b": 1}}, env={"A": "1"})
    before = msgspec.json.encode(spec)
    assembled(spec)
    assert msgspec.json.encode(spec) == before


# ---------------------------------------------------------------- an address that only nodes know


@pytest.mark.parametrize(
    ("launcher", "topology"),
    [("torchrun", Topology(2, 2, 1)), ("torchrun", Topology(1, 2, 1)),
     ("deepspeed", Topology(2, 2, 1)),
     ("forkserver", Topology(2, 2, 1)), ("mpirun", Topology(2, 2, 1))],
)  # fmt: skip
def test_rendezvous_address_is_read_from_node_environment(launcher, topology, tmp_path):
    """As in an allocation of a batch system: the node's environment names its first host."""
    run_dir = tmp_path / "run"
    dump = tmp_path / "python"
    dump.write_text('#!/bin/sh\nprintf "%s\\n" "MASTER_ADDR=$MASTER_ADDR" "$@" >"$DUMP"\n')
    dump.chmod(0o755)
    head = Var("FIRST_HOST")
    placement = Placement(
        job=job(launcher=launcher), topology=topology, endpoint=Endpoint(head, 29501, "r1"),
        places=NodePaths(str(run_dir), "/work", str(dump)), device="cpu", threads=1, where="there",
        hosts=("h",) * 2, names=("node-0", "node-1"), cluster=LocalCluster(), network_env={},
        coordinator=Coordinator(head, 29502),
    )  # fmt: skip
    plan = placement.plan("some")
    assert plan.address == "$FIRST_HOST"
    for file in plan.files:
        Path(file.path).parent.mkdir(parents=True, exist_ok=True)
        Path(file.path).write_bytes(file.content())
    step = plan.steps[-1]
    its = {"FIRST_HOST": "gpu 7", "DUMP": str(tmp_path / "seen"), "PATH": os.environ["PATH"]}
    subprocess.run(step.argv, env=its | step.env, check=True)
    address, *words = (tmp_path / "seen").read_text().splitlines()
    assert address == "MASTER_ADDR=gpu 7"
    text = "\n".join(words)
    if launcher == "torchrun" and topology.elastic:
        assert "--rdzv-endpoint\ngpu 7:29501\n" in text
    elif launcher == "torchrun":
        assert "--master-addr\ngpu 7\n--master-port\n29501\n" in text
    elif launcher == "deepspeed":
        assert "--master_addr\ngpu 7\n--master_port\n29501\n" in text
    watched = launcher != "mpirun" and not topology.elastic
    coordinator = 'CLUSTERKIT_COORDINATOR="$FIRST_HOST":29502\n'
    assert any(coordinator in (file.text or "") for file in plan.files) is watched


@pytest.mark.parametrize(("bind", "told"), [("auto", False), ("none", True)])
def test_agent_gets_bind_none_only_when_job_says_so(bind, told):
    text = file_of(assembled(job(bind=bind)), "node.sh").text
    assert ("--bind none" in text) is told
