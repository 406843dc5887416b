"""Notifications that a run has ended, failed or starts again: to a command or a web address.

A notification is one JSON document: a command gets it on its standard input, an address as the
body of a POST. It is sent beside the run: nothing of it can end a run or hold it up.
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
    """The command failed or the address did not take it; the message says why."""


class Notification(Struct, frozen=True):
    """What is sent. Chat services show ``text`` of such a document."""

    event: Literal["ended", "failed", "restarted", "test"]
    text: str
    status: RunStatus | None = None
    """As `clusterkit status --json` has it."""


def notification(status: RunStatus) -> Notification:
    """The notification of a run that has ended, or that starts again."""
    why = f": {status.failure.who}: {status.failure.summary}" if status.failure else ""
    if status.state is State.RESTARTING:
        text = f"{status.run}: attempt {status.attempt} failed{why}; starting again"
        return Notification("restarted", text, status)
    text = f"{status.run} {status.state}{why}"
    ended = status.state in (State.SUCCEEDED, State.CANCELLED)
    return Notification("ended" if ended else "failed", text, status)


def send(spec: NotifySpec, what: Notification) -> str:
    """Send it, and wait until that is done; gives a line that says so.

    Raises:
        NotifyFailed: it was not taken.
    """
    body = msgspec.json.encode(what)
    if spec.command:
        import subprocess

        try:
            done = subprocess.run(spec.command, input=body, capture_output=True, timeout=SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotifyFailed(f"notify: {spec.command[0]}: {_why(error)}") from None
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise NotifyFailed(f"notify: {spec.command[0]}: exit code {done.returncode}: {said}")
        return f"{spec.command[0]} was notified: {what.event}"
    import urllib.request

    address = os.environ.get(spec.url_from or "", "")
    if not address.startswith(("http://", "https://")):
        problem = "is not set" if not address else "is no web address"
        raise NotifyFailed(
            f"notify: ${spec.url_from} {problem}", f"export {spec.url_from}=https://..."
        )
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS):
            pass
    except (OSError, ValueError) as error:  # its text may hold the address, which is a secret
        code = getattr(error, "code", None)
        said = f"HTTP {code}" if code else _why(error)
        raise NotifyFailed(f"notify: ${spec.url_from}: {said.replace(address, '...')}") from None
    return f"${spec.url_from} was notified: {what.event}"


def notify(spec: NotifySpec | None, status: RunStatus, note: Callable[[str], None]) -> None:
    """Send what the entry asks for; ``note`` is given how that went.

    While a run goes on this returns at once; of one that has ended it waits for the answer.
    """
    what = notification(status)
    if spec is None or what.event not in spec.on:
        return

    def work() -> None:
        try:
            note(send(spec, what))
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
