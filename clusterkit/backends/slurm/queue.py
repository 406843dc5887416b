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
    "TIMEOUT": "job {} reached its Slurm time limit",
    "NODE_FAIL": "one of the nodes of job {} failed",
    "PREEMPTED": "Slurm preempted job {} for another one",
    "BOOT_FAIL": "one of the nodes of job {} failed to boot",
    "DEADLINE": "job {} reached its deadline",
    "OUT_OF_MEMORY": "job {} used more than its memory limit",
    "CANCELLED": "job {} was cancelled (scancel)",
    "REVOKED": "a sibling cluster of the federation started job {}",
}
_WAITS = {
    "None": "Slurm has not scheduled it yet",
    "Priority": "jobs with a higher priority go first",
    "Resources": "the nodes it needs are in use",
    "BeginTime": "Slurm starts a requeued job after two minutes at the earliest",
    "Dependency": "it depends on another job",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition is inactive",
    "PartitionConfig": "it exceeds the node or time limit of its partition",
    "PartitionNodeLimit": "it needs more nodes than its partition allows",
    "PartitionTimeLimit": "it needs more time than its partition allows",
    "ReqNodeNotAvail": "nodes it needs are down, drained or reserved",
    "Reservation": "its reservation has not begun",
    "Licenses": "a license it needs is in use",
    "JobHeldUser": "a user holds it: scontrol release",
    "JobHeldAdmin": "an administrator holds it",
    "BadConstraints": "no node meets its constraints",
    "launch failed requeued held": "its launch failed and it is held: scontrol release",
}
_LIMITS = {
    "QOS": "it exceeds a limit of its QOS",
    "Assoc": "it exceeds a limit of its account",
    "Max": "it exceeds a limit",
}


class Job(Struct, frozen=True, kw_only=True):
    """A job as `squeue` shows it."""

    id: int
    slurm_state: str
    """Slurm's name of the state."""
    start: str = ""
    reason: str = ""

    @property
    def state(self) -> State:
        return STATES.get(self.slurm_state, State.UNKNOWN)

    @property
    def completing(self) -> bool:
        """Whether the job has ended, but perhaps not all of its processes."""
        return self.slurm_state == COMPLETING

    @property
    def waiting(self) -> str:
        """Why the job is pending, in a sentence."""
        reason = self.reason.strip("()").partition(",")[0]
        limits = (text for prefix, text in _LIMITS.items() if reason.startswith(prefix))
        known = _WAITS.get(reason) or next(limits, None)
        text = f"{reason or 'no reason given'}{f': {known}' if known else ''} (job {self.id})"
        return f"{text}; expected to start {self.start}" if self.start[:1].isdigit() else text

    @property
    def ended_by_slurm(self) -> bool:
        """Whether Slurm or a user ended the job."""
        return self.slurm_state in _ENDS

    @property
    def ending(self) -> str:
        """A sentence on how the job ended."""
        known = _ENDS.get(self.slurm_state, "job {} ended")
        return f"{self.slurm_state}: {known.format(self.id)}"


def parse(text: str, folder: str) -> list[Job]:
    """Return the jobs of a folder in the output of `squeue`; other lines are ignored."""
    end = f"|{folder}"
    lines = [line.strip() for line in text.splitlines()]
    rows = [line.removesuffix(end).split("|", 3) for line in lines if line.endswith(end)]
    return [
        Job(id=int(row[0]), slurm_state=row[1], start=row[2], reason=row[3])
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
            return Job(id=number, slurm_state=states[-1])
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
    command = on_login(host, argv)
    return transport.run(host, command, env=env, timeout=SLURM_SECONDS, stdin=stdin)


def on_login(host: str, argv: Sequence[str]) -> Sequence[str]:
    """Return what runs one of Slurm's commands on the login node."""
    return argv if host == HERE else ("/bin/sh", "-c", _FIND, "sh", *argv)


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
