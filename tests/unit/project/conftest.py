"""Fixtures of the tests beside this file."""

import pytest

from tests.unit.project.projects import git, write


@pytest.fixture
def checkout(tmp_path):
    """A git checkout with one commit."""
    root = tmp_path / "my project"
    root.mkdir()
    git(root, "init", "-q")
    write(root / "train.py", "print('trained')\n")
    write(root / "lib" / "a.py", "a = 1\n")
    write(root / ".gitignore", "*.log\n/data/\n")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    return root


@pytest.fixture
def folder(tmp_path):
    """A folder that is in no checkout."""
    root = tmp_path / "plain"
    write(root / "train.py", "print('trained')\n")
    return root
