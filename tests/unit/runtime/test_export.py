"""Exported weights are those that were trained, whatever strategy saved them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpt_checkpoint import export
from gpt_model import GPT, PRESETS
from gpt_ranks import BadInput

SHORT = ["--steps", "3", "--global-batch", "8", "--micro-batch", "2", "--context", "16"]


def test_every_strategy_exports_same_weights(
    launch, zero: Callable[..., list[str]], tmp_path: Path
) -> None:
    ways = {
        "ddp": (["--strategy", "ddp"], 1),
        "zero0": (zero(0), 1),
        "zero2": (zero(2), 2),
        "zero3": (zero(3), 2),
        "fsdp": (["--strategy", "fsdp"], 2),
        "tp": (["--strategy", "tp"], 2),
        "pp": (["--strategy", "pp"], 2),
    }
    exported = {}
    for name, (how, ranks) in ways.items():
        folder = tmp_path / name
        done = launch(*SHORT, *how, "--checkpoint-dir", folder, ranks=ranks)
        assert done.codes == [0] * ranks, done.stderr
        file = export(folder / "step-00000003", tmp_path / f"{name}-out")
        exported[name] = torch.load(file, weights_only=True)
    for name, state in exported.items():
        assert state.keys() == exported["ddp"].keys(), name
        for key, tensor in state.items():
            # Adam turns the last bits of a small gradient into a small step.
            assert torch.allclose(tensor, exported["ddp"][key], atol=1e-4), (name, key)
    model = GPT(PRESETS["tiny"])
    with pytest.raises(RuntimeError, match="position"):
        model.load_state_dict(exported["ddp"])  # another context


def test_exported_hugging_face_model_loads_in_transformers(
    launch, zero: Callable[..., list[str]], llama: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "c"
    how = ["--model", llama, *SHORT, *zero(3), "--checkpoint-dir", folder]
    done = launch(*how, ranks=2)
    assert done.codes == [0, 0], done.stderr
    loaded = AutoModelForCausalLM.from_pretrained(export(folder / "step-00000003", tmp_path / "o"))
    again = launch(*how[:-2], "--model", tmp_path / "o", "--pretrained", "--steps", "1")
    assert again.codes == [0], again.stderr
    assert sum(p.numel() for p in loaded.parameters()) == again.of("start")[0]["parameters"]
    assert again.losses()[1] < done.losses()[1]  # it goes on from what was learnt


def test_export_refuses_incomplete_checkpoint_or_unknown_model(launch, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is not a complete checkpoint"):
        export(tmp_path, tmp_path / "o")
    launch(*SHORT, "--checkpoint-dir", tmp_path / "c")
    saved = tmp_path / "c" / "step-00000003"
    manifest = json.loads((saved / "checkpoint.json").read_text())
    manifest["model"] = {"name": "line"}
    (saved / "checkpoint.json").write_text(json.dumps(manifest))
    with pytest.raises(BadInput, match="is of line, which is not known here"):
        export(saved, tmp_path / "o")
    manifest["model"] = {"name": "x", "layers": 1, "heads": 4, "width": 128, "context": 16,
                         "vocabulary": 256}  # fmt: skip
    (saved / "checkpoint.json").write_text(json.dumps(manifest))
    with pytest.raises(BadInput, match="Unexpected key"):
        export(saved, tmp_path / "o")


@pytest.mark.parametrize(("mesh", "how"), [("pp=2", "pipeline"), ("tp=2", "tensor parallelism")])
def test_export_refuses_model_divided_by_deepspeed(
    launch, zero: Callable[..., list[str]], tmp_path: Path, mesh: str, how: str
) -> None:
    flags = [*zero(1), "--mesh", mesh, "--checkpoint-dir", tmp_path / "c"]
    done = launch(*SHORT, *flags, ranks=2)
    assert done.codes == [0, 0], done.stderr
    with pytest.raises(BadInput, match=f"DeepSpeed's {how} divided the model into 2 parts"):
        export(tmp_path / "c" / "step-00000003", tmp_path / "o")
    assert not (tmp_path / "o").exists()
