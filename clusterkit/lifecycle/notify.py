"""Sends notifications that a run has ended, failed or restarts, to a command or a web address.

A notification is one JSON document: a command gets it on its standard input, an address as the
body of a POST. A thread of its own sends it, so it can neither end nor delay a run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import Struct

from clusterkit.cluster import NotifySpec
from clusterkit.errors import ClusterkitError
from clusterkit.run.status import RunStatus, State

SECONDS = 10.0
"""How long a command may take, or an address to answer."""


class NotifyFailed(ClusterkitError):
    """The command failed or the address did not accept the notification."""


class Notification(Struct, frozen=True):
    """The document that is sent. Chat services show its ``text``."""

    event: Literal["ended", "failed", "restarted", "test"]
    text: str
    status: RunStatus | None = None
    """The same as `clusterkit status --json`."""


def notification(status: RunStatus) -> Notification:
    """Return the notification of a run that has ended or restarts."""
    why = f": {status.failure.line}" if status.failure else ""
    if status.state is State.RESTARTING:
        text = f"{status.run}: attempt {status.attempt} failed{why}; starting again"
        return Notification("restarted", text, status)
    text = f"{status.run} {status.state}{why}"
    ended = status.state in (State.SUCCEEDED, State.CANCELLED)
    return Notification("ended" if ended else "failed", text, status)


def send(spec: NotifySpec, message: Notification) -> str:
    """Send a notification and wait for the answer. Return a line for the run's events.

    Raises:
        NotifyFailed: it was not accepted.
    """
    body = msgspec.json.encode(message)
    if spec.command:
        import subprocess

        try:
            done = subprocess.run(spec.command, input=body, capture_output=True, timeout=SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotifyFailed(f"notify: {spec.command[0]}: {_why(error)}") from None
        if done.returncode:
            last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise NotifyFailed(f"notify: {spec.command[0]}: exit code {done.returncode}: {last}")
        return f"{spec.command[0]} was notified: {message.event}"
    import urllib.request

    address = os.environ.get(spec.url_from or "", "")
    if not address.startswith(("http://", "https://")):
        problem = "is not set" if not address else "is not an http(s) URL"
        raise NotifyFailed(
            f"notify: ${spec.url_from} {problem}", f"export {spec.url_from}=https://..."
        )
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS):
            pass
    except (OSError, ValueError) as error:  # its text may hold the address, which is a secret
        code = getattr(error, "code", None)
        why = f"HTTP {code}" if code else _why(error)
        raise NotifyFailed(f"notify: ${spec.url_from}: {why.replace(address, '...')}") from None
    return f"${spec.url_from} was notified: {message.event}"


def notify(spec: NotifySpec | None, status: RunStatus, note: Callable[[str], None]) -> None:
    """Send a notification if the cluster entry asks for it; ``note`` is called with the result.

    Waits for the answer only if the run has ended.
    """
    message = notification(status)
    if spec is None or message.event not in spec.on:
        return

    def work() -> None:
        try:
            note(send(spec, message))
        except Exception as error:
            note(str(getattr(error, "message", error)))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    if status.state.final:
        thread.join(SECONDS + 1)


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return f"no answer within {SECONDS:g} s"
    return str(getattr(error, "strerror", None) or getattr(error, "reason", None) or error)
