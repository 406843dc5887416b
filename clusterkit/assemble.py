"""From a job to what a node runs, the same for every backend: environment, files, command.

A backend decides where things lie, how many nodes and ranks there are and how a node
learns its rank; everything a rank sees follows from that here. Pure.
"""

from __future__ import annotations

import copy
import dataclasses
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from clusterkit import shell
from clusterkit.agent import PEER_TOKEN
from clusterkit.agent.archive import ARCHIVE
from clusterkit.batch import Batch
from clusterkit.cluster import ClusterSpec, HostFacts
from clusterkit.errors import BadInput, Unavailable, about, counted
from clusterkit.plan import Native, Note, Plan, PlanFile, Step, Tree
from clusterkit.program import deepspeed_config, interpreter_words, program_argv, solve_batch
from clusterkit.rendezvous import (
    IS_HOST,
    NODE_ADDRESS,
    NODE_DIR,
    RESET,
    Endpoint,
    Topology,
    hostfile,
    launcher_argv,
    node_environment,
    rank_script,
)
from clusterkit.shell import Joined, Var, Word
from clusterkit.spec import JobSpec, Launcher, launcher_of

OWNED = frozenset({
    "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE",
    "LOCAL_WORLD_SIZE", "CLUSTERKIT_ATTEMPT", "CLUSTERKIT_GPUS", "CLUSTERKIT_PIPE",
    IS_HOST.name, NODE_ADDRESS.name, NODE_DIR.name, PEER_TOKEN,
})  # fmt: skip
"""Variables that only clusterkit may set, besides those of the run itself."""
SHRINK_SECONDS = 5.0
"""How long a lost node is waited for before the run goes on without, beyond its ranks' grace."""
LAST_WORDS = "/dev/termination-log"
"""Where Kubernetes takes a container's last words from."""


@dataclass(frozen=True)
class Places:
    """Absolute paths on the nodes."""

    run_dir: str
    workdir: str
    python: str
    shared: str | None = None
    """A folder of this run's on a disk that all nodes share, if there is one."""
    python_origin: str = ""
    """Why this interpreter, in words."""

    def file(self, name: str) -> str:
        return posixpath.join(self.run_dir, "files", name)


@dataclass(frozen=True)
class Watching:
    """How the nodes watch each other (`clusterkit.agent.membership`)."""

    address: str | Var
    port: int
    rejoin: float = 0.0
    """Seconds that a lost node has to come back; 0: it ends the run."""

    def arguments(self, nodes: int, lost_after: float) -> list[Word]:
        """For the node agent."""
        found: list[Word] = []
        if nodes > 1:
            found += ["--coordinator", Joined((self.address, f":{self.port}"))]
            found += ["--lost-after", f"{lost_after:g}"]
        return [*found, *(["--rejoin", f"{self.rejoin:g}"] if self.rejoin else [])]


@dataclass(frozen=True)
class Assembly:
    """What every node gets."""

    files: tuple[PlanFile, ...]
    notes: tuple[Note, ...]
    command: tuple[str, ...]
    """Starts one node, with NODE_RANK in the environment."""
    secrets: tuple[str, ...]
    """Variables that each node is started with besides: the job's, and the agents' own."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a job's nodes run and how their ranks find each other: all that backends decide.

    The rest of the plan follows from it. A backend whose nodes are not simply started, one by one,
    derives a class of its own with other `files` and `steps`.
    """

    job: JobSpec
    """With its program's path on the nodes."""
    topology: Topology
    endpoint: Endpoint
    places: Places
    device: str
    threads: int
    where: str
    """For the plan's summary, such as ``on this machine``."""
    hosts: tuple[str, ...]
    """By node rank, what the transport calls them, and then the spares; several may be on one."""
    names: tuple[str, ...]
    """By node rank, what launchers call them, for the hostfile."""
    cluster: ClusterSpec
    """The entry: its environment, after which the job's own goes, and its patience."""
    network_env: Mapping[str, str]
    """Which network interface to use; both go before it."""
    node_env: tuple[Mapping[str, str], ...] = ()
    """As `hosts`, what only that node gets."""
    watching: Watching | None = None
    """How the nodes watch each other; None: somebody else does."""
    container: bool = False
    """Whether a node's output is what becomes of it: its log goes there as well."""
    warm: float = 0.0
    """Seconds that what ranks are forked from stays for another run; 0: it ends with its own."""
    mpi_interface: str | None = None
    """Network interface of deepspeed's ranks where it starts those of all nodes with mpirun, from
    node 0; None: each node starts its own."""
    trees: tuple[Tree, ...] = ()
    tree_python: str | None = None
    """What takes them apart on ``hosts``; None: the ranks' interpreter."""
    notes: tuple[Note, ...] = ()
    """Where the values above come from."""
    remarks: tuple[Note, ...] = ()
    """Notes that stand last."""
    rejoin: bool = False
    replace_lost: bool = False
    native: Native | None = None

    @property
    def starter(self) -> Launcher:
        """What in the end starts the ranks."""
        return self.job.started_by if self.mpi_interface is None else "mpirun"

    @property
    def forked(self) -> int | None:
        """How many words of the ranks' command are a Python that they are forked from; None: they
        are not."""
        return interpreter_words(self.job) if self.starter == "forkserver" else None

    @property
    def launchers(self) -> int:
        """How many nodes are started: mpirun starts the ranks of all nodes from the first."""
        return 1 if self.starter == "mpirun" else self.topology.nodes + self.job.spares

    @property
    def restarts(self) -> int:
        """How often the agents start all ranks again; nodes that do not watch each other cannot."""
        together = self.launchers == 1 or self.watching is not None
        return self.job.restarts if together and not self.torch_elastic else 0

    @property
    def torch_elastic(self) -> bool:
        """Whether launchers watch each other, and have restarts of their own."""
        return self.topology.elastic and not self.job.shrinks

    def files(self, assembly: Assembly) -> tuple[PlanFile, ...]:
        """The plan's files."""
        return assembly.files

    def steps(self, assembly: Assembly) -> tuple[Step, ...]:
        """The plan's commands."""
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

    def plan(self, backend: str) -> Plan:
        """What submitting does; see `assemble` for the errors."""
        assembly, topology, address = assemble(self), self.topology, self.endpoint.address
        spares = f" and {counted(self.job.spares, 'spare')}" if self.job.spares else ""
        return Plan(
            run_id=self.endpoint.run_id,
            run_dir=self.places.run_dir,
            backend=backend,
            summary=f"{topology}{spares} {self.where}, started by {self.job.started_by}; "
            f"world size {topology.world_size}",
            notes=(*self.notes, *assembly.notes, *self.remarks),
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
    """Files, notes and the command of one node.

    Raises:
        BadInput: batch sizes that do not divide, a variable that is clusterkit's to set, an
            unknown ``${clusterkit.NAME}``.
    """
    job, topology, places = placement.job, placement.topology, placement.places
    starter, watching = placement.starter, placement.watching
    if job.retry_on and job.restarts and not placement.restarts:
        raise BadInput(
            "retry_on: these nodes do not start failed ranks again by themselves",
            hint="it needs a fixed number of nodes",
            job="retry_on",
        )
    sizes, notes = solve_batch(job, topology)
    launcher, origin = launcher_of(job)
    notes = [
        Note("launcher", launcher, origin),
        Note("python", places.python, places.python_origin),
        *notes,
    ]
    files: list[PlanFile] = []
    run_env = _run_environment(placement, sizes)
    if job.deepspeed is not None:
        path = places.file("deepspeed.json")
        config, deepspeed_notes = deepspeed_config(job.deepspeed, sizes, elastic=topology.elastic)
        notes += deepspeed_notes
        text = msgspec.json.format(msgspec.json.encode(config), indent=2).decode() + "\n"
        files.append(PlanFile(path, text=text))
        run_env["CLUSTERKIT_DEEPSPEED_CONFIG"] = path
        if placement.device == "cpu":
            run_env["DS_ACCELERATOR"] = "cpu"
    given = {**placement.cluster.env, **job.env}
    if clash := sorted((OWNED | run_env.keys()) & given.keys()):
        with about("job" if clash[0] in job.env else "cluster", "env", clash[0]):
            raise BadInput(f"env.{clash[0]}: clusterkit sets it", f"take {clash[0]} out of env")
    env: dict[str, Word] = {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(placement.threads),
        **_accelerate_environment(job, placement.device),
        **placement.network_env,
        **given,
        **node_environment(starter, topology, placement.endpoint),
        **run_env,
    }
    files.append(PlanFile(places.file(ARCHIVE), resource=ARCHIVE))
    if launcher in ("deepspeed", "mpirun"):
        text = hostfile(placement.names, topology.nproc_per_node)
        files.append(PlanFile(places.file("hostfile"), text=text))
    program = program_argv(job, places.python, run_env, topology)
    how: list[Word] = []
    if placement.forked is not None:
        how = ["--fork", str(placement.forked)]
        if placement.warm:
            how += ["--warm", f"{placement.warm:g}"]
        commands = [program]
    else:
        script = rank_script(starter, topology, places.python)
        files.append(PlanFile(places.file("rank.sh"), text=script, mode=0o755))
        if launcher == "forkserver":
            how = ["--spawn"]
        elif starter == "mpirun":
            how = ["--tagged"]
        command = launcher_argv(
            launcher,
            topology,
            placement.endpoint,
            python=places.python,
            hostfile=places.file("hostfile"),
            exports=[*env, *job.secrets],
            stop_grace=placement.cluster.stop_grace,
            mpi_interface=placement.mpi_interface,
        )
        commands = [command, ["/bin/sh", places.file("rank.sh"), *program]]
    watch: list[Word] = []
    if watching is not None and starter != "mpirun" and not placement.torch_elastic:
        if job.shrinks and topology.elastic:
            watch = ["--min-nodes", str(topology.min_nodes)]
        watch += ["--spares", str(job.spares)] if job.spares else []
        if watch:
            # Until then a node that is cut off has given node 0 up, and ended its ranks.
            wait = placement.cluster.stop_grace + SHRINK_SECONDS
            watching = dataclasses.replace(watching, rejoin=wait)
        lost_after = placement.cluster.lost_after
        watch = [*watching.arguments(placement.launchers, lost_after), *watch]
    script = _node_script(placement, env, commands, [*how, *watch])
    node_sh = PlanFile(places.file("node.sh"), text=script, mode=0o755)
    secrets = (*job.secrets, PEER_TOKEN) if "--coordinator" in watch else job.secrets
    return Assembly((node_sh, *files), tuple(notes), ("/bin/sh", node_sh.path), secrets)


def _run_environment(placement: Placement, sizes: Batch | None) -> dict[str, str]:
    job, topology, places = placement.job, placement.topology, placement.places
    env = {
        "CLUSTERKIT_RUN_ID": placement.endpoint.run_id,
        "CLUSTERKIT_RUN_DIR": places.run_dir,
        "CLUSTERKIT_JOB": job.name,
        "CLUSTERKIT_DEVICE": placement.device,
    }
    if sizes is not None:
        if not topology.elastic or (job.batch and job.batch.global_size):
            env["CLUSTERKIT_GLOBAL_BATCH"] = str(sizes.global_size)
        if not topology.elastic or (job.batch and job.batch.micro):
            env["CLUSTERKIT_MICRO_BATCH"] = str(sizes.micro)
        if not topology.elastic:
            env["CLUSTERKIT_ACCUMULATION"] = str(sizes.accumulation)
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
    return env


def _accelerate_environment(job: JobSpec, device: str) -> dict[str, str]:
    """Makes one world of accelerate's ranks on CPUs, which without it are N worlds of one."""
    words = (job.started_by, *job.args, *(job.command or ()))
    # With it, transformers' Trainer leaves DeepSpeed out without a word (5.0, training_args.py).
    if device != "cpu" or job.deepspeed is not None or any("deepspeed" in w for w in words):
        return {}
    return {"ACCELERATE_USE_CPU": "true"}


def _node_script(
    placement: Placement,
    env: Mapping[str, Word],
    command: Sequence[Sequence[Word]],
    options: Sequence[Word],
) -> str:
    topology, places, container = placement.topology, placement.places, placement.container
    # mpirun starts the ranks of all nodes from the first.
    nproc = topology.nproc_per_node if placement.starter != "mpirun" else topology.world_size
    hang = placement.job.hang_seconds
    agent: list[Word] = [
        places.python, "-I", places.file(ARCHIVE), "run", "--nproc", str(nproc),
        "--nodes", str(placement.launchers - placement.job.spares), "--workdir", places.workdir,
        "--grace", f"{placement.cluster.stop_grace:g}",
        *(["--restarts", str(placement.restarts)] if placement.restarts else []),
        *(["--hang-timeout", f"{hang:g}"] if hang is not None else []),
        *(["--retry-on", ",".join(map(str, placement.job.retry_on))] if placement.restarts and
          placement.job.retry_on else []),
        *(["--echo", "--last-words", LAST_WORDS] if container else []),
        *(["--time-limit", f"{placement.job.limit_seconds:.10g}"]
          if placement.job.limit_seconds else []),
        *options, "--",
    ]  # fmt: skip
    lines = " \\\n    ".join(shell.join(words) for words in (agent, *command) if words)
    # A plan for GPUs hands CLUSTERKIT_GPUS to each node by its step.
    stale = RESET if placement.device == "cuda" else (*RESET, "CLUSTERKIT_GPUS")
    is_host = (
        f'{IS_HOST.name}=0; if [ "$NODE_RANK" = 0 ]; then {IS_HOST.name}=1; fi\n'
        f'{NODE_ADDRESS.name}="${{{NODE_ADDRESS.name}:-$MASTER_ADDR}}"\n'
    )
    output = "" if container else f'>>"${NODE_DIR.name}/agent.log" '
    return (
        "#!/bin/sh\n"
        f"# one node of {topology}, started on each as: NODE_RANK=n sh node.sh\n"
        "set -u\n"
        'CLUSTERKIT_ATTEMPT="${CLUSTERKIT_ATTEMPT:-1}"\n'
        f"{NODE_DIR.name}={shell.quote(places.run_dir)}"
        '"/attempts/$CLUSTERKIT_ATTEMPT/node-$NODE_RANK"\n'
        f'mkdir -p "${NODE_DIR.name}" && echo "$$" >"${NODE_DIR.name}/pid" || exit 73\n'
        f"exec </dev/null {output}2>&1\n"
        f"unset {' '.join(stale)}\n"
        f"export NODE_RANK {NODE_DIR.name} CLUSTERKIT_ATTEMPT\n{shell.exports(env)}"
        f"{is_host if placement.torch_elastic else ''}"
        f"exec {lines}\n"
    )


def require_packages(
    job: JobSpec, host: HostFacts, where: str | None = None, hint: str | None = None
) -> None:
    """Refuse a job whose launcher or config needs what the host's Python lacks.

    Args:
        where: what holds that Python; by default the host.
        hint: the remedy; by default to install it there.

    Raises:
        BadInput: the job names another interpreter than the one that was looked at.
        Unavailable: names the package or tool, the interpreter and the remedy.
    """
    needed = []
    if job.python not in (None, host.python, posixpath.basename(host.python)):
        raise BadInput(
            f"python: {job.python}, but the facts are of {host.python}",
            hint="leave --facts out: the hosts are probed with the job's interpreter then",
            job="python",
        )
    if job.started_by == "torchrun":
        needed.append(("torch", "launcher: torchrun"))
    if job.started_by == "deepspeed":
        needed.append(("deepspeed", "launcher: deepspeed"))
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
