"""Machines reached over SSH, one node each; nothing is installed there beyond the job's Python."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from clusterkit import agent, execute, host_probe, mirror, project
from clusterkit.assemble import Peers, Places, assemble, require_packages
from clusterkit.backends.base import Backend, Handle, Observation, Watcher
from clusterkit.backends.nodes import (
    GPU_QUERY,
    PACKAGES,
    TOOLS,
    check_version,
    device_of,
    gpu_share,
    interpreter,
    judge_node,
    observed,
    parse_gpus,
    stop_arguments,
    threads_of,
)
from clusterkit.backends.ssh import inventory
from clusterkit.cluster import ClusterSpec, Facts, Host, HostFacts, Project, SshCluster
from clusterkit.errors import BadInput, ClusterkitError, PortTaken, Unavailable, about, counted
from clusterkit.mirror import NodeView, Watch
from clusterkit.plan import Note, Plan, Step, Tree
from clusterkit.rendezvous import NODE_ADDRESS, Endpoint, Topology, mpirun_interface
from clusterkit.runs import node_dir
from clusterkit.spec import JobSpec
from clusterkit.status import NodeStatus, State
from clusterkit.transport import Stream, Transport, fan_out, in_order

if TYPE_CHECKING:
    from clusterkit.doctor.base import Subject

PROBE_SECONDS = 60.0
LAST_PORT = 65535
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
                f"shared: {cluster.shared} is not an absolute path",
                hint="give an absolute path on the hosts",
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
        hosts = _hosts_for(cluster, job)
        wanted = None if cluster.port == "auto" else cluster.port
        with ThreadPoolExecutor(1) as pool:
            looking = pool.submit(transport.free_port, hosts[0].name, wanted)
            told = in_order(
                fan_out([h.name for h in hosts], lambda name: _ask(cluster, name, transport, job))
            )
        port = looking.result()
        alone = len(hosts) == 1
        found = tuple(_host_facts(cluster, host, told[host.name], alone, job) for host in hosts)
        homes = {told[host.name]["workdir"]: host.name for host in hosts}
        if len(homes) > 1:
            (one, first), (other, second) = list(homes.items())[:2]
            raise BadInput(
                f"workdir: {cluster.workdir} is {one} on {first}, but {other} on {second}",
                hint="give an absolute path",
                cluster="workdir",
            )
        if wanted not in (None, port):
            raise PortTaken(int(cluster.port), f"host {hosts[0].name}")
        interfaces = {host.interface for host in found}
        copied = cluster.sync and job is not None
        lacking = any("clusterkit" not in host.versions for host in found)
        return Facts(
            home=next(iter(homes)),
            hosts=found,
            # Beside a port that was chosen it is free: that saves a round trip.
            watch_port=port + 1
            if wanted is None
            else transport.free_port(hosts[0].name, port + 1 if port < LAST_PORT else port - 1),
            port=port,
            port_origin=f"free on {hosts[0].name} when probed"
            if wanted is None
            else "cluster: port",
            interface=interfaces.pop() or "" if len(interfaces) == 1 else "",
            project=_project(job).facts() if copied and job is not None else None,
            shipped=project.own_package().facts() if copied and lacking else None,
        )

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
                    python=_interpreter(cluster, host, job)[0],
                    slots=wanted or host.slots,
                )
                for host in _hosts_for(cluster, job)
            ),
            workdir=cluster.workdir,
            port=None if cluster.port == "auto" else cluster.port,
            shared=cluster.shared,
            interface=cluster.interface,
            needs=Needs.of(job),
            over_ssh=True,
        )

    # -- planning -------------------------------------------------------------

    def plan(self, job: JobSpec, cluster: ClusterSpec, facts: Facts, run_id: str) -> Plan:
        assert isinstance(cluster, SshCluster)
        least, most = job.node_range
        if len(facts.hosts) < least:
            raise _too_few(least, len(facts.hosts), cluster)
        nodes = min(most, len(facts.hosts))
        hosts = facts.hosts[:nodes]
        head = hosts[0]
        device, device_origin = device_of(job, hosts)
        nproc, nproc_origin = _ranks_per_node(job, hosts, device)
        topology = Topology(min(least, nodes), nodes, nproc)
        cpus = min(host.cpus for host in hosts)
        threads, threads_origin = threads_of(job, cpus, nproc)
        for host in hosts:
            require_packages(job, host)
            if host.python != head.python:
                raise BadInput(
                    f"python: {head.python} on {head.host}, but {host.python} on {host.host}",
                    hint="the ranks' interpreter must have one path on all hosts: a link is enough",
                    cluster="python",
                )
        run_dir = posixpath.join(facts.home, "runs", run_id)
        workdir, trees = _trees(job, facts, run_dir)
        if job.launcher == "mpirun":
            _check_devices(hosts[1:], device, nproc)
        interface_env = _interface_env(facts.interface)
        if job.launcher == "mpirun" and facts.interface:
            interface_env |= mpirun_interface(facts.interface)
        assembly = assemble(
            _as_copied(job, facts),
            topology=topology,
            endpoint=Endpoint(head.address, facts.port, run_id),
            places=Places(
                run_dir, workdir, head.python, _shared(cluster, run_id), head.python_origin
            ),
            device=device,
            threads=threads,
            hosts=[host.address for host in hosts],
            cluster_env=cluster.env,
            network_env=interface_env | _shipped_env(job, cluster, facts),
            stop_grace=cluster.stop_grace,
            peers=Peers(head.address, facts.watch_port, cluster.lost_after)
            if facts.watch_port
            else None,
        )
        notes = [
            Note("device", device, device_origin),
            Note("nproc_per_node", str(nproc), nproc_origin),
            Note("master_addr", head.address, _address_origin(cluster, head)),
            Note("master_port", str(facts.port), facts.port_origin),
            Note("threads_per_rank", str(threads), threads_origin),
            Note("workdir", workdir, "the project as it is copied" if trees else "job: workdir"),
            *_interface_notes(facts, hosts),
            *assembly.notes,
            *_version_notes(hosts),
        ]
        if nodes < most:
            notes.append(Note("", f"{most} nodes are wanted, {counted(nodes, 'host')} there", ""))
        by_host = {} if interface_env else {h.host: _interface_env(h.interface) for h in hosts}
        started = hosts[:1] if job.launcher == "mpirun" else hosts
        return Plan(
            run_id=run_id,
            run_dir=run_dir,
            backend=self.name,
            summary=f"{topology} on {_named([host.host for host in hosts])}, "
            f"started by {job.launcher}; world size {topology.world_size}",
            notes=tuple(notes),
            trees=trees,
            files=assembly.files,
            steps=tuple(
                Step(
                    kind="start",
                    host=host.host,
                    node=node,
                    argv=assembly.command,
                    env={
                        "NODE_RANK": str(node),
                        **({NODE_ADDRESS.name: host.address} if topology.elastic else {}),
                        **_own(by_host.get(host.host, {}), job, cluster),
                        **gpu_share(host.gpus, device, 0, nproc),
                    },
                    secrets=assembly.secrets,
                )
                for node, host in enumerate(started)
            ),
            hosts=tuple(host.host for host in hosts),
            nodes=len(started),
            world_size=topology.world_size,
            topology={"min_nodes": topology.min_nodes, "nodes": nodes, "nproc_per_node": nproc},
            address=head.address,
            port=facts.port,
            python=head.python,
            shared=_shared(cluster, run_id) or "",
            stop_grace=cluster.stop_grace,
            lost_after=cluster.lost_after,
        )

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


# ---------------------------------------------------------------- probing


def _hosts_for(cluster: SshCluster, job: JobSpec | None) -> tuple[Host, ...]:
    """The hosts that a job of this many nodes gets: the first ones."""
    if not cluster.hosts:
        raise BadInput(
            "hosts: the cluster entry names none",
            hint="`inventory:` names a file of hosts",
            cluster="hosts",
        )
    if job is None:
        return cluster.hosts
    least, most = job.node_range
    if least > len(cluster.hosts):
        raise _too_few(least, len(cluster.hosts), cluster)
    return cluster.hosts[:most]


def _too_few(wanted: int, there: int, cluster: SshCluster) -> BadInput:
    return BadInput(
        f"nodes: {wanted} are wanted, the cluster has {counted(there, 'host')}"
        f" ({_named([host.name for host in cluster.hosts])})",
        hint=f"--nodes {there}, or more hosts in the inventory",
        job="nodes",
    )


def _ask(
    cluster: SshCluster, name: str, transport: Transport, job: JobSpec | None
) -> dict[str, Any]:
    host = next(host for host in cluster.hosts if host.name == name)
    python, _ = _interpreter(cluster, host, job)
    asked = {
        "workdir": cluster.workdir, "packages": PACKAGES, "tools": TOOLS, "gpu_query": GPU_QUERY,
    }  # fmt: skip
    done = transport.run(
        name,
        # Without -I: what the ranks will find, in the user's own packages too, counts.
        [python, "-", json.dumps(asked)],
        env={**cluster.env, **(job.env if job else {}), "PYTHONSAFEPATH": "1"},
        stdin=Path(host_probe.__file__).read_bytes(),
        timeout=PROBE_SECONDS,
    )
    try:
        told: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        said = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.exit_code}"
        raise Unavailable(
            f"host {name}: python: {python} is not a working Python interpreter: {said}",
            hint="`python` in the job or the cluster entry, or `clusterkit_python` in the "
            "inventory, names the interpreter of the ranks",
        ) from None
    check_version(told["python_version"], python, f"host {name}")
    return told


def _interpreter(cluster: SshCluster, host: Host, job: JobSpec | None) -> tuple[str, str]:
    return interpreter(job, (host.python, "the host's own"), (cluster.python, "cluster: python"))


def _host_facts(
    cluster: SshCluster, host: Host, told: Mapping[str, Any], alone: bool, job: JobSpec | None
) -> HostFacts:
    by_name = {found["name"]: found["address"] for found in told["interfaces"]}
    if cluster.interface != "auto":
        if cluster.interface not in by_name:
            raise BadInput(
                f"interface: host {host.name} has no {cluster.interface} with an IPv4 address",
                hint=f"it has {', '.join(by_name)}",
                cluster="interface",
            )
        address, interface = by_name[cluster.interface], cluster.interface
    else:
        address = str(host.cluster_address or told["reached_at"] or "127.0.0.1")
        interface = next((name for name, own in by_name.items() if own == address), "")
    address = host.cluster_address or address
    if address.startswith("127.") and not alone:
        raise BadInput(
            f"host {host.name}: it was reached at {address}, where the other hosts cannot reach it",
            hint="clusterkit_address in the inventory, or `interface:` in the cluster entry",
        )
    gpus = parse_gpus(told["gpus"], told["visible"])
    if host.devices is not None:
        by_index = {gpu.index: gpu for gpu in gpus}
        if gpus and (gone := [d for d in host.devices if str(d) not in by_index]):
            raise BadInput(
                f"host {host.name}: GPU {gone[0]} is asked for, it has {counted(len(gpus), 'GPU')}"
            )
        gpus = tuple(by_index[str(device)] for device in host.devices if by_index)
    python, origin = _interpreter(cluster, host, job)
    return HostFacts(
        host=host.name,
        address=address,
        cpus=told["cpus"],
        memory_mib=told["memory_mib"],
        gpus=gpus,
        # As it was named: a virtual environment's own path matters.
        python=python,
        python_origin=origin,
        versions=told["versions"],
        tools=told["tools"],
        interface=interface or None,
        slots=host.slots,
    )


def _project(job: JobSpec | None) -> project.Snapshot:
    assert job is not None
    return project.snapshot(Path(job.workdir or "."), job.program)


# ---------------------------------------------------------------- planning


def _ranks_per_node(job: JobSpec, hosts: tuple[HostFacts, ...], device: str) -> tuple[int, str]:
    if job.gpus_per_node != "auto":
        wanted = job.gpus_per_node
        for host in hosts:
            if device == "cuda" and len(host.gpus) < wanted:
                raise BadInput(
                    f"gpus_per_node: {wanted}, but {host.host} has "
                    f"{counted(len(host.gpus), 'GPU')}",
                    hint=f"--gpus {len(host.gpus)}, or --exclude {host.host}",
                    job="gpus_per_node",
                )
            if host.slots is not None and host.slots < wanted:
                raise BadInput(
                    f"gpus_per_node: {wanted}, but {host.host} has "
                    f"{counted(host.slots, 'slot')} in the inventory",
                    hint=f"--gpus {host.slots}, or slots: {wanted} for {host.host}",
                    job="gpus_per_node",
                )
        return wanted, "job: gpus_per_node"
    if device == "cuda":
        fewest = min(hosts, key=_room)
        return _room(fewest), f"the fewest GPUs of a host: {fewest.host}"
    slots = [host.slots for host in hosts if host.slots is not None]
    if slots:
        return min(slots), "inventory: slots"
    return 1, "without GPUs one rank per node"


def _check_devices(others: Sequence[HostFacts], device: str, nproc: int) -> None:
    """Refuse GPUs of other hosts than the first that mpirun could not confine the ranks to.

    Raises:
        BadInput: names the host.
    """
    for host in others if device == "cuda" else ():
        its = [gpu.index for gpu in host.gpus[:nproc]]
        if its != [str(number) for number in range(nproc)]:
            raise BadInput(
                f"launcher: mpirun cannot restrict {host.host} to GPUs {','.join(its)}",
                hint="launcher: torchrun can",
                job="launcher",
            )


def _as_copied(job: JobSpec, facts: Facts) -> JobSpec:
    """The job with a program that was named by its whole path named as it is on the hosts."""
    if facts.project is None or job.program is None or not posixpath.isabs(job.program):
        return job
    below = posixpath.relpath(job.program, facts.project.root)
    path = posixpath.join(_tree_path(facts, facts.project), below)
    return msgspec.structs.replace(job, program=path)


def _room(host: HostFacts) -> int:
    return min(len(host.gpus), host.slots or len(host.gpus))


def _trees(job: JobSpec, facts: Facts, run_dir: str) -> tuple[str, tuple[Tree, ...]]:
    """Where the ranks start, and what is copied for it."""
    workdir = job.workdir or run_dir
    trees = []
    if facts.project is not None:
        path = _tree_path(facts, facts.project)
        below = posixpath.relpath(workdir, facts.project.root)
        workdir = posixpath.normpath(posixpath.join(path, below))
        trees.append(_tree(facts.project, path))
    if facts.shipped is not None:
        trees.append(_tree(facts.shipped, _tree_path(facts, facts.shipped, "clusterkit")))
    return workdir, tuple(trees)


def _tree_path(facts: Facts, found: Project, name: str | None = None) -> str:
    name = name or re.sub(r"[^A-Za-z0-9_.-]+", "-", posixpath.basename(found.root)) or "project"
    return posixpath.join(facts.home, "projects", name, found.digest[:16])


def _tree(found: Project, path: str) -> Tree:
    return Tree(found.root, path, found.digest, f"{project.words(found)}; {found.how}")


def _shared(cluster: SshCluster, run_id: str) -> str | None:
    if cluster.shared is None:
        return None
    return posixpath.join(cluster.shared, "runs", run_id)


def _shipped_env(job: JobSpec, cluster: SshCluster, facts: Facts) -> dict[str, str]:
    if facts.shipped is None or "PYTHONPATH" in job.env or "PYTHONPATH" in cluster.env:
        return {}
    return {"PYTHONPATH": _tree_path(facts, facts.shipped, "clusterkit")}


def _interface_env(interface: str | None) -> dict[str, str]:
    if not interface:
        return {}
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def _own(env: Mapping[str, str], job: JobSpec, cluster: SshCluster) -> dict[str, str]:
    """What neither the job nor the cluster entry sets by itself."""
    return {k: value for k, value in env.items() if k not in job.env and k not in cluster.env}


def _interface_notes(facts: Facts, hosts: tuple[HostFacts, ...]) -> list[Note]:
    if facts.interface:
        return [Note("interface", facts.interface, "carries the hosts' addresses")]
    nameless = [host.host for host in hosts if host.interface is None]
    if nameless:
        return [
            Note(
                "",
                f"no interface of {_named(nameless)} carries the address it was reached at: "
                "gloo and NCCL choose by themselves (`interface:` names one)",
                "",
            )
        ]
    return [Note("interface", ", ".join(f"{h.host} {h.interface}" for h in hosts), "per host")]


def _version_notes(hosts: tuple[HostFacts, ...]) -> list[Note]:
    notes = []
    for package in ("torch", "deepspeed", "transformers"):
        found: dict[str, list[str]] = {}
        for host in hosts:
            found.setdefault(host.versions.get(package, "none"), []).append(host.host)
        if len(found) > 1:
            told = "; ".join(f"{version} on {_named(names)}" for version, names in found.items())
            notes.append(Note("", f"the hosts differ in {package}: {told}", ""))
    return notes


def _address_origin(cluster: SshCluster, head: HostFacts) -> str:
    on = f", interface {head.interface}" if head.interface else ""
    given = next((host.cluster_address for host in cluster.hosts if host.name == head.host), None)
    return f"first host, {head.host}{on}" + (", as the inventory says" if given else "")


def _named(names: list[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


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
        remark = f"its log here is incomplete: {view.unkept}"
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
