"""DeepSpeed without its surprises: imported, a model built for it, its errors explained."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from ranks import BadInput
from world import World
from zero_mesh import Config


def import_deepspeed(world: World) -> Any:
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)  # spares a search and a warning
    if world.device.index is not None:
        # DeepSpeed takes this for the number of the GPU; where a rank sees only one, it is not.
        os.environ["LOCAL_RANK"] = str(world.device.index)
    try:
        import deepspeed
        import deepspeed.ops
    except ImportError as error:
        raise BadInput(
            f"--strategy deepspeed needs DeepSpeed: {error}", hint="pip install deepspeed"
        ) from None
    # It imports its Muon optimizer to compare a class, and that calls torch.compile: 3 s.
    compile_now, torch.compile = torch.compile, lambda function=None, **_: function or (lambda f: f)
    with suppress(ImportError):
        import deepspeed.runtime.zero.muon.muon_optimizer
    torch.compile = compile_now
    # DeepSpeed calls collectives by names that torch 2.13 has renamed.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # Its pipeline broadcasts losses that it has no further use for.
    warnings.filterwarnings("ignore", "c10d::broadcast_: an autograd kernel was not", UserWarning)
    logging.getLogger("DeepSpeed").setLevel(os.environ.get("LOGLEVEL", "WARNING").upper())
    if world.device.type == "cpu" and os.environ.get("CLUSTERKIT_DEEPSPEED_SHM") != "1":
        # DeepSpeed compiles a shared-memory collective at start when a compiler is there: a
        # minute, and a lock that a killed run leaves for ever. Gloo does without it.
        deepspeed.ops.__compatible_ops__ = {}
    # Its parts ask DeepSpeed's own module for the number of ranks, before the engine is there.
    deepspeed.init_distributed(dist_backend=world.backend, dist_init_required=False)
    return deepspeed


@contextmanager
def building(config: Config, world: World, *, divided: bool) -> Iterator[None]:
    """Within, a model may be divided while it is made, so that no rank ever holds all of it."""
    deepspeed = import_deepspeed(world)
    if not divided:
        yield
        return
    # transformers asks for this object when it makes a model, and holds it by a weak reference.
    transformers = sys.modules.get("transformers.integrations")
    kept = transformers.HfDeepSpeedConfig(config) if transformers else None
    with deepspeed.zero.Init(config_dict_or_path=config):
        yield
    del kept


@contextmanager
def explained() -> Iterator[None]:
    """Within, what DeepSpeed finds wrong with its config is one clear error."""
    from deepspeed.runtime.config import DeepSpeedConfigError

    try:
        yield
    except (DeepSpeedConfigError, AssertionError, ImportError) as error:
        reason = str(error).strip() or type(error).__name__
        raise BadInput(f"DeepSpeed refuses its config: {reason}") from error
    except ValueError as error:
        if not hasattr(error, "errors"):
            raise
        first = error.errors()[0]  # of pydantic
        place = ".".join(map(str, first["loc"]))
        raise BadInput(
            f"DeepSpeed config, {error.title}: {place}: {first['msg']}",
            hint="see https://www.deepspeed.ai/docs/config-json/",
        ) from error
