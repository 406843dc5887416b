"""What makes a step fast, and says how fast it was."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import speed
import torch
from model import GPT, PRESETS
from parameters import count_parameters
from ranks import Unavailable
from world import World

from tests.unit.runtime.conftest import ROOT

CPU = torch.device("cpu")
SLOW, MORE = pytest.mark.thorough, ("ddp", "fsdp", "tp", "pp")  # on both ranks: minutes
SHORT = ["--global-batch", "8", "--micro-batch", "2", "--context", "16"]


def test_flops_per_token_follows_palm_appendix() -> None:
    with torch.device("meta"):
        parameters = count_parameters(GPT(PRESETS["124m"]))
    facts = {"layers": 12, "width": 768, "context": 1024}
    flops = speed.flops_per_token(facts, parameters, 1024)
    assert flops == 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024
    assert speed.flops_per_token({"name": "owner/model"}, 10, 1024) == 60


RECORDED = {
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA GB10": None,  # no data sheet tells a figure for bf16
    "NVIDIA GB200": 2500,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA L4": 121,
    "NVIDIA L40S": 362.05,
}
"""What the hosts of tests/data/gpu have; another one there has to be added here."""


def test_every_recorded_gpu_has_dense_peak_or_none() -> None:
    files = (ROOT / "tests" / "data" / "gpu").glob("*.txt")
    names = {name for file in files for name in re.findall(r"GPU-[\w-]+, (.+?),", file.read_text())}
    teras = {
        name: None if (peak := speed.PEAKS.get(name)) is None else peak / 1e12 for name in names
    }
    assert teras == RECORDED


@pytest.mark.parametrize(
    ("names", "peak"),
    [
        (["NVIDIA H100 80GB HBM3"] * 2, 2 * 989.4e12),
        (["NVIDIA H100 PCIe"] * 2, 2 * 756e12),
        (["NVIDIA H100 NVL"] * 2, 2 * 835.5e12),
        (["NVIDIA H200"] * 2, 2 * 989.4e12),
        (["NVIDIA A100 80GB PCIe"] * 2, 2 * 312e12),
        (["NVIDIA L4", "NVIDIA L40S"], (121 + 362.05) * 1e12),
        (["NVIDIA L4", "NVIDIA L4 2"], None),
        (["NVIDIA A100-SXM4-40GB MIG 1g.5gb"] * 2, None),  # a seventh of one
        (["NVIDIA A100-SXM-64GB"] * 2, None),  # has more multiprocessors
        (["NVIDIA GeForce RTX 4090 D"] * 2, None),
        (["NVIDIA GeForce RTX 4090 Laptop GPU"] * 2, None),
        (["NVIDIA L400"] * 2, None),
    ],
)
def test_mfu_uses_dense_gpu_peaks_and_is_absent_for_unknown_gpu(
    monkeypatch: pytest.MonkeyPatch, names: list[str], peak: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[0])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1 << 30)
    monkeypatch.setattr(World, "gather", lambda world, name: [name, *names[1:]])
    world = World(0, 0, 0, 2, 2, device=torch.device("cuda", 0), backend="nccl")
    told = speed.Meter({}, 100, 16, "bf16", world).measured(1e9)
    mfu = {} if peak is None else {"mfu": pytest.approx(600 * 1e9 / peak)}
    assert told == {"peak_memory": 1 << 30, **mfu}
    assert "mfu" not in speed.Meter({}, 100, 16, "fp32", world).measured(1e9)


def test_meter_reports_no_mfu_on_cpu() -> None:
    world = World(0, 0, 0, 1, 1, device=CPU, backend="gloo")
    assert speed.Meter({}, 100, 16, "bf16", world).measured(1e9) == {}


@pytest.mark.parametrize(("kind", "what"), [("cpu", r"a C\+\+ compiler"), ("cuda", "a C compiler")])
def test_compile_is_refused_without_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, what: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Unavailable, match=f"--compile needs {what}, and there is none on this"):
        speed.check_compiler(torch.device(kind))


def test_profile_holds_three_steps_of_every_rank(launch, tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    done = launch(*SHORT, "--steps", "8", "--profile", folder, ranks=2)
    assert done.codes == [0, 0], done.stderr
    for rank in (0, 1):
        events = json.loads((folder / f"rank-{rank}.json").read_text())["traceEvents"]
        names = [event["name"] for event in events if event["name"].startswith("ProfilerStep")]
        assert {*names} == {"ProfilerStep#3", "ProfilerStep#4", "ProfilerStep#5"}


@pytest.mark.needs("g++")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("strategy", "ranks"), [("fsdp", 1), *(pytest.param(x, 2, marks=SLOW) for x in MORE)]
)
def test_compiled_model_computes_same_losses(launch, strategy: str, ranks: int) -> None:
    how = [*SHORT, "--steps", "4", "--strategy", strategy]
    plain, compiled = (
        launch(*how, *more, ranks=ranks, patience=600) for more in ([], ["--compile"])
    )
    assert compiled.codes == [0] * ranks, compiled.stderr
    assert compiled.losses() == pytest.approx(plain.losses(), abs=1e-5)
