"""Goes on with a run while nobody outside of the cluster watches over it.

One file (longer than 500 lines for that reason), standard library only: it comes in the run's
config map and is run by the image's own Python, in a small pod that belongs to the run.

    python3 -I watcher.py watch.json

Whoever submitted the run renews a Lease every few seconds. While somebody does, this only looks.
When nobody has for `lease_seconds` it takes the Lease, and with it the work: it starts a failed run
again as often as ``restarts`` allows, removes pods by force from nodes that are gone, ends what
runs beyond the time limit. What it did, and how pods ended, it writes into the config map
``NAME-watch`` for whoever comes back.

Sources: Kubernetes' API concepts (watch, server-side apply), coordination.k8s.io/v1 Lease, and
client-go's leader election for reading a Lease by one's own clock.
"""

from __future__ import annotations

import argparse
import calendar
import contextlib
import http.client
import json
import os
import signal
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

RUN, ATTEMPT, ROLE = "clusterkit/run", "clusterkit/attempt", "clusterkit/role"
WATCHER = "clusterkit-watcher"
"""Holder of the Lease while this does the work."""
MANAGER = "clusterkit"
LEAST_LEASE_SECONDS = 5.0
LOOK_SECONDS = 5.0
"""How often the Lease is looked at, and states are judged anew although nothing came."""
AGAIN_SECONDS = 1.0
WATCH_SECONDS = 240
ANSWER_SECONDS = 30.0
GONE_SECONDS = 15.0
"""How long a pod may be missing before it counts as gone: lists and watches come late."""
PEERS_SECONDS = 20.0
"""How long the other nodes have to end by themselves once one has failed, beyond their grace."""
FORCE_SECONDS = 5.0
"""How long a pod may be late to end on a node that does not answer."""
TAIL_BYTES = 120_000
"""Of an ended pod's log that is kept."""
RECORD_BYTES = 900_000
"""Of all records; a config map takes 1 MiB."""
TAKEN_AWAY = 128
"""Least exit code of a pod that another one takes the place of, where that is so: agents end with
143 when their pod is taken away, and with no other code so high."""
FOLLOWED = "stopped: "
"""How the reason begins that an agent leaves which ended because another node had."""
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

Object = dict[str, Any]


# ---------------------------------------------------------------- the API server


class Away(Exception):
    """The API server does not answer, or not now."""


class Refused(Exception):
    """It says no."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"{status}: {said}")
        self.status = status


class Api:
    """The API server of the cluster that this pod is in."""

    def __init__(self) -> None:
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        self._base = f"https://{f'[{host}]' if ':' in host else host}:{port}"
        self._context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))

    def open(
        self, method: str, path: str, body: object = None, content: str = "application/json",
        seconds: float = ANSWER_SECONDS,
    ) -> http.client.HTTPResponse:  # fmt: skip
        """An answer that is still to be read.

        Raises:
            Away: none, or one that may be another the next time.
            Refused: it says no.
        """
        # The token is renewed in its file.
        headers = {"Authorization": f"Bearer {(ACCOUNT / 'token').read_text().strip()}"}
        data = None
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body).encode(), content
        request = urllib.request.Request(
            self._base + path, data=data, headers=headers, method=method
        )
        try:
            answer: http.client.HTTPResponse = urllib.request.urlopen(
                request, timeout=seconds, context=self._context
            )
            return answer
        except urllib.error.HTTPError as error:
            with error:
                said = error.read().decode(errors="replace")
            with contextlib.suppress(ValueError, AttributeError):
                said = str(json.loads(said).get("message", said))
            if error.code in (401, 429) or error.code >= 500:
                raise Away(f"{error.code}: {said}") from None
            raise Refused(error.code, said) from None
        except (OSError, http.client.HTTPException) as error:
            raise Away(str(error)) from error

    def text(
        self, method: str, path: str, body: object = None, content: str = "application/json"
    ) -> str:
        """As `open`; the whole answer."""
        try:
            with self.open(method, path, body, content) as answer:
                return answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise Away(str(error)) from error

    def call(self, method: str, path: str, *body: Any) -> Object:
        """As `text`; the answer's document."""
        return json.loads(self.text(method, path, *body))  # type: ignore[no-any-return]

    def maybe(self, path: str) -> Object | None:
        """What is there; None: nothing."""
        try:
            return self.call("GET", path)
        except Refused as error:
            if error.status == 404:
                return None
            raise

    def apply(self, path: str, body: Object) -> Object:
        query = f"fieldManager={MANAGER}&force=true"
        return self.call("PATCH", f"{path}?{query}", body, "application/apply-patch+yaml")

    def delete(self, path: str, options: Object) -> None:
        """Remove it if it is there, and is the one that is meant (``preconditions``)."""
        try:
            self.call("DELETE", path, options)
        except Refused as error:
            if error.status not in (404, 409):
                raise


# ---------------------------------------------------------------- what is seen


class Pod(NamedTuple):
    """What matters of one pod of a node."""

    name: str
    uid: str
    node: int
    exit_code: int | None
    """None: it has not ended."""
    started_at: float | None
    leaving: bool
    """Whether it is being removed, or was evicted."""
    lost: bool
    """Whether its node of the cluster is gone, and nobody there will say that it has ended."""
    silent_since: float | None
    """Unix time from which its node has not answered."""
    made_at: str = ""
    held: bool = False
    """Whether a finalizer keeps it."""
    followed: bool = False
    """Whether it ended because another node had."""


def read_pod(document: Mapping[str, Any], index: str | None, now: float) -> Pod | None:
    """A node's pod from the API server's document; None: it is no node's.

    Args:
        index: label that holds the node's rank; None: it is node 0.
        now: Unix time.
    """
    meta, status = document["metadata"], document.get("status") or {}
    if (node := node_of(document, index)) is None:
        return None
    containers = status.get("containerStatuses") or []
    state = (containers[0].get("state") or {}) if containers else {}
    running, ended = state.get("running"), state.get("terminated")
    phase = status.get("phase")
    code: int | None = None
    if phase in ("Succeeded", "Failed"):
        # Evicted before it began: it never had a container.
        code = 0 if phase == "Succeeded" else int((ended or {}).get("exitCode") or 1)
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    ready, disruption = conditions.get("Ready", {}), conditions.get("DisruptionTarget", {})
    due = unix(meta.get("deletionTimestamp"))
    tainted = disruption.get("reason") == "DeletionByTaintManager"
    silent = phase == "Running" and running is not None and ready.get("status") == "False"
    return Pod(
        name=meta["name"],
        uid=meta["uid"],
        node=node,
        exit_code=code,
        started_at=unix((running or ended or {}).get("startedAt")),
        leaving=due is not None or disruption.get("status") == "True",
        lost=tainted and running is not None and due is not None and now > due + FORCE_SECONDS,
        silent_since=unix(ready.get("lastTransitionTime")) if silent else None,
        made_at=str(meta.get("creationTimestamp") or ""),
        held=bool(meta.get("finalizers")),
        followed=f'"reason": "{FOLLOWED}' in str((ended or {}).get("message")),
    )


def node_of(document: Mapping[str, Any], index: str | None) -> int | None:
    """The rank of a pod's node, as its label ``index`` says; None: it runs no node agent."""
    labels = document["metadata"].get("labels") or {}
    number = "0" if index is None else str(labels.get(index, ""))
    return int(number) if labels.get(ROLE) == "node" and number.isdigit() else None


def unix(stamp: str | None) -> float | None:
    """Kubernetes' time as Unix seconds."""
    try:
        return float(calendar.timegm(time.strptime(str(stamp)[:19], "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return None


class Rules(NamedTuple):
    """What is to be done for a run; contents of ``watch.json``."""

    run: str
    name: str
    namespace: str
    job: str
    """API path of the job that keeps the pods."""
    objects: Sequence[Mapping[str, Any]]
    """``{"path": ..., "body": ...}`` of all that a restart makes anew, in this order."""
    rank_label: str | None
    nodes: int
    """Nodes that run an agent."""
    needed: int
    """Of these, how many must be there for the run to go on."""
    replaces: bool
    """Whether another pod may take the place of one that is gone."""
    force: bool
    """Whether pods are removed by force for that, where their nodes do not answer."""
    restarts: int
    time_limit: float | None
    lost_after: float
    stop_grace: float


class Memory:
    """What was seen of an attempt's nodes before."""

    def __init__(self) -> None:
        self.uids: dict[int, str] = {}
        self.missing_since: dict[int, float] = {}
        self.running_since: float | None = None

    def take(self, pods: Sequence[Pod], rules: Rules, now: float) -> None:
        there = {pod.node: pod for pod in pods}
        for node in range(rules.nodes):
            if node in there:
                self.uids.setdefault(node, there[node].uid)
                if (there[node].exit_code or 0) >= TAKEN_AWAY:
                    self.missing_since.setdefault(node, now)
                else:
                    self.missing_since.pop(node, None)
            elif node in self.uids:
                self.missing_since.setdefault(node, now)
        starts = [pod.started_at for pod in pods if pod.started_at is not None]
        if len(starts) >= rules.needed:
            self.running_since = min(self.running_since or max(starts), max(starts))


def verdict(pods: Sequence[Pod], memory: Memory, rules: Rules, now: float) -> tuple[str, str]:
    """How an attempt stands: ``going``, ``succeeded``, ``failed`` or ``late``; and why. Pure."""
    if (
        rules.time_limit is not None
        and memory.running_since is not None
        and now > memory.running_since + rules.time_limit
    ):
        return "late", f"over its time_limit of {rules.time_limit:g} s"
    there: dict[int, Pod] = {}
    for pod in sorted(pods, key=lambda each: (each.made_at, not each.leaving)):
        there[pod.node] = pod  # a Job's that failed may stay beside their successors
    lost: list[str] = []
    followers: list[str] = []
    done = 0
    for node in range(rules.nodes):
        one = there.get(node)
        if one is None:
            gone_since = memory.missing_since.get(node)
            if not rules.replaces and gone_since is not None and now > gone_since + GONE_SECONDS:
                lost.append(f"node {node}: its pod is gone")
        elif one.exit_code == 0 and not one.leaving:
            done += 1
        elif not rules.replaces and one.uid != memory.uids.get(node, one.uid):
            lost.append(f"node {node}: its pod was replaced")
        elif one.leaving:
            if not rules.replaces:
                lost.append(f"node {node}: its pod was deleted")
        elif one.exit_code and rules.replaces and one.exit_code >= TAKEN_AWAY:
            gone_since = memory.missing_since.get(node)
            if gone_since is not None and now > gone_since + GONE_SECONDS:
                lost.append(f"node {node}: exit code {one.exit_code}")
        elif one.exit_code:
            (followers if one.followed else lost).append(f"node {node}: exit code {one.exit_code}")
        elif (
            not rules.replaces
            and one.silent_since is not None
            and now > one.silent_since + rules.lost_after
        ):
            lost.append(f"node {node}: its node of the cluster does not answer")
    lost += followers
    if rules.nodes - len(lost) < rules.needed:
        return "failed", lost[0]
    if done and done + len(lost) == rules.nodes:
        return "succeeded", ""
    return "going", ""


# ---------------------------------------------------------------- the Lease


def lease_seconds(lost_after: float) -> float:
    """How long a Lease is good that nobody renews."""
    return max(LEAST_LEASE_SECONDS, lost_after)


class Lease:
    """Who does the work. Its age is told by one's own clock, from when it was seen to change."""

    def __init__(self, api: Api, path: str, seconds: float) -> None:
        self._api = api
        self._path = path
        self._seconds = seconds
        self._seen: tuple[object, ...] = ()
        self._changed = time.monotonic()

    def mine(self) -> bool:
        """Whether the work is this watcher's; takes it when nobody else does it.

        Raises:
            Away: the API server does not answer: then nobody can do anything.
        """
        try:
            found = self._api.maybe(self._path)
        except Away:
            self._changed = time.monotonic()  # others could not renew it either
            raise
        if found is None:
            return False  # the run is being removed, or not all there yet
        spec = found.get("spec") or {}
        seen = (spec.get("holderIdentity"), spec.get("renewTime"))
        if seen != self._seen:
            self._seen, self._changed = seen, time.monotonic()
        if seen[0] == WATCHER:
            return True
        if time.monotonic() < self._changed + self._seconds:
            return False
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", time.gmtime())
        body = {
            "metadata": {"resourceVersion": found["metadata"]["resourceVersion"]},
            "spec": {"holderIdentity": WATCHER, "renewTime": stamp},
        }
        try:
            self._api.call("PATCH", self._path, body, "application/merge-patch+json")
        except Refused:
            return False  # somebody was faster
        return True


# ---------------------------------------------------------------- the work


class Watcher:
    """Follows one run to its end."""

    def __init__(self, api: Api, rules: Rules) -> None:
        self.api = api
        self.rules = rules
        root = f"/api/v1/namespaces/{rules.namespace}"
        self._pods_path = f"{root}/pods"
        selector = quote(f"{RUN}={rules.run}", safe="")
        self._list_path = f"{root}/pods?labelSelector={selector}"
        self._record_path = f"{root}/configmaps/{rules.name}-watch"
        self._root_path = f"/apis/batch/v1/namespaces/{rules.namespace}/jobs/{rules.name}-watch"
        self._lease = Lease(
            api,
            f"/apis/coordination.k8s.io/v1/namespaces/{rules.namespace}/leases/{rules.name}-watch",
            lease_seconds(rules.lost_after),
        )
        self._changed = threading.Event()
        self._memories: dict[int, Memory] = {}
        self._failed_at: dict[int, float] = {}
        self._born = time.monotonic()
        self._job_seen = False

    def main(self) -> None:
        """Until the run has ended, and there is nothing left to do for it."""
        threading.Thread(target=self._listen, daemon=True).start()
        said = ""
        while True:
            try:
                if self._turn():
                    return
                said = ""
            except (Away, Refused) as error:
                if str(error) != said:
                    said = str(error)
                    say(said)
                time.sleep(AGAIN_SECONDS)
            self._wait(LOOK_SECONDS)

    def _wait(self, seconds: float) -> None:
        """Until a pod of the run changes, at most so long."""
        self._changed.wait(seconds)
        self._changed.clear()

    def _listen(self) -> None:
        """End `_wait` whenever a pod of the run changes."""
        while True:
            try:
                version = self.api.call("GET", f"{self._list_path}&limit=1")["metadata"]
                path = (
                    f"{self._list_path}&watch=1&timeoutSeconds={WATCH_SECONDS}"
                    f"&resourceVersion={version['resourceVersion']}"
                )
                with self.api.open("GET", path, seconds=WATCH_SECONDS + 20) as answer:
                    for _ in answer:
                        self._changed.set()
            except (Away, Refused, OSError, http.client.HTTPException):
                time.sleep(AGAIN_SECONDS)

    def _turn(self) -> bool:
        """Look, and do what is to be done; whether the run has ended."""
        if not self._lease.mine():
            return False
        job = self.api.maybe(self.rules.job)
        if job is None:
            return self._without_job()
        if job["metadata"].get("deletionTimestamp"):
            return False
        self._job_seen = True
        attempt = int(job["metadata"]["labels"][ATTEMPT])
        memory = self._memories.setdefault(attempt, Memory())
        listed, now = self._listed(attempt), time.time()
        pods = self._read(listed, now)
        memory.take(pods, self.rules, now)
        if self.rules.force:
            self._force(pods)
        state, why = verdict(pods, memory, self.rules, now)
        if state == "going" or (state == "failed" and not self._ended(attempt, pods)):
            return False
        if state == "succeeded":
            self._write({"verdict": {"state": "SUCCEEDED", "attempt": attempt}})
            say(f"attempt {attempt} has succeeded")
            return True
        return self._failed(attempt, state, why, job, listed)

    def _without_job(self) -> bool:
        """The job is gone: a restart was cut short, or somebody has deleted it."""
        record = self._record()
        if "restarting" in record:
            self._begin(int(record["restarting"]))
            return False
        if self._job_seen or time.monotonic() > self._born + 2 * lease_seconds(
            self.rules.lost_after
        ):
            say("its job was deleted: removing what belongs to it")
            self.api.delete(self._root_path, {"propagationPolicy": "Background"})
            return True
        return False

    def _ended(self, attempt: int, pods: Sequence[Pod]) -> bool:
        """Whether all nodes have ended that will end by themselves."""
        started = self._failed_at.setdefault(attempt, time.monotonic())
        if all(pod.exit_code is not None for pod in pods):
            return True
        return time.monotonic() > started + self.rules.stop_grace + PEERS_SECONDS

    def _failed(
        self, attempt: int, state: str, why: str, job: Object, pods: Sequence[Object]
    ) -> bool:
        left = self.rules.restarts - (attempt - 1)
        again = state == "failed" and left > 0
        verdict = {"state": "FAILED", "attempt": attempt, "why": why}
        self._keep(attempt, pods)
        if not again and all(self._code(each) is not None for each in pods):
            # They hold nothing, and have their logs.
            self._write({"verdict": verdict})
            say(f"attempt {attempt} has failed: {why}")
            return True
        if again:
            # First: if this is cut short, whoever comes next goes on from here.
            event = f"attempt {attempt} failed: {why}; the watcher in the cluster starts it again"
            left_words = f"{left - 1} restart{'' if left == 2 else 's'} left"
            self._write({"restarting": str(attempt + 1)}, f"{event}, {left_words}")
        else:
            event = f"attempt {attempt} ended by the watcher in the cluster: {why}"
            self._write({"verdict": {**verdict, "late": state}}, event)
        say(event)
        self._remove_job(job, attempt)
        if again:
            self._begin(attempt + 1)
        return not again

    def _remove_job(self, job: Object, attempt: int) -> None:
        options = {
            "propagationPolicy": "Background",
            "preconditions": {"uid": job["metadata"]["uid"]},
        }
        self.api.delete(self.rules.job, options)
        while True:
            there = self._listed(attempt)
            if not there and self.api.maybe(self.rules.job) is None:
                return
            self._force(self._read(there, time.time()))
            self._wait(AGAIN_SECONDS)

    def _begin(self, attempt: int) -> None:
        """Make the job anew, as the given attempt."""
        owner = reference(self.api.call("GET", self._root_path))
        for each in self.rules.objects:
            body = json.loads(json.dumps(each["body"]))
            renumber(body, str(attempt))
            body["metadata"]["ownerReferences"] = [owner]
            self.api.apply(str(each["path"]), body)
        self._write({"restarting": None})
        say(f"attempt {attempt} begun")

    # -- pods

    def _listed(self, attempt: int) -> list[Object]:
        items = self.api.call("GET", self._list_path)["items"]
        return [
            each for each in items
            if (each["metadata"].get("labels") or {}).get(ATTEMPT) == str(attempt)
        ]  # fmt: skip

    def _read(self, listed: Sequence[Object], now: float) -> list[Pod]:
        found = (read_pod(each, self.rules.rank_label, now) for each in listed)
        return [pod for pod in found if pod is not None]

    def _code(self, document: Object) -> int | None:
        pod = read_pod(document, self.rules.rank_label, time.time())
        return 0 if pod is None else pod.exit_code

    def _force(self, pods: Sequence[Pod]) -> None:
        """Remove pods that nobody can end any more: until then nothing takes their place."""
        for pod in pods:
            if pod.lost:
                say(f"{pod.name}: its node does not answer; removed by force")
                path = f"{self._pods_path}/{pod.name}"
                options = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod.uid}}
                self.api.delete(path, options)
                if pod.held:
                    body = {"metadata": {"uid": pod.uid, "finalizers": None}}
                    with contextlib.suppress(Refused):  # it is gone, or another one by now
                        self.api.call("PATCH", path, body, "application/merge-patch+json")

    # -- the record

    def _record(self) -> Mapping[str, str]:
        found = self.api.maybe(self._record_path)
        return {} if found is None else found.get("data") or {}

    def _write(self, data: Mapping[str, Any], event: str | None = None) -> None:
        """Add to the record; None removes a key."""
        texts = {
            key: value if value is None or isinstance(value, str) else json.dumps(value)
            for key, value in data.items()
        }
        if event is not None:
            line = json.dumps({"at": time.time(), "text": event})
            texts["events"] = self._record().get("events", "") + line + "\n"
        self.api.call("PATCH", self._record_path, {"data": texts}, "application/merge-patch+json")

    def _keep(self, attempt: int, pods: Sequence[Object]) -> None:
        """How the attempt's pods ended, and the ends of their logs: those that failed first."""
        before = {key: text for key, text in self._record().items() if key != f"attempt-{attempt}"}
        used = sum(map(len, before.values()))
        old = [key for key in before if key.startswith("attempt-")]
        old.sort(key=lambda key: int(key.rpartition("-")[2]))
        while old and used > RECORD_BYTES / 2:
            # What happened last matters most.
            used -= len(before[old[0]])
            self._write({old.pop(0): None})
        kept = []
        for each in sorted(pods, key=lambda each: self._code(each) in (None, 0)):
            meta, spec = each["metadata"], each["spec"]
            keys = ("name", "uid", "labels", "deletionTimestamp")
            document: Object = {
                "metadata": {key: meta[key] for key in keys if key in meta},
                "spec": {
                    "nodeName": spec.get("nodeName"),
                    "containers": [
                        {key: part.get(key) for key in ("name", "image", "resources")}
                        for part in spec["containers"]
                    ],
                },
                "status": each.get("status"),
            }
            entry = {"pod": document, "log": self._tail(meta["name"])}
            used += len(json.dumps(entry))
            if used > RECORD_BYTES:
                entry["log"] = ""
            kept.append(entry)
            if used > RECORD_BYTES + 50_000:
                break
        self._write({f"attempt-{attempt}": kept})

    def _tail(self, name: str) -> str:
        path = f"{self._pods_path}/{name}/log?timestamps=true&tailLines=2000"
        try:
            return self.api.text("GET", path)[-TAIL_BYTES:]
        except (Away, Refused):
            return ""


def reference(made: Mapping[str, Any]) -> Object:
    """How other objects name it as their owner."""
    return {
        "apiVersion": made["apiVersion"],
        "kind": made["kind"],
        "name": made["metadata"]["name"],
        "uid": made["metadata"]["uid"],
    }


def renumber(value: Any, attempt: str) -> None:
    """Give every label that numbers the attempt this number."""
    if isinstance(value, dict):
        if isinstance(value.get(ATTEMPT), str):
            value[ATTEMPT] = attempt
        for inner in value.values():
            renumber(inner, attempt)
    elif isinstance(value, list):
        for inner in value:
            renumber(inner, attempt)


def say(text: str) -> None:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    print(f"{stamp} {text}", flush=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="watcher.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rules", type=Path, help="watch.json of the run")
    options = parser.parse_args(arguments)
    # As a failure: of a pod that ends well its Job would make no other.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    Watcher(Api(), Rules(**json.loads(options.rules.read_bytes()))).main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
