"""The agent's main loop on one node: its launcher, signals, node 0's orders, ``exit.json``."""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import selectors
import signal
import time
from pathlib import Path

from clusterkit.agent import clock, messages, protocol
from clusterkit.agent.client import Client, take_meeting
from clusterkit.agent.connections import is_free
from clusterkit.agent.ending import describe
from clusterkit.agent.failure import start_failure
from clusterkit.agent.fork import ForkLauncher
from clusterkit.agent.guard import Guard
from clusterkit.agent.launcher import Phase
from clusterkit.agent.member import RestartPolicy
from clusterkit.agent.node_files import NodeFiles, restarts_left, write_last_words
from clusterkit.agent.signals import STOPS, read_signals, sender, signal_handle
from clusterkit.agent.spawn import SpawnLauncher
from clusterkit.agent.stopped import AgentPause
from clusterkit.agent.watch import Watch


class Node:
    """One node, from the first start of its launcher to the end of the run.

    Args:
        options: of ``agent run``.
        folder: the node's, of the attempt that this agent begins with.
        returns: another agent was lost here; the others may have continued without this node.
    """

    def __init__(self, options: argparse.Namespace, folder: Path, *, returns: bool) -> None:
        self.options = options
        self.first_attempt = int(os.environ.get("CLUSTERKIT_ATTEMPT", "1"))
        self.terms = RestartPolicy(
            options.nodes, options.lost_after, options.rejoin,
            restarts_left(options.restarts, folder), options.retry_on, options.min_nodes,
            options.spares,
        )  # fmt: skip
        node = int(os.environ.get("NODE_RANK", "0"))
        spare = node >= options.nodes or (node > 0 and returns and self.terms.can_lose_nodes)
        self.phase = Phase.SPARE if spare else Phase.NEW
        self.over = False  # whether the run has ended for this node
        self.preempted = False  # whether it has because this node was asked to end (SIGTERM)
        self.final = False  # whether the run must not be started again after this failure
        self.reason: str | None = None  # why this attempt ends, beyond the launcher's exit code
        self.restart_reason = protocol.SPARE_NOT_NEEDED if spare else None  # before the next
        self.stopped_by: str | None = None  # the process that asked this node to end, or its reason
        self.causes: list[str] = []  # what else was done to this node that it may have failed of
        self.guard: Guard | None = None
        self.hang = ""  # how ranks hung when this attempt failed of it
        self.meeting = take_meeting()  # not for the ranks
        self.client: Client | None = None
        self.orders: queue.SimpleQueue[messages.Order] = queue.SimpleQueue()
        self.pause = AgentPause()
        self.signals = signal_handle((*STOPS, signal.SIGCONT))  # before there are threads
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable: there are orders
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.signals, selectors.EVENT_READ, self._read_signals)
        self.selector.register(self.wake, selectors.EVENT_READ, lambda: os.eventfd_read(self.wake))
        self.files = NodeFiles(folder, self.first_attempt, echo=options.echo, spare=spare)
        self.log = self.files.log
        if not self.meeting.token:  # manifests that somebody applies by hand
            self.files.warn(f"{protocol.PEER_TOKEN} is not set: any program can pose as a node")
        self.deadline = self.files.deadline(options.time_limit)
        kind = ForkLauncher if options.fork else SpawnLauncher
        self.launcher = kind(options, folder, self.log, self.selector)
        self.watch = Watch(options, folder, self.log, self._order)

    def run(self) -> int:
        """Run it to its end; return the agent's exit code."""
        try:
            os.chdir(self.options.workdir)
            self.launcher.prepare()
        except OSError as error:
            code, self.reason = start_failure(error)
            return self._finish(code)
        self.guard = Guard(self.files.folder, self.log, self.launcher.pipes, self.options)
        self.files.set_guard(self.guard.identity)
        rejoin = self.options.rejoin > 0
        if self.meeting.others or self.terms.restarts:
            self._make_client()
        if not (rejoin and self.meeting.others):
            self._start()  # without waiting for other nodes
        if self.client is not None:
            self.client.start()
        while True:
            if self.phase.runs and self.launcher.has_ended():
                self._launcher_ended()
            if self.over and not self.phase.runs:
                break
            if self.preempted or self.orders.empty():
                self._handle_events()
            else:
                self._handle_order(self.orders.get())
        code = self._exit_code()
        if rejoin and (self.preempted or (self.phase is Phase.WAITING and not code)):
            code = protocol.PREEMPTED_EXIT
        self._finish(code)
        # From 128 on Kubernetes' operators take it for the end of a pod that is to be replaced.
        return code if code < 128 or self.preempted or not rejoin else 1

    # -- the other nodes

    def _make_client(self) -> None:
        self.client = Client(
            self.meeting.address, node=int(os.environ["NODE_RANK"]), terms=self.terms,
            run={"run": os.environ["CLUSTERKIT_RUN_ID"], "attempt": str(self.first_attempt)},
            token=self.meeting.token, spare=self.phase is Phase.SPARE, on_order=self._order,
            on_message=self.watch.receive,
        )  # fmt: skip
        self.watch.send = self.client.send

    def _order(self, order: messages.Order) -> None:
        """Take an order from another thread, for the main loop."""
        self.orders.put(order)
        with contextlib.suppress(OSError):
            os.eventfd_write(self.wake, 1)

    def _handle_order(self, order: messages.Order) -> None:
        match order:
            case messages.Log():
                self.log.line(order.text)
            case messages.Warn():
                self.files.warn(order.text)
            case messages.CountRestarts():
                self._next_attempt(self.first_attempt + order.restarts_used)
            case messages.Start():
                self._next_attempt(self.first_attempt + order.restarts_used)
                if order.rank is not None and order.nodes is not None:
                    os.environ["NODE_RANK"], self.options.nodes = str(order.rank), order.nodes
                if not self.over:
                    self._start()
            case messages.Pause():
                self.files.set_waiting(order.reason, order.seconds)
            case messages.EndLauncher():
                running = self.phase.runs
                reason = f"{protocol.STOPPED_BY_PEERS}{order.reason}"
                self.restart_reason = reason if running else None
                self.phase = Phase.INTERRUPTED if running else Phase.WAITING
                if running:
                    self.reason = None
                    self.launcher.stop()
            case messages.Note() | messages.Left():
                self.files.show(order)
            case messages.EndHang(node) if node != int(os.environ.get("NODE_RANK", "0")):
                self.files.hang_ended()
            case messages.EndHang():
                if self.phase.runs and self.reason is None:
                    self.reason = f"{protocol.HANG}{order.reason}"
                    self.launcher.stop()
            case messages.Finish():
                self._run_over(order)

    def _run_over(self, order: messages.Finish) -> None:
        self.over = True
        self.final |= order.final is not None
        if order.final:
            self.files.warn(order.final)
        runs_on = self.phase is Phase.RUNNING and self.reason is None
        ordered = runs_on or self.phase in (Phase.SPARE, Phase.INTERRUPTED, Phase.WAITING)
        if order.stop and ordered and self.reason != protocol.OVER_TIME_LIMIT:
            self.phase = Phase.INTERRUPTED if self.phase.runs else Phase.WAITING
            self.reason = f"{protocol.STOPPED_BY_PEERS}{order.reason}"
            self.launcher.stop()

    # -- the launcher

    def _start(self) -> None:
        self.phase = Phase.RUNNING
        self.watch.begin(int(os.environ.get("NODE_RANK", "0")), self.options.nodes)
        self.files.set_running()
        self.reason, self.hang = self.launcher.start(), ""

    def _next_attempt(self, number: int) -> None:
        """End this attempt and begin that one, where a restart was used since the last start."""
        if number > self.files.attempt:
            self.reason = self.reason or self.restart_reason
            try:
                self.files.next_attempt(number, self._ending(self._exit_code(), number))
            except OSError as error:  # over a quota, of which statvfs says nothing
                self.files.warn(f"not started again: {error}")
                return self._leave()
            self.reason, folder = None, str(self.files.folder)
            os.environ.update(CLUSTERKIT_ATTEMPT=str(number), CLUSTERKIT_NODE_DIR=folder)

    def _leave(self) -> None:
        """Start nothing more; for the other nodes this one is lost."""
        self.over = True
        if self.client is not None:
            self.client.leave()

    def _launcher_ended(self) -> None:
        interrupted = self.phase is Phase.INTERRUPTED
        self.phase = Phase.WAITING if interrupted else Phase.ENDED
        if self.launcher.stuck:
            self.reason = "; ".join(map(describe, self.launcher.stuck))
            self._leave()
        self.reason = self.reason or self.launcher.failure
        self.launcher.finish_output()
        failure, stopped = self.launcher.rank_failure(), self.reason or self.restart_reason
        self.hang = self.files.hang_behind(failure, interrupted and stopped, self.options)
        if self.client is not None:
            code, port = self._exit_code(), int(os.environ.get("MASTER_PORT", "0"))
            # With rank 0's port taken, or a full disk, the next round would fail as well.
            port_free = os.environ["NODE_RANK"] != "0" or is_free(port)
            last = bool(self.terms.restarts and code) and not (port_free and self.files.has_room())
            step = self.log.output.step
            self.client.launcher_ended(code, cannot_restart=last, failure=failure, step=step)
        self.over |= self.client is None or not self.terms.restartable

    def _exit_code(self) -> int:
        if self.reason == protocol.OVER_TIME_LIMIT:
            return protocol.TIME_LIMIT_EXIT
        code = self.launcher.exit_code
        done = self.launcher.ranks_were_done and not self.options.rejoin
        if done and code == 128 + signal.SIGKILL:
            code, self.reason = 0, protocol.LAUNCHER_WAITED
        return code

    # -- events

    def _handle_events(self) -> None:
        """Wait until something happens or is due, and handle it."""
        timeout = self.launcher.tick()
        if self.deadline is not None:
            timeout = max(0.0, min(timeout, self.deadline - time.monotonic()))
        ready = clock.ready(self.selector, timeout)
        self.pause.woke_up(timeout)
        for key, _ in ready:
            key.data()
        if self.deadline is not None and time.monotonic() >= self.deadline:
            self._time_limit_reached()

    def _time_limit_reached(self) -> None:
        """End this node now, and with it the others."""
        self.deadline, self.reason = None, protocol.OVER_TIME_LIMIT
        self.over = self.final = True
        if self.client is not None:
            self.client.time_limit_reached()
        self.launcher.stop()

    def _read_signals(self) -> None:
        for signum, pid, uid in read_signals(self.signals):
            if signum == signal.SIGCONT:
                if (seconds := self.pause.resumed()) is not None:
                    self.files.warn(f"this node's agent was stopped (SIGSTOP) for {seconds:.0f} s")
            elif not (self.phase.runs and self.reason and (self.over or self.stopped_by)):
                self._asked_to_end(signum, pid, uid)  # also while it ends for another start

    def _asked_to_end(self, signum: int, pid: int, uid: int) -> None:
        self.stopped_by, by_clusterkit = sender(signum, pid, uid)
        if not by_clusterkit and pid > 1:  # nor a container's own init, which passes it on
            self.causes.append(f"stopped by {self.stopped_by}")
            self.files.remarks.append(self.causes[-1])
        self.reason, self.preempted = protocol.STOPPED, self.terms.restartable
        if self.preempted:
            self._leave()
        self.launcher.stop()

    # -- the end

    def _finish(self, code: int) -> int:
        self.launcher.close()
        if self.guard is not None:
            self.guard.end()
        if self.client is not None:
            self.client.close()
        while not self.orders.empty():
            if isinstance(order := self.orders.get(), messages.Log | messages.Warn):
                self._handle_order(order)
        document = self.files.end(self._ending(code, self.files.attempt))
        write_last_words(self.options.last_words, document)
        return code

    def _ending(self, code: int, last_attempt: int) -> protocol.Document:
        """Return how this attempt has ended, for its ``exit.json``.

        Args:
            last_attempt: the last that has begun by now; later ones are restarts that are left.
        """
        hang = self.reason if (self.reason or "").startswith(protocol.HANG) else self.hang
        return {
            "exit_code": code, "reason": self.reason, "processes": self.launcher.ends,
            "stopped_by": self.stopped_by,
            "causes": [
                *filter(None, [hang]), *self.launcher.causes(), *self.pause.causes(), *self.causes
            ],
            "final": self.final,
            # None: the supervisor or the platform counts them.
            "restarts_left": self.terms.restarts - (last_attempt - self.first_attempt)
            if self.options.restarts else None,
        }  # fmt: skip
