"""The weights of a checkpoint, whole and in fp32, for plain torch or transformers.

    python jobs/train/gpt/export.py checkpoints/step-00000200 exported/

Works for every strategy but DeepSpeed's own pipeline and tensor parallelism, on one machine
without a launcher: parts that many ranks saved are put together. One of our own models becomes
``model.pt``, which ``torch.load`` reads and ``GPT.load_state_dict`` takes; a Hugging Face model
becomes a folder for ``from_pretrained``.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import torch
from checkpoint_files import readable
from model import GPT, Shape
from ranks import BadInput
from stored import Checkpoint
from torch import Tensor, nn
from world import run


def export(source: Path, target: Path) -> Path:
    """Write the weights of the checkpoint ``source`` into the folder ``target``.

    Returns:
        The file or folder to load.

    Raises:
        BadInput: no whole checkpoint, or one of a model that is not known here.
    """
    checkpoint = Checkpoint.read(source)
    if checkpoint is None:
        raise BadInput(
            f"{source} is not a complete checkpoint", hint="a folder such as step-00000200"
        )
    with readable(checkpoint.path):
        state = weights(checkpoint)
    target.mkdir(parents=True, exist_ok=True)
    if {field.name for field in fields(Shape)} <= checkpoint.model.keys():
        sizes = {field.name: checkpoint.model[field.name] for field in fields(Shape)}
        model = _filled(GPT(Shape(**sizes)), state, source)
        torch.save(model.state_dict(), target / "model.pt")
        return target / "model.pt"
    return _as_hugging_face(checkpoint, state, target)


def weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Every parameter of a checkpoint by its name, whole, in fp32, in host memory."""
    folder = checkpoint.path
    state = _from_zero(folder) if (folder / "zero").exists() else _from_shards(folder)
    return {name: tensor.float() for name, tensor in state.items()}


def _from_shards(folder: Path) -> dict[str, Tensor]:
    from shards import read_weights

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        return read_weights(folder)


def _from_zero(folder: Path) -> dict[str, Tensor]:
    if len(parts := sorted((folder / "zero").glob("mp_rank_*_model_states.pt"))) > 1:
        # zero_to_fp32 puts together what ZeRO divides, and nothing else (DeepSpeed 0.19).
        how = "pipeline" if any((folder / "zero").glob("layer_*")) else "tensor parallelism"
        raise BadInput(
            f"{folder}: DeepSpeed's {how} divided the model into {len(parts)} parts, which cannot "
            "be exported",
            hint="--strategy pp, tp and 3d divide it as well, and their checkpoints can",
        )
    if not any((folder / "zero").glob("*optim_states.pt")):  # stage 0 in fp32
        saved = torch.load(
            folder / "zero" / "mp_rank_00_model_states.pt", map_location="cpu", weights_only=True
        )
        plain: dict[str, Tensor] = saved["module"]
        return plain
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from zero_checkpoint import read_as_data

    with read_as_data():
        merged: dict[str, Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(folder), "zero")
    return merged


def _filled(model: nn.Module, state: Mapping[str, Tensor], source: Path) -> nn.Module:
    """A model with these weights; of names that share one weight, one is enough.

    Raises:
        BadInput: weights are missing, of other sizes, or too many.
    """
    whole = dict(state)
    names: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(parameter, name)
        if name not in whole and first in whole:
            whole[name] = whole[first]
    try:
        model.load_state_dict(whole)
    except RuntimeError as error:
        reason = str(error).replace("\n\t", " ")
        raise BadInput(f"checkpoint {source}: {reason}") from None
    return model


def _as_hugging_face(checkpoint: Checkpoint, state: Mapping[str, Tensor], target: Path) -> Path:
    from hugging_face import CausalLM, load_config

    name = str(checkpoint.model.get("name"))
    if "type" not in checkpoint.model:
        raise BadInput(f"checkpoint {checkpoint.path} is of {name}, which is not known here")
    whole = _filled(CausalLM(name, load_config(name), pretrained=False), state, checkpoint.path)
    whole.model.save_pretrained(target)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    print(export(args.checkpoint, args.folder))
    return 0


if __name__ == "__main__":
    run(main)
