"""Batch scripts on a real Slurm, side by side: by sbatch, and as the converted job."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from tests.live.converted import converted, project, same, told
from tests.live.slurm.daemons import Slurm

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

# As in PyTorch's examples (sbatch_run.sh), and as on clusters' own pages.
TORCHRUN = """\
#!/bin/bash
#SBATCH --job-name=multinode-example
#SBATCH --nodes=2
#SBATCH --ntasks=2
#SBATCH --cpus-per-task=2
#SBATCH --output=%x.log

nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )
nodes_array=($nodes)
head_node=${nodes_array[0]}
head_node_ip=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address)
export GIVEN="a b"

srun torchrun \\
--nnodes 2 \\
--nproc_per_node 2 \\
--rdzv_id $RANDOM \\
--rdzv_backend c10d \\
--rdzv_endpoint $head_node_ip:PORT \\
told.py GIVEN 50
"""
TASKS = """\
#!/bin/bash
#SBATCH -J tasks
#SBATCH -N 2
#SBATCH --ntasks-per-node=2
#SBATCH -o %x.log
export MASTER_PORT=PORT
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=1
srun --kill-on-bad-exit=1 python told.py OMP_NUM_THREADS
"""


@pytest.mark.parametrize("script", [TASKS, pytest.param(TORCHRUN, marks=pytest.mark.thorough)])
def test_converted_batch_script_runs_like_sbatch(
    script: str, slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = project(tmp_path / "project")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    file = folder / "train.sbatch"
    file.write_text(script.replace("PORT", str(port)))
    slurm.run("sbatch", "--wait", str(file))
    (log,) = folder.glob("*.log")
    _, job = converted(file)
    same(told(log.read_text().splitlines()), job, 4)
