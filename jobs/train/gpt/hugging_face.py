"""Models and tokenizers by Hugging Face name or folder. Imports transformers when called."""

from __future__ import annotations

import importlib
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpt_data import as_tokens
from model import document_mask
from ranks import BadInput
from torch import Tensor, nn

_FEWEST_TOKENS = 100
"""For some kinds of model transformers makes up an empty tokenizer where the folder has none."""


def choose(
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
        """Mean cross entropy of ``targets``, like `model.GPT`; all (batch, context), int64."""
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
