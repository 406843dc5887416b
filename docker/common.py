"""What the scripts of this folder share: the engine, and errors of one sentence and its remedy.

The standard library alone: these scripts run before there is a .venv.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UNAVAILABLE = 3


class Problem(Exception):
    """Something that the user can mend; printed as ``error:`` and ``hint:``."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def told(main: Callable[[], int]) -> int:
    """Run ``main``; a Problem becomes two lines on stderr and exit code 3."""
    try:
        return main()
    except Problem as problem:
        print(f"error: {problem}\nhint: {problem.hint}", file=sys.stderr)
        return UNAVAILABLE
    except KeyboardInterrupt:
        return 130


def docker(*words: str, check: bool = True, stdin: str | None = None) -> str:
    """Run the docker client and give what it printed.

    Raises:
        Problem: it failed; its own last line is the message.
    """
    done = subprocess.run(["docker", *words], input=stdin, capture_output=True, text=True)
    if check and done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise Problem(f"docker {words[0]}: {lines[-1]}", "docker info")
    return done.stdout


def require_engine(*, compose: bool = False, builder: bool = False) -> None:
    """Check that an engine answers, and that the client's plugins are there.

    Raises:
        Problem: naming what is missing.
    """
    if shutil.which("docker") is None:
        raise Problem(
            "docker is not installed",
            "https://docs.docker.com/engine/install; on Debian as root: make engine",
        )
    asked = ["docker", "version", "--format", "{{json .}}"]
    done = subprocess.run(asked, capture_output=True, text=True)
    if done.returncode != 0:
        said = done.stderr.strip()
        if "permission denied" in said.lower():
            raise Problem(
                "you may not use the docker engine's socket",
                "sudo usermod -aG docker $USER, then log in again",
            )
        raise Problem(
            f"no docker engine answers: {said.splitlines()[-1] if said else 'no reason given'}",
            "systemctl start docker; on Debian without systemd, as root: make engine",
        )
    client = json.loads(done.stdout)["Client"]["Version"]
    if builder and int(client.split(".")[0]) >= 23 and not _has_plugin("buildx"):
        raise Problem(
            f"docker {client} cannot build images without its buildx plugin",
            "apt-get install docker-buildx-plugin (docker-buildx on Debian)",
        )
    if compose and not _has_plugin("compose"):
        raise Problem(
            "the docker client has no compose plugin",
            "apt-get install docker-compose-plugin (docker-compose on Debian 13)",
        )


def _has_plugin(name: str) -> bool:
    return subprocess.run(["docker", name, "version"], capture_output=True).returncode == 0


def has_gpus() -> bool:
    """Whether the engine can give GPUs to containers, or this machine has some."""
    runtimes = docker("info", "--format", "{{json .Runtimes}}", check=False)
    if "nvidia" in runtimes:
        return True
    smi = shutil.which("nvidia-smi")
    return smi is not None and subprocess.run([smi, "-L"], capture_output=True).returncode == 0


def default_image() -> str:
    """The image that `make image` makes here."""
    return "clusterkit:gpu" if has_gpus() else "clusterkit:cpu"


def require_image(image: str) -> None:
    """Raises Problem: the engine does not have it."""
    if not docker("images", "--quiet", image, check=False).strip():
        raise Problem(f"the engine has no image {image}", "make image")
