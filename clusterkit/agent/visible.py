"""CUDA_VISIBLE_DEVICES, read as CUDA reads it, for all of clusterkit."""

from __future__ import annotations

import re
from collections.abc import Mapping


def visible_gpus(listed: Mapping[str, str], value: str) -> list[str]:
    """Return the indexes of the GPUs that CUDA sees, in its order, and MIG slices by their names.

    As its programming guide, CUDA Environment Variables, has it: the first name that is none ends
    the list; one that stands there twice, or the beginning of two UUIDs, leaves no GPU at all.
    Numbers are read as C reads them: ``1x`` is 1.

    Args:
        listed: the index of each GPU, by its index and by its UUID.
    """
    found: list[str] = []
    for name in (name.strip() for name in value.split(",")):
        if name.startswith("MIG-"):
            matching = [name]
        elif name.startswith("GPU-"):
            matching = [index for key, index in listed.items() if key.startswith(name)]
        else:
            number = re.match(r"\+?[0-9]+", name)
            index = listed.get(str(int(number[0]))) if number else None
            matching = [] if index is None else [index]
        if not matching:
            break
        if len(matching) > 1 or matching[0] in found:
            return []
        found += matching
    return found
