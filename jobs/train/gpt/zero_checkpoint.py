"""DeepSpeed's checkpoint files, read as data: a class or function that a file names is refused.

    python zero_checkpoint.py --input_folder FOLDER --output_folder FOLDER

is DeepSpeed's own ``ds_to_universal``, reading so.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from checkpoint_files import file_sizes, more_than_data
from ranks import BadInput

_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


@contextmanager
def read_as_data() -> Iterator[None]:
    """Within, ``torch.load`` takes tensors, plain values and DeepSpeed's own few classes.

    DeepSpeed 0.19.8 says ``weights_only=False`` wherever it loads; torch's variable outranks that.
    """
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        with torch.serialization.safe_globals(_classes()):
            yield
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before


def _classes() -> list[Any]:
    """What DeepSpeed 0.19.8 writes into its files beside tensors; none does anything when made."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


CONVERTED = "universal"


def convert(folder: Path) -> None:
    """Rewrite a checkpoint so that any number of ranks can load it, beside the original.

    Done once. What has lost a file since is written anew: DeepSpeed would pass some of them over.
    """
    whole, sizes = folder / CONVERTED, folder / f"{CONVERTED}.json"
    with suppress(OSError, ValueError):
        if json.loads(sizes.read_text()) == file_sizes(whole):
            return
    draft = folder / f".{CONVERTED}.draft"
    for leftover in (whole, draft):
        shutil.rmtree(leftover, ignore_errors=True)
    done = subprocess.run(
        [sys.executable, __file__, "--inject_missing_state",
         "--input_folder", str(folder / "zero"), "--output_folder", str(draft)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        said = done.stdout.strip().splitlines() or [f"exit code {done.returncode}"]
        reason = more_than_data(done.stdout) or said[-1]
        raise BadInput(f"checkpoint {folder} cannot be made universal: {reason}")
    sizes.write_text(json.dumps(file_sizes(draft)))
    draft.rename(whole)


def load(engine: Any, optimizer: torch.optim.Optimizer, folder: Path, *, universal: bool) -> None:
    """Read what the engine, or ``convert``, wrote into a checkpoint's folder. Collective."""
    groups = optimizer.param_groups
    settings = [{key: group[key] for key in group if key != "params"} for group in groups]
    with read_as_data():
        found, _ = engine.load_checkpoint(str(folder), tag=CONVERTED if universal else "zero")
    if found is None:
        raise RuntimeError("DeepSpeed finds nothing in it")
    if universal:
        # In stage 3 DeepSpeed 0.19.8 gives all groups the settings of the first, and all
        # parameters one and the same counter, which each of them then counts up.
        for group, own in zip(optimizer.param_groups, settings, strict=True):
            group.update(own)
        for state in optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()


# The converter's pool has these processes too; by `fork` or, since Python 3.14, by importing this.
if __name__ in ("__main__", "__mp_main__"):
    torch.serialization.add_safe_globals(_classes())

if __name__ == "__main__":
    from deepspeed.checkpoint.ds_to_universal import main, parse_arguments

    with read_as_data():
        main(parse_arguments())
