"""What the fork server imports before the program runs: torch, where that cannot be told apart.

Run as text, like `forkserver`. A program that could change what the imports do has nothing imported
for it (`static_look`); every run decides anew. What does not survive a fork (threads, a GPU, a
socket) is found afterwards: the server starts itself again, and imports nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

Document = dict[str, Any]
_AUTOMATIC = ("torch", "torch._dynamo")
"""The first optimizer or DistributedDataParallel of a program imports torch._dynamo."""


class Preload:
    """Imports for one program.

    Args:
        config: of the server (`forkserver_process`): ``program``, it and its arguments; ``argv``,
            the interpreter and its options; ``source``, the handle of the text that it runs;
            ``preload``, the job's own list; ``foreign``, a module that has the name of one of
            Python's own. The server's argument is 0, or 1 to import nothing.
        spaces: what the modules define.
    """

    def __init__(self, config: Document, spaces: Document) -> None:
        self._config, self._spaces = config, spaces
        words = config["program"]
        self._module = words[1] if words[0] == "-m" else None
        self._program = os.path.realpath(words[0])
        safe = getattr(sys.flags, "safe_path", sys.flags.isolated)
        folder = self._program if os.path.isdir(self._program) else os.path.dirname(self._program)
        self._first = None if safe else os.getcwd() if self._module else folder
        self.groups: list[tuple[str, list[str], dict[str, str]]] = []
        """Each name that was imported, with the modules that its import brought, and the variables
        that it set."""

    def __call__(self) -> None:
        """Import, or start this process anew without what does not survive a fork."""
        if sys.argv[1] != "0":
            return
        handles, began = _handles(), time.time()
        names, why = self._chosen()
        for name in names:
            known, before = set(sys.modules), dict(os.environ)
            if (error := self._import(name)) and self._config["preload"]:
                why += f"{'; ' if why else ''}{name}: {error}"
            variables = {key: value for key, value in os.environ.items() if key not in before}
            if new := [each for each in list(sys.modules) if each not in known]:
                self.groups.append((name, new, variables))
        if self.groups:
            _close_nvml()
            _remove_empty_cache(began)
        if self.groups and (problem := self._not_forkable(handles)):
            _note(f"preload: the imports left {problem}; starting again without preloading")
            self._restart()
        done = ", ".join(name for name, *_ in self.groups)
        if done or why:
            _note(f"preloaded: {done or 'nothing'}{f'; {why}' if why else ''}")

    def _chosen(self) -> tuple[Sequence[str], str]:
        """Return what to import, and why no more."""
        own = self._config["preload"]
        foreign = self._config["foreign"] and f"{self._config['foreign']}, not Python's own"
        if own is not None:
            return (() if foreign else own), "" if own and not foreign else foreign or "preload: []"
        cached = dict(sys.path_importer_cache)
        found = self._spaces["static_look"]["look"](
            self._program, self._module, self._first, self._spaces["influences"]["Influences"],
            self._spaces["module_files"],
        )  # fmt: skip
        sys.path_importer_cache.clear()
        sys.path_importer_cache.update(cached)
        if not found.uses_torch:
            return (), ""
        if found.torch or foreign:
            return (), found.torch or foreign
        if found.dynamo:
            return _AUTOMATIC[:-1], f"not torch._dynamo: {found.dynamo}"
        return _AUTOMATIC, ""

    def _import(self, name: str) -> str | None:
        """Import a module; return why that failed."""
        # torch asks the driver's library then, and not the GPU.
        variable = "PYTORCH_NVML_BASED_CUDA_CHECK"
        ours = name in _AUTOMATIC and os.environ.setdefault(variable, "1") and (
            variable not in self._config["env"]
        )  # fmt: skip
        try:
            importlib.import_module(name)
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        finally:
            if ours:
                os.environ.pop(variable, None)
        return None

    def _not_forkable(self, handles: set[str]) -> str | None:
        """Return what imports have brought that a fork would break; None: nothing."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if (pid := os.fork()) == 0:
                os._exit(0)
        os.waitpid(pid, 0)
        # A library that handles forks (OpenBLAS) has ended its threads for that one.
        threads = len(os.listdir("/proc/self/task")) - 1
        if threads:
            return f"{threads} thread{'s' if threads > 1 else ''}"
        if opened := sorted(_handles() - handles):
            return opened[0]
        # Without us these imports would have found the program's own files.
        own = self._spaces["module_files"]["shadowed"](
            sys.modules.keys() - self._config["modules"],
            sys.path if self._first is None else [self._first, *sys.path],
        )
        return f"{own[0]}, and the program has a module of that name" if own else None

    def _restart(self) -> None:
        """Execute this process anew, to import nothing."""
        config = self._config
        for handle in (config["channel"], config["source"]):
            os.set_inheritable(handle, True)
        argv = [*config["argv"], "-c", config["text"], "1"]
        os.execvpe(argv[0], argv, config["env"])


def _close_nvml() -> None:
    """Take back what torch has opened of NVML, and never closes: the GPUs' devices, which DeepSpeed
    has it look at when it is imported. NVML counts; where pynvml has opened it too, it stays."""
    users = getattr(sys.modules.get("pynvml"), "_nvmlLib_refcount", None)
    if "ctypes" not in sys.modules or users:
        return
    with contextlib.suppress(OSError):  # it is not loaded
        library = sys.modules["ctypes"].CDLL("libnvidia-ml.so.1", mode=os.RTLD_NOLOAD)
        for _ in range(64):
            if library.nvmlShutdown() != 0:
                break


def _remove_empty_cache(began: float) -> None:
    """Remove the folder that torch._dynamo's import makes in TMPDIR, and made anew since a time; a
    compilation makes it again."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    with contextlib.suppress(OSError):  # it is not there, or not empty
        if os.stat(folder).st_ctime >= began - 1.0:
            os.rmdir(folder)


def _note(text: str) -> None:
    os.write(2, f"{text}\n".encode(errors="replace"))


def _handles() -> set[str]:
    """Return what this process has open besides files."""
    found = set()
    for handle in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{handle}")
            if path.startswith("/dev/") or not path.startswith("/"):
                found.add(path)
    return found
