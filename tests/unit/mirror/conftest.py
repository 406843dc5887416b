"""Fixtures of the tests beside this file."""

import pytest


@pytest.fixture
def node_dir(tmp_path):
    """The folder that a node writes on its host."""
    folder = tmp_path / "host" / "node-0"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def kept(tmp_path):
    """The folder here that its files are brought to."""
    return tmp_path / "here" / "node-0"
