"""Machines reached over SSH, one node each; nothing is installed there beyond the job's Python."""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec

from clusterkit import agent, execute, mirror
from clusterkit.assemble import Placement
from clusterkit.backends.base import Backend, Handle, Observation, Watcher
from clusterkit.backends.nodes import judge_node, observed, stop_arguments
from clusterkit.backends.ssh import inventory
from clusterkit.backends.ssh.place import place
from clusterkit.backends.ssh.probe import hosts_for, probe, ranks_python
from clusterkit.cluster import ClusterSpec, Facts, SshCluster
from clusterkit.errors import BadInput, ClusterkitError, Unavailable, about
from clusterkit.mirror import NodeView, Watch
from clusterkit.plan import Plan
from clusterkit.runs import node_dir
from clusterkit.spec import JobSpec
from clusterkit.status import NodeStatus, State
from clusterkit.transport import Stream, Transport, fan_out

if TYPE_CHECKING:
    from clusterkit.doctor.base import Subject

_REPORT_GONE = 2
"""Exit code of a Python that does not find its program."""


class SshBackend(Backend):
    """Nodes are machines; see `clusterkit.agent` for what runs on each of them."""

    name = "ssh"
    summary = "machines reached over SSH, one node each"
    elsewhere: ClassVar[bool] = True

    @classmethod
    def settled(
        cls, cluster: ClusterSpec, folder: Path, include: str | None, exclude: str | None
    ) -> ClusterSpec:
        assert isinstance(cluster, SshCluster)
        if bool(cluster.inventory) == bool(cluster.hosts):
            raise BadInput(
                "inventory: a cluster has either an inventory or hosts",
                hint="inventory: ansible/inventory.yaml, or a hostfile with `host slots=N` lines",
                cluster="inventory",
            )
        if cluster.shared is not None and not cluster.shared.startswith("/"):
            raise BadInput(
                f"shared: {cluster.shared} is no absolute path",
                hint="it is one on the hosts",
                cluster="shared",
            )
        if cluster.inventory:
            path = folder / Path(cluster.inventory).expanduser()
            hosts = inventory.read_hosts(path, cluster.group)
        else:
            with about("cluster", "hosts"):
                given = inventory.check_hosts(cluster.hosts, "hosts")
            hosts = tuple(
                msgspec.structs.replace(
                    host,
                    identity=inventory.absolute(host.identity, folder),
                    known_hosts=inventory.absolute(host.known_hosts, folder),
                    ssh_config=inventory.absolute(host.ssh_config, folder),
                )
                for host in given
            )
        if not include and not exclude:
            include, exclude = cluster.include, cluster.exclude
        with about("cluster", "include" if include else "exclude"):
            hosts = inventory.chosen(hosts, include, exclude)
        return msgspec.structs.replace(
            cluster, inventory=None, group="all", include=None, exclude=None, hosts=hosts,
        )  # fmt: skip

    @classmethod
    def transport(cls, cluster: ClusterSpec) -> Transport:
        try:
            from clusterkit.backends.ssh.transport import SshTransport
        except ModuleNotFoundError as error:
            if error.name != "paramiko":
                raise
            raise Unavailable(
                "backend ssh needs paramiko, which is not installed",
                hint="pip install 'clusterkit[ssh]'",
            ) from None

        assert isinstance(cluster, SshCluster)
        return SshTransport(
            cluster.hosts, python=cluster.python, connect_timeout=cluster.connect_timeout
        )

    # -- probing --------------------------------------------------------------

    def probe(
        self, cluster: ClusterSpec, transport: Transport, job: JobSpec | None = None
    ) -> Facts:
        assert isinstance(cluster, SshCluster)
        return probe(cluster, transport, job)

    def subject(self, name: str, cluster: ClusterSpec, job: JobSpec | None = None) -> Subject:
        from clusterkit.doctor.base import Machine, Needs, Subject

        assert isinstance(cluster, SshCluster)
        wanted = None if job is None or job.gpus_per_node == "auto" else job.gpus_per_node
        return Subject(
            cluster=name,
            hosts=tuple(
                Machine(
                    name=host.name,
                    address=host.cluster_address,
                    python=ranks_python(cluster, host, job)[0],
                    slots=wanted or host.slots,
                )
                for host in hosts_for(cluster, job)
            ),
            workdir=cluster.workdir,
            port=None if cluster.port == "auto" else cluster.port,
            shared=cluster.shared,
            interface=cluster.interface,
            needs=Needs.of(job),
            over_ssh=True,
        )

    # -- planning -------------------------------------------------------------

    def place(self, job: JobSpec, cluster: ClusterSpec, facts: Facts, run_id: str) -> Placement:
        assert isinstance(cluster, SshCluster)
        return place(job, cluster, facts, run_id)

    # -- carrying out ---------------------------------------------------------

    def status(self, handle: Handle, transport: Transport) -> Observation | None:
        views = _views(handle)

        def ask(name: str) -> None:
            view = views[int(name)]
            with mirror.keeping(view), _report(handle, view, transport, follow=False) as stream:
                mirror.pull(view, stream)
                if view.heard_at is None:
                    code = stream.exit_code(mirror.QUIET_SECONDS)
                    view.known = code != _REPORT_GONE
                    if view.known:
                        raise Unavailable(
                            f"host {view.host}: the node's report failed: {stream.stderr.strip()}"
                        )

        errors = fan_out([str(view.node) for view in views if not view.ended], ask)
        for name, error in errors.items():
            if isinstance(error, ClusterkitError):
                views[int(name)].lost(error)
        return _observation(handle, views, 0.0)

    def watch(self, handle: Handle, transport: Transport) -> Watcher:
        return _Watcher(handle, transport)

    def cancel(self, handle: Handle, transport: Transport, reason: str = "cancelled") -> None:
        plan = handle.plan
        # Our own agent, not the run folder's copy: that may be gone, its processes not.
        program = Path(agent.__file__).read_bytes()

        def stop(host: str) -> None:
            done = transport.run(
                host,
                [plan.python, "-I", "-", *stop_arguments(plan, reason)],
                stdin=program,
                timeout=plan.stop_grace + 60,
            )
            if done.exit_code:
                raise Unavailable(
                    f"host {host}: could not end run {plan.run_id}: {done.stderr.strip()}"
                )

        _everywhere(plan, stop, transport, f"clusterkit cancel {plan.run_id} again")

    def forget(self, handle: Handle, transport: Transport) -> None:
        plan = handle.plan

        def remove(host: str) -> None:
            folders = [folder for folder in (plan.run_dir, plan.shared) if folder]
            done = transport.run(host, ["rm", "-rf", "--", *folders], timeout=120)
            if done.exit_code:
                raise Unavailable(f"host {host}: cannot remove {plan.run_dir}: {done.stderr}")

        _everywhere(plan, remove, transport, f"clusterkit rm {plan.run_id} again")


# ---------------------------------------------------------------- watching


def _views(handle: Handle) -> list[NodeView]:
    plan = handle.plan
    return [
        NodeView.of(node, plan.hosts[node], handle.folder.node_dir(handle.attempt, node))
        for node in range(plan.nodes)
    ]


def _report(handle: Handle, view: NodeView, transport: Transport, *, follow: bool) -> Stream:
    plan = handle.plan
    known = view.offsets()
    return transport.open(
        view.host,
        [
            plan.python, "-I", posixpath.join(plan.run_dir, "files", "agent.py"), "report",
            node_dir(plan.run_dir, handle.attempt, view.node),
            "--log", str(known["log"]), "--ranks", str(known["ranks.jsonl"]),
            *(["--follow"] if follow else []),
        ],
    )  # fmt: skip


def _observation(handle: Handle, views: list[NodeView], patience: float) -> Observation | None:
    if all(not view.known for view in views):
        return None
    nodes = tuple(_judge(view, views, patience) for view in views)
    return observed(nodes, {view.node: view.files.get("exit.json", b"") for view in views})


def _judge(view: NodeView, views: list[NodeView], patience: float) -> NodeStatus:
    silence = view.silent_for()
    finished = view.ended or "exit.json" in view.files  # it has said how, as its last word
    if silence is not None and view.error is not None and not finished:
        said = f"{view.error.message} (no answer for {silence:.0f} s)"
        # When nobody answers, it is the submitter that is cut off.
        alone = len(views) > 1 and all(other.silent_for() is not None for other in views)
        lost = silence >= patience and not alone
        if not lost and patience:
            state = State.RUNNING if view.begun else State.PENDING
            return NodeStatus(node=view.node, host=view.host, state=state, reason=said)
        return NodeStatus(node=view.node, host=view.host, state=State.UNKNOWN, reason=said)
    if not view.known:
        return NodeStatus(
            node=view.node, host=view.host, state=State.UNKNOWN,
            reason=f"nothing is left of the run on host {view.host}",
        )  # fmt: skip
    found = judge_node(
        view.node,
        view.host,
        begun=view.begun,
        alive=view.alive and not (finished and silence is not None),
        exit_json=view.files.get("exit.json"),
        complaint=view.files.get("agent.log", b""),
        started=view.files.get("started.json"),
    )
    if view.unkept is not None:
        remark = f"its log here is not whole: {view.unkept}"
        found = msgspec.structs.replace(found, remarks=(*found.remarks, remark))
    return found


class _Watcher:
    """All nodes through one stream per host."""

    def __init__(self, handle: Handle, transport: Transport) -> None:
        self._handle = handle
        self._patience = handle.plan.lost_after
        self._watch = Watch(
            _views(handle), lambda view: _report(handle, view, transport, follow=True)
        )

    def status(self) -> Observation | None:
        return _observation(self._handle, list(self._watch.views), self._patience)

    def close(self) -> None:
        self._watch.close()


def _everywhere(plan: Plan, work: Callable[[str], None], transport: Transport, remedy: str) -> None:
    """``work`` on every host of the plan; one that does not answer does not hold the others.

    Raises:
        Unavailable: names the hosts where it could not be done.
    """
    outcomes = fan_out(execute.everyone(plan), work)
    errors = [found for found in outcomes.values() if isinstance(found, ClusterkitError)]
    if errors:
        raise Unavailable(
            "; ".join(error.message for error in errors[:3])
            + (f"; and {len(errors) - 3} more" if len(errors) > 3 else ""),
            hint=f"{remedy}, once they answer",
        )
