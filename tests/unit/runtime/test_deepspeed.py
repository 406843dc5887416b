from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clusterkit.batch import Batch, solve
from clusterkit.errors import BadInput
from clusterkit.runtime.deepspeed import config_dtype, load_config, recipe

SIXTY_FOUR_ON_FOUR = solve(data_parallel=4, global_size=64, micro=8)


def load(
    tmp_path: Path, config: object, batch: Batch = SIXTY_FOUR_ON_FOUR, **settings: Any
) -> dict[str, Any]:
    path = tmp_path / "ds.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return load_config(path, batch=batch, **settings)


@pytest.mark.parametrize("given", [{}, {"train_batch_size": "auto"}, {"train_batch_size": 64}])
def test_batch_numbers_are_filled_in(tmp_path: Path, given: dict[str, Any]) -> None:
    config = load(tmp_path, given)
    assert config["train_batch_size"] == 64
    assert config["train_micro_batch_size_per_gpu"] == 8
    assert config["gradient_accumulation_steps"] == 2


def test_the_config_of_24_micro_batches(tmp_path: Path) -> None:
    batch = solve(data_parallel=1, global_size=144, micro=24)
    config = load(tmp_path, {"zero_optimization": {"stage": 2}}, batch)
    numbers = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [config[name] for name in numbers] == [144, 24, 6]


def test_clipping_is_always_explicit(tmp_path: Path) -> None:
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
        ({"optimizer": {"type": "AdamW"}}, {}, "`optimizer` clashes with the program"),
        ({"scheduler": {}}, {}, "`scheduler` clashes with the program"),
        ({"zero_optimization": {"stage": 4}}, {}, "stage must be 0, 1, 2 or 3"),
        ({"zero_optimization": True}, {}, "stage must be 0, 1, 2 or 3"),
        ({"bf16": {"enabled": True}}, {"dtype": "fp32"}, "bf16 is enabled, but --dtype says fp32"),
    ],
)
def test_contradictions_are_refused(
    tmp_path: Path, config: object, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        load(tmp_path, config, **settings)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        load_config(tmp_path / "none.json", batch=SIXTY_FOUR_ON_FOUR)


def test_the_number_format_comes_from_either_side(tmp_path: Path) -> None:
    assert config_dtype(load(tmp_path, {})) == "fp32"
    assert config_dtype(load(tmp_path, {}, dtype="bf16")) == "bf16"
    assert config_dtype(load(tmp_path, {"fp16": {"enabled": True, "loss_scale": 0}})) == "fp16"
    assert config_dtype(load(tmp_path, {"fp16": {"enabled": False}}, dtype="fp32")) == "fp32"
    filled = load(tmp_path, {"fp16": {"initial_scale_power": 8}}, dtype="fp16")
    assert filled["fp16"] == {"initial_scale_power": 8, "enabled": True}


def test_the_name_tells_what_a_checkpoint_depends_on(tmp_path: Path) -> None:
    two = load(tmp_path, {"zero_optimization": {"stage": 2}})
    assert recipe(two).name == "deepspeed zero-2"
    assert recipe(load(tmp_path, {}, dtype="bf16")).name == "deepspeed zero-0 bf16"
