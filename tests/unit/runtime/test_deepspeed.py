from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gpt_deepspeed
import pytest
import torch
import torch.utils.cpp_extension
from gpt_deepspeed import (
    Engine,
    batch_numbers,
    comms_table,
    load_config,
    on_mesh,
    precision,
    strategy_name,
    with_torch_adam,
)
from gpt_ranks import BadInput, Unavailable
from gpt_settings import Batch, Mesh, solve
from torch._subclasses.fake_tensor import FakeTensorMode

SIXTY_FOUR_ON_FOUR = solve(data_parallel=4, global_size=64, micro=8)


def load(
    tmp_path: Path, config: object, batch: Batch = SIXTY_FOUR_ON_FOUR, **settings: Any
) -> dict[str, Any]:
    path = tmp_path / "ds.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return load_config(path, batch=batch, **settings)


@pytest.mark.parametrize(
    ("device", "release", "ours"),
    [("cuda", "13.0", False), ("cuda", "11.8", True), ("cuda", "13.1", True),
     ("cuda", None, True), ("cpu", "13.0", True)],
)  # fmt: skip
def test_deepspeed_compiles_adam_only_with_nvcc_of_torch_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, release: str | None, ours: bool
) -> None:
    """Debian's is 11.8 or 12.4, which does not know what torch asks of it: torch's own then."""
    for tool in ("nvcc", "ninja"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / tool).write_text(f"#!/bin/sh\necho 'tools, release {release}, V1'")
        (tmp_path / "bin" / tool).chmod(0o755)
    home = str(tmp_path) if release else None
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", home)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    params = with_torch_adam(config, device)["optimizer"]["params"]
    assert params == {"torch_adam": ours, "lr": 1e-3}


@pytest.mark.parametrize("given", [{}, {"train_batch_size": "auto"}, {"train_batch_size": 64}])
def test_config_batch_numbers_are_filled_in(tmp_path: Path, given: dict[str, Any]) -> None:
    config = load(tmp_path, given)
    assert config["train_batch_size"] == 64
    assert config["train_micro_batch_size_per_gpu"] == 8
    assert config["gradient_accumulation_steps"] == 2


def test_config_takes_micro_batch_24_with_accumulation_6(tmp_path: Path) -> None:
    batch = solve(data_parallel=1, global_size=144, micro=24)
    config = load(tmp_path, {"zero_optimization": {"stage": 2}}, batch)
    numbers = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [config[name] for name in numbers] == [144, 24, 6]


def test_config_gradient_clipping_is_always_explicit(tmp_path: Path) -> None:
    assert load(tmp_path, {})["gradient_clipping"] == 1.0
    assert load(tmp_path, {}, clip=0.0)["gradient_clipping"] == 0.0
    assert load(tmp_path, {"gradient_clipping": 0.5})["gradient_clipping"] == 0.5
    assert load(tmp_path, {"gradient_clipping": "auto"}, clip=2.0)["gradient_clipping"] == 2.0


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        ("{", {}, "is not JSON"),
        ([1], {}, "must be a JSON object"),
        ({"train_batch_size": 32}, {}, r"train_batch_size is 32, but the job's batch makes it 64"),
        ({"gradient_clipping": 0.5}, {"clip": 1.0}, r"gradient_clipping is 0\.5, but --clip makes"),
        ({"optimizer": {"params": {}}}, {}, "optimizer must have a type"),
        ({"scheduler": "WarmupLR"}, {}, "scheduler must have a type"),
        ({"optimizer": {"type": "AdamW", "params": 3}}, {}, r"optimizer\.params must be an object"),
        (
            {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}}},
            {},
            r"scheduler\.params\.total_num_steps is auto, and this program does not say",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}},
            {"schedule": {"lr": 0.01}},
            r"optimizer\.params\.lr is 0\.1, but the program's schedule goes up to 0\.01",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
            {},
            "only stage 3 can offload to nvme",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            {},
            "nvme needs nvme_path",
        ),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_param": {"device": "nvme", "nvme_path": "/no/such"},
                }
            },
            {},
            r"nvme_path: /no/such is not a folder",
        ),
        ({"zero_optimization": {"stage": 4}}, {}, "stage must be 0, 1, 2 or 3"),
        ({"zero_optimization": True}, {}, "stage must be 0, 1, 2 or 3"),
        ({"bf16": {"enabled": True}}, {"dtype": "fp32"}, "bf16 is enabled, but --dtype says fp32"),
    ],
)
def test_contradictory_deepspeed_config_is_refused(
    tmp_path: Path, config: object, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        load(tmp_path, config, **settings)


@pytest.mark.parametrize("missing", ["library", "header"])
def test_nvme_offload_without_libaio_names_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": nvme}}
    found = None if missing == "library" else "libaio.so.1"
    monkeypatch.setattr("ctypes.util.find_library", lambda name: found)
    monkeypatch.setattr(gpt_deepspeed, "_INCLUDES", ())
    monkeypatch.setenv("CPATH", "" if missing == "header" else str(tmp_path))
    (tmp_path / "libaio.h").touch()
    with pytest.raises(Unavailable, match="nvme needs libaio") as error:
        load(tmp_path, config)
    assert "apt-get install libaio-dev" in str(error.value.hint)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: "libaio.so.1")
    monkeypatch.setenv("CPATH", str(tmp_path))
    assert load(tmp_path, config)["zero_optimization"]["offload_optimizer"] == nvme


def test_enabled_monitor_without_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="wandb is enabled, and the package wandb"):
        load(tmp_path, {"wandb": {"enabled": True}})
    assert load(tmp_path, {"wandb": {"enabled": False}})["wandb"] == {"enabled": False}


def test_auto_values_are_filled_from_program_schedule(tmp_path: Path) -> None:
    given = {
        "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95], "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": "auto", "warmup_num_steps": 5},
        },
    }
    numbers = {"lr": 0.003, "weight_decay": 0.1, "steps": 200, "warmup": 20}
    config = load(tmp_path, given, schedule=numbers)
    assert config["optimizer"]["params"] == {"betas": [0.9, 0.95], "weight_decay": 0.1, "lr": 0.003}
    assert config["scheduler"]["params"] == {"total_num_steps": 200, "warmup_num_steps": 5}


def test_batch_numbers_reads_config_and_ignores_auto(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto"}')
    assert batch_numbers(path) == {"global_size": 64}
    path.write_text('{"train_batch_size": "many"}')
    with pytest.raises(BadInput, match=r"train_batch_size is 'many'; it must be a whole number"):
        batch_numbers(path)


def test_comms_table_lists_operation_size_count_and_times() -> None:
    entry = {"count": 6, "total_latency_ms": 12.0, "avg_latency_ms": 2.0}
    head, line = comms_table({"all_reduce": {4096: entry}}).splitlines()
    assert head.split() == ["operation", "bytes", "count", "total", "ms", "mean", "ms"]
    assert line.split() == ["all_reduce", "4096", "6", "12.00", "2.000"]


def test_zero_2_refuses_divided_model_construction(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="ZeRO-2 has whole ones"):
        on_mesh(load(tmp_path, {"zero_optimization": {"stage": 2}}), Mesh(), divided=True)


@pytest.mark.parametrize(
    ("stage", "mesh", "message"),
    [
        (2, Mesh(pp=2), "ZeRO-2 divides gradients, so they would travel with every micro batch"),
        (3, Mesh(pp=2), "ZeRO-3 divides parameters, so they would travel"),
        (0, Mesh(pp=2), "ZeRO-0 clips every stage of a pipeline by itself"),
        (1, Mesh(pp=2, tp=2), "cuts either layers or stages"),
    ],
)
def test_mesh_that_deepspeed_cannot_use_is_refused(
    tmp_path: Path, stage: int, mesh: Mesh, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        on_mesh(load(tmp_path, {"zero_optimization": {"stage": stage}}), mesh)


def test_autotp_size_follows_mesh_and_conflict_is_refused(tmp_path: Path) -> None:
    config = load(tmp_path, {"zero_optimization": {"stage": 1}})
    cut = on_mesh(config, Mesh(tp=2))
    assert cut["tensor_parallel"] == {"autotp_size": 2}
    assert strategy_name(cut, Mesh(tp=2)) == "deepspeed zero-1 tp=2"
    config["tensor_parallel"] = {"autotp_size": 4}
    with pytest.raises(BadInput, match=r"autotp_size is 4, --mesh says tp=2"):
        on_mesh(config, Mesh(tp=2))


def test_missing_deepspeed_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        load_config(tmp_path / "none.json", batch=SIXTY_FOUR_ON_FOUR)


def test_precision_comes_from_config_or_dtype_flag(tmp_path: Path) -> None:
    assert precision(load(tmp_path, {})) == "fp32"
    assert precision(load(tmp_path, {}, dtype="bf16")) == "bf16"
    assert precision(load(tmp_path, {"fp16": {"enabled": True, "loss_scale": 0}})) == "fp16"
    assert precision(load(tmp_path, {"fp16": {"enabled": False}}, dtype="fp32")) == "fp32"
    filled = load(tmp_path, {"fp16": {"initial_scale_power": 8}}, dtype="fp16")
    assert filled["fp16"] == {"initial_scale_power": 8, "enabled": True}


def test_strategy_name_includes_zero_stage_and_precision(tmp_path: Path) -> None:
    two = load(tmp_path, {"zero_optimization": {"stage": 2}})
    assert strategy_name(two, Mesh()) == "deepspeed zero-2"
    assert strategy_name(load(tmp_path, {}, dtype="bf16"), Mesh()) == "deepspeed zero-0 bf16"


@pytest.mark.parametrize("pipeline", [False, True])
def test_engine_step_reads_no_value_back_from_gpu(pipeline: bool) -> None:
    """It would wait until the GPU has done all that it was given, in every step."""
    with FakeTensorMode():  # whose tensors have no value to read
        loss = torch.zeros((), device="cuda:0")
        made = Mock(return_value=loss, train_batch=Mock(return_value=loss))
        made.optimizer.param_groups = [{"lr": 0.0}]
        made.get_global_grad_norm.return_value = torch.ones((), device="cuda:0")
        engine = object.__new__(Engine)
        engine.engine, engine._pipeline, engine._scheduled = made, pipeline, False
        mean, norm, rate = engine.step([(None, None)], 0.5)
    assert mean.device == norm.device == torch.device("cuda:0")
    assert (rate, made.optimizer.param_groups) == (0.5, [{"lr": 0.5}])
