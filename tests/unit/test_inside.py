"""Commands beside ranks: the frames of both sides, over a real process; argument lists fuzzed."""

from __future__ import annotations

import json
import os
import random
import selectors
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import click.testing
import pytest
from msgspec.structs import replace

from clusterkit import agent, api, cli
from clusterkit.agent import stack
from clusterkit.agent.archive import build
from clusterkit.errors import BadInput, Unavailable
from clusterkit.lifecycle import copying, forwarding, inside
from clusterkit.lifecycle.inside import Command
from clusterkit.plan import Plan
from clusterkit.run.folder import RunFolder
from clusterkit.run.status import State
from clusterkit.transport import LocalTransport

LISTS, COMMANDS = 100_000, 25
LETTERS = "aZ0 \t\n'\"\\$`*?[]{}()<>|&;~#!=-,%é日\U0001f600\udcff"
"""The last stands for a byte that is not UTF-8."""


class Beside:
    """A node whose agent and only rank are two processes that sleep."""

    def __init__(self, folder: Path) -> None:
        self.run_dir, self.processes = folder / "run", []
        node = self.run_dir / "attempts/1/node-0"
        node.mkdir(parents=True)
        (folder / "agent.pyz").write_bytes(build())
        self.archive, self.workdir = folder / "agent.pyz", folder / "work"
        self.workdir.mkdir()
        own = {"NODE_RANK": "0", "CLUSTERKIT_PEER_TOKEN": "secret", "PATH": os.environ["PATH"]}
        self.agent = self._sleep(own)
        self.rank = self._sleep({**own, "RANK": "0", "LOCAL_RANK": "0", "MINE": "a\nb"})
        (node / "started.json").write_text(json.dumps(agent.identity(self.agent.pid)))
        line = {"rank": 0, "at": 1.0, **agent.identity(self.rank.pid)}
        (node / "ranks.jsonl").write_text(json.dumps(line) + "\n")

    def _sleep(self, env: dict[str, str]) -> subprocess.Popen[bytes]:
        self.processes.append(subprocess.Popen(["sleep", "600"], env=env, cwd=self.workdir))
        return self.processes[-1]

    def command(self, argv: list[str], **request: object) -> Command:
        words = [sys.executable, "-I", str(self.archive), "inside"]
        stream = LocalTransport().open("localhost", words, own_group=True)
        given = {
            "run_dir": str(self.run_dir), "node": 0, "rank": None, "argv": argv, "ended": False,
            "python": False, "terminal": None, "term": "dumb",
        }  # fmt: skip
        return Command(stream, "node 0", {**given, **request})

    def __call__(self, argv: list[str], stdin: bytes = b"", **request: object) -> tuple[Any, ...]:
        """Exit code, output and error output of a command."""
        parts: dict[bool, list[bytes]] = {False: [], True: []}
        chunks = iter([stdin[at : at + 50_000] for at in range(0, len(stdin), 50_000)])
        command = self.command(argv, **request)
        command.feed(lambda: next(chunks, b""))
        code = command.run(lambda data, error: parts[error].append(data))
        return code, b"".join(parts[False]), b"".join(parts[True])


@pytest.fixture
def beside(tmp_path):
    made = Beside(tmp_path)
    yield made
    for process in made.processes:
        process.kill()
        process.wait()


def test_random_argument_lists_arrive_unchanged(beside):
    rng = random.Random(36)
    for _ in range(COMMANDS):
        words = []
        for _ in range(LISTS // COMMANDS):
            words += ["".join(rng.choices(LETTERS, k=rng.randrange(5))) for _ in range(3)]
        code, out, _ = beside(["printf", r"%s\0", *words])
        assert code == 0
        assert [os.fsdecode(word) for word in out.split(b"\0")[:-1]] == words


def test_command_runs_in_folder_and_environment_of_node_or_rank(beside):
    show = ["sh", "-c", 'echo "$(pwd)|$RANK|$MINE|${CLUSTERKIT_PEER_TOKEN-none}"']
    folder = str(beside.workdir)
    assert beside(show) == (0, f"{folder}|||none\n".encode(), b"")
    assert beside(show, rank=0) == (0, f"{folder}|0|a\nb|none\n".encode(), b"")


def test_exit_code_is_that_of_shell(beside):
    assert beside(["sh", "-c", "echo no >&2; exit 7"]) == (7, b"", b"no\n")
    assert beside(["sh", "-c", "kill -9 $$"])[0] == 137
    assert beside(["no-such"]) == (127, b"", b"no-such: No such file or directory\n")
    assert beside([str(beside.run_dir)])[0] == 126


def test_nodes_and_ranks_that_do_not_run_are_refused(beside):
    with pytest.raises(BadInput, match="node 0: rank 1 has not started here"):
        beside(["true"], rank=1)
    with pytest.raises(BadInput, match="it has not started yet"):
        beside(["true"], node=1)
    with pytest.raises(BadInput, match="cannot be run: embedded null byte"):
        beside(["echo", "\0"])
    beside.rank.kill()
    beside.rank.wait()
    with pytest.raises(BadInput, match="rank 0 has ended"):
        beside(["true"], rank=0)
    beside.agent.kill()
    beside.agent.wait()
    with pytest.raises(BadInput, match="it has ended: its agent no longer runs"):
        beside(["true"])


def test_place_without_agent_archive_is_named(beside):
    beside.archive.unlink()
    with pytest.raises(Unavailable, match="node 0: the agent of this run is of an older"):
        beside(["true"])


def test_all_input_arrives_also_at_command_that_reads_late(beside):
    data = os.urandom(5_000_000)
    code, out, _ = beside(["sh", "-c", "sleep 0.5; cat"], data)
    assert (code, out) == (0, data)
    assert beside(["true"], data)[0] == 0


def test_command_in_background_does_not_delay_end(beside):
    began = time.monotonic()
    code, out, _ = beside(["sh", "-c", "sleep 60 & echo $!"])
    assert code == 0
    assert time.monotonic() - began < 50
    os.kill(int(out), 9)


def test_nothing_is_left_once_stream_is_closed(beside):
    command = beside.command(["sh", "-c", "nohup sleep 600 & echo $!; wait"])
    told: list[int] = []

    def take(data: bytes, error: bool) -> None:
        if not error:
            told.append(int(data))
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        command.run(take)
    deadline = time.monotonic() + 60
    while agent.identity(told[0])["start_ticks"] is not None:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_terminal_has_size_and_ends_on_ctrl_d(beside):
    command = beside.command(["sh", "-c", "stty size; tty; cat"], terminal=[33, 111])
    out = bytearray()
    command.send(b"e")
    assert command.run(lambda data, error: out.extend(data)) == 0
    size, device = out.decode().split("\r\n")[:2]
    assert size == "33 111"
    assert device.startswith("/dev/pts/")


def test_shell_is_interactive_with_environment_of_rank(beside):
    command = beside.command([], terminal=[24, 80], rank=0)
    out = bytearray()
    command.send(b"i", b"echo rank=$RANK; exit 5\n")
    assert command.run(lambda data, error: out.extend(data)) == 5
    assert b"rank=0" in out


@pytest.mark.parametrize(
    ("words", "node", "argv"),
    [
        (["last", "nvidia-smi", "-L"], None, ["nvidia-smi", "-L"]),
        (["last", "--node", "1", "ls", "--node"], 1, ["ls", "--node"]),
        (["--node=1", "last", "--", "-x", "--", "y"], 1, ["-x", "--", "y"]),
        (["last", "--", "--node", "2"], None, ["--node", "2"]),
    ],
)
def test_words_after_run_are_command_and_options_stay_with_it(words, node, argv, monkeypatch):
    seen = []

    class Run:
        def exec_here(self, argv, **options):
            seen.append((options["node"], [*argv]))
            return 3

    monkeypatch.setattr(api, "get", lambda run: Run())
    with pytest.raises(SystemExit) as ended:
        cli.main(["exec", *words])
    assert ended.value.code == 3
    assert seen == [(node, argv)]


def test_exec_needs_command_and_shell_a_terminal(unstarted_run):
    run = unstarted_run()
    for words, said in (
        (["exec", run.id], "Give a command after the run"),
        (["exec", run.id, "--all", "--node", "1", "true"], "--all: not together with"),
        (["shell", run.id], "is not a terminal"),
        (["exec", "-t", run.id, "true"], "is not a terminal"),
    ):
        done = click.testing.CliRunner().invoke(cli.cli, words)
        assert said in f"{done.output}{done.exception}", words


def test_ended_run_is_refused(unstarted_run):
    run = unstarted_run()
    ended = replace(run.status(), state=State.SUCCEEDED, exit_code=0)
    RunFolder(run.path).write_json("state.json", ended)
    with pytest.raises(BadInput, match="has ended"):
        run.exec(["true"])


# ---------------------------------------------------------------- cp


def test_file_arrives_whole_with_its_mode_or_not_at_all(beside, tmp_path):
    data = os.urandom(2_000_000)
    environment = {"ended": True, "python": True}

    def put(path: str, size: int) -> tuple[Any, ...]:
        words = ["-c", copying._PUT, path, "model.pt", str(size), str(0o640), "token"]
        return beside(words, data, **environment)

    goal = beside.run_dir / "model.pt"
    code, _, words = put(".", 2_000_001)
    assert (code, b"it did not arrive whole" in words) == (1, True)
    assert [each.name for each in beside.run_dir.iterdir()] == ["attempts"]
    assert put(".", 2_000_000) == (0, b"", b"")
    assert (goal.read_bytes(), goal.stat().st_mode & 0o777) == (data, 0o640)
    assert put(str(tmp_path / "other"), 2_000_000)[0] == 0
    assert (tmp_path / "other").read_bytes() == data
    code, out, _ = beside(["-c", copying._GET, "model.pt"], **environment)
    assert (code, out) == (0, b"2000000 416\n" + data)
    code, out, words = beside(["-c", copying._GET, "attempts"], **environment)
    assert (code, out, words.endswith(b"Is a directory\n")) == (1, b"", True)


def test_cp_refuses_what_is_no_regular_file_and_follows_links(ended_run, tmp_path):
    """A rename onto /dev/null would replace the device."""
    run = ended_run
    pipe, link, real = tmp_path / "pipe", tmp_path / "link", tmp_path / "real"
    os.mkfifo(pipe)
    link.symlink_to(real)
    real.write_text("old")
    for source, goal in (
        (f"{run.id}:job.json", str(pipe)), (f"{run.id}:{pipe}", str(tmp_path / "here")),
        (str(real), f"{run.id}:{pipe}"), (str(pipe), f"{run.id}:there"),
    ):  # fmt: skip
        with pytest.raises(BadInput, match=f"{pipe}: not a regular file"):
            api.cp(source, goal)
    with pytest.raises(BadInput, match="its size is not known; clusterkit exec RUN -- cat"):
        api.cp(f"{run.id}:/proc/self/status", str(tmp_path / "here"))
    with pytest.raises(BadInput, match="no file is named in RUN:"):
        api.cp(f"{run.id}:", str(tmp_path))
    for source, goal in ((f"{run.id}:job.json", str(link)), (str(link), f"{run.id}:{link}")):
        api.cp(source, goal)
        assert link.is_symlink()
        assert "demo" in real.read_text()
    assert sorted(tmp_path.glob(".*")) == []
    assert pipe.is_fifo()


def test_cp_needs_exactly_one_path_of_run():
    assert copying.parse("last:a:b", "x") == ("last", "a:b", None)
    assert copying.parse("./a:b", "last:") == ("last", None, "")
    for words in (("a", "b"), ("last:a", "last:b"), ("/x:y", ":z")):
        with pytest.raises(BadInput, match="exactly one of them must be RUN:PATH"):
            copying.parse(*words)


@pytest.fixture
def ended_run(unstarted_run):
    """A run that has succeeded, with its agent's archive."""
    run = unstarted_run()
    RunFolder(run.path).write_json(
        "state.json", replace(run.status(), state=State.SUCCEEDED, exit_code=0)
    )
    (run.path / "files").mkdir(exist_ok=True)
    (run.path / "files" / "agent.pyz").write_bytes(build())
    return run


def test_files_of_run_that_has_ended_are_copied(ended_run, tmp_path):
    run = ended_run
    (tmp_path / "here").mkdir()
    seen = []
    api.cp(f"{run.id}:job.json", str(tmp_path / "here"), progress=lambda *each: seen.append(each))
    copied = tmp_path / "here" / "job.json"
    assert copied.read_bytes() == (run.path / "job.json").read_bytes()
    assert seen[-1] == (copied.stat().st_size,) * 2
    api.cp(str(copied), f"{run.id}:other.json")
    assert (run.path / "other.json").read_bytes() == copied.read_bytes()
    with pytest.raises(BadInput, match="no-such: No such file or directory"):
        api.cp(f"{run.id}:no-such", str(tmp_path))
    with pytest.raises(BadInput, match="No such file or directory"):
        api.cp(f"{run.id}:job.json", str(tmp_path / "missing" / "x"))
    assert [each.name for each in (tmp_path / "here").iterdir()] == ["job.json"]


# ---------------------------------------------------------------- forward


def test_relay_passes_bytes_both_ways_and_names_closed_port(beside):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def echo() -> None:
            with listener.accept()[0] as connection:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)

        thread = threading.Thread(target=echo)
        thread.start()
        data = os.urandom(700_000)
        assert beside(["-c", forwarding._RELAY, str(port)], data, python=True) == (0, data, b"")
        thread.join()
    code, _, words = beside(["-c", forwarding._RELAY, str(port), "look"], python=True)
    assert (code, words) == (1, f"port {port}: Connection refused\n".encode())


@pytest.mark.parametrize("ports", ["0", "x", "1:", "70000", "1:2:3"])
def test_forward_refuses_what_is_no_port(ports):
    done = click.testing.CliRunner().invoke(cli.cli, ["forward", "last", ports])
    assert "is not PORT or LOCAL:PORT" in done.output


# ---------------------------------------------------------------- stack

TRACE = """\
Thread 0x00007fd9bdbd8b80 (most recent call first):
  File "{work}/{place}", line {line} in {function}
  File "{work}/train.py", line 40 in <module>
"""


class Ranks:
    """The worker servers of some ranks, each on a node of its own; all in one thread."""

    def __init__(self, beside: Beside, number: int, slow: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._work, self._slow = str(beside.workdir), slow
        agent_ = subprocess.Popen(
            ["sh", "-c", "sleep 600; :", "agent", "--nproc", "1"], cwd=beside.workdir
        )
        beside.processes.append(agent_)
        self._sockets = []
        for rank in range(number):
            node = beside.run_dir / f"attempts/1/node-{rank}"
            node.mkdir(exist_ok=True)
            (node / "started.json").write_text(json.dumps(agent.identity(agent_.pid)))
            line = {"rank": rank, "at": 1.0, **agent.identity(beside.rank.pid)}
            (node / "ranks.jsonl").write_text(json.dumps(line) + "\n")
            listener = socket.socket(socket.AF_UNIX)
            handle = os.open(node, os.O_PATH)
            listener.bind(f"/proc/self/fd/{handle}/rank-{rank}.sock")
            os.close(handle)
            listener.listen()
            self._selector.register(listener, selectors.EVENT_READ, rank)
            self._sockets.append(listener)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                connection, _ = key.fileobj.accept()  # type: ignore[union-attr]
                with connection:
                    asked = connection.recv(1 << 16)
                    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + self._answer(asked, key.data))

    def _answer(self, asked: bytes, rank: int) -> bytes:
        if b"fr_trace_json" in asked:
            entry = {
                "collective_seq_id": 60, "profiling_name": "gloo:all_reduce", "is_p2p": False,
                "process_group": ["0", "default_pg"], "input_sizes": [[1000]], "retired": False,
                "state": "scheduled", "time_created_ns": 1, "timeout_ms": 1_800_000,
            }  # fmt: skip
            return json.dumps({"entries": [] if rank == self._slow else [entry]}).encode()
        if b"dump_traceback" in asked:
            where = ("data.py", 40, "read") if rank == self._slow else ("train.py", 18, "step")
            place, line, function = where
            text = TRACE.format(work=self._work, place=place, line=line, function=function)
            return text.encode()
        return b"{}"


def test_200_ranks_are_described_in_words_of_hang_report(beside, monkeypatch):
    Ranks(beside, 200, slow=7)
    began = time.monotonic()
    monkeypatch.chdir(beside.workdir)
    records = stack.records({"run_dir": str(beside.run_dir), "nodes": [*range(200)], "rank": None})
    seconds = time.monotonic() - began
    assert len(records) == 200
    plan = Plan(run_id="x", run_dir="/x", backend="local", summary="", nodes=200, world_size=200,
                topology={"nproc_per_node": 1})  # fmt: skip
    text = inside.described({each["rank"]: each for each in records}, plan, whole=True)
    assert text == (
        "rank 7 on node 7 has not entered all_reduce #60, which ranks 0-6 and 8-199 wait in; rank "
        "7 on node 7 is at data.py:40 in read(); ranks 0-6 and 8-199 are at train.py:18 in step(), "
        "in all_reduce #60"
    )
    assert records[7]["trace"].startswith("Thread 0x")
    assert seconds < 5, seconds
    (only,) = stack.records({"run_dir": str(beside.run_dir), "nodes": [7], "rank": 7})
    assert inside.described({7: only}, plan, whole=False) == (
        "rank 7 on node 7 is at data.py:40 in read()"
    )
