"""`clusterkit plan`, and bad input from end to end."""

import os
import socket
import subprocess

import pytest

from clusterkit.lifecycle import supervise
from clusterkit.run.folder import RunFolder

pytestmark = pytest.mark.usefixtures("no_gpus")


# ---------------------------------------------------------------- plan


def test_plan_accepts_setting_that_depends_on_flag(cli, write_job):
    job = write_job("launcher: forkserver\nnodes: 2\n")
    done = cli("plan", job, "--nodes", "1:2", "--set", "on_node_loss=shrink")
    assert (done.code, done.err) == (0, "")


def test_plan_prints_plan_and_writes_nothing(cli, write_job, clusterkit_home):
    done = cli("plan", write_job("launcher: forkserver\n"), "--nodes", "2", "--gpus", "2")
    assert done.code == 0
    assert done.out.startswith("plan demo-plan: 2 nodes x 2 ranks on this machine")
    assert (
        "  2 start on localhost node 1: CLUSTERKIT_PEER_TOKEN=<secret> NODE_RANK=1 /bin/sh "
        in done.out
    )
    assert done.err == ""
    assert not clusterkit_home.exists()


def test_plan_prints_json(cli, write_job):
    done = cli("plan", write_job("launcher: forkserver\n"), "--json")
    assert done.json["world_size"] == 1
    assert done.json["run_id"] == "demo-plan"


def test_plan_writes_its_files_to_output_folder(cli, write_job, cwd):
    done = cli("plan", write_job("launcher: forkserver\n"), "--output", "out dir")
    assert done.out == ""
    assert done.err == "4 files written to out dir\n"
    there = sorted(str(p.relative_to(cwd / "out dir")) for p in (cwd / "out dir").rglob("*.*"))
    assert there == ["files/agent.pyz", "files/node.sh", "plan.json", "plan.txt"]
    assert os.access(cwd / "out dir" / "files" / "node.sh", os.X_OK)


def test_plan_of_existing_run_repeats_recorded_plan(cli, ended, write_job):
    folder = RunFolder(ended.path)
    done = cli(
        "plan",
        "job.yaml",
        "--run-id",
        ended.id,
        "--facts",
        str(folder.file("facts.json")),
        "--json",
    )
    assert done.out.encode().strip() == folder.read("plan.json").strip()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"{", "not a facts.json"),
        (b"{}", "not a facts.json"),
        (b"\xff", "not a facts.json"),
    ],
)
def test_plan_refuses_unusable_facts_by_file_name(refused, write_job, cwd, content, message):
    if content is not None:
        (cwd / "facts.json").write_bytes(content)
    said = refused("plan", write_job(), "--facts", "facts.json")
    assert said.startswith(f"error: --facts facts.json: {message}")


def test_plan_refuses_facts_without_host(refused, write_job, cwd, facts):
    import msgspec

    empty = msgspec.structs.replace(facts, hosts=())
    (cwd / "facts.json").write_bytes(msgspec.json.encode(empty))
    assert "host" in refused("plan", write_job(), "--facts", "facts.json")


def test_command_after_dashes_is_planned_as_job(cli, write_job):
    write_job()
    done = cli(
        "plan", "--gpus", "2", "--set", "launcher=forkserver", "--", "python", "train.py", "-x"
    )
    assert done.code == 0
    assert "train.py -x" in done.out


def test_words_after_dashes_extend_job_file_arguments(cli, write_job):
    job = write_job("launcher: forkserver\nargs: [--a, '1']\n")
    done = cli("plan", job, "--", "--steps", "2 0", "--")
    assert done.code == 0
    assert "train.py --a 1 --steps '2 0' --\n" in done.out


def test_plan_without_job_or_command_is_refused(cli):
    done = cli("plan")
    assert (done.code, done.out) == (125, "")
    assert "Give a job file, or a command after --." in done.err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("train.py", "-- python train.py"),
        ("train.py --lr 1 -n 2", "-n 2 -- python train.py --lr 1"),
        ("-g2 train.py -- --lr 1", "-g2 -- python train.py --lr 1"),
        ("--nodes=2 python train.py -x", "--nodes=2 -- python train.py -x"),
        ("train.py -epochs 3", "-- python train.py -epochs 3"),
        ("torchrun --standalone train.py", "-- torchrun --standalone train.py"),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "submit"])
def test_program_in_place_of_job_file_is_refused_with_corrected_line(
    verb, words, line, refused, write_job
):
    write_job()
    said = refused(verb, *words.split()).splitlines()
    assert said[0].endswith("is not a job file: a command stands after --")
    assert said[1] == f" hint: clusterkit {verb} {line}"


def test_python_file_after_dashes_is_refused_with_corrected_line(refused, write_job):
    write_job()
    said = refused("submit", "--", "train.py", "--lr", "1").splitlines()
    assert said[0] == "error: train.py is a Python file, not a command"
    assert said[1] == " hint: clusterkit submit -- python train.py --lr 1"


def test_launcher_after_dashes_is_taken_over(cli, write_job):
    write_job()
    words = ["torchrun", "--nproc_per_node=2", "train.py", "--lr", "1"]
    done = cli("plan", "-n", "2", "-g", "2", "--run-id", "train-plan", "--", *words)
    assert done.code == 0
    assert "2 nodes x 2 ranks" in done.out
    assert "torchrun in the command is taken over: launcher torchrun, gpus_per_node 2" in done.out
    assert done.out.count("torch.distributed.run") == 1


def test_launcher_that_contradicts_flag_or_key_is_refused(refused, write_job):
    write_job()
    words = ["torchrun", "--nproc_per_node=2", "train.py"]
    said = refused("plan", "-g", "4", "--", *words)
    assert said.startswith("error: --gpus 4, but the command says --nproc_per_node=2\n")
    said = refused(
        "plan", "-g", "2", "--set", "nodes=2", "--", "torchrun", "--tee", "3", "train.py"
    )
    assert "clusterkit submit --gpus 2 --set nodes=2 -- python train.py" in said
    job = write_job(f"command: [{', '.join(words)}]\ngpus_per_node: 4\n", base=False)
    assert refused("plan", job).startswith(
        "error: job.yaml:2: gpus_per_node: 4, but the command says --nproc_per_node=2\n"
    )


def test_plan_reads_program_source_for_spawned_ranks_and_local_rank(cli, write_job, cwd):
    write_job()
    (cwd / "train.py").write_text("import torch.multiprocessing as mp\nmp.spawn(main)\n")
    done = cli("plan", "--gpus", "2", "--", "python", "train.py")
    assert "train.py starts its ranks itself (mp.spawn), but forkserver starts it once" in done.out
    for said in (("--gpus", "2", "--set", "launcher=forkserver"), ()):
        done = cli("plan", *said, "--", "python", "train.py")
        assert (done.code, "mp.spawn" in done.out) == (0, False)
    (cwd / "train.py").write_text("parser.add_argument('--local_rank', type=int)\n")
    done = cli("plan", "--", "deepspeed", "--num_gpus", "2", "train.py")
    assert (done.code, "local_rank" in done.out) == (0, True)


# ---------------------------------------------------------------- bad input, end to end


BAD = {
    "unknown key": ("nodez: 2\n", (), "job.yaml:3: nodez: unknown key (did you mean nodes?)"),
    "wrong type": ("restarts: many\n", (), "job.yaml:3: restarts: 'many' is text"),
    "nodes 0": ("nodes: 0\n", (), "job.yaml:3: nodes: 0: a run needs at least 1 node"),
    "nodes 4:2": ('nodes: "4:2"\n', (), "job.yaml:3: nodes: 4:2: the minimum"),
    "--nodes 0": ("", ("--nodes", "0"), "nodes: 0: a run needs at least 1 node"),
    "--nodes x": ("", ("--nodes", "x"), "nodes: 'x' is neither a number nor MIN:MAX"),
    "--gpus 0": ("", ("--gpus", "0"), "0: a node needs at least 1 rank"),
    "batch": ("batch: {global: 10, micro: 4}\n", (), "job.yaml:3: batch: global 10 is not a mult"),
    "env of ours": ("env: {RANK: 3}\n", (), "job.yaml:3: env.RANK: clusterkit sets it"),
    "unknown name in args": (
        "args: ['${clusterkit.nope}']\n",
        (),
        "job.yaml:3: args: ${clusterkit.nope} is unknown",
    ),
    "deepspeed batch": (
        "batch: {global: 8}\ndeepspeed: {train_batch_size: 4}\n",
        (),
        "job.yaml:4: deepspeed.train_batch_size: 4, but batch gives 8",
    ),
    "no GPU": ("device: cuda\n", (), "job.yaml:3: device: cuda, but localhost has no GPU"),
    "secret": ("secrets: [NO_SUCH_X]\n", (), "job.yaml:3: secrets: NO_SUCH_X is not set in your"),
    "unknown cluster": ("", ("--cluster", "lba"), "cluster 'lba' is unknown"),
    "unknown file": ("", ("--cluster-file", "no.yaml"), "no.yaml: no such file"),
    "bad run id": ("", ("--run-id", "A b"), "run id 'A b' is not valid"),
    "bad setting": ("", ("--set", "nodes"), "--set 'nodes': not of the form key=value"),
    "long name": ("", ("--set", "name=" + "x" * 300), "name: 'xxxxxxxxxx"),
    "name with slashes": ("", ("--set", "name=a/b"), "name: 'a/b' is not a valid job name"),
}


@pytest.mark.parametrize("verb", ["plan", "submit"])
@pytest.mark.parametrize("case", BAD)
def test_bad_input_prints_one_error_line_and_leaves_nothing(verb, case, refused, write_job):
    text, options, message = BAD[case]
    first = refused(verb, write_job(text), *options, "--set", "launcher=forkserver").splitlines()[0]
    assert first.startswith(f"error: {message}") or not message.startswith("job.yaml")
    assert message in first


def test_debug_option_lets_exception_through(write_job):
    from clusterkit.cli import main
    from clusterkit.errors import BadInput

    with pytest.raises(BadInput, match="nodez"):
        main(["--debug", "plan", write_job("nodez: 2\n")])


def test_argument_that_is_not_utf_8_is_refused_without_traceback(refused, write_job):
    write_job()
    said = refused("plan", "--set", "launcher=forkserver", "--", "python", "train.py", "\udcff")
    assert said.startswith("error: args[0]: ")
    assert "not valid U" in said


def test_reserved_variable_in_cluster_env_names_cluster_file_line(refused, write_job, cwd):
    (cwd / "clusters.yaml").write_text("lab:\n  backend: local\n  env:\n    RANK: 3\n")
    said = refused("plan", write_job("env: {A: b}\n"), "--cluster", "lab")
    assert f"{cwd}/clusters.yaml:4: lab.env.RANK: clusterkit sets it" in said


def test_plan_refuses_taken_cluster_port_with_remedy(cli, write_job, cwd):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        (cwd / "clusters.yaml").write_text(f"lab: {{backend: local, port: {port}}}\n")
        done = cli("plan", write_job("launcher: forkserver\n"), "--cluster", "lab")
    assert done.code == 125
    assert done.err.startswith(
        f"error: port {port} on 127.0.0.1 is in use\n hint: leave `port` out"
    )


def test_submit_on_full_disk_is_refused_and_leaves_nothing(cli, write_job, tmp_path, monkeypatch):
    disk = tmp_path / "tiny"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12k", "none", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    try:
        monkeypatch.setenv("CLUSTERKIT_HOME", str(disk))
        monkeypatch.setattr(supervise, "launch", lambda *_, **__: pytest.fail("it was started"))
        done = cli("submit", write_job("launcher: forkserver\n"))
        assert done.code == 125
        assert "No space left on device" in done.err.splitlines()[0]
        assert "Traceback" not in done.err
        assert os.listdir(disk / "runs") == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)
