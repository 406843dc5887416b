"""What Slurm says of a run's job: its states and reasons, in our words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from clusterkit.errors import ClusterkitError, Unavailable
from clusterkit.run.status import State
from clusterkit.transport import Completed, Environment, Transport

HERE = "localhost"
"""This machine, where it is a login node itself: where commands of Slurm run."""
LOGIN_PYTHON = "python3"
"""On a login node, where the ranks' own is not there."""
_FIND = (
    """if command -v "$1" >/dev/null; then exec "$@"; fi; exec bash -lc 'exec "$@"' bash "$@\""""
)
"""Runs a command that may be one of those only that a login shell finds."""
SLURM_SECONDS = 60.0
"""Commands wait for a controller that is away, some 10 s."""
FORM = "%i|%T|%S|%r"
"""Of `squeue`: id, state, (expected) start, reason. It has meant the same in every
version; its JSON has not."""
WARNED = "Slurm is about to end the job"
"""What the agents are told, and record, where Slurm says so before it does."""
NODE_0_LOST = "node 0 was lost and did not come back"
"""What the other agents record then (`clusterkit.agent.member.not_back`) in an allocation that goes
on: the script that starts them has the job put back into the queue."""
_PENDING = "PENDING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT"
_RUNNING = "RUNNING SUSPENDED STOPPED SIGNALING STAGE_OUT RESIZING COMPLETING"
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
    """Slurm's own word."""
    start: str = ""
    reason: str = ""

    @property
    def means(self) -> State:
        return STATES.get(self.state, State.UNKNOWN)

    @property
    def waiting(self) -> str:
        """Why it waits, in words."""
        reason = self.reason.strip("()").partition(",")[0]
        limits = (words for word, words in _LIMITS.items() if reason.startswith(word))
        said = _WAITS.get(reason) or next(limits, None)
        text = f"job {self.id}: {f'{said} ({reason})' if said else reason or 'no reason'}"
        return f"{text}; expected to start {self.start}" if self.start[:1].isdigit() else text

    @property
    def ended_by_slurm(self) -> bool:
        """Whether it did not end by itself."""
        return self.state in _ENDS

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        said = _ENDS.get(self.state)
        return f"job {self.id} ended: {f'{said} ({self.state})' if said else self.state}"


def parse(text: str) -> list[Job]:
    """The jobs in an answer of `squeue`; lines of another form are passed over."""
    rows = [line.strip().split("|", 3) for line in text.splitlines()]
    return [
        Job(id=int(row[0]), state=row[1], start=row[2], reason=row[3])
        for row in rows
        if len(row) == 4 and row[0].isdigit()
    ]


def jobs_of(run_id: str, host: str, transport: Transport) -> list[Job]:
    """A run's jobs that Slurm knows of, newest last; it forgets those that have ended.

    A run is the name of its jobs, so that no submit can be lost between Slurm and a record of ours.

    Raises:
        Unavailable: the controller does not answer.
    """
    argv = ("squeue", "--noheader", "--states=all", f"--name={run_id}", f"--format={FORM}")
    return sorted(parse(ask(transport, host, *argv)), key=lambda job: job.id)


def run(
    transport: Transport,
    host: str,
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    env: Environment = None,
) -> Completed:
    """A command of Slurm's on the login node.

    Raises:
        ClusterkitError: it cannot be run.
    """
    there = argv if host == HERE else ("/bin/sh", "-c", _FIND, "sh", *argv)
    return transport.run(host, there, env=env, timeout=SLURM_SECONDS, stdin=stdin)


def ask(transport: Transport, host: str, *argv: str, env: Environment = None) -> str:
    """The output of a command of Slurm.

    Raises:
        Unavailable: it is not installed, or the controller does not answer.
    """
    try:
        done = run(transport, host, argv, env=env)
    except ClusterkitError as error:
        hint = error.hint
        if host == HERE:
            hint = "submit from a login node of the cluster, or name one in its entry: ssh: HOST"
        raise Unavailable(f"Slurm: {error.message}", hint=hint) from None
    if done.exit_code:
        said = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.exit_code}"
        raise Unavailable(f"Slurm: {said}")
    return done.stdout
