"""The Python of the ranks: interpreter, packages, and what compiles DeepSpeed's operations."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
import time
from typing import Any

from clusterkit.doctor.hosts.collect import run, text_of
from clusterkit.hosts.host_probe import versions


def python(context: dict[str, Any]) -> dict[str, Any]:
    return {"version": list(sys.version_info[:3]), "bits": 64 if sys.maxsize > 2**32 else 32}


def packages(context: dict[str, Any]) -> dict[str, Any]:
    modules = ["torch", "deepspeed", "transformers", "numpy"]
    wanted = [*modules, "cuda-toolkit"]
    for cuda in ("", "-cu11", "-cu12", "-cu13"):
        wanted += [f"nvidia-nccl{cuda}", f"nvidia-cuda-runtime{cuda}"]
    found = versions(wanted)
    gone = [name for name in found if name in modules and not _importable(name)]
    return {"versions": found, "gone": gone}


def _importable(name: str) -> bool:
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    # A folder without the package's own files has no origin.
    return found is not None and found.origin is not None


def compiler(context: dict[str, Any]) -> dict[str, Any]:
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    names = [os.environ.get("CXX", "").split(" ")[0], "c++", "g++"]
    found = next((each for name in names if name and (each := shutil.which(name))), None)
    # As torch and DeepSpeed do (torch/utils/cpp_extension.py, _find_cuda_home).
    home = context["cuda_home"] or os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if not home:
        on_path = shutil.which("nvcc")
        home = os.path.dirname(os.path.dirname(on_path)) if on_path else "/usr/local/cuda"
    nvcc = shutil.which(os.path.join(home, "bin", "nvcc"))
    said = run(nvcc, "--version") if nvcc else None
    release = re.search(r"release ([0-9]+\.[0-9]+)", said["stdout"]) if said else None
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.expanduser("~/.cache/torch_extensions")
    locks = []
    for pattern in ("*/lock", "*/*/lock"):
        for lock in glob.glob(os.path.join(glob.escape(root), pattern)):
            try:
                locks.append({"path": lock, "age": time.time() - os.stat(lock).st_mtime})
            except OSError:
                continue
    running = {text_of(name).strip() for name in glob.glob("/proc/[0-9]*/comm")}
    headers = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    return {
        "compiler": found,
        "ninja": shutil.which("ninja", path=path),
        "nvcc": nvcc,
        "release": release[1] if release else "",
        "headers": os.path.exists(headers),
        "locks": locks,
        "building": not running.isdisjoint({"ninja", "cc1plus", "nvcc"}),
    }
