"""Fixtures of the tests beside this file."""

import sys

import pytest

from tests.unit.ssh_backend.hosts import cluster


@pytest.fixture
def entry_of(tmp_path, no_gpus):
    def make(number=2, **fields):
        given = {"python": sys.executable, "workdir": str(tmp_path / "my work"), "sync": False}
        return cluster(number, **(given | fields))

    return make
