"""Models and tokenizers by Hugging Face name or folder. Imports transformers when called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clusterkit.errors import BadInput
from clusterkit.runtime.data import as_tokens

_FEWEST_TOKENS = 100
"""For some kinds of model transformers makes up an empty tokenizer where the folder has none."""


def choose(
    name: str, text: bytes, *, pretrained: bool
) -> tuple[dict[str, Any], Callable[[], nn.Module], Tensor]:
    """A model of the hub, ready to be built.

    Args:
        name: a name on the hub, or a folder with ``config.json``.
        text: becomes tokens by the model's own tokenizer; bytes if it has none.
        pretrained: start from its weights instead of random ones.

    Returns:
        What describes the model, what builds it, and the tokens (number of tokens,).

    Raises:
        BadInput: transformers is missing or cannot load the model, or a byte is no token of it.
    """
    config = load_config(name)
    tokens = _tokenize(name, text)
    vocabulary = config.get_text_config().vocab_size
    if int(tokens.max()) >= vocabulary:
        raise BadInput(
            f"--model {name} has {vocabulary} tokens, the text needs {int(tokens.max()) + 1}",
            hint="put the model's tokenizer beside its config.json",
        )
    facts = {"name": name, "type": config.model_type, "vocabulary": vocabulary}
    return facts, lambda: CausalLM(name, config, pretrained=pretrained), tokens


class CausalLM(nn.Module):
    """A Hugging Face causal language model that is called like our own."""

    def __init__(self, name: str, config: Any, *, pretrained: bool) -> None:
        super().__init__()
        auto = import_transformers().AutoModelForCausalLM
        if pretrained:
            self.model = loading(name, lambda: auto.from_pretrained(name, dtype=torch.float32))
        else:
            self.model = loading(name, lambda: auto.from_config(config, dtype=torch.float32))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of ``targets``; both (batch, context), int64."""
        logits = self.model(tokens, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def load_config(name: str) -> Any:
    """The config of a model by its name on the hub or its folder.

    Raises:
        BadInput: transformers is missing or cannot load it.
    """
    return loading(name, lambda: import_transformers().AutoConfig.from_pretrained(name))


def looks_like_a_name(name: str) -> bool:
    """Whether this can be a hub name (``owner/model``) or is a folder."""
    return "/" in name or Path(name).is_dir()


def import_transformers() -> Any:
    """The package, silent; that it is missing is a BadInput."""
    try:
        import transformers
    except ImportError:
        raise BadInput(
            "a Hugging Face model needs transformers", hint="pip install transformers"
        ) from None
    transformers.logging.set_verbosity_error()
    return transformers


def _tokenize(name: str, text: bytes) -> Tensor:
    try:
        tokenizer = import_transformers().AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError):
        return as_tokens(text)
    if len(tokenizer) < _FEWEST_TOKENS:
        return as_tokens(text)
    tokens = tokenizer(text.decode(errors="replace"), verbose=False)["input_ids"]
    return torch.tensor(tokens, dtype=torch.int32)


def loading(name: str, load: Callable[[], Any]) -> Any:
    """What ``load`` returns; that it cannot is a BadInput."""
    try:
        return load()
    except (OSError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise BadInput(f"--model {name}: {reason}") from None
