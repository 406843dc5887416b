"""What people do inside a run, on any backend: the same checks wherever its nodes are."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterkit import api
from clusterkit.errors import BadInput
from tests.conftest import UGLY

SECONDS = 120.0
"""For what is waited for here."""
CLUSTERKIT = [sys.executable, "-m", "clusterkit"]


def eventually(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def exec_works(run: api.Run, nodes: int = 2) -> None:
    """`clusterkit exec` and `shell` on a run of some nodes with a rank each, which all run."""
    words = [*UGLY.values(), "", "a\nb", "é", "$HOME", "-n", "--"]
    last = nodes - 1
    told = run.exec(["printf", r"%s\0", *words], node=last)
    assert (told.exit_code, told.stdout.split("\0")[:-1]) == (0, words), told
    failed = run.exec(["sh", "-c", "echo no >&2; exit 7"])
    assert (failed.exit_code, failed.stdout, failed.stderr) == (7, "", "no\n")
    assert run.exec(["no-such-command"]).exit_code == 127
    show = 'echo "$RANK $NODE_RANK $CLUSTERKIT_RUN_ID ${CLUSTERKIT_PEER_TOKEN-none}"'
    for rank in range(nodes):
        (line,) = run.exec(["sh", "-c", show], rank=rank).stdout.splitlines()
        assert line == f"{rank} {rank} {run.id} none"
        (line,) = run.exec(["sh", "-c", show], node=rank).stdout.splitlines()
        assert line == f" {rank} {run.id} none"
    data = os.urandom(3_000_000)
    count = run.exec(["sh", "-c", "wc -c; exit 3"], stdin=data)
    assert (count.stdout.strip(), count.exit_code) == ("3000000", 3)
    with pytest.raises(BadInput, match="nodes 0 to"):
        run.exec(["true"], node=nodes)
    everywhere = subprocess.run(
        [*CLUSTERKIT, "exec", run.id, "--all", "--", "sh", "-c", 'exit "$NODE_RANK"'],
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert everywhere.returncode == last, everywhere
    _interrupt_is_passed_on(run, last)
    _nothing_outlives_its_terminal(run, last)


def files_are_copied(run: api.Run, folder: Path, node: int = 1) -> None:
    """`clusterkit cp`, both ways."""
    data = os.urandom(1_500_000)
    (folder / "there").write_bytes(data)
    api.cp(str(folder / "there"), f"{run.id}:sent", node=node)
    name = run.exec(["sh", "-c", 'ls "$CLUSTERKIT_RUN_DIR"'], node=node).stdout.split()
    assert "sent" in name
    api.cp(f"{run.id}:sent", str(folder / "back"), node=node)
    assert (folder / "back").read_bytes() == data


SERVER = """
import socket
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    while True:
        with listener.accept()[0] as connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)
"""


def port_is_forwarded(run: api.Run, node: int = 1) -> None:
    """`clusterkit forward` to a program that sends back what it gets."""
    there = subprocess.Popen(
        [*CLUSTERKIT, "exec", run.id, "--node", str(node), "--", "python3", "-c", SERVER],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert there.stdout is not None
    port = there.stdout.readline().strip()
    with there, subprocess.Popen(
        [*CLUSTERKIT, "forward", run.id, port, "--node", str(node)], stdout=subprocess.PIPE,
        text=True,
    ) as forward:  # fmt: skip
        assert forward.stdout is not None
        host, _, local = forward.stdout.readline().strip().partition(":")
        for data in (b"first", os.urandom(500_000)):
            with socket.create_connection((host, int(local)), SECONDS) as connection:
                sender = threading.Thread(target=connection.sendall, args=(data,))
                sender.start()
                got = bytearray()
                while len(got) < len(data):
                    got += (part := connection.recv(1 << 16))
                    assert part
                sender.join()
                assert got == data
        forward.send_signal(signal.SIGINT)
        assert forward.wait(SECONDS) == 130
        there.terminate()


def _beside(run: api.Run, node: int, script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*CLUSTERKIT, "exec", run.id, "--node", str(node), "--", "sh", "-c", script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def _interrupt_is_passed_on(run: api.Run, node: int) -> None:
    script = "trap 'echo interrupted; exit 3' INT; echo ready; while :; do sleep 0.1; done"
    with _beside(run, node, script) as there:
        assert there.stdout is not None
        assert there.stdout.readline() == "ready\n"
        there.send_signal(signal.SIGINT)
        assert there.stdout.read() == "interrupted\n"
    assert there.returncode == 3


def _nothing_outlives_its_terminal(run: api.Run, node: int) -> None:
    mark = f"leave{os.getpid()}"
    # nohup: deaf to the hang-up itself.
    script = f"echo ready; CLUSTERKIT_MARK={mark} nohup sleep 3600"
    with _beside(run, node, script) as there:
        assert there.stdout is not None
        assert there.stdout.readline() == "ready\n"
        look = f"grep -lzx CLUSTERKIT_MARK={mark} /proc/[0-9]*/environ"

        def left() -> str:
            return run.exec(["sh", "-c", look], node=node).stdout

        eventually(left, "the command never began")
        there.kill()
    eventually(lambda: not left(), "the command went on")


def refused_after_end(run: api.Run) -> None:
    with contextlib.suppress(BadInput):
        run.exec(["true"])
        raise AssertionError("a command was run in a run that has ended")
