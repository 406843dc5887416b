"""The doctor's checks of a Slurm cluster: queries, `sbatch --test-only`, one compute node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from msgspec import Struct

from clusterkit.backends.slurm.place import place
from clusterkit.backends.slurm.probe import folder, host_of, partition, probe, python_of
from clusterkit.backends.slurm.queue import SLURM_SECONDS, run
from clusterkit.cluster import SlurmCluster
from clusterkit.doctor.base import Check, Finding, Level, shortened
from clusterkit.doctor.report import Progress, Report
from clusterkit.errors import ClusterkitError, pluralize
from clusterkit.spec import JobSpec
from clusterkit.transport import Transport

LOCAL_DISKS = ("ext2/ext3", "xfs", "btrfs", "tmpfs", "overlayfs", "zfs")
"""File systems that other machines do not see, by their names in stat(1)."""
IMMEDIATE_SECONDS = 20
_FOLDER = """\
case $1 in "~"/*) set -- "$HOME/${1#"~/"}";; esac
echo "$1"; f=$1; while [ ! -e "$f" ]; do f=$(dirname "$f"); done
stat --file-system --format=%T "$f"
"""
"""Prints a folder's absolute path and file system."""
_THERE = """\
for each in "$2" "$3"; do [ -d "$each" ] || { echo "no folder $each"; exit 1; }; done
[ -z "$1" ] || "$1" -c "import sys; sys.exit(sys.version_info < (3, 11))" ||
    { echo "no $1"; exit 1; }
hostname
"""
Verdict = tuple[Level, str, str | None]


class SlurmSubject(Struct, frozen=True, kw_only=True):
    """A cluster entry and the job to check it for."""

    kind: ClassVar[str] = "slurm"
    cluster: str
    entry: SlurmCluster
    job: JobSpec
    port: None = None


def _folder_for_runs(subject: SlurmSubject, transport: Transport, then: str = "") -> list[str]:
    """Return the lines that `_FOLDER` and the script ``then`` print on the login node."""
    argv = ("/bin/sh", "-c", _FOLDER + then, "sh", folder(subject.entry))
    done = transport.run(host_of(subject.entry), argv, timeout=SLURM_SECONDS)
    return [*done.stdout.splitlines(), "", ""]


def _partition(subject: SlurmSubject, transport: Transport) -> Verdict:
    """The partition is up, and has nodes enough"""
    found = partition(subject.entry, transport)
    name, there = found.facts.partition, len(found.nodes)
    if found.state != "up":
        cause = f"partition {name} is {found.state}"
        return "fail", cause, "another partition; `sinfo` lists them"
    usable = sum(node.usable for node in found.nodes)
    wanted = subject.job.node_range[0] + subject.job.spares
    having = f"{usable} of {pluralize(there, 'node')} of partition {name} can be used"
    if there < wanted:
        return "fail", f"{having}, the job needs {wanted}", f"--nodes {there}"
    if usable < wanted:
        return "warn", f"{having}, the job needs {wanted}: it would wait", "`sinfo -R` says why"
    return "ok", having, None


def _admission(subject: SlurmSubject, transport: Transport) -> Verdict:
    """Slurm would take the job: account, QOS, limits, features, what a node gives"""
    entry, job = subject.entry, subject.job
    plan = place(job, entry, probe(entry, transport, job), "doctor-rehearsal").plan("slurm")
    script = next(file.text or "" for file in plan.files if file.path.endswith("/slurm.sh"))
    argv = ("sbatch", "--test-only")
    done = run(transport, host_of(entry), argv, stdin=script.encode())
    lines = [line.removeprefix("sbatch: ") for line in done.stderr.strip().splitlines()]
    if done.exit_code:
        # The first line is the reason; the last one only says that the job was refused.
        return "fail", shortened("; ".join(lines) or "sbatch --test-only failed"), None
    return "ok", shortened(lines[-1] if lines else ""), None


def _folder(subject: SlurmSubject, transport: Transport) -> Verdict:
    """The folder for runs lies on a disk that compute nodes see"""
    path, kind, *_ = _folder_for_runs(subject, transport)
    if kind in LOCAL_DISKS:
        cause = f"{path} lies on {kind}, which compute nodes may not see"
        key = "workdir: " if subject.entry.ssh else "export CLUSTERKIT_HOME="
        return "warn", cause, f"{key}a folder on a shared disk"
    return "ok", f"{path} lies on {kind or 'an unknown file system'}", None


def _compute(subject: SlurmSubject, transport: Transport) -> Verdict:
    """A compute node has the folder for runs, the job's folder and the Python"""
    entry, job = subject.entry, subject.job
    path, *_ = _folder_for_runs(subject, transport, 'mkdir -p "$1"')
    asked = {"partition": entry.partition, "account": entry.account, "qos": entry.qos,
             "constraint": entry.constraint, "reservation": entry.reservation}  # fmt: skip
    given = [f"--{name}={value}" for name, value in asked.items() if value is not None]
    # A folder that is copied for the job does not exist yet.
    workdir = job.workdir if entry.ssh is None or not entry.sync else None
    python = "" if entry.container else python_of(job, entry)[0]
    argv = (
        "srun", f"--immediate={IMMEDIATE_SECONDS}", "--nodes=1", "--ntasks=1", "--time=1",
        "--job-name=clusterkit-doctor", *given,
        "/bin/sh", "-c", _THERE, "sh", python, path, workdir or "/",
    )  # fmt: skip
    done = run(transport, host_of(entry), argv)
    answer = done.stdout.strip().rpartition("\n")[2]
    if answer.startswith("no "):
        return (
            "fail",
            f"a compute node has {answer}",
            "a disk that all nodes see under the same path",
        )
    if done.exit_code:
        return "skip", shortened(f"no idle node to check: {done.error}"), None
    return "ok", f"seen on {answer}", None


CHECKS = tuple(map(Check, (_partition, _admission, _folder, _compute)))


def run_checks(
    subject: SlurmSubject, transport: Transport, checks: Sequence[Check], progress: Progress
) -> Report:
    """Run the checks. Nothing in the cluster is changed."""
    findings = []
    progress(1, ("Slurm",))
    for check in checks:
        try:
            verdict = check.judge(subject, transport)
        except ClusterkitError as error:
            verdict = "fail", error.message, error.hint
        findings.append(Finding(check.name, "slurm", *verdict))
    progress(1, ())
    return Report(
        cluster=subject.cluster,
        hosts=("slurm",),
        checks=tuple(check.name for check in checks),
        findings=tuple(findings),
        everything="Slurm",
    )
