"""Labs for tests: ``lab`` has 2 hosts, ``lab4`` has 4, ``shared_lab`` has 3 with a shared folder;
all are well at the start of every test.

from tests.lab.fixtures import lab, lab4, session_lab, session_lab4  # in a conftest.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest

from tests.lab import Lab, machine


def made(hosts: int, *, shared: bool = False) -> Iterator[Lab]:
    """A lab while its fixture lasts; the test is skipped where there can be none."""
    if (problem := machine.problem()) is not None:
        pytest.skip(f"no lab: {problem.message}; {problem.hint}")
    # Not in pytest's own folder: that one is removed sooner or later, and if this process is
    # killed, the lab and its mounts are still there.
    with Lab(tempfile.mkdtemp(prefix="clusterkit-lab-"), hosts, shared=shared) as made:
        yield made


@pytest.fixture(scope="session")
def session_lab() -> Iterator[Lab]:
    """Two hosts for the whole session."""
    yield from made(2)


@pytest.fixture(scope="session")
def session_lab4() -> Iterator[Lab]:
    """Four hosts for the whole session."""
    yield from made(4)


@pytest.fixture(scope="session")
def session_shared_lab() -> Iterator[Lab]:
    """Three hosts that see one folder, for the whole session."""
    yield from made(3, shared=True)


@pytest.fixture
def shared_lab(session_shared_lab: Lab) -> Iterator[Lab]:
    """Three hosts with /srv/shared; what a test breaks is mended after it."""
    yield session_shared_lab
    session_shared_lab.repair()


@pytest.fixture
def lab(session_lab: Lab) -> Iterator[Lab]:
    """Two hosts; what a test breaks is mended after it."""
    yield session_lab
    session_lab.repair()


@pytest.fixture
def lab4(session_lab4: Lab) -> Iterator[Lab]:
    """Four hosts; what a test breaks is mended after it."""
    yield session_lab4
    session_lab4.repair()
