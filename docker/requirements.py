"""Print what clusterkit[train] needs, without clusterkit: the image's slow layer.

pip can install a package's dependencies only together with the package, and then every edit of
clusterkit would install torch anew. So they are read from pyproject.toml, the one place that has
them; constraints.txt has their versions.

    python docker/requirements.py [EXTRA ...]
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def requirements(project: dict, extras: list[str]) -> list[str]:
    """The dependencies of the project with these extras, extras within extras resolved."""
    pending = [*project["dependencies"]]
    for extra in extras:
        pending += project["optional-dependencies"][extra]
    found: dict[str, None] = {}
    itself = re.compile(rf"{re.escape(project['name'])}\[([\w,\s-]+)\]$")
    while pending:
        line = pending.pop(0)
        if match := itself.match(line.strip()):
            for extra in match[1].split(","):
                pending += project["optional-dependencies"][extra.strip()]
        else:
            found[line] = None
    # setuptools builds clusterkit itself in the image, where there may be no index to get it from.
    return sorted(found)


def main() -> None:
    root = Path(__file__).resolve().parent
    file = next(p for p in (root / "pyproject.toml", root.parent / "pyproject.toml") if p.exists())
    document = tomllib.loads(file.read_text("utf-8"))
    lines = requirements(document["project"], sys.argv[1:] or ["train"])
    print("\n".join(sorted({*lines, *document["build-system"]["requires"]})))


if __name__ == "__main__":
    main()
