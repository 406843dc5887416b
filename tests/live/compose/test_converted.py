"""A compose file on a real engine, side by side: by docker compose, and as the converted job."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.compose.engine import Engine
from tests.live.converted import converted, project, same, told

pytestmark = [pytest.mark.live, pytest.mark.thorough, pytest.mark.timeout(900)]

FILE = """\
services:
  node0: &node
    image: IMAGE
    working_dir: /workspace
    volumes: [".:/workspace"]
    environment:
      GIVEN: a b
    command: >-
      torchrun --nnodes=2 --nproc-per-node=2 --node-rank=0 --master-addr=node0 --master-port=29500
      told.py GIVEN
    networks: [net]
  node1:
    <<: *node
    command: >-
      torchrun --nnodes=2 --nproc-per-node=2 --node-rank=1 --master-addr=node0 --master-port=29500
      told.py GIVEN
networks:
  net:
"""


@pytest.fixture
def readable() -> Iterator[Path]:
    """A folder that everybody may read."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_a_compose_file(
    engine: Engine, image: str, readable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not below pytest's own folder, into which the image's user may not look.
    folder = project(readable / "project")
    monkeypatch.chdir(folder)
    for name, value in engine.env.items():
        monkeypatch.setenv(name, value)
    file = folder / "compose.yaml"
    file.write_text(FILE.replace("IMAGE", image))
    compose = ("compose", "-f", str(file))
    try:
        engine.run(*compose, "up", "--no-color", timeout=300)
        said = engine.run(*compose, "logs", "--no-log-prefix", "--no-color").stdout
    finally:
        engine.run(*compose, "down", "--timeout", "1")
    same(told(said.splitlines()), converted(file)[1], 4)
