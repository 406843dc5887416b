"""From a job to what a node runs, the same for every backend: environment, files, command.

A backend decides where things lie, how many nodes and ranks there are and how a node
learns its rank; everything a rank sees follows from that here. Pure.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from clusterkit import batch as batches
from clusterkit import shell
from clusterkit.agent import PEER_TOKEN
from clusterkit.batch import Batch
from clusterkit.cluster import HostFacts
from clusterkit.command import PYTHONS
from clusterkit.errors import BadInput, Unavailable, about
from clusterkit.plan import Note, PlanFile
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
from clusterkit.shell import Word
from clusterkit.spec import JobSpec, Launcher

OWNED = frozenset({
    "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE",
    "LOCAL_WORLD_SIZE", "CLUSTERKIT_ATTEMPT", "CLUSTERKIT_GPUS", "CLUSTERKIT_PIPE",
    IS_HOST.name, NODE_ADDRESS.name, NODE_DIR.name, PEER_TOKEN,
})  # fmt: skip
"""Variables that only clusterkit may set, besides those of the run itself."""
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

    def checkpoints(self, job: JobSpec) -> str | None:
        """A relative folder lies in the run's, so that two runs never share one by accident."""
        if job.checkpoint is None:
            return None
        return posixpath.join(self.shared or self.run_dir, job.checkpoint.dir)


@dataclass(frozen=True)
class Peers:
    """How the nodes watch each other (`clusterkit.agent.Peers`)."""

    address: str
    port: int
    lost_after: float
    rejoin: float | None = None
    """Seconds that a lost node has to come back; None: it ends the run."""

    def arguments(self, topology: Topology) -> list[str]:
        """For the node agent. An elastic run's launchers watch each other."""
        found: list[str] = []
        if not topology.elastic and topology.nodes > 1:
            found += ["--peers", f"{self.address}:{self.port}"]
            found += ["--nodes", str(topology.nodes), "--lost-after", f"{self.lost_after:g}"]
        if not topology.elastic and self.rejoin is not None:
            found += ["--rejoin", f"{self.rejoin:g}"]
        return found


@dataclass(frozen=True)
class Assembly:
    """What every node gets."""

    files: tuple[PlanFile, ...]
    notes: tuple[Note, ...]
    command: tuple[str, ...]
    """Starts one node, with NODE_RANK in the environment."""
    secrets: tuple[str, ...]
    """Variables that each node is started with besides: the job's, and the agents' own."""


def assemble(
    job: JobSpec,
    *,
    topology: Topology,
    endpoint: Endpoint,
    places: Places,
    device: str,
    threads: int,
    hosts: Sequence[str],
    cluster_env: Mapping[str, str],
    network_env: Mapping[str, str],
    stop_grace: float,
    peers: Peers | None = None,
    container: bool = False,
    mpi_interface: str | None = None,
) -> Assembly:
    """Files, notes and the command of one node.

    Args:
        hosts: one name per node, for the hostfile.
        cluster_env: environment of the cluster entry; the job's own goes first.
        network_env: which interface to use; both go before it.
        peers: how the nodes watch each other; None: somebody else does.
        container: a node's output is what becomes of it: its log goes there as well.
        mpi_interface: network interface of deepspeed's ranks where it starts those of all nodes
            with mpirun, from node 0; None: each node starts its own.

    Raises:
        BadInput: batch sizes that do not divide, a variable that is clusterkit's to set, an
            unknown ``${clusterkit.NAME}``.
    """
    starter: Launcher = job.launcher if mpi_interface is None else "mpirun"
    sizes, notes = solve_batch(job, topology)
    notes = [Note("python", places.python, places.python_origin), *notes]
    files: list[PlanFile] = []
    run_env = _run_environment(job, topology, endpoint, places, device, sizes)
    if job.deepspeed is not None:
        path = places.file("deepspeed.json")
        config, deepspeed_notes = deepspeed_config(job.deepspeed, sizes, elastic=topology.elastic)
        notes += deepspeed_notes
        files.append(PlanFile(path, text=_pretty(config)))
        run_env["CLUSTERKIT_DEEPSPEED_CONFIG"] = path
        if device == "cpu":
            run_env["DS_ACCELERATOR"] = "cpu"
    env = {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        **_accelerate_environment(job, device),
        **network_env,
        **cluster_env,
        **job.env,
        **node_environment(starter, topology, endpoint),
        **run_env,
    }
    if clash := sorted((OWNED | run_env.keys()) & {*cluster_env, *job.env}):
        with about("job" if clash[0] in job.env else "cluster", "env", clash[0]):
            raise BadInput(f"env.{clash[0]}: clusterkit sets it", f"take {clash[0]} out of env")
    program = program_argv(job, places.python, run_env, topology)
    files += [
        PlanFile(
            places.file("rank.sh"), text=rank_script(starter, topology, places.python), mode=0o755
        ),
        PlanFile(places.file("agent.py"), resource="agent.py"),
    ]
    if job.launcher in ("deepspeed", "mpirun"):
        files.append(
            PlanFile(places.file("hostfile"), text=hostfile(hosts, topology.nproc_per_node))
        )
    rank_command = ["/bin/sh", places.file("rank.sh"), *program]
    argv = launcher_argv(
        job.launcher,
        topology,
        endpoint,
        python=places.python,
        rank_command=rank_command,
        hostfile=places.file("hostfile"),
        exports=[*env, *job.secrets],
        stop_grace=stop_grace,
        mpi_interface=mpi_interface,
    )
    launcher = argv[: len(argv) - len(rank_command)]
    watching = [] if peers is None or starter == "mpirun" else peers.arguments(topology)
    script = _node_script(
        starter, topology, places, env, [launcher, rank_command], stop_grace, watching, container
    )
    node_sh = PlanFile(places.file("node.sh"), text=script, mode=0o755)
    secrets = (*job.secrets, PEER_TOKEN) if "--peers" in watching else job.secrets
    return Assembly((node_sh, *files), tuple(notes), ("/bin/sh", node_sh.path), secrets)


def solve_batch(job: JobSpec, topology: Topology) -> tuple[Batch | None, list[Note]]:
    """The job's batch sizes for the full world; an elastic job must divide for every size of it."""
    if job.batch is None:
        return None, []
    asked = job.batch
    solved = None
    for nodes in range(topology.min_nodes, topology.nodes + 1):
        solved = batches.solve(
            data_parallel=nodes * topology.nproc_per_node,
            global_size=asked.global_size,
            micro=asked.micro,
            accumulation=asked.accumulation,
        )
    assert solved is not None
    if topology.elastic:
        follows = "accumulation" if asked.micro else "micro"
        if asked.global_size is None:
            note = Note("batch", f"micro {solved.micro}", "global follows the world size")
        else:
            note = Note(
                "batch", f"global {solved.global_size}", f"{follows} follows the world size"
            )
    else:
        factors = (solved.micro, solved.accumulation, solved.data_parallel)
        note = Note(
            "batch",
            f"{solved.global_size} = {' x '.join(map(str, factors))}",
            "global = micro x accumulation x ranks",
        )
    return solved, [note]


def deepspeed_config(
    config: Mapping[str, Any], sizes: Batch | None, *, elastic: bool = False
) -> tuple[dict[str, Any], list[Note]]:
    """The job's DeepSpeed config with its batch numbers and an explicit gradient clipping.

    Raises:
        BadInput: the config has batch numbers of its own that differ.
    """
    whole = dict(config)
    notes = []
    numbers = {} if sizes is None else sizes.deepspeed()
    for key, value in numbers.items():
        if whole.get(key, value) not in (value, "auto"):
            raise BadInput(
                f"deepspeed.{key}: {whole[key]}, but batch gives {value}",
                hint=f"leave {key} to `batch`",
                job=("deepspeed", key),
            )
        whole[key] = value
    if elastic and numbers:
        # They change with the world size; each rank's runtime works them out.
        del whole["train_batch_size"], whole["gradient_accumulation_steps"]
    if (place := _not_json(whole, "deepspeed")) is not None:
        raise BadInput(f"{place}: a DeepSpeed config cannot hold NaN or infinity")
    if "gradient_clipping" not in whole:
        whole["gradient_clipping"] = 0.0
        notes.append(
            Note("gradient_clipping", "0.0", "not in the job; DeepSpeed's own default would be 1.0")
        )
    return whole, notes


def _not_json(value: Any, place: str) -> str | None:
    """Where in ``value`` a number stands that JSON has no word for."""
    if isinstance(value, float) and not math.isfinite(value):
        return place
    items: Iterable[tuple[object, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    return next((at for key, inner in items if (at := _not_json(inner, f"{place}.{key}"))), None)


def program_argv(
    job: JobSpec, python: str, run_env: Mapping[str, str], topology: Topology
) -> list[Word]:
    """What one rank executes, with every ``${clusterkit.NAME}`` of its arguments replaced."""
    if job.command is not None:
        words = [python if job.command[0] in PYTHONS else job.command[0], *job.command[1:]]
    elif job.module is not None:
        words = [python, "-u", "-m", job.module]
    else:
        words = [python, "-u", job.program or ""]
    values = {
        "global_batch": run_env.get("CLUSTERKIT_GLOBAL_BATCH"),
        "micro_batch": run_env.get("CLUSTERKIT_MICRO_BATCH"),
        "accumulation": run_env.get("CLUSTERKIT_ACCUMULATION"),
        "deepspeed_config": run_env.get("CLUSTERKIT_DEEPSPEED_CONFIG"),
        "run_id": run_env["CLUSTERKIT_RUN_ID"],
        "run_dir": run_env["CLUSTERKIT_RUN_DIR"],
        "checkpoint_dir": run_env.get("CLUSTERKIT_CHECKPOINT_DIR"),
        "world_size": None if topology.elastic else str(topology.world_size),
    }
    return [*words, *(_replaced(arg, values, job, topology) for arg in job.args)]


def _replaced(arg: str, values: Mapping[str, str | None], job: JobSpec, topology: Topology) -> str:
    out, rest = "", arg
    while (start := rest.find("${clusterkit.")) >= 0 and (end := rest.find("}", start)) >= 0:
        name = rest[start + len("${clusterkit.") : end]
        if name not in values:
            raise BadInput(
                f"args: ${{clusterkit.{name}}} is unknown", hint=", ".join(values), job="args"
            )
        if (value := values[name]) is None:
            raise BadInput(
                f"args: ${{clusterkit.{name}}} has no value in this job",
                hint=_what_gives_value(name, job, topology),
                job="args",
            )
        out, rest = out + rest[:start] + value, rest[end + 1 :]
    return out + rest


def _what_gives_value(name: str, job: JobSpec, topology: Topology) -> str:
    """Why a name of `program_argv` has no value, and what gives it one."""
    size = {"global_batch": "global", "micro_batch": "micro"}.get(name)
    if name == "deepspeed_config":
        return "the job has no `deepspeed` section"
    if name == "checkpoint_dir":
        return "the job has no `checkpoint` section"
    if topology.elastic and (name == "world_size" or job.batch is not None):
        follows = (
            f"nodes: {topology.min_nodes}:{topology.nodes} is elastic, so it changes while the "
            "job runs; "
        )
        if size is not None:
            return f"{follows}`batch: {{{size}: N}}` fixes it"
        return f"{follows}the program works it out from WORLD_SIZE"
    return f"the job has no batch: `batch: {{{size or 'global'}: N}}`"


def _run_environment(
    job: JobSpec,
    topology: Topology,
    endpoint: Endpoint,
    places: Places,
    device: str,
    sizes: Batch | None,
) -> dict[str, str]:
    env = {
        "CLUSTERKIT_RUN_ID": endpoint.run_id,
        "CLUSTERKIT_RUN_DIR": places.run_dir,
        "CLUSTERKIT_JOB": job.name,
        "CLUSTERKIT_DEVICE": device,
    }
    if sizes is not None:
        if not topology.elastic or (job.batch and job.batch.global_size):
            env["CLUSTERKIT_GLOBAL_BATCH"] = str(sizes.global_size)
        if not topology.elastic or (job.batch and job.batch.micro):
            env["CLUSTERKIT_MICRO_BATCH"] = str(sizes.micro)
        if not topology.elastic:
            env["CLUSTERKIT_ACCUMULATION"] = str(sizes.accumulation)
    if job.checkpoint is not None:
        env |= {
            "CLUSTERKIT_CHECKPOINT_DIR": places.checkpoints(job) or "",
            "CLUSTERKIT_CHECKPOINT_EVERY": str(job.checkpoint.every),
            "CLUSTERKIT_CHECKPOINT_KEEP": str(job.checkpoint.keep),
            "CLUSTERKIT_CHECKPOINT_RESUME": job.checkpoint.resume,
        }
    return env


def _accelerate_environment(job: JobSpec, device: str) -> dict[str, str]:
    """Makes one world of accelerate's ranks on CPUs, which without it are N worlds of one."""
    words = (job.launcher, *job.args, *(job.command or ()))
    # With it, transformers' Trainer leaves DeepSpeed out without a word (5.0, training_args.py).
    if device != "cpu" or job.deepspeed is not None or any("deepspeed" in w for w in words):
        return {}
    return {"ACCELERATE_USE_CPU": "true"}


def _node_script(
    starter: Launcher,
    topology: Topology,
    places: Places,
    env: Mapping[str, str],
    command: Sequence[Sequence[Word]],
    stop_grace: float,
    watching: Sequence[str],
    container: bool,
) -> str:
    mpi = starter == "mpirun"
    # mpirun starts the ranks of all nodes from the first.
    nproc = topology.world_size if mpi else topology.nproc_per_node
    agent: list[Word] = [
        places.python, "-I", places.file("agent.py"), "run", "--nproc", str(nproc),
        "--workdir", places.workdir, "--grace", f"{stop_grace:g}",
        *(["--spawn"] if starter == "python" else []),
        *(["--tagged"] if mpi else []),
        *(["--echo", "--last-words", LAST_WORDS] if container else []),
        *watching, "--",
    ]  # fmt: skip
    lines = " \\\n    ".join(shell.join(words) for words in (agent, *command) if words)
    # A plan for GPUs hands CLUSTERKIT_GPUS to each node by its step.
    stale = RESET if env["CLUSTERKIT_DEVICE"] == "cuda" else (*RESET, "CLUSTERKIT_GPUS")
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
        f"{is_host if topology.elastic else ''}"
        f"exec {lines}\n"
    )


def require_packages(job: JobSpec, host: HostFacts) -> None:
    """Refuse a job whose launcher or config needs what the host's Python lacks.

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
    if job.launcher == "torchrun":
        needed.append(("torch", "launcher: torchrun"))
    if job.launcher == "deepspeed":
        needed.append(("deepspeed", "launcher: deepspeed"))
    if job.deepspeed is not None:
        needed.append(("deepspeed", "the job's deepspeed section"))
    for package, why in needed:
        if package not in host.versions:
            raise Unavailable(
                f"{why} needs {package}, which {host.python} on {host.host} does not have",
                hint=f"{host.python} -m pip install 'clusterkit[train]'",
            )
    if job.launcher == "mpirun" and "mpirun" not in host.tools:
        raise Unavailable(
            f"launcher: mpirun needs Open MPI, which {host.host} does not have",
            hint="apt-get install openmpi-bin",
        )


def _pretty(document: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"
