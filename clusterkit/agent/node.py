"""One node from start to end: its launcher, signals, orders of the coordinator, ``exit.json``."""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import selectors
import signal
import sys
import time
from pathlib import Path

from clusterkit.agent import limits
from clusterkit.agent.client import Client
from clusterkit.agent.connections import is_free
from clusterkit.agent.files import read_json
from clusterkit.agent.launcher import Launcher, no_start
from clusterkit.agent.member import Terms
from clusterkit.agent.processes import is_alive
from clusterkit.agent.protocol import (
    LATE,
    LATE_EXIT,
    LAUNCHER_WAITED,
    LEFT,
    PEER_TOKEN,
    SPARE,
    STOPPED,
    STOPPED_BY_PEERS,
    Document,
)
from clusterkit.agent.record import Record, brief, restarts_left
from clusterkit.agent.signals import STOPS, adopt_orphans, read_signals, sender, signal_handle
from clusterkit.agent.stops import Stops
from clusterkit.agent.watch import HANG, Watch


class Node:
    """Runs one node as ``agent run``'s options say."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.running = False  # whether the launcher was started and its end has not been dealt with
        self.reason: str | None = None  # why this node ends, beyond its launcher's exit code
        self.stopped_by: str | None = None  # who asked this node to end, or what for
        self.stray: str | None = None  # the same in a sentence, where it was nobody of the run
        self.stops = Stops(self._say, here=not options.tagged)
        self.turned = time.monotonic()  # when the last `select` returned
        self.late = 0.0  # by how many seconds that was too late
        self.frozen: tuple[float, float] | None = None  # until when, how long this process stopped
        self.client: Client | None = None
        self.orders: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()  # each with why
        self.finished = False  # whether the run is over, for this node
        self.left = False  # whether this one was asked to end, and the run may go on without it
        self.final = False  # whether it was decided that nothing follows this failure
        self.deadline: float | None = None  # when the run is over its time limit
        self.obeyed = False  # whether the launcher ends because the coordinator said so
        self.first = int(os.environ.get("CLUSTERKIT_ATTEMPT", "1"))  # attempt of this agent
        self.folder = Path(os.environ["CLUSTERKIT_NODE_DIR"])  # of that one
        self.used = 0  # restarts, by this agent
        self.terms = Terms(
            options.nodes, options.lost_after, options.rejoin,
            restarts_left(options.restarts, self.folder), options.retry_on, options.min_nodes,
            options.spares,
        )  # fmt: skip
        self.before = read_json(self.folder / "started.json")  # of an agent that was here
        node, back = int(os.environ.get("NODE_RANK", "0")), self.before and self.terms.may_miss
        # Without one that was lost the others may have gone on: they say when it may start.
        self.spare = node >= options.nodes or bool(node and back)
        self.held = SPARE if self.spare else None  # the reason, where another attempt followed
        self.token = os.environ.pop(PEER_TOKEN, "").encode()  # the ranks have no use for it

    def main(self) -> int:
        """Run it to its end; its exit code."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.before and is_alive(self.before):
            print(f"this node already runs as process {self.before['pid']}", file=sys.stderr)
            return 75
        adopt_orphans()
        self.signals = signal_handle((*STOPS, signal.SIGCONT))
        self.wake, self.waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.record = Record(self.folder, self.first, echo=self.options.echo, spare=self.spare)
        self.log = self.record.log
        if self.options.time_limit is not None:
            left = self.options.time_limit - self.record.seconds()
            self.deadline = time.monotonic() + max(0.0, left)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.signals, selectors.EVENT_READ)
        self.selector.register(self.wake, selectors.EVENT_READ)
        self.launcher = Launcher(self.options, self.folder, self.log, self.selector)
        self.watch = Watch(self.options, self.folder, self.log, self._order)
        try:
            self.launcher.open_pipes()
            os.chdir(self.options.workdir)
            self.launcher.prepare()
        except OSError as error:
            code, self.reason = no_start(error)
            return self._finish(code)
        return self._rounds()

    def _rounds(self) -> int:
        """The launcher from its first start to the run's end, again and again where that is due."""
        rejoin = self.options.rejoin > 0
        if not (rejoin and self.options.coordinator):
            self._start()  # and waits for nobody
        if self.options.coordinator or self.terms.restarts:
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
        if rejoin and (self.left or (self.obeyed and not code)):
            code = LEFT
        self._finish(code)
        # From 128 on Kubernetes' operators take it for the end of a pod that is to be replaced.
        return code if code < 128 or self.left or not rejoin else 1

    def _order(self, what: str, why: str) -> None:
        self.orders.put((what, why))
        with contextlib.suppress(OSError):
            os.write(self.waker, b".")

    def _join(self) -> None:
        # A node alone decides by the same rules, over a connection to itself.
        host, _, port = (self.options.coordinator or "127.0.0.1:0").rpartition(":")
        token = self.token if self.options.coordinator else os.urandom(16).hex().encode()
        self.client = Client(
            (host, int(port)), node=int(os.environ["NODE_RANK"]), terms=self.terms,
            run={"run": os.environ["CLUSTERKIT_RUN_ID"], "attempt": str(self.first)},
            token=token, spare=self.spare, order=self._order, hears=self.watch.hears,
            say=self._say, warn=self.record.warn,
        )  # fmt: skip
        self.watch.send = self.client.send
        self.client.start()

    def _obey(self, order: str, why: str) -> None:
        if order in ("start", "follow"):
            used, *place = map(int, why.split())
            self._next_attempt(used)
            if place:
                os.environ["NODE_RANK"], self.options.nodes = str(place[0]), place[1]
            if order == "start":
                self._start()
        elif order == "pause":
            seconds, _, what = why.partition(" ")
            self.record.waits(what, float(seconds))
        elif order == "final":
            self.final = True
            if why:
                self.record.warn(why)
        elif order == "wait":
            self.obeyed = True
            self.held = f"{STOPPED_BY_PEERS}{why}" if self.running else None
            if self.running:
                self.reason = None
                self._stop()
        elif order in ("note", "over", "slow"):
            self.record.notes("slow" if order == "slow" else "hang", why or None)
        elif order == "hang" and self.running and self.reason is None:
            self.reason = f"{HANG}{why}"
            self._stop()
        elif order != "hang":
            self.finished = True
            stopped = self.obeyed or self.spare or (self.running and self.reason is None)
            if order == "stop" and stopped and self.reason != LATE:
                self.obeyed, self.reason = True, f"{STOPPED_BY_PEERS}{why}"
                self._stop()

    def _start(self) -> None:
        self.running, self.obeyed, self.spare = True, False, False
        self.watch.begin(int(os.environ.get("NODE_RANK", "0")), self.options.nodes)
        self.record.goes_on()
        self.reason = self.launcher.start()

    def _next_attempt(self, used: int) -> None:
        """Go on as another attempt, where a restart was used since the last start."""
        self.used, number = used, self.first + used
        if number > self.record.attempt:
            self.reason = self.reason or self.held
            self.record.next_attempt(number, self._ended(self._exit_code()))
            folder, self.reason = str(self.record.folder), None
            os.environ.update(CLUSTERKIT_ATTEMPT=str(number), CLUSTERKIT_NODE_DIR=folder)
            self.stops.clear()

    def _launcher_ended(self) -> None:
        self.running = False
        if self.launcher.end_leftovers():
            self.reason = "the launcher ended with 0 but left ranks running"
        self.reason = self.reason or self.launcher.failure
        self.launcher.finish_output()
        if self.client is not None:
            code, port = self._exit_code(), int(os.environ.get("MASTER_PORT", "0"))
            # With rank 0's port taken, or a full disk, the next round would fail as well.
            fit = os.environ["NODE_RANK"] != "0" or is_free(port)
            last = bool(self.terms.restarts and code) and not (fit and self.record.has_room())
            own = self.launcher.own_failure()
            self.client.ended(code, last=last, failure=own, step=self.log.words.step)
        if self.client is None or not self.terms.again:
            self.finished = True

    def _exit_code(self) -> int:
        if self.reason == LATE:
            return LATE_EXIT
        code = self.launcher.exit_code
        if self.launcher.without_ranks and not self.options.rejoin and code == 128 + signal.SIGKILL:
            code, self.reason = 0, LAUNCHER_WAITED
        return code

    def _turn(self) -> None:
        timeout = min(self.launcher.patience(), limits.LOOK_SECONDS)
        if self.deadline is not None:
            timeout = max(0.0, min(timeout, self.deadline - time.monotonic()))
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
        if time.monotonic() >= self.stops.look_at:
            self.stops.look(self.log.ranks, ending=self.launcher.deadline is not None)
        if self.deadline is not None and time.monotonic() >= self.deadline:
            self._late()
        if self.launcher.turn():
            self._stop()

    def _late(self) -> None:
        """Whatever else goes on, this node ends now, and the others do."""
        self.deadline, self.reason = None, LATE
        self.finished = self.final = True
        if self.client is not None:
            self.client.late()
        self._stop()

    def _signalled(self, signum: int, pid: int, uid: int, late: float) -> None:
        if signum == signal.SIGCONT:
            if late > limits.LOOK_SECONDS:
                self.frozen = time.monotonic(), late
                self.record.warn(f"this node's agent was stopped (SIGSTOP) for {late:.0f} s")
        elif self.reason is None or not self.running:
            self.stopped_by, meant = sender(signum, pid, uid)
            if not meant and pid > 1:  # nor a container's own init, which passes it on
                self.stray = f"stopped by {self.stopped_by}"
                self.record.remarks.append(self.stray)
            self.left = self.terms.again
            if self.left and self.client is not None:
                self.client.leave()
            self.reason = STOPPED
            self._stop()

    def _stop(self) -> None:
        self.stops.look(self.log.ranks, ending=self.launcher.deadline is not None)
        self.launcher.stop()

    def _say(self, text: str) -> None:
        self.log.lines("-", [text.encode()])

    def _causes(self) -> list[str]:
        """What was done to this node that it, and others, may have failed of."""
        found = [self.reason] if self.reason and self.reason.startswith(HANG) else []
        found += self.stops.causes()
        if self.frozen and time.monotonic() < self.frozen[0] + limits.RECENT_SECONDS:
            found.append(f"its agent was stopped (SIGSTOP) for {self.frozen[1]:.0f} s")
        return [*found, self.stray] if self.stray else found

    def _finish(self, code: int) -> int:
        self.launcher.close()
        if self.client is not None:
            self.client.close()
        ended = self.record.end(self._ended(code))
        if self.options.last_words:
            # Only where such a place is there already.
            with contextlib.suppress(OSError), self.options.last_words.open("r+b") as file:
                file.write(brief(ended))
        return code

    def _ended(self, code: int) -> Document:
        """How this attempt ended here."""
        return {
            "exit_code": code,
            "reason": self.reason,
            "processes": self.launcher.ended,
            "stopped_by": self.stopped_by,
            "causes": self._causes(),
            "final": self.final,
            # None: somebody else counts them.
            "restarts_left": self.terms.restarts - self.used if self.options.restarts else None,
        }
