"""The watcher of a run: removes pods by force from nodes of the cluster that do not answer.

Kubernetes replaces such a pod only after it was removed by force, as no kubelet reports its end.

One file, standard library only: it is in the run's config map, and the image's Python runs it in a
small pod of the run. A monitor outside the cluster does the same with the functions here, which may
run at the same time.

    python3 -I -S lost_pods.py NAMESPACE SELECTOR SECONDS
"""

from __future__ import annotations

import calendar
import contextlib
import http.client
import json
import os
import signal
import ssl
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

POLL_SECONDS = 5.0
IDLE_SECONDS = 900.0
"""How long to go on while all pods have ended: then the run has."""
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
JSON, MERGE_PATCH = "application/json", "application/merge-patch+json"


def unreachable_since(pod: Mapping[str, Any]) -> float | None:
    """Return the Unix time from which a pod's node has not answered; None: it does, or the pod has
    ended.

    The node controller sets Ready alone; a kubelet sets ContainersReady as well.
    """
    if ended(pod):
        return None
    conditions = conditions_of(pod)
    ready, containers = (conditions.get(each, {}) for each in ("Ready", "ContainersReady"))
    gated = ready.get("reason") == "ReadinessGatesNotReady"  # also by the kubelet
    if ready.get("status") == "False" and containers.get("status") == "True" and not gated:
        return unix(ready.get("lastTransitionTime"))
    if conditions.get("DisruptionTarget", {}).get("reason") == "DeletionByTaintManager":
        return unix(pod["metadata"].get("deletionTimestamp"))  # when it should have ended
    return None


def conditions_of(document: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return an object's conditions by their type."""
    return {each["type"]: each for each in (document.get("status") or {}).get("conditions") or ()}


def ended(pod: Mapping[str, Any]) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def unix(stamp: str | None) -> float | None:
    """Return a time of Kubernetes as Unix seconds; None if it is none."""
    try:
        return float(calendar.timegm(time.strptime(str(stamp)[:19], "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return None


def force(request: Callable[..., object], path: str, uid: str, *, held: bool) -> None:
    """Remove the pod at a path at once, if it has this uid.

    Args:
        request: takes a method, a path, a body and its content type.
        held: whether it has finalizers: those of a Job stay until its end is reported.
    """
    request("DELETE", path, {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}, JSON)
    if held:
        body = {"metadata": {"uid": uid, "finalizers": None}}
        request("PATCH", path, body, MERGE_PATCH)


# ---------------------------------------------------------------- in the cluster


def ask(method: str, path: str, body: object = None, content: str = JSON) -> Any:
    """Send a request to the API server of this pod's cluster, and return the answer."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    base = f"https://{f'[{host}]' if ':' in host else host}:{port}"
    # Read each time: the token is renewed in its file.
    headers = {"Authorization": f"Bearer {(ACCOUNT / 'token').read_text().strip()}"}
    data = None if body is None else json.dumps(body).encode()
    headers |= {} if body is None else {"Content-Type": content}
    request = urllib.request.Request(base + path, data=data, headers=headers, method=method)
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    with urllib.request.urlopen(request, timeout=30, context=context) as answer:
        return json.load(answer)


def poll(pods: str, selector: str, seconds: float, silent: dict[Any, float]) -> bool:
    """Remove pods that are lost for so many seconds; returns whether any pod has not ended.

    Args:
        silent: since when pods were seen to be silent, by this machine's monotonic clock, whose
            time of day may differ from the server's; kept from poll to poll.
    """
    listed = ask("GET", f"{pods}?labelSelector={quote(selector, safe='')}")["items"]
    before, now = silent.copy(), time.monotonic()
    silent.clear()
    for each in listed:
        since, meta = unreachable_since(each), each["metadata"]
        if since is None:
            continue
        key = (meta["uid"], since)
        silent[key] = before.get(key, now)
        if now >= silent[key] + seconds:
            print(f"{meta['name']}: NotReady: its node does not answer; force-deleted", flush=True)
            with contextlib.suppress(OSError):  # removed by another, or tried again
                force(ask, f"{pods}/{meta['name']}", meta["uid"], held=False)
    return not all(map(ended, listed))


def main(namespace: str, selector: str, seconds: str) -> None:
    """Poll until the run has ended."""
    last_error, alive = "", time.monotonic()
    silent: dict[Any, float] = {}
    while time.monotonic() < alive + IDLE_SECONDS:
        try:
            path = f"/api/v1/namespaces/{namespace}/pods"
            if poll(path, selector, float(seconds), silent):
                alive = time.monotonic()
            last_error = ""
        except (
            OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError
        ) as error:  # fmt: skip
            alive = time.monotonic()
            silent.clear()  # what has happened meanwhile is not known
            if str(error) != last_error:
                last_error = str(error)
                print(last_error, file=sys.stderr, flush=True)
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    # A failure, so that its Job replaces a watcher that is evicted.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    main(*sys.argv[1:])
