"""A docker client and an engine, made up."""

from __future__ import annotations

from typing import Any

from clusterkit.backends.compose.backend import ComposeBackend
from clusterkit.cluster import Engine
from clusterkit.spec import JobSpec

BACKEND = ComposeBackend()
ENGINE = Engine(
    socket="unix:///var/run/docker.sock", version="27.3.1", image="clusterkit:cpu",
    image_id="sha256:" + "ab" * 32, workdir="/opt/clusterkit", user="1000:1000",
    package="/opt/venv/lib/python3.11/site-packages/clusterkit",
)  # fmt: skip


def job(**fields: Any) -> JobSpec:
    given = {"name": "demo", "program": "train.py", "workdir": "/srv/project"}
    return JobSpec(**(given | fields))
