"""Tests of the tests' tools are left out of `make test` while neither they nor the tools change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests import tested


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("lab", "tests/lab/faults.py"),
        ("lab", "tests/lab/host.sh"),
        ("lab", "tests/live/ssh/test_lab.py"),
        ("ansible", "ansible/site.yml"),
        ("ansible", "tests/live/ssh/test_ansible.py"),
    ],
)
def test_changed_file_marks_tested_part_as_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, name: str
) -> None:
    for place in tested.PARTS[part]:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (tested.ROOT / place).is_dir() else shutil.copy
        copy(tested.ROOT / place, tmp_path / place)
    assert (tested.ROOT / name).exists()
    monkeypatch.setattr(tested, "ROOT", tmp_path)
    monkeypatch.setattr(tested, "FILE", tmp_path / "tested.json")
    tested.FILE.write_text("{}")
    assert not tested.unchanged(part)
    assert tested.when_changed(part).name == "live"
    tested.FILE.write_text(json.dumps({part: tested.digest(part)}))
    assert tested.unchanged(part)
    assert tested.when_changed(part).name == "thorough"
    (tmp_path / name).write_text((tmp_path / name).read_text() + "\n# more\n")
    assert not tested.unchanged(part)
