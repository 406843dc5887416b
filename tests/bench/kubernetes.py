"""``python -m tests.bench.kubernetes``: a submit to pods, against kubectl and torchrun by hand.

Both sides apply the same manifests; the peer's lie there before the clock starts. When something
came into being is told by a watch of the API server, for both sides.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from clusterkit import api, execute
from clusterkit.backends.kubernetes.api_server import Context, KubeTransport
from clusterkit.cli.common import table
from clusterkit.errors import ClusterkitError, RunNotFound
from clusterkit.run import folder as run_folder
from clusterkit.run.logs import parse_mark
from clusterkit.spec import JobSpec
from clusterkit.transport import LocalTransport
from tests.bench.__main__ import BIN, SECONDS, Program, Row

STATE = Path(os.environ.get("KUBE_TEST_DIR") or "/var/lib/kube-test")
NODES = 2
PORT = 29700


@dataclass(frozen=True)
class Kube:
    """The cluster, and a namespace of the bench's own in it."""

    kubectl: str
    kubeconfig: str
    namespace: str

    @property
    def tool(self) -> list[str]:
        return [self.kubectl, "--kubeconfig", self.kubeconfig, "--namespace", self.namespace]

    def run(self, *words: str) -> str:
        done = subprocess.run(
            [*self.tool, *words], capture_output=True, text=True, timeout=SECONDS
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"kubectl {' '.join(words)}: {done.stderr}")
        return done.stdout

    @contextlib.contextmanager
    def watching(
        self, path: str, failed: Callable[[], None]
    ) -> Iterator[Callable[[Callable[[dict[str, Any]], bool]], float]]:
        """Events of a collection from now on: gives what waits for the time of the first that
        fits. ``failed`` raises once none will come."""
        transport = KubeTransport()
        context = Context(self.kubeconfig, None)
        listed = json.loads(transport.request(context, "GET", path))
        version = listed["metadata"]["resourceVersion"]
        query = f"watch=1&resourceVersion={version}&timeoutSeconds=600"
        stream = transport.stream(context, f"{path}?{query}", 600)
        heard = threading.Condition()
        events: list[tuple[float, dict[str, Any]]] = []

        def read() -> None:
            rest = b""
            while data := stream.read():
                now = time.time()
                *lines, rest = (rest + data).split(b"\n")
                with heard:
                    events.extend((now, json.loads(line)["object"]) for line in lines)
                    heard.notify_all()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()

        def when(fits: Callable[[dict[str, Any]], bool]) -> float:
            def found() -> float | None:
                return next((at for at, event in events if fits(event)), None)

            deadline = time.monotonic() + SECONDS
            while time.monotonic() < deadline:
                with heard:
                    if (moment := heard.wait_for(found, 1)) is not None:
                        return moment
                failed()
            raise RuntimeError(f"nothing came within {SECONDS:g} s: {path}")

        try:
            yield when
        finally:
            stream.stop()
            reader.join(10)


@dataclass(frozen=True)
class Times:
    """Seconds."""

    created: float
    """From the command's start until the API server has the job."""
    first_step: float
    """From the command's start to the log line of the first step."""
    from_ready: float
    """From both pods being ready to that line."""


def timed(
    kube: Kube,
    run_id: str,
    begin: Callable[[], float],
    step: Callable[[], float],
    failed: Callable[[], None] = lambda: None,
) -> Times:
    """What a submit, or an apply, took; ``begin`` does it, ``step`` tells the first step's time."""
    pods = f"/api/v1/namespaces/{kube.namespace}/pods"
    jobs = f"/apis/kubeflow.org/v1/namespaces/{kube.namespace}/pytorchjobs"
    with kube.watching(jobs, failed) as job, kube.watching(pods, failed) as pod:
        begun = begin()
        created = job(lambda event: event["metadata"]["name"] == run_id)
        ready = max(
            pod(lambda event, name=f"{run_id}-worker-{node}": _ready(event, name))  # type: ignore[misc]
            for node in range(NODES)
        )
        first = step()
    return Times(created - begun, first - begun, first - ready)


def _ready(pod: dict[str, Any], name: str) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return pod["metadata"]["name"] == name and any(
        each["type"] == "Ready" and each["status"] == "True" for each in conditions
    )


def settings_of(program: Program) -> list[str]:
    return ["threads_per_rank=1", "checkpoint=", f"args={json.dumps(program.args)}"]


def submitted(kube: Kube, program: Program) -> Times:
    """By clusterkit."""
    run_id = run_folder.new_run_id("bench")
    argv = [str(BIN / "clusterkit"), "submit", f"jobs/{program.job}.yaml", "--cluster", "k8s",
            "--nodes", str(NODES), "--run-id", run_id]  # fmt: skip
    for setting in settings_of(program):
        argv += ["--set", setting]
    processes: list[subprocess.Popen[str]] = []

    def begin() -> float:
        begun = time.time()
        processes.append(
            subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
        return begun

    def step() -> float:
        said = processes[0].communicate(timeout=SECONDS)
        if processes[0].returncode:
            raise RuntimeError(said[1])
        lines = api.get(run_id).logs(rank=0)
        return next(line.time for line in lines if (line.event or {}).get("event") == "metrics")

    def failed() -> None:
        if processes[0].poll():
            raise RuntimeError(f"submit: {processes[0].communicate()[1]}")

    try:
        return timed(kube, run_id, begin, step, failed)
    finally:
        with contextlib.suppress(RunNotFound):
            run = api.get(run_id)
            run.cancel()
            run.delete()


def applied(kube: Kube, program: Program) -> Times:
    """By `kubectl apply` of the same manifests."""
    run_id = run_folder.new_run_id("bench")
    plan = api.plan(
        f"jobs/{program.job}.yaml", cluster="k8s", nodes=NODES, settings=settings_of(program),
        run_id=run_id,
    )  # fmt: skip
    execute.write_files(plan, LocalTransport())
    folder = next(str(Path(f.path).parent) for f in plan.files if "kustomization" in f.path)

    def begin() -> float:
        begun = time.time()
        kube.run("apply", "--server-side", "--kustomize", folder)
        return begun

    def step() -> float:
        return logged_step([*kube.tool, "logs", "--follow", f"{run_id}-worker-0"])

    try:
        return timed(kube, run_id, begin, step)
    finally:
        kube.run("delete", "--kustomize", folder, "--wait=true")
        kube.run("wait", "pods", "-l", f"clusterkit/run={run_id}", "--for=delete",
                 f"--timeout={SECONDS:g}s")  # fmt: skip
        shutil.rmtree(Path(folder).parent)


def logged_step(argv: list[str]) -> float:
    """The time of the first step that a node agent's log tells."""
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                stamp, _, rest = line.partition(" ")
                event = parse_mark(rest.partition(" ")[2])
                if event is not None and event["event"] == "metrics":
                    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
        finally:
            process.kill()
    raise RuntimeError(f"no step: {argv}")


@contextlib.contextmanager
def sleepers(kube: Kube) -> Iterator[str]:
    """A run whose pods do nothing, to type commands into; gives its id."""
    job = JobSpec(name="bench", command=("sleep", "3600"), launcher="forkserver", nodes=NODES)
    run = api.submit(job, cluster="k8s")
    try:
        status = run.wait_started(SECONDS)
        if status.state.final:
            raise RuntimeError(f"the pods to type into ended: {status}")
        yield run.id
    finally:
        run.cancel()
        run.delete()


def typed(kube: Kube, run_id: str, program: Program) -> float:
    """torchrun alone in the same two pods: from its start in the later one to the first step."""
    batch = program.spec.batch.global_size
    env = f"OMP_NUM_THREADS=1 CLUSTERKIT_DEVICE=cpu CLUSTERKIT_GLOBAL_BATCH={batch} "
    env += "GLOO_SOCKET_IFNAME=eth0 PYTHONUNBUFFERED=1"
    processes = []
    for node in reversed(range(NODES)):
        # CLUSTERKIT_* of the pod belong to the run that sleeps there.
        script = (
            "for name in $(env | sed -n 's/^\\(CLUSTERKIT_[A-Z_]*\\)=.*/\\1/p'); do unset $name; "
            f"done; cd /opt/clusterkit; date +%s.%N; exec env {env} torchrun --nnodes={NODES} "
            f"--node-rank={node} --nproc-per-node=1 --master-addr={run_id}-worker-0 "
            f'--master-port={PORT} jobs/train/gpt/train.py "$@"'
        )
        words = ["exec", f"{run_id}-worker-{node}", "--", "sh", "-c", script, "sh", *program.args]
        processes.append(
            subprocess.Popen(
                [*kube.tool, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    first = None
    begun = []
    for process in reversed(processes):
        assert process.stdout is not None
        if not (stamp := process.stdout.readline()):
            said = process.communicate()[1]
            raise RuntimeError(f"kubectl exec: {said}; {api.get(run_id).status()}")
        begun.append(float(stamp))
        for line in process.stdout if process is processes[-1] else ():
            event = parse_mark(line)
            if first is None and event is not None and event["event"] == "metrics":
                first = time.time()
    for process in processes:
        said = process.communicate(timeout=SECONDS)
        if process.returncode:
            raise RuntimeError(said[1])
    assert first is not None
    return first - max(begun)


def row(what: str, pairs: list[tuple[float, float]]) -> Row:
    ratios = [ours / peer for ours, peer in pairs]
    return Row(
        what,
        statistics.median(ours for ours, _ in pairs),
        statistics.median(peer for _, peer in pairs),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
    )


def measure(kube: Kube, rounds: int) -> None:
    program = Program("ddp", 3)
    made: list[tuple[Times, Times, float]] = []
    with sleepers(kube) as run_id:
        for number in range(rounds + 1):
            print(f"round {number} of {rounds}", file=sys.stderr)
            each = (submitted(kube, program), applied(kube, program))
            made.append((*each, typed(kube, run_id, program)))
    made = made[1:]  # the first round fills caches
    found = [
        row("submit to the job's creation / kubectl apply", [
            (ours.created, peer.created) for ours, peer, _ in made
        ]),
        row("submit to first step, ddp, 2 pods / kubectl apply", [
            (ours.first_step, peer.first_step) for ours, peer, _ in made
        ]),
        row("pods ready to first step / torchrun typed into pods", [
            (ours.from_ready, bare) for ours, _, bare in made
        ]),
    ]  # fmt: skip
    more = statistics.median(ours.created - peer.created for ours, peer, _ in made)
    later = statistics.median(ours.first_step - peer.first_step for ours, peer, _ in made)
    print(table([each.cells() for each in found], ("WHAT", "OURS s", "PEER s", "RATIO", "SPREAD")))
    print(f"\nsubmit takes {more:.2f} s more than kubectl apply to the job's creation, "
          f"{later:.2f} s more to the first step (medians of the differences of "
          f"{len(made)} rounds); load {os.getloadavg()[0]:.1f}")  # fmt: skip


def main() -> int:
    # As Ctrl-C: what was set up is taken down.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(prog="python -m tests.bench.kubernetes", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds")
    rounds = max(1, parser.parse_args().rounds)
    own = STATE / "admin.conf"
    kubeconfig = os.environ.get("KUBECONFIG") or str(own)
    kubectl = shutil.which("kubectl") or str(STATE / "bin" / "kubectl")
    for each, hint in ((kubeconfig, "make kube-up, or KUBECONFIG"), (kubectl, "install kubectl")):
        if not Path(each).is_file():
            print(f"no Kubernetes: there is no {each}; {hint}", file=sys.stderr)
            return 3
    with tempfile.TemporaryDirectory(prefix="bench-home-") as home:
        kube = Kube(kubectl, kubeconfig, f"clusterkit-bench-{secrets.token_hex(3)}")
        os.environ["CLUSTERKIT_HOME"] = home
        clusters = Path(home, "clusters.yaml")
        entry = {
            "backend": "kubernetes", "kubeconfig": kubeconfig, "namespace": kube.namespace,
            "image": "clusterkit:cpu", "image_pull_policy": "IfNotPresent", "shm_size": "256Mi",
            "gpus": 0, "flavor": "pytorchjob",
        }  # fmt: skip
        clusters.write_text(json.dumps({"k8s": entry}))
        os.environ["CLUSTERKIT_CLUSTERS"] = str(clusters)
        try:
            kube.run("create", "namespace", kube.namespace)
        except (RuntimeError, OSError) as problem:
            print(f"no Kubernetes: {problem}", file=sys.stderr)
            return 3
        try:
            report = api.doctor("jobs/ddp.yaml", cluster="k8s", nodes=NODES)
            bad = [f.cause for f in report.findings if f.level == "fail" or (f.check == "image"
                   and f.level == "warn")]  # fmt: skip
            if bad:
                print(f"no Kubernetes that is fit: {'; '.join(bad)}", file=sys.stderr)
                return 3
            measure(kube, rounds)
        except ClusterkitError as problem:
            print(f"no Kubernetes: {problem.message}; {problem.hint}", file=sys.stderr)
            return 3
        finally:
            kube.run("delete", "namespace", kube.namespace, "--wait=false")
    return 0


if __name__ == "__main__":
    sys.exit(main())
