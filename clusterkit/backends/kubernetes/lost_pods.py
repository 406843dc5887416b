"""Removes a run's pods by force from nodes of the cluster that do not answer.

Nothing takes the place of such a pod before, whatever kind of job it is of: it stays, as nobody on
its node can say that it has ended. That is all that Kubernetes does not do for a run by itself.

One file, standard library only: it comes in the run's config map and is run by the image's own
Python, in a small pod that belongs to the run. Whoever watches the run from outside does the same,
with the functions here; it does no harm that two do.

    python3 -I lost_pods.py NAMESPACE SELECTOR SECONDS
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

LOOK_SECONDS = 5.0
IDLE_SECONDS = 900.0
"""How long no pod of the run may be there that has not ended: the run has."""
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
JSON, MERGE_PATCH = "application/json", "application/merge-patch+json"


def unreachable_since(pod: Mapping[str, Any]) -> float | None:
    """Unix time from which the node of a pod that has not ended has not answered; None: it does.

    Of its pods the cluster says that they are not ready. A kubelet that says so says the same of
    their containers.
    """
    told = conditions_of(pod)
    ready, containers = (told.get(each, {}) for each in ("Ready", "ContainersReady"))
    if ended(pod):
        return None
    if ready.get("status") == "False" and containers.get("status") == "True":
        return unix(ready.get("lastTransitionTime"))
    if told.get("DisruptionTarget", {}).get("reason") == "DeletionByTaintManager":
        return unix(pod["metadata"].get("deletionTimestamp"))  # when it should have ended
    return None


def conditions_of(document: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """An object's conditions, by their type."""
    return {each["type"]: each for each in (document.get("status") or {}).get("conditions") or ()}


def ended(pod: Mapping[str, Any]) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def unix(stamp: str | None) -> float | None:
    """Kubernetes' time as Unix seconds."""
    try:
        return float(calendar.timegm(time.strptime(str(stamp)[:19], "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return None


def force(request: Callable[..., object], path: str, uid: str, *, held: bool) -> None:
    """Remove the pod at a path at once; none that has its name by now.

    Args:
        request: takes a method, a path, a body and its content type.
        held: whether it has finalizers: a Job holds its pods until they have ended, which this one
            will not say.
    """
    request("DELETE", path, {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}, JSON)
    if held:
        body = {"metadata": {"uid": uid, "finalizers": None}}
        request("PATCH", path, body, MERGE_PATCH)


# ---------------------------------------------------------------- in the cluster


def ask(method: str, path: str, body: object = None, content: str = JSON) -> Any:
    """What the API server of the cluster that this pod is in answers."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    base = f"https://{f'[{host}]' if ':' in host else host}:{port}"
    # The token is renewed in its file.
    headers = {"Authorization": f"Bearer {(ACCOUNT / 'token').read_text().strip()}"}
    data = None if body is None else json.dumps(body).encode()
    headers |= {} if body is None else {"Content-Type": content}
    request = urllib.request.Request(base + path, data=data, headers=headers, method=method)
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    with urllib.request.urlopen(request, timeout=30, context=context) as answer:
        return json.load(answer)


def look(pods: str, selector: str, seconds: float) -> bool:
    """Remove what is to be removed; whether there is a pod that has not ended."""
    listed = ask("GET", f"{pods}?labelSelector={quote(selector, safe='')}")["items"]
    for each in listed:
        since, meta = unreachable_since(each), each["metadata"]
        if since is not None and time.time() > since + seconds:
            print(f"{meta['name']}: its node does not answer: removed by force", flush=True)
            path, held = f"{pods}/{meta['name']}", bool(meta.get("finalizers"))
            with contextlib.suppress(OSError):  # somebody was faster; else the next time
                force(ask, path, meta["uid"], held=held)
    return not all(map(ended, listed))


def main(namespace: str, selector: str, seconds: str) -> None:
    """Until the run has ended."""
    said, alive = "", time.monotonic()
    while time.monotonic() < alive + IDLE_SECONDS:
        try:
            if look(f"/api/v1/namespaces/{namespace}/pods", selector, float(seconds)):
                alive = time.monotonic()
            said = ""
        except (OSError, http.client.HTTPException, ValueError) as error:
            alive = time.monotonic()
            if str(error) != said:
                said = str(error)
                print(said, file=sys.stderr, flush=True)
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    # As a failure: of a pod that ends well its Job would make no other.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    main(*sys.argv[1:])
