"""Machines reached over SSH, one node each; nothing is installed there beyond the job's Python."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from clusterkit import execute
from clusterkit.backends.base import (
    Backend,
    Monitor,
    Observation,
    SupportsForget,
    SupportsPreflight,
)
from clusterkit.backends.node_status import stop_run
from clusterkit.backends.ports import replace_taken_ports
from clusterkit.backends.ssh.observe import SshMonitor, observation, open_report, views
from clusterkit.cluster import Facts, SshCluster
from clusterkit.errors import ClusterkitError, Unavailable
from clusterkit.output import mirror
from clusterkit.plan import Plan
from clusterkit.run.folder import RunHandle, home
from clusterkit.spec import JobSpec
from clusterkit.transport import Completed, Transport, fan_out

if TYPE_CHECKING:
    from clusterkit.assemble import Placement
    from clusterkit.doctor.hosts.base import HostSubject

_REMOVE = """\
for folder do
    if mv -T -- "$folder" "$folder.$0" 2>/dev/null; then folder=$folder.$0
    elif [ ! -e "$folder" ]; then continue
    fi
    rm -rf -- "$folder" || { sleep 1; rm -rf -- "$folder"; } || exit
done"""
"""Removes folders, each by its own name first: in a shared folder all hosts remove the same."""
_REPORT_GONE = 2
"""Exit code of a Python whose program does not exist."""


# The transport, whose imports are slow, is imported where it is used: not every command needs it.
class SshBackend(Backend[SshCluster], SupportsPreflight[SshCluster], SupportsForget):
    """Nodes are machines; see `clusterkit.agent` for what runs on each of them."""

    name = "ssh"
    summary = "machines reached over SSH, one node each"

    def probe(self, cluster: SshCluster, transport: Transport, job: JobSpec | None = None) -> Facts:
        from clusterkit.backends.ssh.probe import probe

        return probe(cluster, transport, job)

    def place(self, job: JobSpec, cluster: SshCluster, facts: Facts, run_id: str) -> Placement:
        from clusterkit.backends.ssh.place import place

        return place(job, cluster, facts, run_id)

    @classmethod
    def resolved(
        cls, cluster: SshCluster, folder: Path, include: str | None, exclude: str | None
    ) -> SshCluster:
        from clusterkit.backends.ssh.hosts import resolved

        return resolved(cluster, folder, include, exclude)

    @classmethod
    def transport(cls, cluster: SshCluster) -> Transport:
        try:
            from clusterkit.backends.ssh.transport import SshTransport
        except ModuleNotFoundError as error:
            if error.name != "paramiko":
                raise
            raise Unavailable(
                "backend ssh needs paramiko, which is not installed",
                hint="pip install 'clusterkit[ssh]'",
            ) from None

        return SshTransport(
            cluster.hosts, python=cluster.python, connect_timeout=cluster.connect_timeout
        )

    def subject(self, name: str, cluster: SshCluster, job: JobSpec | None = None) -> HostSubject:
        from clusterkit.backends.ssh.hosts import job_hosts, ranks_python
        from clusterkit.doctor.hosts.base import HostSubject, Machine, Needs

        wanted = None if job is None or job.gpus_per_node == "auto" else job.gpus_per_node
        return HostSubject(
            cluster=name,
            hosts=tuple(
                Machine(
                    name=host.name,
                    address=host.cluster_address,
                    python=ranks_python(cluster, host, job)[0],
                    slots=wanted or host.slots,
                )
                for host in job_hosts(cluster, job)
            ),
            workdir=cluster.workdir,
            port=None if cluster.port == "auto" else cluster.port,
            shared=cluster.shared,
            interface=cluster.interface,
            needs=Needs.of(job),
            over_ssh=True,
        )

    def home(self, facts: Facts) -> Path:
        return home()  # facts.home is a folder on the hosts

    def claim(self, plan: Plan, transport: Transport, owner: str) -> None:
        execute.claim(plan, transport, owner)

    def before_attempt(
        self, cluster: SshCluster, facts: Facts, transport: Transport, *, fresh: bool
    ) -> tuple[Facts, str] | None:
        return None if fresh else replace_taken_ports(cluster, facts, transport)

    def status(self, handle: RunHandle, transport: Transport) -> Observation | None:
        nodes = views(handle)

        def update(node: str) -> None:
            view = nodes[int(node)]
            with (
                mirror.folder_lock(view),
                open_report(handle, view, transport, follow=False) as stream,
            ):
                mirror.pull(view, stream)
                if view.received_at is None:
                    code = stream.exit_code(mirror.QUIET_SECONDS)
                    view.known = code != _REPORT_GONE
                    if view.known:
                        raise mirror.Unreadable(
                            f"host {view.host}: the node's report failed: {stream.stderr.strip()}"
                        )

        errors = fan_out([str(view.node) for view in nodes if not view.ended], update)
        for node, error in errors.items():
            if isinstance(error, ClusterkitError):
                nodes[int(node)].lost(error)
        return observation(handle, nodes, 0.0)

    def watch(self, handle: RunHandle, transport: Transport) -> Monitor:
        return SshMonitor(handle, transport)

    def cancel(self, handle: RunHandle, transport: Transport, reason: str = "cancelled") -> None:
        plan = handle.plan
        _on_all_hosts(
            plan,
            lambda host: stop_run(plan, transport, host, plan.python, reason),
            failure=f"could not end run {plan.run_id}",
            remedy=f"clusterkit cancel {plan.run_id} again",
        )

    def remove_remote_files(self, handle: RunHandle, transport: Transport) -> None:
        plan = handle.plan
        argv = ["sh", "-c", _REMOVE, secrets.token_hex(8)]
        argv += filter(None, (plan.run_dir, plan.shared))
        _on_all_hosts(
            plan,
            lambda host: transport.run(host, argv, timeout=120),
            failure=f"cannot remove {plan.run_dir}",
            remedy=f"clusterkit rm {plan.run_id} again",
        )


def _on_all_hosts(
    plan: Plan, run: Callable[[str], Completed], *, failure: str, remedy: str
) -> None:
    """Run a command on every host of the plan, also where other hosts do not answer.

    Raises:
        Unavailable: names the hosts where it failed.
    """

    def checked(host: str) -> None:
        done = run(host)
        if done.exit_code:
            raise Unavailable(f"host {host}: {failure}: {done.stderr.strip()}")

    hosts = execute.all_hosts(plan)
    # All at once: waiting for a host costs nothing here. The transport itself limits logins.
    outcomes = fan_out(hosts, checked, limit=len(hosts))
    errors = [outcome for outcome in outcomes.values() if isinstance(outcome, ClusterkitError)]
    if errors:
        raise Unavailable(
            "; ".join(error.message for error in errors[:3])
            + (f"; and {len(errors) - 3} more" if len(errors) > 3 else ""),
            hint=f"{remedy}, once they answer",
        )
