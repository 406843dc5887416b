"""The compose backend against a real docker engine: runs, faults, and nothing left of either."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clusterkit import agent, api
from clusterkit.backends.compose.compose_file import container_name
from clusterkit.jobfile import loader
from clusterkit.run.status import RunStatus, State
from clusterkit.spec import CheckpointSpec, JobSpec
from tests.live import inside, supervisors

ROOT = Path(__file__).parents[3]
PROGRAMS = ROOT / "tests" / "live" / "programs"
SOON = 180.0
"""Seconds after which a test says that something hangs."""
PATIENCE = 4.0
"""Seconds without a sign of life after which a node counts as lost, here."""
CRASH_SECONDS = 10.0
"""Within which a run has ended after a crash."""
SILENT_SECONDS = CRASH_SECONDS + 2 * PATIENCE
"""The same where nothing says that anything is wrong, but that nothing is said."""
WAIT = "import signal; print('ready', flush=True); signal.pause()"
"""A rank that waits to be ended."""
CONTRACT = (
    "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT", "CLUSTERKIT_RUN_DIR", "GLOO_SOCKET_IFNAME", "PYTHONPATH",
)  # fmt: skip
Start = Callable[..., api.Run]

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]  # the first one has the image built


@pytest.fixture(scope="module")
def module_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One CLUSTERKIT_HOME for all tests here: what an image holds is asked once."""
    home = tmp_path_factory.mktemp("compose") / "home"
    home.mkdir()
    return home


@pytest.fixture(autouse=True)
def own_home(
    module_home: Path, engine: Any, image: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Its environment; and nothing of any run is in the engine once a test is over."""
    for name, value in engine.env.items():
        if name.startswith("DOCKER_") or name == "PATH":
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("CLUSTERKIT_HOME", str(module_home))
    monkeypatch.chdir(ROOT)
    yield module_home
    assert left_over(engine) == []


def left_over(engine: Any) -> list[str]:
    """Containers and networks of any run."""
    found = []
    for kind in ("container", "network"):
        words = ["ls", *(["--all"] if kind == "container" else [])]
        words += ["--filter", "label=clusterkit.run", "--format", "{{.ID}}"]
        found += engine.run(kind, *words).stdout.split()
    return found


@pytest.fixture
def start(image: str, tmp_path: Path) -> Iterator[Start]:
    """``start(job, nodes=2, memory="256m")``: a run, with keys of the cluster entry of its own."""
    started: list[api.Run] = []
    number = 0

    def run(job: JobSpec, *, nodes: int | str = 2, **entry: Any) -> api.Run:
        nonlocal number
        number += 1
        clusters = tmp_path / f"clusters{number}.yaml"
        fields = {"backend": "compose", "image": image, "stop_grace": 2, **entry}
        clusters.write_text(json.dumps({"here": fields}))
        found = api.submit(job, cluster="here", clusters_file=clusters, nodes=nodes)
        started.append(found)
        return found

    yield run
    for one in started:
        one.cancel()


def program(name: str, *args: object, **fields: Any) -> JobSpec:
    return JobSpec(
        name=Path(name).stem,
        program=str(PROGRAMS / name),
        args=tuple(map(str, args)),
        **{"launcher": "forkserver", **fields},
    )


def words(code: str, **fields: Any) -> JobSpec:
    """A rank that runs a line of Python; torch is not imported."""
    command = ("python3", "-c", code)
    return JobSpec(name="words", command=command, **{"launcher": "forkserver", **fields})


def ready(run: api.Run, ranks: int = 2) -> None:
    """Return once every rank has said so."""
    seen = set()
    for line in run.logs(follow=True):
        if line.text.startswith("ready"):
            seen.add(line.rank)
        if len(seen) == ranks:
            return
    pytest.fail(f"only ranks {seen} got ready: {run.status()}")


def ended(run: api.Run, *, within: float = SOON) -> RunStatus:
    begun = time.monotonic()
    status = run.wait(SOON)
    assert time.monotonic() - begun < within, status
    return status


def node(run: api.Run, number: int) -> str:
    return container_name(run.id, number)


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


# ---------------------------------------------------------------- faults


def after(run: api.Run, engine: Any, *command: str, within: float = CRASH_SECONDS) -> RunStatus:
    """How a run ends after a command to the engine, and that it does so in time."""
    ready(run)
    begun = time.monotonic()
    engine.run(*command)
    status = run.wait(SOON)
    spent = time.monotonic() - begun
    assert status.state is State.FAILED, status
    assert spent < within, f"{spent:.1f} s: {status}"
    assert left_over(engine) == []
    return status


def test_status_names_node_of_killed_container(start: Start, engine: Any) -> None:
    run = start(words(WAIT))
    failure = after(run, engine, "kill", node(run, 1)).failure
    assert failure is not None
    assert (failure.node, failure.exit_code) == (1, 137)
    assert "its container was killed from outside" in failure.cause


@pytest.mark.parametrize("victim", [0, 1])
def test_status_names_node_of_paused_container(start: Start, engine: Any, victim: int) -> None:
    run = start(words(WAIT), lost_after=PATIENCE)
    failure = after(run, engine, "pause", node(run, victim), within=SILENT_SECONDS).failure
    assert failure is not None
    assert failure.node == victim
    assert "paused" in failure.cause


def test_status_names_node_disconnected_from_network(start: Start, engine: Any) -> None:
    run = start(words(WAIT), lost_after=PATIENCE)
    ready(run)
    network = f"clusterkit-{run.id}_default"
    cut = ("network", "disconnect", network, node(run, 1))
    failure = after(run, engine, *cut, within=SILENT_SECONDS).failure
    assert failure is not None
    assert failure.node == 1
    assert "cut off from the run's network" in failure.cause


def test_status_names_node_of_stopped_or_removed_container(start: Start, engine: Any) -> None:
    for command, words_of_it in ((("stop",), "stopped"), (("rm", "--force"), "removed")):
        run = start(words(WAIT))
        failure = after(run, engine, *command, node(run, 1)).failure
        assert failure is not None
        assert failure.node == 1, failure
        assert words_of_it in failure.cause


def test_killed_rank_fails_run_and_status_names_rank(start: Start, engine: Any) -> None:
    run = start(words(WAIT))
    ready(run)
    path = run.path / "attempts/1/node-1/ranks.jsonl"
    pid = json.loads(path.read_text().splitlines()[0])["pid"]  # as it is called in there
    status = after(run, engine, "exec", node(run, 1), "sh", "-c", f"kill -9 {pid}")
    failure = status.failure
    assert failure is not None
    assert (failure.node, failure.rank, failure.exit_code) == (1, 1, 137)
    assert "SIGKILL" in failure.cause


def test_status_names_rank_and_node_over_memory_limit(start: Start, engine: Any) -> None:
    code = (
        "import os, signal\n"
        "held = []\n"
        "while os.environ['RANK'] == '1': held.append(b'x' * (8 << 20))\n"
        "signal.pause()"
    )
    run = start(words(code), memory="128m")
    status = ended(run)
    failure = status.failure
    assert failure is not None, status
    assert (failure.node, failure.rank, failure.exit_code) == (1, 1, 137)
    assert failure.cause == "OOMKilled: its container used more than its memory limit of 128 MiB"
    assert "memory" in (failure.hint or "")
    assert left_over(engine) == []


def test_status_names_node_of_container_killed_during_start(start: Start, engine: Any) -> None:
    """Before its node has said a word."""
    hit: list[str] = []
    command = [
        "docker", "events", "--filter", "event=create", "--filter", "label=clusterkit.node=1",
        "--format", "{{.ID}}",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=engine.env) as events:
        assert events.stdout is not None

        def strike() -> None:
            container = events.stdout.readline().strip()  # type: ignore[union-attr]
            deadline = time.monotonic() + SOON
            kill = ("kill", container)
            while engine.run(*kill, check=False).returncode and time.monotonic() < deadline:
                pass
            hit.append(container)

        striker = threading.Thread(target=strike)
        striker.start()
        try:
            run = start(words(WAIT))
            status = ended(run)
        finally:
            events.kill()
            striker.join(SOON)
    assert hit
    assert hit[0]
    assert status.state is State.FAILED
    assert status.failure is not None
    assert status.failure.node == 1
    assert "killed from outside" in status.failure.cause
    assert left_over(engine) == []


def test_missing_job_command_fails_run_with_exit_code_127(start: Start) -> None:
    run = start(JobSpec(name="none", command=("/nothing",), launcher="forkserver"), nodes=1)
    status = ended(run)
    assert status.state is State.FAILED
    assert status.failure is not None
    assert status.failure.exit_code == 127


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


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("entry", "environment", "said"),
    [
        ({"image": "clusterkit:nothing"}, {}, r"the docker engine has no clusterkit:nothing"),
        ({"context": "nowhere"}, {}, r"context: docker has no context 'nowhere'"),
        ({}, {"DOCKER_HOST": "unix:///nowhere.sock"}, r"no docker engine answers at unix:///no"),
        ({}, {"DOCKER_HOST": "ssh://u@far"}, r"the engine at ssh://u@far is on another machine"),
        ({}, {"PATH": "/nowhere"}, r"backend compose needs docker, which is not installed"),
        ({"python": "python7"}, {}, r"image clusterkit:cpu has no python7"),
        ({"volumes": ["nothing-here:/x"]}, {}, r"docker has no volume nothing-here"),
        ({"volumes": ["/nothing/here:/x"]}, {}, r"volumes: /nothing/here does not exist"),
        ({"memory": "much"}, {}, r"memory: 'much' is not a size"),
        ({"gpus": 3}, {}, r"gpus: 3 wanted, but this machine has 0"),
    ],
    ids=lambda value: re.sub(r"\W+", "-", str(value))[:40],
)
def test_submit_refuses_unusable_entry_or_engine_with_hint(
    entry: dict[str, Any], environment: dict[str, str], said: str,
    image: str, tmp_path: Path, module_home: Path,
) -> None:  # fmt: skip
    refused(tmp_path, {"image": image, **entry}, environment, said)


def refused(
    tmp_path: Path, entry: dict[str, Any], environment: dict[str, str], said: str,
    prefix: tuple[str, ...] = (),
) -> None:  # fmt: skip
    clusters = tmp_path / "clusters.yaml"
    clusters.write_text(json.dumps({"here": {"backend": "compose", **entry}}))
    home = tmp_path / "home"
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "clusterkit", "submit", "--cluster", "here",
         "--cluster-file", str(clusters), "--", "python", "jobs/train/gpt/train.py"],
        capture_output=True, text=True, timeout=SOON,
        env={**os.environ, "CLUSTERKIT_HOME": str(home), **environment},
    )  # fmt: skip
    assert done.returncode == 125, done.stderr
    assert done.stdout == ""
    first, *rest = done.stderr.splitlines()
    assert re.match(rf"error: .*{said}", first), done.stderr
    assert rest
    assert all(line.strip().startswith("hint: ") for line in rest), done.stderr
    assert not list(home.glob("runs/*"))


def test_submit_refuses_subnet_in_use(engine: Any, image: str, tmp_path: Path) -> None:
    shape = "{{range .IPAM.Config}}{{.Subnet}}{{end}}"
    taken = engine.run("network", "inspect", "bridge", "--format", shape).stdout.strip()
    refused(tmp_path, {"image": image, "subnet": taken}, {}, "is taken: docker's network bridge")


def test_submit_refuses_docker_client_without_compose_plugin(image: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    environment = {"DOCKER_CONFIG": str(tmp_path / "empty"), "HOME": str(tmp_path)}
    refused(tmp_path, {"image": image}, environment, "docker has no compose plugin")


def test_submit_refuses_user_without_permission_for_docker_engine(
    image: str, tmp_path: Path
) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    nobody = ("setpriv", "--reuid=4242", "--regid=4242", "--clear-groups")
    tmp_path.chmod(0o755)
    for folder in tmp_path.parents[:3]:  # one of them is a worker's of pytest-xdist
        if folder != Path(tempfile.gettempdir()):
            folder.chmod(0o755)
    refused(tmp_path, {"image": image}, {}, "you may not use the docker engine", nobody)


def test_submit_refuses_ulimit_that_engine_may_not_set(
    engine: Any, image: str, tmp_path: Path
) -> None:
    probe = ["run", "--rm", "--network", "none", "--ulimit", "memlock=-1", "--entrypoint", "true"]
    if engine.run(*probe, image, check=False).returncode == 0:
        pytest.skip("this engine may set every limit")
    entry = {"image": image, "ulimits": {"memlock": -1}}
    refused(tmp_path, entry, {}, "ulimits: the docker engine may not set")


def test_bench_measures_between_containers(
    image: str, tmp_path: Path, clusterkit: list[str]
) -> None:
    clusters = tmp_path / "clusters.yaml"
    clusters.write_text(json.dumps({"here": {"backend": "compose", "image": image}}))
    line = f"bench --nodes 2 --cluster here --cluster-file {shlex.quote(str(clusters))} --json"
    options = ["--collectives", "all_reduce", "--sizes", "1K,64K", "--iterations", "2"]
    done = subprocess.run(
        [*clusterkit, *shlex.split(line), *options], capture_output=True, text=True, timeout=SOON
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


def test_commands_inside_containers(start: Start, tmp_path: Path) -> None:
    run = start(words(WAIT))
    ready(run)
    inside.exec_works(run)
    inside.files_are_copied(run, tmp_path)
    inside.port_is_forwarded(run)
    run.cancel()
    inside.refused_after_end(run)
