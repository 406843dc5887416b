"""What the fork server imports: torch, and what the last run of the program had imported.

Run as text, like `forkserver`. Everything here is a guess at what the program will import anyway. A
program that does not seem to use torch has nothing imported for it. What does not bear a fork
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
_LEVEL_SECONDS = 86400.0  # after which what did not bear a fork is tried again
_MOST_FILES = 200  # of the program's own, that are looked at for torch
_TORCH = re.compile(
    rb"\b(torch\w*|deepspeed|transformers|accelerate|lightning|pytorch_lightning)\b"
)
_IMPORT = re.compile(rb"^[ \t]*(?:from[ \t]+([\w.]+)|import[ \t]+([\w., \t]+))", re.MULTILINE)
# Of a project that is copied to hosts every version has a folder of its own, named by its digest.
_VERSION = re.compile(r"(?<=/)(projects/[^/]+)/[0-9a-f]{16}(?=/)")
_COMPILER = "torch._dynamo.eval_frame"  # there once the real torch._dynamo is


class Preload:
    """Imports for one program.

    Args:
        config: of the server (`fork`): ``words``, the program and its arguments; ``argv``, the
            interpreter and its options; ``source``, the handle of the text that it runs. The
            first of LEVELS that may be tried is the server's argument.
        eager: what that module defines.
    """

    def __init__(self, config: Document, eager: Document) -> None:
        self._config, self._eager = config, eager
        words = config["words"]
        self._module = words[1] if words[0] == "-m" else None
        self._program = os.path.realpath(words[0])
        safe = getattr(sys.flags, "safe_path", sys.flags.isolated)
        self._folder = os.getcwd() if self._module else os.path.dirname(self._program)
        self._first = "" if safe else self._folder
        self.memory = self._memory()
        known = self._known()
        self._recorded: list[str] = known.get("names", [])
        self.level = max(int(sys.argv[1]), known.get("level", 0))
        self._known_level = known.get("level", 0)

    def __call__(self) -> None:
        """Import what is wanted."""
        modules, handles = set(sys.modules), _handles()
        wanted = self._wanted()
        if wanted:
            self._import(wanted)
            if why := self._unfit(modules, handles):
                said = f"imports ahead of the program brought {why}: without {LEVELS[self.level]}\n"
                os.write(2, said.encode())
                self.again(self.level + 1)
        if self.level > self._known_level:
            self._write({"level": self.level, "names": self._recorded})

    def _wanted(self) -> list[str]:
        if self.level > 1:
            return []
        if "torch" not in self._recorded and not self._seems_to_use_torch():
            return [] if self.level else self._recorded
        return ["torch", *([] if self.level else self._recorded)]

    def _import(self, names: Iterable[str]) -> None:
        # torch asks the driver's library then, and not the GPU.
        asked = os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        with contextlib.ExitStack() as stack:
            for name in names:
                if name not in sys.modules:
                    with contextlib.suppress(BaseException):
                        importlib.import_module(name)
                if name == "torch" and "torch" in sys.modules and _COMPILER not in self._recorded:
                    with contextlib.suppress(Exception):  # a torch that has no compiler
                        self._eager["defer_dynamo"]()
                        stack.enter_context(self._eager["deferred_compile"]())
        if asked == "1" and "PYTORCH_NVML_BASED_CUDA_CHECK" not in self._config["env"]:
            del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]

    def _unfit(self, before: set[str], handles: set[str]) -> str | None:
        """Why this process must not be forked, if it must not."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if (pid := os.fork()) == 0:
                os._exit(0)
        os.waitpid(pid, 0)
        # Whoever minds forks (OpenBLAS) has ended its threads for that one.
        threads = len(os.listdir("/proc/self/task")) - 1
        if threads:
            return f"{threads} thread{'s' if threads > 1 else ''}"
        if opened := sorted(_handles() - handles):
            return opened[0]
        names = {name.partition(".")[0] for name in sys.modules.keys() - before}
        if self._first and (own := sorted(filter(self._is_own, names))):
            return f"a {own[0]} of the program's own folder"
        return None

    def _is_own(self, name: str) -> bool:
        """Whether the program would find a module of this name beside itself."""
        return _module_file(self._first, name) is not None

    def again(self, level: int, *more: str) -> None:
        """Be the same process with nothing imported."""
        config = self._config
        for handle in (config["channel"], config["source"]):
            os.set_inheritable(handle, True)
        argv = [*config["argv"], "-c", config["text"], str(level), *more]
        os.execvpe(argv[0], argv, config["env"])

    # -- what is known of the program

    def _seems_to_use_torch(self) -> bool:
        """Whether it, or a module beside it that it imports, names torch."""
        if self._module and _TORCH.search(self._module.encode()):
            return True
        more = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        path = [self._folder, *(folder for folder in more if folder)]
        names = [self._module] if self._module else []
        files = [] if self._module else [self._program]
        seen: set[str] = set()
        while (files or names) and len(seen) < _MOST_FILES:
            if names:
                file = next(filter(None, (_module_file(each, names[-1]) for each in path)), "")
                names.pop()
            else:
                file = files.pop()
            if not file or file in seen:
                continue
            seen.add(file)
            try:
                with open(file, "rb") as opened:
                    text = opened.read(MOST_BYTES)
            except OSError:
                continue
            if _TORCH.search(text):
                return True
            for match in _IMPORT.finditer(text):
                found = (match[1] or match[2]).decode().split(",")
                names += [words[0] for each in found if (words := each.split())]
        return False

    def _memory(self) -> str:
        """The file that keeps what the program imports from one run, and version, to the next."""
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        program = _VERSION.sub(r"\1", self._program)
        what = [sys.executable, sys.version, self._module or "", program]
        digest = hashlib.sha256("\0".join(what).encode(errors="surrogateescape")).hexdigest()
        return os.path.join(home, "clusterkit", "imports", f"{digest[:16]}.json")

    def _known(self) -> Document:
        with contextlib.suppress(OSError, TypeError, ValueError), open(self.memory, "rb") as file:
            known = json.loads(file.read(MOST_BYTES))
            old = time.time() - os.fstat(file.fileno()).st_mtime > _LEVEL_SECONDS
            return {**known, "level": 0} if old else dict(known)
        return {}

    def record(self, code: int) -> None:
        """Keep what is imported now, for the program's next run."""
        packages = site_folders()
        names = [
            name
            for name, module in list(sys.modules.items())
            if getattr(getattr(module, "__spec__", None), "name", None) == name
            and (getattr(module, "__file__", None) or "").startswith(packages)
        ]
        if code:  # it may not have come to its imports
            names += [name for name in self._recorded if name not in names]
        names = names[:MOST_MODULES]
        if set(names) != set(self._recorded):
            self._write({"level": self.level, "names": names})

    def _write(self, document: Document) -> None:
        temporary = f"{self.memory}.{os.getpid()}"
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(self.memory), exist_ok=True)
            with open(temporary, "w") as file:
                json.dump(document, file)
            os.replace(temporary, self.memory)
            others = list(os.scandir(os.path.dirname(self.memory)))
            others.sort(key=lambda other: other.stat().st_mtime)
            for other in others[:-_MOST_PROGRAMS]:
                os.unlink(other)


def _module_file(folder: str, name: str) -> str | None:
    base = os.path.join(folder, *name.split("."))
    places = (f"{base}.py", f"{base}/__init__.py", f"{base}/__main__.py")
    return next((place for place in places if os.path.isfile(place)), None)


def site_folders() -> tuple[str, ...]:
    """Where packages are installed, each with a slash behind it."""
    found = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    with contextlib.suppress(Exception):
        found |= {*site.getsitepackages(), site.getusersitepackages()}
    return tuple(f"{folder}/" for folder in found if folder)


def _handles() -> set[str]:
    """What this process has open besides files."""
    found = set()
    for handle in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            place = os.readlink(f"/proc/self/fd/{handle}")
            if place.startswith("/dev/") or not place.startswith("/"):
                found.add(f"{place}")
    return found
