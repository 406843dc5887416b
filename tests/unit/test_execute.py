"""A plan is carried out step by step, and every step is recorded."""

import os

import msgspec
import pytest

from clusterkit import execute
from clusterkit.errors import BadInput, SubmitFailed
from clusterkit.plan import Plan, PlanFile, Step
from clusterkit.shell import Secret
from clusterkit.transport import Completed, LocalTransport


class Recording:
    """Remembers what it was asked for; ``codes`` are the exit codes of `run`."""

    def __init__(self, codes=()):
        self.calls = []
        self.codes = list(codes)

    def run(self, host, argv, *, env=None, timeout=None):
        self.calls.append(("run", host, tuple(argv), dict(env or {})))
        code = self.codes.pop(0) if self.codes else 0
        return Completed(tuple(argv), code, "said\n", "complained\n" if code else "")

    def start(self, host, argv, *, env=None):
        self.calls.append(("start", host, tuple(argv), dict(env or {})))

    def put_all(self, host, files):
        self.calls += [("put", host, file.path, file.data, file.mode) for file in files]


def plan(*steps, files=()):
    return Plan(
        run_id="r", run_dir="/r", backend="local", summary="", nodes=1, world_size=1,
        steps=tuple(steps), files=tuple(files),
    )  # fmt: skip


RUN = Step(kind="run", host="a", argv=("mkdir", "x y"), env={"A": "1"})
START = Step(kind="start", host="b", node=0, argv=("sh", "n"), env={"B": "2"}, secrets=("TOKEN",))


def test_run_steps_carries_out_steps_in_order_and_records_them():
    transport, records = Recording(), []
    execute.run_steps(
        plan(RUN, START), transport, attempt=3, secrets={"TOKEN": Secret("TOKEN", "hunter2")},
        record=lambda step, outcome: records.append((step, outcome)),
    )  # fmt: skip
    assert transport.calls == [
        ("run", "a", ("mkdir", "x y"), {"A": "1", "CLUSTERKIT_ATTEMPT": "3"}),
        (
            "start",
            "b",
            ("sh", "n"),
            {"B": "2", "CLUSTERKIT_ATTEMPT": "3", "CLUSTERKIT_RUN_DIR": "/r", "TOKEN": "hunter2"},
        ),
    ]
    assert records == [(RUN, "exit 0"), (START, "started")]
    assert "hunter2" not in repr(records)


def test_failed_step_stops_plan_and_names_command_code_and_stderr():
    transport, records = Recording(codes=[7]), []
    with pytest.raises(SubmitFailed, match=r"mkdir 'x y' on a exited with 7: complained\Z"):
        execute.run_steps(
            plan(RUN, START), transport, record=lambda step, outcome: records.append(outcome)
        )
    assert len(transport.calls) == 1
    assert records == ["mkdir 'x y' on a exited with 7: complained"]


def test_write_files_sends_each_file_once_per_host():
    transport = Recording()
    file = PlanFile("/r/files/f", text="é", mode=0o755)
    execute.write_files(plan(RUN, START, RUN, files=[file]), transport)
    assert transport.calls == [
        ("put", "a", "/r/files/f", "é".encode(), 0o755),
        ("put", "b", "/r/files/f", "é".encode(), 0o755),
    ]


@pytest.mark.parametrize("error", [OSError(11, "no more processes"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", [RUN, START])
def test_foreign_exception_passes_unchanged_and_is_recorded(error, step):
    class Broken(Recording):
        def run(self, *_, **__):
            raise error

        start = run

    records = []
    with pytest.raises(type(error)) as raised:
        execute.run_steps(
            plan(step), Broken(), secrets={"TOKEN": Secret("TOKEN", "hunter2")},
            record=lambda step, outcome: records.append(outcome),
        )  # fmt: skip
    assert raised.value is error
    assert records == [f"{type(error).__name__}: {error}"]


def test_step_with_missing_secret_is_recorded():
    records = []
    with pytest.raises(KeyError):
        execute.run_steps(
            plan(START), Recording(), record=lambda step, outcome: records.append(outcome)
        )
    assert records == ["KeyError: 'TOKEN'"]


def test_claim_refuses_run_id_used_by_another_home(tmp_path):
    plan = Plan(
        run_id="mine", run_dir=str(tmp_path / "runs/mine"), backend="ssh", summary="", nodes=8,
        world_size=8, hosts=tuple(f"h{number}" for number in range(8)),
    )  # fmt: skip
    for _ in range(2):  # a submit that was interrupted, and once more; all hosts see one folder
        execute.claim(plan, LocalTransport(), "ann@laptop:/home/ann/runs/mine")
    with pytest.raises(BadInput) as refused:
        execute.claim(plan, LocalTransport(), "ann@desk:/home/ann/runs/mine")
    assert "there is a run mine already, of ann@laptop:/home/ann/runs/mine" in refused.value.message
    assert sorted(os.listdir(plan.run_dir)) == ["owner"]
    # What an earlier run of the same home has left would be taken for this one's.
    os.mkdir(f"{plan.run_dir}/attempts")
    with pytest.raises(BadInput, match="there is a run mine already"):
        execute.claim(plan, LocalTransport(), "ann@laptop:/home/ann/runs/mine")
    (tmp_path / "file").write_text("")
    plan = msgspec.structs.replace(plan, run_dir=str(tmp_path / "file/mine"))
    with pytest.raises(SubmitFailed, match=r"host h0: cannot make .*Not a directory"):
        execute.claim(plan, LocalTransport(), "x")
