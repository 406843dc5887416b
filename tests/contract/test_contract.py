"""The promises that every backend keeps, one suite for all of them.

A backend joins by standing in the registry and having a `Stage` in conftest.py.
"""

import copy
import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from clusterkit import backends
from clusterkit.agent import PEER_TOKEN
from clusterkit.backends.base import Backend, Observation, check_capabilities
from clusterkit.cluster import CLUSTER_TYPES
from clusterkit.errors import BadInput, CapabilityError, SubmitFailed, Unavailable
from clusterkit.jobfile import loader
from clusterkit.lifecycle import inside
from clusterkit.plan import Plan
from clusterkit.run import folder as run_folder
from clusterkit.run.status import State
from clusterkit.shell import Secret
from clusterkit.spec import BatchSpec, CheckpointSpec, JobSpec
from clusterkit.transport import Transport

ROOT = Path(__file__).resolve().parents[2]
JOB_FILES = sorted((ROOT / "jobs").rglob("*.yaml"))
PROGRAMS = Path(__file__).parent / "programs"
STAMP = b"2026-11-21T20:11:58.%06dZ"

KINDS_OF_JOB = {
    "torchrun": {"launcher": "torchrun"},
    "torchrun on two nodes": {"launcher": "torchrun", "nodes": 2, "gpus_per_node": 2},
    "elastic torchrun": {"launcher": "torchrun", "nodes": "1:4"},
    "deepspeed": {
        "launcher": "deepspeed",
        "nodes": 2,
        "deepspeed": {"zero_optimization": {"stage": 3}},
        "batch": BatchSpec(global_size=64, micro=8),
    },
    "mpirun": {"launcher": "mpirun", "nodes": 2},
    "forkserver": {"launcher": "forkserver", "checkpoint": CheckpointSpec()},
    "forkserver on two nodes": {"nodes": 2, "gpus_per_node": 2},
    "module": {"program": None, "module": "json.tool"},
    "command": {"program": None, "command": ("./train.sh", "--a b")},
}


@pytest.fixture(params=KINDS_OF_JOB)
def any_job(request, demo):
    return demo(**KINDS_OF_JOB[request.param])


# ---------------------------------------------------------------- registration


def test_every_registered_backend_has_contract_stage(staged_names):
    assert staged_names == set(backends.NAMES)


def test_every_backend_has_cluster_entry_type():
    assert set(CLUSTER_TYPES) == set(backends.NAMES)


def test_backend_type_of_name_is_concrete_and_has_summary(stage):
    kind = backends.backend_type(stage.name)
    assert issubclass(kind, Backend)
    assert kind.name == stage.name
    assert kind.summary
    assert not kind.__abstractmethods__


def test_unsupported_features_are_job_fields_with_reason(stage):
    fields = {field.name for field in msgspec.structs.fields(JobSpec)}
    for field, reason in type(stage.backend).unsupported.items():
        assert field.partition("=")[0] in fields
        assert reason


# ---------------------------------------------------------------- 1, 2: purity


def test_planning_same_job_twice_gives_identical_plan(stage, any_job):
    first, second = stage.plan(any_job), stage.plan(any_job)
    assert first == second
    assert first.to_json() == second.to_json()
    assert first.to_text() == second.to_text()


def test_planning_does_not_touch_files_env_processes_clock_or_random(stage, any_job, forbidden):
    expected, facts = stage.plan(any_job), stage.facts_of()
    with forbidden():
        plan = stage.plan(any_job, facts)
        text, document = plan.to_text(), plan.to_json()
    assert plan == expected
    assert (text, document) == (expected.to_text(), expected.to_json())


def test_forbidden_fixture_catches_files_env_processes_clock_and_random(forbidden):
    for touch in (
        lambda: open("/dev/null"),  # noqa: SIM115 (it is never opened)
        lambda: Path("/").exists(),
        lambda: os.environ["PATH"],
        lambda: os.environ.get("PATH"),
        lambda: subprocess.run(["true"]),
        lambda: threading.Thread(target=print).start(),
        lambda: __import__("time").time(),
        lambda: __import__("random").random(),
        lambda: __import__("uuid").uuid4(),
        lambda: __import__("socket").socket(),
    ):
        with forbidden(), pytest.raises(AssertionError, match="a plan must not touch"):
            touch()


def test_forbidden_fixture_does_not_affect_other_threads(forbidden):
    begin = threading.Event()

    def others():
        begin.wait()
        with open(os.devnull) as file, socket.socket() as made:
            return (
                file.read(), Path("/").exists(), os.environ["PATH"],
                isinstance(made, socket.socket), subprocess.run(["true"]).returncode,
                time.time() > 0,
            )  # fmt: skip

    with ThreadPoolExecutor() as pool:
        seen = pool.submit(others)
        try:
            with forbidden():
                begin.set()
                found = seen.result(60)
        finally:
            begin.set()  # the pool waits for its thread
    assert found == ("", True, os.environ["PATH"], True, 0, True)


def test_planning_does_not_modify_job_cluster_or_facts(stage, any_job):
    facts, cluster = stage.facts_of(), stage.cluster()
    before = copy.deepcopy((any_job, cluster, facts))
    stage.plan(any_job, facts, cluster=cluster)
    assert (any_job, cluster, facts) == before


def test_plan_is_unaffected_by_later_changes_to_job(stage, demo):
    job = demo(deepspeed={"zero_optimization": {"stage": 1}}, env={"A": "1"})
    plan = stage.plan(job)
    before = plan.to_json()
    job.deepspeed["zero_optimization"]["stage"] = 3
    job.env["A"] = "2"
    assert plan.to_json() == before


@pytest.mark.parametrize("path", JOB_FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("nodes", [1, 2])
def test_every_repository_job_file_can_be_planned(stage, path, nodes, monkeypatch):
    monkeypatch.chdir(ROOT)
    job = msgspec.structs.replace(loader.load_job(path), nodes=nodes)
    plan = stage.plan(job)
    assert plan.world_size >= nodes
    assert plan == stage.plan(job)


def test_plan_round_trips_through_json(stage, any_job):
    plan = stage.plan(any_job)
    assert msgspec.json.decode(plan.to_json(), type=Plan) == plan


# ---------------------------------------------------------------- 3, 4: what a rank sees


def dumped(folder):
    ranks = {}
    for path in sorted(folder.iterdir()):
        seen = json.loads(path.read_text())
        ranks[int(seen["env"]["RANK"])] = seen
    return ranks


@pytest.fixture
def dump_dir(tmp_path):
    folder = tmp_path / "dump"
    folder.mkdir()
    return folder


def test_every_rank_gets_all_environment_variables_and_workdir(stage, demo, run_nodes, dump_dir):
    job = demo(nodes=2, gpus_per_node=2, env={"DUMP_DIR": str(dump_dir)})
    plan = stage.plan(job)
    assert run_nodes(stage, plan) == [0, 0]
    seen = dumped(dump_dir)
    assert sorted(seen) == [0, 1, 2, 3]
    for rank, one in seen.items():
        env = one["env"]
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % 2),
            "NODE_RANK": str(rank // 2),
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": stage.address(plan),
            "MASTER_PORT": str(plan.port),
            "CLUSTERKIT_RUN_ID": plan.run_id,
            "CLUSTERKIT_RUN_DIR": plan.run_dir,
            "CLUSTERKIT_JOB": "demo",
        }
        assert {name: env.get(name) for name in expected} == expected
        assert one["cwd"] == str(PROGRAMS)


def test_env_and_args_reach_ranks_unaltered(stage, demo, run_nodes, dump_dir, ugly_values):
    words = [*ugly_values.values(), "--", "-x", "--nproc", "7"]
    scripts_own = dict.fromkeys(
        ["run_dir", "node_dir", "slot", "pipe", "IS_HOST", "name"], "user's"
    )
    of_cluster = {f"CLUSTER_{name}": value for name, value in ugly_values.items()}
    job = demo(args=tuple(words), env={**ugly_values, **scripts_own})
    cluster = stage.cluster(env={"DUMP_DIR": str(dump_dir), **of_cluster})
    assert run_nodes(stage, stage.plan(job, cluster=cluster)) == [0]
    (seen,) = dumped(dump_dir).values()
    for written in (ugly_values, of_cluster, scripts_own):
        assert {name: seen["env"].get(name) for name in written} == written
    assert seen["argv"] == words


def test_run_works_with_odd_folder_names_and_long_job_name(
    stage, demo, run_nodes, dump_dir, weird_tmp_path
):
    program = weird_tmp_path / "my $program's.py"
    program.write_bytes((PROGRAMS / "dump.py").read_bytes())
    name = "n" * 200
    job = demo(
        name=name, program=program.name, workdir=str(weird_tmp_path),
        env={"DUMP_DIR": str(dump_dir)},
    )  # fmt: skip
    home = str(weird_tmp_path / "home")
    plan = stage.plan(job, stage.facts_of(home=home), run_folder.new_run_id(name))
    assert run_nodes(stage, plan) == [0]
    (seen,) = dumped(dump_dir).values()
    assert seen["cwd"] == str(weird_tmp_path)
    assert seen["env"]["CLUSTERKIT_RUN_DIR"] == plan.run_dir
    assert seen["env"]["CLUSTERKIT_JOB"] == name


def test_stale_torchrun_variables_of_submitter_do_not_reach_ranks(stage, demo, run_nodes, dump_dir):
    job = demo(gpus_per_node=2, env={"DUMP_DIR": str(dump_dir)})
    stale = {
        "RANK": "9", "LOCAL_RANK": "9", "WORLD_SIZE": "99", "LOCAL_WORLD_SIZE": "99",
        "MASTER_ADDR": "elsewhere", "MASTER_PORT": "1", "GROUP_RANK": "9",
        "TORCHELASTIC_RUN_ID": "old",
    }  # fmt: skip
    plan = stage.plan(job)
    assert run_nodes(stage, plan, **stale) == [0]
    seen = dumped(dump_dir)
    assert sorted(seen) == [0, 1]
    for one in seen.values():
        assert one["env"]["WORLD_SIZE"] == "2"
        assert one["env"]["MASTER_ADDR"] == stage.address(plan)
        assert one["env"]["GROUP_RANK"] == "0"
        assert one["env"]["TORCHELASTIC_RUN_ID"] == plan.run_id


# ---------------------------------------------------------------- 5: secrets

TOKEN = "hunter2-Zq81-correct-horse"


def test_plan_text_json_and_repr_omit_secret_value(stage, demo, monkeypatch):
    monkeypatch.setenv("API_TOKEN", TOKEN)
    plan = stage.plan(demo(secrets=("API_TOKEN",)))
    assert "API_TOKEN" in plan.to_text()
    assert TOKEN not in plan.to_text()
    assert TOKEN not in plan.to_json().decode()
    assert TOKEN not in repr(plan)


def test_secret_reaches_ranks_but_no_file_of_run_folder(
    stage, demo, run_nodes, dump_dir, clusterkit_home
):
    job = demo(secrets=("API_TOKEN",), env={"DUMP_DIR": str(dump_dir)})
    plan = stage.plan(job)
    assert run_nodes(stage, plan, API_TOKEN=TOKEN) == [0]
    (seen,) = dumped(dump_dir).values()
    assert seen["env"]["API_TOKEN"] == TOKEN
    written = [path for path in Path(plan.run_dir).rglob("*") if path.is_file()]
    assert len(written) >= 5
    for path in written:
        assert TOKEN.encode() not in path.read_bytes(), path


def test_secret_is_absent_from_command_lines_of_all_processes(stage, demo, tmp_path):
    ready, go = tmp_path / "ready", tmp_path / "go"
    os.mkfifo(ready)
    os.mkfifo(go)
    job = demo(
        program=str(PROGRAMS / "wait.py"),
        secrets=("API_TOKEN",),
        env={"READY": str(ready), "GO": str(go)},
    )
    plan = stage.plan(job)
    stage.write_files(plan)
    (step,) = stage.node_steps(plan)
    node = subprocess.Popen(
        step.argv, env={"PATH": os.environ["PATH"], **step.env, "API_TOKEN": TOKEN}
    )
    assert ready.read_text() == "here\n"  # waits for the rank
    shown, theirs = [], 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            theirs += os.fsencode(plan.run_dir) in command
            shown.append(command)
    go.write_text("")  # lets the rank end
    assert node.wait(60) == 0
    assert theirs >= 1
    assert not [command for command in shown if TOKEN.encode() in command]


def test_recorded_submit_steps_omit_secret_value(stage, demo, recording):
    records, plan = [], stage.plan(demo(secrets=("API_TOKEN",)))
    stage.begin(plan)
    stage.backend.submit(
        plan,
        recording(),
        secrets={"API_TOKEN": Secret("API_TOKEN", TOKEN)},
        record=lambda step, outcome: records.append((step, outcome)),
    )
    assert records
    assert TOKEN not in repr(records)


def test_nodes_that_watch_each_other_share_new_peer_token_per_attempt(stage, demo, recording):
    alone, several = stage.plan(demo()), stage.plan(demo(nodes=2))
    assert not any(PEER_TOKEN in step.secrets for step in alone.steps)
    watching = any("CLUSTERKIT_COORDINATOR=" in (file.text or "") for file in several.files)
    assert watching == (stage.watch_each_other)
    given = []
    stage.begin(several)
    for attempt in (1, 2):
        transport = recording()
        stage.backend.submit(several, transport, attempt=attempt)
        given.append({env[PEER_TOKEN] for *_, env in transport.commands if PEER_TOKEN in env})
        for token in given[-1]:
            assert all(token.encode() not in put[2] for put in transport.puts)
            assert all(token not in word for command in transport.commands for word in command[2])
    assert [len(tokens) for tokens in given] == [watching, watching]
    assert not given[0] & given[1]


# ---------------------------------------------------------------- 6: capabilities


def test_unsupported_job_field_is_refused_by_name(stage, demo):
    kind = type(stage.backend)
    everyone = [backends.backend_type(name) for name in backends.NAMES]
    check_capabilities(kind, demo(), everyone)
    for field in kind.unsupported:
        key, _, value = field.partition("=")
        job = msgspec.structs.replace(demo(), **{key: value or ("x",)})
        with pytest.raises(CapabilityError, match=f"{kind.name} does not support {field}: "):
            check_capabilities(kind, job, everyone)


@pytest.mark.parametrize(
    "fields",
    [
        {"env": {"RANK": "0"}},
        {"args": ("${clusterkit.nothing}",)},
        {"batch": BatchSpec(global_size=7, micro=2)},
        {"device": "cuda"},
        {"deepspeed": {"train_batch_size": 3}, "batch": BatchSpec(global_size=4)},
    ],
    ids=str,
)
def test_planning_refuses_invalid_job_and_names_field(stage, demo, fields):
    with pytest.raises(BadInput, match=r"env\.RANK|args|batch|device|deepspeed"):
        stage.plan(demo(**fields))


# ---------------------------------------------------------------- 7: names


@pytest.mark.parametrize("name", ["x" * 200, "Weird Name_ü.v2", "--", "日本"])
def test_any_job_name_gives_valid_run_id_and_file_names(stage, demo, name):
    run_id = run_folder.new_run_id(name)
    plan = stage.plan(demo(name=name), run_id=run_id)
    assert run_folder.RUN_ID.match(plan.run_id)
    assert len(plan.run_id) <= run_folder.RUN_ID_MAX
    assert all(len(part.encode()) <= 255 for file in plan.files for part in file.path.split("/"))


# ---------------------------------------------------------------- 8, 14: submitting


def in_steps(plan, commands):
    """What was carried out: the requests of one step, which are sent at once, as one."""
    left, found = list(commands), []
    for step in plan.steps:
        count = len(step.argv) - 1 if step.kind == "request" else 1
        one, left = left[:count], left[count:]
        if count != 1 or step.kind == "request":
            methods = {method for *_, (method, _), _ in one}
            paths = sorted((path for *_, (_, path), _ in one), key=step.argv.index)
            env = {name: value for *_, given in one for name, value in given.items()}
            one = [("request", one[0][1], (*methods, *paths), env)]
        found += one
    return found + left


def test_submit_executes_files_and_steps_of_plan_in_order_per_host(stage, any_job, recording):
    plan, transport = stage.plan(any_job), recording()
    stage.begin(plan)
    given = {name: Secret(name, TOKEN) for step in plan.steps for name in step.secrets}
    stage.backend.submit(plan, transport, secrets=given)
    # Hosts are served at once; on each of them the order is the plan's.
    for host in dict.fromkeys((*plan.hosts, *(step.host for step in plan.steps))):
        assert [put[1:] for put in transport.puts if put[0] == host] == [
            (file.path, file.content(), file.mode) for file in plan.files
        ]
        asked = [command for command in transport.commands if command[1] == host]
        on_host = [step for step in plan.steps if step.host == host]
        assert in_steps(msgspec.structs.replace(plan, steps=on_host), asked) == [
            (
                step.kind,
                step.host,
                step.argv,
                {
                    **step.env,
                    "CLUSTERKIT_ATTEMPT": "1",
                    **({"CLUSTERKIT_RUN_DIR": plan.run_dir} if step.kind == "start" else {}),
                    **dict.fromkeys(step.secrets, TOKEN),
                },
            )
            for step in on_host
        ]
    assert {put[0] for put in transport.puts} == {command[1] for command in transport.commands} | (
        set(plan.hosts)
    )


def test_submit_of_later_attempt_differs_only_in_attempt_number(stage, demo, recording):
    plan, first, third = stage.plan(demo()), recording(), recording()
    stage.begin(plan)
    stage.backend.submit(plan, first, attempt=1)
    stage.backend.submit(plan, third, attempt=3)
    assert third.puts == first.puts
    for one, other in zip(
        in_steps(plan, first.commands), in_steps(plan, third.commands), strict=True
    ):
        assert other == (*one[:3], one[3] | {"CLUSTERKIT_ATTEMPT": "3"})


def test_submit_records_every_step_of_plan(stage, demo, recording):
    plan, records = stage.plan(demo(nodes=2)), []
    stage.begin(plan)
    stage.backend.submit(plan, recording(), record=lambda step, outcome: records.append(step))
    assert sorted(records, key=plan.steps.index) == list(plan.steps)


def test_submit_fails_and_records_command_that_cannot_start(stage, demo, recording):
    class Broken(recording):
        def start(self, host, argv, *, env=None):
            raise SubmitFailed(f"cannot start {argv[0]} on {host}: Permission denied")

        def run(self, host, argv, *, env=None, timeout=None, stdin=b""):
            raise SubmitFailed(f"cannot start {argv[0]} on {host}: Permission denied")

        def request(self, to, method, path, *body):
            raise SubmitFailed(f"cannot start {method} {path}: Permission denied")

    records, plan = [], stage.plan(demo())
    stage.begin(plan)
    with pytest.raises(SubmitFailed, match=r"cannot start .*: Permission denied"):
        stage.backend.submit(plan, Broken(), record=lambda step, outcome: records.append(outcome))
    assert len(records) == 1
    assert "Permission denied" in records[0]


def test_recording_transport_has_every_transport_method(recording):
    wanted = {name for name in vars(Transport) if not name.startswith("_")}
    assert wanted <= set(dir(recording))


# ---------------------------------------------------------------- 10, 11: status


@pytest.fixture
def handle(stage, demo):
    return stage.handle(stage.plan(demo(nodes=2)))


def test_status_of_unknown_run_is_none(stage, handle):
    assert stage.backend.status(handle, stage.transport) is None


def test_status_of_run_before_first_node_starts_is_pending(stage, handle):
    stage.begin(handle.plan)
    seen = stage.backend.status(handle, stage.transport)
    assert isinstance(seen, Observation)
    assert seen.state is State.PENDING
    assert [node.state for node in seen.nodes] == [State.PENDING, State.PENDING]


def test_status_maps_every_known_native_state(stage, handle):
    for attempt, (state, native) in enumerate(stage.NATIVE.items(), 1):
        handle = stage.handle(handle.plan, attempt)
        stage.begin(handle.plan)
        for node in (0, 1):
            stage.node_ended(handle, node, native)
        seen = stage.backend.status(handle, stage.transport)
        assert seen.state is State[state]
        assert {node.state for node in seen.nodes} == {State[state]}


def test_status_maps_unrecognized_native_state_to_unknown(stage, handle):
    for attempt, native in enumerate(stage.GARBAGE, 1):
        handle = stage.handle(handle.plan, attempt)
        stage.begin(handle.plan)
        stage.node_ended(handle, 0, stage.NATIVE["SUCCEEDED"])
        stage.node_ended(handle, 1, native)
        seen = stage.backend.status(handle, stage.transport)
        assert seen.nodes[1].state is State.UNKNOWN, native
        assert seen.state is State.UNKNOWN, native


def test_status_is_separate_for_each_attempt(stage, handle):
    stage.begin(handle.plan)
    second = stage.handle(handle.plan, 2)
    for node in (0, 1):
        stage.node_ended(handle, node, stage.NATIVE["FAILED"])
        stage.node_ended(second, node, stage.NATIVE["SUCCEEDED"])
    assert stage.backend.status(handle, stage.transport).state is State.FAILED
    assert stage.backend.status(second, stage.transport).state is State.SUCCEEDED


def test_cancel_leaves_status_of_succeeded_run_unchanged(stage, demo, run_nodes, dump_dir):
    job = demo(nodes=2, env={"DUMP_DIR": str(dump_dir)})
    plan = stage.plan(job, cluster=stage.cluster(stop_grace=0.1))
    stage.begin(plan)
    run_nodes(stage, plan)
    seen = stage.backend.status(stage.handle(plan), stage.transport)
    assert seen.state is State.SUCCEEDED
    assert [node.exit_code for node in seen.nodes] == [0, 0]
    # A line without a rank is the agent's, such as that another test has taken its watch port.
    lines = [(x.rank, x.text) for x in stage.lines(stage.handle(plan)) if x.rank is not None]
    assert sorted(lines) == [(0, "dumped 0"), (1, "dumped 1")]
    for _ in range(2):
        stage.backend.cancel(stage.handle(plan), stage.transport)
    assert stage.backend.status(stage.handle(plan), stage.transport) == seen


def test_status_of_failed_run_has_exit_code_of_rank(stage, demo, run_nodes):
    plan = stage.plan(demo(program=None, command=("sh", "-c", "exit 7")))
    stage.begin(plan)
    assert run_nodes(stage, plan) == [7]
    seen = stage.backend.status(stage.handle(plan), stage.transport)
    assert seen.state is State.FAILED
    assert [end.exit_code for end in seen.rank_exits] == [7]


# ---------------------------------------------------------------- 12: cancelling


def test_commands_run_beside_ranks_of_each_node(stage, demo, start_nodes, ugly_values):
    job = demo(program=None, command=("sleep", "600"), nodes=2, env={"OF_JOB": "a\nb"})
    plan = stage.plan(job)
    start_nodes(stage, plan)
    ways = stage.backend.inside(stage.handle(plan), stage.transport, [0, 1])
    assert sorted(ways) == [0, 1]
    for node, way in ways.items():
        for rank in (None, node):
            out = bytearray()
            script = 'printf "%s\\0" "$NODE_RANK" "$RANK" "$OF_JOB" "$PWD" "$@"; exit 7'
            command = inside.start(
                plan, way, node, rank=rank, argv=["sh", "-c", script, "sh", *ugly_values.values()]
            )
            assert command.run(lambda data, error, out=out: out.extend(data)) == 7
            own = [str(node), "" if rank is None else str(rank)]
            words = out.decode().split("\0")[:-1]
            assert words[:2] == own
            assert rank is None or words[2] == "a\nb"
            assert words[3:] == [str(PROGRAMS), *ugly_values.values()]
        out = bytearray()
        asked = inside.start(plan, way, node, stack=True, nodes=[node], rank=None)
        assert asked.run(lambda data, error, out=out: out.extend(data)) == 0
        (record,) = json.loads(out)
        assert (record["rank"], record["node"]) == (node, node)


def test_cancel_of_unknown_run_is_harmless_and_repeatable(stage, handle):
    stage.backend.cancel(handle, stage.transport)
    stage.backend.cancel(handle, stage.transport)


def test_cancel_that_fails_raises_unavailable_naming_run(stage, demo, recording):
    plan = stage.plan(demo())
    stage.begin(plan)
    stage.write_files(plan)
    with pytest.raises(Unavailable, match=f"could not end run {plan.run_id}: .*it complained"):
        stage.backend.cancel(stage.handle(plan), recording(exit_code=1))


# ---------------------------------------------------------------- 13: what is missing


@pytest.mark.parametrize(
    ("fields", "host", "missing"),
    [
        ({"launcher": "torchrun"}, {"versions": {}}, "torch"),
        ({"launcher": "deepspeed"}, {"versions": {}}, "deepspeed"),
        ({"launcher": "mpirun"}, {"tools": {}}, "Open MPI"),
    ],
)
def test_planning_names_missing_launcher_tool_and_install_hint(stage, demo, fields, host, missing):
    with pytest.raises(Unavailable, match=f"needs {missing}") as error:
        stage.plan(demo(**fields), stage.facts_of(**host))
    assert error.value.exit_code == 125
    assert "install" in (error.value.hint or "")


# ---------------------------------------------------------------- 15: logs


def test_logs_are_ordered_by_time_with_rank_despite_torn_last_line(stage, handle):
    stage.begin(handle.plan)
    stage.node_log(
        handle, 0, STAMP % 1 + b" 0 a\n" + STAMP % 4 + b" - b\n" + STAMP % 5 + b" 0 torn \xe2\x82"
    )
    stage.node_log(handle, 1, STAMP % 2 + b" 1 c\n" + STAMP % 3 + b" 1 d\n2026-11-21T20")
    lines = stage.lines(handle)
    assert [(x.node, x.rank, x.text) for x in lines if x.time] == [
        (0, 0, "a"),
        (1, 1, "c"),
        (1, 1, "d"),
        (0, None, "b"),
        (0, 0, "torn \ufffd"),
    ]
    assert [(x.node, x.rank, x.text) for x in lines if not x.time] == [(1, None, "2026-11-21T20")]


def test_logs_can_be_limited_to_one_node(stage, handle):
    stage.begin(handle.plan)
    stage.node_log(handle, 0, STAMP % 1 + b" 0 a\n" + STAMP % 2 + b" - b\n")
    stage.node_log(handle, 1, STAMP % 3 + b" 1 c\n")
    assert [line.text for line in stage.lines(handle)] == ["a", "b", "c"]
    assert [line.text for line in stage.lines(handle, nodes=[1])] == ["c"]
    assert [line.text for line in stage.lines(handle, follow=lambda: False)] == ["a", "b", "c"]


def test_logs_of_run_without_output_are_empty(stage, handle):
    assert stage.lines(handle) == []


def test_job_python_is_used_and_refused_if_facts_name_another(stage, demo):
    named = demo(python="/opt/venv/bin/python")
    plan = stage.plan(named, stage.facts_of(python="/opt/venv/bin/python", python_origin="x"))
    assert str(next(note for note in plan.notes if note.name == "python")) == (
        "python=/opt/venv/bin/python (x)"
    )
    with pytest.raises(BadInput, match="python: /opt/venv/bin/python, but --facts is of /q/py"):
        stage.plan(named, stage.facts_of(python="/q/py"))


def test_planned_files_use_python_of_facts(stage, demo):
    plan = stage.plan(demo(), stage.facts_of(python="/opt/venv/bin/python"))
    text = "".join(file.text or "" for file in plan.files)
    assert "/opt/venv/bin/python" in text
    assert sys.executable not in text
