"""What `clusterkit estimate` predicts is what training allocates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterkit import api
from clusterkit.estimate import jobs, models
from clusterkit.estimate.memory import layer_activations
from clusterkit.estimate.mesh import Mesh
from clusterkit.estimate.published import PRESETS
from clusterkit.estimate.setup import Setup
from clusterkit.run.status import State
from clusterkit.spec import BatchSpec, JobSpec
from tests.live import estimate as check

pytestmark = pytest.mark.live

KINDS: dict[str, dict[str, Any]] = {
    "qwen2": check.QWEN2,
    "llama": check.QWEN2
    | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": False,
    },
    "gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 256, "n_layer": 4,
        "n_head": 4, "vocab_size": 1024, "n_positions": 256, "resid_pdrop": 0.0,
        "attn_pdrop": 0.0, "embd_pdrop": 0.0,
    },
}  # fmt: skip


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [
        "ddp, 1 rank",
        pytest.param("zero2", marks=pytest.mark.thorough),
        pytest.param("zero2, accumulation 4", marks=pytest.mark.thorough),
        "fsdp",
        pytest.param("zero3, bf16", marks=pytest.mark.thorough),
    ],
)
def test_estimated_peak_memory_matches_measured_within_tolerance(name: str) -> None:
    (case,) = [case for case in check.CASES if case.name == name]
    compared = check.compare(case)
    assert abs(compared.difference) <= check.TOLERANCE, check.rows([compared])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("words", "more"),
    [
        pytest.param(("--strategy", "pp"), {}, marks=pytest.mark.thorough),
        (("--strategy", "pp"), {"batch": BatchSpec(global_size=8)}),
        # train.py trains with DDP, whatever the section says.
        ((), {"deepspeed": {"zero_optimization": {"stage": 3}}}),
    ],
)
def test_estimated_batch_and_strategy_are_those_that_program_reports(
    words: tuple[str, ...], more: dict[str, Any]
) -> None:
    job = JobSpec(
        name="estimate", program=str(check.GPT), estimate="gpt", args=(*words, "--steps", "1"),
        gpus_per_node=2, device="cpu", threads_per_rank=1, workdir=str(check.ROOT), **more,
    )  # fmt: skip
    program = jobs.read_program(job, nodes=1, local_ranks=2)
    model = jobs.model_of(program, count=False)
    assert model is not None
    setup = jobs.setup_of(job, program, ranks=2, local_ranks=2, device="cpu", model=model)
    run = api.submit(job)
    try:
        assert run.wait(250).state is State.SUCCEEDED
    finally:
        run.cancel()
    (start,) = [event for event in run.reported_events() if event["event"] == "start"]
    assert (start["strategy"], start["dtype"]) == (setup.strategy, setup.precision)
    assert start["parameters"] == model.parameters
    step = setup.micro * setup.accumulation * setup.mesh.dp * model.context
    assert start["tokens_per_step"] == step
    assert start.get("micro_batches", setup.accumulation) == setup.accumulation


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kind", ["qwen2", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("llama", "gpt2"))]
)
def test_formulas_from_model_config_agree_with_meta_device(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KINDS[kind]))
    counted = models.hugging_face(str(tmp_path), 128)
    assert counted.origin == f"{kind}, counted on the meta device"
    found = models.locate(str(tmp_path))
    assert found is not None
    formula = models.from_config(found, 128)
    assert formula is not None
    for name in ("parameters", "layers", "hidden", "heads", "vocabulary", "layer_parameters",
                 "matrix_parameters", "largest", "feed_forward", "tied", "context"):  # fmt: skip
        assert getattr(formula, name) == getattr(counted, name), name
    assert formula.first + formula.last == counted.first + counted.last
    for precision in ("fp32", "bf16"):
        setup = Setup("zero1", Mesh(), precision)  # type: ignore[arg-type]
        assert layer_activations(formula, setup) == pytest.approx(
            layer_activations(counted, setup), rel=check.TOLERANCE
        )


@pytest.mark.timeout(600)
def test_gpt_presets_have_parameter_count_of_built_model() -> None:
    code = (
        "import torch\nfrom gpt_model import GPT, PRESETS\n"
        "with torch.device('meta'):\n"
        "    print({n: sum(p.numel() for p in GPT(s).parameters()) for n, s in PRESETS.items()})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
        cwd=check.GPT.parent,
    )  # fmt: skip
    built = eval(done.stdout)
    assert built == {name: models.gpt(name).parameters for name in PRESETS}


@pytest.mark.timeout(600)
def test_unknown_model_type_in_config_is_refused_without_traceback(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(models.BadInput, match="no-such-model") as caught:
        models.hugging_face(str(tmp_path))
    assert "Traceback" not in str(caught.value)


def test_write_page_refuses_page_without_place_for_table(tmp_path: Path) -> None:
    page = tmp_path / "estimate.md"
    page.write_text("# Nothing\n")
    with pytest.raises(ValueError, match="no place"):
        check.write_page([], page)
