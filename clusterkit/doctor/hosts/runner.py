"""Runs on a host: every script, those that may hang in processes of their own.

It is sent as text and needs nothing but the standard library of Python 3.8. One line of JSON
behind a mark holds what one script gave, so that whatever else stands in the output (a login
shell's greeting) does no harm, and a script that hangs does not keep back the others.
"""

from __future__ import annotations
import __future__ as future

import contextlib
import errno
import glob
import json
import os
import pwd
import random
import re
import select
import signal
import socket
import sys
import time
from typing import Any

MARK = "@clusterkit-doctor "
MOST = 1 << 18
"""Bytes that one script may give."""


def text_of(path: str) -> str:
    """A file's text; empty where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def user_of(uid: int) -> str:
    """A user's name; the number of one without a name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def run(*argv: str, seconds: float = 20) -> dict[str, Any] | None:
    """How a command ended: ``exit_code``, ``stdout``, ``stderr``; None where it is not there."""
    import subprocess

    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds,
            env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        text = f"{argv[0]} did not end within {seconds:g} s"
        return {"exit_code": -1, "stdout": "", "stderr": text}
    except OSError:
        return None
    texts = [text.decode("utf-8", "replace") for text in (done.stdout, done.stderr)]
    return {"exit_code": done.returncode, "stdout": texts[0], "stderr": texts[1][:4096]}


HELPERS = {
    "text_of": text_of, "user_of": user_of, "run": run,
    "contextlib": contextlib, "errno": errno, "glob": glob, "os": os, "pwd": pwd,
    "random": random, "re": re, "socket": socket, "sys": sys, "time": time,
}  # fmt: skip
"""What every script finds there: its text says nothing of its module's imports."""


def main(tasks: list[dict[str, Any]], given: dict[str, Any], interpreter: str) -> None:
    """Run the tasks, print one line for each, and end this process.

    Args:
        tasks: ``name``, ``function``, ``source``, ``limit`` (seconds) and ``in_process`` of each.
        given: what every function is called with.
        interpreter: the name under which this Python was started.
    """
    code = 1
    try:
        # "client client-port server server-port": under which of its addresses it was reached.
        reached = (os.environ.get("SSH_CONNECTION", "").split() + [""] * 3)[2]
        _print({"began": time.time(), "interpreter": interpreter, "reached_at": reached})
        code = 0
        running = _start_all([task for task in tasks if not task["in_process"]], given)
        for task in tasks:
            if task["in_process"]:
                _print({"name": task["name"], **json.loads(_run(task, given).decode())})
        # Side by side, whoever is asked first: those that end soon do not wait for the others.
        for name, pid, reader, until in sorted(running, key=lambda work: work[3]):
            _print({"name": name, **_answer(pid, reader, until)})
        _print({"ended": time.time()})
    except BrokenPipeError:
        pass  # nobody reads any more
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        # Without waiting for anything: a thread or a child may hang for ever.
        os._exit(code)


def _start_all(
    tasks: list[dict[str, Any]], given: dict[str, Any]
) -> list[tuple[str, int, int, float]]:
    """Name, process, pipe and last moment of each task that could be started."""
    running = []
    for task in tasks:
        try:
            pid, reader = _start(task, given)
        except OSError as error:
            _print({"name": task["name"], "error": f"cannot start a process: {error}"})
            continue
        running.append((task["name"], pid, reader, time.monotonic() + task["limit"]))
    return running


def _start(task: dict[str, Any], given: dict[str, Any]) -> tuple[int, int]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    try:
        os.setpgid(0, 0)
        # Should the parent be killed, this ends all the same.
        signal.alarm(int(task["limit"]) + 10)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        with os.fdopen(writer, "wb") as file:
            file.write(_run(task, given) + b"\n")
    finally:
        os._exit(0)


def _run(task: dict[str, Any], given: dict[str, Any]) -> bytes:
    try:
        # Annotations stay unread: they may be newer than this Python.
        code = compile(task["source"], "<doctor>", "exec", flags=future.annotations.compiler_flag)
        space: dict[str, Any] = dict(HELPERS)
        exec(code, space)
        answer = {"value": space[task["function"]](given)}
        # Names of files need not be text: what is no character becomes a question mark.
        text = json.dumps(answer, ensure_ascii=False).encode("utf-8", "replace")
        return json.dumps(json.loads(text.decode())).encode()
    except BaseException as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"[:500]}).encode()


def _answer(pid: int, reader: int, until: float) -> dict[str, Any]:
    """What a task wrote into its pipe, or why that is nothing."""

    def kill() -> None:
        # Not waited for: a process that hangs in a dead NFS mount ends when that answers again.
        for end in (os.killpg, os.kill):
            with contextlib.suppress(OSError):
                end(pid, signal.SIGKILL)

    data = b""
    try:
        while not data.endswith(b"\n"):
            # Whoever has had to wait for this has a moment more.
            wait = max(1.0, until - time.monotonic())
            if not select.select([reader], [], [], wait)[0]:
                state = _state(pid)
                kill()
                return {"timed_out": state}
            chunk = os.read(reader, 65536)
            data += chunk
            if not chunk:
                return {"error": "it was killed"}
            if len(data) > MOST:
                kill()
                return {"error": f"it gave more than {MOST} bytes"}
        answer: dict[str, Any] = json.loads(data.decode())
        return answer
    finally:
        os.close(reader)
        # Who ignores SIGCHLD hands that down to us: then the kernel has buried it already.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _state(pid: int) -> str:
    """The kernel's letter for what a process does; D, if it stays so: a mount does not answer."""
    state = "?"
    for _ in range(4):
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                state = file.read().rpartition(b")")[2].split()[0].decode()
        except (OSError, IndexError):
            break
        if state != "D":
            break
        time.sleep(0.1)
    return state


def _print(document: dict[str, Any]) -> None:
    # The newline in front: a greeting need not end with one.
    line = memoryview(f"\n{MARK}{json.dumps(document)}\n".encode())
    while line:
        line = line[os.write(sys.stdout.fileno(), line) :]
