"""Verbs that show, cancel and remove runs."""

import json
import os
import pty
import re
import subprocess
import sys

import click
import msgspec
import pytest

from clusterkit import api, ui
from clusterkit.cli import common, following
from clusterkit.cli.common import table
from clusterkit.lifecycle import launch
from clusterkit.run.folder import Event, RunFolder
from clusterkit.run.status import Failure, State
from clusterkit.ui import plots
from tests.unit.cli.commands import ANSWERS, LOG, final

pytestmark = pytest.mark.usefixtures("no_gpus")


@pytest.fixture
def failed(unstarted_run, by_hand):
    run = unstarted_run()
    failure = Failure(
        node=0, rank=0, exit_code=7, cause="ValueError: bad", hint="mend it", traceback="T"
    )
    RunFolder(run.path).write_json("state.json", final(run.id, State.FAILED, 7, failure=failure))
    return run


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
