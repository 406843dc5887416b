"""Start without ``torch._dynamo``, the compiler that an eager program never calls.

torch 2.13 imports it (1.0 s of processor time and 800 modules in every rank, measured) when the
first optimizer or DistributedDataParallel is made, only to mark functions as "not for the
compiler" and to read one default. ``defer_dynamo`` puts a stand-in in its place that has just
these, and the cache that ``init_process_group`` empties. Code that asks for anything else
(torch.compile, ``import torch._dynamo.config``) gets the real one, imported then: this makes a
program faster but not different.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, MethodType, ModuleType
from typing import Any

_NAME = "torch._dynamo"


def defer_dynamo() -> None:
    """Install the stand-in, unless torch._dynamo is loaded already."""
    torch = importlib.import_module("torch")

    if _NAME not in sys.modules:
        stand_in = _Dynamo()
        sys.modules[_NAME] = stand_in
        vars(torch)["_dynamo"] = stand_in
        sys.meta_path.insert(0, _Finder())


@contextmanager
def deferred_compile() -> Iterator[None]:
    """Have ``torch.compile`` compile a function when it is first called, not when decorated.

    For importing modules that decorate functions which may never be called: DeepSpeed's Muon
    optimizer, which it imports to compare a class, costs 3 s otherwise.
    """
    torch = importlib.import_module("torch")

    compile_now = torch.compile

    def compile_later(fn: Any = None, **options: Any) -> Any:
        if fn is None:
            return partial(compile_later, **options)

        @cache
        def compiled() -> Any:
            return compile_now(fn, **options)

        @wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            return compiled()(*args, **kwargs)

        return call

    vars(torch)["compile"] = compile_later
    try:
        yield
    finally:
        vars(torch)["compile"] = compile_now


class _StandIn(ModuleType):
    """A module that loads the real one when it is asked for something that it does not have."""

    def __init__(self, name: str, **attributes: Any) -> None:
        super().__init__(name)
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system and inspect, probing
            raise AttributeError(name)
        _load()
        return getattr(importlib.import_module(self.__name__), name)


class _Dynamo(_StandIn):
    """The stand-in for torch._dynamo."""

    def __init__(self) -> None:
        super().__init__(
            _NAME,
            __path__=[],  # a package: importing a submodule asks _Finder
            # the default of torch._dynamo.config
            utils=_StandIn(f"{_NAME}.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer"),
            trace_rules=_StandIn(f"{_NAME}.trace_rules", clear_lru_cache=lambda: None),
            graph_break=lambda msg="": None,
        )

    def disable(self, fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        """Keep ``fn`` from the compiler: nothing to do, until the real one has been loaded."""
        if fn is None:
            return partial(self.disable, recursive=recursive, **options)
        if not isinstance(fn, (FunctionType, MethodType)):
            _load()
            return importlib.import_module(_NAME).disable(fn, recursive, **options)

        compiler = self
        disabled: list[Any] = []  # no functools.cache: the compiler warns of tracing through one

        @wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            if sys.modules[_NAME] is compiler:
                return fn(*args, **kwargs)
            if not disabled:
                real = importlib.import_module(_NAME)
                disabled.append(real.disable(fn, recursive, **options))
            return disabled[0](*args, **kwargs)

        # Should the real one come to trace a caller, it must not look inside.
        vars(call).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=None)
        return call


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(f"{_NAME}."):
            return None
        _load()
        # The real package may have imported the submodule already; a second copy would be wrong.
        loaded = sys.modules.get(name)
        if loaded is not None:
            return ModuleSpec(name, _Loaded(loaded), is_package=hasattr(loaded, "__path__"))
        return importlib.util.find_spec(name)


class _Loaded(Loader):
    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _load() -> None:
    """Put the real torch._dynamo in the stand-in's place."""
    torch = importlib.import_module("torch")

    stand_in = sys.modules.get(_NAME)
    if isinstance(stand_in, _Dynamo):
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
        del sys.modules[_NAME], vars(torch)["_dynamo"]
        importlib.import_module(_NAME)
