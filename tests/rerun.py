"""Run pytest, then rerun the tests that failed: `python -m tests.rerun [PYTEST ARGUMENTS]`.

A test that passes the second time is printed as ``FLAKY: name`` and does not fail the run, because
CI's machines are shared and busy; each FLAKY test still has a defect, in itself or in clusterkit.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS_FAILED = 1


def main(words: list[str]) -> int:
    """Return pytest's exit code: 0 if each test passed, the first or the second time."""
    with tempfile.TemporaryDirectory(prefix="clusterkit-rerun-") as cache:
        pytest = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *words]
        code = run(pytest)
        failed = failures(Path(cache))
        if code != TESTS_FAILED or not failed:
            return code
        print(f"\nrerunning {len(failed)} failed tests", flush=True)
        code = run([*pytest, "--last-failed"])
        for name in sorted(failed - failures(Path(cache))):
            print(f"FLAKY: {name}", flush=True)
        return code


def run(command: list[str]) -> int:
    """Run pytest and forward SIGTERM to it: it has engines and clusters to end."""
    process = subprocess.Popen(command)
    signal.signal(signal.SIGINT, lambda *_: None)  # the terminal sends it to both
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    return process.wait()


def failures(cache: Path) -> set[str]:
    """Return the tests that failed in their last run, from pytest's cache."""
    found = cache / "v" / "cache" / "lastfailed"
    return set(json.loads(found.read_text())) if found.exists() else set()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
