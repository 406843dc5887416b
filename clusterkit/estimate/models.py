"""How large a model is: our GPT's presets, a config on disk or published, or bare numbers."""

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

from clusterkit.errors import BadInput, Unavailable, did_you_mean
from clusterkit.estimate import published
from clusterkit.estimate.presets import PRESETS, Shape
from clusterkit.estimate.setup import Model

_COUNTING_SECONDS = 300.0
_GUESSED_VOCABULARY = 32_000
_GUESSED_CONTEXT = 2048
_ASPECT = 128
"""Width over layers of common models (GPT-3: 128, Llama 7B: 128); for a guess."""


def gpt(name: str, context: int | None = None) -> Model:
    """One of our GPT's presets, with its own context or another."""
    shape = PRESETS[name]
    if context:
        shape = replace(shape, context=context)
    origin = "jobs/train/gpt/model.py"
    return _gpt(f"gpt {name}", shape, 4 * shape.width, divisible=True, origin=origin)


def _gpt(name: str, shape: Shape, inner: int, **more: Any) -> Model:
    """GPT-2, in which positions are embedded and the output layer is the token embedding."""
    width = shape.width
    matrices = 4 * width**2 + 2 * width * inner
    # Two norms, and the biases of four linear layers.
    layer = matrices + 9 * width + inner
    ends = (shape.vocabulary + shape.context) * width
    sizes: dict[str, Any] = {
        "layers": shape.layers,
        "hidden": width,
        "heads": shape.heads,
        "context": shape.context,
        "vocabulary": shape.vocabulary,
        "parameters": shape.layers * layer + ends + 2 * width,
        "layer_parameters": layer,
        "matrix_parameters": matrices,
        "largest": max(width * inner, 3 * width**2),
        "feed_forward": inner,
        "first": ends,
        "last": 2 * width,
        "tied": True,
        **_gpt_activations(width, shape.heads, inner),
    }
    return Model(name=name, **(sizes | more))


def _gpt_activations(
    width: int, heads: int, feed_forward: int, keys: int | None = None
) -> dict[str, Any]:
    """Elements a token and layer saves: see docs/estimate.md, and memory.Model for the names.

    Args:
        keys: width of keys, and of values; that of the layer if not given.
    """
    keys = width if keys is None else keys
    return {
        "residual": 2 * width,  # inputs of the two norms
        "kept": 2 * width,  # their outputs, inputs of the linear layers
        "divided": 2 * (width + keys + feed_forward),  # q, mixed, k, v; around the GELU
        "wide": 4 + heads,  # mean and deviation of two norms, log-sum-exp of the softmax
    }


def _llama_activations(
    width: int, heads: int, feed_forward: int, query: int, keys: int
) -> dict[str, Any]:
    """The same of a layer with RMS norms and a gated perceptron."""
    return {
        "residual": 0,
        "kept": 4 * width,  # the two norms: normalised, and scaled
        "divided": 2 * query + 2 * keys + 4 * feed_forward,
        "wide": 2 * width + 2 + heads,  # the norms' inputs, in float32
    }


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
    """A transformer of so many parameters; what is not given is guessed, and ``origin`` says so.

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
    activations = (
        _gpt_activations(hidden, heads, inner, keys)
        if gated is False
        else _llama_activations(hidden, heads, inner, hidden, keys)
    )
    origin = f"your numbers; guessed: {', '.join(guessed)}" if guessed else "your numbers"
    if gated is None:
        origin += (
            "; a gated perceptron (SwiGLU) is assumed, which saves more than a plain one: "
            "--no-gated if it has none"
        )
    return Model(
        name="a transformer",
        parameters=parameters,
        layers=layers,
        hidden=hidden,
        heads=heads,
        context=context or _GUESSED_CONTEXT,
        vocabulary=vocabulary,
        layer_parameters=layer,
        matrix_parameters=min(layer, attention + matrices * hidden * inner),
        largest=hidden * max(hidden, inner),
        feed_forward=inner,
        first=ends,
        last=2 * hidden,
        tied=True,
        **activations,
        gated=gated is not False,
        divisible=True,
        origin=origin,
    )


# ---------------------------------------------------------------- Hugging Face


@dataclass(frozen=True)
class Located:
    """A Hugging Face model's config: on this disk, or as it was published."""

    name: str
    folder: Path | None
    config: Mapping[str, Any]


def locate(name: str) -> Located | None:
    """The config of a folder, of a name in the hub's cache, or of one in the table of published
    models; None if it is nowhere.

    Raises:
        BadInput: there is a ``config.json``, and it is no JSON object.
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
        raise BadInput(f"--model {name}: {path} is no JSON object")
    return Located(name, folder.absolute(), config)


def _cached(name: str) -> Path | None:
    """The newest snapshot of a model in the cache that huggingface_hub keeps."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()
    model = hub / f"models--{name.replace('/', '--')}"
    try:
        revision = (model / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = model / "snapshots" / revision
    return snapshot if revision and (snapshot / "config.json").is_file() else None


def hugging_face(name: str, context: int | None = None) -> Model:
    """A model by name or folder, counted on the meta device by a process that has torch.

    Without torch or transformers, the formulas of `from_config` do for the kinds they know.

    Raises:
        BadInput: no such folder, not in the cache, or a config that builds no model.
        Unavailable: it takes transformers to count it, and there is none.
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
        return _from_sizes(name, json.loads(done.stdout.splitlines()[-1]))
    said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
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


def _from_sizes(name: str, sizes: Mapping[str, Any]) -> Model:
    hidden, heads, feed_forward = sizes["hidden"], sizes["heads"], sizes["feed_forward"]
    keys = (
        "parameters", "layers", "hidden", "heads", "context", "vocabulary", "layer_parameters",
        "matrix_parameters", "largest", "feed_forward", "first", "last", "tied", "buffers",
    )  # fmt: skip
    return Model(
        name=name,
        **{key: sizes[key] for key in keys},
        **_gpt_activations(hidden, heads, feed_forward),
        gated=sizes["largest"] < 4 * hidden**2 or feed_forward != 4 * hidden,
        measured={dtype: (saved[0], saved[1]) for dtype, saved in sizes["saved"].items()},
        origin=f"{sizes['type']}, counted on the meta device",
    )


def from_config(found: Located, context: int | None = None) -> Model | None:
    """A model from its config alone, by formulas; None for kinds they do not know.

    Quick, and needs neither torch nor transformers. tests/live/test_estimate.py holds them
    against the models that transformers builds.
    """
    config = found.config
    kind = config.get("model_type")
    try:
        if kind == "gpt2":
            model = _gpt2(found.name, config)
        elif kind in ("llama", "mistral", "qwen2", "qwen3"):
            model = _llama(found.name, config, kind)
        else:
            return None
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    if found.folder is None:
        model = replace(model, origin=f"its config as published: {kind}")
    return replace(model, context=context) if context else model


def _gpt2(name: str, config: Mapping[str, Any]) -> Model:
    layers, heads, width = (int(config[key]) for key in ("n_layer", "n_head", "n_embd"))
    context, vocabulary = int(config.get("n_positions", 1024)), int(config["vocab_size"])
    inner = int(config.get("n_inner") or 4 * width)
    # Its GELU is written out: half the input, the tangent and one more are saved as well.
    divided = _gpt_activations(width, heads, inner)["divided"] + 3 * inner
    tied = bool(config.get("tie_word_embeddings", True))
    shape = Shape(layers, heads, width, context, vocabulary)
    return _gpt(name, shape, inner, divided=divided, tied=tied, origin="its config: gpt2")


def _llama(name: str, config: Mapping[str, Any], kind: str) -> Model:
    width, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    heads = int(config["num_attention_heads"])
    head = int(config.get("head_dim") or width // heads)
    query, few = heads * head, int(config.get("num_key_value_heads") or heads) * head
    inner, vocabulary = int(config["intermediate_size"]), int(config["vocab_size"])
    matrices = width * (2 * query + 2 * few) + 3 * width * inner
    layer = matrices + 2 * width
    if kind == "qwen2":
        layer += query + 2 * few  # biases of query, key and value
    if kind == "qwen3":
        layer += 2 * head  # norms of query and key
    tied = bool(config.get("tie_word_embeddings", False))
    ends = vocabulary * width
    return Model(
        name=name,
        parameters=layers * layer + ends * (1 if tied else 2) + width,
        layers=layers,
        hidden=width,
        heads=heads,
        context=int(config.get("max_position_embeddings", 1024)),
        vocabulary=vocabulary,
        layer_parameters=layer,
        matrix_parameters=matrices,
        largest=width * inner,
        feed_forward=inner,
        first=ends,
        last=width + (0 if tied else ends),
        tied=tied,
        **_llama_activations(width, heads, inner, query, few),
        gated=True,
        origin=f"its config: {kind}",
    )
