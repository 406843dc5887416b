"""The node agent: one node's launcher, its log, and the end of all of it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterkit import agent
from clusterkit.agent import ending, limits, processes
from clusterkit.agent.node_log import NodeLog
from clusterkit.agent.protocol import LAUNCHER_WAITED
from clusterkit.agent.streams import Lines, Stream
from clusterkit.backends.node_status import NativeState, NodeFiles, judge_node
from clusterkit.run import folder as run_folder
from clusterkit.run.logs import parse_lines
from clusterkit.run.status import State

RUN = (
    "import sys; from clusterkit.agent import __main__, limits; limits.RANKS_GRACE = 0.0; "
    "sys.exit(__main__.main(sys.argv[1:]))"
)


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def start(run_dir):
    """Start an agent for node 0; every one is ended with the test."""
    started = []

    def begin(*argv, nproc=1, spawn=False, workdir=None, grace="5", options=(), run=RUN, **env):
        options = [*options, *(["--spawn"] if spawn else [])]
        process = subprocess.Popen(
            [sys.executable, "-c", run, "run", "--nproc", str(nproc),
             "--workdir", str(workdir or run_dir), "--grace", grace, *options, "--", *argv],
            env={"PATH": os.environ["PATH"], "CLUSTERKIT_RUN_DIR": str(run_dir),
                 "CLUSTERKIT_NODE_DIR": run_folder.node_dir(str(run_dir), 1, 0), **env},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        process.terminate()
        process.communicate()


@pytest.fixture
def node_dir(run_dir):
    return Path(run_folder.node_dir(str(run_dir), 1, 0))


def lines_of(node_dir):
    lines = (node_dir / "log").read_bytes().splitlines()
    return [line for raw in lines for line in parse_lines(raw, 0)]


def exit_of(node_dir):
    return json.loads((node_dir / "exit.json").read_bytes())


# ---------------------------------------------------------------- whole agents


def test_agent_logs_output_with_time_and_passes_on_exit_code(start, node_dir):
    process = start("sh", "-c", "echo out; echo err >&2; printf 'no newline'; exit 7")
    assert process.wait() == 7
    lines = lines_of(node_dir)
    assert [(line.rank, line.text) for line in lines] == [
        (None, "out"),
        (None, "err"),
        (None, "no newline"),
    ]
    assert all(line.time > 0 for line in lines)
    assert exit_of(node_dir)["exit_code"] == 7
    assert exit_of(node_dir)["reason"] is None


def test_agent_leaves_no_pipes_in_node_folder(start, node_dir):
    assert start("true", nproc=3).wait() == 0
    assert sorted(os.listdir(node_dir)) == ["exit.json", "log", "started.json"]


def test_agent_logs_each_rank_pipe_under_rank_named_by_header(start, node_dir):
    script = (
        'for r in 0 1; do (exec >"$CLUSTERKIT_PIPE-$r" 2>&1; echo "@clusterkit-rank $((r+4)) $$"; '
        'echo "I am $r") & done; wait'
    )
    assert start("sh", "-c", script, nproc=2).wait() == 0
    assert sorted((line.rank, line.text) for line in lines_of(node_dir)) == [
        (4, "I am 0"),
        (5, "I am 1"),
    ]
    recorded = [json.loads(x) for x in (node_dir / "ranks.jsonl").read_text().splitlines()]
    assert sorted(record["rank"] for record in recorded) == [4, 5]


def test_spawn_starts_command_once_per_rank(start, node_dir):
    assert start("sh", "-c", 'echo "rank $LOCAL_RANK"', nproc=3, spawn=True).wait() == 0
    assert sorted(line.text for line in lines_of(node_dir)) == ["rank 0", "rank 1", "rank 2"]


def test_ranks_do_not_see_peer_token(start, node_dir):
    assert start("sh", "-c", f'echo "<${agent.PEER_TOKEN}>"', CLUSTERKIT_PEER_TOKEN="t").wait() == 0
    assert lines_of(node_dir)[0].text == "<>"


def test_one_failed_rank_ends_others_and_gives_node_exit_code(start, node_dir):
    script = 'if [ "$LOCAL_RANK" = 1 ]; then exit 9; fi; exec sleep 600'
    assert start("sh", "-c", script, nproc=2, spawn=True).wait() == 9
    codes = [end["exit_code"] for end in exit_of(node_dir)["processes"]]
    assert codes == [9, -signal.SIGTERM]


def test_missing_command_exits_127_with_reason(start, node_dir):
    assert start("/nope/launcher").wait() == 127
    assert exit_of(node_dir)["reason"] == "No such file or directory: /nope/launcher"


def test_missing_workdir_exits_127_with_reason(start, node_dir):
    assert start("true", workdir="/nope").wait() == 127
    assert exit_of(node_dir)["reason"] == "No such file or directory: /nope"


def test_command_without_execute_permission_exits_126(start, node_dir, run_dir):
    (run_dir / "plain").write_text("")
    assert start(str(run_dir / "plain")).wait() == 126
    assert exit_of(node_dir)["reason"].startswith("Permission denied")


def test_failed_spawn_does_not_blame_ranks_already_started(start, node_dir):
    few = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60)); {RUN}"
    assert start("sleep", "600", nproc=32, spawn=True, run=few).wait() == 126
    ended = exit_of(node_dir)
    assert ended["reason"] == "Too many open files"
    assert [end["pid"] for end in ended["processes"]] == [0]


def test_signal_death_exits_128_plus_signal_number(start, node_dir):
    assert start("sh", "-c", "kill -KILL $$").wait() == 137
    assert exit_of(node_dir)["exit_code"] == 137


QUICK = RUN.replace("limits.RANKS", "limits.LOOK_SECONDS = 0.05; limits.RANKS")


def wait_until(true):
    deadline = time.monotonic() + 240
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def says(node_dir, words):
    return lines_of(node_dir)[-1].text == words


def waiting(start, run_dir, **options):
    """An agent, and its rank, which waits."""
    fifo = run_dir / "fifo"
    os.mkfifo(fifo)
    process = start("sh", "-c", 'echo $$ >"$FIFO"; exec sleep 60', FIFO=str(fifo), **options)
    return process, int(wait_for_line(fifo))


def wait_for_line(fifo: Path) -> str:
    with fifo.open() as reader:  # waits for the writer
        return reader.readline().strip()


def test_sigterm_ends_process_tree_and_records_stop_request(start, node_dir, run_dir):
    os.mkfifo(run_dir / "ready")
    process = start("sh", "-c", 'sleep 600 & echo $! >"$0"; wait', str(run_dir / "ready"))
    sleeper = int(wait_for_line(run_dir / "ready"))
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    assert exit_of(node_dir)["reason"] == "stopped on request"
    assert agent.start_ticks(sleeper) is None


def test_status_names_taken_watch_port_while_node_runs(start, node_dir, run_dir):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        options = ["--nodes", "2"]
        names = {"NODE_RANK": "0", "CLUSTERKIT_RUN_ID": "r", "CLUSTERKIT_ATTEMPT": "1",
                 "CLUSTERKIT_COORDINATOR": f"127.0.0.1:{port}",
                 "CLUSTERKIT_PEER_TOKEN": "t"}  # fmt: skip
        waiting(start, run_dir, options=options, **names)
        wait_until(lambda: b"not watched" in (node_dir / "started.json").read_bytes())
    started = (node_dir / "started.json").read_bytes()
    found = judge_node(
        0, "h0", NodeFiles(begun=True, started=started), NativeState(state=State.RUNNING)
    )
    words = f"the other nodes are not watched: port {port}: Address already in use"
    assert found.remarks == (words,)
    assert lines_of(node_dir)[-1].text == words


def test_exit_record_names_sender_of_sigterm(start, node_dir, run_dir):
    process, _ = waiting(start, run_dir)
    process.terminate()
    assert process.wait() == 143
    ended = exit_of(node_dir)
    expected = f"SIGTERM from process {os.getpid()} of user {os.getuid()} ("
    assert ended["stopped_by"].startswith(expected)
    assert ended["remarks"] == ended["causes"] == [f"stopped by {ended['stopped_by']}"]


def test_exit_record_holds_reason_given_to_stop(start, node_dir, run_dir):
    process, _ = waiting(start, run_dir)
    stop = [
        sys.executable,
        "-m",
        "clusterkit.agent",
        "stop",
        str(run_dir),
        "--reason",
        "over its time",
    ]
    subprocess.run(stop, check=True, capture_output=True)
    assert process.wait() == 143
    ended = exit_of(node_dir)
    assert (ended["reason"], ended["stopped_by"]) == ("stopped on request", "over its time")
    assert ended["remarks"] == ended["causes"] == []


@pytest.mark.parametrize("spawn", [False, True])
def test_ranks_inherit_no_ignored_or_blocked_signals(start, node_dir, spawn):
    # As nohup, a shell's background job and a batch system do.
    names = ("SIGINT", "SIGQUIT", "SIGHUP", "SIGTERM", "SIGUSR1", "SIGTSTP")
    ignore = "".join(f"signal.signal(signal.{name}, signal.SIG_IGN); " for name in names)
    block = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2, signal.SIGCHLD]); "
    process = start(
        "grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status", spawn=spawn,
        run=f"import signal; {ignore}{block}{RUN}",
    )  # fmt: skip
    assert process.wait() == 0
    said = dict(line.text.split(":\t") for line in lines_of(node_dir))
    internal = 0b11 << 31  # the C library's own, 32 and 33
    assert {name: int(bits, 16) & ~internal for name, bits in said.items()} == {
        "SigBlk": 0, "SigIgn": 0,
    }  # fmt: skip


def test_node_succeeds_when_waiting_launcher_is_stopped_after_ranks_ended(start, node_dir, run_dir):
    """torchrun waits in its exit barrier for the ranks of other nodes, and hears nothing there."""
    launcher = (
        "trap '' TERM; sh -c 'echo \"@clusterkit-rank 0 $$\" >\"$CLUSTERKIT_PIPE-0\"'; "
        'echo ended >"$FIFO"; while :; do sleep 60; done'
    )
    fifo = run_dir / "fifo"
    os.mkfifo(fifo)
    process = start("sh", "-c", launcher, FIFO=str(fifo))
    assert wait_for_line(fifo) == "ended"
    wait_until((node_dir / "ranks.jsonl").exists)
    process.terminate()
    assert process.wait() == 0
    ended = exit_of(node_dir)
    assert (ended["exit_code"], ended["reason"]) == (0, LAUNCHER_WAITED)


def test_log_and_causes_name_rank_stopped_by_sigstop(start, node_dir, run_dir):
    fifo = run_dir / "fifo"
    os.mkfifo(fifo)
    rank = 'echo "@clusterkit-rank 3 $$" >"$CLUSTERKIT_PIPE-0"; echo $$ >"$FIFO"; exec sleep 60'
    process = start("sh", "-c", rank, run=QUICK, grace="0.1", FIFO=str(fifo))
    pid = int(wait_for_line(fifo))
    wait_until((node_dir / "ranks.jsonl").exists)
    for signum, words in (
        (signal.SIGSTOP, "rank 3 was stopped (SIGSTOP)"),
        (signal.SIGCONT, "rank 3 continues (SIGCONT)"),
        (signal.SIGSTOP, "rank 3 was stopped (SIGSTOP)"),
    ):
        os.kill(pid, signum)
        wait_until(lambda words=words: lines_of(node_dir)[-1:] and says(node_dir, words))
    process.terminate()
    process.wait()
    assert exit_of(node_dir)["causes"][0] == "rank 3 was stopped (SIGSTOP)"


def test_stop_ends_agent_paused_by_sigstop_and_records_pause(start, node_dir, run_dir):
    process, rank = waiting(start, run_dir, run=QUICK)
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: processes.is_stopped(agent.identity(process.pid)))
    time.sleep(0.2)  # as long as this is what it says
    assert ending.stop(str(run_dir), 5.0)["asked"] == [process.pid]
    assert process.wait() == 143
    assert agent.start_ticks(rank) is None
    ended = exit_of(node_dir)
    assert ended["reason"] == "stopped on request"
    assert ended["causes"][0].startswith("its agent was stopped (SIGSTOP) for ")
    assert any(text.startswith("this node's agent was stopped") for text in ended["remarks"])


def test_process_that_ignores_sigterm_is_killed_after_grace(start, node_dir, run_dir):
    os.mkfifo(run_dir / "ready")
    script = 'trap "" TERM; echo $$ >"$0"; while :; do sleep 600; done'
    process = start("sh", "-c", script, str(run_dir / "ready"), grace="0.1")
    stubborn = int(wait_for_line(run_dir / "ready"))
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 137
    assert agent.start_ticks(stubborn) is None


def test_agent_ends_process_left_behind_by_launcher(start, run_dir):
    script = 'setsid sleep 600 >/dev/null 2>&1 & echo $! >"$0"'
    os.mkfifo(run_dir / "ready")
    process = start("sh", "-c", script, str(run_dir / "ready"))
    orphan = int(wait_for_line(run_dir / "ready"))
    assert process.wait() == 0
    assert agent.start_ticks(orphan) is None


def test_second_agent_for_node_is_refused_while_first_lives(start, run_dir):
    os.mkfifo(run_dir / "ready")
    start("sh", "-c", 'echo up >"$0"; exec sleep 600', str(run_dir / "ready"))
    assert wait_for_line(run_dir / "ready") == "up"
    second = start("true")
    _, complaint = second.communicate()
    assert second.returncode == 75
    assert b"already runs as process" in complaint


def test_stop_ends_agents_of_run_and_can_be_repeated(start, run_dir, node_dir):
    os.mkfifo(run_dir / "ready")
    process = start("sh", "-c", 'echo up >"$0"; exec sleep 600', str(run_dir / "ready"))
    assert wait_for_line(run_dir / "ready") == "up"
    assert ending.stop(str(run_dir), 5.0)["asked"] == [process.pid]
    assert process.wait() == 143
    assert ending.stop(str(run_dir), 5.0) == {"asked": [], "killed": [], "left": []}


def test_stop_finds_orphaned_processes_of_run_only(run_dir, tmp_path):
    lost = subprocess.Popen(["sleep", "600"], env={"CLUSTERKIT_RUN_DIR": str(run_dir)})
    other = subprocess.Popen(["sleep", "600"], env={"CLUSTERKIT_RUN_DIR": f"{run_dir}-other"})
    try:
        assert agent.processes_of(str(run_dir)) == [lost.pid]
        assert ending.stop(str(run_dir), 1.0)["asked"] == [lost.pid]
        assert lost.wait() == -signal.SIGTERM
        assert other.poll() is None
    finally:
        for process in (lost, other):
            process.kill()
            process.wait()


def test_stop_of_missing_run_folder_ends_nothing(tmp_path):
    assert ending.stop(str(tmp_path / "gone"), 0.0) == {"asked": [], "killed": [], "left": []}


# ---------------------------------------------------------------- identities


def test_is_alive_rejects_other_start_time_or_boot():
    me = agent.identity(os.getpid())
    assert agent.is_alive(me)
    assert not agent.is_alive(me | {"start_ticks": me["start_ticks"] - 1})
    assert not agent.is_alive(me | {"boot_id": "another"})
    assert not agent.is_alive({})
    assert not agent.is_alive(me | {"start_ticks": None})


def test_zombie_is_not_alive():
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert agent.start_ticks(child.pid) is None
    child.wait()


def test_descendants_are_found_at_any_depth(run_dir):
    fifo = run_dir / "ready"
    os.mkfifo(fifo)
    inner = 'sleep 600 & echo $! >"$0"; wait'
    parent = subprocess.Popen(["sh", "-c", 'sh -c "$1" "$0" & wait', str(fifo), inner])
    deepest = int(wait_for_line(fifo))
    found = agent.descendants(parent.pid)
    agent.send([parent.pid, *found], signal.SIGKILL)
    parent.wait()
    agent.wait_gone(found, 5.0)
    assert found[-1] == deepest
    assert len(found) == 2
    assert [agent.start_ticks(pid) for pid in found] == [None, None]


# ---------------------------------------------------------------- the log


@pytest.fixture
def log(tmp_path):
    made = NodeLog(tmp_path)
    yield made
    os.close(made.handle)


@pytest.fixture
def stream(log):
    read, write = os.pipe()
    os.set_blocking(read, False)
    made = Stream(read, log)
    made.write = lambda data: os.write(write, data)
    yield made
    os.close(read)
    os.close(write)


def texts(tmp_path):
    lines = (tmp_path / "log").read_bytes().split(b"\n")[:-1]
    return [line.text for raw in lines for line in parse_lines(raw, 0)]


def test_stream_logs_lines_once_complete(stream, tmp_path):
    stream.write(b"one\ntw")
    assert stream.pump()
    assert texts(tmp_path) == ["one"]
    stream.write(b"o\n")
    stream.pump()
    assert texts(tmp_path) == ["one", "two"]


def test_carriage_returns_of_progress_bar_end_lines(stream, tmp_path):
    stream.write(b"10%\r20%\r\n30%\n")
    stream.pump()
    assert texts(tmp_path) == ["10%", "20%", "30%"]


def test_crlf_split_across_reads_ends_one_line(stream, tmp_path):
    stream.write(b"one\r")
    stream.pump()
    stream.write(b"\ntwo\n")
    stream.pump()
    assert texts(tmp_path) == ["one", "two"]


def test_line_without_end_is_split_at_longest_length(stream, tmp_path):
    total = 0
    while total <= limits.LONGEST_LINE:
        total += stream.write(b"x" * 4096)
        stream.pump()
    assert "".join(texts(tmp_path)) == "x" * total


def test_drain_logs_last_line_without_newline(stream, tmp_path):
    stream.write(b"a\nlast words")
    stream.drain()
    assert texts(tmp_path) == ["a", "last words"]


def test_header_names_rank_of_following_lines(stream, tmp_path):
    stream.write(f"before\n@clusterkit-rank 5 {os.getpid()}\nafter\n".encode())
    stream.pump()
    raws = (tmp_path / "log").read_bytes().splitlines()
    assert [(line.rank, line.text) for raw in raws for line in parse_lines(raw, 0)] == [
        (None, "before"),
        (5, "after"),
    ]


def test_rank_ended_mark_is_recorded_and_kept_out_of_log(stream, log, tmp_path):
    stream.write(b"@clusterkit-rank 5 77\nhalf a line@clusterkit-rank-ended 5 7\n")
    stream.write(b"@clusterkit-rank-ended 4 137\n")
    stream.pump()
    assert texts(tmp_path) == ["half a line"]
    ends = [(end["pid"], end["rank"], end["exit_code"]) for end in log.rank_ends]
    assert ends == [(77, 5, 7), (None, 4, 137)]


def test_node_log_keeps_first_failed_and_first_successful_rank_ends(stream, log):
    for rank in range(1000):
        stream.write(f"@clusterkit-rank-ended {rank} {int(rank >= 500)}\n".encode())
    stream.pump()
    few = range(limits.RANK_ENDS)
    assert [(end["rank"], end["exit_code"]) for end in log.rank_ends] == [
        *((rank, 0) for rank in few),
        *((500 + rank, 1) for rank in few),
    ]


def test_rank_ended_mark_is_read_through_mpirun_tags(start, node_dir):
    said = "[1,1]<stdout>:half@clusterkit-rank-ended 1 7\n[1,1]<stdout>:more\n"
    assert start("printf", "%s", said, options=["--tagged"]).wait() == 0
    assert [(line.rank, line.text) for line in lines_of(node_dir)] == [(1, "half"), (1, "more")]
    ends = [(end["rank"], end["exit_code"]) for end in exit_of(node_dir)["processes"]]
    assert ends == [(None, 0), (1, 7)]


@pytest.mark.parametrize(
    "line",
    [
        b"@clusterkit-rank-ended ",
        b"@clusterkit-rank-ended x 1",
        b"@clusterkit-rank-ended 1 2 3",
        b"@clusterkit-rank-ended 1 99999999999999999999",
        b"@clusterkit-rank ",
        b"@clusterkit-rank x y",
        b"@clusterkit-rank 1",
        b"@clusterkit-rank \xff 1 2",
    ],
)
def test_malformed_header_does_not_stop_stream(stream, tmp_path, line):
    stream.write(line + b"\nafter\n")
    stream.pump()
    assert texts(tmp_path)[-1] == "after"


def test_full_disk_loses_lines_and_log_says_how_many(log, tmp_path, monkeypatch):
    real = os.write

    def full(handle, data):
        raise OSError(28, "No space left on device")

    log.lines("0", [b"before"])
    monkeypatch.setattr(os, "write", full)
    log.lines("0", [b"lost", b"lost too"])
    monkeypatch.setattr(os, "write", real)
    log.lines("0", [b"after"])
    assert texts(tmp_path) == ["before", "2 log lines lost: disk full", "after"]
    assert log.lost == 2


def test_exit_record_counts_every_line_lost_to_full_disk(start, node_dir, run_dir):
    # Python would keep compiled modules that were cut short, also of an import that comes later.
    no_cache = {"PYTHONDONTWRITEBYTECODE": "1"}
    full = RUN.replace(
        "sys.exit",
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)); sys.exit",
    )
    # Some short ones still find room between the long ones that do not.
    count = 'i=0; while [ $i -lt 200 ]; do echo "line $i"; echo "line $i $LONG"; i=$((i + 1)); done'
    assert start("sh", "-c", count, run=full, LONG="x" * 500, **no_cache).wait() == 0
    said = [line.text for line in lines_of(node_dir)]
    kept = sum(text.startswith("line ") for text in said)
    gaps = [int(text.split()[0]) for text in said if text.endswith(" lost: disk full")]
    assert 0 < kept < 400
    (remark,) = exit_of(node_dir)["remarks"]
    lost = int(remark.removesuffix(" log lines lost: disk full"))
    assert kept + lost == 400
    assert sum(gaps) <= lost  # its last words may find no room either


def test_disk_filling_up_mid_line_spoils_no_other_line(log, tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, data[:40]))
    log.lines("0", [b"a line that the disk has only half the room for"])
    monkeypatch.setattr(os, "write", real)
    log.lines("0", [b"after"])
    assert texts(tmp_path)[-1] == "after"


def test_write_json_keeps_old_file_when_disk_is_full(tmp_path, monkeypatch):
    agent.write_json(tmp_path / "d.json", {"a": 1})

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        agent.write_json(tmp_path / "d.json", {"a": 2})
    assert json.loads((tmp_path / "d.json").read_bytes()) == {"a": 1}
    assert os.listdir(tmp_path) == ["d.json"]


# ---------------------------------------------------------------- Open MPI's tags


PIECES = (
    b"[1,2]<stdout>:rank[1,3]<stdout>:rank [1,2]<stdout>: 2\n[1,3]<stdout>:3\n"
    b"mpirun has a word\n[1,2]<stderr>:\n[1,2]<stdout>:a [b\r\n[1,10]<stdout>:no end"
)
TOLD = [("2", b"rank 2"), ("3", b"rank 3"), ("-", b"mpirun has a word"), ("2", b""), ("2", b"a [b")]


@pytest.mark.parametrize("size", [*range(1, 20), 1000])
def test_tagged_pieces_of_several_ranks_become_whole_lines(size):
    tagged = Lines(tagged=True)
    told = []
    for at in range(0, len(PIECES), size):
        told += tagged.feed(PIECES[at : at + size])
    assert told == TOLD
    assert tagged.end() == [("10", b"no end")]
    assert tagged.end() == []


def test_tagged_line_without_end_is_split_at_longest_length():
    tagged = Lines(tagged=True)
    assert tagged.feed(b"[1,4]<stdout>:" + b"x" * limits.LONGEST_LINE) == []
    assert tagged.feed(b"yz") == [("4", b"x" * limits.LONGEST_LINE + b"yz")]
