"""The command line: every verb, its output for machines and for people, its exit codes."""

import json
import os
import pty
import re
import socket
import subprocess
import sys

import click
import msgspec
import pytest

from clusterkit import api, ui
from clusterkit.cli import VERBS, common, following
from clusterkit.cli import cli as group
from clusterkit.cli.common import table
from clusterkit.lifecycle import launch, supervise
from clusterkit.run.folder import Event, RunFolder
from clusterkit.run.status import Failure, NodeStatus, RunStatus, State
from clusterkit.ui import plots

STAMP = "2026-11-21T20:11:58.12345"
LOG = (
    f"{STAMP}0Z - launcher talk\n"
    f"{STAMP}1Z 0 hello\n"
    f'{STAMP}2Z 0 @clusterkit {{"event": "metrics", "step": 1, "loss": 2.5, '
    '"tokens_per_second": 1000.0, "step_seconds": 0.5}\n'
    f"{STAMP}3Z 1 from rank one\n"
    f'{STAMP}4Z 0 @clusterkit {{"event": "metrics", "step": 2, "loss": 1.25, '
    '"tokens_per_second": 2000.0, "step_seconds": 0.25}\n'
    f"{STAMP}5Z 0 cut o"
)
pytestmark = pytest.mark.usefixtures("no_gpus")

ANSWERS = ("ls", "status", "logs", "metrics", "cancel")
"""Verbs that answer a question."""


def final(run_id, state=State.SUCCEEDED, code=0, **fields):
    return RunStatus(
        run=run_id, job="demo", cluster="local", backend="local", state=state, exit_code=code,
        nodes=(NodeStatus(node=0, host="localhost", state=state, exit_code=code),),
        started_at=100.0, finished_at=160.0, **fields,
    )  # fmt: skip


@pytest.fixture
def ended(unstarted_run, by_hand):
    """A run of two ranks that has succeeded; its supervisor is gone."""
    run = unstarted_run("launcher: forkserver\ngpus_per_node: 2\n")
    by_hand(run).node(exit_code=0, log=LOG)
    by_hand(run).unwatched()
    RunFolder(run.path).write_json("state.json", final(run.id))
    return run


@pytest.fixture
def failed(unstarted_run, by_hand):
    run = unstarted_run()
    failure = Failure(
        node=0, rank=0, exit_code=7, cause="ValueError: bad", hint="mend it", traceback="T"
    )
    RunFolder(run.path).write_json("state.json", final(run.id, State.FAILED, 7, failure=failure))
    return run


# ---------------------------------------------------------------- help


def test_help_lists_every_verb_with_one_line(cli):
    done = cli("--help")
    assert done.code == 0
    for verb, line in VERBS.items():
        assert f"  {verb} " in done.out
        assert line in done.out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_example_and_described_options(verb):
    command = cli_command(verb)
    assert command.name == verb
    assert command.help
    assert f"clusterkit {verb}" in (command.epilog or "")
    assert (command.epilog or "").startswith("Example")
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help, option.name


def cli_command(verb):
    found = group.get_command(click.Context(group), verb)
    assert found is not None
    return found


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_verb_accepts_both_help_flags(cli, verb, flag):
    done = cli(verb, flag)
    assert done.code == 0
    assert done.out.startswith(f"Usage: clusterkit {verb}")


@pytest.mark.parametrize("verb", ANSWERS)
def test_query_verbs_have_json_option(verb):
    assert "--json" in [flag for option in cli_command(verb).params for flag in option.opts]


def test_command_line_without_verb_prints_help(cli):
    assert cli() == cli("--help")
    assert cli().code == 0


def test_mistyped_verb_suggests_nearest_verb(cli):
    done = cli("sumbit")
    assert done.code == 125
    assert "No such command 'sumbit'. Did you mean submit?" in done.err


def test_program_option_before_dashes_is_refused_with_corrected_line(write_job, refused):
    said = refused("plan", write_job(), "--nodes", "2", "--steps", "3")
    assert said.startswith("error: No such option '--steps'.\n")
    assert "clusterkit plan --nodes 2 job.yaml -- --steps 3\n" in said
    assert "Did you mean --nodes?" in refused("plan", "job.yaml", "--nodez", "2")


@pytest.mark.parametrize("words", [("plan", "job.yaml", "--nodes"), ("init", "--hosts"),
                                   ("logs", "last", "--rank"), ("estimate", "--gpus")])  # fmt: skip
def test_missing_option_value_hints_at_command_help(refused, words):
    assert f" hint: clusterkit {words[0]} --help\n" in refused(*words)


@pytest.mark.parametrize("words", [
    ("convert", "-o", "no/job.yaml", "--", "python", "train.py"),
    ("convert", "--clusters-out", "no/c.yaml", "--", "torchrun", "train.py"),
])  # fmt: skip
def test_convert_refuses_output_in_missing_folder(refused, words, cwd):
    assert f"{words[2]}: there is no folder no\n hint: mkdir -p no\n" in refused(*words)
    assert not (cwd / "no").exists()


def test_plot_and_web_report_refuse_missing_folder(cli, ended, cwd):
    for words in (("metrics", "last", "--plot", "no/loss.png"), ("web", "last", "-o", "no/r.html")):
        done = cli(*words)
        assert done.code == 125
        assert "there is no folder no\n" in done.err
    assert not (cwd / "no").exists()


def test_plan_refuses_output_folder_that_cannot_be_made(cli, write_job):
    done = cli("plan", write_job(), "-o", "/proc/x")
    assert done.code == 125
    assert "name another folder" in done.err


def test_rm_removes_run_named_twice_once(cli, ended):
    assert cli("rm", "last", "last").out == f"{ended.id}\n"


def test_estimate_refuses_unknown_model_and_suggests_nearest(refused):
    said = refused("estimate", "llama-3-8c", "--gpus", "8", "--gpu-memory", "80GB")
    assert said.startswith("error: --model llama-3-8c: ")
    assert "did you mean llama-3-8b?" in said


def test_status_omits_training_share_for_short_run(cli, ended):
    folder = RunFolder(ended.path)
    status = folder.saved_status()
    for seconds, shown in ((0.6, False), (60.0, True)):
        finished = status.started_at + seconds
        folder.write_json("state.json", msgspec.structs.replace(status, finished_at=finished))
        assert ("% of the time was training" in cli("status", "last").out) == shown


def test_web_refuses_unresolvable_host(cli):
    done = cli("web", "--host", "nope.invalid")
    assert done.code == 125
    assert done.err.startswith("error: --host nope.invalid: ")
    assert "can be reached" not in done.err


def test_unknown_option_is_refused(cli):
    done = cli("plan", "--nodez", "2")
    assert done.code == 125
    assert "No such option" in done.err


def test_version_option_prints_version(cli):
    import clusterkit

    assert cli("--version").out.strip() == f"clusterkit, version {clusterkit.__version__}"


HEAVY = {
    "torch", "rich", "yaml", "matplotlib", "hypothesis", "subprocess", "concurrent.futures",
    "tempfile", "secrets", "importlib.resources", "importlib.metadata",
    "clusterkit.lifecycle.launch", "clusterkit.lifecycle.supervisor", "clusterkit.transport",
    "clusterkit.assemble", "clusterkit.jobfile.command", "clusterkit.agent",
}  # fmt: skip


@pytest.mark.parametrize(
    ("verb", "light"),
    [
        (["--help"], {"msgspec", "clusterkit.api"}),
        (["ls"], {"clusterkit.output.tracebacks"}),
        (["status", "last"], {"clusterkit.output.tracebacks"}),
        (["logs", "last"], set()),
    ],
)
def test_help_and_query_verbs_start_without_heavy_imports(verb, light, ended):
    code = (
        "import sys\nfrom clusterkit.cli import main\n"
        f"try: main({verb})\nexcept SystemExit: pass\n"
        f"print(sorted({HEAVY | light} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
    assert done.stdout


def test_orchestrator_imports_without_torch():
    code = (
        "import sys, pkgutil, importlib, clusterkit\n"
        "for m in pkgutil.walk_packages(clusterkit.__path__, 'clusterkit.'):\n"
        "    if not m.name.startswith(('clusterkit.runtime', 'clusterkit.__main__')):\n"
        "        importlib.import_module(m.name)\n"
        "print(sorted({'torch', 'deepspeed', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


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


# ---------------------------------------------------------------- submit


@pytest.fixture
def scripted_submit(monkeypatch, by_hand):
    """Submits whose supervisor is replaced by its last word."""

    def end(state, code, **fields):
        def launch(folder, lock, transport):
            node = folder.path / "attempts" / "1" / "node-0"
            node.mkdir(parents=True)
            (node / "log").write_text(LOG)
            folder.write_json("state.json", final(folder.run_id, state, code, **fields))

        monkeypatch.setattr(supervise, "launch", launch)

    return end


def test_submit_prints_run_id_on_stdout_and_exits_with_run_code(cli, write_job, scripted_submit):
    scripted_submit(State.SUCCEEDED, 0)
    done = cli("submit", write_job("launcher: forkserver\n"), "--run-id", "demo-7")
    assert (done.code, done.out) == (0, "demo-7\n")
    assert "n0 r0 hello" in done.err
    assert "demo-7 SUCCEEDED in 1 min 00 s" in done.err
    assert "loss      2.5000 at step 1, 1.2500 at step 2" in done.err


def test_submit_of_failing_run_exits_with_its_code_and_shows_failure(
    cli, write_job, scripted_submit
):
    failure = Failure(node=0, rank=1, exit_code=7, cause="ValueError: bad", hint="mend it")
    scripted_submit(State.FAILED, 7, failure=failure)
    done = cli("submit", write_job("launcher: forkserver\n"))
    assert done.code == 7
    assert "rank 1 on node 0 failed first: ValueError: bad (exit code 7)" in done.err


def test_submit_with_json_prints_final_status_instead_of_id(cli, write_job, scripted_submit):
    scripted_submit(State.SUCCEEDED, 0)
    done = cli("submit", write_job("launcher: forkserver\n"), "--json", "--run-id", "demo-8")
    assert (done.json["run"], done.json["state"]) == ("demo-8", "SUCCEEDED")


def test_detached_submit_prints_run_id(cli, write_job, scripted_submit):
    scripted_submit(State.SUCCEEDED, 0)
    done = cli("submit", write_job("launcher: forkserver\n"), "--detach", "--run-id", "demo-9")
    assert (done.code, done.out) == (0, "demo-9\n")


def test_detached_submit_that_fails_at_once_shows_cause(cli, write_job, scripted_submit):
    failure = Failure(node=0, exit_code=1, cause="image a/b:1 cannot be pulled", hint="push it")
    scripted_submit(State.FAILED, 1, failure=failure)
    done = cli("submit", write_job("launcher: forkserver\n"), "--detach", "--run-id", "demo-9")
    assert (done.code, done.out) == (1, "demo-9\n")
    assert "demo-9 FAILED\nnode 0 failed first: image a/b:1 cannot be pulled" in done.err
    assert "push it" in done.err


def test_submit_under_existing_run_id_is_refused(cli, ended, write_job):
    done = cli("submit", "job.yaml", "--run-id", ended.id)
    assert done.code == 125
    assert f"run {ended.id} exists already" in done.err
    assert ended.status().state is State.SUCCEEDED


def test_submit_notes_more_ranks_than_cores(cli, write_job, scripted_submit):
    scripted_submit(State.SUCCEEDED, 0)
    done = cli("submit", write_job("launcher: forkserver\ndevice: cpu\n"), "--gpus", "5000")
    assert "note: 5000 ranks share" in done.err


# ---------------------------------------------------------------- looking again


def test_ls_without_runs_prints_note_and_empty_json(cli):
    done = cli("ls")
    assert (done.code, done.out) == (0, "")
    assert "no runs yet" in done.err
    assert cli("ls", "--json").json == []


def test_ls_prints_runs_as_table_and_statuses_as_json(cli, ended):
    lines = cli("ls").out.splitlines()
    assert lines[0].split() == ["RUN", "STATE", "NODES", "CLUSTER", "AGE"]
    assert lines[1].split()[:4] == [ended.id, "SUCCEEDED", "1", "local"]
    status = cli("status", ended.id, "--json").json
    assert status["goodput"]["training"] >= 0  # read from the run's log, which `ls` leaves alone
    assert cli("ls", "--json").json == [{**status, "goodput": None}]


def test_attach_notes_that_run_has_ended(cli, ended):
    done = cli("attach", ended.id, "--detach")
    assert (done.code, done.out) == (0, f"{ended.id}\n")
    assert done.err == f"note: {ended.id} has ended (SUCCEEDED): nothing is left to do\n"


def test_status_json_has_documented_keys(cli, failed):
    document = cli("status", "last", "--json").json
    assert set(document) >= {
        "run", "job", "cluster", "backend", "state", "exit_code", "attempt", "nodes", "failure",
        "started_at", "finished_at",
    }  # fmt: skip
    assert set(document["nodes"][0]) >= {"node", "host", "state", "exit_code"}
    assert set(document["failure"]) == {"node", "rank", "exit_code", "cause", "hint", "traceback"}


def test_status_shows_state_nodes_failure_and_hint(cli, failed):
    done = cli("status", failed.id)
    assert done.code == 0
    for words in ("FAILED", "job demo on local (local), attempt 1, 60.0 s", "NODE  HOST",
                  "ValueError: bad", "hint: mend it"):  # fmt: skip
        assert words in done.out


def test_logs_show_source_of_each_line_and_metrics_as_words(cli, ended):
    texts = [line.split(" ", 1)[1] for line in cli("logs", ended.id).out.splitlines()]
    assert texts == [
        "n0 - launcher talk",
        "n0 r0 hello",
        "n0 r0 step 1  loss 2.5  tokens_per_second 1000  step_seconds 0.5",
        "n0 r1 from rank one",
        "n0 r0 step 2  loss 1.25  tokens_per_second 2000  step_seconds 0.25",
        "n0 r0 cut o",
    ]


def test_logs_follow_notes_restart_on_stderr(cli, ended):
    folder = RunFolder(ended.path)
    text = "attempt 1 failed: rank 1 on node 0: because"
    folder.append("events.jsonl", Event(at=1.0, attempt=1, text=text))
    assert cli("logs", "-f", ended.id).err == f"note: {text}\n"
    assert cli("logs", ended.id).err == ""


def test_ctrl_c_before_follow_is_imported_cancels_run(monkeypatch):
    """Importing what shows it takes a while: the id is printed by then, and it runs."""

    class Interrupted:
        def find_spec(self, name, path=None, target=None):
            if name == "clusterkit.ui.follow":
                raise KeyboardInterrupt

    class Run:
        id, cancelled = "demo-1", False

        def cancel(self):
            self.cancelled = True

    monkeypatch.delitem(sys.modules, "clusterkit.ui.follow", raising=False)
    monkeypatch.delattr(ui, "follow", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    run = Run()
    with pytest.raises((SystemExit, KeyboardInterrupt)) as left:
        following.follow(run, as_json=False)
    assert run.cancelled
    assert getattr(left.value, "code", None) == 130


def test_ctrl_c_while_run_id_is_printed_cancels_run(cli, cwd, monkeypatch):
    echo = click.echo

    def interrupted(*words, **options):
        monkeypatch.setattr(click, "echo", echo)
        raise KeyboardInterrupt

    monkeypatch.setattr(click, "echo", interrupted)
    assert cli("submit", "--detach", "--", "sleep", "600").code == 130
    assert [status.state for status in api.runs()] == ["CANCELLED"]


def test_logs_raw_print_one_rank_without_prefix(cli, ended):
    assert cli("logs", ended.id, "--rank", "1", "--raw").out == "from rank one\n"
    assert cli("logs", ended.id, "--node", "0", "--rank", "1", "--raw").out == "from rank one\n"


@pytest.mark.parametrize("lines", [1, 2, 3, 100])
def test_logs_tail_prints_last_lines_of_logs(cli, ended, lines):
    for more in ((), ("--rank", "1"), ("--node", "0"), ("--json",)):
        whole = cli("logs", ended.id, *more)
        last = cli("logs", ended.id, "--tail", str(lines), *more)
        if more == ("--json",):
            assert last.json == whole.json[-lines:]
        else:
            assert last.out.splitlines() == whole.out.splitlines()[-lines:]
    assert cli("logs", ended.id, "--tail", "1", "--rank", "99").code == 125
    assert cli("logs", ended.id, "--tail", "1", "-f").err.startswith("error: --tail, --follow:")


def test_logs_fold_torchrun_traceback_unless_raw_or_json(cli, unstarted_run, by_hand):
    report = [
        "Traceback (most recent call last):", '  File "run.py", line 1, in <module>',
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "=" * 60, "train.py FAILED", "=" * 60,
    ]  # fmt: skip
    run = unstarted_run()
    log = "".join(f"2026-11-21T20:00:00.000000Z - {text}\n" for text in report)
    by_hand(run).node(exit_code=1, log=log.encode())
    RunFolder(run.path).write_json("state.json", final(run.id, State.FAILED, 1))
    (line,) = cli("logs", run.id).out.splitlines()
    assert line.endswith(
        "n0 - torchrun's own traceback (ChildFailedError): 6 lines; logs --raw shows them"
    )
    assert cli("logs", run.id, "--raw").out.splitlines() == report
    assert [line["text"] for line in cli("logs", run.id, "--json").json] == report


def test_logs_json_is_list_but_one_object_per_line_when_followed(cli, ended):
    listed = cli("logs", ended.id, "--json").json
    followed = [json.loads(x) for x in cli("logs", ended.id, "--json", "-f").out.splitlines()]
    assert listed == followed
    assert listed[1] | {"time": 0} == {
        "time": 0, "node": 0, "rank": 0, "text": "hello", "attempt": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--rank", "2"), "rank 2: run {} has ranks 0 to 1"),
        (("--rank", "-1"), "rank -1: run {} has ranks 0 to 1"),
        (("--node", "1"), "node 1: run {} has nodes 0 to 0"),
    ],
)
def test_logs_of_unknown_rank_or_node_are_refused(cli, ended, option, message):
    done = cli("logs", ended.id, *option)
    assert done.code == 125
    assert message.format(ended.id) in done.err


def test_metrics_print_table_or_json_list(cli, ended):
    assert cli("metrics", ended.id).out.splitlines() == [
        "step  loss  tokens_per_second  step_seconds",
        "1     2.5   1000               0.5",
        "2     1.25  2000               0.25",
    ]
    assert cli("metrics", "last", "--json").json[1] == {
        "step": 2, "loss": 1.25, "tokens_per_second": 2000.0, "step_seconds": 0.25,
    }  # fmt: skip


def test_metrics_of_run_without_metrics_are_empty_with_note(cli, failed):
    done = cli("metrics", failed.id)
    assert (done.code, done.out) == (0, "")
    assert "reported no metrics" in done.err
    assert cli("metrics", failed.id, "--json").json == []


def test_cancel_of_ended_run_leaves_its_state(cli, ended):
    done = cli("cancel", ended.id)
    assert done.out == f"{ended.id} SUCCEEDED\n"
    assert re.fullmatch(r"it had ended at \d\d:\d\d:\d\d already\n", done.err)
    assert cli("cancel", ended.id, "--json").json["state"] == "SUCCEEDED"


def test_cancel_of_run_whose_job_was_deleted_exits_with_0(cli, ended):
    """It exited with 3, as for a host that does not answer."""
    removed = "NotFound: PyTorchJob demo-1 was deleted by a user"
    folder = RunFolder(ended.path)
    saved = msgspec.structs.replace(ended.status(), state=State.CANCELLED, remark=removed)
    folder.record_end(saved)
    done = cli("cancel", ended.id)
    assert (done.code, done.out) == (0, f"{ended.id} CANCELLED\n")
    assert done.err.startswith("it had ended at ")
    assert removed in cli("status", ended.id).out


def test_metrics_plot_writes_picture_and_prints_its_name(cli, ended, cwd):
    pytest.importorskip("matplotlib")
    done = cli("metrics", ended.id, "--plot", "loss.svg")
    assert (done.code, done.out) == (0, "loss.svg\n")
    assert (cwd / "loss.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("jobs", "labels"), [(("a", "b"), ("a", "b")), (("a", "a"), ("one-1", "two-2"))]
)
def test_plot_labels_runs_by_job_or_by_id_for_equal_jobs(
    cli, unstarted_run, by_hand, monkeypatch, jobs, labels
):
    drawn = []
    monkeypatch.setattr(plots, "draw", lambda *given: drawn.append(given) or given[1])
    runs = ("one-1", "two-2")
    for run_id, job in zip(runs, jobs, strict=True):
        run = unstarted_run(run_id=run_id, settings=[f"name={job}"])
        by_hand(run).node(exit_code=0, log=LOG)
    cli("metrics", *runs, "--plot", "loss.svg")
    assert drawn[0][2] == dict(zip(runs, labels, strict=True))


def test_rm_removes_ended_run(cli, ended):
    assert cli("rm", "last").out == f"{ended.id}\n"
    assert not ended.path.exists()


def test_rm_refuses_a_run_that_has_not_ended(cli, unstarted_run):
    run = unstarted_run()
    done = cli("rm", run.id)
    assert done.code == 125
    assert f"run {run.id} is PENDING" in done.err
    assert run.path.exists()


def test_schema_prints_json_schema(cli):
    assert cli("schema").json["title"] == "clusterkit job file"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_script_for_shell(cli, shell):
    done = cli("completion", shell)
    assert done.code == 0
    assert "_CLUSTERKIT_COMPLETE" in done.out


def test_shell_completion_offers_runs_and_clusters(ended, cwd):
    from clusterkit.cli.common import complete_cluster, complete_run

    (cwd / "clusters.yaml").write_text("lab: {backend: local}\n")
    assert complete_run(None, None, "demo") == [ended.id]
    assert complete_run(None, None, "l") == ["last"]
    assert complete_cluster(None, None, "l") == ["lab", "local"]


@pytest.mark.parametrize("verb", ["status", "logs", "metrics", "cancel", "rm", "wait"])
def test_unknown_run_is_refused_with_newest_runs(cli, ended, verb):
    done = cli(verb, "nope")
    assert (done.code, done.out) == (125, "")
    assert done.err.startswith("error: run 'nope' is unknown under ")
    assert f" hint: the newest runs: {ended.id}" in done.err


@pytest.mark.parametrize("verb", ["status", "logs", "metrics", "cancel", "rm", "wait"])
def test_ambiguous_run_is_refused_with_candidates(cli, unstarted_run, verb):
    first, second = unstarted_run(run_id="demo-1"), unstarted_run(run_id="demo-2")
    done = cli(verb, "demo")
    assert (done.code, done.out) == (125, "")
    assert "run 'demo' is ambiguous: " in done.err
    assert first.id in done.err
    assert second.id in done.err


DAMAGED = ["run.json", "job.json", "cluster.json", "facts.json", "plan.json", "state.json",
           "attempts/1/node-0/log", "attempts/1/node-0/exit.json", "attempts"]  # fmt: skip


@pytest.mark.parametrize("damage", ["missing", "torn", "of another shape"])
@pytest.mark.parametrize("name", DAMAGED)
def test_query_verbs_survive_damaged_run_folder_without_traceback(cli, ended, name, damage):
    path = ended.path / name
    if path.is_dir():
        import shutil

        shutil.rmtree(path)
    elif damage == "missing":
        path.unlink()
    else:
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] if damage == "torn" else b'{"a": [1]}')
    for verb in ANSWERS:
        for option in ((), ("--json",)):
            argv = [verb, *option] if verb == "ls" else [verb, ended.id, *option]
            done = cli(*argv)
            assert done.code in (0, 1, 125), (argv, done)
            if done.code:
                assert done.err.startswith("error: run "), (argv, done)
                assert ended.id in done.err


def test_status_honours_no_color(cli, ended, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in cli("status", ended.id).out


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_error_output_honours_no_color(no_color, coloured):
    ours, theirs = pty.openpty()
    environment = os.environ | {"NO_COLOR": no_color, "TERM": "xterm"}
    subprocess.run([sys.executable, "-m", "clusterkit", "x"], stderr=theirs, env=environment)
    assert (b"\x1b[" in os.read(ours, 4096)) is coloured


def test_table_aligns_columns():
    assert table([("a", "long cell"), ("longer", "b")], ("X", "Y")) == (
        "X       Y\na       long cell\nlonger  b"
    )


@pytest.mark.parametrize("columns", [40, 80])
def test_narrow_ls_and_status_drop_columns_but_keep_ids_whole(cli, ended, monkeypatch, columns):
    reason = "its agent ended: " + "no space left on device, " * 4
    status = final(ended.id)
    node = msgspec.structs.replace(status.nodes[0], reason=reason, host="gpu-17.cluster.example")
    folder = RunFolder(ended.path)
    folder.write_json("state.json", msgspec.structs.replace(status, nodes=(node,)))
    monkeypatch.setenv("COLUMNS", str(columns))
    head, line = cli("ls").out.splitlines()
    assert line.split()[:2] == [ended.id, "SUCCEEDED"]
    assert ("CLUSTER" in head) == (columns == 80)
    lines = cli("status", ended.id).out.splitlines()
    assert max(map(len, lines)) <= columns
    table = lines[next(at for at, line in enumerate(lines) if "WHY" in line) :]
    width = table[0].index("WHY")
    why = " ".join(line[width:].strip() for line in table[1:])
    assert why.startswith(reason.strip())
    assert ("gpu-17.cluster.example" in table[1]) == (columns == 80)


@pytest.mark.parametrize("room", range(1, 90, 8))
@pytest.mark.parametrize("drop", [None, ("A", "C"), ()])
def test_table_of_any_width_breaks_no_id_or_number(monkeypatch, room, drop):
    monkeypatch.setattr(common, "terminal_width", lambda: room)
    sentence = "a sentence of words that may stand below each other"
    header = ("RUN", "A", "B", "C", "WHY")
    text = table(
        [("gpt-1126200013-5u5s", "30 ranks", 1234567, 0.000123456, sentence)], header, drop=drop
    )
    lines = text.splitlines()
    shown = lines[0].split()
    for name, cell in zip(
        header, ("gpt-1126200013-5u5s", "30 ranks", "1234567", "0.000123456"), strict=False
    ):
        assert (cell in lines[1]) == (name in shown)
    if drop is None and room >= 19:
        assert max(map(len, lines)) <= room
    assert shown[0] == "RUN"
    assert drop is None or {"B", "WHY"} <= {*shown}


def test_narrow_metrics_table_shows_whole_numbers(cli, ended, monkeypatch):
    wide = [line.split() for line in cli("metrics", ended.id).out.splitlines()]
    monkeypatch.setenv("COLUMNS", "20")
    narrow = [line.split() for line in cli("metrics", ended.id).out.splitlines()]
    assert 1 < len(narrow[0]) < len(wide[0])
    assert narrow == [line[: len(narrow[0])] for line in wide]


@pytest.mark.parametrize("columns", [40, 80])
def test_status_wraps_between_words_and_logs_do_not_wrap(cli, ended, monkeypatch, columns):
    words = " ".join(f"{1234567 + number}" for number in range(40))
    log = f"2026-11-21T20:11:58.123456Z 0 {words}\n"
    RunFolder(ended.path).node_dir(1, 0).joinpath("log").write_text(log)
    failure = Failure(node=0, rank=0, exit_code=1, cause=f"ValueError: {words}")
    status = final(ended.id, State.FAILED, 1, failure=failure)
    RunFolder(ended.path).write_json("state.json", status)
    terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    lines = cli("status", ended.id).out.splitlines()
    assert max(map(len, lines)) <= columns
    assert {*words.split()} <= {word for line in lines for word in line.split()}
    assert cli("logs", ended.id).out.endswith(f" {words}\n")


HOSTILE = "\x1b]0;title\x07\x1b[2Jover\x1b[31mred\x1b[0m"


def terminal(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)


@pytest.fixture
def hostile(ended):
    log = f"2026-11-21T20:11:58.000000Z 0 {HOSTILE}\n"
    RunFolder(ended.path).node_dir(1, 0).joinpath("log").write_text(log)
    failure = Failure(node=0, rank=0, exit_code=1, cause=HOSTILE, traceback=f"T\n{HOSTILE}")
    status = final(ended.id, State.FAILED, 1, failure=failure)
    node = msgspec.structs.replace(status.nodes[0], reason=HOSTILE)
    status = msgspec.structs.replace(status, nodes=(node,))
    RunFolder(ended.path).write_json("state.json", status)
    return ended


@pytest.mark.parametrize("argv", [("logs",), ("logs", "--raw"), ("logs", "-f"), ("status",)])
def test_terminal_output_keeps_colours_but_drops_control_sequences(cli, hostile, argv, monkeypatch):
    terminal(monkeypatch)
    out = cli(argv[0], hostile.id, *argv[1:]).out
    assert "over\x1b[31mred\x1b[0m" in out
    assert argv != ("status",) or "1     overred\n" in out
    assert "title" not in out
    assert "\x1b[2J" not in out


@pytest.mark.parametrize("option", [(), ("--raw",), ("-f",)])
def test_piped_logs_are_written_unchanged(cli, hostile, option):
    assert cli("logs", hostile.id, *option).out.endswith(f"{HOSTILE}\n")


def test_long_log_is_written_in_large_pieces(cli, ended, monkeypatch):
    stamp = "2026-11-21T20:11:58.000000Z"
    log = "".join(f"{stamp} 0 line {number}\n" for number in range(10_000))
    RunFolder(ended.path).node_dir(1, 0).joinpath("log").write_text(log)
    pieces = []

    def write(text):
        pieces.append(text)
        return len(text)

    for option in ((), ("-f",), ("--raw", "-f"), ("--json",), ("--json", "-f")):
        pieces.clear()
        with monkeypatch.context() as patch:
            patch.setattr(sys.stdout, "write", write)
            cli("logs", ended.id, *option)
        assert "".join(pieces).count("line 9999") == 1
        assert len(pieces) < 10, option


def test_plan_accepts_no_doctor_option(cli, write_job, monkeypatch):
    seen = []
    prepare = launch.prepare

    def watched(job, **options):
        seen.append(options["doctor"])
        return prepare(job, **options)

    monkeypatch.setattr(launch, "prepare", watched)
    job = write_job("launcher: forkserver\n")
    assert cli("plan", job).code == 0
    assert cli("plan", job, "--no-doctor").code == 0
    assert seen == [True, False]
