"""The Llama options of the model, and its loss in chunks."""

from __future__ import annotations

from typing import Any

import gpt_model
import pytest
import torch
from gpt_model import GPT, PRESETS
from gpt_parallelize import count_parameters
from torch import Tensor

from tests.unit.runtime.conftest import launching, zero_arguments

SIX = ["--model", "llama-tiny", "--steps", "6", "--global-batch", "8", "--micro-batch", "2",
       "--context", "16"]  # fmt: skip
TOLERANCE = 5e-7


def test_llama_1b_has_parameter_count_of_llama_3_2_1b() -> None:
    with torch.device("meta"):
        assert count_parameters(GPT(PRESETS["llama-1b"])) == 1_235_814_400


def as_ours(theirs: dict[str, Tensor], model: GPT) -> dict[str, Tensor]:
    """Weights of transformers under our names: rows of a group of heads lie together here."""
    shape, ours = model.shape, {"token.weight": theirs["model.embed_tokens.weight"]}
    ours |= {"head.weight": ours["token.weight"], "norm.weight": theirs["model.norm.weight"]}
    groups, width = shape.kv_heads or shape.heads, shape.width
    for layer in range(shape.layers):
        old, new = f"model.layers.{layer}", f"blocks.{layer}"
        rows = [theirs[f"{old}.self_attn.{name}_proj.weight"].view(groups, -1, width)
                for name in "qkv"]  # fmt: skip
        ours[f"{new}.attention.heads_in.weight"] = torch.cat(rows, dim=1).flatten(0, 1)
        for there, here in {
            "self_attn.o_proj": "attention.output", "input_layernorm": "attention_norm",
            "post_attention_layernorm": "perceptron_norm", "mlp.gate_proj": "gate",
            "mlp.up_proj": "expand", "mlp.down_proj": "output",
        }.items():  # fmt: skip
            ours[f"{new}.{here}.weight"] = theirs[f"{old}.{there}.weight"]
    return ours


def test_llama_logits_equal_those_of_transformers() -> None:
    transformers: Any = pytest.importorskip(
        "transformers", reason="transformers: not installed (pip install 'clusterkit[train]')"
    )
    torch.manual_seed(0)
    shape = PRESETS["llama-tiny"]
    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.inner,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, max_position_embeddings=shape.context,
        rms_norm_eps=1e-5, rope_theta=shape.theta, tie_word_embeddings=True,
        initializer_range=0.2,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    ours = GPT(shape)
    ours.load_state_dict(as_ours(theirs.state_dict(), ours))
    tokens = torch.randint(0, shape.vocabulary, (2, shape.context))
    with torch.no_grad():
        expected = theirs(tokens, use_cache=False).logits
        logits = ours.head(ours.norm(ours.through(ours.embed(tokens))))
    assert expected.abs().max() > 1  # weights large enough that a wrong angle would show
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def alone(warm, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one rank."""
    with launching(tmp_path_factory.mktemp("alone"), warm) as launch:
        result = launch(*SIX)
        assert result.codes == [0], result.stderr
        return result.losses()


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(["--strategy", "ddp"], marks=pytest.mark.thorough),
        ["--strategy", "fsdp", "--activation-checkpointing"],
        pytest.param(["--strategy", "tp"], marks=pytest.mark.thorough),
        ["--strategy", "tp", "--sequence-parallel"],
        pytest.param(["--strategy", "pp"], marks=pytest.mark.thorough),
        pytest.param(3, marks=pytest.mark.thorough),
        pytest.param([1, "--mesh", "pp=2"], marks=pytest.mark.thorough),
        pytest.param([1, "--mesh", "tp=2"], marks=pytest.mark.thorough),
        pytest.param(["--strategy", "fsdp", "--chunked-loss"], marks=pytest.mark.thorough),
        pytest.param(["--strategy", "tp", "--chunked-loss"], marks=pytest.mark.thorough),
        pytest.param([3, "--chunked-loss"], marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_llama_losses_of_two_ranks_equal_those_of_one(launch, alone, tmp_path, how: Any) -> None:
    first, *rest = how if isinstance(how, list) else [how]
    words = zero_arguments(tmp_path, first) if isinstance(first, int) else [first]
    result = launch(*SIX, *words, *rest, ranks=2)
    assert result.codes == [0, 0], result.stderr
    assert result.losses() == pytest.approx(alone, abs=TOLERANCE)


@pytest.mark.parametrize("name", ["tiny", "llama-tiny"])
def test_chunked_loss_has_same_loss_and_gradients(name: str, monkeypatch) -> None:
    monkeypatch.setattr(gpt_model, "CHUNK", 48)  # which 4 x 64 tokens do not divide by
    torch.manual_seed(0)
    plain, chunked = GPT(PRESETS[name]), GPT(PRESETS[name], chunked_loss=True)
    chunked.load_state_dict(plain.state_dict())
    tokens, targets = torch.randint(0, 256, (2, 4, 64))
    losses = [model(tokens, targets) for model in (plain, chunked)]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=2e-7)
    for loss in losses:
        loss.backward()
    for one, other in zip(plain.parameters(), chunked.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--strategy", "pp", "--chunked-loss"], "--chunked-loss: a pipeline computes the loss"),
        (["--strategy", "tp", "--mesh", "tp=4"], "the 2 key-value heads of llama-tiny do not"),
    ],
    ids=str,
)
def test_llama_refuses_what_cannot_be(launch, words: list[str], said: str) -> None:
    result = launch("--model", "llama-tiny", *words, ranks=4 if "tp=4" in words else 2)
    assert set(result.codes) == {1}
    assert said in result.stderr[0]
