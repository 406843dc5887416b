"""Runs scripts on a host, those that can hang in processes of their own.

It is sent as text and needs nothing but the standard library of Python 3.8. The result of each
script is one line of JSON behind a mark, so that other output (a login shell's greeting) does no
harm, and a script that hangs does not hold up the others.
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
MAX_BYTES = 1 << 18
"""Largest result of one script."""


def text_of(path: str) -> str:
    """Return a file's text; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def user_of(uid: int) -> str:
    """Return a user's name, or the number of one without a name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def run(*argv: str, seconds: float = 20) -> dict[str, Any] | None:
    """Run a command; return its ``exit_code``, ``stdout``, ``stderr``, or None if there is no such
    command."""
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
"""Names that every script can use: its text does not include its module's imports."""


def main(tasks: list[dict[str, Any]], given: dict[str, Any], interpreter: str) -> None:
    """Run the tasks, print one line for each, and end this process.

    Args:
        tasks: ``name``, ``function``, ``source``, ``timeout`` (seconds) and ``in_process`` of each.
        given: the argument of every function.
        interpreter: the name under which this Python was started.
    """
    code = 1
    try:
        # "client client-port server server-port": the address at which this host was reached.
        reached = (os.environ.get("SSH_CONNECTION", "").split() + [""] * 3)[2]
        found = [name for name in ("apt-get", "dnf") if os.path.exists(f"/usr/bin/{name}")]
        began = {"began": time.time(), "interpreter": interpreter, "reached_at": reached}
        _print({**began, "installer": (found or [""])[0]})
        code = 0
        running = _start_all([task for task in tasks if not task["in_process"]], given)
        for task in tasks:
            if task["in_process"]:
                _print({"name": task["name"], **json.loads(_run(task, given).decode())})
        # They run in parallel; the one with the shortest timeout is waited for first.
        for deadline, name, pid, reader in sorted(running):
            _print({"name": name, **_result(pid, reader, deadline)})
        _print({"ended": time.time()})
    except BrokenPipeError:
        pass  # the connection is closed
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        # Not sys.exit(), which waits for threads: one may hang for ever.
        os._exit(code)


def _start_all(
    tasks: list[dict[str, Any]], given: dict[str, Any]
) -> list[tuple[float, str, int, int]]:
    """Start a process per task; return deadline, name, process id and pipe of each."""
    running = []
    for task in tasks:
        try:
            running.append((time.monotonic() + task["timeout"], task["name"], *_start(task, given)))
        except OSError as error:
            _print({"name": task["name"], "error": f"cannot start a process: {error}"})
    return running


def _start(task: dict[str, Any], given: dict[str, Any]) -> tuple[int, int]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    try:
        os.setpgid(0, 0)
        # It ends even if the parent is killed.
        signal.alarm(int(task["timeout"]) + 10)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        with os.fdopen(writer, "wb") as file:
            file.write(_run(task, given) + b"\n")
    finally:
        os._exit(0)


def _run(task: dict[str, Any], given: dict[str, Any]) -> bytes:
    try:
        # Annotations are not evaluated: they may be newer than this Python.
        code = compile(task["source"], "<doctor>", "exec", flags=future.annotations.compiler_flag)
        namespace: dict[str, Any] = dict(HELPERS)
        exec(code, namespace)
        result = {"value": namespace[task["function"]](given)}
        # File names need not be valid UTF-8: other bytes become question marks.
        text = json.dumps(result, ensure_ascii=False).encode("utf-8", "replace")
        return json.dumps(json.loads(text.decode())).encode()
    except BaseException as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"[:500]}).encode()


def _result(pid: int, reader: int, deadline: float) -> dict[str, Any]:
    """Return what a task wrote into its pipe, or why there is nothing; kill it if it is late."""
    data = b""
    try:
        while not data.endswith(b"\n"):
            # At least a second: the wait for other tasks may have used up this one's time.
            wait = max(1.0, deadline - time.monotonic())
            if not select.select([reader], [], [], wait)[0]:
                state = _state(pid)
                _kill(pid)
                return {"timed_out": state}
            chunk = os.read(reader, 65536)
            data += chunk
            if not chunk:
                return {"error": "it was killed"}
            if len(data) > MAX_BYTES:
                _kill(pid)
                return {"error": f"it gave more than {MAX_BYTES} bytes"}
        result: dict[str, Any] = json.loads(data.decode())
        return result
    finally:
        os.close(reader)
        # If the parent ignores SIGCHLD, so do we, and the kernel has reaped the process already.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _kill(pid: int) -> None:
    # Not waited for: a process that hangs in a dead NFS mount ends when the mount answers again.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            kill(pid, signal.SIGKILL)


def _state(pid: int) -> str:
    """Return the letter of a process's state; D for 0.4 s: a mount does not answer."""
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
    # The newline comes first because a greeting need not end with one.
    line = memoryview(f"\n{MARK}{json.dumps(document)}\n".encode())
    while line:
        line = line[os.write(sys.stdout.fileno(), line) :]
