"""The local backend for real: processes, signals, ports, terminals."""

from __future__ import annotations

import functools
import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import time
import venv
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import msgspec
import pytest

from clusterkit import agent, api, backends
from clusterkit.cluster import LocalCluster
from clusterkit.errors import PortTaken, RunNotFound
from clusterkit.jobfile import loader
from clusterkit.run.folder import RunFolder
from clusterkit.run.status import State
from clusterkit.spec import BatchSpec, JobSpec
from clusterkit.transport import LocalTransport
from tests.conftest import noted
from tests.live import inside, supervisors

PROGRAMS = Path(__file__).parent / "programs"
Submit = Callable[..., api.Run]
SOON = 180.0
"""Seconds after which a test says that something hangs; deepspeed's imports alone take 30 of them
where four tests share two cores."""

START_FEW = (
    "from clusterkit import api; print(api.submit(['sleep', '600'], gpus=40, "
    "settings=['launcher=forkserver']).id)"
)

UGLY = "a b\n'\"$HOME;`x`,=é"
"""A value that careless quoting breaks."""

ARGS = (UGLY, "--r=16", "--log", "x", "--n", "3", ":", "--", "-m")
"""Arguments that torchrun, deepspeed and mpirun would read themselves."""
KEPT = {
    "OMP_NUM_THREADS": "3",
    "PET_NNODES": "7",
    "PET_STANDALONE": "1",
    "PET_NODE_RANK": "x",
    "PET_MINE": UGLY,
}
"""Variables that torchrun reads as its options, one that only looks like it, one it keeps."""

QUIET = {"OMPI_MCA_orte_execute_quiet": "1"}
"""Has mpirun keep to itself which rank failed; now and then it does so unasked."""

pytestmark = pytest.mark.live


def needs_mpirun() -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun: not installed (apt-get install openmpi-bin)")


def all_ready(run: api.Run, ranks: int) -> None:
    """Return once every rank has joined the process group."""
    ready = set()
    for line in run.logs(follow=True):
        if line.text.startswith("ready"):
            ready.add(line.rank)
        if len(ready) == ranks:
            return
    pytest.fail(f"only ranks {ready} got ready: {run.status()}")


def rank_pid(run: api.Run, rank: int, attempt: int = 1) -> int:
    records = [
        json.loads(line)
        for path in run.path.glob(f"attempts/{attempt}/node-*/ranks.jsonl")
        for line in path.read_text().splitlines()
    ]
    return next(int(record["pid"]) for record in records if record["rank"] == rank)


def agent_pid(run: api.Run, node: int, attempt: int = 1) -> int:
    started = json.loads((run.path / f"attempts/{attempt}/node-{node}/started.json").read_text())
    return int(started["pid"])


def kill(pid: int) -> None:
    """SIGKILL, and wait until it is gone."""
    os.kill(pid, signal.SIGKILL)
    agent.wait_gone([pid], SOON)


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# ---------------------------------------------------------------- what ranks see


@pytest.fixture(scope="module")
def in_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], api.Run]:
    """``in_ranks(launcher)``: the run of environment.py under it on two nodes, once for all."""
    home = tmp_path_factory.mktemp("in-ranks") / "home"

    @functools.cache
    def run(launcher: str) -> api.Run:
        program = str(PROGRAMS / "environment.py")
        job = JobSpec(
            name="environment", program=program, args=ARGS, launcher=launcher, restarts=3,
            env={"UGLY": UGLY},
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            for name, value in KEPT.items():
                patch.setenv(name, value)
            patch.setenv("CLUSTERKIT_HOME", str(home))
            run = api.submit(job, nodes=2, gpus=2)
            # With deepspeed six processes import it, beside other tests.
            assert run.wait(5 * SOON).state is State.SUCCEEDED, run.status()
        return run

    return run


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "mpirun", "forkserver"])
def test_every_launcher_gives_ranks_env_and_arguments_unaltered(
    in_ranks: Callable[[str], api.Run], launcher: str
) -> None:
    if launcher == "mpirun":
        needs_mpirun()
    run = in_ranks(launcher)
    seen = {line.rank: json.loads(line.text) for line in run.logs() if line.rank is not None}
    assert sorted(seen) == [0, 1, 2, 3]
    for rank, told in seen.items():
        assert rank is not None
        env = told["env"]
        assert told["argv"] == list(ARGS)
        assert {name: env.get(name) for name in KEPT} == KEPT
        assert env["UGLY"] == UGLY
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % 2),
            "NODE_RANK": str(rank // 2),
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(run.plan.port),
        }
        assert {name: env.get(name) for name in expected} == expected


def test_forked_and_spawned_ranks_have_environment_of_torchrun(
    in_ranks: Callable[[str], api.Run], own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen(run: api.Run) -> dict[str, str]:
        (line,) = (line for line in run.logs() if line.rank == 3)
        names = {run.id: "RUN", str(run.plan.port): "PORT", str(run.path.parents[1]): "HOME"}
        found = {}
        for name, value in json.loads(line.text)["env"].items():
            for own, common in names.items():
                value = value.replace(own, common)
            found[name] = value
        return found

    torchrun, forked = seen(in_ranks("torchrun")), seen(in_ranks("forkserver"))
    words = ["python", "-c", (PROGRAMS / "environment.py").read_text()]
    settings = ["name=environment", f"env={json.dumps({'UGLY': UGLY})}", "restarts=3"]
    for name, value in KEPT.items():
        monkeypatch.setenv(name, value)
    run = api.submit(words, nodes=2, gpus=2, settings=settings)
    assert run.wait(SOON).state is State.SUCCEEDED, run.status()
    spawned = seen(run)
    # Where an exception is to be written, how the ranks meet; and for hangs to be found.
    own = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
           "TORCHELASTIC_SIGNALS_TO_HANDLE"}  # fmt: skip
    own |= {"CLUSTERKIT_AGENT", "PYTEST_CURRENT_TEST"}  # each agent's, and each test's, own
    for environ in (torchrun, forked, spawned):
        for name in own:
            environ.pop(name, None)
    assert forked == torchrun == spawned


@pytest.mark.parametrize("launcher", ["torchrun", "forkserver"])
@pytest.mark.parametrize(
    ("words", "argument"),
    [(["old.py"], "--local_rank"), (["split/train.py"], "--local_rank"),
     (["-m", "pkg.extract"], "--local-rank")],
    ids=" ".join,
)  # fmt: skip
def test_rank_gets_local_rank_argument_in_spelling_of_its_program(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], argument: str, launcher: str
) -> None:
    monkeypatch.chdir(Path(__file__).parents[1] / "unit/local_rank")
    taken = ["python", "-m", "torch.distributed.launch", "--nproc_per_node=2", *words]
    plan = api.plan(taken)
    assert plan.job is not None
    assert plan.job.args == (f"{argument}=${{clusterkit.local_rank}}",)
    run = api.submit(msgspec.structs.replace(plan.job, launcher=launcher))
    assert run.wait(SOON).state is State.SUCCEEDED, list(run.logs())
    texts = {line.rank: line.text.split()[:2] for line in run.logs() if line.rank is not None}
    assert texts == {0: ["LOCAL", "0"], 1: ["LOCAL", "1"]}


def test_log_lines_carry_node_and_rank(
    in_ranks: Callable[[str], api.Run],
) -> None:
    run = in_ranks("forkserver")
    assert Counter((line.node, line.rank) for line in run.logs()) == {
        (0, 0): 1, (0, 1): 1, (1, 2): 1, (1, 3): 1,
    }  # fmt: skip
    assert [line.rank for line in run.logs(node=1)] != []
    assert {line.rank for line in run.logs(rank=3)} == {3}


def test_submit_runs_plain_python_command_on_two_nodes(
    tmp_path: Path, clusterkit: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(PROGRAMS / "beat.py", tmp_path / "my script.py")
    monkeypatch.chdir(tmp_path)
    done = subprocess.run(
        [*clusterkit, "submit", "--nodes", "2", "--", "python", "my script.py", "3"],
        capture_output=True, text=True, timeout=SOON,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = api.get(done.stdout.strip())
    assert [line.text for line in run.logs(rank=0)][-1] == "beat 2 2"


@pytest.mark.parametrize(
    "words",
    [
        ["python", "who.py"],
        ["python3", "-X", "dev", "who.py"],
        ["python", "-c", "import who"],
        ["sh", "-c", "tool"],
        ["named/bin/python", "who.py"],
        ["job.yaml"],
    ],
    ids=" ".join,
)
def test_every_form_of_command_runs_python_of_named_or_active_venv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    environment, named = tmp_path / "active", tmp_path / "named"
    for folder in (environment, named):
        venv.create(folder, symlinks=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VIRTUAL_ENV", str(environment))
    (tmp_path / "who.py").write_text("import sys; print(sys.prefix, sys.executable)")
    (tmp_path / "job.yaml").write_text("launcher: forkserver\ncommand: [python, who.py]\n")
    tool = environment / "bin/tool"
    tool.write_text('#!/bin/sh\nexec python who.py "$@"\n')
    tool.chmod(0o755)
    job: api.Job = words[0] if words == ["job.yaml"] else words
    run = api.submit(job, settings=["launcher=forkserver"])
    assert run.wait(SOON).state is State.SUCCEEDED, list(run.logs())
    expected = named if "named" in words[0] else environment
    prefix, executable = next(run.logs(rank=0)).text.split()
    assert prefix == str(expected)
    assert noted(run.plan, "python") == executable == str(expected / "bin/python")


def test_submit_refuses_missing_interpreter(
    tmp_path: Path, own_home: Path, clusterkit: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "who.py").write_text("")
    done = subprocess.run(
        [*clusterkit, "submit", "--", "/opt/nope/python3.9", "who.py"],
        capture_output=True, text=True, timeout=SOON,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (125, "")
    assert "python: /opt/nope/python3.9 does not exist" in done.stderr
    assert list(own_home.glob("runs/*")) == []


def test_submitted_torchrun_command_makes_one_world_of_all_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(PROGRAMS / "environment.py", tmp_path)
    words = ["torchrun", "--nproc_per_node=2", "environment.py", "--fast"]
    run = api.submit(words, nodes=2, gpus=2)
    assert run.wait(SOON).state is State.SUCCEEDED, list(run.logs())
    seen = [json.loads(line.text) for line in run.logs() if line.rank is not None]
    assert sorted(told["env"]["RANK"] for told in seen) == ["0", "1", "2", "3"]
    assert {told["env"]["WORLD_SIZE"] for told in seen} == {"4"}
    assert [told["argv"] for told in seen] == [["--fast"]] * 4


def test_submitted_accelerate_command_makes_one_world_on_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "who.py").write_text(
        "from accelerate import Accelerator\n"
        "state = Accelerator()\n"
        "print('world', state.num_processes, state.device)\n"
        "state.wait_for_everyone()\n"  # else one may have left before the other has connected
        "state.end_training()\n"
    )
    words = ["accelerate", "launch", "--num_processes", "2", "who.py"]
    run = api.submit(words, settings=["device=cpu"])
    assert run.wait(SOON).state is State.SUCCEEDED, list(run.logs())
    said = [line.text for line in run.logs() if line.text.startswith("world")]
    assert said == ["world 2 cpu:0"] * 2


# ---------------------------------------------------------------- failures


EXCEPTION = ("exception", 1, "ValueError: boom é")
EXIT = ("exit", 7, "exit code 7; last output: about to leave")


@pytest.mark.parametrize(
    ("launcher", "how", "code", "cause"),
    [
        ("torchrun", *EXCEPTION), ("forkserver", *EXCEPTION), ("forkserver", *EXIT),
        ("deepspeed", *EXIT), ("mpirun", *EXIT),
        # An exception is the rank's to report, whatever has started it.
        pytest.param("deepspeed", *EXCEPTION, marks=pytest.mark.thorough),
        pytest.param("mpirun", *EXCEPTION, marks=pytest.mark.thorough),
        pytest.param("torchrun", *EXIT, marks=pytest.mark.thorough),
    ],
)  # fmt: skip
def test_status_names_failed_rank_and_returns_its_exit_code(
    submit: Submit, launcher: str, how: str, code: int, cause: str
) -> None:
    if launcher == "mpirun":
        needs_mpirun()
    # Each deepspeed imports itself for 6 s: `make thorough` has two.
    nodes = 1 if launcher == "deepspeed" else 2
    options = {"nodes": nodes, "gpus": 4 // nodes, "launcher": launcher}
    run = submit("fail.py", how, 3, 99, env=QUIET, **options)
    status = run.wait(SOON)
    assert status.state is State.FAILED
    assert status.failure is not None
    assert (status.failure.node, status.failure.rank) == (nodes - 1, 3)
    assert status.failure.cause.startswith(cause)
    assert status.exit_code == status.failure.exit_code == code


def test_submit_blames_rank_that_failed_first_with_one_traceback(
    clusterkit: list[str],
) -> None:
    done = subprocess.run(
        [*clusterkit, "submit", "--nodes", "2", "--set", "launcher=forkserver", "--",
         "python", str(PROGRAMS / "peers.py"), "1"],
        capture_output=True, text=True, timeout=SOON,
    )  # fmt: skip
    assert done.returncode == 1
    assert "rank 1 on node 1 failed first: ValueError: boom é (exit code 1)" in done.stderr
    assert done.stderr.count("Traceback (most recent call last)") == 1


@pytest.mark.parametrize(
    "launcher", ["torchrun", pytest.param("deepspeed", marks=pytest.mark.thorough), "forkserver"]
)
def test_killed_rank_fails_run_with_exit_code_137(submit: Submit, launcher: str) -> None:
    run = submit("beat.py", 6000, nodes=2, launcher=launcher)
    all_ready(run, 2)
    kill(rank_pid(run, 1))
    status = run.wait(SOON)
    assert status.state is State.FAILED
    assert status.failure is not None
    assert (status.failure.node, status.failure.rank) == (1, 1)
    # What else runs on this machine may be out of memory at the time: then that is the guess.
    assert "SIGKILL" in status.failure.cause
    assert status.exit_code == status.failure.exit_code == 137


def test_status_names_rank_killed_under_mpirun(submit: Submit) -> None:
    """Under the other launchers the test above says it."""
    needs_mpirun()
    run = submit("fail.py", "signal", 3, 99, nodes=2, gpus=2, launcher="mpirun", env=QUIET)
    status = run.wait(SOON)
    assert status.failure is not None
    assert (status.failure.node, status.failure.rank, status.exit_code) == (1, 3, 137)
    # What else runs on this machine may be out of memory at the time: then that is the guess.
    assert "SIGKILL" in status.failure.cause


@pytest.mark.parametrize("launcher", ["torchrun", "forkserver"])
def test_killed_agent_fails_run(submit: Submit, launcher: str) -> None:
    run = submit("tick.py", 6000, nodes=2, launcher=launcher)
    all_ready(run, 2)
    kill(agent_pid(run, 1))
    status = run.wait(SOON)
    assert status.state is State.FAILED
    assert status.nodes[1].reason is not None
    assert status.nodes[1].reason.startswith("SIGKILL: the agent was killed from outside")


def test_killed_torchrun_launcher_fails_run(submit: Submit) -> None:
    run = submit("tick.py", 6000, nodes=2, launcher="torchrun")
    all_ready(run, 2)
    (launcher,) = (pid for pid in agent.descendants(agent_pid(run, 1)) if pid != rank_pid(run, 1))
    kill(launcher)
    status = run.wait(SOON)
    assert status.state is State.FAILED
    assert status.nodes[1].exit_code == 137


def test_missing_program_fails_run_with_exit_code_127(submit: Submit, tmp_path: Path) -> None:
    run = api.submit(["/no/such/program"], settings=["launcher=forkserver"])
    status = run.wait(SOON)
    assert status.failure is not None
    assert status.exit_code == 127
    assert "/no/such/program" in status.failure.cause


# ---------------------------------------------------------------- restarts


def test_failed_run_restarts_and_records_event(submit: Submit) -> None:
    run = submit("fail.py", "exception", 1, 1, nodes=2, restarts=2)
    status = run.wait(SOON)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 2)
    (event,) = run.events()
    assert event.text == (
        "attempt 1 failed: rank 1 on node 1: ValueError: boom é; starting again, 1 restart left"
    )
    assert {line.attempt for line in run.logs()} == {1, 2}


def test_run_fails_when_restarts_are_used_up(submit: Submit) -> None:
    run = submit("fail.py", "exit", 0, 99, restarts=2, retry_on=(7,))
    status = run.wait(SOON)
    assert (status.state, status.attempt, status.exit_code) == (State.FAILED, 3, 7)


def test_run_that_fails_at_start_twice_is_not_restarted_again(submit: Submit) -> None:
    run = submit("fail.py", "exit", 0, 99, restarts=9)
    status = run.wait(SOON)
    assert (status.state, status.attempt, status.exit_code) == (State.FAILED, 2, 7)


@pytest.mark.thorough
def test_shrink_continues_with_remaining_nodes(submit: Submit, tmp_path: Path) -> None:
    program = tmp_path / "world.py"
    program.write_text(
        "import os, time\nprint('ready', *map(os.environ.get, ('RANK', 'WORLD_SIZE',"
        "'GROUP_RANK', 'GROUP_WORLD_SIZE', 'CLUSTERKIT_GLOBAL_BATCH')), flush=True)\n"
        "time.sleep(600 if os.environ['WORLD_SIZE'] == '3' else 0)\n"
    )
    batch = BatchSpec(global_size=12)
    run = submit(str(program), nodes="2:3", on_node_loss="shrink", batch=batch)
    all_ready(run, 3)
    kill(agent_pid(run, 1))
    status = run.wait(SOON)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 1)
    said = {(line.node, line.text) for line in run.logs() if line.text.startswith("ready")}
    assert {words for words in said if words[1].split()[2] == "2"} == {
        (0, "ready 0 2 0 2 12"), (2, "ready 1 2 1 2 12"),
    }  # fmt: skip
    assert run.events()[-1].text == "1 of 3 elastic nodes failed"


SAVES = """
import os, pathlib, signal, sys, time
def save(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
begun, world = pathlib.Path(os.environ["CLUSTERKIT_NODE_DIR"], "begun"), os.environ["WORLD_SIZE"]
print("ready", os.environ["RANK"], world, flush=True)
again = world == "3" and begun.exists()
begun.touch()
while not again:
    time.sleep(0.05)
"""


@pytest.mark.thorough
def test_lost_node_is_restarted_and_rejoins_elastic_run(submit: Submit, tmp_path: Path) -> None:
    program = tmp_path / "saves.py"
    program.write_text(SAVES)
    clusters = tmp_path / "clusters.yaml"
    clusters.write_text("few: {backend: local, stop_grace: 1}\n")
    few = {"cluster": "few", "clusters_file": clusters}
    run = submit(str(program), nodes="2:3", on_node_loss="shrink", **few)
    all_ready(run, 3)
    kill(agent_pid(run, 1))
    status = run.wait(2 * SOON)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 1)
    assert [node.state for node in status.nodes] == [State.SUCCEEDED] * 3
    said = [(line.node, line.text) for line in run.logs() if line.text.startswith("ready")]
    assert sorted(said[-3:]) == [(n, f"ready {n} 3") for n in range(3)]
    # On a busy machine it may be back before the others have missed it.
    if smaller := said[3:-3]:
        assert sorted(smaller) == [(0, "ready 0 2"), (2, "ready 1 2")]
        text = [line.text for line in run.logs() if line.node == 0]
        came = text.index("node 1 can join; the ranks save their work and end")
        assert text[came:].index("saved") < text[came:].index("ready 0 3")
    assert [event.text for event in run.events()] == [
        "node 1 was started again, to join the others"
    ]
    assert not (run.path / "token").exists()


# ---------------------------------------------------------------- cancel, and killed submitters


@pytest.mark.parametrize("launcher", ["torchrun", "forkserver"])
def test_cancel_ends_all_processes_and_is_repeatable(submit: Submit, launcher: str) -> None:
    run = submit("tick.py", 6000, nodes=2, launcher=launcher)
    all_ready(run, 2)
    assert run.cancel().state is State.CANCELLED
    assert agent.processes_of(str(run.path)) == []
    again = run.cancel()
    assert (again.state, again.exit_code) == (State.CANCELLED, 130)


def test_cancelled_program_that_exits_with_0_is_cancelled(submit: Submit, tmp_path: Path) -> None:
    program = tmp_path / "polite.py"
    program.write_text(
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "print('ready', flush=True)\ntime.sleep(600)\n"
    )
    run = submit(str(program))
    all_ready(run, 1)
    status = run.cancel()
    assert (status.state, status.exit_code) == (State.CANCELLED, 130)


@pytest.mark.parametrize(
    "launcher", ["torchrun", pytest.param("deepspeed", marks=pytest.mark.thorough), "forkserver"]
)
def test_ranks_can_save_during_stop_grace_after_cancel(
    submit: Submit, tmp_path: Path, launcher: str
) -> None:
    program = tmp_path / "saver.py"
    program.write_text(
        "import os, pathlib, signal, time\n"
        "def save(*_):\n"
        # deepspeed's launcher asks each rank again, one after the other: the second only once the
        # first has ended, which began another 6 s for a rank that was a moment later.
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    time.sleep(6)\n"
        "    pathlib.Path('saved-' + os.environ['RANK']).touch()\n"
        "    os._exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(1)\n"
    )
    run = submit(str(program), gpus=2, launcher=launcher)
    all_ready(run, 2)
    assert run.cancel().state is State.CANCELLED
    assert agent.processes_of(str(run.path)) == []
    workdir = Path(json.loads((run.path / "job.json").read_text())["workdir"])
    assert sorted(path.name for path in workdir.glob("saved-*")) == ["saved-0", "saved-1"]
    for path in workdir.glob("saved-*"):
        path.unlink()


def test_node_that_cannot_start_all_ranks_leaves_no_process(submit: Submit) -> None:
    begin = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); {START_FEW}"
    done = subprocess.run([sys.executable, "-c", begin], capture_output=True, text=True)
    run = api.get(done.stdout.strip())
    status = run.wait(SOON)
    assert status.failure is not None
    assert status.failure.cause == "Too many open files"
    assert agent.processes_of(str(run.path)) == []


def test_log_following_ends_when_run_folder_is_deleted(submit: Submit) -> None:
    run = submit("tick.py", 6000)
    all_ready(run, 1)
    supervisors.kill(run)
    backends.backend("local").cancel(RunFolder(run.path).handle(), LocalTransport())
    lines = run.logs(follow=True)
    next(lines)
    shutil.rmtree(run.path)
    assert {line.text.split()[0] for line in lines} <= {"ready", "beat"}
    with pytest.raises(RunNotFound, match="is deleted"):
        run.wait(SOON)


def test_cancel_right_after_submit_ends_run_as_cancelled(submit: Submit) -> None:
    run = submit("tick.py", 6000, nodes=2)
    assert run.cancel().state is State.CANCELLED


def test_cancel_kills_rank_that_ignores_sigterm(submit: Submit, tmp_path: Path) -> None:
    program = tmp_path / "stubborn.py"
    program.write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ready', flush=True)\ntime.sleep(600)\n"
    )
    clusters = tmp_path / "clusters.yaml"
    clusters.write_text("here: {backend: local, stop_grace: 0.5}\n")
    run = submit(str(program), cluster="here", clusters_file=clusters)
    all_ready(run, 1)
    assert run.cancel().state is State.CANCELLED


def test_run_of_killed_supervisor_reports_running_and_can_be_cancelled(
    submit: Submit,
) -> None:
    run = submit("tick.py", 6000, nodes=2)
    all_ready(run, 2)
    supervisors.kill(run)
    status = run.status()
    assert status.state is State.RUNNING
    assert status.remark is not None
    assert "its supervisor is gone" in status.remark
    assert run.cancel().state is State.CANCELLED


def test_status_of_run_without_supervisor_names_failed_rank(submit: Submit) -> None:
    run = submit("beat.py", 6000, nodes=2)
    all_ready(run, 2)
    supervisors.kill(run)
    kill(rank_pid(run, 1))
    status = run.wait(SOON)
    assert status.state is State.FAILED
    assert status.failure is not None
    assert status.failure.rank == 1


@pytest.mark.parametrize("nodes", [1, 2])
def test_killed_rank_is_restarted_by_same_agents_without_supervisor(
    submit: Submit, nodes: int
) -> None:
    run = submit("fail.py", "wait", nodes - 1, 1, nodes=nodes, restarts=2)
    all_ready(run, nodes)
    supervisors.kill(run)
    kill(rank_pid(run, nodes - 1))
    status = run.wait(SOON)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 2)
    for node in range(nodes):
        assert agent_pid(run, node, attempt=2) == agent_pid(run, node)
    assert {line.attempt for line in run.logs()} == {1, 2}


def test_attach_learns_of_restart_that_agents_made_without_supervisor(submit: Submit) -> None:
    run = submit("fail.py", "wait", 1, 2, nodes=2, restarts=2)
    all_ready(run, 2)
    supervisors.kill(run)
    kill(rank_pid(run, 1))
    until(lambda: run.status().attempt == 2)
    assert "its nodes restart failed ranks (1 restart left)" in (run.status().remark or "")
    assert run.attach()
    assert any((line.attempt, line.rank) == (2, 1) for line in run.logs(follow=True))
    kill(rank_pid(run, 1, attempt=2))
    status = run.wait(SOON)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 3)
    assert [attempt.failure and attempt.failure.rank for attempt in status.attempts] == [1, 1]


def test_concurrent_attach_restarts_run_failed_without_supervisor_once(
    submit: Submit, tmp_path: Path
) -> None:
    program = tmp_path / "once.py"
    program.write_text(
        "import os, time\nprint('ready', flush=True)\n"
        "time.sleep(600 if os.environ['CLUSTERKIT_ATTEMPT'] == '1' else 0)\n"
    )
    run = submit(str(program), restarts=1)
    all_ready(run, 1)
    supervisors.kill(run)
    kill(agent_pid(run, 0))
    assert run.wait(SOON).state is State.FAILED
    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(lambda _: run.attach(), range(4))) == 1
    status = run.wait(SOON)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 2)
    assert not run.attach()


def test_run_survives_submit_killed_by_sigkill(clusterkit: list[str]) -> None:
    submitter = subprocess.Popen(
        [*clusterkit, "submit", "--nodes", "2", "--set", "launcher=forkserver", "--",
         "python", str(PROGRAMS / "tick.py"), "6000"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert submitter.stdout is not None
    with submitter.stdout:
        run = api.get(submitter.stdout.readline().strip())
        submitter.kill()
        submitter.wait()
    all_ready(run, 2)
    assert run.status().state is State.RUNNING
    done = subprocess.run(
        [*clusterkit, "cancel", run.id, "--json"], capture_output=True, text=True, timeout=SOON
    )
    assert json.loads(done.stdout)["state"] == "CANCELLED"
    assert agent.processes_of(str(run.path)) == []


def test_submit_that_follows_ends_when_run_is_cancelled_elsewhere(clusterkit: list[str]) -> None:
    submitter = subprocess.Popen(
        [*clusterkit, "submit", "--set", "launcher=forkserver", "--",
         "python", str(PROGRAMS / "tick.py"), "6000"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert submitter.stdout is not None
    with submitter.stdout:
        run = api.get(submitter.stdout.readline().strip())
        all_ready(run, 1)
        run.cancel()
        assert submitter.wait(SOON) == 130


# ---------------------------------------------------------------- terminals and Ctrl-C


class Terminal:
    """A command in a pseudo-terminal."""

    def __init__(self, argv: list[str]) -> None:
        self.pid, self.handle = pty.fork()
        if self.pid == 0:
            os.execv(argv[0], argv)
        self.text = ""

    def read_until(self, words: str) -> None:
        deadline = time.monotonic() + SOON
        while words not in self.text:
            assert time.monotonic() < deadline, self.text
            try:
                self.text += os.read(self.handle, 4096).decode(errors="replace")
            except OSError:
                pytest.fail(f"ended without {words!r}: {self.text}")

    def type(self, text: str) -> None:
        os.write(self.handle, text.encode())

    def exit_code(self) -> int:
        while True:
            try:
                if not os.read(self.handle, 4096):
                    break
            except OSError:
                break
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.handle)
        return code


def beating(clusterkit: list[str], *options: str) -> list[str]:
    return [
        *clusterkit, "submit", "--set", "launcher=forkserver", *options, "--",
        "python", str(PROGRAMS / "tick.py"), "6000",
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    ("answer", "code", "state"), [("d\r", 0, State.RUNNING), ("c\r", 130, State.CANCELLED)]
)
def test_ctrl_c_in_terminal_offers_detach_or_cancel(
    clusterkit: list[str], answer: str, code: int, state: State
) -> None:
    terminal = Terminal(beating(clusterkit))
    terminal.read_until("beat 3")
    terminal.type("\x03")
    terminal.read_until("detach from it, or cancel it?")
    terminal.type(answer)
    assert terminal.exit_code() == code
    run = api.get("last")
    assert run.status().state is state
    run.cancel()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_detached_run_continues_after_terminal_closes(clusterkit: list[str]) -> None:
    terminal = Terminal(beating(clusterkit, "--detach"))
    terminal.read_until("follows it")
    assert terminal.exit_code() == 0
    run = api.get("last")
    all_ready(run, 1)
    assert run.status().state is State.RUNNING
    run.cancel()


def test_ctrl_c_without_terminal_cancels_run(clusterkit: list[str]) -> None:
    submitter = subprocess.Popen(
        beating(clusterkit), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert submitter.stdout is not None
    run = api.get(submitter.stdout.readline().strip())
    all_ready(run, 1)
    submitter.send_signal(signal.SIGINT)
    submitter.communicate(timeout=SOON)
    assert submitter.returncode == 130
    assert run.status().state is State.CANCELLED


@pytest.mark.parametrize(
    "phase",
    ["clusterkit.jobfile.loader.job_from_command", "clusterkit.jobfile.loader.read_cluster",
     "clusterkit.backends.local.backend.LocalBackend.probe",
     "clusterkit.backends.local.backend.LocalBackend.plan",
     "clusterkit.run.folder.RunFolder.save_plan", "clusterkit.lifecycle.supervise.spawn"],
)  # fmt: skip
def test_ctrl_c_before_start_leaves_no_run_folder(
    monkeypatch: pytest.MonkeyPatch, own_home: Path, phase: str
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(phase, interrupted)
    with pytest.raises(KeyboardInterrupt):
        api.submit(["python", str(PROGRAMS / "environment.py")], settings=["launcher=forkserver"])
    assert list((own_home / "runs").glob("*") if own_home.exists() else []) == []


def test_ctrl_c_during_supervisor_start_leaves_no_run_or_process(
    monkeypatch: pytest.MonkeyPatch, own_home: Path
) -> None:
    from clusterkit.lifecycle import supervise

    spawn = supervise.spawn
    folders = []

    def spawn_then_interrupted(folder: RunFolder, lock: IO[bytes], **_: object) -> None:
        spawn(folder, lock)
        folders.append(folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(supervise, "spawn", spawn_then_interrupted)
    with pytest.raises(KeyboardInterrupt):
        api.submit(["python", str(PROGRAMS / "tick.py"), "6000"], settings=["launcher=forkserver"])
    assert list((own_home / "runs").iterdir()) == []
    assert agent.processes_of(str(folders[0].path)) == []


# ---------------------------------------------------------------- ports, and several at once


def test_port_taken_after_planning_is_replaced_and_recorded(submit: Submit) -> None:
    facts = backends.backend("local").probe(LocalCluster(), LocalTransport())
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        taken = squatter.getsockname()[1]
        run = submit("beat.py", 2, nodes=2, facts=msgspec.structs.replace(facts, port=taken))
        assert run.wait(SOON).state is State.SUCCEEDED
    (event,) = run.events()
    assert event.text == f"port {taken} was taken meanwhile; {run.plan.port} chosen instead"
    assert run.plan.port != taken
    assert noted(run.plan, "master_port") == str(run.plan.port)


def test_submit_refuses_occupied_port_of_cluster_entry(tmp_path: Path, own_home: Path) -> None:
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        taken = squatter.getsockname()[1]
        clusters = tmp_path / "clusters.yaml"
        clusters.write_text(f"here: {{backend: local, port: {taken}}}\n")
        with pytest.raises(PortTaken, match=f"port {taken} on 127.0.0.1 is in use"):
            api.submit(
                ["python", str(PROGRAMS / "environment.py")], cluster="here",
                clusters_file=clusters,
            )  # fmt: skip
    assert not own_home.exists()


def test_concurrent_submits_get_different_run_ids_and_ports(submit: Submit) -> None:
    with ThreadPoolExecutor() as pool:
        runs = list(pool.map(lambda _: submit("tick.py", 2, nodes=2), range(4)))
    assert len({run.id for run in runs}) == 4
    assert [run.wait(SOON).state for run in runs] == [State.SUCCEEDED] * 4
    assert len({run.plan.port for run in runs}) == 4


# ---------------------------------------------------------------- elastic


@pytest.mark.thorough  # in test_programs.py one goes on and has its node back
def test_elastic_torchrun_continues_without_lost_node(submit: Submit) -> None:
    run = submit("beat.py", 40, nodes="1:2", launcher="torchrun")
    all_ready(run, 2)
    for pid in (agent_pid(run, 1), rank_pid(run, 1)):
        kill(pid)
    alone = next(line for line in run.logs(follow=True, node=0) if line.text == "beat 39 1")
    assert alone.rank == 0
    status = run.wait(SOON)
    assert status.state is State.SUCCEEDED
    assert [node.state for node in status.nodes] == [State.SUCCEEDED, State.FAILED]


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_exception_in_rank_ends_elastic_run_without_restart(submit: Submit, rank: int) -> None:
    run = submit("raises.py", rank, nodes="1:2", launcher="torchrun")
    status = run.wait(4 * SOON)
    assert status.state is State.FAILED
    assert status.failure is not None
    assert "ValueError: always" in status.failure.cause
    assert len([line for line in run.logs() if line.text.startswith("begin")]) == 2


# ---------------------------------------------------------------- secrets, full disks, jobs


def test_secret_reaches_ranks_but_no_file_or_command_line(
    submit: Submit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cret-value")
    program = tmp_path / "check.py"
    program.write_text(
        "import os, pathlib\n"
        "assert os.environ['WANDB_API_KEY'] == 's3cret-value'\n"
        "seen = [p for p in pathlib.Path('/proc').glob('[0-9]*/cmdline')\n"
        "        if b's3cret-value' in p.read_bytes()]\n"
        "print('argument lists', len(seen))\n"
    )
    program.write_text(program.read_text().replace("'s3cret-value'", "'s3cret' + '-value'", 1)
                       .replace("b's3cret-value'", "b's3cret' + b'-value'"))  # fmt: skip
    run = submit(str(program), secrets=("WANDB_API_KEY",))
    assert run.wait(SOON).state is State.SUCCEEDED, run.status()
    assert [line.text for line in run.logs()] == ["argument lists 0"]
    holding = [
        path
        for path in run.path.rglob("*")
        if path.is_file() and b"s3cret-value" in path.read_bytes()
    ]
    assert holding == []


def test_restarted_run_resumes_from_checkpoint_with_identical_losses() -> None:
    def gpt(restarts: int) -> api.Run:
        settings = [f"restarts={restarts}", "checkpoint={every: 5}", "batch={global: 8}"]
        settings += ["device=cpu", "threads_per_rank=1"]
        return api.submit("jobs/ddp.yaml", gpus=2, settings=settings, more_args=["--steps", "30"])

    broken = gpt(restarts=1)
    for line in broken.logs(follow=True):
        if (line.event or {}).get("step") == 12:
            kill(rank_pid(broken, 1))
            break
    status = broken.wait(SOON)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 2)
    (resumed,) = (mark for mark in broken.reported_events() if mark["event"] == "resumed")
    assert resumed["step"] >= 10
    whole = gpt(restarts=0)
    whole.wait(SOON)
    told = {row["step"]: row["loss"] for row in broken.metrics()}
    assert told == {row["step"]: row["loss"] for row in whole.metrics()}


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A CLUSTERKIT_HOME of 512 KiB."""
    if os.geteuid() != 0:
        pytest.skip("small_disk: mounting a tmpfs needs root")
    home = tmp_path / "small"
    home.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(home)], check=True)
    monkeypatch.setenv("CLUSTERKIT_HOME", str(home))
    yield home
    subprocess.run(["umount", "-l", str(home)], check=True)


def test_run_survives_full_disk_and_counts_lost_log_lines(small_disk: Path, tmp_path: Path) -> None:
    done = tmp_path / "done"
    program = tmp_path / "chatty.py"
    program.write_text(
        "import pathlib, sys\nfor n in range(20000): print(n, 'x' * 90)\n"
        f"pathlib.Path({str(done)!r}).touch()\n"
    )
    run = api.submit(["python", str(program)], settings=["launcher=forkserver"])
    status = run.wait(SOON)
    assert status.state is State.SUCCEEDED
    assert done.exists()
    said = [line.text for line in run.logs()]
    kept = sum(text.endswith("x") for text in said)
    gaps = [int(text.split()[0]) for text in said if text.endswith("lost: disk full")]
    assert 0 < kept < 20000
    assert sum(gaps) == 20000 - kept
    assert status.nodes[0].remarks == (f"{20000 - kept} log lines lost: disk full",)
    assert agent.processes_of(str(run.path)) == []


def test_checkpoint_on_full_disk_fails_run_and_leaves_no_file(
    small_disk: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTERKIT_HOME", str(own_home))
    settings = [f"checkpoint={{dir: {small_disk}, every: 2}}", "device=cpu"]
    run = api.submit("jobs/ddp.yaml", gpus=2, settings=settings, more_args=["--steps", "3"])
    status = run.wait(SOON)
    assert status.failure is not None
    assert f"error: cannot write checkpoint {small_disk}/step-00000002" in status.failure.cause
    assert list(small_disk.iterdir()) == []


def test_submit_on_full_disk_gives_one_error_and_leaves_no_run(
    small_disk: Path, clusterkit: list[str]
) -> None:
    (small_disk / "filler").write_bytes(b"x" * (500 << 10))
    done = subprocess.run(
        [*clusterkit, "submit", "--set", "launcher=forkserver", "--", "python",
         str(PROGRAMS / "environment.py")],
        capture_output=True, text=True, timeout=SOON,
    )  # fmt: skip
    assert done.returncode == 125
    assert done.stderr.startswith("error: cannot write ")
    assert "No space left on device" in done.stderr
    assert done.stderr.count("\n") == 2
    assert list((small_disk / "runs").iterdir()) == []


# A plan asks this machine's DeepSpeed, which takes seconds, about sections that nothing else in
# `make test` starts a run of. All job files have plans in tests/contract.
ASKED = ("zero1-config", "zero2-offload", "zero3-nvme")


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(path, id=path.stem, marks=() if path.stem in ASKED else pytest.mark.thorough)
        for path in sorted(Path("jobs").rglob("*.yaml"))
    ],
)
def test_every_repository_job_file_plans_on_two_nodes(job: Path) -> None:
    plan = api.plan(job, nodes=2)
    assert plan.topology["nodes"] == 2
    assert loader.load_job(job).description


@pytest.mark.parametrize("launcher", ["forkserver"])
def test_data_loader_workers_survive_until_rank_saved_on_sigterm(
    submit: Submit, tmp_path: Path, launcher: str
) -> None:
    run = submit("save_on_term.py", "--out", tmp_path, gpus=2, launcher=launcher)
    for line in run.logs(follow=True):
        if line.text.startswith("step "):
            break
    run.cancel()
    assert len(list(tmp_path.glob("saved-*"))) == 2
    texts = [line.text for line in run.logs()]
    assert not [text for text in texts if "killed by signal" in text]


def test_commands_inside_local_run(submit: Submit, tmp_path: Path) -> None:
    run = submit("tick.py", 100_000, nodes=2)
    inside.eventually(lambda: sum("ready" in line.text for line in run.logs()) == 2, "no ranks")
    inside.exec_works(run)
    inside.files_are_copied(run, tmp_path)
    inside.port_is_forwarded(run)
    run.cancel()
    inside.refused_after_end(run)
