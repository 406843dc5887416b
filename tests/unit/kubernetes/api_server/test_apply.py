"""How the objects of a run are applied."""

import base64
import json
from types import SimpleNamespace

import pytest
import yaml

from clusterkit.backends.kubernetes.api_server import (
    KubeTransport,
    Unreachable,
)
from clusterkit.backends.kubernetes.apply import (
    Creation,
    all_objects,
    creation_steps,
)
from clusterkit.errors import BadInput, SubmitFailed
from clusterkit.plan import KubernetesNative, PlanFile
from clusterkit.run.folder import OWNS_CLUSTER_OBJECTS


@pytest.fixture
def applied(transport, config):
    """Carry out the steps that create the objects of a folder."""
    native = KubernetesNative(
        kubeconfig=config, context="c", namespace="ns", name="r-1", flavor="job", watched=False
    )

    def run(files, **secrets):
        attempt = secrets.pop("attempt", "1")
        plan = SimpleNamespace(native=native, run_id="r-1", files=files, trees=[])
        creation = Creation(plan, transport)
        for step in creation_steps(all_objects(plan), "ns", tuple(secrets)):
            creation(step, transport, {"CLUSTERKIT_ATTEMPT": attempt, **secrets})

    return run


class File(PlanFile):
    """One that is not text."""

    def content(self):
        return b"\xff\0"


def folder(tmp_path, *objects, ours=True):
    main = {
        "resources": ["manifests.yaml"],
        "configMapGenerator": [{"name": "r-1", "files": ["a.sh", "b.bin"]}],
        "generatorOptions": {"labels": {"clusterkit/run": "r-1", "clusterkit/attempt": "1"}},
    }
    run = tmp_path / "run"
    run.mkdir()
    if ours:
        (run / OWNS_CLUSTER_OBJECTS).touch()
    texts = {
        "a.sh": "echo 🚀 \u2028 $(HOME)\n", "kustomization.yaml": yaml.safe_dump(main),
        "manifests.yaml": yaml.safe_dump_all(objects),
    }  # fmt: skip
    files = [PlanFile(f"{run}/files/{name}", text=text) for name, text in texts.items()]
    return [*files, File(f"{run}/files/b.bin")]


JOB = {
    "apiVersion": "batch/v1", "kind": "Job",
    "metadata": {"name": "r-1", "labels": {"clusterkit/attempt": "1"}},
    "spec": {"template": {"metadata": {"labels": {"clusterkit/attempt": "1"}}}},
}  # fmt: skip


def test_apply_sends_configmap_then_job_and_sets_owner_reference(server, applied, tmp_path):
    applied(folder(tmp_path, JOB))
    first, second, third = server.asked
    assert first[:2] == (
        "PATCH",
        "/api/v1/namespaces/ns/configmaps/r-1?fieldManager=clusterkit&force=true"
        "&fieldValidation=Strict",
    )
    sent = yaml.safe_load(first[2])
    assert sent["data"] == {"a.sh": "echo 🚀 \u2028 $(HOME)\n"}
    assert base64.b64decode(sent["binaryData"]["b.bin"]) == b"\xff\0"
    assert second[1].startswith("/apis/batch/v1/namespaces/ns/jobs/r-1?")
    assert yaml.safe_load(second[2]) == JOB
    assert third[1] == "/api/v1/namespaces/ns/configmaps/r-1"
    assert json.loads(third[2])["metadata"]["ownerReferences"] == [
        {"apiVersion": "batch/v1", "kind": "Job", "name": "r-1", "uid": "the-uid"}
    ]
    headers = {name.lower(): value for name, value in first[3].items()}
    assert headers["authorization"] == "Bearer t0ken"


def _body(asked):
    return yaml.safe_load(asked[2])


def test_apply_creates_run_job_last_as_owner_of_all_objects(server, applied, tmp_path):
    watcher = {**JOB, "metadata": {"name": "r-1-watch"}}
    applied(folder(tmp_path, watcher, JOB))
    names = [asked[1].partition("?")[0].rpartition("/")[2] for asked in server.asked]
    assert (sorted(names[:2]), names[2]) == (["r-1", "r-1-watch"], "r-1")
    assert (sorted(names[3:]), len(names)) == (["r-1", "r-1-watch"], 5)
    assert _body(server.asked[2])["kind"] == "Job"
    for asked in server.asked[3:]:
        (owner,) = _body(asked)["metadata"]["ownerReferences"]
        assert owner["name"] == "r-1"


def test_apply_retries_every_request_while_api_server_is_unreachable(
    server, applied, tmp_path, monkeypatch
):
    """Whether a run of this id is there was asked once: the run was FAILED."""
    real, away = KubeTransport.request, set()

    def request(self, to, method, path, *more):
        if (method, path) not in away:
            away.add((method, path))
            raise Unreachable("refused")
        return real(self, to, method, path, *more)

    monkeypatch.setattr(KubeTransport, "request", request)
    monkeypatch.setattr("clusterkit.backends.kubernetes.apply.time.sleep", lambda _: None)
    for place in ("api/v1/namespaces/ns/configmaps", "apis/batch/v1/namespaces/ns/jobs"):
        missing, there = (404, {"reason": "NotFound", "message": "no"}), (200, {})
        server.answers[f"/{place}/r-1"] = (200, [missing, there])
    applied(folder(tmp_path, JOB, ours=False))
    assert [method for method, *_ in server.asked] == ["GET", "GET", "PATCH", "PATCH", "PATCH"]
    assert len(away) == 5


def test_apply_takes_secrets_and_attempt_from_environment(server, applied, tmp_path):
    files = folder(tmp_path, JOB)
    applied(files, attempt="3", TOKEN="s3cret\n🚀")
    sent = {found["kind"]: found for found in map(_body, server.asked[:3])}
    secret, config, job = (sent[kind] for kind in ("Secret", "ConfigMap", "Job"))
    assert (secret["kind"], secret["stringData"]) == ("Secret", {"TOKEN": "s3cret\n🚀"})
    for each in (secret, config, job):
        assert each["metadata"]["labels"]["clusterkit/attempt"] == "3"
    assert job["spec"]["template"]["metadata"]["labels"] == {"clusterkit/attempt": "3"}
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [
        "config", OWNS_CLUSTER_OBJECTS
    ]  # fmt: skip


def test_apply_retries_trainjob_until_trainer_knows_runtime(server, applied, tmp_path):
    train = JOB | {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob"}
    path = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/ns/trainjobs/r-1"
    refusal = {"reason": "Forbidden", "message": "trainingRuntime must be created before"}
    server.answers[path] = (200, [(403, refusal), (200, {})])
    applied(folder(tmp_path, train))
    assert [asked[1].partition("?")[0] for asked in server.asked].count(path) == 2


def test_apply_fails_with_api_server_message(server, applied, tmp_path):
    words = 'pods is forbidden: violates PodSecurity "restricted:latest"'
    server.answers["/apis/batch/v1/namespaces/ns/jobs/r-1"] = (
        403, {"reason": "Forbidden", "message": words},
    )  # fmt: skip
    with pytest.raises(SubmitFailed) as error:
        applied(folder(tmp_path, JOB))
    assert error.value.message == f"Error from server (Forbidden): {words}"


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/api/v1/namespaces/ns/configmaps/r-1", "ConfigMap"),
     ("/apis/batch/v1/namespaces/ns/jobs/r-1", "Job")],
)  # fmt: skip
def test_apply_refuses_run_id_of_existing_foreign_object(server, applied, tmp_path, path, kind):
    for place in ("configmaps", "jobs"):
        found = path.rpartition("/")[0].rpartition("/")[2] == place
        root = "/api/v1" if place == "configmaps" else "/apis/batch/v1"
        there = {"labels": {"clusterkit/user": "ann"}, "creationTimestamp": "2026-11-22T04:00:00Z"}
        missing = (404, {"reason": "NotFound", "message": "no"})
        server.answers[f"{root}/namespaces/ns/{place}/r-1"] = (
            (200, {"metadata": there}) if found else missing
        )
    words = f"another run has this id: {kind} r-1 in namespace ns, made by ann at 2026-11-"
    files = folder(tmp_path, JOB, ours=False)
    for _ in range(2):
        with pytest.raises(BadInput, match=words) as error:
            applied(files)
    assert "another --run-id" in error.value.hint
    assert {asked[0] for asked in server.asked} == {"GET"}


def test_apply_repeats_after_failed_creation_of_own_objects(server, applied, tmp_path):
    files = folder(tmp_path, JOB, ours=False)
    paths = ("/api/v1/namespaces/ns/configmaps/r-1", "/apis/batch/v1/namespaces/ns/jobs/r-1")
    for path in paths:
        server.answers[path] = (404, {"reason": "NotFound", "message": "no"})
    # Nothing is there, and the job cannot be made either.
    with pytest.raises(SubmitFailed):
        applied(files)
    server.answers.clear()
    applied(files)
