"""Runs collectors on a host, each in a process of its own, and prints one JSON document.

The document comes behind a mark, so that other output (a login shell's greeting) does no harm, and
a collector that hangs does not hold up the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from typing import Any

MARK = "@clusterkit-doctor "
MAX_BYTES = 1 << 18
"""Largest result of one collector."""


def main(interpreter: str, tasks: list[dict[str, Any]], context: dict[str, Any]) -> None:
    """Run the tasks, print what they returned, and end this process.

    Args:
        interpreter: the name under which this Python was started.
        tasks: ``name``, ``module`` and ``timeout`` (seconds) of each.
        context: the argument of every collector.
    """
    code = 1
    try:
        # "client client-port server server-port": the address at which this host was reached.
        reached = (os.environ.get("SSH_CONNECTION", "").split() + [""] * 3)[2]
        found = [name for name in ("apt-get", "dnf") if os.path.exists(f"/usr/bin/{name}")]
        document = {"began": time.time(), "interpreter": interpreter, "reached_at": reached}
        document["installer"] = (found or [""])[0]
        document["outputs"] = outputs(tasks, context)
        document["ended"] = time.time()
        code = 0
        # The newline comes first because a greeting need not end with one.
        line = memoryview(f"\n{MARK}{json.dumps(document)}\n".encode())
        while line:
            line = line[os.write(sys.stdout.fileno(), line) :]
    except BrokenPipeError:
        pass  # the connection is closed
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def outputs(tasks: list[dict[str, Any]], context: dict[str, Any]) -> dict[str, Any]:
    """Run all tasks at once; return by name the ``value`` of each, or why there is none."""
    found: dict[str, Any] = {}
    running = []
    for task in tasks:
        try:
            running.append(
                (time.monotonic() + task["timeout"], task["name"], *_start(task, context))
            )
        except OSError as error:
            found[task["name"]] = {"error": f"cannot start a process: {error}"}
    # The one with the shortest timeout is waited for first.
    for deadline, name, pid, reader in sorted(running):
        found[name] = _result(pid, reader, deadline)
    return found


def _start(task: dict[str, Any], context: dict[str, Any]) -> tuple[int, int]:
    """Start a process for a task; return its id and a pipe."""
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
            file.write(_run(task, context) + b"\n")
    finally:
        # Not sys.exit(), which waits for threads: one may hang for ever.
        os._exit(0)


def _run(task: dict[str, Any], context: dict[str, Any]) -> bytes:
    try:
        result = {"value": getattr(sys.modules[task["module"]], task["name"])(context)}
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
