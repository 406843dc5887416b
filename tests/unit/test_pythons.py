"""Which Pythons `make unit-newest` and `make thorough` find."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests import pythons

OWN = "{}.{}".format(*sys.version_info[:2])
VERSIONS = [version for version in pythons.CLAIMED if version != OWN]


@pytest.fixture
def found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, str]:
    """What is printed for each word, once the programs are made."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))

    class Found(dict[str, str]):
        def __missing__(self, which: str) -> str:
            pythons._version.cache_clear()
            assert pythons.main(which) == 0
            return capsys.readouterr().out

    return Found()


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_newest_python_is_found_on_path_or_in_pyenv(tmp_path: Path, found: dict[str, str]) -> None:
    old, middle, new = sorted(VERSIONS)
    assert found["others"] == found["newest"] == ""
    one = program(tmp_path / "bin" / f"python{old}", f"echo {old}")
    program(tmp_path / "bin" / f"python{middle}", "exit 127")  # pyenv's shim of another version
    own = f"{old} {one}\n"
    assert found["others"] == own
    assert found["newest"] == (own if old > OWN else "")
    two = program(tmp_path / "pyenv" / "versions" / f"{new}.9" / "bin" / "python3", f"echo {new}")
    assert found["others"] == f"{new} {two}\n{own}"
    assert found["newest"] == (f"{new} {two}\n" if new > OWN else "")


def test_running_python_version_is_not_listed(tmp_path: Path, found: dict[str, str]) -> None:
    program(tmp_path / "bin" / "python3", f"echo {OWN}")
    assert found["newest"] == found["others"] == ""


def test_contributing_and_pyproject_name_same_python_versions() -> None:
    root = Path(pythons.__file__).parents[1]
    project = (root / "pyproject.toml").read_text()
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert named == sorted(pythons.CLAIMED)
    assert (
        f"\n- Python {min(pythons.CLAIMED)} to {max(pythons.CLAIMED)}:"
        in (root / "CONTRIBUTING.md").read_text()
    )
