"""clusterkit: run PyTorch training jobs on one machine or on many, from one job file.

    import clusterkit

    run = clusterkit.submit("jobs/ddp.yaml", nodes=2)
    run.wait(check=True)

`clusterkit.api` has every verb of the command line as a function. Importing this package imports
nothing else: the command line must start in a moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clusterkit.api import Run as Run
    from clusterkit.api import get as get
    from clusterkit.api import runs as runs
    from clusterkit.api import submit as submit
    from clusterkit.errors import ClusterkitError as ClusterkitError
    from clusterkit.errors import RunFailed as RunFailed
    from clusterkit.spec import JobSpec

    Job = JobSpec

__version__ = "0.1.0"

_FROM = {
    **dict.fromkeys(("Run", "get", "runs", "submit"), "api"),
    **dict.fromkeys(("ClusterkitError", "RunFailed"), "errors"),
    "Job": "spec",
}


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f"clusterkit.{_FROM[name]}")
    return getattr(module, {"Job": "JobSpec"}.get(name, name))


def __dir__() -> list[str]:
    return sorted([*_FROM, "__version__"])
