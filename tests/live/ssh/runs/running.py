"""What tests of runs on SSH hosts share."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from clusterkit import api
from clusterkit.run.status import RunStatus
from tests.lab import Lab

Submit = Callable[..., api.Run]


def describe(lab: Lab, **fields: object) -> str:
    """Write the cluster file for a lab; gives the cluster's name."""
    entry = {
        "backend": "ssh", "inventory": str(lab.inventory), "lost_after": 4, "connect_timeout": 5,
        "stop_grace": 2, **fields,
    }  # fmt: skip
    Path(os.environ["CLUSTERKIT_CLUSTERS"]).write_text(json.dumps({"lab": entry}))
    return "lab"


def on(lab: Lab, host: str, script: str) -> subprocess.CompletedProcess[str]:
    """Run a line of shell on a host."""
    return lab.ssh(host, "sh", "-c", script)


def processes(lab: Lab, host: str, run: api.Run) -> list[str]:
    """Process ids on a host that belong to a run."""
    variable = f"CLUSTERKIT_RUN_DIR={run.plan.run_dir}"
    script = f"grep --files-with-matches -szxF '{variable}' /proc/[0-9]*/environ; true"
    done = on(lab, host, script)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def saying(run: api.Run, text: str, times: int) -> None:
    """Return once ``text`` stands in the run's log so often."""
    found = 0
    for line in run.logs(follow=True):
        found += text in line.text
        if found == times:
            return
    raise AssertionError(f"the run ended: {run.status()}")


def ended(run: api.Run, seconds: float = 60.0) -> tuple[RunStatus, float]:
    """The last status, and after how many seconds it was there."""
    began = time.monotonic()
    return run.wait(seconds), time.monotonic() - began
