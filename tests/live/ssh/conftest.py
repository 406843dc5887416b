"""Tests against real hosts over SSH: ``lab`` has 2 of them, ``lab4`` has 4;
``shared_lab`` has 3 with a shared folder."""

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
