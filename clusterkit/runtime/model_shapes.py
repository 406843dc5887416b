"""Sizes of a Hugging Face model, counted on the meta device, without weights or memory.

    python -m clusterkit.runtime.model_shapes Qwen/Qwen2-1.5B --context 1024

prints one JSON object, or one line on stderr with exit code 2. `clusterkit estimate` runs it in a
process of its own, because the orchestrator imports no torch. The bytes that a layer saves for its
backward pass are the difference between the model with two layers and with one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clusterkit.errors import BadInput, ClusterkitError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a name on the hub, or a folder with config.json")
    parser.add_argument("--context", type=int, help="tokens in a sample (default: the longest)")
    args = parser.parse_args()
    try:
        found = sizes(args.model, args.context)
    except ClusterkitError as error:
        print(error.message, file=sys.stderr)
        return error.exit_code
    print(json.dumps(found))
    return 0


def sizes(name: str, context: int | None) -> dict[str, Any]:
    """Return the fields of `clusterkit.estimate.setup.Model` without its name.

    Raises:
        BadInput: transformers is missing, or cannot find or build the model.
    """
    config = _loading(name, lambda: _transformers().AutoConfig.from_pretrained(name))
    text = config.get_text_config()
    whole, one, two = (_build(name, config, layers) for layers in (None, 1, 2))
    context = context or int(getattr(text, "max_position_embeddings", 0) or 1024)
    layer = _count(two) - _count(one)
    layers = int(text.num_hidden_layers)
    head = whole.get_output_embeddings()  # type: ignore[operator]
    tokens = whole.get_input_embeddings().weight  # type: ignore[operator]
    tied = head is not None and head.weight is tokens
    last = 0 if head is None or tied else head.weight.numel()
    largest = max((p.numel() for p in _only_in(two, one)), default=0)
    hidden = int(text.hidden_size)
    inner = int(getattr(text, "intermediate_size", None) or 4 * hidden)
    return {
        "parameters": _count(whole),
        "layers": layers,
        "hidden": hidden,
        "heads": int(text.num_attention_heads),
        "context": context,
        "vocabulary": int(text.vocab_size) if head is not None else 0,
        "layer_parameters": layer,
        "matrix_parameters": _count(two, matrices=True) - _count(one, matrices=True),
        "largest": largest,
        "feed_forward": inner,
        "first": _count(whole) - layers * layer - last,
        "last": last,
        "tied": tied,
        "buffers": sum(b.numel() * b.element_size() for b in whole.buffers()),
        "gated": largest < 4 * hidden**2 or inner != 4 * hidden,
        "measured": {
            name: _saved_by_layer(one, two, dtype, text.vocab_size, context)
            for name, dtype in _DTYPES.items()
        },
        "origin": f"{config.model_type}, counted on the meta device",
    }


def _build(name: str, config: Any, layers: int | None) -> nn.Module:
    """Build the model on the meta device; ``layers`` replaces its number of layers."""
    transformers = _transformers()
    config = type(config).from_dict(config.to_dict())
    if layers is not None:
        text = config.get_text_config()
        text.num_hidden_layers = layers
        kinds = getattr(text, "layer_types", None)
        if kinds:
            text.layer_types = list(kinds[-1:]) * layers
    kind = getattr(transformers, (config.architectures or [""])[0], None)

    def build() -> Any:
        if kind is not None:
            return kind(config)
        return transformers.AutoModelForCausalLM.from_config(config)

    with torch.device("meta"):
        model: nn.Module = _loading(name, build)
    return model.train()


def _transformers() -> Any:
    """Import the package, silenced.

    Raises:
        BadInput: it is missing.
    """
    try:
        import transformers
    except ImportError:
        raise BadInput("a Hugging Face model needs transformers") from None
    transformers.logging.set_verbosity_error()
    return transformers


def _loading(name: str, load: Callable[[], Any]) -> Any:
    """Return what ``load`` returns; raise its errors as `BadInput`."""
    try:
        return load()
    except (OSError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise BadInput(f"--model {name}: {reason}") from None


def _count(model: nn.Module, *, matrices: bool = False) -> int:
    """Return the number of parameters, shared ones once; ``matrices``: of matrices only."""
    return sum(p.numel() for p in model.parameters() if p.dim() > 1 or not matrices)


def _only_in(two: nn.Module, one: nn.Module) -> list[Tensor]:
    names = {name for name, _ in one.named_parameters()}
    return [p for name, p in two.named_parameters() if name not in names]


def _saved_by_layer(
    one: nn.Module, two: nn.Module, dtype: torch.dtype, vocabulary: int, context: int
) -> tuple[int, int]:
    """Return the bytes that a layer saves for one sample, and that all else saves."""
    first, second = (_saved(model.to(dtype), vocabulary, context) for model in (one, two))
    return second - first, max(0, 2 * first - second)


def _saved(model: nn.Module, vocabulary: int, context: int) -> int:
    """Return the bytes saved for the backward pass of one sample, without weights and buffers."""
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    tokens = torch.zeros(1, context, dtype=torch.int64, device="meta")
    with _fused_attention(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(input_ids=tokens)
    del output
    return sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in own)


class _Fused(torch.autograd.Function):
    """Attention that saves what fused kernels save: no scores, but their log-sum-exp in float32."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, length, _ = query.shape
        # In the layout of the kernels, in which joining the heads copies nothing.
        mixed = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(
            query, key, value, mixed, query.new_empty(query.shape[:-1], dtype=torch.float32)
        )
        return mixed


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Replace torch's attention by `_Fused`; torch uses no fused kernel on the meta device."""
    usual = F.scaled_dot_product_attention

    def fused(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        mixed: Tensor = _Fused.apply(query, key, value)  # type: ignore[no-untyped-call]
        return mixed

    F.scaled_dot_product_attention = fused
    try:
        yield
    finally:
        F.scaled_dot_product_attention = usual


if __name__ == "__main__":
    sys.exit(main())
