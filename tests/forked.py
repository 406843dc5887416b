"""Programs as a fork server's ranks, and by themselves, to compare the two."""

import os
import selectors
import subprocess
import sys
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from clusterkit.agent.fork import ForkLauncher


@dataclass(frozen=True)
class Case:
    """One command line: interpreter options, program, arguments; and what lies in its folder."""

    text: str = ""
    argv: tuple[str, ...] = ("program.py",)
    python: tuple[str, ...] = ()
    files: dict[str, str | bytes] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)

    def lay_out(self, folder: Path) -> None:
        folder.mkdir()
        for name, content in {"program.py": self.text, **self.files}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(".zip"):
                with zipfile.ZipFile(path, "w") as archive:
                    archive.writestr(zipfile.ZipInfo("__main__.py"), content)
            else:
                path.write_bytes(content if isinstance(content, bytes) else content.encode())


def at_start(*names: str, folder: str = "site") -> dict[str, str]:
    """Files by which a Python with this folder in PYTHONPATH has imported modules as it started
    that have the names of its own."""
    put_first = "sys.path.insert(0, os.path.join(os.path.dirname(__file__), 'lib'))"
    imports = "".join(f"sys.modules.pop({name!r}, None)\nimport {name}\n" for name in names)
    return {
        f"{folder}/sitecustomize.py": f"import os, sys\n{put_first}\n{imports}",
        **{f"{folder}/lib/{name}.py": "mine = True\n" for name in names},
    }


class Launcher(ForkLauncher):
    """Leaves the ranks' pipes to the test, and the server's output where that of the test goes."""

    def _new_output(self):
        return os.dup(2)


class Forked:
    """A server per way to start Python, and what its forks print.

    Args:
        folder: for the ranks' pipes.
        nproc: ranks of each start.
        python: the interpreter.
    """

    def __init__(self, folder: Path, nproc: int = 1, python: str = sys.executable) -> None:
        self.folder, self.python = folder, python
        self.selector = selectors.DefaultSelector()
        self.servers: dict[object, Launcher] = {}
        self.pipes = []
        for number in range(nproc):
            os.mkfifo(folder / f"pipe-{number}")
            self.pipes.append(os.open(folder / f"pipe-{number}", os.O_RDWR | os.O_NONBLOCK))
            self.selector.register(self.pipes[-1], selectors.EVENT_READ, lambda: None)

    def server(self, case: Case) -> Launcher:
        key = case.python, tuple(case.env.items())
        if key not in self.servers:
            argv = [self.python, *case.python, "program.py"]
            options = Namespace(
                nproc=len(self.pipes), nodes=1, preload=[], fork=len(argv) - 1, argv=argv,
                tagged=False, bind="auto",
            )  # fmt: skip
            log = SimpleNamespace(ranks=[])
            self.servers[key] = Launcher(options, self.folder, log, self.selector)
        return self.servers[key]

    def run(self, case: Case) -> list[tuple[bytes, int]]:
        """Each rank's output and exit code; to be called in the program's folder."""
        server = self.server(case)
        server._program = list(case.argv)
        assert server.start() is None
        outputs = [b""] * len(self.pipes)
        while len(server.ends) < len(self.pipes):
            for key, _ in self.selector.select():
                key.data()
            outputs = [text + _read(pipe) for text, pipe in zip(outputs, self.pipes, strict=True)]
        assert server.failure is None
        codes, texts = {}, []
        for end in server.ends:
            codes[end["pid"]] = end["exit_code"]
        for number, output in enumerate(outputs):
            header, _, text = output.partition(b"\n")
            mark, rank, pid = header.decode().split()
            assert (mark, rank) == ("@clusterkit-rank", str(number))
            texts.append((text, codes[int(pid)]))
        return texts

    def run_alone(self, case: Case) -> tuple[bytes, int]:
        """The same of the program by itself, in the environment of the first start's rank 0."""
        server = self.server(case)
        starts, server._starts = server._starts, 1
        done = subprocess.run(
            [self.python, *case.python, *map(os.fsencode, case.argv)],
            env=server._rank_environment(0), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, process_group=0, check=False,
        )  # fmt: skip
        server._starts = starts
        return done.stdout, done.returncode

    def close(self) -> None:
        for server in self.servers.values():
            server.close()
        self.selector.close()
        for pipe in self.pipes:
            os.close(pipe)


def _read(pipe: int) -> bytes:
    try:
        return os.read(pipe, 1 << 20)
    except BlockingIOError:
        return b""


@contextmanager
def servers(
    factory: pytest.TempPathFactory, nproc: int = 1, python: str = sys.executable
) -> Iterator[Forked]:
    """Yield a `Forked`, in an environment without this session's Python settings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(factory.mktemp("cache")))
        for name in [name for name in os.environ if name.startswith(("PYTHON", "PYTEST", "COV"))]:
            patch.delenv(name)
        found = Forked(factory.mktemp("node"), nproc, python)
        try:
            yield found
        finally:
            found.close()
