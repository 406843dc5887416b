"""How every backend submits, tells of a run, cancels it and shows its logs."""

import json
import sys

import msgspec
import pytest

from clusterkit.backends.base import Observation
from clusterkit.errors import BadInput, SubmitFailed, Unavailable
from clusterkit.lifecycle import inside
from clusterkit.run.status import State
from clusterkit.shell import Secret
from clusterkit.transport import Transport
from tests.contract.contracts import PROGRAMS, TOKEN

STAMP = b"2026-11-21T20:11:58.%06dZ"


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
