"""Runs of other people and machines: listed by the cluster, and taken up from elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterkit import api
from clusterkit.backends.kubernetes.objects import USER
from clusterkit.errors import BadInput, RunNotFound, Unavailable
from clusterkit.run.status import State
from tests.live import supervisors

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[3]
COUNT = "for i in 1 2 3; do echo line $i of $RANK; done; exec sleep 3600"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Another CLUSTERKIT_HOME and another working folder, as on another machine."""

    def go() -> Path:
        home, folder = tmp_path / "other-home", tmp_path / "other-folder"
        folder.mkdir()
        monkeypatch.setenv("CLUSTERKIT_HOME", str(home))
        monkeypatch.chdir(folder)
        return home

    return go


@pytest.fixture
def taken(kube):
    """Take a run up; ended with the test."""
    found: list[api.Run] = []

    def attach(run: str) -> api.Run:
        found.append(api.attach(run, cluster="k8s", clusters_file=kube.file))
        return found[-1]

    yield attach
    for run in found:
        run.cancel()


def kill_rank(kube, pod: str, command: bytes) -> None:
    """A pod that is deleted would be made anew, and the attempt would go on."""
    script = (
        "import os, pathlib\n"
        "for p in pathlib.Path('/proc').glob('[0-9]*/cmdline'):\n"
        f"    if p.read_bytes().startswith({command!r}):\n"
        "        print('found', flush=True); os.kill(int(p.parent.name), 9)\n"
    )
    assert "found" in kube.kubectl("exec", pod, "--", "python3", "-c", script, check=False)


def texts(run: api.Run) -> list[str]:
    return [line.text for line in run.logs() if line.rank is not None]


@pytest.mark.parametrize("flavor", ["pytorchjob", pytest.param("job", marks=pytest.mark.thorough)])
def test_attach_takes_over_run_from_other_home_with_all_logs(
    flavor, submit, begun, kube, elsewhere, taken
):
    run = begun(submit(COUNT, on={"flavor": flavor}))
    supervisors.kill(run)
    before = sorted(texts(run))
    home = elsewhere()
    with pytest.raises(RunNotFound):
        api.get(run.id)

    if flavor == "job":  # its controller counts the pods that are ready a moment later
        kube.kubectl("wait", f"job/{run.id}", "--for=jsonpath={.status.ready}=2", "--timeout=60s")
    listed = api.runs_of("k8s", clusters_file=kube.file)
    assert [(each.run, each.state, each.here) for each in listed] == [
        (run.id, State.RUNNING, False)
    ]
    assert listed[0].nodes_asked == 2
    # By the beginning of its id.
    found = taken(run.id[:-2])
    assert found.id == run.id
    assert found.path.is_relative_to(home)
    status = found.wait_started(120)
    assert (status.state, status.attempt, len(status.nodes)) == (State.RUNNING, 1, 2)
    heard = set()
    for line in found.logs(follow=True):
        heard.add(line.text)
        if heard >= {f"line {i} of {rank}" for i in (1, 2, 3) for rank in (0, 1)}:
            break
    assert sorted(texts(found)) == before == sorted(
        f"line {i} of {rank}" for i in (1, 2, 3) for rank in (0, 1)
    )  # fmt: skip
    assert [event.text for event in found.events()] == ["attached on this machine in attempt 1"]
    # A second time it is one of this machine's own.
    assert taken(run.id).path == found.path
    assert found.cancel().state is State.CANCELLED
    assert kube.there() == set()


def test_status_is_unknown_in_old_home_after_attached_run_succeeded(
    submit, begun, kube, elsewhere, taken
):
    run = begun(submit("echo here; until [ -e /tmp/go ]; do sleep 0.2; done"))
    supervisors.kill(run)
    elsewhere()
    found = taken(run.id)
    found.wait_started(120)
    for node in (0, 1):
        kube.kubectl("exec", f"{run.id}-worker-{node}", "--", "touch", "/tmp/go")
    assert found.wait(60).state is State.SUCCEEDED
    status = run.status()
    assert status.state is State.UNKNOWN
    assert "attached elsewhere" in status.nodes[0].reason


def test_submit_with_run_id_of_other_home_leaves_that_run_alone(submit, begun, elsewhere, kube):
    first = begun(submit(COUNT))
    there = kube.there()
    elsewhere()
    second = submit(COUNT, run_id=first.id)
    status = second.wait(60)
    assert status.state is State.FAILED
    assert f"made by {status_user(kube, first.id)} at" in (status.failure.cause)
    second.cancel()
    assert kube.there() == there
    assert first.status().state is State.RUNNING


def status_user(kube, run: str) -> str:
    found = kube.kubectl("get", "configmap", run, "-o", "json")
    return json.loads(found)["metadata"]["labels"][USER]


def test_attached_run_has_same_plan_notes_files_and_steps(submit, begun, elsewhere, taken):
    run = begun(submit(COUNT, env={"UGLY": "a 'b' $c\n\"d\""}, args=()))
    supervisors.kill(run)
    old = run.plan
    elsewhere()
    new = taken(run.id).plan
    assert new.notes == old.notes
    assert [file.content() for file in new.files] == [file.content() for file in old.files]
    assert [file.mode for file in new.files] == [file.mode for file in old.files]
    assert [step.argv[:-1] for step in new.steps] == [step.argv[:-1] for step in old.steps]


def test_attached_run_restarts_after_killed_rank(submit, begun, kube, elsewhere, taken):
    run = begun(submit(
        'echo "attempt $CLUSTERKIT_ATTEMPT"; [ $CLUSTERKIT_ATTEMPT != 1 ] || exec sleep 3600',
        restarts=1,
    ))  # fmt: skip
    supervisors.kill(run)
    elsewhere()
    found = taken(run.id)
    found.wait_started(120)
    kill_rank(kube, f"{run.id}-worker-1", b"sleep\0")
    status = found.wait(180)
    assert (status.state, status.attempt) == (State.SUCCEEDED, 2)
    assert sorted(texts(found))[-2:] == ["attempt 2", "attempt 2"]


@pytest.mark.thorough
def test_restart_of_attached_run_uses_project_copied_at_submit(
    kube, elsewhere, taken, tmp_path, monkeypatch
):
    project = tmp_path / "project"
    project.mkdir()
    (project / "main.py").write_text(
        "import os, pathlib, time\n"
        "print(pathlib.Path('note').read_text(), os.environ['CLUSTERKIT_ATTEMPT'], flush=True)\n"
        "time.sleep(3600 if os.environ['CLUSTERKIT_ATTEMPT'] == '1' else 0)\n"
    )
    (project / "note").write_text("not committed")
    monkeypatch.chdir(project)
    run = api.submit(
        ["python", "main.py"], nodes=1, settings=["launcher=forkserver", "restarts=1"],
        **kube.entry(code="copied"),
    )  # fmt: skip
    try:
        next(line for line in run.logs(follow=True) if line.text == "not committed 1")
        supervisors.kill(run)
        elsewhere()
        (project / "note").write_text("changed since")
        found = taken(run.id)
        found.wait_started(120)
        kill_rank(kube, f"{run.id}-worker-0", b"python3\0-u\0main.py\0")
        assert found.wait(180).state is State.SUCCEEDED
        assert texts(found)[-1] == "not committed 2"
    finally:
        run.cancel()


def test_attach_refuses_run_whose_secret_is_not_set(submit, begun, elsewhere, kube, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "hunter2-Zq81")
    run = begun(submit("echo here; exec sleep 3600", secrets=("API_TOKEN",)))
    shown = kube.kubectl("get", "configmaps", "-o", "json")
    assert "hunter2" not in shown
    supervisors.kill(run)
    home = elsewhere()
    monkeypatch.delenv("API_TOKEN")
    with pytest.raises(BadInput, match="API_TOKEN is not set in your environment") as refused:
        api.attach(run.id, cluster="k8s", clusters_file=kube.file)
    assert (
        refused.value.hint == f"a restart of run {run.id} needs this secret: export API_TOKEN=..."
    )
    assert not (home / "runs" / run.id).exists()


def test_attach_refuses_unknown_run_name_and_namespace(kube, elsewhere):
    elsewhere()
    kube.entry()
    assert api.runs_of("k8s", clusters_file=kube.file) == []
    for name in ("last", "nothing-like-it", ""):
        with pytest.raises(RunNotFound, match=f"unknown in namespace {kube.namespace}"):
            api.attach(name, cluster="k8s", clusters_file=kube.file)
    kube.entry(namespace="nowhere-at-all")
    with pytest.raises(RunNotFound):
        api.attach("x", cluster="k8s", clusters_file=kube.file)


def test_listing_runs_without_permission_is_refused_with_hint(kube, elsewhere, tmp_path):
    import yaml

    from tests.live.kubernetes.conftest import KUBECONFIG

    kube.kubectl("create", "serviceaccount", "me")
    config = yaml.safe_load(KUBECONFIG.read_text())
    config["users"][0]["user"] = {"token": kube.kubectl("create", "token", "me").strip()}
    path = tmp_path / "me.conf"
    path.write_text(yaml.safe_dump(config))
    kube.entry(kubeconfig=str(path))
    with pytest.raises(Unavailable, match="cannot be listed") as refused:
        api.runs_of("k8s", clusters_file=kube.file)
    assert "k8s/rbac.yaml" in (refused.value.hint or "")


def test_ls_attach_and_cancel_commands_handle_run_of_other_home(
    submit, begun, kube, elsewhere, monkeypatch
):
    run = begun(submit(COUNT))
    labels = json.loads(kube.kubectl("get", f"pytorchjob/{run.id}", "-o", "json"))["metadata"]
    user = labels["labels"].get(USER)

    def clusterkit(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "clusterkit", *words]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "CLUSTERKIT_CLUSTERS": str(kube.file)}
        return subprocess.run(argv, capture_output=True, text=True, env=env, timeout=120)

    own = clusterkit("ls", "--cluster", "k8s")
    assert own.stdout.splitlines()[1].split()[0] == run.id
    assert own.stdout.rstrip().endswith("this machine")
    supervisors.kill(run)
    elsewhere()
    theirs = clusterkit("ls", "--cluster", "k8s")
    assert theirs.returncode == 0, theirs.stderr
    assert theirs.stdout.split()[-1] == (user or "unknown")
    (listed,) = json.loads(clusterkit("ls", "--cluster", "k8s", "--json").stdout)
    assert (listed["run"], listed["state"], listed["user"]) == (run.id, "RUNNING", user)
    assert (listed["here"], listed["nodes_asked"]) == (False, 2)
    taken = clusterkit("attach", "last", "--cluster", "k8s", "--detach")
    assert (taken.returncode, taken.stdout) == (0, f"{run.id}\n"), taken.stderr
    ended = clusterkit("cancel", "last")
    assert (ended.returncode, ended.stdout) == (0, f"{run.id} CANCELLED\n"), ended.stderr
    assert clusterkit("attach", "x", "--cluster", "k8s").returncode == 125
