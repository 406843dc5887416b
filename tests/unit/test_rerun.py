"""`python -m tests.rerun`: what failed is run once more, and named if it passes then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
from pathlib import Path
import pytest

def test_well():
    with Path("well").open("a") as file:
        file.write("ran ")

def test_flaky():
    if not Path("seen").exists():
        Path("seen").touch()
        pytest.fail("a bad moment")

@pytest.fixture
def broken():
    if not Path("made").exists():
        Path("made").touch()
        pytest.fail("a bad moment")

def test_flaky_fixture(broken): ...
"""


@pytest.mark.parametrize("more", ["", "\ndef test_broken():\n    assert 0\n", "\n)"])
def test_rerun_names_flaky_tests_that_pass_second_time(tmp_path: Path, more: str) -> None:
    (tmp_path / "test_it.py").write_text(TESTS + more)
    words = [sys.executable, "-m", "tests.rerun", str(tmp_path)]
    env = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    named = [line for line in done.stdout.splitlines() if line.startswith("FLAKY: ")]
    if more == "\n)":  # nothing can be collected: no second run helps
        assert (done.returncode, named) == (2, [])
        return
    names = ["test_flaky", "test_flaky_fixture"]
    assert named == [f"FLAKY: test_it.py::{name}" for name in names]
    assert done.returncode == (1 if "broken" in more else 0), done.stdout
    assert (tmp_path / "well").read_text() == "ran "
