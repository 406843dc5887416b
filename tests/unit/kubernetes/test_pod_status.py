"""What pods mean for nodes: documents as a real API server gave them, cut down to what matters."""

import json

import msgspec
import pytest

from clusterkit.agent import OVER_TIME_LIMIT
from clusterkit.backends.kubernetes import pod
from clusterkit.backends.kubernetes.pod import Pod, PodState
from clusterkit.backends.kubernetes.pod_status import (
    DELETED,
    Rejoin,
    by_node,
    cause_from_events,
    causes,
    needs_events,
    node_status,
    updated,
    without,
)
from clusterkit.run.status import State

INDEX = "training.kubeflow.org/replica-index"
AT = "2026-11-22T04:00:00Z"
T0 = 1795320000.0


def read_pod(told, index, now=None):
    return pod.read_pod(told, index, "pytorch", now)


def document(phase="Running", state=None, *, conditions=(), node=0, uid="u1", **more):
    status = {"phase": phase, "conditions": list(conditions)}
    if state is not None:
        status["containerStatuses"] = [{"name": "pytorch", "state": state, "restartCount": 0}]
    labels = {"clusterkit/role": "node", "clusterkit/attempt": "1", INDEX: str(node)}
    meta = {"name": f"r-worker-{node}", "uid": uid, "labels": labels}
    spec = {
        "nodeName": "node-1",
        "containers": [
            {"name": "pytorch", "image": "a/b:1", "resources": {"limits": {"memory": "200Mi"}}}
        ],
    }
    return {
        "metadata": meta | more.pop("meta", {}), "spec": spec, "status": status | more,
    }  # fmt: skip


def ended(code, message="", reason="Error"):
    return {
        "terminated": {"exitCode": code, "message": message, "reason": reason, "finishedAt": AT}
    }


def words_of(code, reason=None, **more):
    return json.dumps({"exit_code": code, "reason": reason, "at": T0, "processes": [], **more})


SCHEDULED = {"type": "PodScheduled", "status": "True", "lastTransitionTime": AT}
RUNS = {"running": {"startedAt": AT}}


def seen(told, before=None, now=T0, lost=False, replaced=False, waits=None, **more):
    known = {}
    if before is not None:
        pod = read_pod(before, INDEX, now)
        known = {pod.name: pod}
    if told is None:
        known = without(known, [pod.uid for pod in known.values()])
    else:
        pod = read_pod(told, INDEX, now)
        known = updated(known, {pod.name: pod}, replaceable=replaced or "rejoin" in more)
    pod = next(iter(known.values()), None)
    if lost:
        state = PodState.LOST if pod.gone else PodState.UNREACHABLE
        pod = msgspec.structs.replace(pod, state=state)
    found = node_status(0, pod, replaceable=replaced, waits_for=waits, **more)
    return found.state, found.exit_code, found.reason


def not_scheduled(message, reason="Unschedulable"):
    return {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}


def waiting(reason, message=""):
    return {"waiting": {"reason": reason, "message": message}}


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (document(state=RUNS), (State.RUNNING, None, None)),
        (document("Succeeded", ended(0, words_of(0))), (State.SUCCEEDED, 0, None)),
        (document("Failed", ended(7, words_of(7))), (State.FAILED, 7, None)),
        (
            document("Failed", ended(143, words_of(143, "stopped: node 1 failed"))),
            (State.CANCELLED, 143, "stopped: node 1 failed"),
        ),
        (document("Failed", ended(143, words_of(143, "stopped on request"))),
         (State.FAILED, 143, DELETED)),
        (
            document("Failed", ended(137, "", "OOMKilled")),
            (State.FAILED, 137, "OOMKilled: its container used more than its memory limit of "
             "200Mi"),
        ),
        (
            document("Failed", ended(137)),
            (State.FAILED, 137, "SIGKILL: its container was killed (exit code 137) and reported "
             "nothing"),
        ),
        (
            document("Failed", ended(69, "the name x did not resolve within 120 s\n")),
            (State.FAILED, 69, "exit code 69: the name x did not resolve within 120 s"),
        ),
        (
            document("Failed", ended(128, "exec: nothing: not found", "StartError")),
            (State.FAILED, 128, "StartError: its container could not be started: exec: nothing: "
             "not found"),
        ),
        (
            document("Failed", reason="Evicted", message="The node was low on resource: memory."),
            (State.FAILED, None, "Evicted: The node was low on resource: memory."),
        ),
        (document("Failed", reason="DeadlineExceeded"), (State.FAILED, None, OVER_TIME_LIMIT)),
        (document("Confused"), (State.UNKNOWN, None, "Kubernetes reports its pod as 'Confused'")),
        (document("Unknown"), (State.UNKNOWN, None, "Kubernetes reports its pod as 'Unknown'")),
    ],
)  # fmt: skip
def test_node_status_follows_pod_phase_and_exit(told, expected):
    assert seen(told) == expected


def beside(told, state, name="istio-proxy", *, init=False, policy="Never", **more):
    """The pod with another container, which an admission webhook has put first."""
    where = "initContainerStatuses" if init else "containerStatuses"
    other = {"name": name, "state": state, "restartCount": 9, **more}
    statuses = [other, *told["status"].get(where, ())]
    kind = "initContainers" if init else "containers"
    specs = [{"name": name, "image": "mesh/proxy:1"}, *told["spec"].get(kind, ())]
    spec = told["spec"] | {kind: specs, "restartPolicy": policy}
    return told | {"spec": spec, "status": told["status"] | {where: statuses}}


GOES_ON = Rejoin(forced=True)
DONE, FAULT = ended(0, reason="Completed"), ended(3)
PULLS = waiting("ImagePullBackOff", "dial tcp: lookup x: no such host")


@pytest.mark.parametrize("policy", ["Never", "OnFailure"])
@pytest.mark.parametrize("init", [False, True])
@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (document(state=RUNS), (State.RUNNING, None, None)),
        # The pod itself is Running until its last container has ended.
        (document(state=ended(0, words_of(0))), (State.SUCCEEDED, 0, None)),
        (document("Failed", ended(0, words_of(0))), (State.SUCCEEDED, 0, None)),
        (document("Succeeded", ended(0, words_of(0))), (State.SUCCEEDED, 0, None)),
    ],
)
@pytest.mark.parametrize("other", [RUNS, DONE, FAULT, PULLS])
def test_node_status_ignores_state_of_other_containers(other, told, expected, init, policy):
    for rejoin in (None, GOES_ON):
        found = seen(beside(told, other, init=init, policy=policy), rejoin=rejoin)
        assert found == expected


def test_node_status_ignores_sidecar_that_waits_for_image():
    told = beside(document("Pending", RUNS, conditions=[SCHEDULED]), PULLS)
    assert seen(told, now=T0 + 1000) == (State.RUNNING, None, None)
    told = beside(document("Pending", ended(3, words_of(3)), conditions=[SCHEDULED]), PULLS)
    assert seen(told, now=T0 + 1000)[:2] == (State.FAILED, 3)


def test_read_pod_takes_values_of_training_container():
    pod = read_pod(beside(document(state=RUNS), RUNS), INDEX)
    assert (pod.container, pod.restarts, pod.memory_limit) == ("pytorch", 0, "200Mi")
    pod = read_pod(
        beside(document(state=ended(1, words_of(1))), ended(137, "", "OOMKilled")), INDEX
    )
    assert (pod.exit_code, pod.reason) == (1, "Error")


@pytest.mark.parametrize("policy", ["OnFailure", "Always"])
def test_node_runs_while_kubelet_restarts_its_container(policy):
    told = document(state=ended(1, words_of(1)))
    told["spec"]["restartPolicy"] = policy
    assert seen(told, replaced=True) == (State.RUNNING, None, None)


def test_node_status_names_what_init_container_waits_for():
    told = document("Pending", waiting("PodInitializing"), conditions=[SCHEDULED])
    told = beside(told, PULLS, "istio-init", init=True)
    words = "ImagePullBackOff: image mesh/proxy:1 cannot be pulled: the registry does not answer"
    assert seen(told, now=T0 + 59) == (State.PENDING, None, words)
    assert seen(told, now=T0 + 61) == (State.FAILED, None, words)
    told = document("Pending", waiting("ContainerCreating"), conditions=[SCHEDULED])
    assert seen(beside(told, PULLS), now=T0 + 61)[0] is State.PENDING  # it starts without a sidecar
    crash = waiting("CrashLoopBackOff", "back-off 10s")
    told = document("Pending", waiting("PodInitializing"), conditions=[SCHEDULED])
    assert seen(beside(told, crash, "fetch", init=True))[2] == (
        "its container fetch: CrashLoopBackOff: back-off 10s"
    )


def test_node_fails_with_exit_code_of_failed_init_container():
    told = beside(document("Failed", waiting("PodInitializing")), FAULT, "fetch", init=True)
    words = "Init:Error: init container fetch failed with exit code 3"
    assert seen(told) == (State.FAILED, None, words)


SLOW = "failed to sync secret cache: timed out waiting for the condition"
"""What a kubelet says that is busy, and tries again."""


@pytest.mark.parametrize(
    ("told", "words", "state"),
    [
        (
            document("Pending", conditions=[not_scheduled(
                "0/4 nodes are available: 1 Insufficient nvidia.com/gpu, 3 node(s) had untolerated "
                "taint(s). no new claims to deallocate, preemption: 0/4 nodes are available: 4 No "
                "preemption victims found for incoming pod.")]),
            "Unschedulable: 0/4 nodes are available: 1 Insufficient nvidia.com/gpu, 3 node(s) had "
            "untolerated taint(s)",
            State.PENDING,
        ),
        (
            document("Pending", conditions=[not_scheduled("gated", "SchedulingGated")]),
            "suspended: waits for its Kueue queue", State.PENDING,
        ),
        (
            document("Pending", waiting("ContainerCreating"), conditions=[SCHEDULED]),
            "ContainerCreating: its container is being created or its image pulled for 40 s",
            State.PENDING,
        ),
        (
            document("Pending", waiting("ErrImagePull", 'failed to pull: "a/b:1": not found'),
                     conditions=[SCHEDULED]),
            "ImagePullBackOff: image a/b:1 cannot be pulled: the registry does not have the image",
            State.PENDING,
        ),
        (
            document("Pending", waiting("ImagePullBackOff", "dial tcp: lookup x: no such host"),
                     conditions=[SCHEDULED]),
            "ImagePullBackOff: image a/b:1 cannot be pulled: the registry does not answer",
            State.PENDING,
        ),
        (
            document("Pending", waiting("ErrImagePull", "pull access denied, unauthorized"),
                     conditions=[SCHEDULED]),
            "ImagePullBackOff: image a/b:1 cannot be pulled: the registry needs credentials "
            "(image_pull_secrets) or does not have the image",
            State.PENDING,
        ),
        (
            document("Pending", waiting("InvalidImageName"), conditions=[SCHEDULED]),
            "InvalidImageName: a/b:1 is not the name of an image", State.FAILED,
        ),
        (
            document("Pending", waiting("CreateContainerConfigError", 'secret "r" not found'),
                     conditions=[SCHEDULED]),
            'CreateContainerConfigError: its container cannot be created: secret "r" not found',
            State.FAILED,
        ),
        (
            document("Pending", waiting("CreateContainerConfigError", SLOW),
                     conditions=[SCHEDULED]),
            f"CreateContainerConfigError: its container cannot be created: {SLOW}", State.PENDING,
        ),
    ],
)  # fmt: skip
def test_node_status_names_what_pending_pod_waits_for(told, words, state):
    assert seen(told, now=T0 + 40) == (state, None, words)


def test_node_fails_when_image_pull_exceeds_60_seconds():
    told = document("Pending", waiting("ImagePullBackOff", "not found"), conditions=[SCHEDULED])
    assert seen(told, now=T0 + 59)[0] is State.PENDING
    assert seen(told, now=T0 + 61)[0] is State.FAILED


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("EvictionByEvictionAPI", "Evicted: its node is being drained"),
        ("PreemptionByScheduler", "Preempted: by a pod of higher priority: by pod x"),
        ("TerminationByKubelet", "Evicted: by pod x"),
        (
            "DeletionByTaintManager",
            "DeletionByTaintManager: its node is gone or has a taint that "
            "the pod does not tolerate",
        ),
    ],
)
def test_disruption_reason_explains_removed_pod(reason, words):
    why = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "by pod x"}
    told = document("Failed", ended(143, words_of(143, "stopped on request")), conditions=[why])
    assert seen(told) == (State.FAILED, 143, words)
    (cause,) = causes([read_pod(told, INDEX)])
    assert (cause.words, cause.exit_code) == (words, 143)
    assert causes([read_pod(told, INDEX)], {"r-worker-0"}) == ()


def test_status_of_missing_pod_follows_last_observation():
    running, done = document(state=RUNS), document("Succeeded", ended(0, words_of(0)))
    assert seen(None) == (State.PENDING, None, None)
    assert seen(None, waits="a quota") == (State.PENDING, None, "a quota")
    assert seen(None, done) == (State.SUCCEEDED, 0, None)
    gone = "its pod was deleted by a user or with its namespace"
    assert seen(None, running) == (State.FAILED, None, gone)
    assert seen(None, running, replaced=True)[0] is State.PENDING
    late = "SIGKILL: it did not stop within stop_grace"
    assert seen(None, running, removed_by_clusterkit=True) == (State.CANCELLED, None, late)
    unborn = document("Pending")
    assert seen(None, unborn, removed_by_clusterkit=True) == (
        State.CANCELLED,
        None,
        "it had not begun",
    )
    assert seen(None, removed_by_clusterkit=True) == (State.CANCELLED, None, "it had not begun")


def test_replaced_pod_fails_node_unless_pods_are_replaceable():
    before, now = document(state=RUNS), document(state=RUNS, uid="u2")
    assert seen(now, before) == (State.FAILED, None, "its pod was replaced: it was deleted")
    assert seen(now, before, replaced=True) == (State.RUNNING, None, None)


LEAVING = {"deletionTimestamp": AT}
TAINTED = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
STOPPED = words_of(143, "stopped on request")
REMOVED = "its pod was removed; another pod replaces it"


@pytest.mark.parametrize(
    "told",
    [
        document(state=RUNS, meta=LEAVING),
        document("Failed", ended(143, STOPPED), meta=LEAVING),
        document("Failed", ended(143, STOPPED)),
        document("Failed", ended(137), meta=LEAVING),
        document("Failed", ended(143), meta=LEAVING),
    ],
)
def test_rejoining_node_is_pending_until_removed_pod_is_replaced(told):
    assert seen(told, rejoin=GOES_ON) == (State.PENDING, None, REMOVED)
    assert seen(None, told, rejoin=GOES_ON) == (State.PENDING, None, REMOVED)
    now = document(state=RUNS, uid="u2")
    assert seen(now, told, rejoin=GOES_ON) == (State.RUNNING, None, None)


def test_rejoining_node_is_pending_when_pod_vanished():
    before = document(state=RUNS)
    assert seen(None, before, rejoin=GOES_ON) == (State.PENDING, None, REMOVED)
    assert seen(None, None, rejoin=GOES_ON) == (State.PENDING, None, None)


@pytest.mark.parametrize(
    ("told", "code"),
    [
        (document("Failed", ended(7, words_of(7))), 7),
        (document("Failed", ended(1, words_of(137))), 137),
        (document("Failed", ended(69, "the name x did not resolve\n")), 69),
        (document("Failed", ended(128, "no such file", "StartError")), 128),
        (document("Failed", ended(137, "", "OOMKilled")), 137),
        (document("Failed", ended(137), reason="DeadlineExceeded"), 137),
        (document("Failed", ended(143, STOPPED), reason="DeadlineExceeded"), 143),
    ],
)
def test_failed_pod_fails_node_despite_rejoin(told, code):
    for pods in ((told, None), (None, told)):
        assert seen(*pods, rejoin=GOES_ON)[:2] == (State.FAILED, code)


def test_succeeded_pod_stays_succeeded_after_deletion():
    done = document("Succeeded", ended(0, words_of(0)), meta=LEAVING)
    assert seen(done, rejoin=GOES_ON)[:2] == (State.SUCCEEDED, 0)
    assert seen(None, done, rejoin=GOES_ON)[:2] == (State.SUCCEEDED, 0)


def test_pod_on_lost_node_is_replaced_or_status_names_delete_command():
    told = document(state=RUNS, conditions=[TAINTED], meta=LEAVING)
    silent = "NotReady: node node-1 of the cluster does not answer"
    assert seen(told, lost=True, rejoin=GOES_ON) == (
        State.PENDING, None, f"{silent}; another pod replaces it",
    )  # fmt: skip
    state, _, words = seen(told, lost=True, rejoin=Rejoin(forced=False))
    assert state is State.PENDING
    assert words == (
        f"{silent} (replace_lost: false): kubectl delete pod r-worker-0 --force --grace-period=0 "
        "has another pod replace it"
    )


def test_rejoining_node_is_cancelled_when_clusterkit_removed_pod():
    told = document("Failed", ended(143, STOPPED), meta=LEAVING)
    assert seen(told, rejoin=GOES_ON, removed_by_clusterkit=True)[0] is State.CANCELLED


def test_pod_record_reads_older_pods_json():
    pod = read_pod(document("Pending", waiting("InvalidImageName"), conditions=[SCHEDULED]), INDEX)
    written = msgspec.to_builtins(pod)
    assert (written["words"], written["hopeless"]) == (
        "InvalidImageName: a/b:1 is not the name of an image",
        True,
    )
    assert {"last_words", "silent_since", "limit", "state", "held"} <= set(written)
    assert msgspec.convert(written, Pod) == pod
    old = {**written, "leaving": True, "gone": "deleted", "lost": False}
    assert msgspec.convert(old, Pod) == pod


def test_by_node_takes_newest_pod_of_node():
    old = read_pod(document(meta={"name": "b", "creationTimestamp": AT}), INDEX)
    new = read_pod(document(meta={"name": "a", "creationTimestamp": "2026-11-22T04:00:01Z"}), INDEX)
    assert by_node([new, old]) == by_node([old, new]) == {0: new}


def test_node_is_cancelled_when_clusterkit_removed_its_pod():
    told = document("Failed", ended(143, words_of(143, "stopped on request")))
    assert seen(told, removed_by_clusterkit=True) == (State.CANCELLED, 143, "stopped on request")


def test_status_names_lost_kubernetes_node():
    told = document(state=RUNS)
    assert seen(told, lost=True) == (
        State.UNKNOWN,
        None,
        "NotReady: node node-1 of the cluster does not answer",
    )
    gone = "NotReady: node node-1 of the cluster does not answer"
    assert seen(None, told, lost=True, removed_by_clusterkit=True) == (State.FAILED, None, gone)


def test_read_pod_gives_worker_no_node_and_launcher_node_0():
    worker = document()
    worker["metadata"]["labels"]["clusterkit/role"] = "worker"
    assert read_pod(worker, INDEX).node is None
    assert read_pod(document(node=7), INDEX).node == 7
    assert read_pod(document(node=7), None).node == 0
    assert read_pod(document(node="x"), INDEX).node is None


@pytest.mark.parametrize(
    "status", [[], None, "text", {"conditions": 3}, {"containerStatuses": [3]}]
)
def test_malformed_pod_status_reads_as_unknown(status):
    told = document()
    told["status"] = status
    assert seen(told)[0] is State.UNKNOWN


def event(reason, message="", **related):
    return {"reason": reason, "message": message, "related": related or None}


def test_cause_from_events_names_preempting_pod():
    other = event("Preempted", kind="Pod", name="urgent", namespace="theirs")
    assert cause_from_events([other, event("Killing", "Stopping container x")], "ours") == (
        "Preempted: by pod urgent of namespace theirs, whose priority is higher"
    )
    own = event("Preempted", kind="Pod", name="urgent", namespace="ours")
    assert cause_from_events([own], "ours") == "Preempted: by pod urgent, whose priority is higher"
    assert cause_from_events([event("Preempted"), event("Killing", name="x")], "ours") is None


def test_cause_from_events_quotes_failed_liveness_probe():
    events = [
        event("Unhealthy", "Readiness probe failed: no"),
        event("Unhealthy", "Liveness probe failed: cat: /tmp/alive: No such file or directory\n"),
        event("Killing", "Stopping container pytorch"),
    ]
    assert cause_from_events(events, "ours") == (
        "Unhealthy: the kubelet killed the container: Liveness probe failed: cat: /tmp/alive: No "
        "such file or directory"
    )
    assert cause_from_events(events[:2], "ours") is None
    assert cause_from_events([events[0], events[2]], "ours") is None


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (document(state=RUNS), False),
        (document("Failed", ended(7, words_of(7))), False),
        (document("Failed", ended(137, reason="OOMKilled")), False),
        (document("Failed", ended(137)), True),
        (document("Failed", ended(143, words_of(143, "stopped on request"))), True),
        (
            document(
                "Failed", ended(143, words_of(143, "stopped on request")),
                meta={"deletionTimestamp": AT},
            ),
            False,
        ),
        (
            document(state=RUNS, conditions=[{
                "type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler",
            }]),
            True,
        ),
    ],
)  # fmt: skip
def test_events_are_needed_only_for_unexplained_or_disrupted_pods(told, expected):
    assert needs_events(read_pod(told, INDEX, T0)) is expected


def worker_and_launcher(launcher, **meta):
    told = document(state=RUNS, node=1, meta=meta)
    told["metadata"]["labels"]["clusterkit/role"] = "worker"
    pods = [read_pod(told, INDEX), read_pod(document(state=launcher), None)]
    return {each.name: each for each in pods}


def test_causes_name_mpi_worker_deleted_before_its_exit():
    """Of which mpirun and gloo only say that a connection broke."""
    before = worker_and_launcher(RUNS)
    found = updated(before, worker_and_launcher(RUNS, **LEAVING), replaceable=False)
    found = updated(found, worker_and_launcher(ended(1, words_of(1)), **LEAVING), replaceable=False)
    (cause,) = causes(found.values())
    assert (cause.words, cause.exit_code) == (f"worker r-worker-1: {DELETED}", 137)
    # Its operator deletes all workers once the launcher has ended.
    over = updated(before, worker_and_launcher(ended(1, words_of(1))), replaceable=False)
    over = updated(over, worker_and_launcher(ended(1, words_of(1)), **LEAVING), replaceable=False)
    assert causes(over.values()) == ()


def test_image_error_stays_known_while_pod_is_removed():
    stuck = document("Pending", waiting("ErrImageNeverPull"), conditions=[SCHEDULED])
    words = seen(stuck)[2]
    for shown in (
        document("Pending", waiting("ContainerCreating"), conditions=[SCHEDULED], meta=LEAVING),
        document("Pending", meta=LEAVING),
        document("Failed", meta=LEAVING),
    ):
        for removed_by_clusterkit in (False, True):
            assert seen(shown, stuck, removed_by_clusterkit=removed_by_clusterkit) == (
                State.FAILED,
                None,
                words,
            )


def test_cause_of_lost_node_hints_kubectl_describe_node():
    pod = read_pod(document(state=RUNS), INDEX)
    pod = msgspec.structs.replace(pod, state=PodState.UNREACHABLE)
    (cause,) = causes([pod])
    assert cause.words == "NotReady: node node-1 of the cluster does not answer"
    assert "kubectl describe node node-1" in cause.hint
