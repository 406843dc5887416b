"""Starts a run: its nodes, and the process that supervises them.

The process that submits starts the nodes (`launch`): it has the connections and all imports. The
supervisor's process is ``python -m clusterkit.lifecycle.supervise`` (`spawn`), detached from the
terminal. It holds the lock of the run's folder, so there is at most one; all others only read the
folder.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import IO

from clusterkit.errors import ClusterkitError, SubmitFailed
from clusterkit.lifecycle.supervisor import Supervisor
from clusterkit.run.folder import RESERVE, RunFolder
from clusterkit.transport import Transport

START_SECONDS = 60.0
"""How long a supervisor may take to start. One that exits meanwhile is detected at once."""
STARTED = b"started\n"
"""A supervisor's answer to the process that started it."""
RESERVE_BYTES = 1 << 16
"""Freed to record the end of a run on a full disk."""


def launch(folder: RunFolder, lock: IO[bytes], transport: Transport) -> None:
    """Start a new run's nodes, then its supervisor. If the nodes do not start, the run has failed.

    Args:
        lock: see `spawn`.

    Raises:
        RunFolderError, SubmitFailed: see `spawn`.
    """
    folder.write(RESERVE, bytes(RESERVE_BYTES))
    if Supervisor(folder, transport).start():
        spawn(folder, lock)


def spawn(folder: RunFolder, lock: IO[bytes], *, adopt: bool = False) -> None:
    """Start the supervisor, detached from this process and from the terminal.

    Args:
        lock: of `RunFolder.acquire_supervisor_lock`; the supervisor keeps it while it lives.
        adopt: take over a run whose supervisor is gone.

    Raises:
        RunFolderError: the disk is full.
        SubmitFailed: the supervisor does not start; the message holds its output.
    """
    if not folder.file(RESERVE).exists():
        folder.write(RESERVE, bytes(RESERVE_BYTES))
    read, write = os.pipe()
    with open(read, "rb", buffering=0) as answer:
        with open(write, "wb"), folder.file("supervisor.log").open("ab") as log:
            files = (lock.fileno(), write)
            argv = [sys.executable, "-P", "-m", "clusterkit.lifecycle.supervise", str(folder.path)]
            argv += [*map(str, files), *(["--adopt"] if adopt else [])]
            # The shell exits at once, so the supervisor is a child of init and leaves no zombie.
            subprocess.run(
                ["/bin/sh", "-c", '"$@" &', "sh", *argv],
                start_new_session=True,
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=True,
            )
        received = b""
        waiting = select.poll()  # not select(), which takes no handle above 1023
        waiting.register(answer, select.POLLIN)
        while waiting.poll(START_SECONDS * 1000) and (data := answer.read(4096)):
            received += data
    if received == STARTED:
        return
    log_text = folder.read("supervisor.log").decode(errors="replace").strip()
    problem, _, hint = received.decode().partition("\n")
    why = problem or log_text or "no output"
    raise SubmitFailed(f"the run's supervisor did not start: {why}", hint=hint or None)


def main(argv: list[str]) -> None:
    """Run ``RUN_DIR LOCK ANSWER [--adopt]``.

    LOCK is the file descriptor of the run folder's lock, ANSWER that of a pipe, which takes
    `STARTED`, or why this process cannot supervise the run.
    """
    path, lock, answer = argv[:3]
    os.set_inheritable(int(lock), False)
    # The process that reads the pipe may have been killed.
    with contextlib.suppress(BrokenPipeError), open(int(answer), "wb", buffering=0) as pipe:
        os.set_inheritable(int(answer), False)
        try:
            supervisor = Supervisor(RunFolder(Path(path)))
            supervisor.begin()
        except Exception as error:
            told = f"{type(error).__name__}: {error}".replace("\n", " "), "supervisor.log has more"
            if isinstance(error, ClusterkitError):
                told = error.message, error.hint or ""
            pipe.write("\n".join(told).encode())  # before the log has its traceback
            raise
        pipe.write(STARTED)
    supervisor.main(adopt="--adopt" in argv)


if __name__ == "__main__":
    main(sys.argv[1:])
