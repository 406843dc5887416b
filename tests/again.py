"""pytest, and at the end once more what failed: `python -m tests.again [PYTEST'S ARGUMENTS]`.

For live tests, whose machine may have a bad moment. One that passes then is printed as
``FLAKY: name`` and does not fail the whole; it has a defect all the same, or its test has.
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
    """Exit code as pytest's own: 0 if each test passed, at once or the second time."""
    with tempfile.TemporaryDirectory(prefix="clusterkit-again-") as cache:
        pytest = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *words]
        code = run(pytest)
        failed = failures(Path(cache))
        if code != TESTS_FAILED or not failed:
            return code
        print(f"\nonce more, what failed: {len(failed)}", flush=True)
        code = run([*pytest, "--last-failed"])
        for name in sorted(failed - failures(Path(cache))):
            print(f"FLAKY: {name}", flush=True)
        return code


def run(command: list[str]) -> int:
    """Run pytest, which gets the signals that come here: it has engines and clusters to end."""
    process = subprocess.Popen(command)
    signal.signal(signal.SIGINT, lambda *_: None)  # a terminal sends it to both
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    return process.wait()


def failures(cache: Path) -> set[str]:
    """The tests that failed when they were last run, by pytest's own record."""
    found = cache / "v" / "cache" / "lastfailed"
    return set(json.loads(found.read_text())) if found.exists() else set()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
