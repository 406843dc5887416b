"""The common options of other tools' launchers, and the key of a job that each becomes. Data.

An option that is not here is refused, with what to write instead.

Sources: ``torch/distributed/run.py`` and ``launch.py`` 2.13, ``deepspeed/launcher/runner.py`` 0.19,
``accelerate/commands/launch.py`` 1.15, Open MPI's mpirun(1) 4.1, sbatch(1) and srun(1) of Slurm
24.11 with pyxis for ``--container-*``, TorchX 0.7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from clusterkit.spec import Launcher

OURS = "ours"
"""clusterkit itself decides what the option sets."""
MODULE, COMMAND, BY_ENVIRONMENT = "a module", "a command", "environment"
"""The program is a module; is any command; gets its local rank in the environment only."""
SPECIAL = "special"
"""Code and not the table handles the option, for one because it depends on others."""
PASSED = "passed"
"""The option is passed to sbatch unchanged."""
HOSTS = "!the cluster entry names the hosts; --include and --exclude choose among them"
LOGS = "!every rank's lines are kept: `clusterkit logs`"
AGAIN = "-given again, and the last one counts"
MISUSED = (AGAIN, NO_VALUE := "!it takes no value", MISSING := "!its value is missing")
BINDING = "!ranks are bound to the NUMA nodes of their GPUs (key `bind`), to nothing else"
CONVERT = "!`clusterkit convert` makes a job file of it, and says what each option becomes"


@dataclass(frozen=True)
class Tool:
    """A launcher and its options; each table maps an option, with dashes, to its meaning.

    A meaning is one of the constants above, or the key of the job that the option sets
    (``key=value``: a flag that sets this value), or ``ranks`` (of all nodes together), or a key of
    the cluster's entry (``entry.KEY``), or a mark and a text: ``!`` why the option has no
    equivalent, ``-`` why it is not needed.
    """

    launcher: Launcher | None
    """Launcher of the job; None: the tool runs a command, which may be another launcher."""
    values: Mapping[str, str]
    flags: Mapping[str, str] = field(default_factory=dict)
    pairs: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)
    """Options with an optional value after ``=``."""
    short: Mapping[str, str] = field(default_factory=dict)
    """Short names, and the long ones that the tables have."""
    repeated: frozenset[str] = frozenset()
    """Options that accumulate when repeated; of all others only the last one counts."""
    joined: bool = True
    """Whether a value may directly follow a short option: ``-t3``."""
    abbreviated: bool = True
    """Whether ``--nproc`` stands for the only long option with this prefix."""
    unknown: str = ""
    """Meaning of options in no table, which then take a value; empty: they are errors."""
    parses: int = 1
    """How many times it parses the program's words with argparse."""
    local_rank: str = ""
    """Argument with which it passes the local rank to its program; empty: it does not."""

    @cached_property
    def known(self) -> Mapping[str, str]:
        """Return the meaning of every option."""
        return {**self.flags, **self.optional, **self.values, **self.pairs}

    def named(self, word: str) -> tuple[str, str | None]:
        """Return the name of an option in the tables, and the value in the same word or None."""
        name, equals, text = word.partition("=")
        value = text if equals else None
        if name.startswith("--"):
            name = name[:2] + name[2:].replace("_", "-")
        elif self.joined and (word[:2] in self.short or word[:2] in self.known):
            name, value = word[:2], word[2:].removeprefix("=") or value
        name = self.short.get(name, name)
        if self.abbreviated and name not in self.known and name.startswith("--"):
            near = [option for option in self.known if option.startswith(name)]
            name = near[0] if len(near) == 1 else name
        return name, value


def each(names: str, meaning: str) -> dict[str, str]:
    """Return a table that gives all these options the same meaning."""
    return dict.fromkeys(names.split(), meaning)


def _prefixed(prefix: str, names: str) -> dict[str, str]:
    return {f"--{prefix}-{name}": CONVERT for name in names.split()}


_ROLE = "!ranks have the role `default`; --set env.ROLE=NAME passes a name of yours to them"
TORCHRUN = Tool(
    launcher="torchrun",
    flags=each("--standalone", OURS) | each("-m --module", MODULE) | each("--no-python", COMMAND),
    values=each("--nnodes", "nodes")
    | each("--nproc-per-node", "gpus_per_node")
    | each("--max-restarts", "restarts")
    | each("--rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --local-addr", OURS)
    | each("--node-rank --master-addr --master-port --monitor-interval", OURS)
    | each("--role", _ROLE)
    | each("--shutdown-timeout", "!`stop_grace` of the cluster entry is that time")
    | each("--log-dir -r --redirects -t --tee", LOGS),
)
DEEPSPEED = Tool(
    launcher="deepspeed",
    flags=each("--no-ssh --no-ssh-check --force-multi -q --quiet", OURS)
    | each("--module", MODULE)
    | each("--no-python", COMMAND)
    | each("--no-local-rank", BY_ENVIRONMENT)
    | each("--bind-cores-to-rank", BINDING),
    values=each("--num-nodes", "nodes")
    | each("--num-gpus --num-accelerators", "gpus_per_node")
    | each("--master-port --master-addr --node-rank --launcher --ssh-port --log-level", OURS)
    | each("--hostfile --include --exclude", HOSTS)
    | each("--venv-script", "!--set python=PATH names the interpreter"),
    short={"-H": "--hostfile", "-i": "--include", "-e": "--exclude"},
    parses=2,
    local_rank="--local_rank",
)
MPIRUN = Tool(
    launcher="mpirun",
    flags=each("--allow-run-as-root --oversubscribe --tag-output -q --quiet", OURS)
    | each("-pernode --pernode", "gpus_per_node=1"),
    values=each("-np --np -n --n -c", "ranks")
    | each("-N -npernode --npernode -ppn", "gpus_per_node")
    | each("-H -host --host -hostfile --hostfile -machinefile --machinefile", HOSTS)
    | each("--map-by -map-by --bind-to -bind-to --rank-by", BINDING)
    | each("-x", "!--set env.NAME=VALUE sets a variable of the ranks")
    | each("-wdir --wdir -wd", "!--set workdir=FOLDER starts the ranks there"),
    pairs=each("-mca --mca -gmca --gmca", "!--set env.OMPI_MCA_NAME=VALUE says the same")
    | each("-genv", "!--set env.NAME=VALUE sets a variable of the ranks"),
    repeated=frozenset(
        {"-x", "-H", "-host", "--host", "-mca", "--mca", "-gmca", "--gmca", "-genv"}
    ),
    joined=False,
    abbreviated=False,
    parses=0,
)
ACCELERATE = Tool(
    launcher="torchrun",
    abbreviated=False,
    flags=each("--multi-gpu --same-network", OURS)
    | each("--cpu", "device=cpu")
    | each("-m --module", MODULE)
    | each("--no-python", COMMAND)
    | each("-q --quiet", OURS)
    | each("--debug --use-deepspeed --use-fsdp --use-megatron-lm", CONVERT)
    | each("--use-parallelism-config", CONVERT)
    | each("--enable-cpu-affinity --dynamo-use-fullgraph --dynamo-use-dynamic", CONVERT)
    | each("--dynamo-use-regional-compilation --fp8-use-autocast-during-eval", CONVERT),
    values=each("--num-processes", "ranks")
    | each("--num-machines", "nodes")
    | each("--num-cpu-threads-per-process", "threads_per_rank")
    | each("--max-restarts", "restarts")
    | each("--mixed-precision", "env.ACCELERATE_MIXED_PRECISION")
    | each("--machine-rank --main-process-ip --main-process-port --monitor-interval", OURS)
    | each("--rdzv-backend --rdzv-conf", OURS)
    | each("--role", _ROLE)
    | each("--log-dir -t --tee", LOGS)
    | each("--config-file --gradient-accumulation-steps", CONVERT)
    | each("--gpu-ids --mpirun-hostfile --zero-stage --zero3-init-flag", CONVERT)
    | each("--zero3-save-16bit-model --gradient-clipping", CONVERT)
    | each("--offload-optimizer-device --offload-param-device", CONVERT)
    | each("--offload-optimizer-nvme-path --offload-param-nvme-path", CONVERT)
    | _prefixed("dynamo", "backend mode")
    | _prefixed(
        "deepspeed",
        "config-file hostfile exclusion-filter inclusion-filter multinode-launcher "
        "moe-layer-cls-names",
    )
    | _prefixed(
        "fsdp",
        "version offload-params min-num-params sharding-strategy reshard-after-forward "
        "auto-wrap-policy transformer-layer-cls-to-wrap backward-prefetch state-dict-type "
        "forward-prefetch use-orig-params cpu-ram-efficient-loading sync-module-states "
        "activation-checkpointing activation-checkpointing-offload",
    )
    | _prefixed(
        "megatron-lm",
        "tp-degree use-custom-fsdp no-load-optim eod-mask-loss overlap-cpu-optimizer-d2h-h2d "
        "no-save-optim optimizer-cpu-offload use-precision-aware-optimizer "
        "decoder-last-pipeline-num-layers pp-degree num-micro-batches sequence-parallelism "
        "recompute-activations use-distributed-optimizer gradient-clipping "
        "recompute-granularity recompute-method recompute-num-layers attention-backend "
        "expert-model-parallel-size context-parallel-size attention-dropout hidden-dropout "
        "attention-softmax-in-fp32 expert-tensor-parallel-size calculate-per-token-loss "
        "use-rotary-position-embeddings",
    )
    | _prefixed(
        "fp8",
        "backend margin interval format amax-history-len amax-compute-algo "
        "override-linear-precision opt-level enable-fsdp-float8-all-gather pad-inner-dim",
    )
    | _prefixed(
        "parallelism-config",
        "dp-replicate-size dp-shard-size tp-size cp-size cp-backend cp-comm-strategy sp-size "
        "sp-backend sp-seq-length sp-seq-length-is-variable sp-attn-implementation",
    ),
)
LAUNCH = replace(
    TORCHRUN,
    flags={**TORCHRUN.flags, "--use-env": BY_ENVIRONMENT},
    local_rank="--local-rank",
)
_AGENTS = "-clusterkit starts one agent on each node, and ends them together"
_ONE_SIZE = "!`memory` of the cluster's entry counts for a node: --mem"
_STEP_FLAGS = (
    each("--label --unbuffered --quiet --verbose", LOGS)
    | each("--no-kill --kill-on-bad-exit --wait --parsable --overlap --exact", _AGENTS)
    | {"--export": SPECIAL, "--multi-prog": "!all ranks of a job run the same"}
    | {"--pty": "!a run has no terminal"}
)
_STEP_VALUES = (
    each("--nodes --ntasks --ntasks-per-node --cpus-per-task", SPECIAL)
    | each("--gpus --gpus-per-node --gpus-per-task --gres", SPECIAL)
    | each("--output --error --open-mode --input", LOGS)
    | each("--jobid --job-id", "-a run has an allocation of its own")
    | each("--cpu-bind", f"-{BINDING[1:]}")
    | each("--mpi", "-Slurm starts agents only, which need no PMI")
    | each("--gpu-bind", "!a rank sees all GPUs of its node, and takes that of LOCAL_RANK")
    | each("--ntasks-per-gpu --ntasks-per-core --ntasks-per-socket", "!write --ntasks-per-node")
    | {"--relative": "!a run has all nodes of its job"}
    | {"--array": "!submit the job once for each value: --set args=..."}
    | {"--wrap": "!convert the command itself", "--clusters": "!a run stays on one cluster"}
    | {"--cpus-per-gpu": "!`cpus` of the cluster's entry counts for a node"}
    | each("--mem-per-cpu --mem-per-gpu", _ONE_SIZE)
    | each("--container-image --container", "entry.container")
    | {"--container-mounts": SPECIAL, "--chdir": SPECIAL}
)
_JOB_FLAGS = {
    "--exclusive": SPECIAL,
    "--requeue": "entry.requeue=true", "--no-requeue": "entry.requeue=false",
    **each("--oversubscribe --hold --contiguous --nice --container-mount-home", PASSED),
    **each("--no-container-mount-home --container-writable --container-remap-root", PASSED),
}  # fmt: skip
_JOB_VALUES = {
    "--job-name": SPECIAL, "--signal": SPECIAL, "--mem": "entry.memory",
    **{f"--{key}": f"entry.{key}"
       for key in ("account", "partition", "qos", "constraint", "reservation", "time")},
    **each("--begin --comment --deadline --dependency --distribution --exclude --hint", PASSED),
    **each("--kill-on-invalid-dep --licenses --mail-type --mail-user --nodelist", PASSED),
    **each("--priority --switches --threads-per-core --time-min --tmp --wckey", PASSED),
}  # fmt: skip
_TO_SBATCH = "!clusterkit's own srun has no such option: give it to sbatch"
SBATCH = Tool(
    launcher=None,
    optional=_STEP_FLAGS | _JOB_FLAGS,
    values=_STEP_VALUES | _JOB_VALUES,
    unknown="!clusterkit does not know this option: write it into `options` of the cluster entry",
    short={
        "-A": "--account", "-p": "--partition", "-q": "--qos", "-C": "--constraint", "-t": "--time",
        "-J": "--job-name", "-N": "--nodes", "-n": "--ntasks", "-c": "--cpus-per-task",
        "-o": "--output", "-e": "--error", "-D": "--chdir", "-G": "--gpus", "-w": "--nodelist",
        "-x": "--exclude", "-d": "--dependency", "-a": "--array", "-L": "--licenses",
        "-M": "--clusters", "-s": "--oversubscribe", "-k": "--no-kill", "-H": "--hold",
        "-i": "--input", "-W": "--wait", "-Q": "--quiet", "-v": "--verbose",
        "-m": "--distribution", "-b": "--begin", "-l": "--label", "-u": "--unbuffered",
        "-K": "--kill-on-bad-exit", "-r": "--relative",
        "--tasks-per-node": "--ntasks-per-node",
    },
)  # fmt: skip
SRUN = replace(
    SBATCH,
    optional=dict.fromkeys(_JOB_FLAGS, _TO_SBATCH) | _STEP_FLAGS,
    values=dict.fromkeys(_JOB_VALUES, _TO_SBATCH) | _STEP_VALUES,
    unknown=_TO_SBATCH,
)
SCRIPTS = {
    ("torchrun",): TORCHRUN,
    ("deepspeed",): DEEPSPEED,
    ("mpirun",): MPIRUN,
    ("mpiexec",): MPIRUN,
    ("accelerate", "launch"): ACCELERATE,
    ("accelerate-launch",): ACCELERATE,
}
MODULES = {
    "torch.distributed.run": TORCHRUN,
    "torch.distributed.launch": LAUNCH,
    "deepspeed": DEEPSPEED,
    "deepspeed.launcher.runner": DEEPSPEED,
    "accelerate.commands.launch": ACCELERATE,
}
