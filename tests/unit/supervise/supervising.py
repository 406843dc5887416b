"""What the tests of supervisors share: clocks, backends that follow a script, damage."""

import shutil

import msgspec

from clusterkit.backends.base import Observation, SupportsCleanup
from clusterkit.backends.local.backend import LocalBackend
from clusterkit.errors import Unavailable
from clusterkit.run.status import NodeStatus, RunStatus, State, overall

STAMP = "2026-11-21T20:11:58.123456Z"
TRACEBACK = (
    f"{STAMP} 0 Traceback (most recent call last):\n{STAMP} 0   File x\n{STAMP} 0 ValueError: bad\n"
)


def spoil(path, damage):
    content = path.read_bytes() if path.is_file() else b""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if damage == "folder":
        path.mkdir(parents=True)
    elif damage == "half":
        path.write_bytes(content[: len(content) // 2])
    elif damage is not None:
        path.write_bytes(damage)


class Scripted(LocalBackend):
    """A backend whose attempts end as the test says; nothing is started."""

    def __init__(self, attempts):
        self.attempts = [seen if isinstance(seen, list) else [seen] for seen in attempts]
        self.submitted = []
        self.given = []  # restarts, to the agents that are started
        self.cancelled = 0
        self.cancelled_attempts = []

    def submit(self, plan, transport, *, attempt=1, secrets=None, record=None):
        self.submitted.append((attempt, plan.port))
        self.given.append(plan.restarts)

    def status(self, handle, transport):
        seen = self.attempts[handle.attempt - 1]
        found = seen.pop(0) if len(seen) > 1 else seen[0]
        port = str(handle.plan.port)
        nodes = tuple(
            msgspec.structs.replace(node, reason=node.reason and node.reason.replace("PORT", port))
            for node in found.nodes
        )
        return msgspec.structs.replace(found, nodes=nodes)

    def cancel(self, handle, transport, reason="cancelled"):
        self.cancelled += 1
        self.cancelled_attempts.append(handle.attempt)


def observed(*states, code=None, reason=None):
    codes = {State.SUCCEEDED: 0, State.FAILED: 1, State.CANCELLED: 143}
    nodes = tuple(
        NodeStatus(
            node=number, host="h", state=state, reason=reason,
            exit_code=codes.get(state) if code is None else code,
        )
        for number, state in enumerate(states)
    )  # fmt: skip
    return Observation(state=overall(set(states)), nodes=nodes)


OK, BAD, UP = State.SUCCEEDED, State.FAILED, State.RUNNING


def saved(state, **fields):
    def adopt(supervisor):
        before = msgspec.structs.replace(supervisor.status, state=state, **fields)
        supervisor.folder.write_json("state.json", before)

    return adopt


class Kept(Scripted, SupportsCleanup):
    """One whose nodes stay with a service, which does not answer the first few times."""

    silent = 0

    def clean_up(self, handle, transport):
        self.cancelled += 1
        if self.cancelled <= self.silent:
            raise Unavailable("the engine does not answer")


def said_of(run, state, **fields):
    return RunStatus(
        run=run.id, job="demo", cluster="local", backend="local", state=state, **fields
    )
