"""A docker engine and the image for tests; both made once a session, on the spot if need be.

    python -m tests.live.compose.image      make the image beforehand (.ci/run)

tests/live/conftest.py has these fixtures, and so all live tests share one engine and one build. In
two conftests they would be two: the second would wait for the first's engine to end, for ever.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterkit import __version__
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
    """The training image of this checkout."""
    return made(engine, base)


def made(engine: Engine, base: str) -> str:
    """The training image of this checkout, built as `make image` builds it.

    An engine that has none takes the slow layers from the image of an earlier session, if that was
    made of the same packages; it is kept, with its wheels, in the engine's cache.
    """
    kept = engines.CACHE / f"image-{packages(engine, base)}"
    with (engines.CACHE / "image-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker of pytest-xdist may be at it
        new = not engine.out("images", "--quiet", IMAGE)
        if new and kept.exists():
            engine.run("load", "--input", str(kept / "image.tar"))
            shutil.copytree(kept / "wheelhouse", ROOT / "wheelhouse", dirs_exist_ok=True)
            (ROOT / "wheelhouse" / ".made").touch()
        made = subprocess.run(["make", "wheelhouse"], cwd=ROOT, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr[-3000:]
        build(engine, base, cache_from=IMAGE)
        if new and not kept.exists():
            keep(engine, kept)
    return IMAGE


def made_of(engine: Engine) -> str:
    """The id of the image that the engine has."""
    return engine.out("image", "inspect", "--format", "{{.Id}}", IMAGE)


@contextlib.contextmanager
def archive(engine: Engine, base: str) -> Iterator[Path]:
    """The image as `docker save` writes it, by both of its names: the one that was put aside, if
    that is this image."""
    kept = engines.CACHE / f"image-{packages(engine, base)}"
    if (kept / "id").exists() and (kept / "id").read_text() == made_of(engine):
        yield kept / "image.tar"
        return
    with tempfile.TemporaryDirectory(prefix="image-") as folder:
        yield save(engine, Path(folder))


def save(engine: Engine, folder: Path) -> Path:
    # By its version as well, as manifests name it.
    named = IMAGE.replace(":", f":{__version__}-")
    engine.run("save", IMAGE, named, "--output", str(folder / "image.tar"))
    return folder / "image.tar"


def packages(engine: Engine, base: str) -> str:
    """A digest of what the image's slow layers are made of."""
    layers = engine.out("image", "inspect", "--format", "{{json .RootFS.Layers}}", base)
    whole = hashlib.sha256(f"{layers} {sys.version}".encode())
    for name in (
        "pyproject.toml",
        "constraints.txt",
        "docker/requirements.py",
        "docker/Dockerfile",
    ):
        whole.update((ROOT / name).read_bytes())
    return whole.hexdigest()[:16]


def keep(engine: Engine, kept: Path) -> None:
    """Put the image aside for later sessions, instead of the one before."""
    for old in kept.parent.glob("image-*"):
        shutil.rmtree(old, ignore_errors=True)
    draft = Path(tempfile.mkdtemp(prefix="image-", dir=kept.parent))
    save(engine, draft)
    (draft / "id").write_text(made_of(engine))
    shutil.copytree(ROOT / "wheelhouse", draft / "wheelhouse")
    draft.rename(kept)


def build(
    engine: Engine, base: str, root: Path = ROOT, tag: str = IMAGE, cache_from: str | None = None
) -> str:
    """Build the image of a checkout; gives what the build said."""
    more = ("--cache-from", cache_from) if cache_from else ()
    done = subprocess.run(
        [sys.executable, root / "docker" / "build.py", "--base", base, "--tag", tag, *more],
        env=engine.env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stderr


def main() -> int:
    try:
        with engines.engine() as engine:
            made(engine, engines.base_image(engine))
    except NoEngine as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
