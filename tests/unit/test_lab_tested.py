"""The lab's own tests are left out of `make test` only as long as neither they nor it change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.lab import tested


@pytest.mark.parametrize("name", ["faults.py", "host.sh", "test_lab.py"])
def test_a_change_of_the_lab_or_its_tests_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    lab = tmp_path / "lab"
    shutil.copytree(tested.HERE, lab, ignore=shutil.ignore_patterns("__pycache__"))
    tests = Path(shutil.copy(tested.TESTS, tmp_path))
    monkeypatch.setattr(tested, "HERE", lab)
    monkeypatch.setattr(tested, "TESTS", tests)
    monkeypatch.setattr(tested, "FILE", lab / "tested.sha256")
    tested.FILE.unlink(missing_ok=True)
    assert not tested.unchanged()
    tested.FILE.write_text(tested.digest() + "\n")
    assert tested.unchanged()
    changed = tests if name == tests.name else lab / name
    changed.write_text(changed.read_text() + "\n# more\n")
    assert not tested.unchanged()
