"""Turn a job and its placement into a plan: environment, files and command of every node. Pure.

A backend decides where files are, how many nodes and ranks there are and how a node learns its
rank (`Placement`); what the ranks get from that is the same for every backend.
"""

from __future__ import annotations

import copy
import dataclasses
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from clusterkit import shell
from clusterkit.agent import COORDINATOR, PEER_TOKEN
from clusterkit.agent.archive import ARCHIVE
from clusterkit.batch import Batch
from clusterkit.cluster import ClusterSpec, Facts, HostFacts
from clusterkit.errors import BadInput, Unavailable, error_key, pluralize
from clusterkit.plan import Native, Note, Plan, PlanFile, Step, Tree
from clusterkit.program import (
    batch_environment,
    deepspeed_config,
    interpreter_words,
    program_argv,
    solve_batch,
)
from clusterkit.rendezvous import (
    IS_HOST,
    NODE_ADDRESS,
    NODE_DIR,
    VARIABLES_TO_UNSET,
    Endpoint,
    Topology,
    hostfile,
    launcher_argv,
    node_environment,
    rank_script,
)
from clusterkit.shell import Concat, Default, Var, Word
from clusterkit.spec import JobSpec, Launcher, launcher_of

RESERVED_VARIABLES = frozenset({
    "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE",
    "LOCAL_WORLD_SIZE", "CLUSTERKIT_ATTEMPT", "CLUSTERKIT_GPUS", "CLUSTERKIT_PIPE",
    IS_HOST.name, NODE_ADDRESS.name, NODE_DIR.name, COORDINATOR, PEER_TOKEN,
})  # fmt: skip
"""Variables that only clusterkit may set, besides those of `_run_environment`."""
SHRINK_SECONDS = 5.0
"""Seconds, after ``stop_grace``, until a run continues without a lost node or with a spare."""
TERMINATION_LOG = "/dev/termination-log"
"""File from which Kubernetes reads a container's termination message."""


@dataclass(frozen=True)
class NodePaths:
    """Absolute paths on the nodes."""

    run_dir: str
    workdir: str
    python: str
    shared: str | None = None
    """The run's folder on a disk that all nodes share; None: there is no such disk."""
    python_origin: str = ""
    """Where the choice of ``python`` comes from, for people."""

    def file(self, name: str) -> str:
        """Return the path of one of the plan's files."""
        return posixpath.join(self.run_dir, "files", name)


@dataclass(frozen=True)
class Coordinator:
    """Where the agent of node 0 coordinates the others (`clusterkit.agent.membership`)."""

    address: str | Var
    port: int
    rejoin: float = 0.0
    """Seconds within which a lost node may come back; 0: a lost node ends the run."""


@dataclass(frozen=True)
class Assembly:
    """Files and command that are the same on every node."""

    files: tuple[PlanFile, ...]
    notes: tuple[Note, ...]
    command: tuple[str, ...]
    """Starts one node; its rank is the environment variable NODE_RANK."""
    secrets: tuple[str, ...]
    """Names of secret variables of each node: the job's, and the agents' common token."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a job's nodes run and how their ranks find each other, as a backend decides.

    A backend that does not start its nodes one by one overrides `files` and `steps`.
    """

    job: JobSpec
    """The job, with the program's path on the nodes."""
    topology: Topology
    endpoint: Endpoint
    places: NodePaths
    device: str
    threads: int
    where: str
    """The end of the plan's summary, such as ``on this machine``."""
    hosts: tuple[str, ...]
    """The transport's name of each node's host, by node rank, then those of the spares; several
    nodes may have the same host."""
    names: tuple[str, ...]
    """The launchers' name of each node's host, by node rank, for the hostfile."""
    cluster: ClusterSpec
    """The cluster's entry."""
    network_env: Mapping[str, str]
    """Variables that choose the network interface; ``env`` of cluster and job override them."""
    node_env: tuple[Mapping[str, str], ...] = ()
    """Variables of one node each, in the order of ``hosts``."""
    coordinator: Coordinator | None = None
    """None: the nodes do not watch each other."""
    container: bool = False
    """Whether each node is a container, whose output has to contain the node's log."""
    mpi_interface: str | None = None
    """Network interface for deepspeed that starts the ranks of all nodes from node 0, with mpirun;
    None: each node starts its own."""
    trees: tuple[Tree, ...] = ()
    tree_python: str | None = None
    """Interpreter that unpacks the trees on ``hosts``; None: the ranks' interpreter."""
    notes: tuple[Note, ...] = ()
    """Where the values above come from."""
    remarks: tuple[Note, ...] = ()
    """Notes that are shown last."""
    rejoin: bool = False
    replace_lost: bool = False
    native: Native | None = None

    @property
    def starter(self) -> Launcher:
        """Return the launcher that starts the ranks: mpirun, if deepspeed starts it."""
        return self.job.started_by if self.mpi_interface is None else "mpirun"

    @property
    def forked(self) -> int | None:
        """Return how many words of the ranks' command are Python and its options, which the fork
        server replaces; None: the ranks are not forked."""
        return interpreter_words(self.job) if self.starter == "forkserver" else None

    @property
    def launchers(self) -> int:
        """Return how many nodes are started; mpirun starts the ranks of all nodes from one."""
        return 1 if self.starter == "mpirun" else self.topology.nodes + self.job.spares

    @property
    def restarts(self) -> int:
        """Return how often the agents restart all ranks; 0 if they do not watch each other."""
        together = self.launchers == 1 or self.coordinator is not None
        return self.job.restarts if together and not self.torch_elastic else 0

    @property
    def watched(self) -> bool:
        """Return whether agents watch ranks and each other; mpirun and torchrun watch their own."""
        return self.starter != "mpirun" and not self.torch_elastic

    @property
    def torch_elastic(self) -> bool:
        """Return whether torchrun itself restarts the ranks, with a changing number of nodes."""
        return self.topology.elastic and not self.job.shrinks

    def files(self, assembly: Assembly) -> tuple[PlanFile, ...]:
        """Return the plan's files."""
        return assembly.files

    def steps(self, assembly: Assembly) -> tuple[Step, ...]:
        """Return the plan's commands."""
        return tuple(
            Step(
                kind="start",
                host=self.hosts[node],
                node=node,
                argv=assembly.command,
                env={"NODE_RANK": str(node), **(self.node_env[node] if self.node_env else {})},
                secrets=assembly.secrets,
            )
            for node in range(self.launchers)
        )

    def plan(self, backend: str, facts: Facts | None = None) -> Plan:
        """Return the plan. Raises as `assemble`."""
        assembly, topology, address = assemble(self), self.topology, self.endpoint.address
        spares = f" and {pluralize(self.job.spares, 'spare')}" if self.job.spares else ""
        return Plan(
            run_id=self.endpoint.run_id,
            run_dir=self.places.run_dir,
            backend=backend,
            summary=f"{topology}{spares} {self.where}, started by {self.job.started_by}; "
            f"world size {topology.world_size}",
            notes=(*self.notes, *_threads_notes(self, facts), *assembly.notes, *self.remarks),
            trees=self.trees,
            files=self.files(assembly),
            steps=self.steps(assembly),
            hosts=self.hosts,
            nodes=self.launchers,
            world_size=topology.world_size,
            topology=dataclasses.asdict(topology),
            device=self.device,
            address=f"${address.name}" if isinstance(address, Var) else address,
            port=self.endpoint.port,
            python=self.tree_python or self.places.python,
            shared=self.places.shared or "",
            stop_grace=self.cluster.stop_grace,
            lost_after=self.cluster.lost_after,
            restarts=self.restarts,
            rejoin=self.rejoin,
            replace_lost=self.replace_lost,
            native=self.native,
            job=copy.deepcopy(self.job),  # its mappings may be changed later
        )


def assemble(placement: Placement) -> Assembly:
    """Return the files, the notes and the command of one node.

    Raises:
        BadInput: batch sizes that do not divide, a variable in ``env`` that clusterkit sets, an
            unknown ``${clusterkit.NAME}``.
    """
    job, topology, places = placement.job, placement.topology, placement.places
    if job.retry_on and job.restarts and not placement.restarts:
        raise BadInput(
            "retry_on: these nodes do not restart failed ranks themselves",
            hint="it needs a fixed number of nodes",
            job="retry_on",
        )
    sizes, batch_notes = solve_batch(job, topology)
    launcher, origin = launcher_of(job)
    notes = [
        Note("launcher", launcher, origin),
        Note("python", places.python, places.python_origin),
        *batch_notes,
    ]
    files: list[PlanFile] = []
    run_env = _run_environment(placement, sizes)
    if job.deepspeed is not None:
        config, deepspeed_notes = deepspeed_config(job.deepspeed, sizes, elastic=topology.elastic)
        notes += deepspeed_notes
        text = msgspec.json.format(msgspec.json.encode(config), indent=2).decode() + "\n"
        files.append(PlanFile(run_env["CLUSTERKIT_DEEPSPEED_CONFIG"], text=text))
    env = _environment(placement, run_env)
    files.append(PlanFile(places.file(ARCHIVE), resource=ARCHIVE))
    if launcher in ("deepspeed", "mpirun"):
        text = hostfile(placement.names, topology.nproc_per_node)
        files.append(PlanFile(places.file("hostfile"), text=text))
    commands = [words := program_argv(job, places.python, run_env, topology)]
    if placement.forked is None:
        rank_sh = PlanFile(
            places.file("rank.sh"),
            text=rank_script(placement.starter, topology, places.python, words, job.restarts),
            mode=0o755,
        )
        files.append(rank_sh)
        start = launcher_argv(
            launcher,
            topology,
            placement.endpoint,
            python=places.python,
            hostfile=places.file("hostfile"),
            exports=[*env, *job.secrets],
            stop_grace=placement.cluster.stop_grace,
            mpi_interface=placement.mpi_interface,
        )
        commands = [start, ["/bin/sh", rank_sh.path]]
    agent = _agent_argv(placement)
    script = _node_script(placement, env, [agent, *commands])
    node_sh = PlanFile(places.file("node.sh"), text=script, mode=0o755)
    secrets = (*job.secrets, PEER_TOKEN) if COORDINATOR in env else job.secrets
    return Assembly((node_sh, *files), tuple(notes), ("/bin/sh", node_sh.path), secrets)


def _environment(placement: Placement, run_env: Mapping[str, str]) -> dict[str, Word]:
    """Return what the node script exports; a later source overrides an earlier one.

    Raises:
        BadInput: a variable in ``env`` that only clusterkit may set.
    """
    job = placement.job
    given = {**placement.cluster.env, **job.env}
    if clash := sorted((RESERVED_VARIABLES | run_env.keys()) & given.keys()):
        with error_key("job" if clash[0] in job.env else "cluster", "env", clash[0]):
            raise BadInput(f"env.{clash[0]}: clusterkit sets it", f"take {clash[0]} out of env")
    return {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": _threads(placement),
        **_accelerate_environment(job, placement.device),
        **placement.network_env,
        **given,
        **node_environment(placement.starter, placement.topology, placement.endpoint),
        **({"TORCHELASTIC_MAX_RESTARTS": str(job.restarts)} if placement.forked else {}),
        **run_env,
        **_coordinator_address(placement),
    }


def _coordinator_address(placement: Placement) -> dict[str, Word]:
    """Return where node 0's agent listens, for nodes that watch each other."""
    coordinator = placement.coordinator
    if coordinator is None or not placement.watched or placement.launchers == 1:
        return {}
    return {COORDINATOR: Concat((coordinator.address, f":{coordinator.port}"))}


def _threads(placement: Placement) -> Word:
    threads = str(placement.threads)
    # As torchrun: what the node's environment says stays.
    auto = placement.job.threads_per_rank == "auto"
    return Default("OMP_NUM_THREADS", threads) if auto else threads


def _threads_notes(placement: Placement, facts: Facts | None) -> list[Note]:
    """Return where OMP_NUM_THREADS comes from if not from the number of cores."""
    name, job = "OMP_NUM_THREADS", placement.job
    for env, origin in ((job.env, "job: env"), (placement.cluster.env, "cluster: env")):
        if name in env:
            return [Note(name, env[name], origin)]
    found = {host.omp_num_threads: host.host for host in (facts.hosts if facts else ())}
    origin = "the environment of {}; --set threads_per_rank=N sets another"
    kept = job.threads_per_rank == "auto"
    return [Note(name, n, origin.format(host)) for n, host in found.items() if n and kept]


def _run_environment(placement: Placement, sizes: Batch | None) -> dict[str, str]:
    job, topology, places = placement.job, placement.topology, placement.places
    env = {
        "CLUSTERKIT_RUN_ID": placement.endpoint.run_id,
        "CLUSTERKIT_RUN_DIR": places.run_dir,
        "CLUSTERKIT_JOB": job.name,
        "CLUSTERKIT_DEVICE": placement.device,
    }
    env |= batch_environment(job, sizes, elastic=topology.elastic)
    if job.checkpoint is not None:
        # A relative folder lies in the run's, so that two runs never share one by accident.
        folder = job.checkpoint.dir
        if "://" not in folder:
            folder = posixpath.join(places.shared or places.run_dir, folder)
        env |= {
            "CLUSTERKIT_CHECKPOINT_DIR": folder,
            "CLUSTERKIT_CHECKPOINT_EVERY": str(job.checkpoint.every),
            "CLUSTERKIT_CHECKPOINT_KEEP": str(job.checkpoint.keep),
            "CLUSTERKIT_CHECKPOINT_RESUME": job.checkpoint.resume,
        }
    if job.deepspeed is not None:
        env["CLUSTERKIT_DEEPSPEED_CONFIG"] = places.file("deepspeed.json")
        if placement.device == "cpu":
            env["DS_ACCELERATOR"] = "cpu"
    return env


def _accelerate_environment(job: JobSpec, device: str) -> dict[str, str]:
    """Return what makes accelerate's ranks on CPUs one world; by default each is its own."""
    words = (job.started_by, *job.args, *(job.command or ()))
    # Not with DeepSpeed: transformers' Trainer would silently skip it (5.0, training_args.py).
    if device != "cpu" or job.deepspeed is not None or any("deepspeed" in w for w in words):
        return {}
    return {"ACCELERATE_USE_CPU": "true"}


def _agent_argv(placement: Placement) -> list[Word]:
    """Return the node agent's command, up to the launcher's or the program's own."""
    job, topology, places = placement.job, placement.topology, placement.places
    # mpirun starts the ranks of all nodes from the first.
    nproc = topology.world_size if placement.starter == "mpirun" else topology.nproc_per_node
    nodes = placement.launchers - job.spares
    argv: list[Word] = [
        places.python, "-I", places.file(ARCHIVE), "run", "--nproc", str(nproc),
        "--nodes", str(nodes), "--workdir", places.workdir,
        "--grace", f"{placement.cluster.stop_grace:g}",
    ]  # fmt: skip
    if placement.restarts:
        argv += ["--restarts", str(placement.restarts)]
    if (hang := job.hang_seconds) is not None:
        argv += ["--hang-timeout", f"{hang:g}"]
    if placement.restarts and job.retry_on:
        argv += ["--retry-on", ",".join(map(str, job.retry_on))]
    if placement.container:
        argv += ["--echo", "--last-words", TERMINATION_LOG]
    if job.limit_seconds:
        argv += ["--time-limit", f"{job.limit_seconds:.10g}"]
    if placement.forked is not None:
        argv += ["--fork", str(placement.forked)]
        if job.preload is not None:
            argv += ["--preload", ",".join(job.preload)]
        if job.bind == "none":
            argv += ["--bind", "none"]
    elif placement.starter == "forkserver":
        argv += ["--spawn"]
    elif placement.starter == "mpirun":
        argv += ["--tagged"]
    return [*argv, *_coordinator_options(placement), "--"]


def _coordinator_options(placement: Placement) -> list[Word]:
    """Return the agent's options for watching other nodes."""
    job, topology, coordinator = placement.job, placement.topology, placement.coordinator
    if coordinator is None or not placement.watched:
        return []
    options: list[Word] = []
    if placement.launchers > 1:
        options += ["--lost-after", f"{placement.cluster.lost_after:g}"]
    changes: list[Word] = []
    if job.shrinks and topology.elastic:
        changes += ["--min-nodes", str(topology.min_nodes)]
    if job.spares:
        changes += ["--spares", str(job.spares)]
    # By the end of that time a disconnected node has given node 0 up and ended its own ranks.
    changed_after = placement.cluster.stop_grace + SHRINK_SECONDS
    if rejoin := changed_after if changes else coordinator.rejoin:
        options += ["--rejoin", f"{rejoin:g}"]
    return [*options, *changes]


def _node_script(
    placement: Placement, env: Mapping[str, Word], commands: Sequence[Sequence[Word]]
) -> str:
    topology, places = placement.topology, placement.places
    lines = " \\\n    ".join(shell.join(words) for words in commands if words)
    # A plan for GPUs hands CLUSTERKIT_GPUS to each node by its step.
    stale = (
        VARIABLES_TO_UNSET
        if placement.device == "cuda"
        else (*VARIABLES_TO_UNSET, "CLUSTERKIT_GPUS")
    )
    is_host = (
        f'{IS_HOST.name}=0; if [ "$NODE_RANK" = 0 ]; then {IS_HOST.name}=1; fi\n'
        f'{NODE_ADDRESS.name}="${{{NODE_ADDRESS.name}:-$MASTER_ADDR}}"\n'
    )
    output = "" if placement.container else f'>>"${NODE_DIR.name}/agent.log" '
    return (
        "#!/bin/sh\n"
        f"# one node of {topology}, started on each as: NODE_RANK=n sh node.sh\n"
        "set -u\n"
        'CLUSTERKIT_ATTEMPT="${CLUSTERKIT_ATTEMPT:-1}"\n'
        f"{NODE_DIR.name}={shell.quote(places.run_dir)}"
        '"/attempts/$CLUSTERKIT_ATTEMPT/node-$NODE_RANK"\n'
        "boot=; read -r boot </proc/sys/kernel/random/boot_id\n"
        f'mkdir -p "${NODE_DIR.name}" && echo "$$ $boot" >"${NODE_DIR.name}/pid" || exit 73\n'
        f"exec </dev/null {output}2>&1\n"
        f"unset {' '.join(stale)}\n"
        f"export NODE_RANK {NODE_DIR.name} CLUSTERKIT_ATTEMPT\n{shell.exports(env)}"
        f"{is_host if placement.torch_elastic else ''}"
        f"exec {lines}\n"
    )


def require_packages(
    job: JobSpec, host: HostFacts, where: str | None = None, hint: str | None = None
) -> None:
    """Check that the host has the packages and tools that the job's launcher and config need.

    Args:
        where: what contains that Python, such as an image; by default the host.
        hint: the remedy; by default to install the package on the host.

    Raises:
        BadInput: the job names another interpreter than the one that was probed.
        Unavailable: a package or a tool is missing.
    """
    if job.python not in (None, host.python, posixpath.basename(host.python)):
        raise BadInput(
            f"python: {job.python}, but --facts is of {host.python}",
            hint="without --facts the hosts are probed with the job's interpreter",
            job="python",
        )
    packages = {"torchrun": "torch", "deepspeed": "deepspeed"}
    needed = [(packages[name], f"launcher: {name}") for name in packages if name == job.started_by]
    if job.deepspeed is not None:
        needed.append(("deepspeed", "the job's deepspeed section"))
    for package, why in needed:
        if package not in host.versions:
            raise Unavailable(
                f"{why} needs {package}, which {host.python} on {where or host.host} does not have",
                hint=hint or f"{host.python} -m pip install 'clusterkit[train]'",
            )
    if job.started_by == "mpirun" and "mpirun" not in host.tools:
        raise Unavailable(
            f"launcher: mpirun needs Open MPI, which {where or host.host} does not have",
            hint=hint or "apt-get install openmpi-bin",
        )
