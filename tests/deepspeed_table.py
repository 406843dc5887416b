"""Makes ``clusterkit/jobfile/deepspeed_keys.json`` of the DeepSpeed that is installed.

python -m tests.deepspeed_table
"""

from __future__ import annotations

import enum
import json
import types
import typing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "clusterkit" / "jobfile" / "deepspeed_keys.json"

_DTYPE = "bf16|fp16|fp32"
PLAIN: dict[str, Any] = {
    "train_batch_size": "int >0",
    "train_micro_batch_size_per_gpu": "int >0",
    "gradient_accumulation_steps": "int >0",
    "managed_gradient_accumulation": "bool",
    "optimizer": {"type": "text", "params": {"": "any"}, "legacy_fusion": "bool"},
    "scheduler": {"type": "text", "params": {"": "any"}},
    "torch_autocast": {
        "enabled": "bool", "dtype": "any", "lower_precision_safe_modules": "list",
    },
    "gradient_clipping": "number >=0",
    "zero_allow_untested_optimizer": "bool",
    "zero_force_ds_cpu_optimizer": "bool",
    "prescale_gradients": "bool",
    "gradient_predivide_factor": "number",
    "gradient_allreduce_op": "mean|sum",
    "communication_data_type": f"{_DTYPE}?",
    "seq_parallel_communication_data_type": f"{_DTYPE}?",
    "disable_allgather": "bool",
    "data_types": {
        "grad_accum_dtype": "text?", "param_dtype": "text?", "buffer_dtype": "text?",
        "keep_in_fp32_modules": "any",
    },
    "steps_per_print": "number?",
    "dump_state": "bool",
    "log_level": "text",
    "wall_clock_breakdown": "bool",
    "memory_breakdown": "bool",
    "vocabulary_size": "int?",
    "flops_profiler": {
        "enabled": "bool", "recompute_fwd_factor": "number", "profile_step": "int",
        "module_depth": "int", "top_modules": "int", "detailed": "bool", "output_file": "text?",
    },
    "autotuning": {"": "any"},
    "activation_checkpointing": {
        "partition_activations": "bool", "contiguous_memory_optimization": "bool",
        "cpu_checkpointing": "bool", "number_checkpoints": "int?", "profile": "bool",
        "synchronize_checkpoint_boundary": "bool",
    },
    "checkpoint": {"": "any"},
    "aio": {"": "any"},
    "dataloader_drop_last": "bool",
    "data_efficiency": {"": "any"},
    "sequence_parallel_size": "int >0",
    "expert_parallel": {"": "any"},
    "pipeline": {"": "any"},
    "monitor_config": {"": "any"},
    "use_data_before_expert_parallelism": "bool",
    "zenflow": {"": "any"},
    "datastates_ckpt": {"": "any"},
    "disable_python_gc": "bool",
}  # fmt: skip
"""What no class describes: DeepSpeed reads these one by one, in runtime/config.py."""


def keys_of(model: Any) -> dict[str, Any]:
    """Key to what may stand there, in the words of `clusterkit.jobfile.deepspeed_config`."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        bounds = "".join(
            f" {sign}{getattr(rule, attribute):g}"
            for rule in field.metadata
            for attribute, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
            if hasattr(rule, attribute)
        )
        kind = kind_of(field.annotation)
        kind = kind + bounds if isinstance(kind, str) else kind
        found |= dict.fromkeys(filter(None, (name, field.alias)), kind)
    return found


def kind_of(annotation: Any) -> Any:
    members = typing.get_args(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        inner = [kind_of(member) for member in members if member is not type(None)]
        optional = "?" if type(None) in members else ""
        if len(inner) != 1:
            return "any"
        return inner[0] + optional if isinstance(inner[0], str) else inner[0]
    if typing.get_origin(annotation) is typing.Literal:
        return "|".join(map(str, members))
    if typing.get_origin(annotation) in (list, tuple) or annotation is list:
        return "list"
    if isinstance(annotation, type):
        if hasattr(annotation, "model_fields"):
            return keys_of(annotation)
        if issubclass(annotation, enum.Enum):
            return "|".join(dict.fromkeys(str(member.value) for member in annotation))
        names = {bool: "bool", int: "int", float: "number", str: "text", Path: "text"}
        return names.get(annotation, "any")
    return "any"


def text() -> str:
    """The file's text."""
    import deepspeed
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.monitor.config import (
        CometConfig,
        CSVConfig,
        TensorBoardConfig,
        WandbConfig,
    )
    from deepspeed.runtime import config
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    classes = {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "bfloat16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "hybrid_engine": config.HybridEngineConfig,
        "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig,
        "csv_monitor": CSVConfig,
        "comet": CometConfig,
        "comms_logger": CommsLoggerConfig,
        "compile": CompileConfig,
        "tensor_parallel": TPTrainingConfig,
        "weight_quantization": WeightQuantConfig,
    }
    keys = PLAIN | {name: keys_of(model) for name, model in classes.items()}
    keys["timers"] = {"throughput": keys_of(DeepSpeedThroughputTimerConfig)}
    removed = {
        "": sorted(config._REMOVED_TOP_LEVEL_CONFIG_KEYS),
        "zero_optimization": sorted(config._REMOVED_ZERO_CONFIG_KEYS),
    }
    version = deepspeed.__version__.partition("+")[0]
    table = {"version": version, "keys": keys, "removed": removed}
    return json.dumps(table, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    TABLE.write_text(text())
