"""Telling somebody that a run has ended, failed or begun again: a command, or a web address.

What is told is one JSON document: a command gets it on its standard input, an address as the body
of a POST. It is told beside the run: nothing of it can end a run or hold it up.
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
from clusterkit.status import RunStatus, State

SECONDS = 10.0
"""How long a command may take, or an address to answer."""


class NotTold(ClusterkitError):
    """The command failed or the address did not take it; the message says why."""


class Message(Struct, frozen=True):
    """What is told. Chat services show ``text`` of such a document."""

    event: Literal["ended", "failed", "restarted", "test"]
    text: str
    status: RunStatus | None = None
    """As `clusterkit status --json` has it."""


def message(status: RunStatus) -> Message:
    """What there is to tell of a run that has ended, or that starts again."""
    why = f": {status.failure.who}: {status.failure.summary}" if status.failure else ""
    if status.state is State.RESTARTING:
        text = f"{status.run}: attempt {status.attempt} failed{why}; starting again"
        return Message("restarted", text, status)
    failed = status.state not in (State.SUCCEEDED, State.CANCELLED)
    return Message("failed" if failed else "ended", f"{status.run} {status.state}{why}", status)


def tell(spec: NotifySpec, told: Message) -> str:
    """Tell it, and wait until that is done; gives what was told, in words.

    Raises:
        NotTold: it was not.
    """
    body = msgspec.json.encode(told)
    if spec.command:
        import subprocess

        try:
            done = subprocess.run(spec.command, input=body, capture_output=True, timeout=SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotTold(f"notify: {spec.command[0]}: {_why(error)}") from None
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise NotTold(f"notify: {spec.command[0]}: exit code {done.returncode}: {said}")
        return f"{spec.command[0]} was told: {told.event}"
    import urllib.request

    address = os.environ.get(spec.url_from or "", "")
    if not address.startswith(("http://", "https://")):
        what = "is not set" if not address else "is no web address"
        raise NotTold(f"notify: ${spec.url_from} {what}", f"export {spec.url_from}=https://...")
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS):
            pass
    except (OSError, ValueError) as error:  # its text may hold the address, which is a secret
        code = getattr(error, "code", None)
        said = f"HTTP {code}" if code else _why(error)
        raise NotTold(f"notify: ${spec.url_from}: {said.replace(address, '...')}") from None
    return f"${spec.url_from} was told: {told.event}"


def tell_of(spec: NotifySpec | None, status: RunStatus, note: Callable[[str], None]) -> None:
    """Tell of a run, if somebody wants to hear of it; ``note`` is given how that went.

    Of a run that goes on it is told beside it; of one that has ended before this returns.
    """
    told = message(status)
    if spec is None or told.event not in spec.on:
        return

    def work() -> None:
        try:
            note(tell(spec, told))
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
