"""A real Kubernetes for tests: `../shared/kube/cluster` makes one where it is there.

Elsewhere CLUSTERKIT_TEST_KUBECONFIG names a cluster to use (docs/kubernetes.md, "A cluster to try
it on"). It is used as it is: tests that break nodes or the API server are skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from clusterkit import agent, api
from clusterkit.spec import JobSpec
from tests.live.compose import image as images
from tests.live.compose.engine import Engine

ROOT = Path(__file__).parents[3]
SCRIPT = Path(os.environ.get("KUBE_CLUSTER") or ROOT.parent / "shared" / "kube" / "cluster")
STATE = Path(os.environ.get("KUBE_TEST_DIR") or "/var/lib/kube-test")
GIVEN = os.environ.get("CLUSTERKIT_TEST_KUBECONFIG")
KUBECONFIG = Path(GIVEN or STATE / "admin.conf")
KUBECTL = ("kubectl" if GIVEN else str(STATE / "bin" / "kubectl"), "--kubeconfig", str(KUBECONFIG))
MADE_BY = STATE / "tests.json"
"""The process whose tests made the cluster: what a killed one leaves, the next one ends."""
# What a namespace has of itself.
ALWAYS = {"configmap/kube-root-ca.crt"}
KINDS = (
    "pods,services,configmaps,secrets,jobs,pytorchjobs,mpijobs,trainjobs,trainingruntimes,jobsets,"
    "horizontalpodautoscalers"
)


def cluster(*words: str | Path) -> str:
    """Run the script that makes and breaks the cluster; skips the test if it is another's."""
    if GIVEN:
        pytest.skip("CLUSTERKIT_TEST_KUBECONFIG: only its owner may break that cluster")
    done = subprocess.run([SCRIPT, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def api_up() -> None:
    """Start the API server again, and wait for the operators, which have ended meanwhile: until
    they are back nobody can make jobs of theirs."""
    cluster("api", "up")
    command = [*KUBECTL, "create", "--dry-run=server"]
    deadline = time.monotonic() + 180
    for name in ("pytorchjob", "trainjob-runtime"):
        manifest = ROOT / "k8s" / f"{name}.yaml"
        while (done := subprocess.run([*command, "-f", manifest], capture_output=True)).returncode:
            assert time.monotonic() < deadline, done.stderr
            time.sleep(1)


@dataclass(frozen=True)
class Kube:
    """The cluster, and a namespace of the test's own in it."""

    namespace: str
    file: Path
    """A cluster file with the entry ``k8s``."""

    def kubectl(self, *words: str, check: bool = True) -> str:
        command = [*KUBECTL, "-n", self.namespace, *words]
        done = subprocess.run(command, capture_output=True, text=True)
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout + ("" if check else done.stderr)

    def nodes(self) -> list[str]:
        """The nodes that take pods."""
        every = json.loads(self.kubectl("get", "nodes", "-o", "json"))["items"]
        return sorted(n["metadata"]["name"] for n in every if not n["spec"].get("taints"))

    def there(self) -> set[str]:
        """Everything in the namespace that was not there before any run."""
        return set(self.kubectl("get", KINDS, "-o", "name").split()) - ALWAYS

    def entry(self, **fields: Any) -> dict[str, Any]:
        """Options of `api.submit`: the entry ``k8s`` with these keys."""
        given = {
            "backend": "kubernetes", "kubeconfig": str(KUBECONFIG), "namespace": self.namespace,
            "image": "clusterkit:cpu", "shm_size": "64Mi", "stop_grace": 2.0, **fields,
        }  # fmt: skip
        self.file.write_text(yaml.safe_dump({"k8s": given}))
        return {"cluster": "k8s", "clusters_file": self.file}


@contextlib.contextmanager
def up() -> Iterator[None]:
    """The cluster; one that was not up before is down afterwards."""
    if GIVEN:
        yield
        return
    if not SCRIPT.exists():
        pytest.skip(f"{SCRIPT} is not there, and CLUSTERKIT_TEST_KUBECONFIG names no cluster")
    ours = not KUBECONFIG.exists() or left_behind()
    try:
        if ours:
            STATE.mkdir(parents=True, exist_ok=True)
            agent.write_json(MADE_BY, agent.identity(os.getpid()))
        done = subprocess.run([SCRIPT, "up"], capture_output=True, text=True)
        if done.returncode and "missing:" in done.stderr:
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, done.stdout + done.stderr
        yield
    finally:
        if ours:
            cluster("down")


@pytest.fixture(scope="session")
def nodes() -> Iterator[None]:
    """The cluster."""
    with up():
        yield


@pytest.fixture(scope="session")
def running(nodes: None, request: pytest.FixtureRequest) -> None:
    """The cluster with the image on its nodes."""
    if GIVEN:  # its owner puts it there
        return
    engine, base, _ = (request.getfixturevalue(name) for name in ("engine", "base", "image"))
    load(engine, base)


def load(engine: Engine, base: str) -> None:
    """Put the engine's image on the nodes."""
    made = images.made_of(engine)
    loaded = STATE / "clusterkit-image"
    if not loaded.exists() or loaded.read_text() != made:
        with images.archive(engine, base) as archive:
            cluster("load", archive)
        loaded.write_text(made)


def left_behind() -> bool:
    """Whether tests made the cluster that is up, and were killed before they could end it."""
    try:
        return not agent.is_alive(json.loads(MADE_BY.read_text()))
    except FileNotFoundError:
        return False


CLAIM = """
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: runs}
spec: {accessModes: [ReadWriteMany], resources: {requests: {storage: 1Gi}}}
"""


@contextlib.contextmanager
def own_namespace(folder: Path, *, claim: bool = False) -> Iterator[Kube]:
    """A namespace that enforces pod security "restricted".

    Args:
        folder: of its cluster file.
        claim: with a claim ``runs``; the cluster has 20 volumes, and uses none of them again.
    """
    found = Kube(f"test-{secrets.token_hex(3)}", folder / "clusters.yaml")
    found.kubectl("create", "namespace", found.namespace)
    try:
        label = "pod-security.kubernetes.io/enforce=restricted"
        found.kubectl("label", "namespace", found.namespace, label)
        if claim:
            (folder / "claim.yaml").write_text(CLAIM)
            found.kubectl("apply", "-f", str(folder / "claim.yaml"))
        yield found
    finally:
        found.kubectl("delete", "namespace", found.namespace, "--wait=false")


@pytest.fixture
def kube(running: None, tmp_path: Path) -> Iterator[Kube]:
    """A namespace; empty when the test is over."""
    with own_namespace(tmp_path) as found:
        yield found
        assert found.there() == set()


@pytest.fixture
def submit(kube: Kube) -> Iterator[Callable[..., api.Run]]:
    """``submit("echo here", nodes=2, restarts=1, on={"flavor": "job"})``: a line of shell that each
    rank runs; ended with the test."""
    started: list[api.Run] = []

    def start(
        script: str | JobSpec,
        *,
        on: dict[str, Any] | None = None,
        run_id: str | None = None,
        doctor: bool = True,
        **fields: Any,
    ) -> api.Run:
        job = script
        if isinstance(script, str):
            command: Sequence[str] = ("sh", "-c", script)
            job = JobSpec(
                **{
                    "name": "live",
                    "command": command,
                    "launcher": "forkserver",
                    "nodes": 2,
                    **fields,
                }
            )
        entry = kube.entry(**(on or {}))
        started.append(api.submit(job, run_id=run_id, doctor=doctor, **entry))
        return started[-1]

    yield start
    for run in started:
        run.cancel()
        run.wait(60)


@pytest.fixture
def begun() -> Callable[[api.Run], api.Run]:
    """Wait until every rank has said something."""

    def wait(run: api.Run) -> api.Run:
        heard: set[int] = set()
        for line in run.logs(follow=True):
            if line.rank is not None:
                heard.add(line.rank)
            if len(heard) == run.plan.world_size:
                return run
        raise AssertionError(f"ended before it began: {run.status()}")

    return wait


@pytest.fixture
def broken(kube: Kube) -> Iterator[Callable[[str], None]]:
    """Crash or cut node-2 of the cluster; mended when the test is over."""
    undo = {"crash": "restore", "cut": "join"}
    done: list[str] = []

    def breaks(how: str) -> None:
        cluster(how, "node-2")
        done.append(how)

    yield breaks
    for how in done:
        mend(undo[how], kube)


def mend(how: str, kube: Kube) -> None:
    """``restore`` or ``join`` node-2."""
    cluster(how, "node-2")
    kube.kubectl("wait", "node/node-2", "--for=condition=Ready", "--timeout=120s")


def apart(job: str) -> dict[str, Any]:
    """A ``patch`` for one pod of the job on each node of the cluster, as long as there are two."""
    rule = {
        "maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule",
        "nodeTaintsPolicy": "Honor", "labelSelector": {"matchLabels": {"clusterkit/job": job}},
    }  # fmt: skip
    return {"topologySpreadConstraints": [rule]}
