"""Check the image from inside: `make image-test`, or python docker/check.py [--quick] [IMAGE].

With the restrictions of docker/compose.yaml: as the image's own user, and as one that the image
does not know, as in Kubernetes; the home also as one of group 0, as OpenShift does.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from common import ROOT, default_image, docker, has_gpus, require_engine, require_image, told

STRANGER = "4242:4242"
OF_GROUP_0 = "4242:0"


def restrictions() -> list[str]:
    """Return what docker/compose.yaml keeps its nodes from, as flags of ``docker run``."""
    file = str(ROOT / "docker" / "compose.yaml")
    text = docker("compose", "--file", file, "config", "--format", "json")
    node = json.loads(text)["services"]["node0"]
    flags = ["--read-only"] if node["read_only"] else []
    for key in ("tmpfs", "cap_drop", "security_opt"):
        for value in node[key]:
            flags += [f"--{key.replace('_', '-')}", value]
    return flags


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("image", nargs="?", help="default: clusterkit:gpu or clusterkit:cpu")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="without torch.compile and DeepSpeed's Adam, and training as one user",
    )
    options = parser.parse_args()
    require_engine(compose=True)
    image = options.image or default_image()
    require_image(image)
    for_gpus = image.endswith((":gpu", "-gpu"))
    gpus = ("--gpus", "all") if for_gpus and has_gpus() else ()
    kind = ("--cuda",) if for_gpus else ()
    checks = (ROOT / "docker" / "image_test.py").read_text("utf-8")
    failed, shipped = 0, restrictions()
    for flags, limits, more in (
        ((), shipped, ("--light",) if options.quick else ("--slow",)),
        (("--user", STRANGER), shipped, ()),
        (("--user", OF_GROUP_0), [], ("--home",)),
    ):
        print(f"{image} {' '.join(flags)}".rstrip(), flush=True)
        words = ["docker", "run", "--rm", "-i", *gpus, *flags, *limits, image]
        words += ["python", "-", *more, *kind]
        failed += subprocess.run(words, input=checks, text=True).returncode
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(told(main))
