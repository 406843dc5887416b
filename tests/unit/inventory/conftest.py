"""Fixtures of the tests beside this file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(sys.executable).with_name("ansible-inventory")


@pytest.fixture
def write(tmp_path):
    """Write an inventory; gives its path."""

    def write(text, name="inventory.yaml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.fixture
def ansible(tmp_path):
    """What ``ansible-inventory`` says of a file."""
    assert TOOL.exists(), "these tests compare with Ansible: pip install ansible-core"

    def ask(path, *arguments):
        done = subprocess.run(
            [TOOL, "-i", path, *arguments], capture_output=True, cwd=tmp_path,
            env={**os.environ, "LC_ALL": "C.UTF-8"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout)

    return ask
