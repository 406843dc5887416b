"""A PyTorchJob on a real cluster, side by side: by kubectl, and as the converted job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.live.converted import PROGRAM, converted, same, told
from tests.live.kubernetes.conftest import KUBECONFIG, Kube

pytestmark = [pytest.mark.live, pytest.mark.thorough, pytest.mark.timeout(600)]

TEMPLATE = """\
      restartPolicy: Never
      template:
        spec:
          containers:
            - name: pytorch
              image: clusterkit:cpu
              command: [torchrun, /code/told.py, --lr, "1", GIVEN]
              env:
                - {name: GIVEN, value: a b}
              volumeMounts:
                - {name: code, mountPath: /code}
          volumes:
            - name: code
              configMap: {name: told}
"""
MANIFEST = f"""\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: pytorch-told
spec:
  nprocPerNode: "2"
  runPolicy: {{cleanPodPolicy: None}}
  pytorchReplicaSpecs:
    Master:
      replicas: 1
{TEMPLATE}    Worker:
      replicas: 1
{TEMPLATE}"""


def test_converted_pytorchjob_runs_like_manifest(
    kube: Kube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # By hand, and with no regard to what "restricted" asks of a pod.
    kube.kubectl("label", "--overwrite", "namespace", kube.namespace,
                 "pod-security.kubernetes.io/enforce=privileged")  # fmt: skip
    kube.kubectl("create", "configmap", "told", f"--from-file=told.py={PROGRAM}")
    file = tmp_path / "job.manifest.yaml"
    file.write_text(MANIFEST)
    try:
        kube.kubectl("apply", "-f", str(file))
        kube.kubectl("wait", "pytorchjob/pytorch-told", "--for=condition=Succeeded",
                     "--timeout=180s")  # fmt: skip
        pods = json.loads(kube.kubectl("get", "pods", "-o", "json"))["items"]
        assert len(pods) == 2
        said = "".join(kube.kubectl("logs", pod["metadata"]["name"]) for pod in pods)
        kube.kubectl("delete", "-f", str(file))
        job = converted(file, kubeconfig=str(KUBECONFIG), namespace=kube.namespace, stop_grace=2.0)[
            1
        ]
    finally:
        kube.kubectl("delete", "configmap", "told")
    same(told(said.splitlines()), job, 4)
