"""How the ranks of a run find each other.

The only module that knows which environment a rank sees and what a launcher's command
line looks like. A backend says how a node learns its rank and the head's address; the
rest is here: `node_environment`, `launcher_argv` (one command per launcher, the same text
on every node: the node rank is the shell variable ``NODE_RANK``) and `rank_script` (the few
lines of ``sh`` that every launcher starts for each rank; they complete the environment
where a launcher leaves gaps). Ranks are numbered node by node: ``RANK = NODE_RANK *
LOCAL_WORLD_SIZE + LOCAL_RANK``; an elastic run's launcher numbers them anew in each round.

Sources: PyTorch's "torchrun (Elastic Launch)" for RANK, LOCAL_RANK, WORLD_SIZE,
LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and MASTER_PORT; Open MPI's mpirun(1) for
OMPI_COMM_WORLD_*; ``deepspeed/launcher/launch.py`` 0.19 for LOCAL_SIZE and CROSS_RANK.
"""

from __future__ import annotations

import math
import posixpath
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from clusterkit import agent
from clusterkit.errors import counted
from clusterkit.shell import Joined, Var, Word, join, quote
from clusterkit.spec import Launcher

NODE_RANK = Var("NODE_RANK")
NODE_DIR = Var("CLUSTERKIT_NODE_DIR")
"""The node's own folder in the run folder; set by the node script."""
IS_HOST = Var("CLUSTERKIT_IS_HOST")
"""``1`` on node 0, which holds the c10d store, ``0`` on the others; set by the node script."""
NODE_ADDRESS = Var("CLUSTERKIT_NODE_ADDRESS")
"""Address that the other nodes reach this one at; a step's, or else the head's."""
RANK_HEADER = agent.RANK_HEADER.decode()
"""First line of a rank's log: this word, its rank, its process id."""
RANK_ENDED = agent.RANK_ENDED.decode()
"""Last line of a rank that failed under deepspeed or mpirun: this word, its rank, its exit code."""

RESET = (
    "CLUSTERKIT_GLOBAL_BATCH", "CLUSTERKIT_MICRO_BATCH", "CLUSTERKIT_ACCUMULATION",
    "CLUSTERKIT_DEEPSPEED_CONFIG", "CLUSTERKIT_CHECKPOINT_DIR", "CLUSTERKIT_CHECKPOINT_EVERY",
    "CLUSTERKIT_CHECKPOINT_KEEP", "CLUSTERKIT_CHECKPOINT_RESUME", "CLUSTERKIT_PIPE",
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_ERROR_FILE",
)  # fmt: skip
"""Variables that the job or a launcher sets; one of the submitter's would mislead the ranks."""

# keep_alive: an agent that is gone is known as gone after 3 s instead of 15; last_call: a
# round starts 3 s after MIN nodes are there instead of 30; close: the last agent waits 5 s.
_ELASTIC_CONF = (
    "keep_alive_interval=1,keep_alive_max_attempt=3,"
    "last_call_timeout=3,join_timeout=600,close_timeout=5"
)


@dataclass(frozen=True)
class Topology:
    """Shape of a run.

    Attributes:
        min_nodes: nodes without which training does not start; below ``nodes``: elastic.
        nodes: nodes that are started.
        nproc_per_node: ranks of one node.
    """

    min_nodes: int
    nodes: int
    nproc_per_node: int

    @property
    def elastic(self) -> bool:
        return self.min_nodes != self.nodes

    @property
    def world_size(self) -> int:
        """Ranks when all nodes are there."""
        return self.nodes * self.nproc_per_node

    def __str__(self) -> str:
        nodes = (
            f"{self.min_nodes}:{self.nodes} nodes" if self.elastic else counted(self.nodes, "node")
        )
        return f"{nodes} x {counted(self.nproc_per_node, 'rank')}"


@dataclass(frozen=True)
class Endpoint:
    """Where rank 0 listens: its address, its TCP port, and the run's id.

    The address may be a variable that stands in the environment of every node.
    """

    address: str | Var
    port: int
    run_id: str


def node_environment(launcher: Launcher, topology: Topology, endpoint: Endpoint) -> dict[str, Word]:
    """The part of the contract that is the same on all nodes, and a launcher's own switches."""
    env: dict[str, Word] = {"MASTER_ADDR": endpoint.address, "MASTER_PORT": str(endpoint.port)}
    if launcher == "torchrun" and topology.elastic:
        # Without it, restarted ranks read the last round's addresses and a fresh agent waits
        # for a key that nobody writes (torch 2.13, dynamic_rendezvous.py).
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if launcher == "mpirun":
        env |= {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            # Nobody is there to be asked for a password or about a host key.
            "OMPI_MCA_plm_rsh_args": "-o BatchMode=yes",
        }
    return env


def mpirun_interface(interface: str) -> dict[str, str]:
    """The environment that keeps Open MPI, its messages and its daemons, to one interface."""
    return {
        "OMPI_MCA_btl_tcp_if_include": interface,
        "OMPI_MCA_oob_tcp_if_include": interface,
    }


def launcher_argv(
    launcher: Launcher,
    topology: Topology,
    endpoint: Endpoint,
    *,
    python: str,
    hostfile: str,
    exports: Sequence[str] = (),
    stop_grace: float = 10.0,
    mpi_interface: str | None = None,
) -> list[Word]:
    """The command that starts the ranks of one node (with mpirun: of all nodes, on node 0).

    Args:
        python: interpreter on the nodes.
        hostfile: path of the file that `hostfile` fills; read by deepspeed and mpirun.
        exports: variables that mpirun must hand to ranks on other hosts.
        stop_grace: seconds that ranks have between SIGTERM and SIGKILL.
        mpi_interface: network interface of deepspeed's ranks where it starts those of all nodes
            with mpirun; None: it starts one node's.

    Returns:
        Words, to be followed by what each rank runs; the variables among them are set by the node
        script. None for ``forkserver``: the node agent itself starts each rank.
    """
    match launcher:
        case "torchrun":
            return _torchrun(topology, endpoint, python, str(math.ceil(stop_grace)))
        case "deepspeed":
            if mpi_interface is None:
                how: list[Word] = ["--no_ssh", "--node_rank", NODE_RANK]
            else:
                # By itself it names eth0.
                more = ["--mca", "btl_tcp_if_include", mpi_interface, *_mpi_options(exports)]
                how = [
                    # One node alone, too, is reached by mpirun: this is not it.
                    "--force_multi", "--no_ssh_check", "--launcher", "openmpi",
                    f"--launcher_args={join(more)}",
                ]  # fmt: skip
            return [
                # The runner's own module: the `deepspeed` script may not be on the node's PATH.
                python, "-m", "deepspeed.launcher.runner", "--hostfile", hostfile, *how,
                "--master_addr", endpoint.address, "--master_port", str(endpoint.port),
                "--log_level", "warning", "--no_local_rank", "--no_python",
            ]  # fmt: skip
        case "mpirun":
            return [
                "mpirun", "-np", str(topology.world_size), "--hostfile", hostfile,
                *_mpi_options(exports),
            ]  # fmt: skip
        case "forkserver":
            return []


def _mpi_options(exports: Sequence[str]) -> list[str]:
    """Options of mpirun, however it is started: the placement of ranks, their environment."""
    names = dict.fromkeys(("MASTER_ADDR", "MASTER_PORT", "CLUSTERKIT_ATTEMPT", *exports))
    return [
        # By slot: ranks are numbered host by host, in the hostfile's order.
        "--map-by", "slot", "--bind-to", "none",
        # Ranks on other hosts have no pipe to the node agent: it knows their lines by this.
        "--tag-output", *(word for name in names for word in ("-x", name)),
    ]  # fmt: skip


def _torchrun(topology: Topology, endpoint: Endpoint, python: str, grace: str) -> list[Word]:
    argv: list[Word] = [python, "-m", "torch.distributed.run"]
    if topology.elastic:
        argv += [
            "--nnodes", f"{topology.min_nodes}:{topology.nodes}",
            "--nproc-per-node", str(topology.nproc_per_node),
            "--rdzv-backend", "c10d", "--rdzv-id", endpoint.run_id,
            "--rdzv-endpoint", Joined((endpoint.address, f":{endpoint.port}")),
            "--rdzv-conf", Joined((f"{_ELASTIC_CONF},is_host=", IS_HOST)),
            # By default it is the host's name, which the other nodes may not resolve.
            "--local-addr", NODE_ADDRESS,
            "--max-restarts", "100",
        ]  # fmt: skip
    else:
        argv += [
            "--nnodes", str(topology.nodes),
            "--nproc-per-node", str(topology.nproc_per_node),
            "--node-rank", NODE_RANK,
            "--master-addr", endpoint.address, "--master-port", str(endpoint.port),
            # Restarts concern all nodes at once; the run's supervisor makes them.
            "--max-restarts", "0",
        ]  # fmt: skip
    # Without --log-dir it leaves a folder in /tmp behind for every run.
    argv += ["--log-dir", Joined((NODE_DIR, "/torchrun")), "--shutdown-timeout", grace]
    return [*argv, "--no-python"]


def rank_script(launcher: Launcher, topology: Topology, python: str) -> str:
    """What is started for each rank, but for one that is forked: a POSIX ``sh`` script.

    It completes the rank's environment, gives the rank a log of its own
    (``$CLUSTERKIT_PIPE-N``, a named pipe that the node agent reads) and then
    *becomes* the program, so that signals and exit codes are the program's own. The folder of
    ``python`` stands first on the program's PATH.

    Under deepspeed and mpirun it stays the program's parent, to report how it failed: DeepSpeed
    never says which rank did, and mpirun now and then ends without those words (Open MPI 4.1.4:
    1 of 25 times on one host, 5 of 25 on two pods). Signals reach it and the program alike, and
    it ends as the program did.
    """
    nproc = topology.nproc_per_node
    # The agent says of how many nodes a round is.
    nodes = '"$GROUP_WORLD_SIZE"' if topology.elastic else str(topology.nodes)
    world = f"$((GROUP_WORLD_SIZE * {nproc}))" if topology.elastic else str(topology.world_size)
    completion = {
        "torchrun": 'export NODE_RANK="$GROUP_RANK"',
        # The launcher numbers GPUs from 0; a node that was given others keeps those.
        "deepspeed": 'export LOCAL_WORLD_SIZE="$LOCAL_SIZE" NODE_RANK="$CROSS_RANK"\n'
        'if [ -n "${CLUSTERKIT_GPUS:-}" ]; then export CUDA_VISIBLE_DEVICES="$CLUSTERKIT_GPUS"; fi',
        "mpirun": 'export RANK="$OMPI_COMM_WORLD_RANK" WORLD_SIZE="$OMPI_COMM_WORLD_SIZE"\n'
        f"export LOCAL_WORLD_SIZE={nproc} "
        f"LOCAL_RANK=$((RANK % {nproc})) NODE_RANK=$((RANK / {nproc}))",
        "forkserver": f"export WORLD_SIZE={world} LOCAL_WORLD_SIZE={nproc}\n"
        f"export RANK=$((NODE_RANK * {nproc} + LOCAL_RANK))\n"
        # What torchrun sets besides: programs look for it.
        f'export GROUP_RANK="$NODE_RANK" GROUP_WORLD_SIZE={nodes} ROLE_NAME=default '
        f'ROLE_RANK="$RANK" ROLE_WORLD_SIZE="$WORLD_SIZE"\n'
        'export TORCHELASTIC_RUN_ID="$CLUSTERKIT_RUN_ID" TORCHELASTIC_USE_AGENT_STORE=False '
        "TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_MAX_RESTARTS=0 "
        'TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"',
    }[launcher]
    folder = posixpath.dirname(python)
    # A name was found on the PATH, so that its folder stands there.
    path = f'export PATH={quote(folder)}":$PATH"\n' if folder else ""
    # With mpirun one host may stand for several nodes; its agent has one pipe per rank on it.
    pipe = "OMPI_COMM_WORLD_LOCAL_RANK" if launcher == "mpirun" else "LOCAL_RANK"
    stays = launcher in ("deepspeed", "mpirun")
    becomes = "starts" if stays else "becomes"
    head = (
        "#!/bin/sh\n"
        f"# started by {launcher} once per rank: completes the rank's environment, gives it its "
        f"own log, {becomes} the program\n"
        f"{completion}\n{path}"
        f'CLUSTERKIT_PIPE="${{CLUSTERKIT_PIPE:-}}-${pipe}"\n'
    )
    if not stays:
        return (
            f"{head}"
            'if [ -p "$CLUSTERKIT_PIPE" ]; then\n'
            '    exec >"$CLUSTERKIT_PIPE" 2>&1\n'
            f'    echo "{RANK_HEADER} $RANK $$"\n'
            "fi\n"
            "unset CLUSTERKIT_PIPE\n"
            'exec "$@"\n'
        )
    # A trapped signal is the program's to answer; an ignored one would be ignored by it too.
    signals = "HUP INT TERM USR1 USR2"
    return (
        f"{head}"
        'if [ -p "$CLUSTERKIT_PIPE" ]; then exec >"$CLUSTERKIT_PIPE" 2>&1; fi\n'
        f"trap : {signals}\n"
        "exec 9>&2 2>/dev/null  # where this shell would tell of a signal\n"
        "(exec /bin/sh -c '\n"
        f'    if [ -p "$CLUSTERKIT_PIPE" ]; then echo "{RANK_HEADER} $RANK $$"; fi\n'
        "    unset CLUSTERKIT_PIPE\n"
        '    exec "$@"\n'
        '\' sh "$@" 2>&9 9>&-)\n'
        "code=$?\n"
        f'if [ "$code" -ne 0 ]; then echo "{RANK_ENDED} $RANK $code"; fi\n'
        "# ended by a signal: so is this, and without a core of its own\n"
        f'if [ "$code" -gt 128 ]; then trap - {signals}; ulimit -S -c 0; '
        'kill -s "$((code - 128))" "$$"; fi\n'
        'exit "$code"\n'
    )


def hostfile(hosts: Sequence[str], slots: int) -> str:
    """``host slots=N`` lines, as DeepSpeed and Open MPI read them.

    A host that stands for several nodes gets one line with the slots of all: Open MPI refuses
    two.
    """
    nodes = Counter(hosts)
    return "".join(f"{host} slots={slots * times}\n" for host, times in nodes.items())
