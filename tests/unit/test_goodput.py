"""Where a run's time went."""

from clusterkit.agent.node_log import NodeLog
from clusterkit.run import folder as run_folder
from clusterkit.run.folder import Rank0, RunFolder
from clusterkit.run.goodput import account, with_goodput
from clusterkit.run.logs import GrowingFile
from clusterkit.run.status import AttemptStatus, RunStatus, State
from tests.recorded import Recorded

START = {"event": "start", "first_step": 0}


def step(number):
    return {"event": "metrics", "step": number}


def test_account_assigns_each_second_once():
    first = [(20.0, START), (21.0, step(1)), (22.0, step(2)), (23.0, step(3))]
    # Another four seconds later it goes on after step 1, and does two steps again.
    resumed = {"event": "start", "first_step": 1}
    phase = {"event": "phase", "name": "ending", "seconds": 1}
    second = [(27.0, resumed), (28.0, step(2)), (28.5, step(3)), (29.5, step(4)), (30.0, phase)]
    found = account([first, second], 10.0, 12.0, 31.0)
    assert (found.waiting, found.start) == (2.0, 8.0)
    assert (found.training, found.again, found.restart, found.end) == (4.0, 1.5, 4.0, 1.5)
    assert found.share == 4 / 21


def test_account_works_with_step_lines_alone():
    found = account([[(20.0, step(1)), (22.0, step(2))], [], [(30.0, step(2))]], 10.0, 10.0, 30.0)
    assert (found.start, found.training, found.restart, found.again) == (10.0, 2.0, 8.0, 0.0)


def test_account_without_steps_gives_nothing():
    assert account([[(20.0, START)]], 10.0, 10.0, 30.0) is None


def test_attempts_report_last_step_and_steps_lost(tmp_path):
    folder = RunFolder(tmp_path / "run")
    text = '2026-11-23T10:00:0{}.000000Z 0 @clusterkit {{"event": "{}", "{}": {}}}\n'
    logs = [[(1, "start", "first_step", 0), (2, "metrics", "step", 7)], [],
            [(4, "start", "first_step", 5), (5, "metrics", "step", 6)]]  # fmt: skip
    for number, lines in enumerate(logs, 1):
        node = folder.node_dir(number, number // 3)  # torchrun may number the nodes anew
        node.mkdir(parents=True)
        (node / "log").write_text("torn\n" + "".join(text.format(*line) for line in lines))
    began = next(Rank0(folder).read(1)).time
    ended = [
        AttemptStatus(attempt=n, state=State.FAILED, failure=None, started_at=0, finished_at=0)
        for n in (1, 2)
    ]
    said = RunStatus(run="r", job="j", cluster="c", backend="local", state=State.RUNNING,
                     attempt=3, attempts=tuple(ended), started_at=began - 1)  # fmt: skip
    found = with_goodput(folder, said, began + 5)
    assert [(one.last_step, one.steps_lost) for one in found.attempts] == [(7, 2), (None, None)]
    assert (found.goodput.start, found.goodput.training) == (1.0, 1.0)


def test_rank0_reader_reads_only_logs_that_may_hold_rank_0(tmp_path, monkeypatch):
    run = Recorded(tmp_path, nodes=3)
    read = []
    monkeypatch.setattr(
        run_folder, "GrowingFile", lambda path: read.append(path) or GrowingFile(path)
    )
    run.step(1)
    assert [line.event["step"] for line in Rank0(run.folder).read(1)] == [1]
    assert [path.parent.name for path in read] == ["node-0"]
    # A spare of an attempt before, of which the newest plan knows nothing, was rank 0.
    run.folder.node_dir(1, 3).mkdir()
    NodeLog(run.folder.node_dir(1, 3)).lines("0", [b'@clusterkit {"event": "metrics", "step": 2}'])
    assert [line.event["step"] for line in Rank0(run.folder).read(1)] == [1, 2]
    run.close()
