"""Hugging Face transformers, and models by name where there may be no network."""

from __future__ import annotations

import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import ModuleType
from typing import Any

from clusterkit.errors import BadInput, Unavailable

SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
AUTO = {"gradient_clipping": 1.0, "zero_optimization": {}, **dict.fromkeys(SIZES, "auto")}
SECONDS = 5.0
"""How long the hub has to answer before the program goes on without it."""


def import_transformers(model: str | None = None) -> ModuleType:
    """transformers, silent but for errors.

    Without a network it asks the hub six times before it gives up, 28 s in one measurement, even
    for a model that it has on disk. Here the hub is asked once; when it does not answer,
    transformers is told to stay offline.

    Args:
        model: the Hugging Face name or folder that will be loaded, if any.

    Raises:
        BadInput: ``model`` is a folder without ``config.json``.
        Unavailable: transformers is not installed.
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
    try:
        import transformers
    except ImportError:
        raise Unavailable(
            "this program needs transformers, which is not installed",
            hint="pip install transformers",
        ) from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    module: ModuleType = transformers
    return module


def _answers(model: str) -> bool:
    """Whether the hub says anything about a model."""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        request = urllib.request.Request(f"{endpoint}/api/models/{model}", method="HEAD")
        urllib.request.urlopen(request, timeout=SECONDS).close()
    except urllib.error.HTTPError:
        return True  # whatever it says, it is there; transformers explains the rest
    except urllib.error.URLError as error:
        # Which certificates are trusted is for transformers' own client to judge.
        return isinstance(error.reason, ssl.SSLError)
    except (OSError, ValueError):
        return False
    return True


def read_deepspeed_config(path: str) -> dict[str, Any]:
    """The DeepSpeed config; batch sizes that it leaves out are the Trainer's."""
    try:
        return AUTO | json.loads(Path(path).read_text())
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(f"DeepSpeed config {path}: {error}") from None
