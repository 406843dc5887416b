"""An elastic torchrun starts its ranks again after a lost node, not after a failure of their own.

A stand-in for torchrun starts one rank again and again, and says how it failed as torchrun does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterkit.agent import limits

TORCHRUN = r"""
import os, subprocess, sys, time
pipe, error = os.environ["CLUSTERKIT_PIPE"] + "-0", sys.argv[-1]
for number in range(100):
    with open(os.environ["STARTS"], "a") as starts:
        print("start", file=starts)
    rank = (
        "import os, sys\n"
        f"with open({pipe!r}, 'w') as log:\n"
        "    print('@clusterkit-rank 0', os.getpid(), file=log)\n"
        "    print('Traceback (most recent call last):', file=log)\n"
        "    print('  File \"train.py\", line 3, in <module>', file=log)\n"
        f"    print({error!r}, file=log)\n"
        "sys.exit(1)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", rank])
    code = process.wait()
    print(f"E1 api.py:1002] failed (exitcode: {code}) local_rank: 0 (pid: {process.pid}) of x",
          file=sys.stderr, flush=True)
    if sys.argv[sys.argv.index("--max-restarts") + 1] == "0":
        sys.exit(1)
    time.sleep(0.2)
"""


@pytest.mark.parametrize(
    ("error", "again"),
    [
        ("ValueError: always", False),
        ("RuntimeError: [pair.cc:553] Connection closed by peer", True),
        ("torch.distributed.DistBackendError: NCCL error", True),
    ],
)
def test_elastic_torchrun_restarts_after_lost_peer_but_not_own_failure(
    tmp_path: Path, error: str, again: bool
) -> None:
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "run.py").write_text(TORCHRUN)
    node = tmp_path / "attempts" / "1" / "node-0"
    env = {
        "PATH": os.environ["PATH"], "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}",
        "CLUSTERKIT_RUN_DIR": str(tmp_path), "CLUSTERKIT_NODE_DIR": str(node),
        "CLUSTERKIT_ATTEMPT": "1", "STARTS": str(tmp_path / "starts"), "NODE_RANK": "0",
    }  # fmt: skip
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "100", error]
    agent = [sys.executable, "-m", "clusterkit.agent", "run", "--nproc", "1", "--grace", "5"]
    done = subprocess.run(
        [*agent, "--workdir", str(tmp_path), "--", *torchrun],
        env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    ended = json.loads((node / "exit.json").read_bytes())
    starts = (tmp_path / "starts").read_text().count("start")
    assert (limits.FREE_RESTARTS < starts < 100) if again else starts < limits.FREE_RESTARTS
    rank = next(each for each in ended["processes"] if each["rank"] == 0)
    assert (rank["exit_code"], rank["asked"]) == (1, False)
