"""The tokenizer and the model of the sentiment programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hub import import_transformers
from reviews import Reviews

from clusterkit.errors import BadInput

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def choose_model(
    name: str | None, texts: Sequence[str], classes: int, length: int
) -> tuple[Any, Callable[[], Any]]:
    """A tokenizer, and what builds a classifier.

    Args:
        name: a model by Hugging Face name or folder; None for a small BERT with random weights
            and a tokenizer made of the texts' characters.
        length: the longest input in tokens.

    Raises:
        BadInput: the model cannot be had.
    """
    transformers = import_transformers(name)
    if name is None:
        tokenizer = character_tokenizer(texts)
        config = transformers.BertConfig(
            vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=128, max_position_embeddings=length, num_labels=classes,
        )  # fmt: skip
        return tokenizer, lambda: transformers.BertForSequenceClassification(config)

    def load(kind: Any, **options: Any) -> Any:
        try:
            return kind.from_pretrained(name, **options)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise BadInput(f"--model {name}: {reason}") from None

    tokenizer = load(transformers.AutoTokenizer)
    config = load(transformers.AutoConfig, num_labels=classes)
    kind = transformers.AutoModelForSequenceClassification
    return tokenizer, lambda: load(kind, config=config, dtype=torch.float32)


def character_tokenizer(texts: Sequence[str]) -> Any:
    """BERT's tokenizer with one token per character, as its Chinese one has.

    A word of other scripts becomes a token per letter. The same texts give the same tokens.
    """
    characters = sorted({c for text in texts for c in text.lower() if not c.isspace()})
    tokens = [*_SPECIAL, *characters, *(f"##{c}" for c in characters)]
    numbers = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    return import_transformers().BertTokenizer(vocab=numbers, strip_accents=False)


def encode(
    tokenizer: Any, reviews: Reviews, rows: Sequence[int], length: int
) -> list[dict[str, Any]]:
    """Tokens and label of some rows, cut to ``length`` tokens; padded later, batch by batch."""
    texts = [reviews.texts[row] for row in rows]
    encoded = tokenizer(texts, truncation=True, max_length=length)
    keys = [key for key in ("input_ids", "token_type_ids", "attention_mask") if key in encoded]
    return [
        {**{key: encoded[key][i] for key in keys}, "labels": reviews.labels[row]}
        for i, row in enumerate(rows)
    ]
