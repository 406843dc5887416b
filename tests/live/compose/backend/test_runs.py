"""Runs in containers: what ranks see, secrets, restarts and cancels."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clusterkit import agent, api
from clusterkit.jobfile import loader
from clusterkit.run.status import State
from clusterkit.spec import CheckpointSpec, JobSpec
from tests.live import supervisors
from tests.live.compose.backend.running import (
    ROOT,
    SOON,
    WAIT,
    Start,
    ended,
    left_over,
    node,
    ready,
    words,
)

PROGRAMS = ROOT / "tests" / "live" / "programs"
CONTRACT = (
    "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT", "CLUSTERKIT_RUN_DIR", "GLOO_SOCKET_IFNAME", "PYTHONPATH",
)  # fmt: skip
pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]  # the first one has the image built


def program(name: str, *args: object, **fields: Any) -> JobSpec:
    return JobSpec(
        name=Path(name).stem,
        program=str(PROGRAMS / name),
        args=tuple(map(str, args)),
        **{"launcher": "forkserver", **fields},
    )


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize("code", ["mounted", "baked"])
def test_compose_runs_job_file_in_two_containers_as_planned(
    code: str, image: str, engine: Any, tmp_path: Path, clusterkit: list[str]
) -> None:
    """All of it on the command line; the printed plan is what is carried out."""
    clusters = tmp_path / "clusters.yaml"
    clusters.write_text(json.dumps({"here": {"backend": "compose", "image": image, "code": code}}))

    def call(*argv: str) -> str:
        done = subprocess.run([*clusterkit, *argv], capture_output=True, text=True, timeout=SOON)
        assert done.returncode == 0, done.stderr
        return done.stdout

    job = ["jobs/ddp.yaml", "--nodes", "2", "--cluster", "here", "--cluster-file", str(clusters)]
    job += ["--set", "threads_per_rank=1"]
    run = call("submit", *job, "--", "--steps", "4").strip()
    status = json.loads(call("status", run, "--json"))
    assert (status["state"], status["backend"]) == ("SUCCEEDED", "compose")
    assert [(n["host"], n["exit_code"]) for n in status["nodes"]] == [("node-0", 0), ("node-1", 0)]
    assert [row["step"] for row in json.loads(call("metrics", run, "--json"))] == [1, 2, 3, 4]
    assert run in call("ls")
    assert {line.rank for line in api.get(run).logs()} >= {0, 1}
    printed = api.plan(
        "jobs/ddp.yaml", nodes=2, cluster="here", clusters_file=clusters, run_id=run,
        settings=["threads_per_rank=1"], more_args=["--steps", "4"],
    )  # fmt: skip
    assert printed.to_text() == (api.get(run).path / "plan.txt").read_text()
    for file in printed.files:
        assert Path(file.path).read_bytes() == file.content()
    written = api.get(run).path / "files" / "compose.yaml"
    assert engine.run("compose", "--file", str(written), "config", "--quiet").stderr == ""


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "forkserver"])
def test_every_launcher_gives_ranks_environment_and_workdir(launcher: str, start: Start) -> None:
    code = (
        "import json, os\n"
        f"names = {CONTRACT!r}\n"
        "print(json.dumps([os.getcwd(), {name: os.environ.get(name) for name in names}]))"
    )
    run = start(words(code, launcher=launcher, gpus_per_node=2))
    status = ended(run)
    assert status.state is State.SUCCEEDED, status
    seen = {}
    for line in run.logs():
        if line.text.startswith('["/'):
            folder, seen[line.rank] = json.loads(line.text)
            assert folder == str(ROOT)
    assert sorted(seen, key=str) == [0, 1, 2, 3]
    for rank, env in seen.items():
        assert rank is not None
        wanted = {
            "RANK": str(rank), "LOCAL_RANK": str(rank % 2), "NODE_RANK": str(rank // 2),
            "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node-0",
            "MASTER_PORT": "29500", "CLUSTERKIT_RUN_DIR": str(run.path),
            "GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": "/run/clusterkit/python",
        }  # fmt: skip
        assert env == wanted


def test_elastic_torchrun_uses_both_containers(start: Start) -> None:
    run = start(program("environment.py", launcher="torchrun"), nodes="1:2")
    assert ended(run).state is State.SUCCEEDED
    envs = [json.loads(line.text)["env"] for line in run.logs() if line.text.startswith("{")]
    assert {env["WORLD_SIZE"] for env in envs} == {"2"}


def test_concurrent_submits_both_succeed(start: Start) -> None:
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda _: start(words("print('done')")), range(2)))
    for run in runs:
        assert ended(run).state is State.SUCCEEDED
        assert [line.text for line in run.logs()] == ["done", "done"]


def test_odd_names_of_home_workdir_and_volume_folders_work(
    start: Start, weird_tmp_path: Path, monkeypatch: Any
) -> None:
    home, data = weird_tmp_path / "home: a=b,c", weird_tmp_path / "data"
    data.mkdir()
    (data / "file").write_text("seen")
    monkeypatch.setenv("CLUSTERKIT_HOME", str(home))
    code = "import os; print(open('/data/file').read(), os.environ['HOME'], os.getcwd())"
    job = msgspec.structs.replace(words(code), workdir=str(weird_tmp_path))
    # A colon cannot stand in `volumes`; the folder above has none.
    run = start(job, volumes=[f"{data}:/data:ro"])
    assert ended(run).state is State.SUCCEEDED
    assert [line.text for line in run.logs()] == [f"seen /run/clusterkit/home {weird_tmp_path}"] * 2


def test_project_is_read_only_and_run_files_belong_to_submitter(start: Start) -> None:
    code = (
        "import os, pathlib\n"
        "try: pathlib.Path('written').write_text('x')\n"
        "except OSError as error: print(error.strerror)\n"
        "pathlib.Path(os.environ['CLUSTERKIT_RUN_DIR'], 'mine').write_text('x')\n"
        "pathlib.Path.home().joinpath('cache').write_text('x')\n"
    )
    run = start(words(code), nodes=1)
    assert ended(run).state is State.SUCCEEDED
    assert [line.text for line in run.logs()] == ["Read-only file system"]
    assert (run.path / "mine").stat().st_uid == os.getuid()


def test_submit_by_non_root_user_runs_containers_as_that_user(
    image: str, tmp_path: Path, clusterkit: list[str], engine: Any
) -> None:
    """As another user, whom the image does not know; in the group that may use the socket."""
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    socket = Path(engine.env.get("DOCKER_HOST", "unix:///var/run/docker.sock")[len("unix://") :])
    theirs = Path("/tmp") / f"compose-{os.getpid()}"
    theirs.mkdir()
    try:
        (theirs / "clusters.yaml").write_text(
            json.dumps({"here": {"backend": "compose", "image": image}})
        )
        (theirs / "train.py").write_text(
            "import getpass, os; print(getpass.getuser(), os.getuid())"
        )
        os.chown(theirs, 4242, 4242)
        argv = [
            "setpriv", "--reuid=4242", "--regid=4242", f"--groups={socket.stat().st_gid}",
            # The interpreter of the tests may lie in root's home.
            "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search",
            *clusterkit, "submit", "--cluster", "here", "--nodes", "2", "--", "python", "train.py",
        ]  # fmt: skip
        # Plugins of the client may lie where only root can read.
        plugins = Path(engine.env["DOCKER_CONFIG"]) / "cli-plugins"
        subprocess.run(["cp", "-rL", str(plugins), str(theirs / "cli-plugins")], check=True)
        own = {"CLUSTERKIT_HOME": str(theirs / "home"), "HOME": str(theirs)}
        own |= {"PYTHONPATH": str(ROOT), "DOCKER_CONFIG": str(theirs)}
        done = subprocess.run(
            argv,
            cwd=theirs,
            capture_output=True,
            text=True,
            timeout=SOON,
            env={**os.environ, **own},
        )
        assert done.returncode == 0, done.stderr
        folder = theirs / "home" / "runs" / done.stdout.strip()
        logs = sorted(folder.glob("attempts/1/*/log"))
        assert len(logs) == 2
        for log in logs:
            assert log.stat().st_uid == 4242
            assert log.read_text().endswith("clusterkit 4242\n")
    finally:
        subprocess.run(["rm", "-rf", str(theirs)], check=True)


# ---------------------------------------------------------------- secrets


def test_secret_reaches_ranks_but_no_command_line_or_file(
    start: Start, engine: Any, monkeypatch: pytest.MonkeyPatch, ugly_values: dict[str, str]
) -> None:
    token = "hunter2-Zq81-" + "|".join(ugly_values.values())
    monkeypatch.setenv("API_TOKEN", token)
    monkeypatch.setenv("EMPTY_TOKEN", "")
    code = (
        "import hashlib, os, signal\n"
        "print('ready', hashlib.sha256(os.environ['API_TOKEN'].encode()).hexdigest(),"
        " repr(os.environ['EMPTY_TOKEN']), flush=True)\n"
        "signal.pause()"
    )
    run = start(words(code, secrets=("API_TOKEN", "EMPTY_TOKEN")))
    ready(run)
    digest = hashlib.sha256(token.encode()).hexdigest()
    assert {line.text for line in run.logs()} == {f"ready {digest} ''"}
    needle = b"hunter2-Zq81"
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                assert needle not in (entry / "cmdline").read_bytes()
            except OSError:
                continue
    run.cancel()
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if needle in path.read_bytes()] == []
    # The engine keeps a container's environment in files of root's own, for as long as it is there.
    root = Path(engine.run("info", "--format", "{{.DockerRootDir}}").stdout.strip())
    if os.access(root, os.R_OK):
        done = subprocess.run(
            ["grep", "-rlF", needle.decode(), str(root / "containers"), str(root / "network")],
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.stdout == ""


# ---------------------------------------------------------------- restarts, watching, cancelling


@pytest.mark.thorough
def test_restart_after_container_kill_resumes_from_checkpoint(start: Start, engine: Any) -> None:
    spec = loader.load_job("jobs/ddp.yaml")
    spec = msgspec.structs.replace(
        spec,
        args=(*spec.args, "--steps", "400", "--eval-every", "0"),
        checkpoint=CheckpointSpec(every=2),
        restarts=1,
        threads_per_rank=1,
    )
    run = start(spec)
    for line in run.logs(follow=True):
        if (line.event or {}).get("event") == "checkpoint" and line.event["step"] >= 4:
            break
    engine.run("kill", node(run, 1))
    for line in run.logs(follow=True):
        if (line.event or {}).get("event") == "resumed":
            break
    else:
        pytest.fail(f"it did not go on: {run.status()}")
    resumed = line.event["step"]
    assert resumed >= 4
    assert run.status().attempt == 2
    assert run.cancel().state is State.CANCELLED
    steps = [row["step"] for row in run.metrics()]
    assert steps.count(resumed) == 1
    assert "killed from outside" in run.events()[0].text
    assert left_over(engine) == []


def test_restart_after_rank_failure_reuses_containers(start: Start, engine: Any) -> None:
    code = (
        "import os, sys; print('ready', flush=True); "
        "sys.exit(7 * (os.environ['CLUSTERKIT_ATTEMPT'] + os.environ['RANK'] == '11'))"
    )
    run = start(words(code, restarts=1))
    status = run.wait(SOON)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 2)
    (earlier,) = status.attempts
    assert earlier.failure is not None
    assert (earlier.failure.node, earlier.failure.exit_code) == (1, 7)
    steps = (run.path / "steps.jsonl").read_text().splitlines()
    assert {json.loads(step)["attempt"] for step in steps} == {1}
    assert left_over(engine) == []


@pytest.mark.thorough
def test_shrink_continues_on_remaining_container(start: Start, engine: Any) -> None:
    code = (
        "import os, time; world = os.environ['WORLD_SIZE']; print('ready', world, flush=True); "
        "time.sleep(600 if world == '2' else 0)"
    )
    run = start(words(code, on_node_loss="shrink"), nodes="1:2")
    ready(run)
    engine.run("kill", node(run, 1))
    status = run.wait(SOON)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 1)
    assert [line.node for line in run.logs() if line.text == "ready 1"] == [0]
    assert run.events()[-1].text == "1 of 2 elastic nodes failed"
    assert left_over(engine) == []


@pytest.mark.thorough
def test_elastic_run_restarts_lost_container_and_rejoins_it(start: Start, engine: Any) -> None:
    code = (
        "import os, time; world = os.environ['WORLD_SIZE']; print('ready', world, flush=True); "
        "begun = os.environ['CLUSTERKIT_NODE_DIR'] + '/begun'; "
        "again = world == '2' and os.path.exists(begun); open(begun, 'w').close(); "
        "time.sleep(0 if again else 600)"
    )
    run = start(words(code, on_node_loss="shrink"), nodes="1:2")
    ready(run)
    engine.run("kill", node(run, 1))
    status = run.wait(2 * SOON)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 1)
    assert [each.state for each in status.nodes] == [State.SUCCEEDED] * 2
    said = [(line.node, line.text) for line in run.logs() if line.text.startswith("ready")]
    assert sorted(said[:2]) == sorted(said[-2:]) == [(0, "ready 2"), (1, "ready 2")]
    # On a busy machine it may be back before the other one has missed it.
    assert said[2:-2] in ([], [(0, "ready 1")])
    assert run.events()[-1].text == "node 1 was started again, to join the others"
    assert left_over(engine) == []


def test_cancel_removes_containers_and_network_and_is_repeatable(start: Start, engine: Any) -> None:
    run = start(words(WAIT))
    ready(run)
    assert len(left_over(engine)) == 3
    for _ in range(2):
        status = run.cancel()
        assert (status.state, status.exit_code) == (State.CANCELLED, 130)
        assert left_over(engine) == []
    assert {line.text for line in run.logs()} == {"ready"}


def test_run_of_killed_supervisor_can_be_attached_and_cancelled(start: Start, engine: Any) -> None:
    run = start(words(WAIT))
    ready(run)
    supervisors.kill(run)
    status = run.status()
    assert status.state is State.RUNNING
    assert "its supervisor is gone" in (status.remark or "")
    run.attach()
    assert agent.is_alive(json.loads((run.path / "supervisor.json").read_text()))
    supervisors.kill(run)
    # The file is not needed to find what belongs to the run.
    (run.path / "files" / "compose.yaml").unlink()
    assert run.cancel().state is State.CANCELLED
    assert left_over(engine) == []


def test_wait_cleans_up_run_that_ended_without_supervisor(
    start: Start, engine: Any, module_home: Path
) -> None:
    go = module_home / "go"
    os.mkfifo(go)
    code = "print('ready', flush=True); print(open('go').read())"
    job = msgspec.structs.replace(words(code), workdir=str(module_home))
    run = start(job, nodes=1)
    ready(run, 1)
    supervisors.kill(run)
    go.write_text("went on")
    status = ended(run)
    assert status.state is State.SUCCEEDED
    assert left_over(engine) == []
    assert [line.text for line in run.logs()] == ["ready", "went on"]
    assert run.status() == status


def test_cancel_with_damaged_plan_file_removes_containers(start: Start, engine: Any) -> None:
    run = start(words(WAIT))
    ready(run)
    supervisors.kill(run)
    (run.path / "plan.json").write_text("{")
    run.cancel()
    assert left_over(engine) == []
