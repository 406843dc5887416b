"""What Slurm reports of a run's job: its states and reasons."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence

from msgspec import Struct

from clusterkit.errors import ClusterkitError, Unavailable
from clusterkit.plan import Plan
from clusterkit.run.status import State
from clusterkit.transport import Completed, Environment, Transport

HERE = "localhost"
"""The transport's name of this machine, where it is a login node itself."""
LOGIN_PYTHON = "python3"
"""Python of the login node, where the ranks' own is not installed."""
_FIND = (
    """if command -v "$1" >/dev/null; then exec "$@"; fi; exec bash -lc 'exec "$@"' bash "$@\""""
)
"""Runs a command that may be in the PATH of a login shell only."""
SLURM_SECONDS = 60.0
"""Timeout of Slurm's commands, which wait about 10 s for a controller that does not answer."""
FORM = "%i|%T|%S|%r|%Z"
"""Format of `squeue`: id, state, (expected) start, reason, folder. Unlike its JSON, it has not
changed between versions."""
WARNED = "Slurm is about to end the job"
"""The reason that agents record when Slurm announces the end of the job."""
NODE_0_LOST = "node 0 was lost and did not come back"
"""What the other agents record (`clusterkit.agent.member.not_returned`) in an allocation that
outlives its first node; the script that starts them then puts the job back into the queue."""
_PENDING = "PENDING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT"
_RUNNING = "RUNNING SUSPENDED STOPPED SIGNALING STAGE_OUT RESIZING COMPLETING"
COMPLETING = "COMPLETING"
"""State of a job that has ended, and whose processes Slurm removes; `squeue` hides how it ended."""
_FAILED = "FAILED TIMEOUT NODE_FAIL PREEMPTED BOOT_FAIL DEADLINE OUT_OF_MEMORY REVOKED"
STATES: Mapping[str, State] = {
    **dict.fromkeys(_PENDING.split(), State.PENDING),
    **dict.fromkeys(_RUNNING.split(), State.RUNNING),
    **dict.fromkeys(_FAILED.split(), State.FAILED),
    "COMPLETED": State.SUCCEEDED,
    "CANCELLED": State.CANCELLED,
}
"""Slurm's states of a job; any other is UNKNOWN."""
_ENDS = {
    "TIMEOUT": "it came to the end of Slurm's time limit",
    "NODE_FAIL": "Slurm lost one of its nodes",
    "PREEMPTED": "Slurm preempted it for another job",
    "BOOT_FAIL": "one of its nodes could not be booted",
    "DEADLINE": "it came to its deadline",
    "OUT_OF_MEMORY": "it was over its memory limit",
    "CANCELLED": "it was cancelled (scancel)",
    "REVOKED": "another cluster has taken it",
}
_WAITS = {
    "None": "Slurm has not looked at it yet",
    "Priority": "other jobs go first",
    "Resources": "the nodes that it needs are in use",
    "BeginTime": "Slurm holds a job back for two minutes before it starts it again",
    "Dependency": "it depends on another job",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition is closed",
    "PartitionConfig": "its partition never gives so much: too many nodes, or too much time",
    "PartitionNodeLimit": "it asks for more nodes than its partition gives",
    "PartitionTimeLimit": "it asks for more time than its partition gives",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "Reservation": "its reservation has not begun",
    "Licenses": "a licence that it needs is in use",
    "JobHeldUser": "somebody holds it: scontrol release",
    "JobHeldAdmin": "an administrator holds it",
    "BadConstraints": "no node is as it asks for",
    "launch failed requeued held": "it could not be started, and is held: scontrol release",
}
_LIMITS = {"QOS": "a limit of its QOS", "Assoc": "a limit of its account", "Max": "a limit"}


class Job(Struct, frozen=True, kw_only=True):
    """A job as `squeue` shows it."""

    id: int
    state: str
    """Slurm's name of the state."""
    start: str = ""
    reason: str = ""

    @property
    def means(self) -> State:
        return STATES.get(self.state, State.UNKNOWN)

    @property
    def completing(self) -> bool:
        """Whether the job has ended, but perhaps not all of its processes."""
        return self.state == COMPLETING

    @property
    def waiting(self) -> str:
        """A sentence on why the job waits."""
        reason = self.reason.strip("()").partition(",")[0]
        limits = (text for prefix, text in _LIMITS.items() if reason.startswith(prefix))
        known = _WAITS.get(reason) or next(limits, None)
        text = f"job {self.id}: {f'{known} ({reason})' if known else reason or 'no reason'}"
        return f"{text}; expected to start {self.start}" if self.start[:1].isdigit() else text

    @property
    def ended_by_slurm(self) -> bool:
        """Whether Slurm or a user ended the job."""
        return self.state in _ENDS

    @property
    def ending(self) -> str:
        """A sentence on how the job ended."""
        known = _ENDS.get(self.state)
        return f"job {self.id} ended: {f'{known} ({self.state})' if known else self.state}"


def parse(text: str, folder: str) -> list[Job]:
    """Return the jobs of a folder in the output of `squeue`; other lines are ignored."""
    end = f"|{folder}"
    lines = [line.strip() for line in text.splitlines()]
    rows = [line.removesuffix(end).split("|", 3) for line in lines if line.endswith(end)]
    return [
        Job(id=int(row[0]), state=row[1], start=row[2], reason=row[3])
        for row in rows
        if len(row) == 4 and row[0].isdigit()
    ]


def jobs_of(plan: Plan, transport: Transport) -> list[Job]:
    """Return a run's jobs, newest last; Slurm lists those that have ended for some minutes.

    They are found by their name, the run's id, and their folder, the run's: so none is lost if a
    submit is interrupted before it records the job's id, and a job of the same name that belongs to
    another user, or to another ``CLUSTERKIT_HOME``, is not taken for one of the run.

    Raises:
        Unavailable: the controller does not answer.
    """
    host = plan.hosts[0]
    argv = ["squeue", "--noheader", "--states=all", f"--name={plan.run_id}", f"--format={FORM}"]
    if host == HERE:
        argv.append(f"--user={os.getuid()}")
    found = parse(query(transport, host, *argv), plan.run_dir)
    return sorted(found, key=lambda job: job.id)


def ended_job(number: int, host: str, transport: Transport) -> Job | None:
    """Return a job that `squeue` lists no more, as accounting has it; None: it does not say.

    Slurm forgets an ended job after ``MinJobAge``, by default five minutes; `sacct` needs slurmdbd,
    which not every cluster has.
    """
    argv = ("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={number}",
            "--format=State")  # fmt: skip
    with contextlib.suppress(Unavailable):
        rows = query(transport, host, *argv).splitlines()
        # "CANCELLED by 1000" names who did it; a job that was requeued has several rows.
        states = [row.split()[0] for row in rows if row.split()]
        if states and STATES.get(states[-1], State.UNKNOWN).final:
            return Job(id=number, state=states[-1])
    return None


def run(
    transport: Transport,
    host: str,
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    env: Environment = None,
) -> Completed:
    """Run one of Slurm's commands on the login node.

    Raises:
        ClusterkitError: it cannot be run.
    """
    command = argv if host == HERE else ("/bin/sh", "-c", _FIND, "sh", *argv)
    return transport.run(host, command, env=env, timeout=SLURM_SECONDS, stdin=stdin)


def query(transport: Transport, host: str, *argv: str, env: Environment = None) -> str:
    """Return the output of one of Slurm's commands.

    Raises:
        Unavailable: Slurm is not installed, or its controller does not answer.
    """
    try:
        done = run(transport, host, argv, env=env)
    except ClusterkitError as error:
        hint = error.hint
        if host == HERE:
            hint = "submit from a login node of the cluster, or name one in its entry: ssh: HOST"
        raise Unavailable(f"Slurm: {error.message}", hint=hint) from None
    if done.exit_code:
        raise Unavailable(f"Slurm: {done.error}")
    return done.stdout
