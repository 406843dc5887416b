"""Run a training program and count the bytes of its live tensors: tracked.py PROGRAM ARGS...

Every operation that torch dispatches goes through `Tracker`, which notes the storages of its
results and, by weak references, when each is let go: by whichever thread, so that tensors which a
collective held are seen to go as well. Memory inside one operation is not seen, nor is what is no
tensor. The peak is of the steps, from the first on; building the model is told apart.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter


class Tracker(TorchDispatchMode):
    """Bytes of live tensors now (``live``) and at most (``peak``)."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it comes again, as operations on its local part
        result = func(*args, **(kwargs or {}))
        given = None
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._sizes:
                if given is None:
                    given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
                if storage._cdata in given:
                    continue  # a view of memory that is not torch's, such as the text
            self.see(storage)
        return result

    def see(self, storage: torch.UntypedStorage) -> None:
        """Note a storage, or that its size has changed."""
        key, size = storage._cdata, storage.nbytes()
        if storage.device.type == "meta":
            return
        if key not in self._sizes:
            weakref.finalize(storage, self._gone, key)
        self.live += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _gone(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


def _tensors(tree: Any) -> Any:
    for leaf in tree_iter(tree):
        if not isinstance(leaf, torch.Tensor):
            continue
        if is_traceable_wrapper_subclass(leaf):
            inner = (getattr(leaf, name) for name in leaf.__tensor_flatten__()[0])
            yield from _tensors([part for part in inner if isinstance(part, torch.Tensor)])
        else:
            yield leaf


def follow_resizes(tracker: Tracker) -> None:
    """FSDP frees and fills storages by resizing them, which is no operation."""
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        if storage._cdata in tracker._sizes:
            tracker.see(storage)

    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]


def main() -> None:
    path = Path(sys.argv[1])
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    program: Any = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = program  # dataclasses look their module up by name
    spec.loader.exec_module(program)
    tracker = Tracker()
    follow_resizes(tracker)
    reporter = importlib.import_module("gpt_metrics").Reporter
    phase, told = reporter.phase, {}

    def tracked(self: Any, name: str | None) -> None:
        if name == "first_step":
            told.update(build=tracker.peak, start=tracker.live)
            tracker.peak = tracker.live
        if name == "ending":
            told.update(peak=tracker.peak, end=tracker.live)
            record = {"event": "memory", "rank": int(os.environ.get("RANK", "0")), **told}
            print(f"@clusterkit {json.dumps(record)}", flush=True)
        phase(self, name)

    reporter.phase = tracked
    run = importlib.import_module("gpt_ranks").run  # the program's own way to end a rank
    with tracker:
        run(program.main)


if __name__ == "__main__":
    main()
