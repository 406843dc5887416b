"""The training programs as modules: they import each other by name, as they do when they run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "jobs").glob("*/*.py"))
"""The programs and their modules; jobs/train/gpt has tests of its own."""


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """``program("reviews")``: that module, and nothing of it left afterwards."""
    for folder in {path.parent for path in FILES}:
        monkeypatch.syspath_prepend(str(folder))
    for name in ("CLUSTERKIT_ACCUMULATION", "CLUSTERKIT_MICRO_BATCH"):
        monkeypatch.delenv(name, raising=False)
    before = set(sys.modules)
    yield importlib.import_module
    for name in {path.stem for path in FILES} & (set(sys.modules) - before):
        del sys.modules[name]
