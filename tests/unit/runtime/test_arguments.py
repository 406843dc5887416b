from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from gpt_ranks import BadInput, Ranks
from gpt_settings import Batch, Mesh, Parser, choose_batch, choose_mesh, choose_strategy

DP = Mesh(shard=2)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def no_clusterkit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("CLUSTERKIT_")]:
        monkeypatch.delenv(name)


def test_batch_flag_overrides_environment_and_environment_overrides_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert choose_batch(Parser(None).parse_args([]), DP) == Batch(32, 16, 1, 2)
    monkeypatch.setenv("CLUSTERKIT_GLOBAL_BATCH", "48")
    monkeypatch.setenv("CLUSTERKIT_MICRO_BATCH", "8")
    assert choose_batch(Parser(None).parse_args([]), DP) == Batch(48, 8, 3, 2)
    args = Parser(None).parse_args(["--global-batch", "16"])
    assert choose_batch(args, DP) == Batch(16, 8, 1, 2)


def test_global_batch_flag_replaces_micro_batch_worked_out_from_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, number in {"GLOBAL_BATCH": "48", "MICRO_BATCH": "24", "ACCUMULATION": "1"}.items():
        monkeypatch.setenv(f"CLUSTERKIT_{name}", number)
    assert choose_batch(Parser(None).parse_args([]), DP) == Batch(48, 24, 1, 2)
    for argv in (["--global-batch", "8"], ["--global-batch=8"]):
        assert choose_batch(Parser(None).parse_args(argv), DP) == Batch(8, 4, 1, 2)
    args = Parser(None).parse_args(["--global-batch", "8", "--micro-batch", "1"])
    assert choose_batch(args, DP) == Batch(8, 1, 4, 2)


def test_checkpoint_settings_come_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"DIR": "/c", "EVERY": "5", "KEEP": "0", "RESUME": "never"}.items():
        monkeypatch.setenv(f"CLUSTERKIT_CHECKPOINT_{name}", value)
    args = Parser(None).parse_args([])
    assert args.checkpoint_dir == "/c"
    assert (args.checkpoint_every, args.checkpoint_keep) == (5, 0)
    assert args.checkpoint_resume == "never"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--global-batch", "many"], "argument --global-batch: 'many' is not a whole number"),
        (["--global-batch", "0"], "argument --global-batch: 0 is below 1"),
        (["--checkpoint-every", "-1"], "argument --checkpoint-every: -1 is below 0"),
        (["--strategy", "magic"], "invalid choice: 'magic'"),
        (["--strat", "ddp"], "unrecognized arguments: --strat ddp"),
    ],
)
def test_parser_raises_bad_input_for_bad_flag(argv: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Parser(None).parse_args(argv)


def test_parser_raises_bad_input_for_bad_environment_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERKIT_CHECKPOINT_EVERY", "often")
    with pytest.raises(BadInput, match="--checkpoint-every: 'often' is not a whole number"):
        Parser(None).parse_args([])


def test_dtype_follows_device_unless_flag_is_given() -> None:
    def dtype(device: torch.device, *argv: str) -> str:
        args = Parser(None).parse_args([*argv])
        return choose_strategy(args, choose_batch(args, DP), device, DP).dtype

    assert dtype(CPU) == "fp32"
    assert dtype(CUDA) == "bf16"
    assert dtype(CUDA, "--dtype", "fp32") == "fp32"


def test_deepspeed_strategy_requires_config() -> None:
    args = Parser(None).parse_args(["--strategy", "deepspeed"])
    with pytest.raises(BadInput, match="--strategy deepspeed needs a config"):
        choose_strategy(args, choose_batch(args, DP), CPU, DP)


def test_batch_comes_from_deepspeed_config_and_conflicts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8}')
    how = ["--strategy", "deepspeed", "--deepspeed-config", str(path)]
    assert choose_batch(Parser(None).parse_args(how), DP) == Batch(64, 8, 4, 2)
    args = Parser(None).parse_args([*how, "--global-batch", "32"])
    batch = choose_batch(args, DP)
    assert batch == Batch(32, 16, 1, 2)
    with pytest.raises(BadInput, match="train_batch_size is 64, but the job's batch makes it 32"):
        choose_strategy(args, batch, CPU, DP)
    path.write_text(
        '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, '
        '"gradient_accumulation_steps": 3}'
    )
    with pytest.raises(BadInput, match="global 64 = micro 8 x accumulation 3 x 2 ranks does not"):
        choose_batch(Parser(None).parse_args(how), DP)


def test_batch_is_divided_only_by_data_dimension_of_mesh() -> None:
    args = Parser(None).parse_args(["--strategy", "tp", "--mesh", "tp=2"])
    four = Ranks(rank=0, local_rank=0, node_rank=0, size=4, local_size=4)
    mesh = choose_mesh(args, four, {"name": "tiny", "layers": 2, "heads": 4, "context": 8})
    assert mesh == Mesh(shard=2, tp=2)
    assert choose_batch(args, mesh) == Batch(32, 16, 1, 2)


def test_only_rank_0_warns_of_tp_mesh_across_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    args = Parser(None).parse_args(["--strategy", "tp", "--mesh", "tp=4"])
    for rank in (0, 1):
        ranks = Ranks(rank=rank, local_rank=rank, node_rank=0, size=4, local_size=2)
        choose_mesh(args, ranks, {"name": "tiny", "layers": 2, "heads": 4, "context": 8})
    assert capsys.readouterr().err.count("warning: tp=4 reaches over nodes of 2 ranks") == 1


@pytest.mark.parametrize(("strategy", "mesh"), [("fsdp", Mesh(shard=2)), ("pp", Mesh(pp=2))])
def test_fsdp_and_pp_refuse_fp16_without_loss_scaling(strategy: str, mesh: Mesh) -> None:
    args = Parser(None).parse_args(["--strategy", strategy, "--dtype", "fp16"])
    with pytest.raises(BadInput, match=f"--dtype fp16: --strategy {strategy} does not scale"):
        choose_strategy(args, choose_batch(args, mesh), CPU, mesh)
    args = Parser(None).parse_args(["--strategy", strategy, "--dtype", "bf16"])
    assert choose_strategy(args, choose_batch(args, mesh), CPU, mesh).dtype == "bf16"


def test_pipeline_needs_one_micro_batch_per_stage_with_1f1b() -> None:
    args = Parser(None).parse_args(["--strategy", "pp"])
    mesh = Mesh(pp=3)
    assert choose_batch(args, mesh) == Batch(30, 10, 3, 1)
    few = Parser(None).parse_args(["--strategy", "pp", "--global-batch", "2"])
    batch = choose_batch(few, mesh)
    with pytest.raises(BadInput, match="--schedule 1f1b: 1 micro batch a step for 3 stages"):
        choose_strategy(few, batch, CPU, mesh)
    few.schedule = "gpipe"
    assert choose_strategy(few, batch, CPU, mesh).name == "pp"
