"""``accelerate launch`` and the YAML file of ``accelerate config``.

What `accelerate launch` tells the program stands in the environment, by the rules of
``accelerate/utils/launch.py`` 1.15: so it becomes the job's `env`. Pure.
"""

from __future__ import annotations

from typing import Any

from clusterkit.convert.options import by_meaning, meant
from clusterkit.convert.sheet import Sheet, Tree
from clusterkit.jobfile.command import Used
from clusterkit.jobfile.launcher_options import ACCELERATE, CONVERT, OURS, each
from clusterkit.yaml_file import parse_yaml

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
_MEANINGS = each(
    "machine_rank main_process_ip main_process_port rdzv_backend rdzv_conf same_network "
    "main_training_function deepspeed_multinode_launcher multi_gpu", OURS,
) | {
    "mixed_precision": "env.ACCELERATE_MIXED_PRECISION",
    "mpirun_ccl": "-ranks meet as torchrun's do",
    "deepspeed_inclusion_filter": "entry.include", "deepspeed_exclusion_filter": "entry.exclude",
}  # fmt: skip
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


def option(sheet: Sheet, used: Used) -> None:
    """One option of the command; what a config file says as well waits for `finish`."""
    name = used.name.lstrip("-").replace("-", "_")
    if name in ("config_file", "cpu", "use_deepspeed") or used.meaning == CONVERT:
        sheet.settings["use_cpu" if name == "cpu" else name] = (used.value or "true", used.written)
    elif name in _CONFIGURED:
        sheet.settings[name] = (used.value, used.written)
    else:
        by_meaning(sheet, used)


_CONFIGURED = frozenset(
    ["num_processes", "num_machines", "mixed_precision", "gradient_accumulation_steps"]
)


def finish(sheet: Sheet) -> None:
    """The settings of the command, then those of its config file that it does not override."""
    settings = sheet.settings
    if "config_file" in settings:
        path, written = settings.pop("config_file")
        if (text := sheet.file(written, path)) is None:
            return
        tree = Tree(sheet, parse_yaml(text, path))
        sheet.note(written, "read, as below", "job")
        here = sheet.at
        _read_config(sheet, tree)
        sheet.at = here
    _apply(sheet)


def config(sheet: Sheet, tree: Tree) -> None:
    """The file of ``accelerate config`` alone."""
    _read_config(sheet, tree)
    sheet.key("accelerate", "launcher", ACCELERATE.launcher)
    _apply(sheet)


def _read_config(sheet: Sheet, tree: Tree) -> None:
    tree.expect(dict.fromkeys(_SECTIONS, dict))
    for key, value in tree.each():
        at = sheet.at
        if key in _SECTIONS:
            if key == "deepspeed_config" and value:
                fields = ",".join(value)
                sheet.settings.setdefault("deepspeed_fields", (fields, key))
            if key == "parallelism_config" and value:
                sheet.settings.setdefault("use_parallelism_config", ("true", key))
            for name, below in tree.each(key) if value else ():
                name = _OLD.get(name, name)
                full = name if name.startswith(_SECTIONS[key]) else _SECTIONS[key] + name
                _from_file(sheet, full, below, f"{key}.{name}")
        elif key == "compute_environment":
            if value == "LOCAL_MACHINE":
                sheet.drop(f"{key}: {value}", "the cluster's entry says where")
            else:
                sheet.refuse(f"{key}: {value}", "clusterkit does not rent machines")
        elif key == "distributed_type":
            if str(value) not in _TYPES:
                sheet.refuse(f"{key}: {value}", "clusterkit runs on CPUs and GPUs")
            else:
                sheet.note(f"{key}: {value}", "the options below say what it needs", "job")
                if _TYPES[value]:
                    sheet.settings.setdefault(_TYPES[value], ("true", f"{key}: {value}"))
        elif key.startswith("tpu_") or key in ("downcast_bf16", "commands", "command_file"):
            if str(value).lower() in ("no", "false", "none", "[]"):
                sheet.drop(f"{key}: {value}", "clusterkit runs on CPUs and GPUs")
            else:
                sheet.refuse(f"{key}: {value}", "clusterkit runs on CPUs and GPUs")
        else:
            _from_file(sheet, key, value, key)
        sheet.at = at
    sheet.at = ""


def _from_file(sheet: Sheet, name: str, value: Any, what: str) -> None:
    if value is None:
        sheet.drop(f"{what}:", "it has no value")
        return
    text = str(value).lower() if isinstance(value, bool) else str(value)
    shown = f"{what}: {text}"
    if name in sheet.settings:
        sheet.drop(shown, f"the command says {sheet.settings[name][1]}")
    elif name == "num_processes" and text == "-1":
        sheet.drop(shown, "as many as the command says")
    else:
        sheet.settings[name] = (text, shown)
        sheet.places[name] = sheet.at


def _apply(sheet: Sheet) -> None:
    settings, here = sheet.settings, sheet.at
    nodes = 1
    if "num_machines" in settings:
        text, what = settings["num_machines"]
        sheet.at = sheet.places.get("num_machines", here)
        nodes = sheet.whole(what, text) or 1
        sheet.key(what, "nodes", nodes)
    if _true(settings.get("use_cpu")) and "mpirun_hostfile" not in settings:
        # Its launcher for CPUs starts one process on each machine, whatever the number says.
        text, what = settings.pop("num_processes", ("1", "on CPUs"))
        sheet.at = sheet.places.get("num_processes", here)
        said = "gpus_per_node: 1, on CPUs accelerate starts one process on each machine"
        sheet.key(what, "gpus_per_node", 1, said)
    for flag, (name, defaults, prefix) in _USES.items():
        if _true(settings.get(flag)):
            sheet.at = sheet.places.get(flag, here)
            sheet.env(settings[flag][1], name, "true")
            for key, value in defaults.items():
                settings.setdefault(key, (value, f"{key}, accelerate's default"))
        else:
            for key in [key for key in settings if key.startswith(prefix)]:
                text, what = settings.pop(key)
                sheet.at = sheet.places.get(key, here)
                sheet.drop(what, f"it means nothing without {flag}")
        settings.pop(flag, None)
    deepspeed = _true(settings.pop("use_deepspeed", None))
    if deepspeed:
        sheet.at = here
        sheet.env("DeepSpeed", "ACCELERATE_USE_DEEPSPEED", "true")
        fields = settings.pop("deepspeed_fields", ("", ""))[0]
        if "mixed_precision" in sheet.places:
            fields = f"{fields},mixed_precision".lstrip(",")
        sheet.env("DeepSpeed", "ACCELERATE_CONFIG_DS_FIELDS", fields)
    settings.pop("deepspeed_fields", None)
    for name, (text, what) in settings.items():
        sheet.at = sheet.places.get(name, here)
        _setting(sheet, name, text, what, nodes, deepspeed)
    sheet.at = here
    if "gpus_per_node" not in sheet.job and not sheet.refused:
        sheet.key("no --num_processes", "gpus_per_node", "auto")


def _setting(sheet: Sheet, name: str, text: str, what: str, nodes: int, deepspeed: bool) -> None:
    """One setting, of the command or of the file."""
    yes = text.lower() in ("true", "yes", "1")
    option = f"--{name}".replace("_", "-")
    if name.startswith(_PREFIXES) and not {option} & (ACCELERATE.values.keys() | ACCELERATE.flags):
        sheet.refuse(what, "accelerate has no such option")
    elif name == "num_machines":
        pass
    elif name == "num_processes":
        if (ranks := sheet.whole(what, text)) is not None:
            if ranks % nodes:
                sheet.refuse(what, f"{ranks} ranks cannot be divided among {nodes} nodes")
            else:
                sheet.key(what, "gpus_per_node", ranks // nodes)
    elif name in _MEANINGS:
        meant(sheet, what, _MEANINGS[name], text)
    elif name == "use_cpu":
        if yes:
            sheet.key(what, "device", "cpu")
        else:
            sheet.drop(what, "GPUs are used when there are some")
    elif name == "gpu_ids":
        if text == "all":
            sheet.drop(what, "all that are visible, as without it")
        else:
            sheet.yours(what, f"export CUDA_VISIBLE_DEVICES={text} where you submit")
    elif name in ("debug", "enable_cpu_affinity"):
        variable = "ACCELERATE_DEBUG_MODE" if name == "debug" else "ACCELERATE_CPU_AFFINITY"
        if yes:
            sheet.env(what, variable, "true" if name == "debug" else "1")
        else:
            sheet.drop(what, "as without it")
    elif name in _DEEPSPEED:
        if deepspeed:
            value = text.lower() if name in _LOWER else text
            sheet.env(what, f"ACCELERATE_{_DEEPSPEED[name]}", value)
        else:
            sheet.drop(what, "it means nothing without use_deepspeed")
    elif name in ("deepspeed_hostfile", "mpirun_hostfile"):
        if hosts := sheet.hostfile(what, text):
            sheet.ssh(what, hosts)
    elif name == "dynamo_backend":
        sheet.env(what, "ACCELERATE_DYNAMO_BACKEND", text.upper())
    elif name.startswith("dynamo_"):
        value = str(yes) if name.startswith("dynamo_use") else text
        sheet.env(what, f"ACCELERATE_{name.upper()}", value)
    elif name.startswith("fsdp_"):
        short = {"fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
        value = text.lower() if text in ("True", "False") else text
        sheet.env(what, short.get(name, name.upper()), value)
    elif name.startswith(("megatron_lm_", "parallelism_config_")):
        sheet.env(what, name.upper(), text)
    elif name == "fp8_override_linear_precision":
        for each, flag in zip(("FPROP", "DGRAD", "WGRAD"), text.split(","), strict=False):
            sheet.env(what, f"ACCELERATE_FP8_OVERRIDE_{each}", str(flag.strip() == "true"))
    elif name.startswith("fp8_"):
        sheet.env(what, f"ACCELERATE_{name.upper()}", text)
    else:
        sheet.refuse(what, "clusterkit knows no such setting of accelerate")


def _true(setting: tuple[str, str] | None) -> bool:
    return setting is not None and setting[0].lower() in ("true", "yes", "1")
