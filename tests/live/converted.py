"""Side by side: what a tool tells its ranks, and what they are told by the converted job."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from clusterkit import api
from clusterkit.run.status import State

LEFT_OUT = ("ACCELERATE_USE_CPU", "ACCELERATE_DYNAMO_")
"""Variables of accelerate that mean nothing new: every rank without a GPU has the first, here under
any launcher; the others hold accelerate's own defaults."""
PROGRAM = Path(__file__).parent / "programs" / "told.py"
SECONDS = 120.0


def told(lines: Iterable[str]) -> list[dict[str, Any]]:
    """What `programs/told.py` printed, by rank."""
    # docker compose puts an escape sequence in front of a line.
    found = [json.loads(line[line.index("{") :]) for line in lines if '{"rank": ' in line]
    for one in found:
        for name in [name for name in one["env"] if name.startswith(LEFT_OUT)]:
            del one["env"][name]
    return sorted(found, key=lambda one: one["rank"])


def converted(
    what: Path | None, words: Sequence[str] = (), **entry: Any
) -> tuple[api.Run, list[dict[str, Any]]]:
    """Run the job that an input becomes, on the cluster that it becomes or here.

    Args:
        entry: keys of the cluster's entry that depend on the machine.
    """
    found = api.convert(what, words)
    Path("job.yaml").write_text(found.job_text())
    options: dict[str, Any] = {}
    if found.cluster is not None:
        ((name, keys),) = found.cluster.items()
        Path("clusters.yaml").write_text(json.dumps({name: {**keys, **entry}}))
        options = {"cluster": name, "clusters_file": "clusters.yaml"}
    run = api.submit("job.yaml", **options)
    try:
        status = run.wait(SECONDS)
        log = [(line.rank, line.text) for line in run.logs()]
        assert status.state is State.SUCCEEDED, (status, log[-20:])
    finally:
        run.cancel()
    return run, told(text for rank, text in log if rank is not None)


def same(original: list[dict[str, Any]], job: list[dict[str, Any]], ranks: int) -> None:
    """Every rank is told the same; what the tool does not tell the job may."""
    assert [one["rank"] for one in original] == list(range(ranks)), original
    assert all(one["meets"] for one in job)
    for one in original:
        one["meets"] = True
    assert len(job) == ranks, job
    for by_tool, by_job in zip(original, job, strict=True):
        differ = {
            key: (by_tool[key], by_job[key]) for key in by_tool if by_tool[key] != by_job[key]
        }
        assert not differ, f"rank {by_tool['rank']}, of the tool and of the job: {differ}"


def project(folder: Path) -> Path:
    """A folder with the program alone."""
    folder.mkdir()
    shutil.copy(PROGRAM, folder / "told.py")
    return folder
