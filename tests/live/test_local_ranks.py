"""What ranks of the local backend see."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import venv
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from clusterkit import api
from clusterkit.run.status import State
from clusterkit.spec import JobSpec
from tests.conftest import noted
from tests.live.local import PROGRAMS, SOON, needs_mpirun

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
pytestmark = pytest.mark.live


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
