"""The fork server: ranks as forks of one Python, as the agent starts, ends and loses them."""

import json
import os
import selectors
import signal
import subprocess
import sys
import sysconfig
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from clusterkit.agent import forkserver
from clusterkit.agent.fork import ForkLauncher
from clusterkit.agent.node_log import NodeLog
from clusterkit.agent.processes import descendants
from clusterkit.run import folder as run_folder
from clusterkit.run.logs import parse_lines

RUN = (
    "import sys; from clusterkit.agent import __main__, limits; limits.RANKS_GRACE = 0.0; "
    "sys.exit(__main__.main(sys.argv[1:]))"
)
BLOCKED = "open({!r}).read()\n"
"""An import that goes on as long as nobody writes to that pipe."""


SHARED = ("PYTHONPATH", "PYTHONUSERBASE")


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
        run="run",
        **env,
    ):
        self.folder = Path(run_folder.node_dir(str(folder / run), 1, 0))
        (folder / "program.py").write_text(program)
        words = [interpreter, *python]
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", RUN, "run", "--nproc", str(nproc),
             "--workdir", str(folder), "--grace", "5", "--fork", str(len(words)), *options,
             "--", *words, "program.py", *arguments],
            env={"PATH": os.environ["PATH"], "CLUSTERKIT_RUN_DIR": str(folder / run),
                 "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONUNBUFFERED": "1",
                 **{name: value for name, value in os.environ.items() if name in SHARED},
                 "CLUSTERKIT_NODE_DIR": str(self.folder), **env},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def end(self):
        """The exit code; nothing is left of it."""
        self.process.communicate(timeout=240)
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
def packages(tmp_path, monkeypatch):
    """Writes a module where packages are installed, for the programs."""
    monkeypatch.setenv("PYTHONUSERBASE", str(tmp_path / "user"))
    place = {"userbase": str(tmp_path / "user")}
    folder = Path(sysconfig.get_path("purelib", f"{os.name}_user", place))
    folder.mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", str(folder))

    def write(name, text):
        (folder / f"{name}.py").write_text(text)

    return write


@pytest.fixture
def agent(tmp_path):
    started = []

    def begin(program, *arguments, **settings):
        started.append(Agent(begin.folder, program, *arguments, **settings))
        return started[-1]

    begin.folder = tmp_path
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


def test_forked_rank_gets_torchrun_environment(agent):
    begun = agent(
        SHOW, nproc=2, options=["--nodes", "3"], NODE_RANK="2", CLUSTERKIT_RUN_ID="r",
        CLUSTERKIT_ATTEMPT="3", TORCHELASTIC_MAX_RESTARTS="4",
    )  # fmt: skip
    assert begun.end() == 0
    for local_rank in (0, 1):
        rank = 4 + local_rank
        place, elastic = (json.loads(text) for text in begun.says(rank))
        assert place == [*map(str, (rank, local_rank, 6, 2, 2, 3, rank, 6)), "default"]
        assert elastic == {
            "TORCHELASTIC_RUN_ID": "r",
            "TORCHELASTIC_RESTART_COUNT": "2",
            "TORCHELASTIC_MAX_RESTARTS": "4",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCHELASTIC_ERROR_FILE": str(begun.folder / f"rank-{rank}-error.json"),
        }


def test_one_failed_rank_ends_others_and_gives_node_exit_code(agent):
    os.mkfifo(agent.folder / "pipe")
    program = (
        "import os, sys, time\nif os.environ['RANK'] == '1': open('pipe').read(); sys.exit(9)\n"
        "open('pipe', 'w').close()\nwhile True: time.sleep(600)"
    )
    begun = agent(program, nproc=2)
    assert begun.end() == 9
    ends = [(end["rank"], end["exit_code"]) for end in begun.exit["processes"]]
    assert ends == [(1, 9), (0, -signal.SIGTERM)]


def test_killed_fork_server_ends_node_with_reason(agent):
    begun = agent("import time\nprint('on')\nwhile True: time.sleep(600)", nproc=2)
    begun.until_said("on")
    os.kill(server_of(begun), signal.SIGKILL)
    assert begun.end() == 128 + signal.SIGKILL
    assert begun.exit["reason"] == "the Python that forks the ranks ended: SIGKILL"
    assert {end["rank"] for end in begun.exit["processes"]} == {None}  # none of them failed first


def test_killed_agent_ends_forked_ranks(agent):
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


def test_cancel_does_not_wait_for_import(agent, packages, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    packages("torch", f"print('importing', flush=True)\n{BLOCKED.format(str(pipe))}")
    begun = agent("import torch", nproc=2)
    begun.until_said("importing")
    begun.process.terminate()
    assert begun.end() == 128 + signal.SIGTERM
    assert begun.says(0) == begun.says(1) == []


@pytest.mark.parametrize("word", ["ctypes.string_at(0)", "os.kill(os.getpid(), 9)"])
def test_import_that_kills_fork_server_is_left_to_program(agent, packages, word):
    packages("torch", f"import ctypes, os\nif 'RANK' not in os.environ: {word}\n")
    begun = agent("import torch; print('in')")
    assert begun.end() == 0
    assert begun.says(0) == ["in"]


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
         "1 thread"),
        ("import socket; kept = socket.socket()", "socket:"),
    ],
)  # fmt: skip
def test_import_unsafe_for_fork_is_left_to_program(agent, packages, word, why):
    packages("torch", f"import os\npid = os.getpid()\n{word}\n")
    program = "import os, torch\nprint(torch.pid == os.getpid())"
    begun = agent(program)
    assert begun.end() == 0
    assert begun.says(0) == ["True"]
    assert f"preload: the imports left {why}" in " ".join(begun.says(None))


def test_module_beside_program_shadows_installed_one(agent, packages):
    packages("torch", "import mine\n")
    packages("mine", "own = False\n")
    (agent.folder / "mine.py").write_text("own = True\n")
    begun = agent("import torch, mine\nprint(mine.own)")
    assert begun.end() == 0
    assert begun.says(0) == ["True"]


AHEAD = """
import os, sys
print("torch" in sys.modules, "SET" in os.environ)
import torch
print(torch.pid == os.getppid(), sys.modules["torch"] is torch, os.environ["SET"])
"""


def test_preload_of_torch_is_same_in_every_run(agent, packages):
    """And not there before the program imports it; the run's log names it, the ranks do not."""
    packages("torch", "import os\npid = os.getpid()\nos.environ['SET'] = 'by torch'\n")
    packages("other", "import os\npid = os.getpid()\n")
    program = f"{AHEAD}import other\nprint(other.pid == os.getpid())"
    said = []
    for run in ("first", "second", "third"):
        begun = agent(program, run=run)
        assert begun.end() == 0
        said.append((begun.says(), begun.says(None)))
    ranks = ["False False", "True True by torch", "True"]
    assert said == [(ranks, ["preloaded: torch"])] * 3


@pytest.mark.parametrize(
    ("preload", "ahead", "note"),
    [
        ("", "False", "preloaded: nothing; preload: []"),
        ("other,nowhere", "True", "preloaded: other; nowhere: ModuleNotFoundError: No module"),
    ],
)
def test_preload_option_names_modules_imported_ahead(agent, packages, preload, ahead, note):
    packages("torch", "import os\npid = os.getpid()\n")
    packages("other", "import os\npid = os.getpid()\n")
    program = "import os, torch, other\nprint(torch.pid == os.getpid(), other.pid == os.getppid())"
    begun = agent(program, options=["--preload", preload])
    assert begun.end() == 0
    assert begun.says() == [f"True {ahead}"]
    assert begun.says(None)[0].startswith(note)


def test_package_that_changes_torch_environment_is_remarked(agent, packages, tmp_path):
    """The source does not show it: here it is one that is taken to be harmless."""
    packages("torch", "import os\nread = os.environ.get('TORCH_LOGS')\n")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "tqdm.py").write_text("import os\nos.environ['TORCH_LOGS'] = 'x'")
    path = f"{tmp_path / 'site-packages'}:{os.environ['PYTHONPATH']}"
    begun = agent("import tqdm, torch\nprint(torch.read)", nproc=2, PYTHONPATH=path)
    assert begun.end() == 0
    assert begun.says(0) == begun.says(1) == ["None"]
    assert begun.says(None) == [
        "preloaded: torch",
        "TORCH_LOGS was changed before torch was imported, but torch was preloaded without the "
        "change; set `preload: []` in the job file",
    ]
    ended = json.loads((begun.folder / "exit.json").read_bytes())
    assert ended["remarks"] == begun.says(None)[1:]


def test_remark_mark_printed_by_program_is_plain_output(agent):
    begun = agent("print('@clusterkit-remark bought')")
    assert begun.end() == 0
    assert begun.says() == ["@clusterkit-remark bought"]
    assert json.loads((begun.folder / "exit.json").read_bytes())["remarks"] == []


def test_program_without_torch_import_has_no_torch_preloaded(agent, packages):
    packages("torch", "raise SystemExit('imported')")
    begun = agent("import sys\nprint('torch' in sys.modules)")
    assert begun.end() == 0
    assert begun.says() == ["False"]


def test_torch_import_in_package_of_program_is_detected(agent, packages):
    packages("torch", "import os\npid = os.getpid()\n")
    (agent.folder / "pack").mkdir()
    (agent.folder / "pack" / "__init__.py").write_text("from . import train\n")
    (agent.folder / "pack" / "train.py").write_text("import torch\n")
    begun = agent("import os, sys, pack.train\nprint(sys.modules['torch'].pid == os.getppid())")
    assert begun.end() == 0
    assert begun.says() == ["True"]


NAMES = """
import os, socket
def find(name, port):
    if not os.path.exists("known"):
        print("asked for", name, flush=True)
        raise socket.gaierror
socket.getaddrinfo = find
print("imported", flush=True)
"""


@pytest.mark.parametrize("nodes", [1, 2])
def test_imports_run_before_node_0_name_resolves_and_ranks_wait(agent, packages, nodes):
    packages("torch", NAMES)
    program = "import torch; print('ran')"
    begun = agent(program, options=["--nodes", str(nodes)], MASTER_ADDR="node-0")
    if nodes > 1:
        begun.until_said("asked for b'node-0'")
        (agent.folder / "known").touch()
    assert begun.end() == 0
    texts = [line.text for line in begun.lines() if not line.text.startswith("preloaded:")]
    assert [*dict.fromkeys(texts)] == ["imported", *["asked for b'node-0'"] * (nodes - 1), "ran"]


def test_cancel_does_not_wait_for_name_resolution(agent, packages):
    packages("torch", NAMES)
    begun = agent("import torch; print('ran')", options=["--nodes", "2"], MASTER_ADDR="node-0")
    begun.until_said("asked for b'node-0'")
    begun.process.terminate()
    assert begun.end() == 128 + signal.SIGTERM
    assert begun.says() == []


def test_forked_ranks_draw_their_own_random_numbers(agent, packages):
    packages("torch", "import multiprocessing, random\nimport numpy.random\n")
    program = (
        "import multiprocessing, random, torch, numpy\n"
        "print(random.random(), numpy.random.random(), "
        "multiprocessing.current_process().authkey.hex())"
    )
    begun = agent(program, nproc=2)
    assert begun.end() == 0
    drawn = [begun.says(rank)[0].split() for rank in (0, 1)]
    assert all(one != other for one, other in zip(*drawn, strict=True))


TORCH = """
import os, socket, sys
import torch
from torch.distributed.elastic.multiprocessing.errors import record
with socket.socket(socket.AF_UNIX) as connection:
    os.chdir(os.environ["CLUSTERKIT_NODE_DIR"])
    connection.connect("rank-0.sock")
    connection.sendall(b"GET /handler/ HTTP/1.0\\r\\n\\r\\n")
    print(b"fr_trace_json" in connection.recv(4096))
@record
def main(): raise ValueError("recorded")
main()
"""


def test_torch_debug_socket_answers_and_record_writes_error_file(agent):
    begun = agent(TORCH)
    assert begun.end() == 1
    assert begun.says()[:2] == ["True", "Traceback (most recent call last):"]
    error = json.loads((begun.folder / "rank-0-error.json").read_bytes())
    assert error["message"]["message"] == "ValueError: recorded"
    assert not (begun.folder / "rank-0.sock").exists()


def test_second_start_forks_from_same_server(packages, tmp_path, monkeypatch):
    """With what the first has had imported, and nothing of what it did."""
    packages("torch", "import os\nserver = os.getpid()\n")
    program = tmp_path / "program.py"
    program.write_text(
        "import os, torch\nprint(torch.server == os.getppid(), vars(torch).pop('done', None), "
        "os.environ['TORCHELASTIC_RESTART_COUNT'])\ntorch.done = True\n"
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    log = NodeLog(tmp_path)
    with selectors.DefaultSelector() as selector:
        options = Namespace(
            nproc=2, nodes=1, preload=None, fork=1, spawn=False, tagged=False, grace=5.0,
            bind="auto", argv=[sys.executable, str(program)],
        )  # fmt: skip
        launcher = ForkLauncher(options, tmp_path, log, selector)
        launcher.prepare()
        for attempt in ("1", "2"):
            monkeypatch.setenv("CLUSTERKIT_ATTEMPT", attempt)
            assert launcher.start() is None
            while launcher.running:
                for key, _ in selector.select():
                    key.data()
            launcher.finish_output()
            assert launcher.exit_code == 0
        launcher.close()
    lines = [line.split(b" ", 2) for line in (tmp_path / "log").read_bytes().splitlines()]
    texts = [text for _, rank, text in lines if rank != b"-"]
    assert sorted(texts) == [b"True None 0"] * 2 + [b"True None 1"] * 2


def test_missing_python_exits_127_with_reason(agent):
    begun = agent("", python=[], interpreter="/nope/python")
    assert begun.end() == 127
    assert begun.exit["reason"] == "No such file or directory: /nope/python"


def test_slow_name_servers_do_not_multiply_wait_for_node_0_name(tmp_path, monkeypatch):
    now = [0.0]

    def slow(name, port):
        now[0] += 10.0
        raise OSError("no answer")

    def sleep(seconds):
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(forkserver, "time", clock)
    monkeypatch.setattr(forkserver.socket, "getaddrinfo", slow)
    (tmp_path / "order").write_text('{"head": "node-0.nowhere", "ranks": []}')
    with (tmp_path / "order").open() as file:
        forkserver._await_head(file.fileno())
    assert 12 <= now[0] < 30
