"""Give a program what was imported ahead at its own first import of it, and not before.

Run as text, like `forkserver`. Until then ``sys.modules`` does not show it. What it has read of the
environment is compared with the environment of that moment.
"""

from __future__ import annotations

import importlib.abc
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MAKES = ("__loader__", "__package__", "__path__", "__file__", "__cached__", "__spec__")


class FirstImports(importlib.abc.MetaPathFinder):
    """Hides modules, and gives them back.

    Args:
        groups: each name that was imported ahead, in order, with the modules that its import
            brought; those of Python itself stay.
        is_of_python: whether a file is one of its own.
        readers: for names of ``groups``, what their imports read of the environment.
        tell: gets a note for the run's log.
        on_torch: called when the program has imported torch.
    """

    def __init__(
        self,
        groups: Sequence[tuple[str, Sequence[str]]],
        is_of_python: Callable[[str], bool],
        readers: dict[str, Any],
        tell: Callable[[str], None],
        on_torch: Callable[[], None],
    ) -> None:
        self._readers, self._tell, self._on_torch = readers, tell, on_torch
        self._environment = dict(os.environ)
        self._groups: list[tuple[str, dict[str, ModuleType]]] = []
        self._waits = True  # for torch
        for main, names in groups:
            hidden = {}
            for name in names:
                top = sys.modules.get(name.partition(".")[0]) or self._module(name.partition(".")[0])
                file = getattr(top, "__file__", None)
                if file and not is_of_python(file) and name in sys.modules:
                    hidden[name] = sys.modules.pop(name)
            self._groups.append((main, hidden))
        for _, hidden in self._groups:
            for name, module in hidden.items():
                parent, _, child = name.rpartition(".")
                holder = self._module(parent)
                if holder is not None and parent not in hidden:
                    if vars(holder).get(child) is module:
                        delattr(holder, child)
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        module = self._module(name)
        if module is None and name != "torch":
            return None
        found = None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                found = finder.find_spec(name, path, target)
                if found is not None:
                    break
        if module is not None and "." not in name:
            if found is None or found.origin != getattr(module.__spec__, "origin", None):
                self._forget(name)  # the program has another one of this name
                module = None
        if module is None and (found is None or found.loader is None):
            return None
        wanted = found or module.__spec__ or ModuleSpec(name, None)
        spec = ModuleSpec(
            name, _Loader(self, module, wanted.loader), origin=wanted.origin,
            is_package=wanted.submodule_search_locations is not None,
        )  # fmt: skip
        spec.submodule_search_locations = wanted.submodule_search_locations
        spec.has_location, spec.cached = wanted.has_location, wanted.cached
        return spec

    def imported(self, name: str) -> None:
        """Show what an import of this module would have brought."""
        top = name.partition(".")[0]
        numbers = [
            number
            for number, (main, hidden) in enumerate(self._groups)
            if name in hidden and main.partition(".")[0] == top
        ]
        for number, (main, hidden) in enumerate(self._groups):
            if not hidden:
                continue
            whole = bool(numbers) and number <= numbers[0]
            shown = [each for each in hidden if whole or each.partition(".")[0] == top]
            if numbers and number > numbers[0]:
                continue
            if whole and main in self._readers:
                self._compare(main)
            for each in shown:
                self._show(each, hidden.pop(each))
        if self._waits and "torch" in sys.modules:
            self._waits = False
            self._on_torch()
        if not (self._waits or any(hidden for _, hidden in self._groups)):
            sys.meta_path.remove(self)

    def _show(self, name: str, module: ModuleType) -> None:
        sys.modules.setdefault(name, module)
        parent, _, child = name.rpartition(".")
        holder = sys.modules.get(parent) or self._module(parent)
        if holder is not None and child not in vars(holder):
            setattr(holder, child, module)

    def _module(self, name: str) -> ModuleType | None:
        return next((hidden[name] for _, hidden in self._groups if name in hidden), None)

    def _forget(self, top: str) -> None:
        for _, hidden in self._groups:
            for name in [name for name in hidden if name.partition(".")[0] == top]:
                del hidden[name]

    def _compare(self, main: str) -> None:
        before, now = self._environment, dict(os.environ)
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) != now.get(name) and self._readers[main].match(name):
                self._tell(
                    f"{name} was changed before {main} was imported, which had been imported ahead "
                    "and does not know it; put `preload: []` into the job file"
                )


class _Loader(importlib.abc.Loader):
    """Returns the module that was imported ahead; None: loads it, and tells the finder."""

    def __init__(self, finder: FirstImports, module: ModuleType | None, loader: Any) -> None:
        self._finder, self._module, self._loader = finder, module, loader
        self._made: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if self._module is None:
            spec.loader = self._loader
            return self._loader.create_module(spec)  # type: ignore[no-any-return]
        self._made = {name: vars(self._module)[name] for name in _MAKES if name in vars(self._module)}
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        if self._module is None:
            self._loader.exec_module(module)
        else:
            for name in _MAKES:
                vars(module).pop(name, None)
            vars(module).update(self._made)
        self._finder.imported(module.__name__)
