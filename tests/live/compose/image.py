"""A docker engine and the image for tests; both made once a session, on the spot if need be.

tests/live/conftest.py has these fixtures, and so all live tests share one engine and one build. In
two conftests they would be two: the second would wait for the first's engine to end, for ever.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.compose import engine as engines
from tests.live.compose.engine import Engine, NoEngine

ROOT = Path(__file__).parents[3]
IMAGE = "clusterkit:cpu"


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """The engine that answers, else a private one; skipped by name where there can be none."""
    stack = contextlib.ExitStack()
    try:
        found = stack.enter_context(engines.engine())
    except NoEngine as problem:
        pytest.skip(str(problem))
    with stack:
        yield found


@pytest.fixture(scope="session")
def base(engine: Engine) -> str:
    """A base image that the engine has."""
    try:
        return engines.base_image(engine)
    except NoEngine as problem:
        pytest.skip(str(problem))


@pytest.fixture(scope="session")
def image(engine: Engine, base: str) -> str:
    """The training image of this checkout, built as `make image` builds it."""
    made = subprocess.run(["make", "wheelhouse"], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-3000:]
    build(engine, base)
    return IMAGE


def build(engine: Engine, base: str, root: Path = ROOT, tag: str = IMAGE) -> str:
    """Build the image of a checkout; gives what the build said."""
    done = subprocess.run(
        [sys.executable, root / "docker" / "build.py", "--base", base, "--tag", tag],
        env=engine.env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stderr
