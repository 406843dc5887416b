"""What the nodes' reports mean, one stream per host."""

from __future__ import annotations

import posixpath

import msgspec

from clusterkit.agent import archive
from clusterkit.backends.base import Observation
from clusterkit.backends.node_status import NodeFiles, judge_node, observed
from clusterkit.output.mirror import NodeView, Watch
from clusterkit.run.folder import RunHandle, node_dir
from clusterkit.run.status import NodeStatus, State
from clusterkit.transport import Stream, Transport


def views(handle: RunHandle) -> list[NodeView]:
    plan = handle.plan
    return [
        NodeView.of(node, plan.hosts[node], handle.folder.node_dir(handle.attempt, node))
        for node in range(plan.nodes)
    ]


def report(handle: RunHandle, view: NodeView, transport: Transport, *, follow: bool) -> Stream:
    plan = handle.plan
    known = view.offsets()
    return transport.open(
        view.host,
        [
            plan.python, "-I", "-S", posixpath.join(plan.run_dir, "files", archive.ARCHIVE),
            "report", node_dir(plan.run_dir, handle.attempt, view.node),
            "--log", str(known["log"]), "--ranks", str(known["ranks.jsonl"]),
            *(["--follow"] if follow else []),
        ],
    )  # fmt: skip


def observation(handle: RunHandle, views: list[NodeView], patience: float) -> Observation | None:
    if all(not view.known for view in views):
        return None
    # When nobody answers, it is the submitter that is cut off.
    cut_off = len(views) > 1 and all(view.silent_for() is not None for view in views)
    nodes = tuple(_judge(view, patience, cut_off) for view in views)
    ends = {view.node: view.files["exit.json"] for view in views if "exit.json" in view.files}
    return observed(nodes, ends)


def _judge(view: NodeView, patience: float, cut_off: bool) -> NodeStatus:
    def status(state: State, reason: str) -> NodeStatus:
        return NodeStatus(node=view.node, host=view.host, state=state, reason=reason)

    silence = view.silent_for()
    finished = view.ended or "exit.json" in view.files  # it has said how, as its last word
    if silence is not None and view.error is not None and not finished:
        said = f"{view.error.message} (no answer for {silence:.0f} s)"
        lost = silence >= patience and not cut_off
        if lost or not patience:
            return status(State.UNKNOWN, said)
        return status(State.RUNNING if view.begun else State.PENDING, said)
    if not view.known:
        return status(State.UNKNOWN, f"nothing is left of the run on host {view.host}")
    alive = view.alive and not (finished and silence is not None)
    found = judge_node(view.node, view.host, NodeFiles(
        begun=view.begun, alive=alive, started=view.files.get("started.json"),
        exit=view.files.get("exit.json"), log=view.files.get("agent.log", b""),
    ))  # fmt: skip
    if view.write_error is not None:
        remark = f"its log here is incomplete: {view.write_error}"
        found = msgspec.structs.replace(found, remarks=(*found.remarks, remark))
    return found


class SshMonitor:
    """All nodes through one stream per host.

    The supervisor asks ten times a second: what was seen is judged anew only when there is news, or
    while a host is silent.
    """

    def __init__(self, handle: RunHandle, transport: Transport) -> None:
        self._handle = handle
        self._patience = handle.plan.lost_after
        job = handle.plan.job
        self._watch = Watch(
            views(handle), lambda view: report(handle, view, transport, follow=True),
            back=job is not None and (job.shrinks or job.spares > 0),
        )  # fmt: skip
        self._judged = -1
        self._seen: Observation | None = None

    def status(self) -> Observation | None:
        views = self._watch.views
        changes = sum([view.changes for view in views])  # before looking: what comes now comes next
        if changes != self._judged or any([view.silent_since is not None for view in views]):
            self._seen = observation(self._handle, list(views), self._patience)
            self._judged = changes
        return self._seen

    def close(self) -> None:
        self._watch.close()
