"""One node from start to end: its launcher, signals, orders of the coordinator, ``exit.json``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import selectors
import signal
import socket
import sys
import time
from pathlib import Path

from clusterkit.agent import limits
from clusterkit.agent.client import Client
from clusterkit.agent.files import read_json, write_json
from clusterkit.agent.launcher import Launcher, no_start
from clusterkit.agent.node_log import NodeLog, lines_lost
from clusterkit.agent.processes import identity, is_alive, is_stopped
from clusterkit.agent.protocol import (
    LAUNCHER_WAITED,
    LEFT,
    PEER_TOKEN,
    STOPPED,
    STOPPED_BY_PEERS,
    Document,
)
from clusterkit.agent.signals import STOPS, adopt_orphans, read_signals, sender, signal_handle


class Node:
    """Runs one node as ``agent run``'s options say."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder = Path(os.environ["CLUSTERKIT_NODE_DIR"])
        self.running = False  # whether the launcher was started and its end has not been dealt with
        self.reason: str | None = None
        """Why this node ends, where its launcher's exit code does not say it."""
        self.stopped_by: str | None = None  # who asked this node to end, or what for
        self.stray: str | None = None  # the same in a sentence, where it was nobody of the run
        self.suspended: set[int] = set()
        """Ranks that are stopped (SIGSTOP), or were when they were last there."""
        self.look_at = 0.0
        self.turned, self.late = time.monotonic(), 0.0
        """When the last `select` returned, and by how many seconds too late."""
        self.frozen: tuple[float, float] | None = None
        """Until when (monotonic), and for how many seconds, this process itself was stopped."""
        self.client: Client | None = None
        self.orders: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        """Of the coordinator, each with why."""
        self.finished = False  # whether the run is over, for this node
        self.left = False
        """Whether this node is being taken away from a run that goes on with another one."""
        self.held: str | None = None  # the reason, where it ended before another attempt
        self.obeyed = False  # whether the launcher ends because the coordinator said so
        self.first = self.attempt = int(os.environ["CLUSTERKIT_ATTEMPT"])
        self.remarks: list[str] = []  # what a person should know of this node, however it ends
        # The ranks have no use for it.
        self.token = os.environ.pop(PEER_TOKEN, "").encode()

    def main(self) -> int:
        """Run it to its end; its exit code."""
        self.folder.mkdir(parents=True, exist_ok=True)
        started = read_json(self.folder / "started.json")
        if started and is_alive(started):
            print(f"this node already runs as process {started['pid']}", file=sys.stderr)
            return 75
        adopt_orphans()
        self.signals = signal_handle((*STOPS, signal.SIGCONT))
        for signum in STOPS:  # a shell ignores SIGINT for what it starts in the background
            signal.signal(signum, signal.SIG_DFL)
        self.wake, self.waker = os.pipe()
        for handle in (self.wake, self.waker):
            os.set_blocking(handle, False)
        self.oom_kills_before = _oom_kills()
        self.started = {**identity(os.getpid()), "at": time.time(), "host": socket.gethostname()}
        write_json(self.folder / "started.json", self.started)
        self.reserve = self.folder / ".reserve"
        with contextlib.suppress(OSError):
            self.reserve.write_bytes(bytes(limits.RESERVE_BYTES))
        self.log = NodeLog(self.folder, echo=self.options.echo)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.signals, selectors.EVENT_READ)
        self.selector.register(self.wake, selectors.EVENT_READ)
        self.launcher = Launcher(self.options, self.folder, self.log, self.selector)
        try:
            self.launcher.open_pipes()
            os.chdir(self.options.workdir)
            self.launcher.prepare()
        except OSError as error:
            code, self.reason = no_start(error)
            return self._finish(code)
        return self._rounds()

    def _rounds(self) -> int:
        """The launcher from its first start to the run's end, once more after each lost node."""
        rejoin = self.options.rejoin > 0
        if not (rejoin and self.options.coordinator):
            self._start()  # and waits for nobody
        if self.options.coordinator or self.options.restarts:
            self._join()
        while True:
            if self.running and not self.launcher.running:
                self._launcher_ended()
            if (self.finished or self.left) and not self.launcher.running:
                break
            self._turn()
            while not self.left and not self.orders.empty():
                self._obey(*self.orders.get())
        code = self._exit_code()
        if self.left:
            code = LEFT
        elif rejoin and self.obeyed:
            code = code or LEFT
        self._finish(code)
        # From 128 on Kubernetes' operators take it for the end of a pod that is to be replaced.
        return code if code < 128 or self.left or not rejoin else 1

    def _join(self) -> None:
        def order(what: str, why: str) -> None:
            self.orders.put((what, why))
            with contextlib.suppress(OSError):
                os.write(self.waker, b".")

        # A node alone decides by the same rules, over a connection to itself.
        host, _, port = (self.options.coordinator or "127.0.0.1:0").rpartition(":")
        self.client = Client(
            (host, int(port)), node=int(os.environ["NODE_RANK"]), nodes=self.options.nodes,
            run={"run": os.environ["CLUSTERKIT_RUN_ID"],
                 "attempt": os.environ["CLUSTERKIT_ATTEMPT"]},
            token=self.token, lost_after=self.options.lost_after, wait=self.options.rejoin,
            restarts=self.options.restarts,
            order=order, say=self._say, warn=self._warn,
        )  # fmt: skip
        self.client.start()

    def _obey(self, order: str, why: str) -> None:
        if order == "start":
            self._next_attempt(self.first + int(why))
            self._start()
        elif order == "wait":
            self.obeyed = True
            self.held = f"{STOPPED_BY_PEERS}{why}" if self.running else None
            if self.running:
                self.reason = None
                self._stop()
        else:
            self.finished = True
            if order == "stop" and (self.obeyed or (self.running and self.reason is None)):
                self.obeyed, self.reason = True, f"{STOPPED_BY_PEERS}{why}"
                self._stop()

    def _start(self) -> None:
        self.running, self.obeyed = True, False
        self.reason = self.launcher.start()

    def _next_attempt(self, attempt: int) -> None:
        """Go on in another folder, where a restart was used since the last start."""
        if attempt <= self.attempt:
            return
        self.reason = self.reason or self.held
        self._write_end(self._exit_code(), {"next": attempt})
        self.attempt, name = attempt, self.folder.name
        self.folder = self.folder.parents[1] / str(attempt) / name
        self.folder.mkdir(parents=True, exist_ok=True)
        os.environ.update(CLUSTERKIT_ATTEMPT=str(attempt), CLUSTERKIT_NODE_DIR=str(self.folder))
        self.started |= {"at": time.time()}
        write_json(self.folder / "started.json", self.started)
        self.log.move(self.folder)
        self.suspended.clear()

    def _launcher_ended(self) -> None:
        self.running = False
        if self.launcher.end_leftovers():
            self.reason = "the launcher ended with 0 but left ranks running"
        self.reason = self.reason or self.launcher.failure
        self.launcher.finish_output()
        if self.client is not None:
            self.client.ended(self._exit_code())
        if self.client is None or not (self.options.rejoin or self.options.restarts):
            self.finished = True

    def _exit_code(self) -> int:
        code = self.launcher.exit_code
        if self.launcher.without_ranks and not self.options.rejoin and code == 128 + signal.SIGKILL:
            code, self.reason = 0, LAUNCHER_WAITED
        return code

    def _turn(self) -> None:
        patience = self.launcher.patience()
        timeout = limits.LOOK_SECONDS if patience is None else min(patience, limits.LOOK_SECONDS)
        ready = self.selector.select(timeout)
        # Of a select that came to its end meanwhile, only the next one knows what has come.
        late, turned = self.late, self.turned
        self.turned = time.monotonic()
        self.late = self.turned - turned - timeout
        for key, _ in ready:
            if key.data is not None:
                key.data()  # of the launcher
            elif key.fd == self.wake:
                os.read(self.wake, 512)
            else:
                for signum, pid, uid in read_signals(self.signals):
                    self._signalled(signum, pid, uid, max(late, self.late))
        if time.monotonic() >= self.look_at:
            self._look()
        if self.launcher.turn():
            self._stop()

    def _signalled(self, signum: int, pid: int, uid: int, late: float) -> None:
        if signum == signal.SIGCONT:
            if late > limits.LOOK_SECONDS:
                self.frozen = time.monotonic(), late
                self._warn(f"this node's agent was stopped (SIGSTOP) for {late:.0f} s")
        elif self.reason is None or not self.running:
            self.stopped_by, meant = sender(signum, pid, uid)
            if not meant and pid > 1:  # nor a container's own init, which passes it on
                self.stray = f"stopped by {self.stopped_by}"
                self.remarks.append(self.stray)
            self.left = self.options.rejoin > 0
            if self.left and self.client is not None:
                self.client.leave()
            self.reason = STOPPED
            self._stop()

    def _stop(self) -> None:
        self._look()
        self.launcher.stop()

    def _look(self) -> None:
        """Log which ranks were stopped, and which of those go on."""
        self.look_at = time.monotonic() + limits.LOOK_SECONDS
        if self.options.tagged:
            return  # they are processes of other hosts
        for rank in self.log.ranks:
            stopped, number = is_stopped(rank), rank["rank"]
            if stopped and number not in self.suspended:
                self.suspended.add(number)
                self._say(f"rank {number} was stopped (SIGSTOP)")
            elif stopped is False and number in self.suspended:
                self.suspended.remove(number)
                self._say(f"rank {number} goes on")

    def _say(self, text: str) -> None:
        self.log.lines("-", [text.encode()])

    def _warn(self, text: str) -> None:
        """A line of the log that `clusterkit status` shows as well."""
        self._say(text)
        self.remarks.append(text)
        with contextlib.suppress(OSError):
            write_json(self.folder / "started.json", {**self.started, "remarks": self.remarks})

    def _causes(self) -> list[str]:
        """What was done to this node that it, and others, may have failed of."""
        found = [f"rank {number} was stopped (SIGSTOP)" for number in sorted(self.suspended)]
        if self.frozen and time.monotonic() < self.frozen[0] + limits.RECENT_SECONDS:
            found.append(f"its agent was stopped (SIGSTOP) for {self.frozen[1]:.0f} s")
        return [*found, self.stray] if self.stray else found

    def _finish(self, code: int) -> int:
        self.launcher.close()
        if self.client is not None:
            self.client.close()
        with contextlib.suppress(OSError):
            self.reserve.unlink()
        ended = self._write_end(code, {})
        if self.options.last_words:
            whole = json.dumps(ended).encode()
            short = json.dumps({**ended, "processes": []}).encode()
            # Only where such a place is there already.
            with contextlib.suppress(OSError), self.options.last_words.open("r+b") as file:
                file.write(whole if len(whole) <= limits.LAST_WORDS_BYTES else short)
        return code

    def _write_end(self, code: int, more: Document) -> Document:
        """How this attempt ended here: ``exit.json``."""
        self.log.lines("-", [])
        if self.log.lost and not self.options.echo:
            self.remarks.append(lines_lost(self.log.lost))
        ranks = {rank["pid"]: rank["rank"] for rank in self.log.ranks}
        own = [{**end, "rank": ranks.get(end["pid"])} for end in self.launcher.ended]
        ended = {
            "exit_code": code,
            "at": time.time(),
            "reason": self.reason,
            "processes": own + self.log.rank_ends,
            "oom_kills": _oom_kills() - self.oom_kills_before,
            "remarks": self.remarks,
            "stopped_by": self.stopped_by,
            "causes": self._causes(),
            **more,
        }
        with contextlib.suppress(OSError):
            write_json(self.folder / "exit.json", ended)
        return ended


def _oom_kills() -> int:
    """Processes that the kernel has killed for want of memory since boot."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
