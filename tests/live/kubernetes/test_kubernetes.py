"""Runs on a real Kubernetes: what ranks see, losses, faults; and nothing left of any of them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from clusterkit import api
from clusterkit.errors import BadInput, Unavailable
from clusterkit.run.status import State
from tests.conftest import UGLY
from tests.live import inside, supervisors
from tests.live.kubernetes.conftest import KUBECONFIG, api_up, cluster

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]
FOREVER = "echo here; exec sleep 3600"
NAMES = (
    "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT", "CLUSTERKIT_RUN_ID", "EXPANDED", *UGLY,
)  # fmt: skip
DUMP = f"""exec python3 -c '
import json, os
env = {{name: value for name, value in os.environ.items() if name in {json.dumps(NAMES)}}}
env["HOST"] = os.uname().nodename
env["PET"] = [name for name in os.environ if name[:4] == "PET_"]
print(json.dumps(env))'"""


def seen(run):
    """The environment of each rank."""
    return {
        line.rank: json.loads(line.text) for line in run.logs() if line.text.startswith('{"')
    }  # fmt: skip


# ---------------------------------------------------------------- what ranks see


@pytest.mark.parametrize(
    ("flavor", "launcher"),
    [
        ("pytorchjob", "forkserver"), ("job", "forkserver"), ("trainjob", "forkserver"),
        ("jobset", "forkserver"), ("mpijob", "mpirun"),
        # Of it the losses are compared below.
        pytest.param("mpijob", "deepspeed", marks=pytest.mark.thorough),
    ],
)  # fmt: skip
def test_every_kind_of_job_gives_ranks_all_environment_variables(flavor, launcher, submit):
    run = submit(
        DUMP, on={"flavor": flavor}, launcher=launcher, gpus_per_node=2,
        env={**UGLY, "EXPANDED": "$(HOME) $$(HOME) $$"},
    )  # fmt: skip
    assert run.wait(120).state is State.SUCCEEDED, run.status()
    ranks = seen(run)
    assert sorted(ranks) == [0, 1, 2, 3]
    for rank, env in ranks.items():
        expected = {
            "RANK": str(rank), "LOCAL_RANK": str(rank % 2), "NODE_RANK": str(rank // 2),
            "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500",
            "MASTER_ADDR": run.plan.address, "CLUSTERKIT_RUN_ID": run.id,
            "EXPANDED": "$(HOME) $$(HOME) $$",
        }  # fmt: skip
        assert {name: env.get(name) for name in expected} == expected
        # mpirun's own daemons do not carry newlines.
        carried = {k: v for k, v in UGLY.items() if flavor != "mpijob" or "\n" not in v}
        assert {name: env.get(name) for name in carried} == carried
        assert env["PET"] == []
    assert len({env["HOST"] for env in ranks.values()}) == 2


def test_secret_value_is_in_kubernetes_secret_only(submit, begun, kube, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "hunter2-Zq81")
    run = begun(submit('echo "$API_TOKEN" | rev; exec sleep 3600', secrets=("API_TOKEN",)))
    assert {line.text for line in run.logs() if line.rank is not None} == {"18qZ-2retnuh"}
    shown = kube.kubectl("get", "pods,configmaps,pytorchjobs", "-o", "json")
    assert "API_TOKEN" in shown
    assert "hunter2" not in shown
    assert f"secret/{run.id}" in kube.there()
    for path in run.path.rglob("*"):
        assert not path.is_file() or b"hunter2" not in path.read_bytes()


# ---------------------------------------------------------------- losses


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Losses of the same jobs on this machine, of a text that both have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLUSTERKIT_HOME", str(tmp_path_factory.mktemp("reference")))
        run = api.submit(ROOT / "jobs" / "ddp.yaml", nodes=1, gpus=4, more_args=STEPS)
        assert run.wait(300).state is State.SUCCEEDED
        return losses(run)


STEPS = ("--data", "jobs/data/reviews.csv", "--steps", "8")


def losses(run):
    return [metric["loss"] for metric in run.metrics() if "loss" in metric]


@pytest.mark.parametrize(
    ("flavor", "name", "launcher"),
    [
        # With ddp, torchrun and a PyTorchJob test_rejoin.py shows it.
        ("mpijob", "zero3", "deepspeed"),
        pytest.param("pytorchjob", "zero2", "deepspeed", marks=pytest.mark.thorough),
        pytest.param("trainjob", "ddp", "torchrun", marks=pytest.mark.thorough),
        pytest.param("job", "ddp", "torchrun", marks=pytest.mark.thorough),
        pytest.param("pytorchjob", "ddp", "torchrun", marks=pytest.mark.thorough),
        pytest.param("pytorchjob", "zero3", "torchrun", marks=pytest.mark.thorough),
        pytest.param("mpijob", "zero2", "mpirun", marks=pytest.mark.thorough),
        pytest.param("pytorchjob", "zero0", "torchrun", marks=pytest.mark.thorough),
        pytest.param("pytorchjob", "zero1", "torchrun", marks=pytest.mark.thorough),
    ],
)  # fmt: skip
def test_losses_in_cluster_match_local_run(flavor, name, launcher, kube, reference):
    run = api.submit(
        ROOT / "jobs" / f"{name}.yaml", nodes=2, gpus=2, more_args=STEPS,
        settings=(f"launcher={launcher}",),
        **kube.entry(flavor=flavor, shm_size="256Mi"),
    )  # fmt: skip
    try:
        assert run.wait(300).state is State.SUCCEEDED, run.status()
    finally:
        run.cancel()
    assert len(reference) == 8
    assert losses(run) == pytest.approx(reference, abs=2e-6)


def test_mpirun_runs_program_of_copied_project(kube, tmp_path, monkeypatch):
    project = tmp_path / "project"
    project.mkdir()
    (project / "main.py").write_text("import os; print('rank', os.environ['RANK'])\n")
    monkeypatch.chdir(project)
    run = api.submit(
        ["python", "main.py"], nodes=2, settings=["launcher=mpirun"], **kube.entry(code="copied")
    )
    try:
        assert run.wait(120).state is State.SUCCEEDED, run.status()
        assert sorted(x.text for x in run.logs() if x.rank is not None) == ["rank 0", "rank 1"]
    finally:
        run.cancel()


# ---------------------------------------------------------------- by hand


def test_readme_kubectl_commands_train_to_end(kube, tmp_path):
    folder = tmp_path / "k8s"
    shutil.copytree(ROOT / "k8s", folder)
    manifest = folder / "pytorchjob.yaml"
    manifest.write_text(manifest.read_text().replace('"200"', '"12"'))
    chosen = folder / "kustomization.yaml"
    chosen.write_text(chosen.read_text().replace("components: []", "components: [overlays/cpu]"))
    kube.kubectl("apply", "-k", str(folder))
    kube.kubectl("wait", "pytorchjob/ddp", "--for=condition=Succeeded", "--timeout=240s")
    log = kube.kubectl("logs", "-f", "ddp-worker-0") + kube.kubectl("logs", "-f", "ddp-worker-1")
    assert [int(step) for step in re.findall(r'"metrics", "step": (\d+)', log)] == [*range(1, 13)]
    kube.kubectl("delete", "-k", str(folder))
    kube.kubectl("wait", "pods", "--all", "--for=delete", "--timeout=60s", check=False)


# ---------------------------------------------------------------- faults


def failed(run, seconds=120):
    status = run.wait(seconds)
    assert status.state is State.FAILED, status
    assert status.failure is not None
    return status.failure


@pytest.mark.parametrize(
    ("flavor", "launcher"),
    [
        # The command line is told the same below.
        pytest.param("pytorchjob", "forkserver", marks=pytest.mark.thorough),
        ("mpijob", "mpirun"),
        pytest.param("mpijob", "deepspeed", marks=pytest.mark.thorough),
    ],
)
def test_failed_rank_ends_run_with_its_exit_code(flavor, launcher, submit):
    script = "[ $RANK = 1 ] && exit 7; exec sleep 3600"
    failure = failed(submit(script, on={"flavor": flavor}, launcher=launcher))
    assert (failure.node, failure.rank, failure.exit_code) == (1, 1, 7)


def test_cancel_of_deepspeed_mpijob_removes_all_objects(submit, begun, kube):
    run = begun(submit(FOREVER, on={"flavor": "mpijob"}, launcher="deepspeed"))
    assert run.cancel().state is State.CANCELLED
    assert kube.there() == set()


@pytest.mark.thorough  # test_restarts.py kills one twice
def test_status_names_killed_rank_and_signal(submit, begun, kube):
    run = begun(submit(FOREVER))
    script = (
        "import os, pathlib\n"
        "for p in pathlib.Path('/proc').glob('[0-9]*/cmdline'):\n"
        "    if p.read_bytes().startswith(b'sleep\\0'): os.kill(int(p.parent.name), 9)\n"
    )
    kube.kubectl("exec", f"{run.id}-worker-1", "--", "python3", "-c", script, check=False)
    failure = failed(run)
    assert (failure.node, failure.rank, failure.exit_code) == (1, 1, 137)
    assert "SIGKILL" in failure.cause


def test_status_names_node_of_deleted_pod(submit, begun, kube):
    run = begun(submit(FOREVER))
    kube.kubectl("delete", "pod", f"{run.id}-worker-1", "--wait=false")
    failure = failed(run)
    assert (failure.node, failure.cause) == (
        1, "its pod was deleted by a user or by the cluster",
    )  # fmt: skip


def test_status_distinguishes_drained_node_from_deleted_pod(submit, begun, kube):
    run = begun(submit(FOREVER))
    node = run.status().nodes[0].host
    try:
        kube.kubectl(
            "drain", node, "--force", "--ignore-daemonsets", "--delete-emptydir-data",
            "--pod-selector", f"clusterkit/run={run.id}",
        )  # fmt: skip
        assert failed(run).cause == "Evicted: its node is being drained"
    finally:
        kube.kubectl("uncordon", node)


def test_status_names_node_over_memory_limit(submit):
    run = submit(
        "[ $RANK = 1 ] && exec python3 -c 'x = [bytearray(10**7) for _ in range(10**4)]'; "
        "exec sleep 3600",
        on={"memory": "200Mi"},
    )
    failure = failed(run)
    assert failure.node == 1
    assert failure.cause.endswith("used more than its memory limit of 200Mi")


@pytest.mark.parametrize(
    ("on", "words"),
    [
        ({"cpus": 64}, r"Unschedulable: 0/2 nodes are available: 2 Insufficient cpu"),
        ({"volumes": [{"claim": "none", "path": "/x"}]}, r'persistentvolumeclaim "none"'),
        ({"image": "nowhere.example/no:1"}, r"ImagePullBackOff: image nowhere.example/no:1 cannot"),
    ],
    ids=["too-large", "no-volume", "no-image"],
)
def test_status_says_why_pods_are_pending_and_cancel_ends_run(on, words, submit):
    run = submit(FOREVER, on=on)
    status = run.wait(
        60, until=lambda s: all(n.reason and re.search(words, n.reason) for n in s.nodes or [None])
        if s.nodes else False,
    )  # fmt: skip
    assert status.state is State.PENDING
    assert run.cancel().state is State.CANCELLED


@pytest.mark.parametrize(
    "flavor",
    ["mpijob", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("pytorchjob", "job"))],
)
def test_status_names_image_that_cannot_be_pulled_as_failure_cause(flavor, submit):
    on = {"image": "nowhere.example/no:1", "image_pull_policy": "Never", "flavor": flavor}
    launcher = "mpirun" if flavor == "mpijob" else "forkserver"
    found = failed(submit(FOREVER, on=on, launcher=launcher))
    assert "image nowhere.example/no:1 cannot be pulled: it is not on the node" in found.cause


@pytest.mark.parametrize(("flavor", "pods"), [("pytorchjob", 0), ("job", 1)])
def test_status_of_pending_pod_names_quota(flavor, pods, submit, kube):
    kube.kubectl("create", "quota", "none", f"--hard=pods={pods}")
    run = submit(FOREVER, on={"flavor": flavor}, doctor=False)  # which refuses the first
    status = run.wait(60, until=lambda s: any("quota" in (n.reason or "") for n in s.nodes))
    assert State.PENDING in {node.state for node in status.nodes}
    run.cancel()
    kube.kubectl("delete", "quota", "none")


def test_run_survives_api_server_outage_without_losing_log_lines(submit, begun, kube):
    run = begun(submit("for i in $(seq 30); do echo tick $i; sleep 1; done"))
    cluster("api", "down")
    try:
        status = run.wait(20, until=lambda s: all("does not answer" in str(n) for n in s.nodes))
        assert status.state is State.RUNNING
    finally:
        api_up()
    assert run.wait(120).state is State.SUCCEEDED
    for rank in (0, 1):
        ticks = [line.text for line in run.logs(rank=rank) if line.text.startswith("tick")]
        assert ticks == [f"tick {i}" for i in range(1, 31)]


def test_run_survives_killed_supervisor_and_can_be_attached(submit, begun):
    run = begun(submit(FOREVER))
    supervisors.kill(run)
    status = run.wait(20, until=lambda s: bool(s.remark))
    assert (status.state, "attach" in (status.remark or "")) == (State.RUNNING, True)
    run.attach()
    assert run.status().state is State.RUNNING
    assert run.cancel().state is State.CANCELLED


def test_cancel_removes_all_objects_and_is_repeatable(submit, begun, kube):
    run = begun(submit(FOREVER))
    assert kube.there()
    for _ in range(2):
        assert run.cancel().state is State.CANCELLED
    assert kube.there() == set()


def test_deleted_pytorchjob_ends_run_as_cancelled(submit, begun, kube):
    run = begun(submit(FOREVER))
    kube.kubectl("delete", "pytorchjob", run.id)
    status = run.wait(120)
    assert (status.state, status.failure) == (State.CANCELLED, None), status
    assert f"PyTorchJob {run.id} was deleted by a user" in (status.remark or "")


# ---------------------------------------------------------------- bad input, and rights


@pytest.mark.parametrize(
    ("on", "error", "words"),
    [
        ({"namespace": "nowhere"}, BadInput, "namespace: the cluster has no nowhere"),
        ({"context": "nowhere"}, BadInput, "has no context 'nowhere'"),
        ({"kubeconfig": "/nowhere"}, BadInput, "kubeconfig: there is no /nowhere"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_submit_refuses_unknown_namespace_context_or_kubeconfig(on, error, words, submit, own_home):
    with pytest.raises(error, match=words):
        submit(FOREVER, on=on)
    assert not list(own_home.glob("runs/*"))


def kubeconfig(file, *, server=None, user=None):
    """The admin's, with another server or other credentials."""
    config = yaml.safe_load(KUBECONFIG.read_text())
    if server is not None:
        config["clusters"][0]["cluster"]["server"] = server
    if user is not None:
        config["users"][0]["user"] = user
    file.write_text(yaml.safe_dump(config))
    return str(file)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"server": "https://127.0.0.1:1"}, Unavailable, "127.0.0.1:1 does not answer: .*refused"),
        ({"user": {"token": "expired"}}, Unavailable, "does not accept your credentials"),
        ({"user": {}}, Unavailable, "you may not create"),
        (None, BadInput, "kubeconfig: .* cannot be read"),
    ],
    ids=["away", "expired", "nobody", "broken"],
)
def test_submit_refuses_kubeconfig_without_usable_access(changes, error, words, submit, tmp_path):
    file = tmp_path / "kubeconfig"
    if changes is None:
        file.write_text("{broken: [")
    else:
        kubeconfig(file, **changes)
    with pytest.raises(error, match=words):
        submit(FOREVER, on={"kubeconfig": str(file)})


def test_rbac_role_allows_submit_and_cancel_but_no_more(submit, begun, kube, tmp_path):
    kube.kubectl("apply", "-f", str(ROOT / "k8s" / "rbac.yaml"))
    kube.kubectl("create", "serviceaccount", "me")
    kube.kubectl(
        "create", "rolebinding", "me", "--role=clusterkit-submitter",
        f"--serviceaccount={kube.namespace}:me",
    )  # fmt: skip
    token = kube.kubectl("create", "token", "me").strip()
    mine = kubeconfig(tmp_path / "mine", user={"token": token})
    flavors = ("pytorchjob", "job", "trainjob", "jobset")
    for run in [
        submit(FOREVER, restarts=1, on={"kubeconfig": mine, "flavor": each}) for each in flavors
    ]:
        assert begun(run).cancel().state is State.CANCELLED
    kubectl = ["auth", "can-i", "--as", f"system:serviceaccount:{kube.namespace}:me"]
    for words in (("get", "secrets"), ("create", "pods"), ("bind", "roles"), ("list", "nodes")):
        assert kube.kubectl(*kubectl, *words, check=False).strip().startswith("no")


def test_submit_command_follows_run_and_returns_its_exit_code(kube, own_home):
    kube.entry()
    done = subprocess.run(
        [sys.executable, "-m", "clusterkit", "submit", "--cluster", "k8s", "--cluster-file",
         str(kube.file), "--nodes", "2", "--", "sh", "-c",
         "echo here is $RANK; exit $((RANK * 5))"],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 5, done.stderr
    assert "here is 1" in done.stderr
    assert api.get(done.stdout.strip()).status().state is State.FAILED


# ---------------------------------------------------------------- other containers in its pods

RESTRICTED = {
    "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]},
}  # fmt: skip


def sidecar(name, script, **more):
    return {
        "name": name, "image": "clusterkit:cpu", "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", script], "securityContext": RESTRICTED, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flavor", "launcher"),
    [
        ("pytorchjob", "forkserver"), ("mpijob", "mpirun"),
        pytest.param("job", "forkserver", marks=pytest.mark.thorough),
        pytest.param("trainjob", "forkserver", marks=pytest.mark.thorough),
        pytest.param("jobset", "forkserver", marks=pytest.mark.thorough),
    ],
)  # fmt: skip
def test_sidecars_neither_end_run_nor_keep_run_alive(flavor, launcher, submit, kube):
    """Statuses are sorted by name, so that of ``a-done`` comes before the node's own."""
    # A worker of an MPIJob counts as ready only while all of its containers run.
    done = "exit 0" if launcher != "mpirun" else "exec sleep 3600"
    patch = {
        "containers": [sidecar("a-done", done), sidecar("zz-forever", "exec sleep 3600")],
        "initContainers": [
            sidecar("b-native", "exec sleep 3600", restartPolicy="Always"),
        ],
    }
    beats = "for i in 1 2 3 4 5 6 7 8; do echo beat $i; sleep 1; done"
    run = submit(beats, launcher=launcher, on={"flavor": flavor, "patch": patch})
    assert run.wait(240).state is State.SUCCEEDED, run.status()
    texts = [line.text for line in run.logs() if line.rank is not None]
    assert texts.count("beat 8") == run.plan.world_size
    assert kube.there() == set()


def test_commands_inside_pods(begun, submit, tmp_path):
    run = begun(submit(FOREVER))
    inside.exec_works(run)
    inside.files_are_copied(run, tmp_path)
    inside.port_is_forwarded(run)
    run.cancel()
    inside.refused_after_end(run)
