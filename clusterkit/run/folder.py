"""The run folder: the truth about one run, in files that outlive every process.

$CLUSTERKIT_HOME/runs/RUN/
    run.json        id, time, job, cluster and backend
    job.json        the job as it was submitted, with flags applied; a job file itself
    cluster.json facts.json plan.json plan.txt
    files/          what the plan wrote: scripts, configs
    steps.jsonl     every step carried out, and how it went
    events.jsonl    what the supervisor saw and did, in sentences
    supervisor.json process that supervises the run
    supervisor.lock locked as long as that process lives
    state.json      state, attempt, failure; final once the run has ended
    attempt-K.starting, .started   the newest attempt that a supervisor has begun, or has started
    cancelled       exists once someone has asked to cancel
    leftovers       exists while a host that did not answer may still run some of it
    attempts/K/node-N/   log, exit code and process ids of one node in attempt K
    checkpoints/    unless the job names another folder
"""

from __future__ import annotations

import contextlib
import heapq
import os
import posixpath
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import IO, TypeVar

import msgspec
from msgspec import Struct

from clusterkit.cluster import CLUSTER_TYPES, ClusterSpec, Facts
from clusterkit.errors import BadInput, ClusterkitError, RunFolderError
from clusterkit.files import (
    locked,
    other_owner,
    remove_drafts,
    writable_by_others,
    write_atomic,
)
from clusterkit.plan import Plan, Step
from clusterkit.run.begun import Begun, since
from clusterkit.run.logs import GrowingFile, LogLine, NodeLog, marked, merged
from clusterkit.run.status import RunStatus, State
from clusterkit.shell import check_text

Document = TypeVar("Document")
RUN_ID = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?\Z")
RUN_ID_MAX = 63
LOCK = "supervisor.lock"
_LOCK_TRIES = 20
OWNS_CLUSTER_OBJECTS = "made"
"""File that exists where this run, and not one of the same id from another machine, made what the
cluster keeps under the run's id."""
LEFTOVERS = "leftovers"
"""File that exists while something of the run could not be ended; holds why."""
RESERVE = ".reserve"
"""File that reserves the disk space of the last ``state.json``."""
TOKEN = "token"
"""File with the secret that a node needs to join a running attempt."""
POLL_SECONDS = 0.1
"""Pause between two looks at a run's files."""
LAST = "last"
"""Stands for the newest run in place of an id."""
BY_HAND = "by-hand"
"""Marks a run that `clusterkit plan -o` has written, for a person to start."""
HOME_HINT = "set CLUSTERKIT_HOME to a folder that you may write to"
_CHUNK = 1 << 18
_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"


class Submission(Struct, frozen=True, kw_only=True):
    """Contents of ``run.json``."""

    run: str
    job: str
    cluster: str
    backend: str
    created_at: float
    clusterkit: str
    host: str = ""
    """The machine that submitted it, and its boot: processes there are no other machine's."""
    boot_id: str = ""

    def initial_status(self, restarts_left: int | None = None) -> RunStatus:
        """Return the status of a run that was submitted and has not started."""
        return RunStatus(
            run=self.run,
            job=self.job,
            cluster=self.cluster,
            backend=self.backend,
            state=State.PENDING,
            started_at=self.created_at,
            restarts_left=restarts_left,
        )


class Event(Struct, frozen=True, kw_only=True):
    """One line of ``events.jsonl``."""

    at: float
    attempt: int
    text: str


class StepRecord(Struct, frozen=True, kw_only=True):
    """One line of ``steps.jsonl``; a step holds no secrets."""

    at: float
    attempt: int
    kind: str
    host: str
    node: int | None
    argv: tuple[str, ...]
    outcome: str


@dataclass(frozen=True)
class RunHandle:
    """One attempt of a run, as backends get it; made by `RunFolder.handle`."""

    folder: RunFolder
    """On this machine, wherever the nodes write."""
    plan: Plan
    attempt: int = 1


def node_dir(run_dir: str, attempt: int, node: int) -> str:
    """Return the folder of one node in one attempt; ``node.sh`` makes it."""
    return posixpath.join(run_dir, "attempts", str(attempt), f"node-{node}")


def home() -> Path:
    """Return ``$CLUSTERKIT_HOME``, or ``~/.clusterkit``."""
    named = os.environ.get("CLUSTERKIT_HOME") or "~/.clusterkit"
    try:
        path = Path(named).expanduser().absolute()
    except (RuntimeError, OSError) as error:
        raise BadInput(f"CLUSTERKIT_HOME: {named}: {error}", hint=HOME_HINT) from None
    check_text("CLUSTERKIT_HOME", str(path))
    return path


def new_run_id(job_name: str) -> str:
    """Return ``name-MMDDhhmmss-xxxx``, a DNS label of at most 40 characters."""
    import secrets

    return f"{slug(job_name)}-{time.strftime('%m%d%H%M%S')}-" + "".join(
        secrets.choice(_ALPHABET) for _ in range(4)
    )


def slug(name: str) -> str:
    """Return the first 24 characters of a name that a DNS label allows; ``job`` if there are
    none."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:24].strip("-") or "job"


def check_run_id(run_id: str) -> str:
    """Return ``run_id``.

    Raises:
        BadInput: not a DNS label, or ``last``, which means the newest run.
    """
    if run_id == LAST:
        raise BadInput(
            f"run id {run_id!r}: it is reserved for the newest run", hint="choose another"
        )
    if not RUN_ID.match(run_id) or len(run_id) > RUN_ID_MAX:
        raise BadInput(
            f"run id {run_id!r} is not valid",
            hint=f"lower-case letters, digits and '-', {RUN_ID_MAX} characters at most",
        )
    return run_id


class RunFolder:
    """One run's folder; the only place that knows its file names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = path.name

    @classmethod
    def create(cls, run_id: str, base: Path | None = None) -> RunFolder:
        """Make an empty folder, with mode CLUSTERKIT_RUN_MODE, by default 700.

        Raises:
            BadInput: the run exists already, or CLUSTERKIT_RUN_MODE does not let its owner use it.
            RunFolderError: it cannot be made, or others may write to the folder of all runs.
        """
        path = (base or home()) / "runs" / check_run_id(run_id)
        mode = os.environ.get("CLUSTERKIT_RUN_MODE") or "700"
        if not re.fullmatch("0*7[0-7]{2}", mode):
            raise BadInput(
                f"CLUSTERKIT_RUN_MODE: {mode}: not a folder mode that lets you use your own runs",
                hint="750 lets your group read new runs, 755 everybody",
            )
        try:
            path.parent.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            path.parent.mkdir(mode=0o755, exist_ok=True)
            for folder in (path.parent.parent, path.parent):
                # In a sticky folder, such as /tmp, others cannot replace what is ours.
                sticky = folder != path.parent and folder.stat().st_mode & stat.S_ISVTX
                if not sticky and (who := writable_by_others(folder)):
                    raise RunFolderError(
                        f"{folder} can be written by {who}, who could change what runs execute",
                        hint=f"chmod go-w {folder}, or set CLUSTERKIT_HOME to a folder of your own",
                    )
            path.mkdir(mode=0o700)
            path.chmod(int(mode, 8))  # mkdir(2) would apply the umask
            return cls(path)
        except KeyboardInterrupt:
            with contextlib.suppress(OSError):
                path.rmdir()  # no other process uses it yet
            raise
        except FileExistsError:
            if path.is_dir():
                raise BadInput(
                    f"run {run_id} exists already", hint=f"clusterkit status {run_id}"
                ) from None
            raise RunFolderError(f"{path.parent} is not a folder", hint=HOME_HINT) from None
        except OSError as error:
            raise RunFolderError(f"cannot make {path}: {error.strerror}", hint=HOME_HINT) from error

    # -- files -------------------------------------------------------------

    def file(self, name: str) -> Path:
        return self.path / name

    def write(self, name: str, data: bytes | str) -> None:
        """Write one file, whole or not at all.

        Raises:
            RunFolderError: no space, no permission.
        """
        if not self.path.is_dir():
            raise RunFolderError(f"the folder of run {self.run_id} is gone")
        # The folder's own mode says who may read it, whatever the umask is.
        write_atomic(self.path / name, data.encode() if isinstance(data, str) else data, 0o644)

    def write_json(self, name: str, document: object) -> None:
        self.write(name, msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")

    def read(self, name: str) -> bytes:
        """Return one file's contents.

        Raises:
            RunFolderError: the file is missing or not readable.
        """
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise RunFolderError(
                f"run {self.run_id}: {name} is missing or unreadable ({error.strerror})",
                hint=f"the folder {self.path} is damaged; inspect what is left of it by hand",
            ) from error

    def read_json(self, name: str, kind: type[Document]) -> Document:
        """Return one JSON file as ``kind``.

        Raises:
            RunFolderError: it is missing, not JSON, or of another shape.
        """
        try:
            return msgspec.json.decode(self.read(name), type=kind)
        except msgspec.MsgspecError as error:
            raise RunFolderError(
                f"run {self.run_id}: {name} is damaged ({error})",
                hint=f"inspect {self.path} by hand",
            ) from error

    def maybe_json(self, name: str, kind: type[Document]) -> Document | None:
        """Return `read_json`, or None when the file is missing or damaged."""
        try:
            return self.read_json(name, kind)
        except RunFolderError:
            return None

    def saved_status(self) -> RunStatus | None:
        """Return ``state.json``, or None when it is missing or damaged and nothing has begun."""
        saved, begun = self.maybe_json("state.json", RunStatus), Begun.read(self.path)
        if saved is None and begun is not None:
            submission = self.maybe_json("run.json", Submission)
            saved = submission.initial_status() if submission is not None else None
        return since(saved, begun) if saved is not None else None

    def append(self, name: str, record: object) -> None:
        """Append a line to a ``.jsonl`` file. On a full disk it is lost, without an error."""
        with contextlib.suppress(OSError), (self.path / name).open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")

    def record(self, attempt: int, step: Step, outcome: str) -> None:
        """Append a line to ``steps.jsonl``."""
        done = StepRecord(
            at=time.time(),
            attempt=attempt,
            kind=step.kind,
            host=step.host,
            node=step.node,
            argv=step.argv,
            outcome=outcome,
        )
        self.append("steps.jsonl", done)

    def records(self, name: str, kind: type[Document]) -> list[Document]:
        """Return the lines of a ``.jsonl`` file, without torn ones."""
        found: list[Document] = []
        with contextlib.suppress(OSError):
            for line in (self.path / name).read_bytes().splitlines():
                with contextlib.suppress(msgspec.MsgspecError):
                    found.append(msgspec.json.decode(line, type=kind))
        return found

    # -- what the run was made of ------------------------------------------

    def plan(self) -> Plan:
        """Return the run's plan.

        Raises:
            RunFolderError: it is missing or damaged.
        """
        return self.read_json("plan.json", Plan)

    def save_plan(self, facts: Facts, plan: Plan) -> None:
        """Write facts and plan, as JSON and for people."""
        self.write_json("facts.json", facts)
        self.write("plan.json", plan.to_json())
        self.write("plan.txt", plan.to_text())

    def cluster(self) -> ClusterSpec:
        """Return the run's cluster entry.

        Raises:
            RunFolderError: it is missing or damaged.
        """
        entry = self.read_json("cluster.json", dict)
        kind = CLUSTER_TYPES.get(str(entry.get("backend", "local")))
        if kind is None:
            raise RunFolderError(f"run {self.run_id}: cluster.json names an unknown backend")
        return self.read_json("cluster.json", kind)

    def handle(self, attempt: int = 1, plan: Plan | None = None) -> RunHandle:
        """Return one attempt, for a backend.

        Args:
            plan: the run's plan; None: it is read.

        Raises:
            RunFolderError: the plan is missing or damaged.
        """
        return RunHandle(self, plan or self.plan(), attempt)

    # -- the supervisor's lock ---------------------------------------------

    def acquire_supervisor_lock(self) -> IO[bytes] | None:
        """Take the lock of the run's supervisor. Return None if another process holds it.

        The lock is released when the file is closed in this process and in all that inherited it,
        or when they are killed.

        Raises:
            RunFolderError: the file cannot be made.
        """
        path = self.path / LOCK
        try:
            file = path.open("ab")
            for _ in range(_LOCK_TRIES):  # `has_supervisor` holds it for a moment
                if locked(file):
                    return file
                time.sleep(0.01)
            file.close()
        except OSError as error:
            why = f"cannot lock {path}: {error.strerror}"
            raise RunFolderError(why, hint=self._owner_hint() or HOME_HINT) from error
        return None

    def _owner_hint(self) -> str | None:
        owner = other_owner(self.path)
        return None if owner is None else f"run {self.run_id} belongs to {owner}"

    def has_supervisor(self) -> bool:
        """Return whether a supervisor runs, on this machine or (over NFS) another."""
        try:
            with (self.path / LOCK).open("rb") as file:
                return not locked(file, shared=True)
        except OSError:
            return False

    # -- nodes -------------------------------------------------------------

    def node_dir(self, attempt: int, node: int) -> Path:
        """Return the folder of one node in one attempt."""
        return Path(node_dir(str(self.path), attempt, node))

    def nodes_of(self, attempt: int, plan: Plan | None, rank: int | None = None) -> Sequence[int]:
        """Return the nodes of an attempt; with ``rank``, those whose logs may hold its lines.

        Args:
            plan: the newest; it does not count spares that earlier attempts have used up.
        """
        folders = self.file(f"attempts/{attempt}").glob("node-*")
        begun = [int(name) + 1 for path in folders if (name := path.name[5:]).isdigit()]
        nodes = range(max([plan.nodes if plan else 0, *begun]))
        if plan is None or rank is None or len(nodes) > plan.nodes:
            return nodes
        # In an elastic run, or with spares, a rank may be on any node, and later on another. In
        # others it stays on its node, and the other nodes' logs may have gigabytes.
        node = plan.node_of(rank)
        return nodes if node is None else (node,)

    def log(
        self, attempt: int, nodes: Iterable[int], follow: Callable[[], bool] | None = None
    ) -> Iterator[list[LogLine]]:
        """Yield one attempt's lines of these nodes, as `clusterkit.run.logs.merged` does."""
        paths = {node: self.node_dir(attempt, node) / "log" for node in nodes}
        return merged([NodeLog(path, node, attempt) for node, path in paths.items()], follow)

    # -- the end -----------------------------------------------------------

    def mark_cancelled(self) -> None:
        """Record that this run is to end, for all processes that supervise it."""
        path = self.file("cancelled")
        try:
            try:
                path.touch(0o644)
            except PermissionError:  # it is another user's
                raise
            except OSError:
                self.file(RESERVE).unlink()  # the disk is full: room for a file, and the run's end
                path.touch(0o644)
        except OSError as error:
            why = f"cannot write {self.path}/cancelled: {error.strerror}"
            raise RunFolderError(why, self._owner_hint()) from error

    def is_cancelled(self) -> bool:
        return (self.path / "cancelled").exists()

    def stop(self, work: Callable[[], None]) -> tuple[ClusterkitError | None, str | None]:
        """Call ``work``, which stops nodes, and record in `LEFTOVERS` whether it could.

        Returns:
            Its error and what the run's status remarks of it; None and None: all were stopped.
        """
        try:
            work()
        except ClusterkitError as error:
            with contextlib.suppress(RunFolderError):
                self.write(LEFTOVERS, f"{error.message}\n")
            remark = f"parts of it may still run: {error.message}"
            return error, f"{remark}; `clusterkit cancel {self.run_id}` tries again"
        self.file(LEFTOVERS).unlink(missing_ok=True)
        return None, None

    def record_end(self, status: RunStatus) -> None:
        """Write the final ``state.json``, and remove the files that only a running run needs."""
        for name in (RESERVE, TOKEN):
            with contextlib.suppress(OSError):
                self.file(name).unlink()
        self.write_json("state.json", status)
        remove_drafts(self.path)


class Rank0:
    """Reads the marked lines of rank 0, of one attempt after the other, in bounded memory."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._plan = folder, folder.maybe_json("plan.json", Plan)
        self._attempt = 1
        self._logs: dict[Path, GrowingFile] = {}

    def read(self, newest: int) -> Iterator[LogLine]:
        """Yield the lines that are new since the last call, up to the newest attempt."""
        while True:
            for node in self._folder.nodes_of(self._attempt, self._plan, 0):
                path = self._folder.node_dir(self._attempt, node) / "log"
                self._logs.setdefault(path, GrowingFile(path))
            yield from heapq.merge(*map(self._lines, self._logs.values()), key=attrgetter("time"))
            if self._attempt >= newest:
                return
            self._attempt, self._logs = self._attempt + 1, {}

    def _lines(self, log: GrowingFile) -> Iterator[LogLine]:
        while data := log.read(_CHUNK):
            yield from marked(data, 0, self._attempt, rank=0)
