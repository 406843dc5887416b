"""What the sentiment programs share beside the reviews: tokenizer, model, and how ranks meet."""

from __future__ import annotations

import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from reviews import BadInput, Reviews

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_SECONDS = 5.0  # the hub has to answer before the program goes on without it


def join() -> torch.device:
    """Meet the other ranks, as the launcher's variables say; without one, be a world of one."""
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # 0: any that is free
    device = torch.device("cpu")
    if torch.cuda.is_available() and os.environ.get("CLUSTERKIT_DEVICE") != "cpu":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def report(event: str, **fields: object) -> None:
    """Print a line that clusterkit reads: progress, metrics and plots are made of it."""
    if dist.get_rank() == 0:
        print("@clusterkit " + json.dumps({"event": event, **fields}), flush=True)


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


def import_transformers(model: str | None = None) -> ModuleType:
    """transformers, silent but for errors.

    Without a network it asks the hub six times before it gives up, 28 s in one measurement, even
    for a model that it has on disk. Here the hub is asked once; when it does not answer,
    transformers is told to stay offline.

    Args:
        model: the Hugging Face name or folder that will be loaded, if any.

    Raises:
        BadInput: ``model`` is a folder without ``config.json``.
    """
    if model is not None and Path(model).is_dir():
        if not (Path(model) / "config.json").is_file():
            raise BadInput(
                f"--model {model}: the folder holds no config.json",
                hint="give a folder that save_pretrained or `hf download` wrote",
            )
    elif model is not None and "HF_HUB_OFFLINE" not in os.environ and not _answers(model):
        os.environ["HF_HUB_OFFLINE"] = "1"
        if "huggingface_hub.constants" in sys.modules:  # it has read the environment already
            vars(sys.modules["huggingface_hub.constants"])["HF_HUB_OFFLINE"] = True
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _answers(model: str) -> bool:
    """Whether the hub says anything about a model."""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        request = urllib.request.Request(f"{endpoint}/api/models/{model}", method="HEAD")
        urllib.request.urlopen(request, timeout=_SECONDS).close()
    except urllib.error.HTTPError:
        return True  # whatever it says, it is there; transformers explains the rest
    except urllib.error.URLError as error:
        # Which certificates are trusted is for transformers' own client to judge.
        return isinstance(error.reason, ssl.SSLError)
    except (OSError, ValueError):
        return False
    return True


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
