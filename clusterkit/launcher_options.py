"""Options of the launchers that others have, and what each becomes in a job. Data.

Sources: ``torch/distributed/run.py`` and ``launch.py`` 2.13, ``deepspeed/launcher/runner.py`` 0.19,
``accelerate/commands/launch.py`` 1.15, Open MPI's mpirun(1) 4.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from clusterkit.spec import Launcher

OURS = "ours"
"""clusterkit decides what the option says."""
MODULE, COMMAND, BY_ENVIRONMENT = "module", "command", "environment"
"""The program is a module, or any command; it gets no ``--local_rank``."""
HOSTS = "!the cluster entry names the hosts; --include and --exclude choose among them"
LOGS = "!every rank's lines are kept: `clusterkit logs`"
BINDING = "!ranks are placed by slot and not bound to cores"
CONVERT = "!`clusterkit convert` makes a job file of it, which says the same in `env`"
_NO_TPU = "!clusterkit runs on CPUs and GPUs"


@dataclass(frozen=True)
class Tool:
    """How a launcher's options are read.

    An option means the job's key whose value it gives (``key=value``: it alone says so), one of the
    words above, ``ranks`` (of all nodes together) or, behind ``!``, why it cannot be taken over.
    Underscores in an option are written as dashes here.
    """

    launcher: Launcher
    flags: Mapping[str, str]
    values: Mapping[str, str]
    pairs: Mapping[str, str] = field(default_factory=dict)
    local_rank: str = ""
    """How it hands its program the local rank as an argument, if it does."""


def _each(names: str, meaning: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), meaning)


def _prefixed(prefix: str, names: str) -> dict[str, str]:
    return {f"--{prefix}-{name}": CONVERT for name in names.split()}


TORCHRUN = Tool(
    launcher="torchrun",
    flags=_each("--standalone", OURS)
    | _each("-m --module", MODULE)
    | _each("--no-python", COMMAND)
    | _each("--run-path --virtual-local-rank", "!"),
    values=_each("--nnodes", "nodes")
    | _each("--nproc-per-node", "gpus_per_node")
    | _each("--max-restarts", "restarts")
    | _each("--rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --local-addr", OURS)
    | _each("--node-rank --master-addr --master-port --monitor-interval --role", OURS)
    | _each("--start-method", OURS)
    | _each("--shutdown-timeout", "!`stop_grace` of the cluster entry is that time")
    | _each("--log-dir -r --redirects -t --tee --logs-specs --local-ranks-filter", LOGS)
    | _each("--duplicate-stdout-filters --duplicate-stderr-filters --event-log-handler", LOGS)
    | _each("--numa-binding", BINDING)
    | _each("--signals-to-handle", "!"),
)
DEEPSPEED = Tool(
    launcher="deepspeed",
    flags=_each("--no-ssh --no-ssh-check --force-multi -q --quiet", OURS)
    | _each("--module", MODULE)
    | _each("--no-python", COMMAND)
    | _each("--no-local-rank", BY_ENVIRONMENT)
    | _each("--bind-cores-to-rank", BINDING)
    | _each("--save-pid", "!"),
    values=_each("--num-nodes", "nodes")
    | _each("--num-gpus --num-accelerators", "gpus_per_node")
    | _each("--master-port --master-addr --node-rank --launcher --ssh-port --log-level", OURS)
    | _each("-H --hostfile -i --include -e --exclude", HOSTS)
    | _each("--enable-each-rank-log", LOGS)
    | _each("--bind-core-list", BINDING)
    | _each("--launcher-args --venv-script --autotuning", "!"),
    local_rank="--local_rank",
)
MPIRUN = Tool(
    launcher="mpirun",
    flags=_each("--allow-run-as-root --oversubscribe --tag-output -q --quiet", OURS)
    | _each("-pernode --pernode", "gpus_per_node=1")
    | _each("--report-bindings --display-map --display-allocation --timestamp-output -v", LOGS),
    values=_each("-np --np -n --n -c", "ranks")
    | _each("-N -npernode --npernode -ppn", "gpus_per_node")
    | _each("-H -host --host -hostfile --hostfile -machinefile --machinefile", HOSTS)
    | _each("--map-by -map-by --bind-to -bind-to --rank-by", BINDING)
    | _each("-x", "!--set env.NAME=VALUE sets a variable of the ranks")
    | _each("-wdir --wdir -wd", "!--set workdir=FOLDER starts the ranks there"),
    pairs=_each("-mca --mca -gmca --gmca", "!--set env.OMPI_MCA_NAME=VALUE says the same")
    | _each("-genv", "!--set env.NAME=VALUE sets a variable of the ranks"),
)
ACCELERATE = Tool(
    launcher="torchrun",
    flags=_each("--multi-gpu --same-network", OURS)
    | _each("--cpu", "device=cpu")
    | _each("-m --module", MODULE)
    | _each("--no-python", COMMAND)
    | _each("--use-deepspeed", "!launcher: deepspeed, and a `deepspeed` section in a job file")
    | _each("-q --quiet", OURS)
    | _each("--debug --use-fsdp --use-megatron-lm --use-parallelism-config", CONVERT)
    | _each("--enable-cpu-affinity --dynamo-use-fullgraph --dynamo-use-dynamic", CONVERT)
    | _each("--dynamo-use-regional-compilation --fp8-use-autocast-during-eval", CONVERT)
    | _each("--tpu --tpu-cluster --no-tpu-cluster --tpu-use-sudo --downcast-bf16", _NO_TPU),
    values=_each("--num-processes", "ranks")
    | _each("--num-machines", "nodes")
    | _each("--num-cpu-threads-per-process", "threads_per_rank")
    | _each("--max-restarts", "restarts")
    | _each("--mixed-precision", "env.ACCELERATE_MIXED_PRECISION")
    | _each("--gradient-accumulation-steps", "!without DeepSpeed accelerate pays no heed to it")
    | _each("--machine-rank --main-process-ip --main-process-port --monitor-interval", OURS)
    | _each("--rdzv-backend --rdzv-conf --role", OURS)
    | _each("--log-dir -t --tee", LOGS)
    | _each("--config-file", "!what stands in it is not read: give its values as options")
    | _each("--vm --env --main-training-function", _NO_TPU)
    | _each("--aws-access-key-id --aws-secret-access-key", "!clusterkit does not rent machines")
    | _each("--gpu-ids --mpirun-hostfile --zero-stage --zero3-init-flag", CONVERT)
    | _each("--zero3-save-16bit-model --gradient-clipping", CONVERT)
    | _each("--offload-optimizer-device --offload-param-device", CONVERT)
    | _each("--offload-optimizer-nvme-path --offload-param-nvme-path", CONVERT)
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
