"""What goes wrong on a real cluster, with what is said of it and how it ends; nothing is left."""

from __future__ import annotations

import json
import re
import threading
import time

import pytest
import yaml

from clusterkit import api
from clusterkit.errors import BadInput, CapabilityError
from clusterkit.run.status import State
from clusterkit.spec import JobSpec
from tests.conftest import noted
from tests.live.kubernetes.conftest import KUBECONFIG, ROOT, api_up, cluster, mend
from tests.live.kubernetes.test_kubernetes import FOREVER, failed

pytestmark = [pytest.mark.live, pytest.mark.thorough, pytest.mark.timeout(600)]
OPERATORS = {
    "pytorchjob": ("kubeflow", "training-operator"),
    "mpijob": ("mpi-operator", "mpi-operator"),
}


@pytest.fixture
def operator(kube):
    """``operator("mpijob", 0)``: so many pods of the operator; one again when the test is over."""
    changed = set()

    def scale(flavor: str, pods: int) -> None:
        namespace, name = OPERATORS[flavor]
        changed.add(flavor)
        where = ("-n", namespace)
        kube.kubectl(*where, "scale", f"deployment/{name}", f"--replicas={pods}")
        if pods:
            kube.kubectl(*where, "rollout", "status", f"deployment/{name}", "--timeout=120s")
        else:
            kube.kubectl(*where, "wait", "pods", "--all", "--for=delete", "--timeout=60s")

    yield scale
    for flavor in changed:
        scale(flavor, 1)


# ---------------------------------------------------------------- nodes


@pytest.mark.parametrize(("fault", "remedy"), [("crash", "restore"), ("cut", "join")])
def test_status_names_lost_cluster_node_and_its_pods_are_removed(
    fault, remedy, submit, begun, kube
):
    cluster("status")  # it is ours
    # Two of these do not fit on one node.
    run = begun(submit(FOREVER, on={"lost_after": 5.0, "cpus": 1.1}))
    (lost,) = (each.node for each in run.status().nodes if each.host == "node-2")
    try:
        cluster(fault, "node-2")
        failure = failed(run)
        assert failure.node == lost
        assert failure.cause == "NotReady: node node-2 of the cluster does not answer"
        assert kube.kubectl("get", "pods", "-o", "name") == ""
    finally:
        mend(remedy, kube)


# ---------------------------------------------------------------- operators


def test_run_survives_loss_of_its_operator_and_succeeds(submit, begun, kube, operator):
    run = begun(submit('echo here; while [ ! -e "$HOME/go" ]; do sleep 0.2; done'))
    operator("pytorchjob", 0)
    assert run.status().state is State.RUNNING
    for node in (0, 1):
        kube.kubectl("exec", f"{run.id}-worker-{node}", "--", "touch", "/tmp/go")
    assert run.wait(60).state is State.SUCCEEDED


def test_submit_succeeds_while_operator_pod_is_replaced(submit, kube):
    namespace, name = OPERATORS["pytorchjob"]
    kube.kubectl("-n", namespace, "delete", "pods", "--all", "--wait=false")
    try:
        assert submit("echo here").wait(120).state is State.SUCCEEDED
    finally:
        kube.kubectl("-n", namespace, "rollout", "status", f"deployment/{name}")


@pytest.mark.parametrize("flavor", ["mpijob", "pytorchjob"])
def test_status_names_absent_operator_within_15_seconds(flavor, submit, operator):
    operator(flavor, 0)
    launcher = "mpirun" if flavor == "mpijob" else "forkserver"
    run = submit(FOREVER, launcher=launcher, on={"flavor": flavor})
    start = time.monotonic()
    status = run.wait(60, until=lambda s: any("operator" in (n.reason or "") for n in s.nodes))
    assert time.monotonic() - start < 15
    if flavor == "mpijob":
        assert status.state is State.PENDING
        assert "is its operator running?" in (status.nodes[0].reason or "")
        assert run.cancel().state is State.CANCELLED
    else:
        # This one is asked by the API server before it takes a job.
        assert status.state is State.FAILED
        assert status.failure is not None
        assert re.search(
            r'no endpoints available for service "training-operator"'
            r"|failed to call webhook: Post .*training-operator.*deadline exceeded",
            status.failure.cause,
        )


# ---------------------------------------------------------------- pods that are taken away


def test_status_names_pod_that_preempted_run(submit, begun, kube):
    priority = f"urgent-{kube.namespace}"
    kube.kubectl("create", "priorityclass", priority, "--value=1000")
    try:
        # Two of these do not fit on one node, and nothing else of this size does.
        run = begun(submit(FOREVER, on={"cpus": 1.1}))
        security = yaml.safe_load((ROOT / "k8s" / "job.yaml").read_text().split("---\n")[1])
        spec = security["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        pod = {
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "urgent"},
            "spec": {
                "priorityClassName": priority, "securityContext": spec["securityContext"],
                "restartPolicy": "Never",
                "containers": [{
                    "name": "main", "image": "clusterkit:cpu", "command": ["sleep", "3600"],
                    "securityContext": container["securityContext"],
                    "resources": {"requests": {"cpu": "1.1"}},
                }],
            },
        }  # fmt: skip
        file = run.path / "urgent.json"
        file.write_text(json.dumps(pod))
        kube.kubectl("create", "-f", str(file))
        failure = failed(run)
        assert failure.cause == "Preempted: by pod urgent, whose priority is higher"
        kube.kubectl("delete", "pod", "urgent", "--grace-period=0", "--force")
    finally:
        kube.kubectl("delete", "priorityclass", priority)


def test_status_names_liveness_probe_that_failed(submit):
    probe = {"exec": {"command": ["cat", "/tmp/alive"]}, "periodSeconds": 1, "failureThreshold": 1}
    patch = {"containers": [{"name": "pytorch", "livenessProbe": probe}]}
    failure = failed(submit("touch /tmp/alive; sleep 5; rm /tmp/alive; exec sleep 3600",
                            on={"patch": patch}))  # fmt: skip
    assert failure.cause.startswith(
        "Unhealthy: the kubelet killed the container: Liveness probe failed: cat: /tmp/alive: No "
    )


def test_status_names_eviction_over_ephemeral_storage_limit(submit):
    script = "[ $RANK = 1 ] && head -c 60M /dev/zero >/tmp/big; exec sleep 3600"
    failure = failed(submit(script, on={"resources": {"ephemeral-storage": "20Mi"}}))
    assert failure.node == 1
    assert re.match(r"Evicted.*ephemeral local storage.*20Mi", failure.cause), failure


def test_deleted_namespace_ends_run_as_cancelled(submit, begun, kube):
    other = f"{kube.namespace}-gone"
    kube.kubectl("create", "namespace", other)
    run = begun(submit(FOREVER, on={"namespace": other}))
    kube.kubectl("delete", "namespace", other)
    status = run.wait(120)
    assert (status.state, status.failure) == (State.CANCELLED, None), status
    assert status.remark == f"its namespace, {other}, is being deleted"


# ---------------------------------------------------------------- what a run waits for


def test_status_of_pending_run_names_unbound_volume_claim(submit, kube):
    claim = {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "huge"},
        "spec": {
            "accessModes": ["ReadWriteMany"], "storageClassName": "shared",
            "resources": {"requests": {"storage": "900Ti"}},
        },
    }  # fmt: skip
    file = kube.file.with_name("claim.json")
    file.write_text(json.dumps(claim))
    kube.kubectl("create", "-f", str(file))
    run = submit(FOREVER, on={"volumes": [{"claim": "huge", "path": "/x"}]})
    status = run.wait(
        60, until=lambda s: bool(s.nodes) and all("Claim" in (n.reason or "") for n in s.nodes)
    )
    assert status.state is State.PENDING
    assert "unbound immediate PersistentVolumeClaims" in (status.nodes[0].reason or "")
    assert run.cancel().state is State.CANCELLED
    kube.kubectl("delete", "pvc", "huge")


def test_status_of_pending_mpijob_names_insufficient_cpu(submit):
    run = submit(FOREVER, launcher="mpirun", on={"cpus": 64})
    status = run.wait(30, until=lambda s: "Insufficient cpu" in str(s.nodes))
    assert status.state is State.PENDING
    assert run.cancel().state is State.CANCELLED


# ---------------------------------------------------------------- credentials, the API server


def test_run_with_rejected_token_ends_and_keeps_logs_after_new_login(submit, begun, kube, tmp_path):
    kube.kubectl("apply", "-f", str(ROOT / "k8s" / "rbac.yaml"))
    mine = tmp_path / "mine"

    def log_in() -> None:
        kube.kubectl("create", "serviceaccount", "me")
        config = yaml.safe_load(KUBECONFIG.read_text())
        config["users"][0]["user"] = {"token": kube.kubectl("create", "token", "me").strip()}
        mine.write_text(yaml.safe_dump(config))

    kube.kubectl(
        "create", "rolebinding", "me", "--role=clusterkit-submitter",
        f"--serviceaccount={kube.namespace}:me",
    )  # fmt: skip
    log_in()
    run = submit(
        'echo here; while [ ! -e "$HOME/go" ]; do sleep 0.2; done; echo over',
        on={"kubeconfig": str(mine)},
    )
    begun(run)
    # A token is worth nothing without its service account; one that expires takes 10 minutes.
    kube.kubectl("delete", "serviceaccount", "me")
    refused_at = time.monotonic() + 60
    while "logged in" not in mine_says(kube, mine):
        assert time.monotonic() < refused_at  # the API server remembers a good one for 10 s
    for node in (0, 1):
        kube.kubectl("exec", f"{run.id}-worker-{node}", "--", "touch", "/tmp/go")
    # The watch of its pods was let in before, and tells of their end; nothing more may be asked.
    status = run.wait(60)
    assert status.state is State.SUCCEEDED
    assert "does not accept your credentials" in (status.remark or "")
    log_in()
    assert run.cancel().remark is None
    # What was not heard while nothing might be asked was brought before the pods went.
    assert [line.text for line in run.logs() if line.text == "over"] == ["over"] * 2


def mine_says(kube, file):
    return kube.kubectl("--kubeconfig", str(file), "get", "pods", check=False)


def test_submit_waits_for_api_server_that_is_down_for_20_seconds(kube):
    job = JobSpec(name="live", command=("sh", "-c", "echo here"), nodes=2, launcher="forkserver")
    # A kind of job that no operator keeps: those take a minute to come back by themselves.
    ready = api.prepare(job, **kube.entry(flavor="job"))
    cluster("api", "down")
    back = threading.Timer(20, cluster, ("api", "up"))
    back.start()
    try:
        run = api.launch(ready)
    finally:
        back.join()
    up = time.monotonic()
    steps = run.path / "steps.jsonl"
    # When the pods come is up to the cluster, whose controllers take up to a minute after this.
    count = len(ready.plan.steps)
    run.wait(60, until=lambda _: steps.exists() and steps.read_text().count("answered") == count)
    assert time.monotonic() - up < 15
    run.cancel()
    assert run.wait(180).state is State.CANCELLED
    api_up()


# ---------------------------------------------------------------- submits and cancels


def test_concurrent_submits_do_not_interfere(kube):
    entry = kube.entry()
    runs: list[api.Run] = []

    def start() -> None:
        job = JobSpec(name="live", command=("sh", "-c", "echo $CLUSTERKIT_RUN_ID"), nodes=2,
                      launcher="forkserver")  # fmt: skip
        runs.append(api.submit(job, **entry))

    threads = [threading.Thread(target=start) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len({run.id for run in runs}) == 2
    for run in runs:
        assert run.wait(120).state is State.SUCCEEDED
        assert {line.text for line in run.logs() if line.rank is not None} == {run.id}


def test_cancel_right_after_submit_removes_all_objects(submit, kube):
    run = submit(FOREVER)
    assert run.cancel().state is State.CANCELLED
    assert kube.there() == set()


def test_cancel_during_cancel_or_after_success_keeps_final_state(submit, begun, kube):
    slow = 'trap "echo asked; sleep 1; exit 0" TERM; echo here; while :; do sleep 0.2; done'
    run = begun(submit(slow))
    first = threading.Thread(target=run.cancel)
    first.start()
    for line in run.logs(follow=True):
        if line.text == "asked":
            break
    assert run.cancel().state is State.CANCELLED
    first.join()
    assert kube.there() == set()
    assert run.cancel().state is State.CANCELLED
    done = submit("echo here")
    assert done.wait(120).state is State.SUCCEEDED
    assert done.cancel().state is State.SUCCEEDED


# ---------------------------------------------------------------- names, bad input


def test_job_name_invalid_in_kubernetes_is_replaced_with_note(submit):
    name = "9_Lives.Of-A-Cat-" + "x" * 60
    run = submit("echo here", name=name)
    assert run.wait(120).state is State.SUCCEEDED, run.status()
    assert noted(run.plan, "name")


@pytest.mark.parametrize(
    ("on", "fields", "error", "words"),
    [
        ({"flavor": "job"}, {"nodes": "2:4", "launcher": "torchrun"}, CapabilityError, "elastic"),
        (
            {"volumes": [{"claim": "a", "path": "/x"}, {"claim": "b", "path": "/x/"}]},
            {}, BadInput, "volumes: two of them on /x",
        ),
        ({"memory": "much"}, {}, BadInput, "memory: 'much' is not an amount"),
        ({"resources": {"rdma/hca": "one"}}, {}, BadInput, "'one' is not an amount"),
        ({"patch": {"container": []}}, {}, BadInput, "patch: container"),
        ({"patch": {"hostNetwork": "yes please"}}, {}, BadInput, "patch: hostNetwork"),
        ({"patch": {"containers": [{"name": "x", "imag": "y"}]}}, {}, BadInput,
         r"patch: containers\[0\].imag"),
    ],
    ids=["elastic", "one-path", "memory", "resource", "unknown", "type", "deep"],
)  # fmt: skip
def test_submit_refuses_invalid_cluster_entry_before_run_is_created(
    on, fields, error, words, submit, own_home
):
    with pytest.raises(error, match=words):
        submit(FOREVER, on=on, **fields)
    assert not list(own_home.glob("runs/*"))


# ---------------------------------------------------------------- security


@pytest.mark.parametrize("flavor", ["pytorchjob", "mpijob", "trainjob", "job"])
def test_pods_hold_no_api_token_show_no_secret_and_run_unprivileged(
    flavor, submit, begun, kube, monkeypatch
):
    monkeypatch.setenv("API_TOKEN", "hunter2-Zq81")
    launcher = "mpirun" if flavor == "mpijob" else "forkserver"
    script = '[ "${#API_TOKEN}" = 12 ] && echo here; exec sleep 3600'
    begun(submit(script, secrets=("API_TOKEN",), launcher=launcher, on={"flavor": flavor}))
    # A watcher speaks with the API server, and has a token for that; it runs nothing of the job.
    pods = kube.kubectl("get", "pods", "-l", "clusterkit/role!=watcher", "-o", "json")
    told = json.loads(pods)["items"]
    assert len(told) == (3 if flavor == "mpijob" else 2)
    assert "hunter2" not in json.dumps(told)
    look = (
        "cat /proc/[0-9]*/cmdline | tr '\\0' ' '; "
        "ls /var/run/secrets/kubernetes.io/serviceaccount 2>&1; id -u"
    )
    for pod in told:
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert "kube-api-access" not in json.dumps(spec["volumes"])
        assert spec["securityContext"]["runAsNonRoot"] is True
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            security = container["securityContext"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
        seen = kube.kubectl("exec", pod["metadata"]["name"], "--", "sh", "-c", look)
        assert "sh" in seen
        assert "hunter2" not in seen
        assert "No such file" in seen
        assert seen.split()[-1] == "1000"
