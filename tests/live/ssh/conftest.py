"""Tests against real hosts over SSH: ``lab`` has 2 of them, ``lab4`` has 4;
``shared_lab`` has 3 with a shared folder."""

import pytest

from tests import tested
from tests.lab.fixtures import (
    lab,
    lab4,
    session_lab,
    session_lab4,
    session_shared_lab,
    shared_lab,
)

__all__ = [
    "lab",
    "lab4",
    "session_lab",
    "session_lab4",
    "session_shared_lab",
    "shared_lab",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of the Ansible roles share one run of the playbook, which takes minutes."""
    for item in items:
        if item.path.name == "test_ansible.py":
            item.add_marker(tested.when_changed("ansible"))
