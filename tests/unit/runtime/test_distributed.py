from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gpt_ranks as module
import pytest
import torch
from gpt_ranks import (
    BadInput,
    Ranks,
    Unavailable,
    World,
    choose_device,
    distributed,
    read_ranks,
    run,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.runtime.conftest import GPT

ADDRESS = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    **ADDRESS,
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    **ADDRESS,
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    **ADDRESS,
}


@pytest.mark.parametrize("environ", [TORCHRUN, OPEN_MPI, SLURM], ids=["torchrun", "mpi", "slurm"])
def test_read_ranks_agrees_for_torchrun_mpi_and_slurm(environ: dict[str, str]) -> None:
    assert read_ranks(environ) == Ranks(rank=5, local_rank=1, node_rank=1, size=8, local_size=4)


def test_node_rank_overrides_torchrun_group_rank() -> None:
    assert read_ranks(TORCHRUN | {"NODE_RANK": "1", "GROUP_RANK": "0"}).node_rank == 1


def test_read_ranks_without_launcher_gives_world_size_1() -> None:
    assert read_ranks({}) == Ranks(rank=0, local_rank=0, node_rank=0, size=1, local_size=1)


def test_read_ranks_without_local_rank_assumes_one_rank_per_node() -> None:
    ranks = read_ranks({"RANK": "2", "WORLD_SIZE": "3", **ADDRESS})
    assert ranks == Ranks(rank=2, local_rank=0, node_rank=2, size=3, local_size=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"RANK": "five"}, "RANK is 'five'; it must be a whole number"),
        ({"RANK": "8"}, "rank 8 of 8"),
        ({"LOCAL_RANK": "4"}, "local rank 4 of 4"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set"),
    ],
)
def test_read_ranks_refuses_bad_environment_by_name(
    change: dict[str, str | None], message: str
) -> None:
    environ = {key: value for key, value in (TORCHRUN | change).items() if value is not None}
    with pytest.raises(BadInput, match=message):
        read_ranks(environ)


@pytest.mark.parametrize("environ", [OPEN_MPI, SLURM], ids=["mpi", "slurm"])
def test_mpi_and_slurm_ranks_require_master_port(environ: dict[str, str]) -> None:
    without = {key: value for key, value in environ.items() if key != "MASTER_PORT"}
    with pytest.raises(BadInput, match="MASTER_PORT is not set, and 8 ranks need it"):
        read_ranks(without)


LONE = Ranks(rank=0, local_rank=0, node_rank=0, size=1, local_size=1)


def test_choose_device_follows_clusterkit_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERKIT_DEVICE", "cpu")
    assert choose_device(LONE) == torch.device("cpu")
    monkeypatch.setenv("CLUSTERKIT_DEVICE", "tpu")
    with pytest.raises(BadInput, match="CLUSTERKIT_DEVICE is 'tpu'; it must be cpu or cuda"):
        choose_device(LONE)


@pytest.mark.parametrize(
    ("gpus", "visible", "local_rank", "local_size", "index"),
    [
        (4, None, 3, 4, 3),
        (1, None, 0, 1, 0),
        (1, "3", 3, 4, 0),  # each rank sees one of its own
        (1, None, 0, 2, None),  # both would take it
        (1, "0,9", 0, 2, None),
        (2, None, 3, 4, None),
        (0, None, 0, 1, None),
    ],
)
def test_choose_device_gives_each_rank_its_own_gpu_or_refuses(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    visible: str | None,
    local_rank: int,
    local_size: int,
    index: int | None,
) -> None:
    monkeypatch.setenv("CLUSTERKIT_DEVICE", "cuda")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    ranks = Ranks(local_rank, local_rank, 0, size=local_size, local_size=local_size)
    if index is None:
        with pytest.raises(BadInput, match=f"^{local_size} ranks? .* torch sees {gpus} GPUs?$"):
            choose_device(ranks)
    else:
        assert choose_device(ranks) == torch.device("cuda", index)


def test_duplicate_gpu_error_of_nccl_names_ranks_and_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a rank sees does not tell whether its one GPU is also another's."""
    said = (
        "NCCL error in: NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for details), "
        "NCCL version 2.29.7\nncclInvalidUsage: This usually reflects invalid usage of NCCL "
        "library.\nLast error:\n"
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 17000"
    )
    monkeypatch.setattr(os, "environ", dict(os.environ))  # distributed() writes into it
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    refuse = Mock(side_effect=torch.distributed.DistBackendError(said))
    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)
    two = Ranks(rank=1, local_rank=1, node_rank=0, size=2, local_size=2)
    with (
        pytest.raises(BadInput, match=r"2 ranks on this node, but torch sees 1 GPU$"),
        distributed(two, torch.device("cuda", 0)),
    ):
        pass


def test_distributed_refuses_timeout_that_is_not_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERKIT_TIMEOUT", "soon")
    with (
        pytest.raises(BadInput, match="CLUSTERKIT_TIMEOUT is 'soon'"),
        distributed(LONE, torch.device("cpu")),
    ):
        pass


def test_rendezvous_timeout_names_rank_and_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # distributed() writes into it
    for name, value in {
        "CLUSTERKIT_TIMEOUT": "0.2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        os.environ[name] = value
    two = Ranks(rank=0, local_rank=0, node_rank=0, size=2, local_size=2)
    with (
        pytest.raises(Unavailable, match=r"rank 0 could not meet .* at 127\.0\.0\.1:0"),
        distributed(two, torch.device("cpu")),
    ):
        pass


def test_world_of_one_needs_no_collective() -> None:
    world = World(**vars(LONE), device=torch.device("cpu"), backend="gloo")
    assert world.mean(torch.tensor(2.5), True, torch.tensor([0.1]), 0) == [
        2.5, 1.0, float(torch.tensor(0.1)), 0.0,
    ]  # fmt: skip
    assert world.gather("here") == ["here"]
    world.barrier()


class Copies(TorchDispatchMode):
    """Notes what goes between host and GPU, and whether the host waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        done = func(*args, **kwargs)  # reading a value back raises: a fake tensor has none
        if name in ("aten::_to_copy", "aten::copy_"):
            source = args[name == "aten::copy_"]
            free = kwargs.get("non_blocking") or args[-1] is True
            if source.device != done.device:
                self.noted.append(f"{source.device} -> {done.device}{'' if free else ' blocks'}")
        return done


def test_mean_later_copies_to_and_from_gpu_without_blocking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # needs a driver
    monkeypatch.setattr(torch.cuda, "Event", Mock())
    gpu = World(**vars(LONE), device=torch.device("cuda", 0), backend="nccl")
    with FakeTensorMode(), Copies() as copies:
        loss = torch.zeros((), dtype=torch.float32, device="cuda:0")
        norm = torch.zeros((), dtype=torch.float64, device="cuda:0")
        gpu.mean_later(loss, norm, False, 2)
    assert copies.noted == ["cpu -> cuda:0", "cuda:0 -> cpu"]  # one each, and none blocks


@pytest.mark.parametrize(
    ("result", "code"),
    [(None, None), (0, 0), (143, 143), (BadInput("no"), 1), (Unavailable("no"), 1)],
)
def test_run_ends_with_the_exit_code(result: object, code: int | None) -> None:
    def main() -> object:
        if isinstance(result, Exception):
            raise result
        return result

    with pytest.raises(SystemExit) as leaving:
        run(main)  # type: ignore[arg-type]
    assert leaving.value.code == code


def test_explained_error_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise BadInput("--steps x: not a number", hint="--help")

    with pytest.raises(SystemExit):
        run(main)
    assert capsys.readouterr().err == "error: --steps x: not a number (--help)\n"


def test_keyboard_interrupt_exits_130_without_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as leaving:
        run(main)
    assert leaving.value.code == 130
    assert capsys.readouterr().err == ""


PROGRAM = """
import os, sys
sys.path[0] = os.environ["GPT"]
from gpt_ranks import *
from gpt_ranks import *

def main():
    ranks = read_ranks()
    with distributed(ranks, choose_device(ranks)) as world:
        print(world.mean(float(world.rank)), world.gather(world.rank * 10), flush=True)
        if world.rank == int(sys.argv[1]):
            raise LookupError("the user's own mistake")
        world.mean(0.0)
    return 0

run(main)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.replace('os.environ["GPT"]', repr(str(GPT.parent))))
    return path


def test_two_ranks_meet_and_exit_0(launch, program: Path) -> None:
    result = launch(-1, ranks=2, program=program)
    assert result.codes == [0, 0]
    assert result.stdout == ["[0.5] [0, 10]\n"] * 2
    assert result.stderr == ["", ""]


@pytest.mark.parametrize("bad", [0, 1])
def test_failing_rank_prints_its_own_traceback(launch, program: Path, bad: int) -> None:
    result = launch(bad, ranks=2, program=program)
    assert result.codes == [1, 1]
    assert result.stderr[bad].count("Traceback") == 1
    assert "LookupError: the user's own mistake" in result.stderr[bad]
    assert "gloo/transport" in result.stderr[1 - bad]


def test_lost_peer_after_stop_signal_exits_143(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_stop_requested", True)

    def main() -> int:
        raise RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer")

    with pytest.raises(SystemExit) as leaving:
        run(main)
    assert leaving.value.code == 128 + signal.SIGTERM


def test_second_sigterm_does_not_end_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slurm signals every process of a job, the agent its ranks as well, upon its own."""
    monkeypatch.setattr(module, "_stop_requested", False)
    before = signal.signal(signal.SIGTERM, module._request_stop)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert module.stop_requested()
        assert signal.getsignal(signal.SIGTERM) is module._request_stop
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
