"""Models and tokenizers by Hugging Face name or folder. Imports transformers when called.

As a program it fine-tunes a causal language model with ZeRO: Qwen2, tiny by default.

    clusterkit submit jobs/qwen.yaml                # a tiny Qwen2 with random weights
    clusterkit submit jobs/qwen.yaml -- --model Qwen/Qwen2-1.5B --data my-texts/
    clusterkit submit jobs/qwen.yaml --set deepspeed.zero_optimization.stage=2

Every rank says what it keeps of the model. Batch, checkpoints and the loop are those of train.py.
"""

from __future__ import annotations

import argparse
import importlib
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gpt_data
import gpt_settings
import torch
import torch.nn.functional as F
from gpt_data import as_tokens
from gpt_model import document_mask
from gpt_ranks import BadInput, run
from gpt_settings import positive
from torch import Tensor, nn

TINY = {
    "vocab_size": 256,  # bytes
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}

_FEWEST_TOKENS = 100
"""For some kinds of model transformers makes up an empty tokenizer where the folder has none."""


def choose_hugging_face(
    name: str, pretrained: bool
) -> tuple[dict[str, Any], Callable[[], nn.Module], Callable[[bytes], Tensor]]:
    """A model of the hub or a folder: what describes it, what builds it, and its tokenizer.

    Its tokens are bytes if it has none.
    """
    _mind_the_network(name)
    config = load_config(name)
    vocabulary = config.get_text_config().vocab_size

    def tokenize(text: bytes) -> Tensor:
        tokens = _tokenize(name, text)
        if len(tokens) and int(tokens.max()) >= vocabulary:
            raise BadInput(
                f"--model {name} has {vocabulary} tokens, the text needs {int(tokens.max()) + 1}",
                hint="put the model's tokenizer beside its config.json",
            )
        return tokens

    facts = {"name": name, "type": config.model_type, "vocabulary": vocabulary}
    return facts, lambda: CausalLM(name, config, pretrained=pretrained), tokenize


class CausalLM(nn.Module):
    """A Hugging Face causal language model that is called like our own."""

    def __init__(self, name: str, config: Any, *, pretrained: bool) -> None:
        super().__init__()
        auto = import_transformers().AutoModelForCausalLM
        if pretrained:
            self.model = loading(name, lambda: auto.from_pretrained(name, dtype=torch.float32))
        else:
            self.model = loading(name, lambda: auto.from_config(config, dtype=torch.float32))

    def forward(self, tokens: Tensor, targets: Tensor, places: Tensor | None = None) -> Tensor:
        """Mean cross entropy of ``targets``, like `gpt_model.GPT`; all (batch, context), int64."""
        more: dict[str, Tensor] = {}
        if places is not None:
            if (kind := self.model.config._attn_implementation) != "sdpa":
                raise BadInput(f"--document-mask: this model has no sdpa attention, but {kind}")
            more = {"attention_mask": document_mask(places), "position_ids": places}
        logits = self.model(tokens, use_cache=False, **more).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _mind_the_network(name: str) -> None:
    """Ask the hub once: without an answer transformers would ask six times, 28 s in a measurement,
    even for a model that is on disk."""
    if Path(name).is_dir() or "HF_HUB_OFFLINE" in os.environ:
        return
    url = f"{os.environ.get('HF_ENDPOINT') or 'https://huggingface.co'}/api/models/{name}"
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=5.0).close()
    except urllib.error.HTTPError:
        pass  # whatever it says, it is there; transformers explains the rest
    except (OSError, ValueError) as error:
        # Which certificates are trusted is for transformers' own client to judge.
        if not isinstance(getattr(error, "reason", None), ssl.SSLError):
            os.environ["HF_HUB_OFFLINE"] = "1"


def load_config(name: str) -> Any:
    """The config of a model by its name on the hub or its folder."""
    return loading(name, lambda: import_transformers().AutoConfig.from_pretrained(name))


def looks_like_a_name(name: str) -> bool:
    """Whether this can be a hub name (``owner/model``) or is a folder."""
    return "/" in name or Path(name).is_dir()


def import_transformers() -> Any:
    """The package, silent; that it is missing is a BadInput."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise BadInput(
            "a Hugging Face model needs transformers", hint="pip install transformers"
        ) from None
    transformers.logging.set_verbosity_error()
    return transformers


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a name on the hub or a folder; None if it has none."""
    try:
        tokenizer = import_transformers().AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError):
        return None
    return tokenizer if len(tokenizer) >= _FEWEST_TOKENS else None


def _tokenize(name: str, text: bytes) -> Tensor:
    tokenizer = load_tokenizer(name)
    if tokenizer is None:
        return as_tokens(text)
    # A special token that stands in the text is text: only the tokenizer itself may put one.
    tokens = tokenizer(text.decode(errors="replace"), verbose=False, split_special_tokens=True)
    return torch.tensor(tokens["input_ids"], dtype=torch.int32)


def loading(name: str, load: Callable[[], Any]) -> Any:
    """What ``load`` returns; that it cannot is a BadInput."""
    try:
        return load()
    except (OSError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise BadInput(f"--model {name}: {reason}") from None


def main() -> int:
    from train import train

    args = parse_args()
    args.learning_rate = learning_rate(args)
    falling = partial(falling_rate, args=args)
    return train(args, choose_model, falling, describe)


def falling_rate(step: int, args: argparse.Namespace) -> float:
    """The learning rate of a step: straight down to 0."""
    return float(args.learning_rate) * (1 - (step - 1) / args.steps)


def describe(rank: int, strategy: str, model: nn.Module, total: int) -> str:
    """The line of one rank. Stage 3 leaves it a part of each parameter, padded to be divisible."""
    stage = strategy.partition("zero-")[2][:1] or "none (DDP)"
    held = sum(getattr(p, "ds_tensor", p).numel() for p in model.parameters())
    return f"Device {rank} | ZeRO Stage: {stage} | whole model={total} | parameter count={held}"


def choose_model(args: argparse.Namespace) -> tuple[dict[str, Any], Callable[[], nn.Module], Any]:
    """What describes the model, what builds it, and the text in its tokens."""
    read = partial(gpt_data.read, document_mask=args.document_mask)
    if args.model is not None:
        facts, make_model, tokenize = choose_hugging_face(args.model, True)
        return facts, make_model, read(args.data, args.context, facts["vocabulary"], tokenize)
    config = import_transformers().Qwen2Config(**TINY)
    make = partial(CausalLM, "tiny qwen2", config, pretrained=False)
    return {"name": "tiny qwen2", **TINY}, make, read(args.data, args.context, 256)


def learning_rate(args: argparse.Namespace) -> float:
    """The one that was given, or what suits new weights or trained ones."""
    if args.learning_rate is not None:
        return float(args.learning_rate)
    return 1e-3 if args.model is None else 2e-5


def parse_args() -> argparse.Namespace:
    parser = gpt_settings.Parser(__doc__)
    add = parser.add_argument
    add("--model", metavar="NAME", help="Hugging Face name or folder (default: a tiny new Qwen2)")
    add("--data", metavar="PATH", help=gpt_data.HELP)
    add("--context", type=positive, default=128, metavar="TOKENS", help="default: 128")
    add("--steps", type=positive, default=50, help="default: 50")
    add("--learning-rate", type=float, metavar="RATE",
        help="at the start, falls to 0 (default: 2e-5 with --model, else 1e-3)")  # fmt: skip
    add("--seed", type=int, default=0, help="of weights and samples (default: 0)")
    parser.set_defaults(strategy="deepspeed", weight_decay=0.0, log_every=1, eval_every=0)
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
