"""Run a command beside a node's ranks, over one stream: `clusterkit exec` and what is built on it.

The backend starts ``agent.pyz inside`` where the agent runs, whatever that takes there, and gives
its standard input and output. All that differs between SSH, docker, Kubernetes and Slurm (who
makes the terminal, passes signals on, reports the exit code, ends what a lost connection leaves)
is done here instead, once. The first line of the input is the request, a JSON object: no shell and
no argument list in between has to leave the command's words alone. Then both sides send frames.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time

from clusterkit.agent import limits
from clusterkit.agent.ending import Ending
from clusterkit.agent.failure import shell_code, start_failure
from clusterkit.agent.locate import Refused, agent_of, environment, node_folder, shell
from clusterkit.agent.processes import descendants_except, send
from clusterkit.agent.protocol import (
    INSIDE_BEGIN,
    INSIDE_WINDOW,
    Document,
    frame,
    take_frames,
)
from clusterkit.agent.signals import STOPS, adopt_orphans, unblock_signals

_CHUNK = 1 << 16
_QUIET = 0.1  # seconds without output after which that of a command that has ended is complete


class _HangUp(Exception):
    """The terminal is gone, or this process is asked to end."""


def inside() -> int:
    """Serve one request of standard input; return the exit code of this process."""
    line = bytearray()
    while not line.endswith(b"\n"):  # unbuffered: what follows are frames
        if not (byte := os.read(0, 1)):
            return 1
        line += byte
    request: Document = json.loads(line)
    session = Session()
    os.write(1, INSIDE_BEGIN)
    try:
        for signum in STOPS:
            signal.signal(signum, _hang_up)
        adopt_orphans()
        if request.get("stack"):
            from clusterkit.agent import stack

            session.reply(b"o", json.dumps(stack.records(request)).encode())
            session.reply(b"x", b"0")
        else:
            session.start(request)
            session.serve()
        session.flush()
    except Refused as refusal:
        session.reply(b"!", str(refusal).encode())
        session.flush()
    except (_HangUp, BrokenPipeError):
        for signum in STOPS:
            signal.signal(signum, signal.SIG_IGN)
        session.close()
        send(descendants_except(), signal.SIGHUP)
        send(descendants_except(), signal.SIGCONT)
        Ending(descendants_except, limits.INSIDE_GRACE).complete()
    return 0


def _hang_up(*_: object) -> None:
    raise _HangUp


class Session:
    """The command of a request, and the frames that are under way."""

    def __init__(self) -> None:
        self._outgoing = bytearray()  # frames that were not written yet
        self._incoming = bytearray()  # a frame of which not all has come
        self._input = bytearray()  # for the command
        self._input_ends = False
        self._stdin = -1  # of the command: a pipe, or the terminal; -1: none any more
        self._outputs: dict[int, bytes] = {}  # by handle, the kind of its frames
        self._terminal: int | None = None
        self._child: subprocess.Popen[bytes] | None = None

    def reply(self, kind: bytes, data: bytes = b"") -> None:
        self._outgoing += frame(kind, data)

    def flush(self) -> None:
        os.set_blocking(1, True)
        while self._outgoing:
            del self._outgoing[: os.write(1, self._outgoing)]

    def start(self, request: Document) -> None:
        """Start the command.

        Raises:
            Refused: there is no such node or rank.
        """
        run_dir, env, folder = str(request["run_dir"]), dict(os.environ), None
        if request["ended"]:  # the run has: its files are still here
            env["CLUSTERKIT_RUN_DIR"] = run_dir
        else:
            folder = node_folder(run_dir, int(request["node"]))
            env = environment(folder, request["rank"])
            with contextlib.suppress(OSError):  # removed meanwhile
                os.chdir(os.readlink(f"/proc/{agent_of(folder)['pid']}/cwd"))
        argv = list(request["argv"]) or [shell()]
        if request["python"]:
            argv = [sys.executable, "-I", *argv]
        ends: list[int] = []
        if size := request["terminal"]:
            self._terminal, ours = os.openpty()
            self._resize(size)
            env["TERM"] = str(request["term"])
            ends, self._stdin, self._outputs = [ours] * 3, self._terminal, {self._terminal: b"o"}
        else:
            (stdin, self._stdin), (out, stdout), (err, stderr) = os.pipe(), os.pipe(), os.pipe()
            ends, self._outputs = [stdin, stdout, stderr], {out: b"o", err: b"r"}

        def prepare() -> None:
            unblock_signals()
            if size:
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        try:
            self._child = subprocess.Popen(
                argv, env=env, stdin=ends[0], stdout=ends[1], stderr=ends[2],
                start_new_session=True, preexec_fn=prepare,
            )  # fmt: skip
        except OSError as error:
            code, reason = start_failure(error)
            self.reply(b"r", f"{argv[0]}: {reason.partition(':')[0]}\n".encode())
            self.reply(b"x", str(code).encode())
        except ValueError as error:  # a null character
            raise Refused(f"the command cannot be run: {error}") from None
        for handle in {*ends}:
            os.close(handle)

    def _resize(self, size: list[int]) -> None:
        if self._terminal is not None:
            fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))

    def close(self) -> None:
        for handle in {*self._outputs, self._stdin} - {-1}:
            with contextlib.suppress(OSError):
                os.close(handle)

    def serve(self) -> None:
        """Pass on input, output and signals until the command has ended.

        Raises:
            _HangUp: whoever asked for it is gone.
        """
        if (child := self._child) is None:
            return
        for handle in (0, 1, self._stdin, *self._outputs):
            os.set_blocking(handle, False)
        ended = os.pidfd_open(child.pid)
        heard = time.monotonic()
        while True:
            over = child.poll() is not None
            wanted = {0: select.POLLIN}
            if not over:
                wanted[ended] = select.POLLIN
            if self._outgoing:
                wanted[1] = select.POLLOUT
            if len(self._outgoing) < INSIDE_WINDOW:
                wanted |= dict.fromkeys(self._outputs, select.POLLIN)
            if self._stdin >= 0 and (self._input or self._input_ends):
                wanted[self._stdin] = wanted.get(self._stdin, 0) | select.POLLOUT
            poll = select.poll()
            for handle, mask in wanted.items():
                poll.register(handle, mask)
            seconds = _QUIET if over else limits.INSIDE_SILENCE - (time.monotonic() - heard)
            ready = dict(poll.poll(max(0.0, 1000 * seconds)))
            if over and not (ready.keys() & self._outputs.keys()) and 1 not in wanted:
                break  # what has inherited its output goes on without us
            if not over and time.monotonic() - heard >= limits.INSIDE_SILENCE:
                raise _HangUp
            if 0 in ready:
                heard = time.monotonic()
                self._receive()
            if 1 in ready:
                with contextlib.suppress(BlockingIOError):
                    del self._outgoing[: os.write(1, self._outgoing[:_CHUNK])]
            if ready.get(self._stdin, 0) & ~select.POLLIN:
                self._feed()
            for handle in ready.keys() & self._outputs.keys():
                self._read(handle)
        self.reply(b"x", str(shell_code(child.wait())).encode())

    def _read(self, handle: int) -> None:
        try:
            data = os.read(handle, _CHUNK)
        except BlockingIOError:
            return
        except OSError:  # EIO: nobody has the terminal open any more
            data = b""
        if data:
            self.reply(self._outputs[handle], data)
        else:
            del self._outputs[handle]

    def _feed(self) -> None:
        """Give the command what has come for it, as much as it takes."""
        try:
            taken = os.write(self._stdin, self._input[:_CHUNK]) if self._input else 0
        except BlockingIOError:
            return
        except OSError:  # it has closed its input
            taken, self._input_ends = len(self._input), True
        del self._input[:taken]
        if taken:
            self.reply(b"a", str(taken).encode())
        if self._input_ends and not self._input:
            if self._terminal is None:
                os.close(self._stdin)
                self._stdin = -1
            self._input_ends = False

    def _receive(self) -> None:
        """Read and carry out frames."""
        try:
            data = os.read(0, _CHUNK)
        except BlockingIOError:
            return
        if not data:
            raise _HangUp
        self._incoming += data
        for kind, body in take_frames(self._incoming):
            if kind == b"i":
                self._input += body
            elif kind == b"e":
                self._input += b"\x04" if self._terminal is not None else b""
                self._input_ends = True
            elif kind == b"w":
                self._resize(json.loads(body))
            elif kind == b"s" and self._child is not None and self._child.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._child.pid, int(body))
