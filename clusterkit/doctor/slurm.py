"""Examines a Slurm cluster: questions, a rehearsal of `sbatch`, a look at one compute node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from clusterkit.backends.slurm.probe import PartitionNode, host_of, partition
from clusterkit.backends.slurm.queue import HERE, SLURM_SECONDS, run
from clusterkit.cluster import SlurmCluster
from clusterkit.doctor.base import Finding, Level
from clusterkit.doctor.report import Progress, Report
from clusterkit.doctor.words import shortened
from clusterkit.errors import ClusterkitError, counted
from clusterkit.spec import JobSpec
from clusterkit.transport import Transport

LOCAL_DISKS = ("ext2/ext3", "xfs", "btrfs", "tmpfs", "overlayfs", "zfs")
"""File systems, as stat(1) calls them, that other machines do not see."""
IMMEDIATE_SECONDS = 20


@dataclass(frozen=True, kw_only=True)
class SlurmSubject:
    """A cluster entry, and the job that is to run there."""

    way: ClassVar[str] = "slurm"
    cluster: str
    entry: SlurmCluster
    job: JobSpec
    python: str
    folder: str
    """For runs; ``~`` is the home folder on the login node."""
    rehearsal: Callable[[Transport], str]
    """The batch script that a submit would hand to `sbatch`."""
    port: None = None


@dataclass(frozen=True)
class Look:
    """What the checks have seen."""

    subject: SlurmSubject
    transport: Transport

    @property
    def host(self) -> str:
        return host_of(self.subject.entry)

    @cached_property
    def folder(self) -> str:
        """The folder for runs, as an absolute path on the login node."""
        script = 'case $1 in "~"/*) echo "$HOME/${1#"~/"}";; *) echo "$1";; esac'
        return self.shell(script, self.subject.folder)

    def shell(self, script: str, *words: str) -> str:
        """What a script says on the login node."""
        argv = ("/bin/sh", "-c", script, "sh", *words)
        return self.transport.run(self.host, argv, timeout=SLURM_SECONDS).stdout.strip()

    @cached_property
    def partition(self) -> tuple[str, dict[str, str], list[PartitionNode]]:
        return partition(self.subject.entry, self.transport)


Verdict = tuple[Level, str, str | None]


@dataclass(frozen=True)
class SlurmCheck:
    """One thing that has to be right."""

    name: str
    purpose: str
    judge: Callable[[Look], Iterator[Verdict]]
    quick: bool = False


def _partition(look: Look) -> Iterator[Verdict]:
    """The partition is up, and has nodes enough"""
    name, limits, nodes = look.partition
    if limits.get("State", "UP") != "UP":
        state = limits["State"]
        yield "fail", f"partition {name} is {state}", "another partition; `sinfo` lists them"
    usable = [node.name for node in nodes if node.usable]
    wanted = look.subject.job.node_range[0]
    having = f"{len(usable)} of {counted(len(nodes), 'node')} of partition {name} can be used"
    if len(nodes) < wanted:
        yield "fail", f"{having}, the job wants {wanted}", f"--nodes {len(nodes)}"
    elif len(usable) < wanted:
        yield "warn", f"{having}, the job wants {wanted}: it would wait", "`sinfo -R` says why"
    else:
        yield "ok", having, None


def _admission(look: Look) -> Iterator[Verdict]:
    """Slurm would take the job: account, QOS, limits, features, what a node gives"""
    script = look.subject.rehearsal(look.transport)
    done = run(look.transport, look.host, ["sbatch", "--test-only"], stdin=script.encode())
    said = [line.removeprefix("sbatch: ") for line in done.stderr.strip().splitlines()]
    if done.exit_code:
        # The first line has the reason, the last one that it was refused.
        yield "fail", shortened("; ".join(said) or "sbatch --test-only failed"), None
    else:
        yield "ok", shortened(said[-1] if said else ""), None


def _folder(look: Look) -> Iterator[Verdict]:
    """The folder for runs lies on a disk that compute nodes see"""
    folder = look.folder
    there = 'f=$1; while [ ! -e "$f" ]; do f=$(dirname "$f"); done; '
    kind = look.shell(f'{there}stat --file-system --format=%T "$f"', folder)
    if kind in LOCAL_DISKS:
        cause = f"{folder} lies on {kind}, which compute nodes may not see"
        key = "export CLUSTERKIT_HOME=" if look.host == HERE else "workdir: "
        yield "warn", cause, f"{key}a folder on a shared disk"
    else:
        yield "ok", f"{folder} lies on {kind or 'an unknown file system'}", None


def _compute(look: Look) -> Iterator[Verdict]:
    """A compute node has the folder for runs, the job's folder and the Python"""
    entry, job = look.subject.entry, look.subject.job
    asked = {"partition": entry.partition, "account": entry.account, "qos": entry.qos,
             "constraint": entry.constraint, "reservation": entry.reservation}  # fmt: skip
    given = [f"--{name}={value}" for name, value in asked.items() if value is not None]
    look_there = (
        'for each in "$2" "$3"; do [ -d "$each" ] || { echo "no folder $each"; exit 1; }; done\n'
        '[ -z "$1" ] || "$1" -c "import sys; sys.exit(sys.version_info < (3, 11))" || '
        '{ echo "no $1"; exit 1; }\nhostname'
    )
    look.shell('mkdir -p "$1"', look.folder)
    # A job's folder that is copied is not there before the job.
    workdir = job.workdir if look.host == HERE or not entry.sync else None
    python = "" if entry.container else look.subject.python
    done = run(
        look.transport,
        look.host,
        ["srun", f"--immediate={IMMEDIATE_SECONDS}", "--nodes=1", "--ntasks=1", "--time=1",
         "--job-name=clusterkit-doctor", *given, "/bin/sh", "-c", look_there, "sh",
         python, look.folder, workdir or "/"],
    )  # fmt: skip
    said = done.stdout.strip().rpartition("\n")[2]
    if said.startswith("no "):
        yield "fail", f"a compute node has {said}", "a disk that all nodes see under the same path"
    elif done.exit_code:
        why = done.stderr.strip().rpartition("\n")[2]
        yield "skip", shortened(f"no node was free to look at: {why}"), None
    else:
        yield "ok", f"seen on {said}", None


CHECKS = tuple(
    SlurmCheck(judge.__name__.strip("_"), judge.__doc__ or "", judge)
    for judge in (_partition, _admission, _folder, _compute)
)


def look(
    subject: SlurmSubject, transport: Transport, checks: Sequence[SlurmCheck], progress: Progress
) -> Report:
    """Ask, and judge what was answered. Nothing in the cluster is changed."""
    seen = Look(subject, transport)
    findings = []
    progress(1, ("Slurm",))
    for check in checks:
        try:
            findings += [
                Finding(check.name, "slurm", level, cause, remedy)
                for level, cause, remedy in check.judge(seen)
            ]
        except ClusterkitError as error:
            findings.append(Finding(check.name, "slurm", "fail", error.message, error.hint))
    progress(1, ())
    return Report(
        cluster=subject.cluster,
        hosts=("slurm",),
        checks=tuple(check.name for check in checks),
        findings=tuple(findings),
        everything="Slurm",
    )
