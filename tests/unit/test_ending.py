"""How ranks end: asked alone, killed with all that they started, and after their agent was."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterkit import agent
from clusterkit.agent import ending, limits
from clusterkit.agent.report import node_state
from clusterkit.backends.node_status import NativeState, NodeFiles, judge_node
from clusterkit.output.diagnose import diagnose
from clusterkit.run import folder as run_folder
from clusterkit.run.status import State

RUN = "import sys; from clusterkit.agent import __main__; sys.exit(__main__.main(sys.argv[1:]))"
DEAF = 'trap "" TERM; echo "$$" >"$DIR/up"; sleep 600'
"""A rank that ignores SIGTERM, as the process that it waits for does, and prints nothing."""
SAVES = (
    'import os, signal, subprocess, sys, time\n'
    'worker = subprocess.Popen(["sleep", "600"])\n'
    'def save(number, frame):\n'
    '    with open(os.environ["CLUSTERKIT_PIPE"] + "-0", "w") as log:\n'
    '        print("worker", worker.poll(), file=log)\n'
    '    worker.kill()\n'
    '    worker.wait()\n'
    '    sys.exit(3)\n'
    'signal.signal(signal.SIGTERM, save)\n'
    'with open(os.environ["DIR"] + "/up", "w") as up:\n'
    '    print(os.getpid(), file=up)\n'
    'while True:\n'
    '    time.sleep(0.05)\n'
)  # fmt: skip


class Host:
    """A run on this host, whose agents are ended with the test."""

    def __init__(self, path):
        self.path = path
        self.agents = []
        os.mkfifo(path / "up")

    def start(self, *argv, attempt=1, grace=5.0, options=("--spawn",), run=RUN, nproc=1, **more):
        env = {
            "PATH": os.environ["PATH"], "CLUSTERKIT_RUN_DIR": str(self.path), "DIR": str(self.path),
            "CLUSTERKIT_NODE_DIR": str(self.node(attempt)), "CLUSTERKIT_ATTEMPT": str(attempt),
            **more,
        }  # fmt: skip
        words = ["run", "--nproc", str(nproc), "--workdir", str(self.path), "--grace", str(grace)]
        self.agents.append(
            subprocess.Popen(
                [sys.executable, "-c", run, *words, *options, "--", *argv], env=env,
                stderr=subprocess.PIPE,
            )
        )  # fmt: skip
        return self.agents[-1]

    def node(self, attempt=1):
        return Path(run_folder.node_dir(str(self.path), attempt, 0))

    def up(self):
        """The process id of the next rank that has started."""
        while True:  # a rank that has written may still have it open: then nothing comes
            with (self.path / "up").open() as pipe:
                if line := pipe.readline():
                    return int(line)

    def log(self, attempt=1):
        return (self.node(attempt) / "log").read_text()

    def close(self):
        for each in self.agents:
            each.kill()
        ending.stop(str(self.path), 0.0)
        for each in self.agents:
            each.communicate()


@pytest.fixture
def host(tmp_path):
    found = Host(tmp_path)
    yield found
    found.close()


def gone(pid, seconds=60.0):
    agent.wait_gone([pid], seconds)
    return agent.start_ticks(pid) is None


def test_sigterm_goes_to_rank_and_not_to_its_children(host):
    process = host.start(sys.executable, "-c", SAVES)
    host.up()
    process.terminate()
    assert process.wait() == 3
    assert "worker None" in host.log()
    assert agent.processes_of(str(host.path)) == []


def test_rank_and_children_are_killed_at_end_of_grace(host):
    process = host.start("sh", "-c", DEAF, grace=0.5)
    host.up()
    process.terminate()
    assert process.wait() == 128 + signal.SIGKILL
    assert agent.processes_of(str(host.path)) == []


def test_ranks_ignoring_sigterm_end_after_grace_when_agent_is_killed(host):
    process = host.start("sh", "-c", DEAF, grace=1.0)
    rank = host.up()
    began = time.monotonic()
    process.kill()
    assert gone(rank)
    assert time.monotonic() - began >= 0.9  # it had the grace
    for left in agent.processes_of(str(host.path)):
        assert gone(left)
    assert "this node's agent was killed; its ranks end within 1 s" in host.log()


def test_rank_of_killed_agent_is_asked_once_and_keeps_its_workers(host):
    process = host.start(sys.executable, "-c", SAVES, grace=60.0)
    rank = host.up()
    process.kill()
    assert gone(rank)
    for left in agent.processes_of(str(host.path)):
        assert gone(left)
    assert host.log().count("worker None") == 1  # it was asked once


def test_node_counts_as_alive_until_no_process_is_left(host):
    process = host.start("sh", "-c", DEAF, grace=3.0)
    rank = host.up()
    process.kill()
    process.wait()
    while agent.start_ticks(rank) is not None:
        state, _ = node_state(host.node())
        assert state["alive"] or agent.start_ticks(rank) is None
    for left in agent.processes_of(str(host.path)):
        assert gone(left)
    assert node_state(host.node())[0] == {"begun": True, "alive": False, "ended": True}


@pytest.mark.parametrize("attempt", [1, 2])
def test_no_rank_starts_while_rank_of_killed_agent_lives(host, attempt):
    process = host.start("sh", "-c", DEAF, grace=2.0)
    first = host.up()
    os.kill(json.loads((host.node() / "started.json").read_bytes())["guard"]["pid"], signal.SIGKILL)
    process.kill()
    process.wait()
    assert agent.start_ticks(first) is not None
    host.start("sh", "-c", DEAF, attempt=attempt, grace=0.5)
    second = host.up()
    assert agent.start_ticks(first) is None
    assert agent.start_ticks(second) is not None


def test_stop_without_agent_ends_recorded_process_groups(host):
    """Also of ranks that have emptied their environment, and what these have started."""
    script = 'trap "" TERM; echo "$$" >"$0/up"; sleep 600'
    process = host.start("env", "-i", "sh", "-c", script, str(host.path), grace=60.0)
    rank = host.up()
    # A rank that the agent knows of, as it would have told by itself.
    record = {"rank": 0, "at": 0.0, **agent.identity(rank)}
    (host.node() / "ranks.jsonl").write_text(json.dumps(record) + "\n")
    guard = json.loads((host.node() / "started.json").read_bytes())["guard"]["pid"]
    os.kill(guard, signal.SIGKILL)
    process.kill()
    process.wait()
    ended = ending.stop(str(host.path), 0.5)
    assert rank in ended["killed"]
    assert ended["left"] == []
    assert agent.start_ticks(rank) is None


def test_stop_names_process_it_could_not_end(tmp_path, monkeypatch):
    """As a process in state D: SIGKILL has no effect."""
    monkeypatch.setattr(limits, "KILL_SECONDS", 0.3)
    monkeypatch.setattr(ending, "send", lambda pids, signum: None)
    lost = subprocess.Popen(["sleep", "600"], env={"CLUSTERKIT_RUN_DIR": str(tmp_path)})
    try:
        ended = ending.stop(str(tmp_path), 0.1)
        assert ended["left"] == [f"process {lost.pid} (sleep) does not end on SIGKILL"]
    finally:
        lost.kill()
        lost.wait()


STUCK = (
    "import os, sys; from clusterkit.agent import __main__, ending, limits; "
    "limits.KILL_SECONDS = 1.0; send = ending.send; "
    "ending.send = lambda pids, signum: signum == 15 and open(os.environ['DIR'] + '/asked', 'w'); "
    "sys.exit(__main__.main(sys.argv[1:]))"
)


def test_unkillable_rank_is_named_and_does_not_block_agent(host):
    process = host.start("sh", "-c", DEAF, grace=0.3, run=STUCK)
    rank = host.up()
    process.terminate()
    # Its log goes on meanwhile.
    while not (host.path / "asked").exists():
        time.sleep(0.01)
    assert process.wait(60) == 128 + signal.SIGKILL
    ended = json.loads((host.node() / "exit.json").read_bytes())
    assert f"process {rank} (sh) does not end on SIGKILL" in ended["reason"]
    os.kill(rank, signal.SIGKILL)
    assert gone(rank)


@pytest.mark.parametrize("oom_kills", [0, 2])
def test_killed_agent_is_reported_with_any_oom_kill(host, oom_kills):
    process = host.start("sh", "-c", 'echo "$$" >"$DIR/up"; sleep 600', grace=1.0)
    rank = host.up()
    started = host.node() / "started.json"
    record = json.loads(started.read_bytes())
    record["oom_kills"] -= oom_kills  # so many fewer when it began
    started.write_text(json.dumps(record))
    process.kill()
    process.wait()
    assert gone(rank)
    assert gone(record["guard"]["pid"])
    found = judge_node(
        0, "h", (files := NodeFiles.read(host.node())), NativeState.of_process(files)
    )
    assert (found.state, found.exit_code) == (State.FAILED, 137)
    assert (found.reason or "").partition(": ")[2].startswith("the agent was killed ")
    assert ("counted an out-of-memory kill" in found.reason) == (oom_kills > 0)
    failure = diagnose([found], [])
    assert (failure.node, failure.exit_code, failure.cause) == (0, 137, found.reason)
    assert "memory" in (failure.hint or "") or not oom_kills


def test_agent_that_failed_by_itself_is_not_reported_as_killed(host):
    process = host.start("sh", "-c", 'echo "$$" >"$DIR/up"; sleep 600', grace=1.0)
    rank = host.up()
    guard = json.loads((host.node() / "started.json").read_bytes())["guard"]["pid"]
    (host.node() / "agent.log").write_text("Traceback\nKeyError: 3\n")
    process.kill()
    process.wait()
    assert gone(rank)
    assert gone(guard)
    found = judge_node(
        0, "h", (files := NodeFiles.read(host.node())), NativeState.of_process(files)
    )
    assert found.reason == "its agent ended without reporting an exit code: KeyError: 3"


LEAVES = (
    'import multiprocessing, os, subprocess, sys\n'
    'from multiprocessing import resource_tracker\n'
    'resource_tracker.ensure_running()\n'
    'left = [subprocess.Popen(["sleep", "600"]).pid for _ in range(int(sys.argv[1]))]\n'
    'with open(os.environ["DIR"] + "/up", "w") as up:\n'
    '    print(*left, file=up)\n'
    'os._exit(int(sys.argv[2]))\n'
)  # fmt: skip


@pytest.mark.parametrize(("count", "code"), [(2, 0), (9, 0), (0, 0), (2, 3)])
def test_processes_left_by_successful_ranks_are_named(host, count, code):
    process = host.start(sys.executable, "-c", LEAVES, str(count), str(code))
    left = (host.path / "up").read_text().split()
    assert process.wait() == code
    for each in left:
        assert agent.start_ticks(int(each)) is None
    told = [line.partition(" - ")[2] for line in host.log().splitlines() if "left" in line]
    if code or not count:
        assert told == []
    else:
        names = ", ".join(f"{pid} (sleep 600)" for pid in sorted(map(int, left))[:6])
        more = f" and {count - 6} more" if count > 6 else ""
        line = "the ranks left processes running, which are ended now: "
        assert told == [f"{line}{names}{more}"]


def test_guard_ends_with_run(host):
    process = host.start("sh", "-c", 'echo "$$" >"$DIR/up"')
    host.up()
    assert process.wait() == 0
    assert agent.processes_of(str(host.path)) == []


ECHO = (
    'import os, sys, time\n'
    'rank = os.environ["LOCAL_RANK"]\n'
    'os.dup2(os.open(os.environ["CLUSTERKIT_PIPE"] + "-" + rank, os.O_WRONLY), 2)\n'
    'os.write(2, f"@clusterkit-rank {rank} {os.getpid()}\\n".encode())\n'
    'failed = os.environ["DIR"] + "/failed"\n'
    'if os.environ["LOCAL_RANK"] == "0":\n'
    '    open(failed, "w").close()\n'
    '    raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")\n'
    'while not os.path.exists(failed):\n'
    '    time.sleep(0.05)\n'
    'try:\n'
    '    raise ValueError("the cause")\n'
    'finally:\n'
    '    time.sleep(3)  # it cleans up\n'
)  # fmt: skip


def test_agent_waits_for_rank_that_cleans_up_before_traceback(host):
    patient = RUN.replace(
        "sys.exit", "from clusterkit.agent import limits; limits.ECHO_SECONDS = 60.0; sys.exit"
    )
    process = host.start(sys.executable, "-c", ECHO, nproc=2, run=patient)
    assert process.wait() == 1
    ends = json.loads((host.node() / "exit.json").read_bytes())["processes"]
    assert [(end["exit_code"], end["asked"]) for end in ends] == [(1, False), (1, False)]
    assert "ValueError: the cause" in host.log()


def test_agent_does_not_wait_forever_for_rank_that_goes_on(host):
    quick = RUN.replace(
        "sys.exit", "from clusterkit.agent import limits; limits.ECHO_SECONDS = 1.0; sys.exit"
    )
    process = host.start(sys.executable, "-c", ECHO.replace("(3)", "(600)"), nproc=2, run=quick)
    assert process.wait() == 1
    ends = json.loads((host.node() / "exit.json").read_bytes())["processes"]
    assert [end["asked"] for end in ends] == [False, True]


def test_cancel_during_end_of_hang_prevents_restart(host):
    """The hang would be followed by a restart."""
    hang = (
        "import os, threading, time; from clusterkit.agent import __main__, messages; "
        "from clusterkit.agent.node import Node; start = Node._start; "
        "wait = lambda self: ([time.sleep(0.01) for _ in iter(lambda: "
        "os.path.exists(os.environ['DIR'] + '/go'), True)], "
        "self._order(messages.EndHang(0, 'rank 0 hangs'))); "
        "Node._start = lambda self: (start(self), threading.Thread("
        "target=wait, args=(self,), daemon=True).start() if self.files.attempt == 1 else None); "
    )
    deaf = "trap 'echo asked >>$DIR/asked' TERM; echo $$ >$DIR/up; while :; do sleep 0.1; done"
    process = host.start(
        "sh", "-c", deaf, grace=3.0, options=("--spawn", "--restarts", "1"),
        run=hang + RUN, NODE_RANK="0", CLUSTERKIT_RUN_ID="r",
    )  # fmt: skip
    host.up()
    (host.path / "go").touch()
    while not (host.path / "asked").exists():
        time.sleep(0.01)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGKILL
    ended = json.loads((host.node() / "exit.json").read_bytes())
    assert (ended["reason"], ended.get("next")) == ("stopped on request", None)
    assert (host.path / "asked").read_text() == "asked\n"  # once


def test_agent_that_cannot_begin_next_attempt_records_why(host):
    """As with a disk quota, of which statvfs says nothing."""
    full = (
        "import errno; from clusterkit.agent import __main__; "
        "from clusterkit.agent.node_files import NodeFiles; "
        "NodeFiles._begin, begin = lambda self, folder: begin(self, folder) "
        "if folder.parts[-2] == '1' else (_ for _ in ()).throw("
        "OSError(errno.EDQUOT, 'Disk quota exceeded')), NodeFiles._begin; "
    )
    process = host.start(
        "sh", "-c", "echo $$ >$DIR/up; exit 7", options=("--spawn", "--restarts", "2"),
        run=full + RUN, NODE_RANK="0", CLUSTERKIT_RUN_ID="r",
    )  # fmt: skip
    host.up()
    assert process.wait(60) == 7
    ended = json.loads((host.node() / "exit.json").read_bytes())
    assert (ended["exit_code"], ended.get("next")) == (7, None)
    assert "not started again: [Errno 122] Disk quota exceeded" in ended["remarks"]
    assert agent.processes_of(str(host.path)) == []


def test_deepspeed_ranks_are_asked_to_end_all_at_once(tmp_path, host):
    """Its launcher asks the next one when the last has ended: some would have no time to save."""
    package = tmp_path / "deepspeed" / "launcher"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "launch.py").write_text(
        "import subprocess, sys, time\n"
        "program, folder = sys.argv[1:]\n"
        "for number in range(2):\n"
        "    subprocess.Popen(['/bin/sh', f'{folder}/rank.sh', sys.executable, program])\n"
        "time.sleep(600)\n"
    )
    (tmp_path / "rank.sh").write_text('trap : TERM\n(exec "$@")\n')
    (tmp_path / "saves.py").write_text(
        "import os, signal, time\n"
        "folder = os.environ['DIR']\n"
        "def save(number, frame):\n"
        "    open(f'{folder}/asked-{os.getpid()}', 'x').close()\n"  # once
        "    while len([name for name in os.listdir(folder) if name.startswith('asked')]) < 2:\n"
        "        time.sleep(0.01)\n"
        "    os._exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "open(f'{folder}/up-{os.getpid()}', 'x').close()\n"
        "while True:\n"
        "    time.sleep(0.05)\n"
    )
    (package / "runner.py").write_text(
        "import subprocess, sys\n"
        "subprocess.call([sys.executable, '-m', 'deepspeed.launcher.launch', *sys.argv[1:]])\n"
    )
    launch = [sys.executable, "-m", "deepspeed.launcher.runner"]
    process = host.start(
        *launch, str(tmp_path / "saves.py"), str(tmp_path), grace=60.0, options=(),
        PYTHONPATH=str(tmp_path),
    )  # fmt: skip
    while len(ranks := [path.name[3:] for path in tmp_path.glob("up-*")]) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert {path.name[6:] for path in tmp_path.glob("asked-*")} == set(ranks)
