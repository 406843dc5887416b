"""Make .venv-gpu, with torch's build for CUDA: python -m tests.live.gpu.environment

It takes 5.3 GB and some minutes. Where there is no room for it, or no index that has that build of
torch's pinned version, the reason is left for the tests, which are skipped with it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / ".venv-gpu"
PYTHON = FOLDER / "bin" / "python"
REASON = ROOT / ".make" / "no-venv-gpu"
ROOM = 12 << 30
"""Bytes: the wheels are there twice for a moment."""


class Unavailable(Exception):
    """Why there is no such environment."""


def main() -> int:
    REASON.parent.mkdir(exist_ok=True)
    REASON.unlink(missing_ok=True)
    try:
        make()
    except Unavailable as problem:
        shutil.rmtree(FOLDER, ignore_errors=True)
        REASON.write_text(str(problem))
        print(f"gpu-check: {problem}", file=sys.stderr)
    return 0


def make() -> None:
    made = FOLDER / ".made"
    pinned = [ROOT / "pyproject.toml", ROOT / "constraints.txt"]
    if made.exists() and all(made.stat().st_mtime > file.stat().st_mtime for file in pinned):
        return
    there = sum(f.stat().st_blocks * 512 for f in FOLDER.rglob("*") if not f.is_symlink())
    free = shutil.disk_usage(ROOT).free + there
    if free < ROOM:
        raise Unavailable(f"{ROOM >> 30} GB of disk are needed, {free / 2**30:.1f} are free")
    print("making .venv-gpu (torch for CUDA): 5.3 GB, some minutes the first time", file=sys.stderr)
    if not PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", FOLDER], check=True)
    env = next((env for env in environments() if has_cuda(env)), None)
    if env is None:
        raise Unavailable("no index of pip's has the build for CUDA of torch's pinned version")
    pip(env, "torch")
    pip(env, "--editable", f"{ROOT}[train,ssh,kubernetes]")
    made.touch()


def environments() -> Iterator[Mapping[str, str]]:
    """Yield pip as it is set up here, and without that: it may name a folder of wheels for CPUs."""
    yield os.environ
    asked = [PYTHON, "-m", "pip", "config", "get", "global.cert"]
    cert = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    own = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    yield own | {"PIP_CONFIG_FILE": os.devnull} | ({"PIP_CERT": cert} if cert else {})


def has_cuda(env: Mapping[str, str]) -> bool:
    """Return whether pip would take a torch that brings CUDA."""
    words = ["--quiet", "--dry-run", "--ignore-installed", "--no-deps", "--report", "-", "torch"]
    done = subprocess.run([*INSTALL, *words], env=env, capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr, end="")
        return False
    (torch,) = json.loads(done.stdout)["install"]
    return any(
        line.startswith(("cuda-", "nvidia-")) for line in torch["metadata"].get("requires_dist", [])
    )


INSTALL = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check"]
INSTALL += ["--constraint", "constraints.txt"]


def pip(env: Mapping[str, str], *words: str) -> None:
    done = subprocess.run([*INSTALL, "--quiet", *words], env=env, stderr=subprocess.PIPE, cwd=ROOT)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise Unavailable(f"pip install {' '.join(words)}: {said[-1]}")


if __name__ == "__main__":
    sys.exit(main())
