"""torch's build for CUDA, on a machine without GPUs: the same numbers, and as fast a start.

`make gpu-check` makes its environment and runs these; `make thorough` too. The host with GPUs that
some of them run on is made of files and of stand-ins for the driver's libraries: it proves which
calls are made, and not how a driver behaves.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests import nvidia_smi
from tests.live import parity
from tests.live.gpu.environment import PYTHON, REASON

EMULATED = Path(__file__).parent / "emulated" / "with-gpu-files"
STEPS = 4
REPORT = """
import json, os, sys
import torch

if os.environ["CLUSTERKIT_DEVICE"] == "cpu":
    model = torch.nn.Linear(4, 4)
    model(torch.ones(2, 4)).sum().backward()
    torch.optim.AdamW(model.parameters()).step()  # asks for the current stream of a GPU
parent = f"/proc/{os.getppid()}"
handles = [os.readlink(f"{parent}/fd/{each}") for each in os.listdir(f"{parent}/fd")]
sys.stdout.write("seen " + json.dumps({
    "server": os.getppid(), "cuda": torch.version.cuda,
    "threads": len(os.listdir(f"{parent}/task")),
    "handles": [each for each in handles if each.startswith("/dev/nvidia")],
    "imported": "libtorch_cuda.so" in open(f"{parent}/maps").read(),
}) + "\\n")
"""

pytestmark = [pytest.mark.live, pytest.mark.thorough, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def environment() -> None:
    """Of torch's build for CUDA."""
    if not PYTHON.with_name("clusterkit").exists():
        why = REASON.read_text() if REASON.exists() else "make gpu-check makes it"
        pytest.skip(f"no .venv-gpu: {why}")
    words = [PYTHON, "-c", "import torch; print(torch.version.cuda)"]
    assert subprocess.run(words, capture_output=True, text=True).stdout.strip() != "None"


@pytest.mark.parametrize(("job", "tolerance"), [("ddp", 0.0), ("zero3", 1e-6)])
def test_cuda_build_on_cpu_matches_losses_of_cpu_build(job: str, tolerance: float) -> None:
    """To the bit; what DeepSpeed sums up in another order differs in the last digits."""
    case = parity.Case(job, 1, 2)
    usual, cuda = (
        parity.measure(case, steps=STEPS, python=str(python)).losses
        for python in (sys.executable, PYTHON)
    )
    assert len(usual) == len(cuda) == STEPS
    assert max(abs(one - other) for one, other in zip(usual, cuda, strict=True)) <= tolerance


@pytest.fixture
def on_emulated_host(tmp_path: Path) -> Any:
    """Submit a program to a host with two GPUs; gives its ranks' reports, the node's log and each
    call of the driver's libraries: process, library, function."""
    if os.geteuid() != 0 or shutil.which("gcc") is None or shutil.which("unshare") is None:
        pytest.skip("a host with GPUs is made with root, gcc and unshare (util-linux)")

    def submit(*job: str) -> tuple[list[dict[str, Any]], str, Counter[tuple[int, str, str]]]:
        (tmp_path / "train.py").write_text(REPORT)
        lines = ["name: seen", "program: train.py", f"python: {PYTHON}", "gpus_per_node: 2", *job]
        (tmp_path / "job.yaml").write_text("\n".join(lines))
        (tmp_path / "tmp").mkdir()
        nvidia_smi.put_into(tmp_path / "tools", "h100x2")
        calls = tmp_path / "calls"
        env = os.environ | {
            "STUB_LOG": str(calls), "STUB_GPUS": "2", "TMPDIR": str(tmp_path / "tmp"),
            "PATH": f"{tmp_path}/tools:{os.environ['PATH']}",
        }  # fmt: skip
        words = [EMULATED, sys.executable, "-m", "clusterkit", "submit", "job.yaml"]
        done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        (node,) = Path(os.environ["CLUSTERKIT_HOME"]).glob("runs/*/attempts/*/node-0/log")
        log = node.read_text()
        seen = [json.loads(text) for text in re.findall("seen ({.*})", log)]
        made = [line.split() for line in calls.read_text().splitlines()]
        counted = Counter((int(pid), *what) for pid, _, *what in (each[:4] for each in made))
        return seen, log, counted

    return submit


@pytest.mark.parametrize(
    ("job", "ahead"),
    [
        (["device: cpu"], "torch, torch._dynamo"),
        (["device: auto"], "torch, torch._dynamo"),
        (["device: auto", "preload: [torch, deepspeed]"], "torch, deepspeed"),
    ],
    ids=["cpu", "gpus", "deepspeed"],
)  # fmt: skip
def test_fork_server_preloads_torch_without_initializing_cuda(
    on_emulated_host: Any, job: list[str], ahead: str
) -> None:
    """What is preloaded brings no thread and no handle of a GPU, and never calls cuInit."""
    seen, log, calls = on_emulated_host(*job)
    assert f"preloaded: {ahead}\n" in log
    assert len(seen) == 2
    (server,) = {each["server"] for each in seen}
    for each in seen:
        assert each["cuda"]
        assert each["imported"], "torch is not there before the ranks are"
        assert (each["threads"], each["handles"]) == (1, [])
    assert calls[server, "cuda", "loaded"], "the stand-ins are not reached"
    assert not calls[server, "cuda", "cuInit"]
    if "deepspeed" in ahead:  # it has torch look at the GPUs through NVML
        assert 0 < calls[server, "nvml", "Init"] < calls[server, "nvml", "Shutdown"]
