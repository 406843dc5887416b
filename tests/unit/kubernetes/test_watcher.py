"""What the watcher in the cluster makes of pods; and its work against a small API server."""

import json

import pytest

from clusterkit.agent import STOPPED_BY_PEERS
from clusterkit.backends.kubernetes.watcher import (
    GONE_SECONDS,
    Memory,
    Pod,
    Rules,
    read_pod,
    renumber,
    verdict,
)

NOW = 1_800_000_000.0


def rules(**fields):
    given = {
        "run": "r", "name": "r", "namespace": "ns", "job": "/job", "objects": (),
        "rank_label": "index", "nodes": 2, "needed": 2, "replaces": False, "force": True,
        "restarts": 0, "time_limit": None, "lost_after": 30.0, "stop_grace": 10.0, **fields,
    }  # fmt: skip
    return Rules(**given)


def pod(node, **fields):
    given = {
        "name": f"r-{node}", "uid": f"u{node}", "node": node, "exit_code": None,
        "started_at": NOW - 100, "leaving": False, "lost": False, "silent_since": None, **fields,
    }  # fmt: skip
    return Pod(**given)


def judged(pods, *, before=None, at=NOW, **fields):
    about, memory = rules(**fields), Memory()
    memory.take(before or [pod(0), pod(1)], about, NOW - 50)
    memory.take(pods, about, NOW)
    return verdict(pods, memory, about, at)


@pytest.mark.parametrize(
    ("pods", "fields", "expected"),
    [
        ([pod(0), pod(1)], {}, ("going", "")),
        ([pod(0, exit_code=0), pod(1)], {}, ("going", "")),
        ([pod(0, exit_code=0), pod(1, exit_code=0)], {}, ("succeeded", "")),
        ([pod(0), pod(1, exit_code=7)], {}, ("failed", "node 1: exit code 7")),
        (
            [pod(0, exit_code=1, followed=True), pod(1, exit_code=137)],
            {},
            ("failed", "node 1: exit code 137"),
        ),
        ([pod(0), pod(1, leaving=True)], {}, ("failed", "node 1: its pod was deleted")),
        ([pod(0), pod(1, uid="new")], {}, ("failed", "node 1: its pod was replaced")),
        ([pod(0)], {}, ("going", "")),
        ([pod(0), pod(1, silent_since=NOW - 20)], {}, ("going", "")),
        (
            [pod(0), pod(1, silent_since=NOW - 31)],
            {},
            ("failed", "node 1: its node of the cluster does not answer"),
        ),
        ([pod(0), pod(1, leaving=True)], {"replaces": True}, ("going", "")),
        ([pod(0), pod(1, uid="new")], {"replaces": True}, ("going", "")),
        ([pod(0)], {"replaces": True}, ("going", "")),
        ([pod(0), pod(1, exit_code=7)], {"needed": 1}, ("going", "")),
        ([pod(0, exit_code=0), pod(1, exit_code=7)], {"needed": 1}, ("succeeded", "")),
        ([pod(0), pod(1)], {"time_limit": 101.0}, ("going", "")),
        ([pod(0), pod(1)], {"time_limit": 99.0}, ("late", "over its time_limit of 99 s")),
    ],
)
def test_an_attempt_is_judged_by_its_pods(pods, fields, expected):
    assert judged(pods, **fields) == expected


def test_a_pod_that_is_missing_for_long_is_gone():
    assert judged([pod(0)], at=NOW + GONE_SECONDS + 1) == ("failed", "node 1: its pod is gone")
    assert judged([], before=[pod(0)], at=NOW + GONE_SECONDS + 1)[0] == "failed"


def test_a_node_that_was_never_there_is_waited_for():
    about, memory = rules(), Memory()
    memory.take([pod(0)], about, NOW)
    assert verdict([pod(0)], memory, about, NOW + 10_000) == ("going", "")
    assert memory.running_since is None


def test_time_counts_from_when_all_nodes_ran():
    about, memory = rules(time_limit=60.0), Memory()
    memory.take([pod(0, started_at=NOW - 500), pod(1, started_at=None)], about, NOW)
    assert memory.running_since is None
    memory.take([pod(0, started_at=NOW - 500), pod(1, started_at=NOW)], about, NOW)
    memory.take([pod(0, started_at=NOW - 500), pod(1, started_at=NOW + 40)], about, NOW)
    assert memory.running_since == NOW


def told(**status):
    return {
        "metadata": {
            "name": "r-1", "uid": "u",
            "labels": {"clusterkit/role": "node", "index": "1"},
            **status.pop("metadata", {}),
        },
        "status": status,
    }  # fmt: skip


RUNNING = [{"state": {"running": {"startedAt": "2027-01-15T08:00:00Z"}}}]


def test_pods_are_read_as_they_are():
    found = read_pod(told(phase="Running", containerStatuses=RUNNING), "index", NOW)
    assert found == Pod("r-1", "u", 1, None, 1_800_000_000.0, False, False, None)
    ended = [{"state": {"terminated": {"exitCode": 3, "startedAt": "2027-01-15T08:00:00Z"}}}]
    assert read_pod(told(phase="Failed", containerStatuses=ended), "index", NOW).exit_code == 3
    assert read_pod(told(phase="Failed"), "index", NOW).exit_code == 1
    words = json.dumps({"exit_code": 1, "reason": f"{STOPPED_BY_PEERS}node 1 failed"})
    ended[0]["state"]["terminated"]["message"] = words
    assert read_pod(told(phase="Failed", containerStatuses=ended), "index", NOW).followed
    assert read_pod(told(phase="Succeeded"), None, NOW).node == 0


def test_what_is_no_node_is_left_alone():
    document = told(phase="Running")
    document["metadata"]["labels"]["clusterkit/role"] = "worker"
    assert read_pod(document, "index", NOW) is None


def test_a_pod_is_lost_once_its_node_should_have_ended_it():
    gone = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
    document = told(
        metadata={"deletionTimestamp": "2027-01-15T08:00:00Z"},
        phase="Running", containerStatuses=RUNNING, conditions=[gone],
    )  # fmt: skip
    assert not read_pod(document, None, NOW + 4).lost
    assert read_pod(document, None, NOW + 6).lost
    del document["status"]["conditions"]
    assert not read_pod(document, None, NOW + 6).lost


def test_a_pod_that_was_evicted_is_no_failure_where_another_takes_its_place():
    evicted = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    old = read_pod(told(phase="Failed", conditions=[evicted]), "index", NOW)
    assert (old.leaving, old.exit_code) == (True, 1)
    new = pod(1, uid="new")
    assert judged([pod(0), old, new], replaces=True) == ("going", "")
    assert judged([pod(0), old._replace(uid="u1")]) == ("failed", "node 1: its pod was deleted")


def test_every_label_that_numbers_the_attempt_gets_the_new_number():
    body = {
        "metadata": {"labels": {"clusterkit/attempt": "1"}},
        "spec": [{"clusterkit/attempt": "1"}],
    }
    renumber(body, "2")
    assert body == {
        "metadata": {"labels": {"clusterkit/attempt": "2"}}, "spec": [{"clusterkit/attempt": "2"}],
    }  # fmt: skip
