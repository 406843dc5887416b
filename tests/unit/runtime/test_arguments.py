from __future__ import annotations

import os

import pytest
import torch

from clusterkit.batch import Batch
from clusterkit.errors import BadInput
from clusterkit.runtime.arguments import Parser, choose_batch, choose_strategy
from clusterkit.runtime.distributed import Ranks

TWO = Ranks(rank=0, local_rank=0, node_rank=0, size=2, local_size=2)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def no_clusterkit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("CLUSTERKIT_")]:
        monkeypatch.delenv(name)


def test_a_flag_wins_over_the_environment_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_batch(Parser(None).parse_args([]), TWO) == Batch(32, 16, 1, 2)
    monkeypatch.setenv("CLUSTERKIT_GLOBAL_BATCH", "48")
    monkeypatch.setenv("CLUSTERKIT_MICRO_BATCH", "8")
    assert choose_batch(Parser(None).parse_args([]), TWO) == Batch(48, 8, 3, 2)
    args = Parser(None).parse_args(["--global-batch", "16"])
    assert choose_batch(args, TWO) == Batch(16, 8, 1, 2)


def test_checkpoints_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_bad_flags_are_bad_input(argv: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Parser(None).parse_args(argv)


def test_a_bad_environment_is_bad_input_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERKIT_CHECKPOINT_EVERY", "often")
    with pytest.raises(BadInput, match="--checkpoint-every: 'often' is not a whole number"):
        Parser(None).parse_args([])


def test_the_number_format_follows_the_device_unless_said() -> None:
    def dtype(device: torch.device, *argv: str) -> str:
        args = Parser(None).parse_args([*argv])
        return choose_strategy(args, choose_batch(args, TWO), device).dtype

    assert dtype(CPU) == "fp32"
    assert dtype(CUDA) == "bf16"
    assert dtype(CUDA, "--dtype", "fp32") == "fp32"


def test_deepspeed_needs_a_config() -> None:
    args = Parser(None).parse_args(["--strategy", "deepspeed"])
    with pytest.raises(BadInput, match="--strategy deepspeed needs a config"):
        choose_strategy(args, choose_batch(args, TWO), CPU)
