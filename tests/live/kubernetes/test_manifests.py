"""Every manifest before a real API server, as a strict dry run; and those of ``k8s/`` by hand."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from clusterkit import __version__
from tests.golden import test_golden
from tests.live.kubernetes.conftest import Kube
from tests.unit.kubernetes.test_schema import (
    FLAVORS,
    planned,  # noqa: F401 (a fixture)
    templates,
)

ROOT = Path(__file__).parents[3]
BY_HAND = sorted(path for path in (ROOT / "k8s").glob("*.yaml") if path.stem != "kustomization")
# What this cluster does not have, or "restricted" does not admit; jobs of golden files ask for it.
ELSEWHERE = ("priorityClassName", "serviceAccountName", "hostNetwork")
pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


def dry_run(kube: Kube, text: str, file: Path) -> set[str]:
    """The kinds that the server would make of a manifest, strictly read, and of its pods."""
    parts = re.sub(r"(?m)^  namespace: .*$", f"  namespace: {kube.namespace}", text).split("---\n")
    specs = [found["spec"] for each in yaml.safe_load_all(text) for found in templates(each)]
    pods = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"pod-{number}"},
            "spec": {"restartPolicy": "Never"}
            | {key: value for key, value in spec.items() if key not in ELSEWHERE},
        }
        for number, spec in enumerate(specs)
    ]
    # A TrainJob is refused where its runtime is not there in earnest.
    kept = [part for part in parts if "kind: TrainJob" not in part]
    file.write_text("---\n".join([*kept, *(json.dumps(pod) + "\n" for pod in pods)]))
    words = ("--dry-run=server", "--validate=strict", "-f", str(file), "-o", "name")
    said = kube.kubectl("create", *words)
    return {re.split("[./]", line)[0] for line in said.split()}


@pytest.mark.parametrize("path", BY_HAND, ids=lambda path: path.stem)
def test_api_server_accepts_every_handwritten_manifest(path, kube, tmp_path):
    text = path.read_text()
    if path.stem == "trainjob":
        return trainjob_with_its_runtime(path, kube)
    seen = dry_run(kube, text, tmp_path / "documents.yaml")
    kinds = {each["kind"].lower() for each in yaml.safe_load_all(text)}
    assert seen >= kinds - {"trainjob"}
    assert ("pod" in seen) == ("job" in path.stem)
    return None


def trainjob_with_its_runtime(path, kube):
    runtime = str(path.with_stem("trainjob-runtime"))
    words = ("create", "--dry-run=server", "--validate=strict", "-f", str(path))
    kube.kubectl("apply", "-f", runtime)
    try:
        # The trainer hears of it a moment later.
        while "must be created before" in (said := kube.kubectl(*words, check=False)):
            pass
        assert "created (server dry run)" in said
    finally:
        kube.kubectl("delete", "-f", runtime)


def test_api_server_accepts_manifests_of_every_golden_plan(kube, make_facts, tmp_path):
    for case in test_golden.CASES:
        plan = test_golden.plan("kubernetes", case, make_facts)
        (file,) = (file for file in plan.files if file.path.endswith("manifests.yaml"))
        assert "pod" in dry_run(kube, file.content().decode(), tmp_path / f"{case}.yaml"), case


@pytest.mark.parametrize("flavor", FLAVORS)
def test_api_server_accepts_manifests_with_all_cluster_entry_fields(
    flavor,
    kube,
    planned,  # noqa: F811
    tmp_path,
):
    plan = planned(flavor, full=True, secrets=("TOKEN",))
    (file,) = (file for file in plan.files if file.path.endswith("manifests.yaml"))
    assert "pod" in dry_run(kube, file.content().decode(), tmp_path / "documents.yaml")


def test_strict_dry_run_refuses_unknown_field(kube, tmp_path):
    text = (ROOT / "k8s" / "pytorchjob.yaml").read_text()
    with pytest.raises(AssertionError, match=r'unknown field \\*"spec.nodes'):
        dry_run(
            kube, text.replace("\nspec:\n", "\nspec:\n  nodes: 3\n"), tmp_path / "documents.yaml"
        )


# ---------------------------------------------------------------- by hand


def small(folder: Path, overlay: str, resources: list[str], steps: int = 6) -> Path:
    """A copy of ``k8s/`` with a kustomization of these, and few steps."""
    shutil.copytree(ROOT / "k8s", folder)
    for path in folder.glob("*.yaml"):
        text = re.sub(r'(--steps\n\s+- )"\d+"', rf'\1"{steps}"', path.read_text())
        path.write_text(re.sub(r'--steps, "\d+"', f'--steps, "{steps}"', text))
    # A node of this cluster is this machine.
    gpu = folder / "overlays" / "gpu" / "kustomization.yaml"
    gpu.write_text(gpu.read_text().replace('cpu: "32", memory: 256Gi', 'cpu: "1", memory: 1Gi'))
    base = folder / "kustomization.yaml"
    told = yaml.safe_load(base.read_text())
    told |= {"resources": resources, "components": [f"overlays/{overlay}"]}
    base.write_text(yaml.safe_dump(told))
    return folder


def steps_of(log: str) -> list[int]:
    return [int(step) for step in re.findall(r'"metrics", "step": (\d+)', log)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("files", "done", "log"),
    [
        (["mpijob.yaml"], ("mpijob/zero2", "Succeeded"), "training.kubeflow.org/job-role=launcher"),
        (["trainjob-runtime.yaml", "trainjob.yaml"], ("trainjob/ddp-trainjob", "Complete"),
         "job-name=ddp-trainjob-node-0"),
        (["job.yaml"], ("job/ddp-job", "Complete"), "job-name=ddp-job"),
        (["pvc.yaml", "pytorchjob-elastic.yaml"], ("pytorchjob/elastic", "Succeeded"),
         "clusterkit/job=elastic"),
    ],
    ids=lambda value: value[-1].removesuffix(".yaml") if isinstance(value, list) else None,
)  # fmt: skip
def test_handwritten_manifest_trains_all_steps(files, done, log, kube, tmp_path):
    for number, name in enumerate(files):
        # One after the other, as they are applied with -f.
        kube.kubectl("apply", "-k", str(small(tmp_path / str(number), "cpu", [name])))
    kube.kubectl("wait", done[0], f"--for=condition={done[1]}", "--timeout=240s")
    # Of an elastic job one may not have started when the first is done.
    said = kube.kubectl("logs", "-l", log, "--tail=-1", check=False)
    assert steps_of(said) == [*range(1, 7)]
    for number in reversed(range(len(files))):
        kube.kubectl("delete", "-k", str(tmp_path / str(number)))
    kube.kubectl("wait", "pods", "--all", "--for=delete", "--timeout=60s", check=False)


@pytest.fixture
def gpus(kube):
    """Nodes with 8 GPUs in name only."""
    where = "/status/capacity/nvidia.com~1gpu"

    def change(operation: dict) -> None:
        for node in kube.nodes():
            patch = ("--subresource=status", "--type=json", "-p", json.dumps([operation]))
            kube.kubectl("patch", "node", node, *patch)

    change({"op": "add", "path": where, "value": "8"})
    yield
    change({"op": "remove", "path": where})


@pytest.mark.thorough
def test_gpu_overlay_schedules_each_pod_on_whole_node(kube, gpus, tmp_path):
    kube.kubectl("apply", "-k", str(small(tmp_path / "k8s", "gpu", ["pytorchjob.yaml"])))
    # The image for GPUs is not here: that the pods have their places is all there is to see.
    kube.kubectl(
        "wait", "pods", "-l", "clusterkit/job=ddp", "--for=condition=PodScheduled",
        "--timeout=60s",
    )  # fmt: skip
    pods = json.loads(kube.kubectl("get", "pods", "-o", "json"))["items"]
    assert {pod["spec"]["nodeName"] for pod in pods} == set(kube.nodes())
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        assert container["image"] == f"clusterkit:{__version__}-gpu"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    kube.kubectl("delete", "-k", str(tmp_path / "k8s"), "--wait")
    kube.kubectl("wait", "pods", "--all", "--for=delete", "--timeout=60s", check=False)
