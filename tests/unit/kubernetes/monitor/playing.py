"""An API server with one pod, as a small server of HTTP plays it."""

import json
import time

from clusterkit import backends
from clusterkit.agent import NODE_FILE

BACKEND = backends.backend("kubernetes")
LABELS = {
    "clusterkit/role": "node", "clusterkit/attempt": "1", "clusterkit/run": "demo-1",
    "training.kubeflow.org/replica-index": "0",
}  # fmt: skip
LINE = "2026-11-22T04:00:01.000000Z 0 hello"


def pod(code=None):
    ended = {"terminated": {"exitCode": code, "message": json.dumps({"exit_code": code})}}
    state = {"running": {}} if code is None else ended
    phase = "Running" if code is None else "Failed" if code else "Succeeded"
    return {
        "metadata": {"name": "demo-1-worker-0", "uid": "u", "labels": LABELS},
        "spec": {"nodeName": "node-1", "containers": [{"name": "pytorch"}]},
        "status": {
            "phase": phase,
            "containerStatuses": [{"name": "pytorch", "state": state, "restartCount": 0}],
        },
    }


def log_of(handle):
    return (handle.folder.node_dir(handle.attempt, 0) / "log").read_text().splitlines()


HTML = b"<html><title>Sign in</title></html>"


def next_attempt(number, code=7, **more):
    """What an agent prints when it begins another attempt."""
    ended = {"exit_code": code, "reason": None, "at": 1.0, "processes": [], "next": number, **more}
    return f"2026-11-22T04:00:01.000000Z - {NODE_FILE.decode()} exit.json {json.dumps(ended)}"


def until(monitor, right):
    deadline = time.monotonic() + 30
    while not right(seen := monitor.status()):
        assert time.monotonic() < deadline, seen
        time.sleep(0.05)
    return seen
