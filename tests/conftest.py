"""Fixtures that every suite shares. No test sees the user's own CLUSTERKIT_HOME."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import re
import shutil
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NoReturn

import hypothesis
import pytest
from hypothesis.configuration import set_hypothesis_home_dir

from clusterkit import agent, api
from clusterkit.cluster import Facts, Gpu, HostFacts
from clusterkit.lifecycle import supervise
from clusterkit.plan import Plan
from clusterkit.run import folder as run_folder
from clusterkit.run.folder import RunFolder
from clusterkit.transport import Transport

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job is deaf to Ctrl-C, and so is what it starts; some tests press it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The same for what nohup and others have ignored: programs are compared with plain Python.
for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:  # Python ignores these
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
# What a session has started, engines and clusters too, ends with it when it is asked to end.
signal.signal(signal.SIGTERM, signal.default_int_handler)

# Test files and clusterkit are compiled once, not by every worker and process.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Not of the terminal or the host that the tests run on: TERM=dumb takes colours and progress away,
# and where /etc/hosts lacks the host's name gloo warns in every rank.
os.environ["TERM"] = "xterm-256color"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

# What torch and DeepSpeed compile lies in the checkout. In the user's caches a killed build leaves
# half a file that the next one reads, or a lock for which the next one waits for ever.
COMPILED = Path(__file__).parents[1] / ".make" / f"compiled-{sys.implementation.cache_tag}"
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(COMPILED / "inductor")
os.environ["TORCH_EXTENSIONS_DIR"] = str(COMPILED / "extensions")
if "PYTEST_XDIST_WORKER" not in os.environ:
    COMPILED.mkdir(parents=True, exist_ok=True)
    SESSIONS = os.open(COMPILED / "sessions", os.O_RDWR | os.O_CREAT)
    with contextlib.suppress(BlockingIOError):  # another session compiles there
        fcntl.flock(SESSIONS, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(COMPILED / "inductor", ignore_errors=True)
        for left in COMPILED.glob("extensions/*/lock"):
            left.unlink()
    fcntl.flock(SESSIONS, fcntl.LOCK_SH)

# No timing assertions, and nothing left behind in the checkout.
set_hypothesis_home_dir(Path(__file__).parents[1] / ".make" / "hypothesis")
hypothesis.settings.register_profile("clusterkit", deadline=None, database=None)
hypothesis.settings.load_profile("clusterkit")

UGLY = {
    "SPACES": "  two  spaces at both ends  ",
    "COMMA": "a,b,,c",
    "SINGLE_QUOTE": "it's 'quoted'",
    "DOUBLE_QUOTE": 'say "hi"',
    "DOLLAR": "$HOME ${PATH} $(id) `id` $$",
    "NEWLINE": "first\nsecond\n\nlast\n",
    "EQUALS": "a=b==c",
    "SEMICOLON": "a; rm -rf nothing; b & c | d > e",
    "BACKSLASH": "\\ \\n \\",
    "NON_ASCII": "naïve 日本語 🚀",
    "TAB_AND_RETURN": "a\tb\rc",
    "GLOB": "* ? [a-z] ~ !! #",
    "EMPTY": "",
    "DASHES": "-- -n --help",
    "PERCENT": "%s %d %%",
    "LINE_SEPARATOR": "a\u2028b\x85c\x0bd",
}
"""Environment values that careless quoting breaks."""


def noted(plan: Plan, name: str) -> str | None:
    """The value noted under ``name``."""
    return next((note.value for note in plan.notes if note.name == name), None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden/expected anew"
    )


def missing(name: str) -> bool:
    """Whether what a test is marked to need is not here: a package, or a program in PATH."""
    package = name in ("torch", "deepspeed")
    return find_spec(name) is None if package else shutil.which(name) is None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name in [mark.args[0] for mark in item.iter_markers("needs")]:
            if missing(name):
                item.add_marker(pytest.mark.skip(reason=f"needs {name}, which is not installed"))


TRAINING = r"No module named '(torch|numpy|deepspeed|transformers|accelerate)\b"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a file of tests that imports torch where there is none."""
    report = yield
    if report.failed and missing("torch") and re.search(TRAINING, str(report.longrepr)):
        report.outcome = "skipped"
        report.longrepr = (report.nodeid, 0, "Skipped: needs torch, which is not installed")
    return report


@pytest.fixture(autouse=True)
def clusterkit_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CLUSTERKIT_HOME of this test; not there yet."""
    home = tmp_path / "clusterkit-home"
    monkeypatch.setenv("CLUSTERKIT_HOME", str(home))
    monkeypatch.delenv("CLUSTERKIT_CLUSTERS", raising=False)
    for name in ("NO_COLOR", "COLUMNS", "CLUSTERKIT_RUN_MODE"):
        monkeypatch.delenv(name, raising=False)
    # An active environment's Python would run the ranks.
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    return home


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def weird_tmp_path(tmp_path: Path) -> Path:
    """A folder whose name holds spaces, quotes, $, ; and more that a shell would read."""
    folder = tmp_path / """we  ird 'q' "d" $HOME; `id` & #*é"""
    folder.mkdir()
    return folder


@pytest.fixture
def nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing knows a name for this user's id, as in a container that runs as any user id."""

    def missing(uid: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", missing)


@pytest.fixture
def ugly_values() -> dict[str, str]:
    return dict(UGLY)


@pytest.fixture
def make_facts(clusterkit_home: Path) -> Callable[..., Facts]:
    """Facts of a made-up machine: ``make_facts(gpus=8, cpus=64)``."""

    def make(gpus: int = 0, cpus: int = 8, home: str | None = None, **host: Any) -> Facts:
        fields: dict[str, Any] = {
            "host": "localhost",
            "address": "127.0.0.1",
            "cpus": cpus,
            "memory_mib": 65536,
            "gpus": tuple(Gpu(str(i), "NVIDIA H100 80GB HBM3", 81559) for i in range(gpus)),
            "python": sys.executable,
            "versions": {"torch": "2.13.0", "deepspeed": "0.19.8", "transformers": "5.0.0"},
            "tools": {"mpirun": "/usr/bin/mpirun"},
        }
        return Facts(
            home=home or str(clusterkit_home),
            hosts=(HostFacts(**(fields | host)),),
            port=29501,
            port_origin="free when probed",
            interface="lo",
        )

    return make


@pytest.fixture
def facts(make_facts: Callable[..., Facts]) -> Facts:
    """A machine without GPUs that has every package and tool."""
    return make_facts()


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probing finds no GPU, whatever this machine has."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def write_job(cwd: Path) -> Callable[..., str]:
    """Write a job file beside a program ``train.py``; gives its name."""

    def write(text: str | bytes = "", name: str = "job.yaml", *, base: bool = True) -> str:
        (cwd / "train.py").write_text("print('trained')\n")
        data = text if isinstance(text, bytes) else text.encode("utf-8")
        head = b"name: demo\nprogram: train.py\n" if base else b""
        (cwd / name).write_bytes(head + data)
        return name

    return write


@dataclass(frozen=True)
class Outcome:
    """What a command line did."""

    code: object
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """The command line, in this process: ``cli("status", "last")``."""
    from clusterkit.cli import main

    def call(*argv: str) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(list(argv))
        said = capsys.readouterr()
        return Outcome(ended.value.code, said.out, said.err)

    return call


@pytest.fixture
def refused(cli: Callable[..., Outcome], clusterkit_home: Path) -> Callable[..., str]:
    """Run a command line that must be refused as bad input; gives what stood on stderr."""

    def call(*argv: str, code: int = 125) -> str:
        done = cli(*argv)
        assert done.out == ""
        assert "Traceback" not in done.err
        assert [line for line in done.err.splitlines() if line.startswith("error: ")] == [
            done.err.splitlines()[0]
        ]
        assert done.code == code
        assert not (clusterkit_home / "runs").exists() or not list(
            (clusterkit_home / "runs").iterdir()
        )
        return done.err

    return call


HELD: dict[Path, IO[bytes]] = {}
"""Locks of the run folders that this process looks after, in the place of supervisors."""


@pytest.fixture
def unstarted_run(
    monkeypatch: pytest.MonkeyPatch, write_job: Callable[..., str], facts: Facts
) -> Iterator[Callable[..., api.Run]]:
    """A submitted run that is watched over, and for which nothing happens: its folder, and no
    process."""

    def launch(folder: RunFolder, lock: IO[bytes], transport: Transport) -> None:
        HELD[folder.path] = os.fdopen(os.dup(lock.fileno()), "ab")

    def submit(text: str = "launcher: forkserver\n", **options: Any) -> api.Run:
        with monkeypatch.context() as patched:
            patched.setattr(supervise, "launch", launch)
            return api.submit(write_job(text), facts=options.pop("facts", facts), **options)

    yield submit
    while HELD:
        HELD.popitem()[1].close()


@dataclass(frozen=True)
class HandMade:
    """Writes, by hand, what a supervisor and node agents would have left in a run's folder."""

    folder: RunFolder

    def node(
        self,
        node: int = 0,
        attempt: int = 1,
        *,
        exit_code: int | None = None,
        reason: str | None = None,
        started: dict[str, Any] | None = None,
        log: str | bytes | None = None,
        at: float = 1000.0,
        **more: Any,
    ) -> Path:
        path = Path(run_folder.node_dir(str(self.folder.path), attempt, node))
        path.mkdir(parents=True, exist_ok=True)
        if started is not None:
            (path / "started.json").write_text(json.dumps(started))
        if log is not None:
            (path / "log").write_bytes(log if isinstance(log, bytes) else log.encode())
        if exit_code is not None:
            ended = {"exit_code": exit_code, "at": at, "reason": reason, **more}
            (path / "exit.json").write_text(json.dumps(ended))
        return path

    def unwatched(self) -> None:
        """Its supervisor was killed."""
        HELD.pop(self.folder.path).close()

    @staticmethod
    def alive() -> dict[str, Any]:
        """A process that lives: this one."""
        return agent.identity(os.getpid())

    @staticmethod
    def dead() -> dict[str, Any]:
        """A process that is gone, though its number is in use again."""
        return agent.identity(os.getpid()) | {"start_ticks": 1}


@pytest.fixture
def by_hand() -> Callable[[api.Run], HandMade]:
    return lambda run: HandMade(RunFolder(run.path))
