"""Tests against real hosts over SSH: ``lab`` has 2 of them, ``lab4`` has 4."""

from tests.lab.fixtures import lab, lab4, session_lab, session_lab4

__all__ = ["lab", "lab4", "session_lab", "session_lab4"]
