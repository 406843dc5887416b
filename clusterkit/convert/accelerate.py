"""``accelerate launch`` and the YAML file of ``accelerate config``.

What `accelerate launch` tells the program stands in the environment, by the rules of
``accelerate/utils/launch.py`` 1.15: so it becomes the job's `env`. Pure.
"""

from __future__ import annotations

from typing import Any

from clusterkit.convert.draft import Draft, Tree
from clusterkit.convert.options import apply_meaning, apply_option
from clusterkit.jobfile.command import Used
from clusterkit.jobfile.launcher_options import ACCELERATE, CONVERT, OURS, each
from clusterkit.jobfile.yaml_file import parse_yaml

_TYPES = {
    "NO": "", "MULTI_GPU": "", "MULTI_CPU": "use_cpu", "FSDP": "use_fsdp",
    "DEEPSPEED": "use_deepspeed", "MEGATRON_LM": "use_megatron_lm",
}  # fmt: skip
_SECTIONS = {
    "fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_",
    "deepspeed_config": "", "megatron_lm_config": "megatron_lm_",
    "parallelism_config": "parallelism_config_", "mpirun_config": "mpirun_",
}  # fmt: skip
_PREFIXES = ("fsdp_", "megatron_lm_", "parallelism_config_", "fp8_", "dynamo_")
_FILTERS = {
    "deepspeed_inclusion_filter": "entry.include", "deepspeed_exclusion_filter": "entry.exclude",
}  # fmt: skip
_MEANINGS = each(
    "machine_rank main_process_ip main_process_port rdzv_backend rdzv_conf same_network "
    "main_training_function deepspeed_multinode_launcher multi_gpu", OURS,
) | {
    "mixed_precision": "env.ACCELERATE_MIXED_PRECISION",
    "mpirun_ccl": "-ranks meet as torchrun's do",
} | _FILTERS  # fmt: skip
# What `accelerate launch` sets where nothing is said, and Accelerator itself would not.
_FSDP_DEFAULTS = {
    "fsdp_version": "1", "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_reshard_after_forward": "true", "fsdp_offload_params": "false",
    "fsdp_min_num_params": "100000000", "fsdp_forward_prefetch": "false",
    "fsdp_use_orig_params": "true", "fsdp_cpu_ram_efficient_loading": "true",
    "fsdp_sync_module_states": "true", "fsdp_activation_checkpointing": "false",
    "fsdp_activation_checkpointing_offload": "false",
}  # fmt: skip
_MEGATRON_DEFAULTS = {
    "megatron_lm_tp_degree": "1", "megatron_lm_pp_degree": "1",
    "megatron_lm_gradient_clipping": "1.0", "megatron_lm_use_custom_fsdp": "False",
}  # fmt: skip
_PARALLELISM_DEFAULTS = {
    "parallelism_config_dp_replicate_size": "1", "parallelism_config_dp_shard_size": "1",
    "parallelism_config_tp_size": "1", "parallelism_config_cp_size": "1",
    "parallelism_config_cp_backend": "torch", "parallelism_config_sp_size": "1",
    "parallelism_config_sp_backend": "deepspeed",
}  # fmt: skip
_USES = {
    "use_fsdp": ("ACCELERATE_USE_FSDP", _FSDP_DEFAULTS, "fsdp_"),
    "use_megatron_lm": ("ACCELERATE_USE_MEGATRON_LM", _MEGATRON_DEFAULTS, "megatron_lm_"),
    "use_parallelism_config": (
        "ACCELERATE_USE_PARALLELISM_CONFIG", _PARALLELISM_DEFAULTS, "parallelism_config_",
    ),
}  # fmt: skip
_DEEPSPEED = {
    "zero_stage": "DEEPSPEED_ZERO_STAGE",
    "gradient_accumulation_steps": "GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "GRADIENT_CLIPPING",
    "offload_optimizer_device": "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "offload_optimizer_nvme_path": "DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
    "offload_param_nvme_path": "DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
    "zero3_init_flag": "DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "deepspeed_config_file": "DEEPSPEED_CONFIG_FILE",
    "deepspeed_moe_layer_cls_names": "DEEPSPEED_MOE_LAYER_CLS_NAMES",
}
_OLD = {"fsdp_backward_prefetch_policy": "fsdp_backward_prefetch"}
"""Keys of older versions."""
_LOWER = frozenset(
    {"gradient_clipping", "offload_optimizer_device", "offload_param_device", "zero3_init_flag",
     "zero3_save_16bit_model"}
)  # fmt: skip


def option(draft: Draft, used: Used) -> None:
    """Convert one option; those that a config file may also set wait for `finish`."""
    name = used.name.lstrip("-").replace("-", "_")
    if name == "cpu" or used.meaning == CONVERT:
        draft.settings["use_cpu" if name == "cpu" else name] = (used.value or "true", used.written)
    elif name in _CONFIGURED:
        draft.settings[name] = (used.value, used.written)
    else:
        apply_option(draft, used)


_CONFIGURED = frozenset(["num_processes", "num_machines", "mixed_precision"])


def finish(draft: Draft) -> None:
    """Apply the settings of the command, which override those of its config file."""
    settings = draft.settings
    if "config_file" in settings:
        path, written = settings.pop("config_file")
        if (text := draft.file(written, path)) is None:
            return
        tree = Tree(draft, parse_yaml(text, path))
        draft.note(written, "read, as below", "job")
        here = draft.at
        _read_config(draft, tree)
        draft.at = here
    _apply(draft)


def config(draft: Draft, tree: Tree) -> None:
    """Convert the file of ``accelerate config``."""
    _read_config(draft, tree)
    draft.key("accelerate", "launcher", ACCELERATE.launcher)
    _apply(draft)


def _read_config(draft: Draft, tree: Tree) -> None:
    tree.expect(dict.fromkeys(_SECTIONS, dict))
    for key, value in tree.each():
        at = draft.at
        if key in _SECTIONS:
            if key == "deepspeed_config" and value:
                fields = ",".join(value)
                draft.settings.setdefault("deepspeed_fields", (fields, key))
            if key == "parallelism_config" and value:
                draft.settings.setdefault("use_parallelism_config", ("true", key))
            for name, below in tree.each(key) if value else ():
                name = _OLD.get(name, name)
                full = name if name.startswith(_SECTIONS[key]) else _SECTIONS[key] + name
                _from_file(draft, full, below, f"{key}.{name}")
        elif key == "compute_environment":
            if value == "LOCAL_MACHINE":
                draft.drop(f"{key}: {value}", "the cluster entry says where the job runs")
            else:
                draft.refuse(f"{key}: {value}", "clusterkit does not rent machines")
        elif key == "distributed_type":
            if str(value) not in _TYPES:
                draft.refuse(f"{key}: {value}", "clusterkit runs on CPUs and GPUs")
            else:
                draft.note(f"{key}: {value}", "the options below configure it", "job")
                if _TYPES[value]:
                    draft.settings.setdefault(_TYPES[value], ("true", f"{key}: {value}"))
        elif key.startswith("tpu_") or key in ("downcast_bf16", "commands", "command_file"):
            if str(value).lower() in ("no", "false", "none", "[]"):
                draft.drop(f"{key}: {value}", "clusterkit runs on CPUs and GPUs")
            else:
                draft.refuse(f"{key}: {value}", "clusterkit runs on CPUs and GPUs")
        else:
            _from_file(draft, key, value, key)
        draft.at = at
    draft.at = ""


def _from_file(draft: Draft, name: str, value: Any, origin: str) -> None:
    if value is None:
        draft.drop(f"{origin}:", "it has no value")
        return
    text = str(value).lower() if isinstance(value, bool) else str(value)
    shown = f"{origin}: {text}"
    if name in draft.settings:
        draft.drop(shown, f"the command says {draft.settings[name][1]}")
    elif name == "num_processes" and text == "-1":
        draft.drop(shown, "the command sets the number")
    else:
        draft.settings[name] = (text, shown)
        draft.places[name] = draft.at


def _apply(draft: Draft) -> None:
    settings, here = draft.settings, draft.at
    nodes = 1
    if "num_machines" in settings:
        text, origin = settings["num_machines"]
        draft.at = draft.places.get("num_machines", here)
        nodes = draft.integer(origin, text) or 1
        draft.key(origin, "nodes", nodes)
    if _true(settings.get("use_cpu")) and "mpirun_hostfile" not in settings:
        # Its launcher for CPUs starts one process on each machine, whatever the number says.
        text, origin = settings.pop("num_processes", ("1", "on CPUs"))
        draft.at = draft.places.get("num_processes", here)
        became = "gpus_per_node: 1, on CPUs accelerate starts one process on each machine"
        draft.key(origin, "gpus_per_node", 1, became)
    for flag, (name, defaults, prefix) in _USES.items():
        if _true(settings.get(flag)):
            draft.at = draft.places.get(flag, here)
            draft.env(settings[flag][1], name, "true")
            for key, value in defaults.items():
                settings.setdefault(key, (value, f"{key}, accelerate's default"))
        else:
            for key in [key for key in settings if key.startswith(prefix)]:
                text, origin = settings.pop(key)
                draft.at = draft.places.get(key, here)
                draft.drop(origin, f"it has no effect without {flag}")
        settings.pop(flag, None)
    deepspeed = _true(settings.pop("use_deepspeed", None))
    if deepspeed:
        draft.at = here
        draft.env("DeepSpeed", "ACCELERATE_USE_DEEPSPEED", "true")
        fields = settings.pop("deepspeed_fields", ("", ""))[0]
        if "mixed_precision" in draft.places:
            fields = f"{fields},mixed_precision".lstrip(",")
        draft.env("DeepSpeed", "ACCELERATE_CONFIG_DS_FIELDS", fields)
    settings.pop("deepspeed_fields", None)
    for name, (text, origin) in settings.items():
        draft.at = draft.places.get(name, here)
        _setting(draft, name, text, origin, nodes, deepspeed)
    draft.at = here
    if "gpus_per_node" not in draft.job and not draft.refused:
        draft.key("no --num_processes", "gpus_per_node", "auto")


def _setting(draft: Draft, name: str, text: str, origin: str, nodes: int, deepspeed: bool) -> None:
    """Apply one setting of the command or of the file."""
    yes = text.lower() in ("true", "yes", "1")
    option = f"--{name}".replace("_", "-")
    if name.startswith(_PREFIXES) and not {option} & (ACCELERATE.values.keys() | ACCELERATE.flags):
        draft.refuse(origin, "accelerate has no such option")
    elif name == "num_machines":
        pass
    elif name == "num_processes":
        if (ranks := draft.integer(origin, text)) is not None:
            if ranks % nodes:
                draft.refuse(origin, f"{ranks} ranks cannot be divided among {nodes} nodes")
            else:
                draft.key(origin, "gpus_per_node", ranks // nodes)
    elif name in _FILTERS and "deepspeed_hostfile" not in draft.settings:
        draft.refuse(origin, "no --deepspeed_hostfile says which hosts there are")
    elif name in _MEANINGS:
        apply_meaning(draft, origin, _MEANINGS[name], text)
    elif name == "use_cpu":
        if yes:
            draft.key(origin, "device", "cpu")
        else:
            draft.drop(origin, "GPUs are used when there are some")
    elif name == "gpu_ids":
        if text == "all":
            draft.drop(origin, "all visible GPUs is the default")
        else:
            draft.todo(origin, f"export CUDA_VISIBLE_DEVICES={text} where you submit")
    elif name in ("debug", "enable_cpu_affinity"):
        variable = "ACCELERATE_DEBUG_MODE" if name == "debug" else "ACCELERATE_CPU_AFFINITY"
        if yes:
            draft.env(origin, variable, "true" if name == "debug" else "1")
        else:
            draft.drop(origin, "as without it")
    elif name in _DEEPSPEED:
        if deepspeed:
            value = text.lower() if name in _LOWER else text
            draft.env(origin, f"ACCELERATE_{_DEEPSPEED[name]}", value)
        else:
            draft.drop(origin, "it has no effect without use_deepspeed")
    elif name in ("deepspeed_hostfile", "mpirun_hostfile"):
        if hosts := draft.hostfile(origin, text):
            draft.ssh(origin, hosts)
    elif name == "dynamo_backend":
        draft.env(origin, "ACCELERATE_DYNAMO_BACKEND", text.upper())
    elif name.startswith("dynamo_"):
        value = str(yes) if name.startswith("dynamo_use") else text
        draft.env(origin, f"ACCELERATE_{name.upper()}", value)
    elif name.startswith("fsdp_"):
        short = {"fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
        value = text.lower() if text in ("True", "False") else text
        draft.env(origin, short.get(name, name.upper()), value)
    elif name.startswith(("megatron_lm_", "parallelism_config_")):
        draft.env(origin, name.upper(), text)
    elif name == "fp8_override_linear_precision":
        for each, flag in zip(("FPROP", "DGRAD", "WGRAD"), text.split(","), strict=False):
            draft.env(origin, f"ACCELERATE_FP8_OVERRIDE_{each}", str(flag.strip() == "true"))
    elif name.startswith("fp8_"):
        draft.env(origin, f"ACCELERATE_{name.upper()}", text)
    else:
        draft.refuse(origin, "clusterkit does not know this setting of accelerate")


def _true(setting: tuple[str, str] | None) -> bool:
    return setting is not None and setting[0].lower() in ("true", "yes", "1")
