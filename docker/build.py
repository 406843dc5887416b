"""Build the training image: `make image`, or python docker/build.py [--base IMAGE] [--tag NAME].

From a small Debian with Python. With GPUs here it is clusterkit:gpu, with torch's CUDA and the
compiler of its release; without, clusterkit:cpu, and torch without CUDA. Either is called by its
version as well, as the manifests in k8s/ name it: clusterkit:0.1.0-gpu.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time

from common import ROOT, Problem, default_image, docker, require_engine, told

ENGINE_BASE = "clusterkit-base:bookworm"  # what `make engine` imports where no registry is
CPU_TORCH = "https://download.pytorch.org/whl/cpu"
UNREACHABLE = re.compile(
    r"no such host|failed to (?:do request|resolve)|pull access denied|manifest unknown"
    r"|not found: manifest|i/o timeout|TLS handshake"
)


def arguments(base: str | None, tag: str) -> list[str]:
    """The words after `docker build`, without the context."""
    values = {
        "VERSION": _version(),
        "REVISION": _git("describe", "--always", "--dirty", "--abbrev=40") or "unknown",
        "SOURCE": _git("remote", "get-url", "origin") or "unknown",
    }
    if not tag.endswith(":gpu"):
        values["TORCH_INDEX"] = CPU_TORCH
    if base:
        values["BASE_IMAGE"] = base
    words = ["--file", str(ROOT / "docker" / "Dockerfile"), "--tag", tag, "--progress", "plain"]
    if tag in ("clusterkit:gpu", "clusterkit:cpu"):
        words += ["--tag", tag.replace(":", f":{values['VERSION']}-")]
    for name, value in values.items():
        words += ["--build-arg", f"{name}={value}"]
    return words


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", help="base image; any Debian or Ubuntu with Python 3.11 or newer")
    parser.add_argument("--tag", help="its name (default: clusterkit:gpu or clusterkit:cpu)")
    parser.add_argument("--cache-from", metavar="IMAGE", help="take layers of one so built before")
    options = parser.parse_args()
    require_engine(builder=True)
    tag = options.tag or default_image()
    base = options.base
    if not base and docker("images", "--quiet", ENGINE_BASE).strip():
        base = ENGINE_BASE
    words = arguments(base or None, tag)
    if options.cache_from:
        words += ["--build-arg", "BUILDKIT_INLINE_CACHE=1"]
        if docker("images", "--quiet", options.cache_from).strip():  # else a registry is asked
            words += ["--cache-from", options.cache_from]
    began = time.monotonic()
    # Older clients have BuildKit, but use it only if told to.
    build = subprocess.Popen(
        ["docker", "build", *words, str(ROOT)],
        env=os.environ | {"DOCKER_BUILDKIT": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = []
    assert build.stdout is not None
    for line in build.stdout:
        sys.stderr.write(line)
        said.append(line)
    if build.wait() != 0:
        raise _problem("".join(said[-40:]), words)
    size = int(docker("image", "inspect", "--format", "{{.Size}}", tag))
    seconds = time.monotonic() - began
    print(f"{tag}  {size / 1e9:.2f} GB, built in {seconds:.0f} s")
    return 0


def _problem(said: str, words: list[str]) -> Problem:
    base = next(
        (w.partition("=")[2] for w in words if w.startswith("BASE_IMAGE=")), "of Dockerfile"
    )
    if re.search(r"load metadata|FROM", said) and UNREACHABLE.search(said):
        return Problem(
            f"the base image {base} is not found locally or in its registry",
            "docker pull it first, or give another: make image BASE=IMAGE; without a registry, on "
            "Debian as root: make engine",
        )
    if "No space left on device" in said or "no space left on device" in said:
        return Problem("the engine's disk is full", "docker system prune")
    return Problem("the build failed; its own words are above", "docs/containers.md, When it fails")


def _version() -> str:
    text = (ROOT / "clusterkit" / "__init__.py").read_text("utf-8")
    found = re.search(r'^__version__ = "(.+)"', text, re.MULTILINE)
    return found[1] if found else "unknown"


def _git(*words: str) -> str:
    """What git says; nothing outside a checkout, or without git."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(told(main))
