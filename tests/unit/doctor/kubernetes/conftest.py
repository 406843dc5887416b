"""Fixtures of the tests beside this file."""

from __future__ import annotations

import pytest

from clusterkit.backends.kubernetes import api_server


@pytest.fixture(autouse=True)
def located(monkeypatch):
    monkeypatch.setattr(api_server, "context_of", lambda entry: ("kube-test", "default"))
