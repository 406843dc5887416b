"""Every manifest against the schemas of the kinds that it is of: a wrong field is an error."""

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
import yaml
from kubernetes import client

from clusterkit import backends
from clusterkit.backends.kubernetes.api_server import APPLY_PATCH, Context, KubeTransport, NotFound
from clusterkit.backends.kubernetes.validation import check_entry
from clusterkit.cluster import Claim, KubernetesCluster, KubernetesFacts, Project
from clusterkit.errors import BadInput
from clusterkit.jobfile import loader
from tests.conftest import noted

ROOT = Path(__file__).resolve().parents[3]
CRDS = {path.stem: json.loads(path.read_text()) for path in ROOT.glob("tests/data/crds/*.json")}
# A TrainingRuntime is a ClusterTrainingRuntime that belongs to a namespace.
CRDS["TrainingRuntime"] = CRDS["ClusterTrainingRuntime"]
FLAVORS = ("pytorchjob", "mpijob", "trainjob", "jobset", "job")
BY_HAND = sorted(ROOT.glob("k8s/*.yaml"))


def wrong_fields(value, schema, place=""):
    """What a strict API server would complain of: unknown fields, wrong types, missing fields."""
    if schema.get("x-kubernetes-preserve-unknown-fields") or "x-kubernetes-int-or-string" in schema:
        return
    kind = schema.get("type")
    if kind == "object":
        if not isinstance(value, dict):
            yield f"{place}: not an object"
            return
        known, more = schema.get("properties"), schema.get("additionalProperties")
        for key in schema.get("required", ()):
            if key not in value:
                yield f"{place}.{key}: missing"
        for key, inner in value.items():
            if known is not None and key in known:
                yield from wrong_fields(inner, known[key], f"{place}.{key}")
            elif isinstance(more, dict):
                yield from wrong_fields(inner, more, f"{place}.{key}")
            elif known is not None:
                yield f"{place}.{key}: unknown"
    elif kind == "array":
        if not isinstance(value, list):
            yield f"{place}: not a list"
            return
        for number, inner in enumerate(value):
            yield from wrong_fields(inner, schema["items"], f"{place}[{number}]")
    else:
        types = {"string": str, "integer": int, "boolean": bool, "number": (int, float)}
        if kind in types and (
            not isinstance(value, types[kind]) or (kind == "integer" and value is True)
        ):
            yield f"{place}: {value!r} is no {kind}"
        if "enum" in schema and value not in schema["enum"]:
            yield f"{place}: {value!r} is none of {schema['enum']}"
        if (
            "pattern" in schema
            and isinstance(value, str)
            and not re.search(schema["pattern"], value)
        ):
            yield f"{place}: {value!r} does not match"


def wrong_builtin(value, kind, place=""):
    """The same for the kinds that every cluster has, by the official client's models."""
    if match := re.match(r"[Ll]ist\[(.*)\]", kind):
        for number, inner in enumerate(value):
            yield from wrong_builtin(inner, match[1], f"{place}[{number}]")
    elif match := re.match(r"[Dd]ict[\[(]str, (.*)[\])]", kind):
        for key, inner in value.items():
            # An amount may be a number.
            if not (place.endswith((".limits", ".requests")) and isinstance(inner, int)):
                yield from wrong_builtin(inner, match[1], f"{place}.{key}")
    elif kind in ("str", "bool", "int"):
        if type(value).__name__ != kind:
            yield f"{place}: {value!r} is no {kind}"
    elif model := getattr(client, kind, None):
        names = {theirs: ours for ours, theirs in model.attribute_map.items()}
        for key, inner in value.items():
            if key not in names:
                yield f"{place}.{key}: unknown"
            else:
                yield from wrong_builtin(inner, model.openapi_types[names[key]], f"{place}.{key}")


def complaints(document):
    kind = document["kind"]
    if kind in CRDS:
        crd = CRDS[kind]
        assert document["apiVersion"] == f"{crd['group']}/{crd['version']}"
        schema = crd["schema"]
        plain = {key: value for key, value in document.items() if key != "metadata"}
        yield from wrong_fields(plain, schema, kind)
        yield from wrong_builtin(document["metadata"], "V1ObjectMeta", f"{kind}.metadata")
    else:
        yield from wrong_builtin(document, f"V1{kind}", kind)


@pytest.fixture
def planned(make_facts):
    def plan(
        flavor,
        *,
        full=False,
        code="baked",
        project=None,
        home=None,
        lost_after=30.0,
        watcher=False,
        **changes,
    ):
        job = loader.load_job(ROOT / "jobs" / "zero2.yaml")
        if flavor == "mpijob":
            changes = {"launcher": "mpirun"} | changes
        job = msgspec.structs.replace(job, **({"nodes": 2, "gpus_per_node": 2} | changes))
        kubernetes = KubernetesFacts(
            version="v1.34.4", context="c", namespace="ns",
            kinds=("PyTorchJob", "MPIJob", "TrainJob", "JobSet"),
        )  # fmt: skip
        facts = msgspec.structs.replace(make_facts(gpus=2 if full else 0), kubernetes=kubernetes)
        more = {
            "volumes": (Claim(claim="a", path="/a"), Claim(claim="b", path="/b", read_only=True)),
            "memory": "1Gi", "cpus": 2.0, "resources": {"rdma/hca": "1"}, "queue": "q",
            "node_selector": {"a": "b"}, "topology_key": "rack", "priority_class": "p",
            "service_account": "s",
            "tolerations": ({"key": "k", "operator": "Exists"},), "shared": "/a",
            "image_pull_secrets": ("r",), "annotations": {"x": "y"}, "labels": {"l": "m"},
        } if full else {}  # fmt: skip
        cluster = KubernetesCluster(
            flavor=flavor, code=code, lost_after=lost_after, watcher=watcher, **more
        )
        facts = msgspec.structs.replace(facts, project=project, home=home or facts.home)
        return backends.backend("kubernetes").plan(job, cluster, facts, "demo-1")

    return plan


def documents_of(plan):
    (file,) = (file for file in plan.files if file.path.endswith("manifests.yaml"))
    return list(yaml.safe_load_all(file.content()))


@pytest.mark.parametrize(
    ("flavor", "full", "changes", "words"),
    [
        ("pytorchjob", True, {}, "replaced, and the run continues (checkpoints lie in a volume"),
        ("job", True, {}, "replaced, and the run continues"),
        ("trainjob", True, {}, "replaced, and the run continues"),
        ("jobset", True, {}, "replaced, and the run continues"),
        ("pytorchjob", False, {}, "ends the run (its checkpoints go with its pods)"),
        ("pytorchjob", False, {"checkpoint": None, "restarts": 1}, "(restarts: the job may begin"),
        ("pytorchjob", False, {"checkpoint": None}, "ends the run (the job would begin anew"),
        ("mpijob", True, {}, "ends the run (mpirun starts all ranks at once)"),
    ],
)
def test_plan_notes_whether_lost_pod_is_replaced_and_why(flavor, full, changes, words, planned):
    plan = planned(flavor, full=full, **changes)
    (note,) = (str(note) for note in plan.notes if note.name == "lost_pod")
    assert words in note
    text = plan.to_text()
    assert plan.rejoin == plan.replace_lost == ("replaced" in note) == ("--rejoin" in text)
    pods = [one for one in documents_of(plan) if not one["metadata"]["name"].endswith("-watch")]
    assert ("node.kubernetes.io/unreachable" in str(pods)) == plan.rejoin
    assert ("restartPolicy: ExitCode" in text) == (plan.rejoin and flavor == "pytorchjob")
    assert ("podFailurePolicy" in text) == (plan.rejoin and flavor != "pytorchjob")


@pytest.mark.parametrize("flavor", FLAVORS)
def test_topology_key_sets_pod_affinity_except_on_watcher(flavor, planned):
    wanted = {
        "topologyKey": "rack",
        "labelSelector": {
            "matchLabels": {"clusterkit/run": "demo-1"},
            "matchExpressions": [{"key": "clusterkit/attempt", "operator": "Exists"}],
        },
    }
    for pod in templates(documents_of(planned(flavor, full=True, watcher=flavor == "pytorchjob"))):
        labels, affinity = pod["metadata"]["labels"], pod["spec"].get("affinity")
        watcher = labels["clusterkit/role"] == "watcher"
        assert labels["clusterkit/run"] == "demo-1"
        assert ("clusterkit/attempt" in labels) == (not watcher)
        required = "requiredDuringSchedulingIgnoredDuringExecution"
        assert affinity == (None if watcher else {"podAffinity": {required: [wanted]}})


def test_watcher_and_worker_tolerate_lost_node_for_lost_after_seconds(planned):
    """It may be on the same node; nobody removes them before there is another watcher."""
    found = documents_of(planned("pytorchjob", full=True, lost_after=5.0, watcher=True))
    watcher, worker = templates(found)
    for pod in (watcher, worker):
        kept = [each.get("tolerationSeconds") for each in pod["spec"]["tolerations"]]
        assert kept[-2:] == [5, 5]


@pytest.mark.parametrize("flavor", FLAVORS)
def test_watcher_is_opt_in_and_may_delete_only_pods_of_run(flavor, planned):
    def roles(**more):
        found = documents_of(planned(flavor, full=True, **more))
        return [each["rules"] for each in found if each["kind"] == "Role"]

    assert roles() == roles(watcher="auto") == []
    if flavor in ("job", "jobset", "trainjob"):
        with pytest.raises(BadInput, match=f"watcher: flavor {flavor} cannot have one"):
            roles(watcher=True)
    elif flavor == "pytorchjob":
        pods = {"apiGroups": [""], "resources": ["pods"]}
        names = [f"demo-1-worker-{node}" for node in range(2)]
        assert roles(watcher=True) == [
            [{**pods, "verbs": ["list"]}, {**pods, "resourceNames": names, "verbs": ["delete"]}]
        ]


@pytest.mark.parametrize("flavor", FLAVORS)
def test_pod_deadline_is_time_limit_plus_grace_and_one_hour(flavor, planned):
    """Counted for each pod from its own start, and an hour later than the agents do it."""

    def deadlines(**job):
        pods = templates(documents_of(planned(flavor, **job)))
        return [pod["spec"].get("activeDeadlineSeconds") for pod in pods]

    assert set(deadlines(time_limit="2h")) == {7200 + 10 + 3600}
    assert set(deadlines()) == {None}


def test_mpijob_launcher_and_workers_unpack_copied_project(planned, tmp_path):
    project = Project(root=str(tmp_path), digest="d", files=1, bytes=1, how="all")
    plan = planned("mpijob", code="copied", project=project)
    unpack = "tar -xzf /run/clusterkit/demo-1/code/project.tar.gz -C /run/clusterkit/demo-1/project"
    assert unpack in next(file for file in plan.files if file.path.endswith("pod.sh")).text
    job = documents_of(plan)[-1]
    worker = job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert worker["command"][:2] == ["sh", "-c"]
    assert unpack in worker["command"][2]
    assert worker["command"][2].endswith("exec clusterkit-sshd")
    assert "/run/clusterkit/demo-1/code" in [each["mountPath"] for each in worker["volumeMounts"]]


def test_mpijob_with_deepspeed_launcher_starts_ranks_by_openmpi(planned):
    plan = planned("mpijob", launcher="deepspeed")
    node = next(file for file in plan.files if file.path.endswith("node.sh")).text
    assert "--launcher openmpi '--launcher_args=--mca btl_tcp_if_include lo " in node
    assert "--nproc 4 " in node
    assert "OMPI_MCA_btl_tcp_if_include=lo" in node
    rank = next(file for file in plan.files if file.path.endswith("rank.sh")).text
    assert "OMPI_COMM_WORLD_RANK" in rank
    assert "CROSS_RANK" not in rank
    pod = next(file for file in plan.files if file.path.endswith("pod.sh")).text
    assert "await demo-1-worker-1.demo-1.ns.svc" in pod


def test_pod_awaits_rendezvous_name_only_without_preload(planned):
    def waits(**job):
        files = planned("job", **job).files
        return "await demo-1-0.demo-1" in next(f.text for f in files if f.path.endswith("pod.sh"))

    assert not waits()
    assert not waits(program=None, command=["python", "-X", "dev", "x.py"])
    assert waits(program=None, command=["sh", "x.sh"])
    assert waits(launcher="torchrun")


@pytest.mark.parametrize(
    ("flavor", "launcher"),
    [("mpijob", "torchrun"), ("mpijob", "forkserver"), ("pytorchjob", "mpirun"), ("job", "mpirun")],
)
def test_plan_refuses_launcher_that_flavor_cannot_run(flavor, launcher, planned):
    with pytest.raises(
        BadInput, match=f"flavor: {flavor} cannot run launcher {launcher}"
    ) as refused:
        planned(flavor, launcher=launcher)
    other = "mpirun" if flavor == "mpijob" else "forkserver"
    assert refused.value.hint == f"flavor: auto, or --set launcher={other}"


def test_elastic_run_plans_no_rejoin(planned):
    plan = planned("pytorchjob", full=True, nodes="2:4")
    assert not plan.rejoin
    assert noted(plan, "lost_pod") is None
    assert "--rejoin" not in plan.to_text()


@pytest.mark.parametrize("full", [False, True], ids=["plain", "full"])
@pytest.mark.parametrize("flavor", FLAVORS)
def test_planned_manifests_match_kind_schemas(flavor, full, planned):
    documents = documents_of(planned(flavor, full=full, secrets=("TOKEN",)))
    assert documents
    for document in documents:
        assert list(complaints(document)) == []


class ApiServer(KubeTransport):
    """Takes every object, and has no other."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def request(self, to, method, path, body=None, content=""):
        if method == "GET":
            raise NotFound("no")
        if content == APPLY_PATCH:
            assert "/namespaces/ns/" in path
            self.sent.append((to, body))
        return json.dumps({"apiVersion": "v1", "kind": "K", "metadata": {"name": "n", "uid": "u"}})


def test_documented_rdma_entries_set_device_user_and_capabilities(make_facts, tmp_path):
    text = (ROOT / "docs/kubernetes.md").read_text().partition("### RDMA")[2]
    (tmp_path / "clusters.yaml").write_text(text.partition("```yaml\n")[2].partition("```")[0])
    kube = KubernetesFacts(version="v1", context="c", namespace="ns", kinds=("PyTorchJob",))
    facts = msgspec.structs.replace(make_facts(gpus=8), kubernetes=kube)
    job, found = loader.load_job(ROOT / "jobs" / "ddp.yaml"), {}
    for name in ("restricted", "rdma"):
        cluster = loader.read_cluster(name, tmp_path / "clusters.yaml").cluster
        check_entry(cluster)
        documents = documents_of(backends.backend("kubernetes").plan(job, cluster, facts, "demo-1"))
        assert [line for each in documents for line in complaints(each)] == []
        (pod,) = templates(documents)
        (container,) = pod["spec"]["containers"]
        assert container["resources"]["limits"]["rdma/hca"] == "1"
        found[name] = (
            pod["spec"]["securityContext"]["runAsUser"],
            container["securityContext"]["capabilities"],
        )
    assert found == {
        "restricted": (1000, {"drop": ["ALL"]}),
        "rdma": (0, {"drop": ["ALL"], "add": ["IPC_LOCK"]}),
    }


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="takes kubectl")
@pytest.mark.parametrize("flavor", FLAVORS)
def test_submitted_objects_match_kubectl_kustomize_output(flavor, planned, tmp_path):
    plan, server = planned(flavor, full=True, home=str(tmp_path)), ApiServer()
    backends.backend("kubernetes").submit(plan, server)
    folder = Path(plan.files[0].path).parent
    assert {to for to, _ in server.sent} == {Context(None, "c")}
    built = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, check=True)

    def by_name(objects):
        for each in objects:
            each["metadata"].setdefault("namespace", "ns")  # which the path has as well
            held = each.get("binaryData", {})
            each |= {"binaryData": {name: base64.b64decode(text) for name, text in held.items()}}
        return {(each["kind"], each["metadata"]["name"]): each for each in objects}

    ours = by_name([body for _, body in server.sent if body["kind"] != "Secret"])
    assert ours == by_name(list(yaml.safe_load_all(built.stdout)))


@pytest.mark.parametrize("flavor", FLAVORS)
def test_plan_steps_create_secret_first_and_job_last_as_owner(flavor, planned):
    watcher = flavor == "pytorchjob"
    *first, job, owned = planned(flavor, full=True, secrets=("TOKEN",), watcher=watcher).steps
    assert [step.kind for step in (*first, job, owned)] == ["request"] * (4 if watcher else 3)
    (path,) = job.argv[1:]
    assert path.endswith("s/demo-1?fieldManager=clusterkit&force=true&fieldValidation=Strict")
    created = [each.partition("?")[0] for step in first for each in step.argv[1:]]
    assert created.index("/api/v1/namespaces/ns/secrets/demo-1") == 0
    assert sorted(owned.argv[1:]) == sorted(created)
    assert "TOKEN" in first[0].secrets
    assert {step.secrets for step in (*first[1:], job, owned)} == {()}


@pytest.mark.parametrize(
    "path",
    [path for path in BY_HAND if path.stem != "kustomization"],
    ids=lambda path: path.name,
)
def test_shipped_manifests_match_kind_schemas(path):
    for document in yaml.safe_load_all(path.read_text()):
        assert list(complaints(document)) == []


@pytest.mark.parametrize(
    ("flavor", "break_it", "complaint"),
    [
        ("pytorchjob", lambda d: d["spec"].update(replicas=2), "PyTorchJob.spec.replicas: unknown"),
        ("mpijob", lambda d: d["spec"].update(slotsPerWorker="2"), "'2' is no integer"),
        ("mpijob", lambda d: d["spec"].update(mpiImplementation="Open"), "is none of"),
        ("trainjob", lambda d: d["metadata"].update(name=3), "3 is no str"),
        ("job", lambda d: d["spec"].pop("selector").update(a=1), None),
        ("job", lambda d: d["spec"].update(selectr={}), "Service.spec.selectr: unknown"),
        ("job", lambda d: d["spec"].update(ports=[{"prt": 1}]), "spec.ports[0].prt: unknown"),
        ("job", lambda d: d["metadata"]["labels"].update(a=1), "labels.a: 1 is no str"),
    ],
)
def test_schema_check_finds_wrong_fields(flavor, break_it, complaint, planned):
    documents = documents_of(planned(flavor))
    document = next(one for one in documents if not one["metadata"]["name"].endswith("-watch"))
    break_it(document)
    found = list(complaints(document))
    assert (found == []) if complaint is None else (complaint in " ".join(found))


def test_shipped_manifests_meet_restricted_pod_security():
    pods = 0
    for path in BY_HAND:
        for document in yaml.safe_load_all(path.read_text()):
            for template in templates(document):
                spec = template["spec"]
                assert spec["securityContext"]["runAsNonRoot"] is True
                assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
                assert spec["automountServiceAccountToken"] is False
                for container in spec["containers"]:
                    security = container["securityContext"]
                    assert security["allowPrivilegeEscalation"] is False
                    assert security["capabilities"] == {"drop": ["ALL"]}
                    assert security["readOnlyRootFilesystem"] is True
                pods += 1
    assert pods == 6


def templates(value):
    """Pod templates anywhere in a document."""
    if isinstance(value, dict):
        if isinstance(value.get("spec"), dict) and "containers" in value["spec"]:
            yield value
        for inner in value.values():
            yield from templates(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from templates(inner)
