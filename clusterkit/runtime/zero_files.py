"""DeepSpeed's checkpoint files, read as data: a class or function that a file names is refused.

    python -m clusterkit.runtime.zero_files --input_folder FOLDER --output_folder FOLDER

is DeepSpeed's own ``ds_to_universal``, reading so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

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


# The converter's pool has these processes too; by `fork` or, since Python 3.14, by importing this.
if __name__ in ("__main__", "__mp_main__"):
    torch.serialization.add_safe_globals(_classes())

if __name__ == "__main__":
    from deepspeed.checkpoint.ds_to_universal import main, parse_arguments

    with read_as_data():
        main(parse_arguments())
