"""Fork servers that outlive runs: one for each kind of run that was there, below one folder.

``KEY.sock`` takes requests, ``KEY.json`` says which process listens, ``KEY.log`` is what that
printed. The key stands for all that two runs must share: interpreter, program, environment, and
what else a process inherits. The folder is its owner's alone. `standby` is the process itself.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from clusterkit.agent import server
from clusterkit.agent.files import read_json, write_json
from clusterkit.agent.processes import identity, is_alive, send, wait_gone
from clusterkit.agent.protocol import Document
from clusterkit.agent.signals import adopt_orphans, take_signals

_MOST = 4
_END_SECONDS = 5.0
_OF_A_RUN = {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "_", "PWD", "OLDPWD", "SHLVL"}
_STATUS = (
    "Cap", "Cpus_allowed:", "Gid:", "Groups:", "Mems_allowed:", "NoNewPrivs:", "Seccomp:",
    "SigIgn:", "Uid:", "Umask:",
)  # fmt: skip
"""Lines of ``/proc/self/status`` that tell what a process inherits."""


def ask(
    folder: Path,
    idle: float,
    python: Sequence[str],
    words: Sequence[str],
    env: Mapping[str, str],
    channel: int,
    output: int,
) -> None:
    """Have a fork of the server that fits take its orders from ``channel``; start one if need be.

    Args:
        folder: of all of them.
        idle: seconds after which it ends if nobody has asked for it.
        python, words, env, channel, output: as in `server.start`.

    Raises:
        OSError: there is none, and none can be started.
    """
    words = words[: 2 if words[0] == "-m" else 1]
    kept = {name: value for name, value in env.items() if not _is_of_a_run(name)}
    key = _key(idle, python, words, kept)
    mark = {name: env[name] for name in ("CLUSTERKIT_RUN_DIR", "CLUSTERKIT_NODE_DIR")}
    with locked(folder), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
        to.setblocking(False)
        try:
            _at(folder, key, to.connect)
        except (FileNotFoundError, ConnectionRefusedError):
            _start(folder, key, idle, python, words, kept)
            _at(folder, key, to.connect)
        socket.send_fds(to, [json.dumps(mark).encode()], [channel, output])
        os.utime(folder / f"{key}.json")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Nobody else starts or ends one there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def servers(folder: Path) -> list[Document]:
    """Those that live, the one that was used last first: ``pid``, ``program``, ``python``."""
    found = []
    for path in folder.glob("*.json"):
        record = read_json(path)
        if record and is_alive(record):
            with contextlib.suppress(OSError):
                found.append({**record, "key": path.stem, "used": path.stat().st_mtime})
    return sorted(found, key=lambda record: -record["used"])


def end(folder: Path, spared: int = 0) -> None:
    """End all but the ones that were used last, and forget those that have ended; what they serve
    goes on."""
    living = servers(folder)
    pids = [record["pid"] for record in living[spared:]]
    send(pids, signal.SIGTERM)
    wait_gone(pids, _END_SECONDS)
    send([record["pid"] for record in living[spared:] if is_alive(record)], signal.SIGKILL)
    stays = {record["key"] for record in living[:spared]}
    for path in folder.glob("*.*"):
        if path.stem not in stays:
            path.unlink(missing_ok=True)


def _is_of_a_run(name: str) -> bool:
    return name in _OF_A_RUN or name.startswith("CLUSTERKIT_")


def _key(idle: float, python: Sequence[str], words: Sequence[str], env: Mapping[str, str]) -> str:
    """Of everything that a fork of the server has from it, and would else have from the agent."""
    status = Path("/proc/self/status").read_text().splitlines()
    spaces = sorted(os.listdir("/proc/self/ns"))
    what = [
        idle, list(python), list(words), sorted(env.items()), os.getcwd(), os.nice(0),
        [server.module_text(name) for name in server.MODULES],
        [line for line in status if line.startswith(_STATUS)],
        [Path("/proc/self", name).read_text() for name in ("limits", "cgroup", "oom_score_adj")],
        [os.readlink(f"/proc/self/ns/{name}") for name in spaces],
    ]  # fmt: skip
    return hashlib.sha256(repr(what).encode(errors="surrogateescape")).hexdigest()[:16]


def _start(
    folder: Path,
    key: str,
    idle: float,
    python: Sequence[str],
    words: Sequence[str],
    env: Mapping[str, str],
) -> None:
    """Start the server of this key, which nobody's end ends; its socket is there by then."""
    end(folder, _MOST - 1)
    for old in folder.glob(f"{key}.*"):
        old.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening, contextlib.ExitStack() as s:
        _at(folder, key, listening.bind)
        os.chmod(folder / f"{key}.sock", 0o600)
        output = os.open(folder / f"{key}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        s.callback(os.close, output)
        read, write = os.pipe()
        s.callback(os.close, read)

        def begin() -> None:
            if os.fork():
                os._exit(0)
            os.setsid()
            take_signals()
            os.write(write, str(os.getpid()).encode())

        adopt_orphans(False)
        try:
            process = server.start(
                python, words, env, listening.fileno(), output, begin=begin,
                idle=idle, files=str(folder / key),
            )  # fmt: skip
            process.wait()
        finally:
            os.close(write)
            adopt_orphans()
        pid = int(os.read(read, 20))  # of the process that its own is of
    what = {"program": " ".join(words), "python": python[0], "since": time.time()}
    write_json(folder / f"{key}.json", {**identity(pid), **what})


def _at(folder: Path, key: str, do: Callable[[str], None]) -> None:
    """A socket's name may have 107 bytes."""
    handle = os.open(folder, os.O_PATH)
    try:
        do(f"/proc/self/fd/{handle}/{key}.sock")
    finally:
        os.close(handle)
