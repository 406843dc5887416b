"""What the watcher in the cluster takes for lost, and what it does then."""

import pytest

from clusterkit.backends.kubernetes import lost_pods
from clusterkit.backends.kubernetes.lost_pods import JSON, poll, unreachable_since

NOW = 1_800_000_000.0
AT = "2027-01-15T08:00:00Z"


def pod(name="r-0", phase="Running", conditions=(), **meta):
    return {
        "metadata": {"name": name, "uid": f"u-{name}", **meta},
        "status": {"phase": phase, "conditions": list(conditions)},
    }


def holds(kind, status, **more):
    return {"type": kind, "status": status, "lastTransitionTime": AT, **more}


SILENT = [holds("Ready", "False"), holds("ContainersReady", "True")]
TAINTED = [holds("DisruptionTarget", "True", reason="DeletionByTaintManager")]


@pytest.mark.parametrize(
    ("told", "since"),
    [
        (pod(conditions=SILENT), NOW),
        (pod("Failed", conditions=SILENT, phase="Failed"), None),
        # Its kubelet says it: a probe fails, or it ends.
        (pod(conditions=[holds("Ready", "False"), holds("ContainersReady", "False")]), None),
        (pod(conditions=[holds("Ready", "True"), holds("ContainersReady", "True")]), None),
        (
            pod(conditions=[holds("Ready", "False", reason="ReadinessGatesNotReady"), SILENT[1]]),
            None,
        ),
        # It had not begun: only that it does not end tells.
        (pod(phase="Pending", conditions=TAINTED, deletionTimestamp=AT), NOW),
        (pod(phase="Pending", deletionTimestamp=AT), None),
        (pod(conditions=TAINTED), None),
        ({"metadata": {}}, None),
    ],
)
def test_unreachable_since_reads_pod_conditions(told, since):
    assert unreachable_since(told) == since


@pytest.fixture
def asked(monkeypatch):
    """What an API server is asked that has one silent pod of a Job, and others that are well; with
    a function that sets the time."""
    found = []
    pods = [
        pod("r-0"),
        pod("r-1", conditions=SILENT),
        pod("r-2", phase="Succeeded"),
    ]

    def ask(method, path, body=None, content=JSON):
        found.append((method, path, body, content))
        return {"items": pods} if method == "GET" else {}

    monkeypatch.setattr(lost_pods, "ask", ask)
    return found


@pytest.mark.parametrize(("late", "removed"), [(29, 0), (31, 1)])
def test_poll_force_deletes_pod_of_node_silent_past_limit(late, removed, asked, monkeypatch):
    silent, clock = {}, [1.0]
    monkeypatch.setattr(lost_pods.time, "monotonic", lambda: clock[0])
    # The time of day of the watcher's node counts for nothing.
    monkeypatch.setattr(lost_pods.time, "time", lambda: NOW + 1e6)
    assert poll("/pods", "run=r", 30.0, silent)
    assert len(asked) == 1
    clock[0] += late
    assert poll("/pods", "run=r", 30.0, silent)
    (_, listing, *rest) = asked
    assert listing[:2] == ("GET", "/pods?labelSelector=run%3Dr")
    gone = {"gracePeriodSeconds": 0, "preconditions": {"uid": "u-r-1"}}
    assert rest == [("DELETE", "/pods/r-1", gone, JSON)][:removed]


def test_poll_stops_when_all_pods_have_ended(monkeypatch):
    ended = {"items": [pod(phase="Succeeded"), pod(phase="Failed")]}
    monkeypatch.setattr(lost_pods, "ask", lambda *_: ended)
    assert not poll("/pods", "run=r", 30.0, {})
