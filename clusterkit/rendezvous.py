"""Launchers' command lines and the environment by which ranks find each other.

No other module knows either. A backend says how a node learns its rank and node 0's address.
`node_environment` and `launcher_argv` are the same text on every node, with the node's rank in the
shell variable ``NODE_RANK``; `rank_script` is what a launcher starts for each rank, and sets the
variables that the launcher does not. Ranks are numbered node by node: ``RANK = NODE_RANK *
LOCAL_WORLD_SIZE + LOCAL_RANK``; an elastic run's launcher numbers them again in each round.

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
from clusterkit.errors import pluralize
from clusterkit.shell import Concat, Var, Word, join, quote
from clusterkit.spec import Launcher

NODE_RANK = Var("NODE_RANK")
NODE_DIR = Var("CLUSTERKIT_NODE_DIR")
"""The node's folder in the run folder; set by the node script."""
IS_HOST = Var("CLUSTERKIT_IS_HOST")
"""``1`` on node 0, which hosts the c10d store, ``0`` on the others; set by the node script."""
NODE_ADDRESS = Var("CLUSTERKIT_NODE_ADDRESS")
"""Address at which other nodes reach this one; set by the plan's step, or else MASTER_ADDR."""
RANK_HEADER = agent.RANK_HEADER.decode()
"""First line of a rank's log: this word, its rank, its process id."""
RANK_ENDED = agent.RANK_ENDED.decode()
"""Last line of a rank that ended under deepspeed or mpirun: this word, its rank, its exit code."""

VARIABLES_TO_UNSET = (
    "CLUSTERKIT_GLOBAL_BATCH", "CLUSTERKIT_MICRO_BATCH", "CLUSTERKIT_ACCUMULATION",
    "CLUSTERKIT_DEEPSPEED_CONFIG", "CLUSTERKIT_CHECKPOINT_DIR", "CLUSTERKIT_CHECKPOINT_EVERY",
    "CLUSTERKIT_CHECKPOINT_KEEP", "CLUSTERKIT_CHECKPOINT_RESUME", "CLUSTERKIT_PIPE",
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_ERROR_FILE",
)  # fmt: skip
"""Variables to unset on a node: those inherited from the submitter would mislead the ranks."""

# keep_alive: a lost agent is noticed after 3 s instead of 15; last_call: a round starts 3 s after
# MIN nodes have joined instead of 30; close: the last agent waits 5 s.
_ELASTIC_CONF = (
    "keep_alive_interval=1,keep_alive_max_attempt=3,"
    "last_call_timeout=3,join_timeout=600,close_timeout=5"
)


# torchrun reads PET_NNODES and the like as options; the agent starts it without any (spawn.py).
_RESTORE_PET = (
    "for name in ${CLUSTERKIT_PET:-}; do\n"
    '    eval "export PET_$name=\\"\\$CLUSTERKIT_PET_$name\\"; unset CLUSTERKIT_PET_$name"\n'
    "done\n"
    "unset name CLUSTERKIT_PET\n"
)


@dataclass(frozen=True)
class Topology:
    """Number of nodes and ranks of a run.

    Attributes:
        min_nodes: nodes that have to be present; fewer than ``nodes`` in an elastic run.
        nodes: nodes that are started, without spares.
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
        """Return the number of ranks when all nodes are present."""
        return self.nodes * self.nproc_per_node

    def __str__(self) -> str:
        nodes = (
            f"{self.min_nodes}:{self.nodes} nodes"
            if self.elastic
            else pluralize(self.nodes, "node")
        )
        return f"{nodes} x {pluralize(self.nproc_per_node, 'rank')}"


@dataclass(frozen=True)
class Endpoint:
    """Address and TCP port at which rank 0 listens, and the run's id.

    The address may be a variable in the environment of every node.
    """

    address: str | Var
    port: int
    run_id: str


def node_environment(launcher: Launcher, topology: Topology, endpoint: Endpoint) -> dict[str, Word]:
    """Return the variables that are the same on all nodes: MASTER_*, and the launcher's own."""
    env: dict[str, Word] = {"MASTER_ADDR": endpoint.address, "MASTER_PORT": str(endpoint.port)}
    if launcher == "torchrun" and topology.elastic:
        # Otherwise restarted ranks read the last round's addresses, and a new agent waits for a
        # key that nobody writes (torch 2.13, dynamic_rendezvous.py).
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if launcher == "mpirun":
        env |= {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            # Nobody can answer a prompt for a password or a host key.
            "OMPI_MCA_plm_rsh_args": "-o BatchMode=yes",
        }
    return env


def mpirun_interface(interface: str) -> dict[str, str]:
    """Return the variables that keep Open MPI's messages and daemons on one network interface."""
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
    """Return the command that starts the ranks of one node (with mpirun: of all nodes).

    Args:
        python: interpreter on the nodes.
        hostfile: path of the file for deepspeed and mpirun, with the text of `hostfile`.
        exports: names of variables that mpirun passes to ranks on other hosts.
        stop_grace: seconds that ranks have between SIGTERM and SIGKILL.
        mpi_interface: network interface for deepspeed that starts the ranks of all nodes with
            mpirun; None: it starts those of one node.

    Returns:
        Words, to be followed by ``/bin/sh rank.sh``. None for ``forkserver``: the node agent
        itself starts the ranks.
    """
    match launcher:
        case "torchrun":
            return _torchrun(topology, endpoint, python, str(math.ceil(stop_grace)))
        case "deepspeed":
            if mpi_interface is None:
                how: list[Word] = ["--no_ssh", "--node_rank", NODE_RANK]
            else:
                # DeepSpeed's default is eth0.
                more = ["--mca", "btl_tcp_if_include", mpi_interface, *_mpi_options(exports)]
                how = [
                    # Otherwise one node's ranks start on this machine, without mpirun.
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
    """Return the options for mpirun itself and for deepspeed that starts it."""
    names = dict.fromkeys(("MASTER_ADDR", "MASTER_PORT", "CLUSTERKIT_ATTEMPT", *exports))
    return [
        # By slot: ranks are numbered host by host, in the hostfile's order.
        "--map-by", "slot", "--bind-to", "none",
        # Ranks on other hosts have no pipe to the node agent, which needs the tag on their lines.
        "--tag-output", *(word for name in names for word in ("-x", name)),
    ]  # fmt: skip


def _torchrun(topology: Topology, endpoint: Endpoint, python: str, grace: str) -> list[Word]:
    argv: list[Word] = [python, "-m", "torch.distributed.run"]
    if topology.elastic:
        argv += [
            "--nnodes", f"{topology.min_nodes}:{topology.nodes}",
            "--nproc-per-node", str(topology.nproc_per_node),
            "--rdzv-backend", "c10d", "--rdzv-id", endpoint.run_id,
            "--rdzv-endpoint", Concat((endpoint.address, f":{endpoint.port}")),
            "--rdzv-conf", Concat((f"{_ELASTIC_CONF},is_host=", IS_HOST)),
            # The default is the host's name, which other nodes may not be able to resolve.
            "--local-addr", NODE_ADDRESS,
            # For nodes that are lost: the agent ends it when a rank fails by itself.
            "--max-restarts", "100",
        ]  # fmt: skip
    else:
        argv += [
            "--nnodes", str(topology.nodes),
            "--nproc-per-node", str(topology.nproc_per_node),
            "--node-rank", NODE_RANK,
            "--master-addr", endpoint.address, "--master-port", str(endpoint.port),
            # The agents restart the ranks of all nodes together.
            "--max-restarts", "0",
        ]  # fmt: skip
    # Without --log-dir every run leaves a folder in /tmp.
    argv += ["--log-dir", Concat((NODE_DIR, "/torchrun")), "--shutdown-timeout", grace]
    return [*argv, "--no-python"]


def rank_script(
    launcher: Launcher, topology: Topology, python: str, words: Sequence[Word], restarts: int
) -> str:
    """Return the ``sh`` script that a launcher starts for each rank, unless ranks are forked.

    It sets the variables that the launcher does not, sends the output to the rank's own log (the
    named pipe ``$CLUSTERKIT_PIPE-N``, which the node agent reads) and executes the program with
    ``exec``, so that signals and exit codes are the program's own. The folder of ``python`` is
    first on PATH.

    The program's words are in the script, out of the launcher's sight: argparse in torchrun and
    deepspeed reads all words, also those after the program, and fails for ``--r=16`` (it could be
    short for ``--role``); mpirun ends the arguments at a ``:``.

    Under deepspeed and mpirun it remains the program's parent and reports which rank failed:
    DeepSpeed never does, and mpirun sometimes does not (Open MPI 4.1.4: 1 of 25 times on one host,
    5 of 25 on two pods). It passes signals on, and exits as the program did.

    Args:
        words: the program and its arguments.
        restarts: how often the ranks may be started again.
    """
    nproc = topology.nproc_per_node
    # The agent sets the number of nodes of each round.
    nodes = '"$GROUP_WORLD_SIZE"' if topology.elastic else str(topology.nodes)
    world = f"$((GROUP_WORLD_SIZE * {nproc}))" if topology.elastic else str(topology.world_size)
    counts = f"export TORCHELASTIC_MAX_RESTARTS={restarts}"
    if launcher == "forkserver" or not topology.elastic:  # otherwise torchrun restarts the ranks
        counts += ' TORCHELASTIC_RESTART_COUNT="$((${CLUSTERKIT_ATTEMPT:-1} - 1))"'
    completion = {
        "torchrun": f'export NODE_RANK="$GROUP_RANK"\n{_RESTORE_PET}{counts}',
        # The launcher numbers GPUs from 0, also on a node that was assigned others.
        "deepspeed": 'export LOCAL_WORLD_SIZE="$LOCAL_SIZE" NODE_RANK="$CROSS_RANK"\n'
        'if [ -n "${CLUSTERKIT_GPUS:-}" ]; then export CUDA_VISIBLE_DEVICES="$CLUSTERKIT_GPUS"; fi',
        "mpirun": 'export RANK="$OMPI_COMM_WORLD_RANK" WORLD_SIZE="$OMPI_COMM_WORLD_SIZE"\n'
        f"export LOCAL_WORLD_SIZE={nproc} "
        f"LOCAL_RANK=$((RANK % {nproc})) NODE_RANK=$((RANK / {nproc}))",
        "forkserver": f"export WORLD_SIZE={world} LOCAL_WORLD_SIZE={nproc}\n"
        f"export RANK=$((NODE_RANK * {nproc} + LOCAL_RANK))\n"
        # Programs look for these variables of torchrun.
        f'export GROUP_RANK="$NODE_RANK" GROUP_WORLD_SIZE={nodes} ROLE_NAME=default '
        f'ROLE_RANK="$RANK" ROLE_WORLD_SIZE="$WORLD_SIZE"\n'
        'export TORCHELASTIC_RUN_ID="$CLUSTERKIT_RUN_ID" TORCHELASTIC_USE_AGENT_STORE=False'
        f"\n{counts}\n"
        'export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"',
    }[launcher]
    folder = posixpath.dirname(python)
    # A name without a folder was found on PATH.
    path = f'export PATH={quote(folder)}":$PATH"\n' if folder else ""
    # With mpirun several nodes may be on one host, whose agent has one pipe for each rank on it.
    pipe = "OMPI_COMM_WORLD_LOCAL_RANK" if launcher == "mpirun" else "LOCAL_RANK"
    stays = launcher in ("deepspeed", "mpirun")
    becomes = "starts" if stays else "becomes"
    head = (
        "#!/bin/sh\n"
        f"# started by {launcher} once per rank: completes the rank's environment, gives it its "
        f"own log, {becomes} the program\n"
        f"{completion}\n{path}"
        f'CLUSTERKIT_PIPE="${{CLUSTERKIT_PIPE:-}}-${pipe}"\n'
        f"set -- {join(map(_with_local_rank, words))}\n"
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
    # `trap :`, not `trap ''`: the program would inherit an ignored signal.
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
        f'[ ! -p "$CLUSTERKIT_PIPE" ] && [ "$code" -eq 0 ] || echo "{RANK_ENDED} $RANK $code"\n'
        "# ended by a signal: so is this, and without a core of its own\n"
        f'if [ "$code" -gt 128 ]; then trap - {signals}; ulimit -S -c 0; '
        'kill -s "$((code - 128))" "$$"; fi\n'
        'exit "$code"\n'
    )


def _with_local_rank(word: Word) -> Word:
    if not isinstance(word, str) or agent.LOCAL_RANK_WORD not in word:
        return word
    before, *others = word.split(agent.LOCAL_RANK_WORD)
    return Concat((before, *(part for text in others for part in (Var("LOCAL_RANK"), text))))


def hostfile(hosts: Sequence[str], slots: int) -> str:
    """Return ``host slots=N`` lines for DeepSpeed and Open MPI.

    A host of several nodes gets one line with the sum of their slots: Open MPI refuses two lines.
    """
    nodes = Counter(hosts)
    return "".join(f"{host} slots={slots * times}\n" for host, times in nodes.items())
