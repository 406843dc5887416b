"""Fork servers that outlive runs: one for each kind of run, below one folder.

``KEY.sock`` takes requests, ``KEY.json`` says which process listens, ``KEY.log`` is what that
printed. The key stands for all that two runs must share: interpreter, program, environment, and
what else a process inherits. Only the folder's owner may read it. `warm_server` is the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from clusterkit.agent import forkserver_process
from clusterkit.agent.files import read_json, write_json
from clusterkit.agent.forkserver_process import Target
from clusterkit.agent.processes import identity, is_alive, send, wait_gone
from clusterkit.agent.protocol import Document
from clusterkit.agent.signals import adopt_orphans, take_signals

_MOST_SERVERS = 4
_END_SECONDS = 5.0
_OF_A_RUN = {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "_", "PWD", "OLDPWD", "SHLVL"}
_STATUS = (
    "Cap", "Cpus_allowed:", "Gid:", "Groups:", "Mems_allowed:", "NoNewPrivs:", "Seccomp:",
    "SigIgn:", "Uid:", "Umask:",
)  # fmt: skip
"""Lines of ``/proc/self/status`` that tell what a process inherits."""


def ask(folder: Path, idle: float, target: Target, channel: int, output: int) -> None:
    """Have a fork of a matching server take its orders from ``channel``; start a server if needed.

    Args:
        folder: of all servers.
        idle: seconds without a request after which a server ends.
        target, channel, output: as in `forkserver_process.start`.

    Raises:
        OSError: there is no server, and none can be started.
    """
    env = {name: value for name, value in target.env.items() if not _is_of_a_run(name)}
    program = target.program[: 2 if target.program[0] == "-m" else 1]
    shared = Target(target.python, program, env)
    key = _key(idle, shared)
    run = {name: target.env[name] for name in ("CLUSTERKIT_RUN_DIR", "CLUSTERKIT_NODE_DIR")}
    with locked(folder), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as request:
        request.setblocking(False)
        try:
            _with_path(folder, key, request.connect)
        except (FileNotFoundError, ConnectionRefusedError):
            _start(folder, key, idle, shared)
            _with_path(folder, key, request.connect)
        socket.send_fds(request, [json.dumps(run).encode()], [channel, output])
        os.utime(folder / f"{key}.json")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from starting or ending servers in the folder."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def servers(folder: Path) -> list[Document]:
    """Return the living servers, the last used first: ``pid``, ``program``, ``python``, ..."""
    found = []
    for path in folder.glob("*.json"):
        record = read_json(path)
        if record and is_alive(record):
            with contextlib.suppress(OSError):
                found.append({**record, "key": path.stem, "used": path.stat().st_mtime})
    return sorted(found, key=lambda record: -record["used"])


def end(folder: Path, spared: int = 0) -> None:
    """End all servers but the ``spared`` last used, and remove the files of ended ones.

    The runs that they serve continue.
    """
    living = servers(folder)
    pids = [record["pid"] for record in living[spared:]]
    send(pids, signal.SIGTERM)
    wait_gone(pids, _END_SECONDS)
    send([record["pid"] for record in living[spared:] if is_alive(record)], signal.SIGKILL)
    kept = {record["key"] for record in living[:spared]}
    for path in folder.glob("*.*"):
        if path.stem not in kept:
            path.unlink(missing_ok=True)


def _is_of_a_run(name: str) -> bool:
    return name in _OF_A_RUN or name.startswith("CLUSTERKIT_")


def _key(idle: float, target: Target) -> str:
    """Digest everything that a run has from the server and would else have from the agent."""
    status = Path("/proc/self/status").read_text().splitlines()
    spaces = sorted(os.listdir("/proc/self/ns"))
    parts = [
        idle, list(target.python), list(target.program), sorted(target.env.items()),
        os.getcwd(), os.nice(0),
        [forkserver_process.module_text(name) for name in forkserver_process.MODULES],
        [line for line in status if line.startswith(_STATUS)],
        [Path("/proc/self", name).read_text() for name in ("limits", "cgroup", "oom_score_adj")],
        [os.readlink(f"/proc/self/ns/{name}") for name in spaces],
    ]  # fmt: skip
    return hashlib.sha256(repr(parts).encode(errors="surrogateescape")).hexdigest()[:16]


def _start(folder: Path, key: str, idle: float, target: Target) -> None:
    """Start the server of this key, in a session of its own; its socket exists on return."""
    end(folder, _MOST_SERVERS - 1)
    for old in folder.glob(f"{key}.*"):
        old.unlink()
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        _with_path(folder, key, listening.bind)
        os.chmod(folder / f"{key}.sock", 0o600)
        output = os.open(folder / f"{key}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        stack.callback(os.close, output)
        read, write = os.pipe()
        stack.callback(os.close, read)

        def detach() -> None:
            if os.fork():
                os._exit(0)
            os.setsid()
            take_signals()
            os.write(write, str(os.getpid()).encode())

        adopt_orphans(False)  # nor is the server to become this agent's child
        try:
            process = forkserver_process.start(
                target, listening.fileno(), output, preexec=detach, idle=idle,
                files=str(folder / key),
            )  # fmt: skip
            process.wait()
        finally:
            os.close(write)
            adopt_orphans()
        pid = int(os.read(read, 20))  # of the server; `process` was its parent
    about = {"program": " ".join(target.program), "python": target.python[0], "since": time.time()}
    write_json(folder / f"{key}.json", {**identity(pid), **about})


def _with_path(folder: Path, key: str, use: Callable[[str], None]) -> None:
    """Bind or connect a socket by a short path: a socket's name may have 107 bytes."""
    handle = os.open(folder, os.O_PATH)
    try:
        use(f"/proc/self/fd/{handle}/{key}.sock")
    finally:
        os.close(handle)
