"""Where the source of a module lies, without importing it. Run as text, like `forkserver`."""

from __future__ import annotations

import importlib.machinery
import itertools
import os
import sys
from collections.abc import Iterable, Iterator

_SUFFIXES = (".py", ".pyc", *importlib.machinery.EXTENSION_SUFFIXES)


def locate(name: str, folders: Iterable[str]) -> tuple[str, list[str]] | None:
    """Return a module's file, "" for a package that has none, and a package's folders."""
    parts: list[str] = []
    for folder in folders:
        base = os.path.join(folder or os.getcwd(), name)
        for suffix in _SUFFIXES:
            if os.path.isfile(file := f"{base}/__init__{suffix}"):
                return file, [base]
        for suffix in _SUFFIXES:
            if os.path.isfile(file := f"{base}{suffix}"):
                return file, []
        if os.path.isdir(base):
            parts.append(base)
    return ("", parts) if parts else None


def by_finders(name: str) -> tuple[str, list[str]] | None:
    """Ask the finders of packages that are installed from where they are developed."""
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, None)
        except Exception:
            continue
        if spec is not None:
            file = spec.origin if spec.has_location and spec.origin else ""
            return file, list(spec.submodule_search_locations or [])
    return None


def is_of_python(file: str) -> bool:
    """Return whether a module is one of Python's own."""
    # Not by sysconfig, which imports a module of its own whose name a program may have taken.
    version = "python{}.{}".format(*sys.version_info)
    folders = (os.path.dirname(os.__file__), f"{sys.base_exec_prefix}/{sys.platlibdir}/{version}")
    return file.startswith(tuple(f"{folder}/" for folder in folders)) and not is_installed(file)


def is_installed(file: str) -> bool:
    return "/site-packages/" in file or "/dist-packages/" in file


def files_of(name: str, path: Iterable[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield what an import of this module runs: name, file and folders, packages first.

    It ends where there is no such module. A file is "" where a package has none, or Python itself
    holds the module.
    """
    folders = path
    parts = name.split(".")
    for number, part in enumerate(parts):
        full = ".".join(parts[: number + 1])
        if full in sys.builtin_module_names:
            found: tuple[str, list[str]] | None = ("", [])
        else:
            found = locate(part, folders) or (None if number else by_finders(part))
        if found is None:
            return
        yield full, *found
        folders = found[1]


def shadowed(names: Iterable[str], path: Iterable[str]) -> list[str]:
    """Return those modules in ``sys.modules`` that ``path`` has another file for, before Python's
    own folder: a program that imports one of them gets that file."""
    library, cached = os.path.dirname(os.__file__), dict(sys.path_importer_cache)
    folders = list(itertools.takewhile(lambda folder: folder != library, path))
    names, tops = list(names), set()
    for top in {name.partition(".")[0] for name in names} - set(sys.builtin_module_names):
        spec = importlib.machinery.PathFinder.find_spec(top, folders)
        if spec and spec.loader and spec.origin != getattr(sys.modules.get(top), "__file__", None):
            tops.add(top)
    sys.path_importer_cache.clear()
    sys.path_importer_cache.update(cached)
    return sorted(name for name in names if name.partition(".")[0] in tops)
