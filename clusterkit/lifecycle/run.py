"""One submitted run: its status, logs, metrics and end, from any process."""

from __future__ import annotations

import heapq
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterkit.errors import (
    EXIT_FAILURE,
    BadInput,
    ClusterkitError,
    RunFailed,
    RunFolderError,
    RunNotFound,
    RunNotOver,
)
from clusterkit.files import other_owner
from clusterkit.jobfile.arguments import checked
from clusterkit.lifecycle import control
from clusterkit.plan import Plan
from clusterkit.run.find import find_run
from clusterkit.run.folder import POLL_SECONDS, Event, RunFolder
from clusterkit.run.logs import LogLine, last_lines
from clusterkit.run.status import RunStatus, State
from clusterkit.spec import JobSpec

if TYPE_CHECKING:  # `wait` and others do without
    from clusterkit.lifecycle.forwarding import Forward
    from clusterkit.lifecycle.inside import Stacks
    from clusterkit.transport import Completed


def check_secrets(spec: JobSpec, why: str = "") -> None:
    """Raise `BadInput` if a secret of the job is not in the environment."""
    missing = [name for name in spec.secrets if name not in os.environ]
    if missing:
        raise BadInput(
            f"secrets: {missing[0]} is not set in your environment",
            hint=f"{why}export {missing[0]}=...",
            job="secrets",
        )


def failed(status: RunStatus, why: str | None) -> RunFailed:
    """Return the error for a run that has not succeeded; without a reason, its remark is one."""
    reason = why or status.remark
    return RunFailed(
        f"run {status.run} is {status.state}{f': {reason}' if reason else ''}",
        hint=(status.failure and status.failure.hint) or f"clusterkit logs {status.run}",
        exit_code=status.exit_code or EXIT_FAILURE,
        status=status,
    )


def get(run: str | Run) -> Run:
    """Find a run by its id, the beginning of its id, or ``last``; a `Run` is returned as it is.

    Raises:
        RunNotFound: no run matches, or several do.
    """
    return run if isinstance(run, Run) else Run(find_run(run))


class Run:
    """One submitted run, in any process."""

    def __init__(self, folder: RunFolder) -> None:
        self._found = folder

    def __repr__(self) -> str:
        return f"<Run {self.id}>"

    @property
    def _folder(self) -> RunFolder:
        if not self.path.is_dir():
            raise RunNotFound(f"run {self.id} is deleted: there is no folder {self.path}")
        return self._found

    @property
    def id(self) -> str:
        return self._found.run_id

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self._found.path

    @property
    def plan(self) -> Plan:
        """The plan of its newest attempt."""
        return self._folder.plan()

    def status(self) -> RunStatus:
        """Return its status now."""
        return control.reconcile(self._folder)

    def with_goodput(self, status: RunStatus) -> RunStatus:
        """Return a status of this run with ``goodput``, and steps in ``attempts``, from its
        logs."""
        from clusterkit.run.goodput import with_goodput  # deferred: `wait` does without

        return with_goodput(self._folder, status, time.time())

    def events(self) -> list[Event]:
        """Return what the supervisor did beyond the plan, such as restarts."""
        return self._folder.records("events.jsonl", Event)

    @checked
    def wait(
        self,
        timeout: float | None = None,
        *,
        until: Callable[[RunStatus], bool] | None = None,
        check: bool = False,
    ) -> RunStatus:
        """Wait until the run has ended or ``until`` returns True. Return the status then.

        Args:
            check: raise `RunFailed` if it has not succeeded by then, as it failed, was cancelled or
                its state stays unknown.

        Raises:
            RunNotOver: neither happened within ``timeout`` seconds. It is a `TimeoutError` as well.
            RunFailed: with ``check``; the message names the first failed rank and the cause.
        """
        status = self._waited(timeout, until)
        bad = status.state.final and status.state is not State.SUCCEEDED
        if check and (bad or status.state is State.UNKNOWN):
            raise failed(status, status.failure.line if status.failure is not None else None)
        return status

    def _waited(
        self, timeout: float | None, until: Callable[[RunStatus], bool] | None
    ) -> RunStatus:
        deadline = None if timeout is None else time.monotonic() + timeout
        with control.Connections() as connections:
            while True:
                status = control.reconcile(self._folder, connections)
                if status.state.final or (until is not None and until(status)):
                    return status
                if status.state is State.UNKNOWN and not self._has_processes():
                    return status  # it stays so
                if deadline is not None and time.monotonic() > deadline:
                    raise RunNotOver(f"run {self.id} is {status.state} after {timeout:g} s")
                time.sleep(POLL_SECONDS / 2)

    @property
    def supervised(self) -> bool:
        """Whether its supervisor runs."""
        return self._folder.has_supervisor()

    def _has_processes(self) -> bool:
        """Return whether any process of the run exists on this machine."""
        from clusterkit import agent

        return self._found.has_supervisor() or bool(agent.processes_of(str(self.path)))

    @checked
    def wait_started(self, timeout: float = 60.0) -> RunStatus:
        """Wait until every node runs or the run has ended. Return the status then."""
        return self.wait(
            timeout,
            until=lambda status: (
                bool(status.nodes) and all(node.state is not State.PENDING for node in status.nodes)
            ),
        )

    @checked
    def logs(
        self,
        *,
        rank: int | None = None,
        node: int | None = None,
        follow: bool = False,
        note: Callable[[Event], None] = lambda event: None,
    ) -> Iterator[LogLine]:
        """Return the lines of all attempts, ordered by time within each.

        Args:
            follow: yield new lines until the run ends.
            note: called with each event of an attempt after its last line.

        Raises:
            BadInput: the run has no such node or rank.
        """
        return itertools.chain.from_iterable(
            self.log_batches(rank=rank, node=node, follow=follow, note=note)
        )

    @checked
    def tail(
        self, lines: int, *, rank: int | None = None, node: int | None = None
    ) -> list[LogLine]:
        """Return the last lines of `logs`. The logs are read from their ends.

        Raises:
            BadInput: the run has no such node or rank.
        """
        self._check(node, rank)
        attempt = self.status().attempt  # without a supervisor, this copies what the hosts have
        found: list[LogLine] = []
        while attempt > 0 and len(found) < lines:
            nodes = self._folder.nodes_of(attempt, self.plan, rank) if node is None else (node,)
            parsed = [
                last_lines(self._folder.node_dir(attempt, each) / "log", each, attempt, lines, rank)
                for each in nodes
            ]
            found = [*heapq.merge(*parsed, key=attrgetter("time")), *found]
            attempt -= 1
        return found[len(found) - min(lines, len(found)) :]

    @checked
    def log_batches(
        self,
        *,
        rank: int | None = None,
        node: int | None = None,
        follow: bool = False,
        note: Callable[[Event], None] = lambda event: None,
    ) -> Iterator[list[LogLine]]:
        """Return `logs` in lists of up to some thousand lines, which is faster.

        Raises:
            BadInput: the run has no such node or rank.
        """
        self._check(node, rank)
        return self._batches(node, rank, follow, note)

    def _check(self, node: int | None, rank: int | None) -> None:
        plan = self.plan
        # A spare that was used up is in no later plan.
        folders = self._folder.file("attempts").glob(f"*/node-{node}")
        if node is not None and not (0 <= node < plan.nodes or any(folders)):
            raise BadInput(f"node {node}: run {self.id} has nodes 0 to {plan.nodes - 1}")
        if rank is not None and not 0 <= rank < plan.world_size:
            raise BadInput(f"rank {rank}: run {self.id} has ranks 0 to {plan.world_size - 1}")

    def _batches(
        self, node: int | None, rank: int | None, follow: bool, note: Callable[[Event], None]
    ) -> Iterator[list[LogLine]]:
        folder = self._folder  # once: who follows sees the end of a run that is removed
        with control.Connections() as connections:
            # Without a supervisor, this copies what only the hosts have.
            status = control.reconcile(folder, connections)

            def running() -> bool:
                nonlocal status
                status = control.reconcile(folder, connections)
                lost = status.state is State.UNKNOWN and not self._has_processes()
                return not status.state.final and not lost and status.attempt == attempt

            for attempt in itertools.count(1):
                nodes = folder.nodes_of(attempt, folder.plan(), rank) if node is None else (node,)
                for batch in folder.log(attempt, nodes, running if follow else None):
                    yield batch if rank is None else [x for x in batch if x.rank == rank]
                for event in folder.records("events.jsonl", Event):
                    if event.attempt == attempt:
                        note(event)
                if status.attempt <= attempt:
                    return

    def metrics(self) -> list[dict[str, Any]]:
        """Return what rank 0 reported: a dict per step with ``step``, ``loss``,
        ``tokens_per_second``. A run that resumed from a checkpoint reports some steps twice."""
        found = [mark for mark in self.reported_events() if mark["event"] == "metrics"]
        return [{key: mark[key] for key in mark if key != "event"} for mark in found]

    def reported_events(self) -> list[dict[str, Any]]:
        """Return every marked line's object (`clusterkit.run.logs`), with metrics."""
        return [event for line in self.logs() if (event := line.event) is not None]

    def attach(self) -> bool:
        """Start another supervisor for a run whose own was killed. If the run has failed
        meanwhile, its restarts are used.

        Returns:
            False if it has a supervisor, or nothing is left to do.

        Raises:
            BadInput: a secret that a restart needs is not in the environment.
        """
        if not control.needs_supervisor(self._folder):
            return False
        self._refuse_elsewhere("attach")
        check_secrets(self._folder.read_json("job.json", JobSpec))
        if (lock := self._folder.acquire_supervisor_lock()) is None:
            return False
        from clusterkit.lifecycle import supervise

        with lock:
            supervise.spawn(self._folder, lock, adopt=True)
        return True

    def _refuse_elsewhere(self, verb: str) -> None:
        if (host := control.elsewhere(self._folder)) is not None:
            raise BadInput(
                f"run {self.id}: its processes run on {host}", hint=f"clusterkit {verb} there"
            )

    @checked
    def exec(
        self,
        argv: Sequence[str],
        *,
        node: int | None = None,
        rank: int | None = None,
        stdin: bytes = b"",
    ) -> Completed:
        """Run a command beside the ranks, in their container, folder and environment.

        Args:
            node: where; the first node by default.
            rank: on its node, with the variables of this rank instead of the node's.

        Raises:
            BadInput: the run has ended, or has no such node or rank.
            Unavailable: nothing can be started there, or the connection was lost.
        """
        from clusterkit.lifecycle import inside

        return inside.completed(self._folder, argv, node, rank, stdin)

    def exec_here(
        self,
        argv: Sequence[str],
        *,
        node: int | None = None,
        rank: int | None = None,
        terminal: bool = False,
    ) -> int:
        """As `exec`, with this process's own input, output and signals; return the exit code.

        Args:
            argv: none: the user's shell.
            terminal: the command gets a terminal, which this process has.
        """
        from clusterkit.lifecycle import inside

        return inside.execute(self._folder, argv, node, rank, terminal=terminal)

    def exec_on_all(self, argv: Sequence[str], report: Callable[[ClusterkitError], object]) -> int:
        """As `exec_here` on all nodes at once, without input; return the highest exit code."""
        from clusterkit.lifecycle import inside

        return inside.execute_on_all(self._folder, argv, report)

    @checked
    def stack(self, rank: int | None = None) -> Stacks:
        """Return where the ranks are now, or this one, without disturbing them.

        Raises:
            BadInput: the run has ended, or has no such rank.
            Unavailable: no node answers.
        """
        from clusterkit.lifecycle import inside

        return inside.stacks(self._folder, rank)

    @checked
    def download(
        self, path: str, dest: str | os.PathLike[str] = ".", *, node: int | None = None,
        progress: Callable[[int, int], object] = lambda done, size: None,
    ) -> Path:  # fmt: skip
        """Copy a file of a node to this machine, whole or not at all; return its path here.

        Args:
            path: relative to the run's folder on the node.
            dest: a file, or a folder to put it into.
            progress: is called with how many bytes have been copied, and how many there are.

        Raises:
            BadInput: there is no such file or node.
            Unavailable: the node does not answer.
        """
        from clusterkit.lifecycle import copying

        return copying.download(self._folder, path, Path(dest), node, progress)

    @checked
    def upload(
        self, source: str | os.PathLike[str], path: str, *, node: int | None = None,
        progress: Callable[[int, int], object] = lambda done, size: None,
    ) -> None:  # fmt: skip
        """Copy a file of this machine to a node. As `download`."""
        from clusterkit.lifecycle import copying

        copying.upload(self._folder, Path(source), path, node, progress)

    @checked
    def forward(
        self, port: int, *, local: int = 0, node: int | None = None,
        report: Callable[[str], object] = lambda words: None,
    ) -> Forward:  # fmt: skip
        """Make a port of a node one of this machine's loopback, as long as the result is used:
        ``with run.forward(6006) as forward: forward.serve_forever()``.

        Args:
            local: the port here; 0: any that is free, then ``forward.port``.
            report: takes what a person should know, such as that nothing listens there.

        Raises:
            BadInput: the run has ended or has no such node, or the port here is taken.
            Unavailable: the node does not answer.
        """
        from clusterkit.lifecycle.forwarding import Forward

        return Forward(self._folder, port, local, node, report)

    @checked
    def cancel(self) -> RunStatus:
        """End the run and everything that it started. Idempotent."""
        return control.cancel(self._folder)

    @checked
    def delete(self, *, force: bool = False) -> None:
        """Remove the run's folder with logs, metrics and checkpoints, on this machine and its
        hosts.

        Args:
            force: remove it on this machine even if a host does not answer.

        Raises:
            BadInput: the run has not ended, or is another user's.
            Unavailable: a host does not answer; the folder on this machine is kept.
        """
        if (owner := other_owner(self._folder.path)) is not None and os.geteuid() != 0:
            raise BadInput(f"run {self.id} belongs to {owner}", f"only {owner} can remove it")
        status = self.status()
        if not status.state.final:
            self._refuse_elsewhere("rm")
        if not status.state.final and (status.state is not State.UNKNOWN or self._has_processes()):
            raise BadInput(f"run {self.id} is {status.state}", hint=f"clusterkit cancel {self.id}")
        try:
            control.remove_remote_files(self._folder)
        except ClusterkitError:
            if not force:
                raise
        try:
            shutil.rmtree(self._folder.path)
        except OSError as error:
            raise RunFolderError(f"cannot remove {error.filename}: {error.strerror}") from error
