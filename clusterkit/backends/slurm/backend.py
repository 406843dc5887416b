"""Backend slurm: one allocation for each run, in which one ``srun`` starts an agent on every node.

The run folder is on a disk that the login node and all nodes share, so the agents' files are read
there as for local runs. If the login node is reached over SSH, they are copied to this machine.
"""

from __future__ import annotations

import math
import posixpath
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from clusterkit.agent import PEER_TOKEN
from clusterkit.backends.base import (
    Backend,
    Inside,
    Monitor,
    Observation,
    Recovered,
    RemoteRun,
    SupportsDoctor,
    SupportsFile,
    SupportsForget,
    SupportsRemoteRuns,
)
from clusterkit.backends.node_status import folder_exists
from clusterkit.backends.slurm import login
from clusterkit.backends.slurm.observe import SlurmMonitor, status, stop_file
from clusterkit.backends.slurm.place import image
from clusterkit.backends.slurm.queue import HERE, SLURM_SECONDS, Job, jobs_of, on_login, run
from clusterkit.cluster import Facts, SlurmCluster
from clusterkit.errors import ClusterkitError, Unavailable
from clusterkit.jobfile.yaml_text import comment
from clusterkit.plan import Plan, unpacking
from clusterkit.run.folder import RunHandle, home
from clusterkit.run.status import State
from clusterkit.spec import JobSpec
from clusterkit.transport import LocalTransport, Stream, Transport

if TYPE_CHECKING:
    from clusterkit.assemble import Placement
    from clusterkit.backends.slurm.doctor import SlurmSubject

GRACE_SECONDS = 10.0
"""Beyond `stop_grace`, before `scancel` kills a job whose agents do not end it."""
POLL_SECONDS = 1.0


class SlurmBackend(
    Backend[SlurmCluster],
    SupportsDoctor[SlurmCluster],
    SupportsFile[SlurmCluster],
    SupportsForget,
    SupportsRemoteRuns[SlurmCluster],
):
    """Nodes are tasks of one job step; see `clusterkit.agent` for what runs in each of them."""

    name = "slurm"
    summary = "nodes of a Slurm cluster, in one allocation"
    command = "sbatch"
    unsupported = {  # noqa: RUF012
        "launcher=mpirun": "Open MPI would start job steps that no agent can watch or end",
    }
    start_seconds: ClassVar[float] = math.inf

    def probe(
        self, cluster: SlurmCluster, transport: Transport, job: JobSpec | None = None
    ) -> Facts:
        from clusterkit.backends.slurm.probe import probe

        return probe(cluster, transport, job)

    def place(self, job: JobSpec, cluster: SlurmCluster, facts: Facts, run_id: str) -> Placement:
        from clusterkit.backends.slurm.place import place

        return place(job, cluster, facts, run_id)

    @classmethod
    def transport(cls, cluster: SlurmCluster) -> Transport:
        return LocalTransport() if cluster.ssh is None else login.transport(cluster)

    def capacity(self, cluster: SlurmCluster, transport: Transport) -> int:
        from clusterkit.backends.slurm.probe import partition

        return sum(node.usable for node in partition(cluster, transport).nodes)

    def subject(self, name: str, cluster: SlurmCluster, job: JobSpec | None = None) -> SlurmSubject:
        from clusterkit.backends.slurm.doctor import SlurmSubject

        job = job or JobSpec(name="any", command=("true",))
        return SlurmSubject(cluster=name, entry=cluster, job=job)

    def home(self, facts: Facts) -> Path:
        return Path(facts.home) if facts.hosts[0].host == HERE else home()

    def assumed_facts(self, cluster: SlurmCluster, job: JobSpec) -> Facts:
        from clusterkit.backends.slurm.probe import assumed

        return assumed(cluster, job)

    def one_file(self, plan: Plan, cluster: SlurmCluster, head: list[str]) -> str:
        scripts = {posixpath.basename(file.path): file for file in plan.files}
        lines = (scripts.pop("slurm.sh").text or "").splitlines(keepends=True)
        del scripts["submit.sh"]
        # Without the options that need the run folder: Slurm opens its output before that exists.
        lines = [
            line for line in lines if not (line.startswith("#SBATCH") and plan.run_dir in line)
        ]
        end = 1 + max(at for at, line in enumerate(lines) if line.startswith("#SBATCH"))
        head = [*head, f"It writes into {plan.run_dir}, on a disk that all nodes see."]
        head += [f"{tree.path} has to hold {tree.source}." for tree in plan.trees]
        secrets = [name for name in plan.steps[-1].secrets if name != PEER_TOKEN]
        head += [f"First: export {name}=..." for name in secrets]
        return "".join([
            lines[0], comment("\n".join(head)), *lines[1:end],
            unpacking(scripts.values()), *lines[end:],
        ])  # fmt: skip

    def claim(self, plan: Plan, transport: Transport, owner: str) -> None:
        if plan.hosts[0] != HERE:
            from clusterkit import execute

            execute.claim(plan, transport, owner)

    def status(self, handle: RunHandle, transport: Transport) -> Observation | None:
        return status(handle, transport)

    def watch(self, handle: RunHandle, transport: Transport) -> Monitor:
        return SlurmMonitor(handle, transport)

    def inside(
        self, handle: RunHandle, transport: Transport, nodes: Sequence[int]
    ) -> dict[int, Inside]:
        plan, entry = handle.plan, handle.folder.cluster()
        assert isinstance(entry, SlurmCluster)
        running = [job for job in jobs_of(plan, transport) if job.state is State.RUNNING]
        if not running:
            return {}
        folders = [plan.run_dir, *(tree.path for tree in plan.trees)]
        workdir = plan.job.workdir if plan.job is not None else None
        folders += [workdir] if workdir and posixpath.isabs(workdir) else []
        for_srun, before = image(entry, folders, plan.device)
        # Beside the agents, which have all of the allocation; with its GPUs.
        step = [
            "srun", f"--jobid={running[-1].id}", "--overlap", "--nodes=1", "--ntasks=1",
            "--cpu-bind=none", "--quiet", *for_srun,
        ]  # fmt: skip

        def opened(node: int, argv: Sequence[str]) -> Stream:
            command = on_login(plan.hosts[0], [*step, f"--relative={node}", *before, *argv])
            return transport.open(plan.hosts[0], command, own_group=True)

        return {node: Inside(f"node {node}", partial(opened, node)) for node in nodes}

    def cancel(self, handle: RunHandle, transport: Transport, reason: str = "cancelled") -> None:
        plan, host = handle.plan, handle.plan.hosts[0]
        deadline = time.monotonic() + plan.stop_grace + GRACE_SECONDS
        signalled: set[int] = set()
        try:
            while jobs := [job for job in jobs_of(plan, transport) if not job.state.final]:
                for job in jobs:
                    if job.completing:
                        continue  # Slurm is ending it already
                    _write_reason(handle, job, reason, transport)
                    if job.state is not State.RUNNING or time.monotonic() > deadline:
                        _scancel(transport, host, job)
                    elif job.id not in signalled:
                        # The batch script passes this on to the agents, with the reason.
                        _scancel(transport, host, job, "--batch", "--signal=USR1")
                    signalled.add(job.id)
                if time.monotonic() > deadline + SLURM_SECONDS:
                    names = ", ".join(f"{job.id} is {job.slurm_state} and" for job in jobs)
                    raise Unavailable(f"job {names} does not end")
                time.sleep(POLL_SECONDS)
        except ClusterkitError as error:
            raise Unavailable(
                f"could not end run {plan.run_id}: {error.message}",
                hint=f"clusterkit cancel {plan.run_id} again, once Slurm answers",
            ) from None

    def remove_remote_files(self, handle: RunHandle, transport: Transport) -> None:
        plan = handle.plan
        if login.is_remote(handle):
            done = transport.run(plan.hosts[0], ["rm", "-rf", "--", plan.run_dir], timeout=120)
            if done.exit_code:
                raise Unavailable(
                    f"host {plan.hosts[0]}: cannot remove {plan.run_dir}: {done.stderr}"
                )

    def listing(self, cluster: SlurmCluster, transport: Transport) -> list[RemoteRun]:
        from clusterkit.backends.slurm.remote_runs import listing

        return listing(cluster, transport)

    def recover(self, run: str, cluster: SlurmCluster, transport: Transport) -> Recovered:
        from clusterkit.backends.slurm.remote_runs import refuse

        raise refuse(run, cluster, transport)


def _write_reason(handle: RunHandle, job: Job, reason: str, transport: Transport) -> None:
    """Write why the job is ended: for its batch script, and to show that clusterkit ended it."""
    plan, text = handle.plan, f"{reason}\n".encode()
    if folder_exists(handle):  # do not make a removed folder again
        handle.folder.write(stop_file(job), text)
    if login.is_remote(handle):
        transport.put(plan.hosts[0], posixpath.join(plan.run_dir, stop_file(job)), text)


def _scancel(transport: Transport, host: str, job: Job, *options: str) -> None:
    """Run ``scancel`` on a job; a job that has ended is no error.

    Raises:
        Unavailable: it failed.
    """
    done = run(transport, host, ["scancel", *options, str(job.id)])
    error = done.stderr.strip()
    if done.exit_code and "Invalid job id" not in error and "already completing" not in error:
        raise Unavailable(f"Slurm: {error or f'scancel exited with {done.exit_code}'}")
