"""Ranks as forks of a process that has imported torch: one starts in 0.05 s instead of 2 to 5.

Of what a rank of these tests does, imports are nine tenths. A fork has a standard output, an
environment, a start time and an end of its own, as a process of its own has; what must be seen
from the first import on starts with ``launch(..., warm=None)``.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

FAMILIES = {
    "bare": ("torch",),
    "programs": (
        "torch.distributed.checkpoint.state_dict_saver",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch.distributed.tensor.parallel",
        "deepspeed",
        "deepspeed.ops",
        "deepspeed.pipe",
        "deepspeed.runtime.zero.muon.muon_optimizer",
    ),
}
"""What a process has imported before it forks."""
WIDTH = 12
"""Bytes of a number that a keeper tells: first the rank's process id, then its exit code."""


class Rank:
    """One fork, as `subprocess.Popen` would show it."""

    def __init__(self, end: Path) -> None:
        self.end = os.open(end, os.O_RDONLY)  # waits for the other side
        self.pid = int(self._read(60.0))
        self.returncode: int | None = None

    def wait(self, timeout: float = 60.0) -> int:
        """The exit code, minus the signal if it was one; TimeoutExpired after so many seconds."""
        if self.returncode is None:
            self.returncode = int(self._read(timeout))
            os.close(self.end)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def _read(self, timeout: float) -> bytes:
        """The next number."""
        if not select.select([self.end], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a rank", timeout)
        return os.read(self.end, WIDTH)


class Warm:
    """A process that waits, with all of a family imported, to become ranks."""

    def __init__(self, family: str, environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, *FAMILIES[family]],
            env=dict(environment),
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], out: Path, err: Path, end: Path
    ) -> Rank:
        """Run a program with these arguments; ``end`` is a name for a pipe to hear of it by."""
        os.mkfifo(end)
        wanted = {"argv": argv, "env": env, "out": out, "err": err, "end": end, "cwd": os.getcwd()}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(wanted, default=str).encode() + b"\n")
        self.process.stdin.flush()
        return Rank(end)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def serve(requests: IO[bytes]) -> dict[str, Any] | None:
    """Fork for every request; returns what is wanted in the fork, and None here at the end."""
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a fork would lack {len(threads) - 1} threads"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    for line in requests:
        wanted: dict[str, Any] = json.loads(line)
        if os.fork():
            continue
        # Between server and rank a keeper, which waits for the rank and tells of it.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        end = os.open(wanted["end"], os.O_WRONLY)
        if (rank := os.fork()) == 0:
            os.close(end)
            return wanted
        os.write(end, b"%*d" % (WIDTH, rank))
        code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
        os.write(end, b"%*d" % (WIDTH, code))
        os._exit(0)
    return None


def become(wanted: Mapping[str, Any]) -> None:
    """Be the rank: its session, files, environment and arguments."""
    os.setsid()
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for number, name in ((0, os.devnull), (1, wanted["out"]), (2, wanted["err"])):
        opened = os.open(name, flags if number else os.O_RDONLY)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(wanted["cwd"])
    os.environ.clear()
    os.environ.update(wanted["env"])
    sys.argv[:] = wanted["argv"]
    sys.path[0] = str(Path(sys.argv[0]).parent)


def main(modules: Sequence[str]) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch: Any = importlib.import_module("torch")
    importlib.import_module("torch._dynamo")
    # DeepSpeed's Muon optimizer compiles functions when it is imported: 3 s.
    compile_now, torch.compile = torch.compile, lambda fn=None, **_: fn or (lambda f: f)
    for name in modules:
        importlib.import_module(name)
    torch.compile = compile_now
    if (wanted := serve(sys.stdin.buffer)) is not None:
        become(wanted)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
