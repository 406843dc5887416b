"""Check the image from inside: `make image-test`, or python docker/check.py [--quick] [IMAGE].

Once as the image's own user, once as one that the image does not know, with a read-only root file
system, as a Kubernetes cluster might run it; the home also as one of group 0, as OpenShift does.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from common import ROOT, default_image, require_engine, require_image, told

STRANGER = "4242:4242"
OF_GROUP_0 = "4242:0"
READ_ONLY = ("--read-only", "--tmpfs", "/tmp:exec", "--cap-drop", "ALL")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("image", nargs="?", help="default: clusterkit:gpu or clusterkit:cpu")
    parser.add_argument(
        "--quick", action="store_true", help="without DeepSpeed's Adam, and training as one user"
    )
    options = parser.parse_args()
    require_engine()
    image = options.image or default_image()
    require_image(image)
    gpus = ("--gpus", "all") if image.endswith(":gpu") else ()
    checks = (ROOT / "docker" / "image_test.py").read_text("utf-8")
    failed = 0
    for flags, more in (
        ((), ("--light",) if options.quick else ("--slow",)),
        (("--user", STRANGER, *READ_ONLY), ()),
        (("--user", OF_GROUP_0), ("--home",)),
    ):
        print(f"{image} {' '.join(flags)}".rstrip(), flush=True)
        words = ["docker", "run", "--rm", "-i", *gpus, *flags, image, "python", "-", *more]
        failed += subprocess.run(words, input=checks, text=True).returncode
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(told(main))
