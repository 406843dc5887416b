"""What the fork server imports: torch, and what the last run of the program had imported.

Run as text, like `forkserver`. Everything here is a guess at what the program will import anyway. A
program that does not seem to use torch has nothing imported for it. What does not survive a fork
(threads, a GPU, a socket) is left out: the server starts itself again, one level down.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import re
import site
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterable
from typing import Any

Document = dict[str, Any]
LEVELS = ("torch and what the program's last run had imported", "torch", "nothing")
MOST_MODULES, MOST_BYTES = 6000, 1 << 20
_MOST_PROGRAMS = 100  # that are remembered
_LEVEL_SECONDS = 86400.0  # after which a level that failed is tried again
_MOST_FILES = 200  # of the program's own, that are searched for torch
_TORCH = re.compile(
    rb"\b(torch\w*|deepspeed|transformers|accelerate|lightning|pytorch_lightning)\b"
)
_IMPORT = re.compile(rb"^[ \t]*(?:from[ \t]+([\w.]+)|import[ \t]+([\w., \t]+))", re.MULTILINE)
# Every version of a project that is copied to hosts has a folder of its own, named by its digest.
_VERSION = re.compile(r"(?<=/)(projects/[^/]+)/[0-9a-f]{16}(?=/)")
_COMPILER = "torch._dynamo.eval_frame"  # loaded if the real torch._dynamo is


class ImportRecord:
    """The file that keeps what a program imports from one run, and version, to the next."""

    def __init__(self, module: str | None, program: str) -> None:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        parts = [sys.executable, sys.version, module or "", _VERSION.sub(r"\1", program)]
        digest = hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()
        self.path = os.path.join(home, "clusterkit", "imports", f"{digest[:16]}.json")
        self.names: list[str] = []
        self.level = 0  # the first of LEVELS that did not fail lately
        with contextlib.suppress(OSError, AttributeError, ValueError):
            with open(self.path, "rb") as file:
                known = json.loads(file.read(MOST_BYTES))
                age = time.time() - os.fstat(file.fileno()).st_mtime
            self.names = known.get("names", [])
            self.level = known.get("level", 0) if age <= _LEVEL_SECONDS else 0

    def write(self, level: int, names: list[str]) -> None:
        temporary = f"{self.path}.{os.getpid()}"
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            with open(temporary, "w") as file:
                json.dump({"level": level, "names": names}, file)
            os.replace(temporary, self.path)
            others = list(os.scandir(os.path.dirname(self.path)))
            others.sort(key=lambda other: other.stat().st_mtime)
            for other in others[:-_MOST_PROGRAMS]:
                os.unlink(other)


class Preload:
    """Imports for one program.

    Args:
        config: of the server (`forkserver_process`): ``program``, it and its arguments; ``argv``,
            the interpreter and its options; ``source``, the handle of the text that it runs. The
            first of LEVELS that may be tried is the server's argument.
        lazy_dynamo: what that module defines.
    """

    def __init__(self, config: Document, lazy_dynamo: Document) -> None:
        self._config, self._lazy_dynamo = config, lazy_dynamo
        words = config["program"]
        self._module = words[1] if words[0] == "-m" else None
        self._program = os.path.realpath(words[0])
        safe = getattr(sys.flags, "safe_path", sys.flags.isolated)
        self._folder = os.getcwd() if self._module else os.path.dirname(self._program)
        self._first = "" if safe else self._folder
        self.record = ImportRecord(self._module, self._program)
        self.level = max(int(sys.argv[1]), self.record.level)

    def __call__(self) -> None:
        """Import, or start this process anew without what does not survive a fork."""
        modules, handles = set(sys.modules), _handles()
        wanted = self._wanted()
        if wanted:
            self._import(wanted)
            if problem := self._not_forkable(modules, handles):
                text = f"imports ahead of the program brought {problem}"
                os.write(2, f"{text}: without {LEVELS[self.level]}\n".encode())
                self.restart(self.level + 1)
        if self.level > self.record.level:
            self.record.write(self.level, self.record.names)

    def _wanted(self) -> list[str]:
        if self.level > 1:
            return []
        names = [] if self.level else self.record.names
        if "torch" not in self.record.names and not self._seems_to_use_torch():
            return names
        return ["torch", *names]

    def _import(self, names: Iterable[str]) -> None:
        # torch asks the driver's library then, and not the GPU.
        asked = os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        with contextlib.ExitStack() as stack:
            for name in names:
                if name not in sys.modules:
                    with contextlib.suppress(BaseException):
                        importlib.import_module(name)
                compiles = _COMPILER in self.record.names
                if name == "torch" and "torch" in sys.modules and not compiles:
                    with contextlib.suppress(Exception):  # a torch that has no compiler
                        self._lazy_dynamo["defer_dynamo"]()
                        stack.enter_context(self._lazy_dynamo["deferred_compile"]())
        if asked == "1" and "PYTORCH_NVML_BASED_CUDA_CHECK" not in self._config["env"]:
            del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]

    def _not_forkable(self, modules: set[str], handles: set[str]) -> str | None:
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
        names = {name.partition(".")[0] for name in sys.modules.keys() - modules}
        own = sorted(name for name in names if self._first and _module_file(self._first, name))
        return f"a {own[0]} of the program's own folder" if own else None

    def restart(self, level: int, *more: str) -> None:
        """Execute this process anew, with nothing imported."""
        config = self._config
        for handle in (config["channel"], config["source"]):
            os.set_inheritable(handle, True)
        argv = [*config["argv"], "-c", config["text"], str(level), *more]
        os.execvpe(argv[0], argv, config["env"])

    def _seems_to_use_torch(self) -> bool:
        """Return whether the program, or a module beside it that it imports, names torch."""
        if self._module and _TORCH.search(self._module.encode()):
            return True
        more = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        path = [self._folder, *(folder for folder in more if folder)]

        def find(name: str) -> str:
            return next(filter(None, (_module_file(folder, name) for folder in path)), "")

        files = [find(self._module) if self._module else self._program]
        for file in files:  # grows
            try:
                with open(file, "rb") as opened:
                    text = opened.read(MOST_BYTES)
            except OSError:
                continue
            if _TORCH.search(text):
                return True
            for match in _IMPORT.finditer(text):
                imported = (match[1] or match[2]).decode().split(",")
                names = [words[0] for each in imported if (words := each.split())]
                new = dict.fromkeys(found for name in names if (found := find(name)))
                files += [found for found in new if found not in files]
            del files[_MOST_FILES:]
        return False

    def save(self, code: int) -> None:
        """Record what is imported now, for the program's next run; ``code``: its exit code."""
        packages, known = site_folders(), self.record.names
        names = [
            name
            for name, module in list(sys.modules.items())
            if getattr(getattr(module, "__spec__", None), "name", None) == name
            and (getattr(module, "__file__", None) or "").startswith(packages)
        ]
        if code:  # it may not have come to its imports
            names += [name for name in known if name not in names]
        names = names[:MOST_MODULES]
        if set(names) != set(known):
            self.record.write(self.level, names)


def _module_file(folder: str, name: str) -> str | None:
    base = os.path.join(folder, *name.split("."))
    paths = (f"{base}.py", f"{base}/__init__.py", f"{base}/__main__.py")
    return next((path for path in paths if os.path.isfile(path)), None)


def site_folders() -> tuple[str, ...]:
    """Return where packages are installed, each folder with a slash at its end."""
    found = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    with contextlib.suppress(Exception):
        found |= {*site.getsitepackages(), site.getusersitepackages()}
    return tuple(f"{folder}/" for folder in found if folder)


def _handles() -> set[str]:
    """Return what this process has open besides files."""
    found = set()
    for handle in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{handle}")
            if path.startswith("/dev/") or not path.startswith("/"):
                found.add(path)
    return found
