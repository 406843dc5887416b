"""The fork server: ranks as forks of one Python, as the agent starts, ends and loses them."""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

from clusterkit import runs
from clusterkit.agent.launcher import Launcher
from clusterkit.agent.node_log import NodeLog
from clusterkit.agent.processes import descendants
from clusterkit.logs import parse_lines

RUN = (
    "import sys; from clusterkit.agent import __main__, limits; limits.RANKS_GRACE = 0.0; "
    "sys.exit(__main__.main(sys.argv[1:]))"
)
BLOCKED = "open({!r}).read()\n"
"""An import that goes on as long as nobody writes to that pipe."""


class Agent:
    """An ``agent run --fork`` of a program, whose modules lie beside it."""

    def __init__(
        self,
        folder,
        program,
        *arguments,
        nproc=1,
        python=(),
        options=(),
        interpreter=sys.executable,
        **env,
    ):
        self.folder = Path(runs.node_dir(str(folder / "run"), 1, 0))
        (folder / "program.py").write_text(program)
        words = [interpreter, *python]
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, "run", "--nproc", str(nproc), "--workdir", str(folder),
             "--grace", "5", "--fork", str(len(words)), *options, "--", *words, "program.py",
             *arguments],
            env={"PATH": os.environ["PATH"], "CLUSTERKIT_RUN_DIR": str(folder / "run"),
                 "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONUNBUFFERED": "1",
                 "CLUSTERKIT_NODE_DIR": str(self.folder), **env},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def end(self):
        """The exit code; nothing is left of it."""
        self.process.communicate(timeout=60)
        return self.process.returncode

    def lines(self):
        log = self.folder / "log"
        raw = log.read_bytes().splitlines() if log.exists() else []
        return [line for each in raw for line in parse_lines(each, 0)]

    def says(self, rank=0):
        return [line.text for line in self.lines() if line.rank == rank]

    def until_said(self, text):
        while not any(text in line.text for line in self.lines()):
            assert self.process.poll() is None, self.lines()
            time.sleep(0.01)

    @property
    def exit(self):
        return json.loads((self.folder / "exit.json").read_bytes())


@pytest.fixture
def agent(tmp_path):
    started = []

    def begin(program, *arguments, **settings):
        started.append(Agent(tmp_path, program, *arguments, **settings))
        return started[-1]

    yield begin
    for each in started:
        each.process.terminate()
        each.process.communicate()


def server_of(agent):
    """The process id of its fork server."""
    while True:
        for pid in descendants(agent.process.pid):
            if b"clusterkit" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        time.sleep(0.01)


SHOW = """
import json, os
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK"
names += " ROLE_WORLD_SIZE ROLE_NAME"
print(json.dumps([os.environ.get(name) for name in names.split()]))
print(json.dumps({k: v for k, v in os.environ.items() if k.startswith("TORCHELASTIC")}))
"""


def test_a_rank_has_what_torchrun_sets(agent):
    begun = agent(SHOW, nproc=2, options=["--nodes", "3"], NODE_RANK="2", CLUSTERKIT_RUN_ID="r")
    assert begun.end() == 0
    for local_rank in (0, 1):
        rank = 4 + local_rank
        place, elastic = (json.loads(text) for text in begun.says(rank))
        assert place == [*map(str, (rank, local_rank, 6, 2, 2, 3, rank, 6)), "default"]
        assert elastic == {
            "TORCHELASTIC_RUN_ID": "r",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCHELASTIC_ERROR_FILE": str(begun.folder / f"rank-{rank}-error.json"),
        }


def test_one_failed_rank_ends_the_others_and_its_code_is_the_node_s(agent):
    program = (
        "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(9)\n"
        "while True: time.sleep(600)"
    )
    begun = agent(program, nproc=2)
    assert begun.end() == 9
    ends = [(end["rank"], end["exit_code"]) for end in begun.exit["processes"]]
    assert ends == [(1, 9), (0, -signal.SIGTERM)]


def test_a_server_that_is_killed_is_the_reason_and_no_hang(agent):
    begun = agent("import time\nprint('on')\nwhile True: time.sleep(600)", nproc=2)
    begun.until_said("on")
    os.kill(server_of(begun), signal.SIGKILL)
    assert begun.end() == 128 + signal.SIGKILL
    assert begun.exit["reason"] == "the Python that forks the ranks ended: SIGKILL"


def test_an_agent_that_is_killed_takes_the_ranks_along(agent):
    begun = agent("import time\nprint('on')\nwhile True: time.sleep(600)", nproc=2)
    begun.until_said("on")
    handles = [os.pidfd_open(pid) for pid in descendants(begun.process.pid)]
    begun.process.kill()
    with selectors.DefaultSelector() as selector:
        for handle in handles:
            selector.register(handle, selectors.EVENT_READ)
        while handles:
            ready = selector.select(60)
            assert ready
            for key, _ in ready:
                selector.unregister(key.fd)
                os.close(key.fd)
                handles.remove(key.fd)


def test_a_cancel_need_not_wait_for_an_import(agent, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "torch.py").write_text(
        f"print('importing', flush=True)\n{BLOCKED.format(str(pipe))}"
    )
    begun = agent("import torch", nproc=2, PYTHONPATH=str(tmp_path / "packages"))
    begun.until_said("importing")
    begun.process.terminate()
    assert begun.end() == 128 + signal.SIGTERM
    assert begun.says(0) == begun.says(1) == []


@pytest.mark.parametrize("word", ["ctypes.string_at(0)", "os.kill(os.getpid(), 9)"])
def test_an_import_that_kills_the_server_is_left_to_the_program(agent, tmp_path, word):
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "torch.py").write_text(
        f"import ctypes, os\nif 'RANK' not in os.environ: {word}\n"
    )
    begun = agent("import torch; print('in')", PYTHONPATH=str(tmp_path / "packages"))
    assert begun.end() == 0
    assert begun.says(0) == ["in"]


def test_a_second_start_forks_from_the_same_server(tmp_path, monkeypatch):
    """With what the first has had imported, and nothing of what it did."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "torch.py").write_text("import os\nserver = os.getpid()\n")
    program = tmp_path / "program.py"
    program.write_text(
        "import os, torch\nprint(torch.server == os.getppid(), vars(torch).pop('done', None), "
        "os.environ['TORCHELASTIC_RESTART_COUNT'])\ntorch.done = True\n"
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    log = NodeLog(tmp_path)
    with selectors.DefaultSelector() as selector:
        options = Namespace(
            nproc=2, nodes=1, fork=1, spawn=False, tagged=False, grace=5.0,
            argv=[sys.executable, str(program)],
        )  # fmt: skip
        launcher = Launcher(options, tmp_path, log, selector)
        launcher.open_pipes()
        launcher.prepare()
        for _ in range(2):
            assert launcher.start() is None
            while launcher.running:
                for key, _ in selector.select():
                    key.data()
            launcher.finish_output()
            assert launcher.exit_code == 0
        launcher.close()
    texts = [line.split(b" ", 2)[2] for line in (tmp_path / "log").read_bytes().splitlines()]
    assert sorted(texts) == [b"True None 0"] * 2 + [b"True None 1"] * 2


def test_a_python_that_is_not_there_is_127_with_a_reason(agent):
    begun = agent("", python=[], interpreter="/nope/python")
    assert begun.end() == 127
    assert begun.exit["reason"] == "No such file or directory: /nope/python"
