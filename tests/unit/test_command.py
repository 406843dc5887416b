"""What command lines start, by which Python, and what a launcher's options become."""

import shlex

import pytest

from clusterkit.errors import BadInput
from clusterkit.jobfile.command import (
    check_source,
    instead_of_a_job,
    interpreter_options,
    read,
    read_past,
    take_over,
)
from clusterkit.spec import JobSpec

TRAIN = {"program": "train.py", "args": ("--lr", "1")}


def taken(line, given=None, typed=(), **fields):
    job = JobSpec(name="demo", command=tuple(shlex.split(line)), **fields)
    return take_over(job, given or {}, typed)


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("torchrun train.py --lr 1", TRAIN | {"launcher": "torchrun", "gpus_per_node": 1}),
        ("torchrun --nproc_per_node=2 train.py --lr 1", TRAIN | {"gpus_per_node": 2}),
        ("torchrun --nproc-per-node 2 train.py --lr 1", TRAIN | {"gpus_per_node": 2}),
        ("torchrun --nproc_per_node gpu train.py", {"gpus_per_node": "auto"}),
        ("torchrun --nnodes 1:4 --max_restarts 3 train.py", {"nodes": "1:4", "restarts": 3}),
        ("torchrun --standalone --nnodes=2 -m a.b", {"nodes": 2, "module": "a.b", "args": ()}),
        ("torchrun --no_python ./go --fast", {"command": ("./go", "--fast")}),
        ("torchrun train.py --nproc_per_node 3", {"gpus_per_node": 1}),
        ("python -m torch.distributed.launch train.py", {"gpus_per_node": 1}),
        ("deepspeed train.py", {"gpus_per_node": "auto"}),
        ("accelerate launch train.py", {"gpus_per_node": "auto"}),
        ("accelerate launch --cpu --num_processes 4 train.py", {"gpus_per_node": 1}),
        # What argparse in the launcher leaves of `--`, as tried with each.
        ("torchrun train.py -- -- x", {"args": ("--", "x")}),
        ("torchrun -- train.py -- x", {"args": ("--", "x")}),
        ("torchrun train.py a -- x", {"args": ("a", "--", "x")}),
        ("python -m torch.distributed.launch train.py -- x", {"args": ("x",)}),
        ("accelerate launch train.py -- x", {"args": ("x",)}),
        ("accelerate launch -- train.py -- x", {"args": ("--", "x")}),
        ("deepspeed train.py -- -- x", {"args": ("x",)}),
        ("deepspeed train.py -- -- -- x", {"args": ("--", "x")}),
        ("deepspeed train.py a -- x", {"args": ("a", "--", "x")}),
        ("mpirun -np 1 python train.py -- x", {"args": ("--", "x")}),
        ("python train.py -- x", {"command": ("python", "train.py", "--", "x")}),
        ("/venv/bin/torchrun train.py", {"python": "/venv/bin/python3"}),
        ("python -u -m torch.distributed.run train.py --lr 1", TRAIN | {"python": None}),
        ("/p/python3.12 -m torch.distributed.launch train.py", {"python": "/p/python3.12"}),
        ("deepspeed --num_gpus 2 --num_nodes 3 train.py --lr 1",
         TRAIN | {"launcher": "deepspeed", "gpus_per_node": 2, "nodes": 3}),
        ("deepspeed --master_port 1 --module a.b", {"launcher": "deepspeed", "module": "a.b"}),
        ("mpirun -np 4 --allow-run-as-root python train.py --lr 1",
         TRAIN | {"launcher": "mpirun", "gpus_per_node": 4}),
        ("mpiexec -n 2 /p/python3.12 train.py", {"python": "/p/python3.12", "program": "train.py"}),
        ("mpirun -np 2 ./a.out 3", {"command": ("./a.out", "3"), "args": ()}),
        ("accelerate launch --multi_gpu --num_machines 2 --num_processes 8 train.py --lr 1",
         TRAIN | {"launcher": "torchrun", "gpus_per_node": 4, "nodes": 2}),
        ("accelerate launch --cpu --mixed_precision bf16 train.py",
         {"device": "cpu", "env": {"ACCELERATE_MIXED_PRECISION": "bf16"}}),
        ("python -m accelerate.commands.launch --num_cpu_threads_per_process 4 -m a.b",
         {"threads_per_rank": 4, "module": "a.b"}),
        # Nothing to take over.
        ("accelerate config", {"command": ("accelerate", "config")}),
        ("bash -c 'torchrun train.py; ls'", {"command": ("bash", "-c", "torchrun train.py; ls")}),
        ("env A=1 who", {"command": ("env", "A=1", "who"), "env": {}}),
        ("timeout 5 ./who", {"command": ("timeout", "5", "./who"), "time_limit": None}),
        # Only a shell knows these: as commands they end with 127.
        ("A=1 B='x y' ./who", {"command": ("./who",), "env": {"A": "1", "B": "x y"}}),
        ("MASTER_PORT=1 python who.py", {"command": ("python", "who.py"), "env": {}}),
        ("A=1 exec nohup time ./who 3", {"command": ("./who", "3"), "env": {"A": "1"}}),
        ("time -v ./who", {"command": ("time", "-v", "./who")}),
        ("nohup", {"command": ("nohup",)}),
        # Peeled.
        ("bash -c 'torchrun train.py --lr 1'", TRAIN | {"launcher": "torchrun"}),
        ("bash -c 'A=1 exec torchrun train.py --lr 1'", TRAIN | {"env": {"A": "1"}}),
        ("env A=1 B='x y' MASTER_PORT=1 torchrun train.py",
         {"program": "train.py", "env": {"A": "1", "B": "x y"}}),
        ("nohup /usr/bin/env timeout 1.5h deepspeed train.py",
         {"program": "train.py", "time_limit": "1.5h", "launcher": "deepspeed"}),
        ("python -mtorch.distributed.run --nproc_per_node 2 train.py", {"gpus_per_node": 2}),
        ("python -um torch.distributed.run train.py", {"program": "train.py"}),
        ("python -X dev -Oumtorch.distributed.run -m a.b", {"module": "a.b"}),
        ("python -X dev who.py", {"command": ("python", "-X", "dev", "who.py"), "python": None}),
        ("python3.9 who.py", {"command": ("python", "who.py"), "python": "python3.9"}),
    ],
)  # fmt: skip
def test_command_line_is_taken_over_as_job_fields(line, fields):
    job = taken(line).job
    assert {key: getattr(job, key) for key in fields} == fields


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("train.py", 0),
        ("-u train.py -m x", 1),
        ("-X dev -W error::UserWarning -OO -Wignore train.pyw", 6),
        ("-m pkg.train", 0),
        ("-uB -m pkg", 1),
        ("folder", 0),
        # Nothing that a fork of a running Python could become.
        ("-c pass", None),
        ("-", None),
        ("-V", None),
        ("-i train.py", None),
        ("-m", None),
        ("-X", None),
        ("", None),
    ],
)
def test_interpreter_options_end_where_program_begins(words, options):
    assert interpreter_options(words.split()) == options


@pytest.mark.parametrize("line", ["python -m", "python -u -m", "python -W ignore -m"])
def test_python_without_module_is_kept_as_command(line):
    assert taken(line).job.command == tuple(line.split())


@pytest.mark.parametrize(
    ("line", "variable", "option"),
    [
        ("torchrun train.py", "PET_NPROC_PER_NODE", "--nproc-per-node 2"),
        ("torchrun --nproc_per_node 4 train.py", "PET_NNODES", "--nnodes 2"),
        ("python -m torch.distributed.run train.py", "PET_MAX_RESTARTS", "--max-restarts 2"),
    ],
)
def test_torchrun_options_from_environment_are_refused(line, variable, option):
    job = JobSpec(name="demo", command=tuple(shlex.split(line)))
    with pytest.raises(BadInput, match=f"would take {option} from {variable}") as error:
        take_over(job, {}, (), {variable: "2"})
    assert error.value.hint == f"write {option}, or unset {variable}"
    assert take_over(job, {}, (), {"PET_RDZV_ID": "2"}).note
    key = {"PET_NNODES": "nodes", "PET_NPROC_PER_NODE": "gpus_per_node"}.get(variable, "restarts")
    assert take_over(job, {key: f"{key}: 4"}, (), {variable: "2"}).note
    given = JobSpec(name="demo", command=(*job.command[:-1], *shlex.split(option), "train.py"))
    assert take_over(given, {}, (), {variable: "8"}).note


def test_take_over_notes_launcher_and_options():
    assert taken("torchrun --standalone --nproc_per_node=2 train.py").note == (
        "torchrun in the command is taken over: launcher torchrun, "
        "gpus_per_node 2 (--nproc_per_node=2); left to clusterkit: --standalone"
    )
    assert taken("python train.py").note is None


@pytest.mark.parametrize(
    ("line", "said", "instead"),
    [
        ("torchrun --log_dir x --nproc_per_node=2 train.py --lr 1",
         "torchrun --log_dir x cannot be taken over: every rank's lines are kept",
         "clusterkit submit --gpus 2 -- python train.py --lr 1"),
        ("torchrun -t 3 -m a.b", "torchrun -t 3 cannot be taken over",
         "clusterkit submit --gpus 1 -- python -m a.b"),
        ("torchrun --nope 3 train.py", "clusterkit does not know this option of torchrun",
         "clusterkit submit --gpus 1 -- python train.py"),
        ("deepspeed --include h1@h2 train.py", "the cluster entry names the hosts",
         "clusterkit submit --set launcher=deepspeed -- python train.py"),
        ("mpirun -np 4 -x A=1 /p/python train.py", "mpirun -x A=1 cannot be taken over: --set env.",
         "clusterkit submit --set launcher=mpirun --gpus 4 -- /p/python train.py"),
        ("mpirun --mca btl self ./a.out", "btl self cannot be taken over: --set env.OMPI_MCA_NAME",
         "clusterkit submit --set launcher=mpirun -- ./a.out"),
        # Without the option, the program would compute something else: not a line to type.
        *((f"accelerate launch {option} train.py --lr 1", "`clusterkit convert` makes a job file",
           f"clusterkit convert -- accelerate launch {option} train.py --lr 1")
          for option in ("--config_file c.yaml", "--use_fsdp", "--use_deepspeed", "--gpu_ids 0,1",
                         "--gradient_accumulation_steps 2 --use_deepspeed", "--zero_stage 2",
                         "--deepspeed_hostfile hosts", "--cpu --mpirun_hostfile hosts")),
    ],
)  # fmt: skip
def test_unsupported_launcher_option_is_refused_with_line_to_type(line, said, instead):
    with pytest.raises(BadInput) as error:
        taken(line)
    assert said in error.value.message
    assert error.value.hint == instead


def test_line_to_type_keeps_typed_options_and_job_file_gets_keys():
    line = "torchrun --tee 3 --nproc_per_node 2 --nnodes 4 train.py"
    with pytest.raises(BadInput) as error:
        taken(line, {"nodes": "--nodes 4"}, ["--cluster", "lab", "--nodes", "4"], nodes=4)
    assert error.value.hint == (
        "clusterkit submit --cluster lab --nodes 4 --gpus 2 -- python train.py"
    )
    with pytest.raises(BadInput) as error:
        taken(line, typed=None)
    assert error.value.hint == "gpus_per_node: 2; nodes: 4; command: ['python', 'train.py']"
    with pytest.raises(BadInput) as error:
        taken("accelerate launch --debug train.py", typed=None, args=("--lr", "1"))
    assert error.value.hint == "clusterkit convert -- accelerate launch --debug train.py --lr 1"


@pytest.mark.parametrize(
    ("line", "given", "fields", "said"),
    [
        ("torchrun --nproc_per_node=2 train.py", {"gpus_per_node": "--gpus 4"},
         {"gpus_per_node": 4}, "--gpus 4, but the command says --nproc_per_node=2"),
        ("torchrun --nnodes=2 train.py", {"nodes": "nodes: 1"}, {"nodes": 1},
         "nodes: 1, but the command says --nnodes=2"),
        ("mpirun -np 4 ./a", {"gpus_per_node": "--gpus 1"}, {"gpus_per_node": 1, "nodes": 2},
         "--gpus 1, but the command says -np 4"),
        ("deepspeed train.py", {"launcher": "launcher: mpirun"}, {"launcher": "mpirun"},
         "launcher: mpirun, but the command says deepspeed"),
        ("/p/python train.py", {}, {"python": "/q/python"},
         "python: /q/python, but the command names /p/python"),
        ("mpirun -np 3 ./a", {}, {"nodes": 2}, "-np 3: 3 ranks cannot be divided among 2 nodes"),
        ("torchrun --nproc_per_node cpu train.py", {}, {}, "cpu is not a number"),
        ("torchrun --nproc_per_node", {}, {}, "torchrun starts no program"),
        ("torchrun", {}, {}, "torchrun starts no program"),
        ("mpirun -np 1 ./a : -np 1 ./b", {}, {}, "mpirun starts several programs"),
        ("env A=1 torchrun train.py", {}, {"env": {"A": "2"}},
         "env.A: 2, but the command says A=1"),
        ("env PET_NNODES=2 torchrun train.py", {}, {}, "PET_NNODES=2 is an option of torchrun"),
        ("env CUDA_VISIBLE_DEVICES=0 torchrun train.py", {}, {}, "share of the GPUs is set here"),
        ("timeout 9 torchrun train.py", {"time_limit": "time_limit: 5"}, {"time_limit": 5},
         "time_limit: 5, but the command says timeout 9"),
        ("mpirun ./a", {}, {}, "mpirun without -np starts one rank for each core"),
        ("mpirun -np 2 torchrun train.py", {}, {}, "mpirun starts torchrun: only one of them"),
    ],
)  # fmt: skip
def test_contradictory_or_incomplete_command_is_refused(line, given, fields, said):
    with pytest.raises(BadInput) as error:
        taken(line, given, **fields)
    assert said in error.value.message


def test_command_options_that_agree_with_job_are_accepted():
    job = taken("torchrun --nproc_per_node=2 train.py", {"gpus_per_node": "--gpus 2"},
                gpus_per_node=2, args=("--more",)).job  # fmt: skip
    assert (job.gpus_per_node, job.args) == (2, ("--more",))


@pytest.mark.parametrize(
    ("source", "starts"),
    [
        ("mp.spawn(main, nprocs=2)", True),
        ("torch.multiprocessing.spawn(main)", True),
        ("from torch.multiprocessing import Queue, spawn", True),
        ("from torch.multiprocessing.spawn import spawn", True),
        ("mp.set_start_method('spawn')", False),
        ("import torch.multiprocessing as mp", False),
        ("processes.respawn(1)", False),
    ],
)
def test_check_source_detects_program_that_spawns_ranks(source, starts):
    said = check_source(taken("torchrun --nproc_per_node 2 train.py").job, source)
    assert (said is not None) == starts
    assert said is None or "launcher: forkserver with gpus_per_node: 1" in said
    told = JobSpec(name="demo", program="train.py", launcher="forkserver")
    assert check_source(told, source) is None


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("train.py --lr 1", "python train.py --lr 1"),
        ("./go.sh", "bash ./go.sh"),
        ("python train.py", "python train.py"),
        ("torchrun train.py", "torchrun train.py"),
        ("job.yaml", None),
        ("job", None),
    ],
)
def test_program_in_place_of_job_file_is_recognized(words, meant):
    found = instead_of_a_job(words.split())
    assert (None if found is None else " ".join(found)) == meant


@pytest.mark.parametrize(
    ("line", "name"),
    [("torchrun a/train.py", "train"), ("env A=1 torchrun a/train.py", "train"),
     ("python -m a.b", "b"), ("./go.sh 1", "go"),
     ("mpirun -np 2 ./a.out", "a")],
)  # fmt: skip
def test_job_is_named_after_program_of_command(line, name):
    assert read_past(line.split())[0].name == name


@pytest.mark.parametrize(
    ("words", "parser"),
    [
        ("torchrun", "torch.distributed.run:get_args_parser"),
        ("accelerate launch", "accelerate.commands.launch:launch_command_parser"),
    ],
)
def test_launcher_option_arity_matches_launcher_parser(words, parser):
    module, _, function = parser.partition(":")
    made = getattr(pytest.importorskip(module), function)()
    takes = {
        option.replace("_", "-"): action.nargs != 0
        for action in made._actions
        for option in action.option_strings
    }
    tool = read([*words.split(), "train.py"]).tool
    ours = dict.fromkeys(tool.flags, False) | dict.fromkeys(tool.values, True)
    assert {option: takes.get(option) for option in ours} == ours
