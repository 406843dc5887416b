"""Fixtures of the tests beside this file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from clusterkit.cluster import ComposeCluster
from tests.unit.compose.containers import BACKEND, ENGINE, job


@pytest.fixture
def planned(make_facts: Callable[..., Any]) -> Callable[..., Any]:
    """``planned(entry={"memory": "1g"}, gpus=8, nodes=2)``: the plan, its compose file parsed."""

    def make(entry: dict[str, Any] | None = None, gpus: int = 0, **fields: Any) -> Any:
        facts = msgspec.structs.replace(
            make_facts(gpus=gpus, home="/home/u/.clusterkit"), engine=ENGINE, port=29500,
            watch_port=29501, interface="eth0",
        )  # fmt: skip
        cluster = BACKEND.resolved(ComposeCluster(**(entry or {})), Path("/etc/here"), None, None)
        plan = BACKEND.plan(job(**fields), cluster, facts, "demo-1")
        (file,) = (file for file in plan.files if file.path.endswith("compose.yaml"))
        return plan, yaml.safe_load(file.content())

    return make
