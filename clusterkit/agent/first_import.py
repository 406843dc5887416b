"""Give a program what was preloaded at its own first import of it, and not before.

Run as text, like `forkserver`. Until then ``sys.modules`` does not show it. What it has read of the
environment is compared with the environment of that moment.
"""

from __future__ import annotations

import contextlib
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
        groups: each name that was preloaded, in order, with the modules that its import
            brought (those of Python itself stay) and the variables that it set.
        is_of_python: whether a file is one of its own.
        readers: for names of ``groups``, what their imports read of the environment.
        tell: gets a note for the run's log.
        on_torch: called when the program has imported torch.
    """

    def __init__(
        self,
        groups: Sequence[tuple[str, Sequence[str], dict[str, str]]],
        is_of_python: Callable[[str], bool],
        readers: dict[str, Any],
        tell: Callable[[str], None],
        on_torch: Callable[[], None],
    ) -> None:
        self._readers, self._tell, self._on_torch = readers, tell, on_torch
        self._groups: list[tuple[str, dict[str, ModuleType]]] = []
        self._set = {main: variables for main, _, variables in groups}
        self._waits = True  # for torch
        every = dict(sys.modules)
        for main, names, variables in groups:
            tops = {name.partition(".")[0] for name in names}
            files = {top: getattr(every.get(top), "__file__", None) for top in tops}
            tops = {top for top, file in files.items() if file and not is_of_python(file)}
            known = [name for name in names if name in every and name.partition(".")[0] in tops]
            self._groups.append((main, {name: sys.modules.pop(name) for name in known}))
            for variable, value in variables.items():
                if os.environ.get(variable) == value:
                    del os.environ[variable]
        self._environment = dict(os.environ)
        for _, hidden in self._groups:
            for name, module in hidden.items():
                parent, _, child = name.rpartition(".")
                holder = None if parent in hidden else self._module(parent)
                if holder is not None and vars(holder).get(child) is module:
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
        if module is not None and "." not in name and not _same(found, module.__spec__):
            self._forget(name)  # the program has another one of this name
            module = None
        if module is None:
            return self._noticed(found) if name == "torch" else None
        wanted = found or module.__spec__ or ModuleSpec(name, None)
        spec = ModuleSpec(
            name, _Loader(self, module, wanted.loader), origin=wanted.origin,
            is_package=wanted.submodule_search_locations is not None,
        )  # fmt: skip
        spec.submodule_search_locations = wanted.submodule_search_locations
        spec.has_location, spec.cached = wanted.has_location, wanted.cached
        return spec

    def _noticed(self, spec: ModuleSpec | None) -> ModuleSpec | None:
        """Have `imported` called once torch, which was not preloaded, has been loaded."""
        if spec is not None and spec.loader is not None:
            loader, run = vars(spec.loader), spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                loader.pop("exec_module", None)
                run(module)
                self.imported("torch")

            loader["exec_module"] = exec_module
        return spec

    def imported(self, name: str) -> None:
        """Show what an import of this module would have brought."""
        top, last = name.partition(".")[0], -1
        for number, (main, hidden) in enumerate(self._groups):
            if name in hidden and main.partition(".")[0] == top:
                last = number
        for number, (main, hidden) in enumerate(self._groups):
            whole = number <= last
            if whole and hidden:
                if main in self._readers:
                    self._compare(main)
                for variable, value in self._set[main].items():
                    os.environ.setdefault(variable, value)
            for each in list(hidden):
                if whole or (last < 0 and each.partition(".")[0] == top):
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
                    f"{name} was changed before {main} was imported, but {main} was preloaded "
                    "without the change; set `preload: []` in the job file"
                )


class _Loader(importlib.abc.Loader):
    """Returns the module that was preloaded."""

    def __init__(self, finder: FirstImports, module: ModuleType, loader: Any) -> None:
        self._finder, self._module, self._loader = finder, module, loader
        self._made: dict[str, Any] = {}
        self._name = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self._name = spec.name
        self._made = {
            name: vars(self._module)[name] for name in _MAKES if name in vars(self._module)
        }
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        for name in _MAKES:
            vars(module).pop(name, None)
        vars(module).update(self._made)
        self._finder.imported(self._name)


def _same(found: ModuleSpec | None, known: ModuleSpec | None) -> bool:
    """Return whether two specs are of one file."""
    if found is None or known is None or not (found.origin and known.origin):
        return False
    with contextlib.suppress(OSError):
        return os.path.samefile(found.origin, known.origin)
    return found.origin == known.origin
