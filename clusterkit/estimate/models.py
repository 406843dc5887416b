"""The sizes of a model: a preset of our GPT, a config on disk or as published, or numbers."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from clusterkit.errors import BadInput, Unavailable, did_you_mean
from clusterkit.estimate import published
from clusterkit.estimate.setup import Model

_COUNTING_SECONDS = 300.0
_GUESSED_VOCABULARY = 32_000
_GUESSED_CONTEXT = 2048
_ASPECT = 128
"""Width divided by layers of common models (GPT-3: 128, Llama 7B: 128)."""


def gpt(name: str, context: int | None = None) -> Model:
    """Return a preset of our GPT. ``context`` None: the preset's."""
    config, origin = published.PRESETS[name], "jobs/train/gpt/gpt_model.py"
    if config["model_type"] == "llama":
        model = replace(_llama(f"gpt {name}", config, "llama"), divisible=True, origin=origin)
        return replace(model, context=context) if context else model
    config = {**config, **({"n_positions": context} if context else {})}
    return _gpt2(f"gpt {name}", config, divisible=True, origin=origin)


def _transformer(
    name: str, *, layers: int, hidden: int, heads: int, context: int, vocabulary: int, query: int,
    keys: int, inner: int, gated: bool, tied: bool = True, positions: int = 0, extra: int = 0,
    **more: Any,
) -> Model:  # fmt: skip
    """Return a decoder: with layer norms and biases as GPT-2, or gated with RMS norms as Llama.

    Args:
        query, keys: widths of queries, and of keys and of values.
        inner: width of the perceptron.
        positions: how many are embedded.
        extra: parameters of a layer that are no matrices, besides the usual ones.
        more: other fields; they override those derived from the sizes.
    """
    matrices = 2 * hidden * (query + keys) + (3 if gated else 2) * hidden * inner
    # Two norms; biases of four linear layers.
    layer = matrices + (2 * hidden if gated else 9 * hidden + inner) + extra
    first = (vocabulary + positions) * hidden
    last = (1 if gated else 2) * hidden + (0 if tied else vocabulary * hidden)
    fields: dict[str, Any] = {
        "parameters": layers * layer + first + last,
        "layer_parameters": layer,
        "matrix_parameters": matrices,
        "largest": hidden * inner,
        "last": last,
        # What a token saves: docs/estimate.md. Inputs of two norms, of RMS norms in float32;
        "residual": 0 if gated else 2 * hidden,
        # their outputs, of RMS norms also before scaling;
        "kept": (4 if gated else 2) * hidden,
        # query, what attention gives, key and value, around the GELU or the gate;
        "divided": 2 * (query + keys) + (4 if gated else 2) * inner,
        # statistics of the norms, log-sum-exp of the softmax.
        "wide": (2 * hidden + 2 if gated else 4) + heads,
    }
    return Model(
        name=name, layers=layers, hidden=hidden, heads=heads, context=context,
        vocabulary=vocabulary, feed_forward=inner, first=first, tied=tied, gated=gated,
        **(fields | more),
    )  # fmt: skip


# ---------------------------------------------------------------- numbers


def from_numbers(
    parameters: int,
    *,
    layers: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    intermediate: int | None = None,
    gated: bool | None = None,
    vocabulary: int | None = None,
    context: int | None = None,
) -> Model:
    """Return a transformer with a number of parameters. Guesses what is not given; see ``origin``.

    Args:
        kv_heads: heads of keys and values; as many as ``heads`` if not given.
        intermediate: width of the perceptron; by default what the parameters leave for it.
        gated: whether the perceptron has a gate, as Llama's has (SwiGLU). If not given it has: of
            as many parameters, such a layer saves more.

    Raises:
        BadInput: the embeddings, or those and attention, are larger than the model.
    """
    given = {
        "layers": layers, "hidden": hidden, "key-value heads": kv_heads or heads,
        "intermediate size": intermediate, "vocabulary": vocabulary, "context": context,
    }  # fmt: skip
    guessed = [name for name, value in given.items() if value is None]
    if layers is None:
        # Of 12 x layers x hidden^2 parameters; of an unknown width, _ASPECT times the layers.
        deep = (
            parameters / (12 * hidden**2) if hidden else (parameters / (12 * _ASPECT**2)) ** (1 / 3)
        )
        layers = max(1, round(deep))
    if hidden is None:
        hidden = max(_ASPECT, round(math.sqrt(parameters / (12 * layers)) / _ASPECT) * _ASPECT)
    heads = heads or max(1, hidden // _ASPECT)
    keys = hidden * (kv_heads or heads) // heads
    vocabulary = _GUESSED_VOCABULARY if vocabulary is None else vocabulary
    ends = vocabulary * hidden
    layer = (parameters - ends - 2 * hidden) // layers
    if layer < 1:
        raise BadInput(
            f"--parameters {parameters}: an embedding of {vocabulary} x {hidden} is larger",
            hint="give --vocabulary and --hidden",
        )
    matrices = 2 if gated is False else 3
    attention = 2 * hidden * (hidden + keys)
    left = (layer - attention) // (matrices * hidden)
    if intermediate is None and left < 1:
        raise BadInput(
            f"--parameters {parameters}: the attention of {layers} layers x {hidden} is larger",
            hint="give --layers, --hidden and --kv-heads as the model's config has them",
        )
    inner = intermediate or left
    origin = f"your numbers; guessed: {', '.join(guessed)}" if guessed else "your numbers"
    if gated is None:
        origin += (
            "; a gated perceptron (SwiGLU) is assumed, which saves more than a plain one: "
            "--no-gated if it has none"
        )
    return _transformer(
        "a transformer", layers=layers, hidden=hidden, heads=heads,
        context=context or _GUESSED_CONTEXT, vocabulary=vocabulary, query=hidden, keys=keys,
        inner=inner, gated=gated is not False, parameters=parameters, layer_parameters=layer,
        matrix_parameters=min(layer, attention + matrices * hidden * inner), last=2 * hidden,
        largest=hidden * max(hidden, inner), divisible=True, origin=origin,
    )  # fmt: skip


# ---------------------------------------------------------------- Hugging Face


@dataclass(frozen=True)
class Located:
    """The config of a Hugging Face model: on this disk, or as published."""

    name: str
    folder: Path | None
    config: Mapping[str, Any]


def locate(name: str) -> Located | None:
    """Find the config of a folder, of a model in the hub's cache, or of a published model.

    Returns:
        None if there is none.

    Raises:
        BadInput: ``config.json`` is not a JSON object.
    """
    folder = Path(name).expanduser()
    if not (folder / "config.json").is_file():
        cached = _cached(name)
        if cached is None:
            known = published.config(name)
            return None if known is None else Located(known[0], None, known[1])
        folder = cached
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"--model {name}: {path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise BadInput(f"--model {name}: {path} is not a JSON object")
    return Located(name, folder.absolute(), config)


def _cached(name: str) -> Path | None:
    """Return the newest snapshot of a model in huggingface_hub's cache."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()
    model = hub / f"models--{name.replace('/', '--')}"
    try:
        revision = (model / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = model / "snapshots" / revision
    return snapshot if revision and (snapshot / "config.json").is_file() else None


def hugging_face(name: str, context: int | None = None, *, longest: int | None = None) -> Model:
    """Count a model on the meta device, in a process that imports torch.

    Without torch or transformers, uses the formulas of `from_config` if they know the model's type.

    Args:
        context: tokens of a sample; None: what the model takes, at most ``longest``.

    Raises:
        BadInput: no such folder, not in the cache, or a config that builds no model.
        Unavailable: transformers is needed to count the model, and is not installed.
    """
    found = locate(name)
    if found is None:
        near = did_you_mean(name.rpartition("/")[2].lower(), published.NAMES)
        raise BadInput(
            f"--model {name}: no folder with config.json, not in the Hugging Face cache, and none "
            "of the published models known here",
            hint=(f"{near} Or " if near else "")
            + f"hf download {name} config.json, or give --parameters, --layers, --hidden",
        )
    if context is None and longest is not None:
        takes = found.config.get("max_position_embeddings") or found.config.get("n_positions")
        context = min(takes, longest) if isinstance(takes, int) and takes > 0 else None
    if found.folder is None:
        model = from_config(found, context)
        assert model is not None  # the table has only kinds that the formulas know
        return model
    argv = [sys.executable, "-m", "clusterkit.runtime.model_shapes", str(found.folder)]
    argv += ["--context", str(context)] if context else []
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=_COUNTING_SECONDS,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"--model {name}: not counted within {_COUNTING_SECONDS:g} s") from None
    if done.returncode == 0:
        counted = json.loads(done.stdout.splitlines()[-1])
        return msgspec.convert({**counted, "name": name}, Model)
    said = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    lacking = "No module named" in said or "needs transformers" in said
    if lacking and (known := from_config(found, context)) is not None:
        return known
    if lacking:
        raise Unavailable(
            f"--model {name}: counting a {found.config.get('model_type', 'model')} takes "
            "torch and transformers",
            hint=f"{sys.executable} -m pip install 'clusterkit[train]'",
        )
    said = said.replace(str(found.folder), name).removeprefix(f"--model {name}: ")
    raise BadInput(f"--model {name}: {said}")


def from_config(found: Located, context: int | None = None) -> Model | None:
    """Return a model from its config by formulas; None for an unknown model type.

    Needs neither torch nor transformers. tests/live/test_estimate.py compares the formulas with the
    models that transformers builds.
    """
    config = found.config
    kind = config.get("model_type")
    try:
        if kind == "gpt2":
            model = _gpt2(found.name, config, origin="its config: gpt2")
            # Its GELU is written out: half the input, the tangent and one more are saved as well.
            model = replace(model, divided=model.divided + 3 * model.feed_forward)
        elif kind in ("llama", "mistral", "qwen2", "qwen3"):
            model = _llama(found.name, config, kind)
        else:
            return None
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    if found.folder is None:
        model = replace(model, origin=f"its config as published: {kind}")
    return replace(model, context=context) if context else model


def _gpt2(name: str, config: Mapping[str, Any], **more: Any) -> Model:
    width, context = int(config["n_embd"]), int(config.get("n_positions", 1024))
    inner = int(config.get("n_inner") or 4 * width)
    return _transformer(
        name, layers=int(config["n_layer"]), hidden=width, heads=int(config["n_head"]),
        context=context, positions=context, vocabulary=int(config["vocab_size"]), query=width,
        keys=width, inner=inner, gated=False, tied=bool(config.get("tie_word_embeddings", True)),
        largest=max(width * inner, 3 * width**2),  # query, key and value are one matrix
        **more,
    )  # fmt: skip


def _llama(name: str, config: Mapping[str, Any], kind: str) -> Model:
    width, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    head = int(config.get("head_dim") or width // heads)
    query, keys = heads * head, int(config.get("num_key_value_heads") or heads) * head
    return _transformer(
        name, layers=int(config["num_hidden_layers"]), hidden=width, heads=heads,
        context=int(config.get("max_position_embeddings", 1024)),
        vocabulary=int(config["vocab_size"]), query=query, keys=keys,
        inner=int(config["intermediate_size"]), gated=True,
        tied=bool(config.get("tie_word_embeddings", False)), origin=f"its config: {kind}",
        # Biases of query, key and value; norms of query and key.
        extra={"qwen2": query + 2 * keys, "qwen3": 2 * head}.get(kind, 0),
    )  # fmt: skip
