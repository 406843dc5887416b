"""Fixtures of the tests beside this file."""

import pytest

from clusterkit.run.folder import RunFolder
from tests.unit.cli.commands import LOG, final


@pytest.fixture
def ended(unstarted_run, by_hand):
    """A run of two ranks that has succeeded; its supervisor is gone."""
    run = unstarted_run("launcher: forkserver\ngpus_per_node: 2\n")
    by_hand(run).node(exit_code=0, log=LOG)
    by_hand(run).unwatched()
    RunFolder(run.path).write_json("state.json", final(run.id))
    return run
