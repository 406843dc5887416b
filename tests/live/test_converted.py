"""Command lines and scripts, side by side: by the tool itself, and as the converted job."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from clusterkit import shell
from tests.live.converted import SECONDS, converted, project, same, told

pytestmark = pytest.mark.live
thorough = pytest.mark.thorough


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project to stand in, with the launchers of this environment on the PATH."""
    folder = project(tmp_path / "project")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("GIVEN", "a b'$HOME")
    # mpirun counts processors as slots, and does not run as root unasked.
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    return folder


def ran(*commands: list[str]) -> list[dict[str, object]]:
    """What the ranks print that these commands, beside each other, start."""
    started = [
        subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )
        for words in commands
    ]  # fmt: skip
    try:
        done = [one.communicate(timeout=SECONDS) for one in started]
    finally:
        for one in started:
            one.kill()
    assert [one.returncode for one in started] == [0] * len(started), done
    return told(line for out, _ in done for line in out.splitlines())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


ONE_MACHINE = [
    pytest.param("torchrun --standalone --nproc-per-node=2 told.py --lr 1 'a b'", 2, id="torchrun"),
    pytest.param(
        "python -m torch.distributed.launch --nproc_per_node=2 told.py --lr 1", 2,
        id="torch.distributed.launch", marks=thorough,
    ),
    pytest.param("mpirun -np 2 --oversubscribe -x GIVEN -x OMP_NUM_THREADS=3 python told.py GIVEN "
                 "OMP_NUM_THREADS", 2, id="mpirun"),
    pytest.param("deepspeed --num_gpus 2 told.py --lr 1", 2, id="deepspeed", marks=thorough),
    pytest.param("accelerate launch --cpu --mixed_precision bf16 --gradient_accumulation_steps 4 "
                 "told.py --lr 1", 1, id="accelerate", marks=thorough),
]  # fmt: skip


@pytest.mark.parametrize(("line", "ranks"), ONE_MACHINE)
def test_converted_command_line_runs_like_original(
    line: str, ranks: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shell.split(line)
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]}: not installed")
    # torchrun leaves a folder in TMPDIR. mpirun's has sockets, whose path may have 107 characters.
    if "torchrun" in words or "torch.distributed.launch" in words:
        monkeypatch.setenv("TMPDIR", str(here))
    same(ran(words), converted(None, words)[1], ranks)


@thorough
def test_converted_torchrun_on_two_nodes_runs_like_original() -> None:
    words = [
        "torchrun", "--nnodes=2", "--nproc-per-node=2", "--rdzv-id=a", "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}", "told.py", "--lr", "1",
    ]  # fmt: skip
    same(ran(words, words), converted(None, words)[1], 4)


@thorough
def test_converted_accelerate_config_runs_like_original(here: Path) -> None:
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate: not installed")
    config = here / "config.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\n"
        "num_machines: 1\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
        "  fsdp_transformer_layer_cls_to_wrap: Block\n  fsdp_offload_params: true\n"
    )
    words = ["told.py", "--lr", "1"]
    original = ran(["accelerate", "launch", "--config_file", str(config), *words])
    same(original, converted(config, words)[1], 2)
