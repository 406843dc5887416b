"""The status of nodes from their agents' reports."""

from __future__ import annotations

import posixpath

import msgspec

from clusterkit.agent import archive
from clusterkit.backends.base import Observation
from clusterkit.backends.node_status import NativeState, NodeFiles, judge_node, observed
from clusterkit.output.mirror import NodeView, Watch
from clusterkit.run.folder import RunHandle, node_dir
from clusterkit.run.status import NodeStatus, State
from clusterkit.transport import Stream, Transport


def views(handle: RunHandle) -> list[NodeView]:
    """Return a view of each node, with what the run folder holds of it already."""
    plan = handle.plan
    return [
        NodeView.of(node, plan.hosts[node], handle.folder.node_dir(handle.attempt, node))
        for node in range(plan.nodes)
    ]


def open_report(handle: RunHandle, view: NodeView, transport: Transport, *, follow: bool) -> Stream:
    """Start the agent's ``report`` on a node's host: it sends what the view does not hold yet."""
    plan, offsets = handle.plan, view.offsets()
    agent = posixpath.join(plan.run_dir, "files", archive.ARCHIVE)
    folder = node_dir(plan.run_dir, handle.attempt, view.node)
    argv = [plan.python, "-I", "-S", agent, "report", folder]
    argv += ["--log", str(offsets["log"]), "--ranks", str(offsets["ranks.jsonl"])]
    return transport.open(view.host, [*argv, "--follow"] if follow else argv)


def observation(handle: RunHandle, views: list[NodeView], lost_after: float) -> Observation | None:
    """Return the state of an attempt from its nodes' reports; None: no host has the run.

    Args:
        lost_after: seconds of silence after which a node's state is unknown.
    """
    if all(not view.known for view in views):
        return None
    _count_from_our_return([view for view in views if not _finished(view)])
    nodes = tuple(_judge(view, lost_after) for view in views)
    ends = {view.node: view.files["exit.json"] for view in views if "exit.json" in view.files}
    return observed(nodes, ends)


def _finished(view: NodeView) -> bool:
    return view.ended or "exit.json" in view.files  # which is the last file of a report


def _count_from_our_return(views: list[NodeView]) -> None:
    """Have the silence of hosts begin when another one answers, after none of them did: it was
    this machine that was cut off."""
    cut_off = all([view.silent_since is not None for view in views])
    for view in views:
        if view.away and not cut_off and view.silent_since is not None:
            view.silent_since = view.clock()
        view.away = cut_off


def _judge(view: NodeView, lost_after: float) -> NodeStatus:
    silence = view.silent_for()
    finished = _finished(view)
    files = NodeFiles(
        begun=view.begun,
        alive=view.alive and not (finished and silence is not None),
        started=view.files.get("started.json"),
        exit=view.files.get("exit.json"),
        log=view.files.get("agent.log", b""),
    )
    if silence is not None and (error := view.error) is not None and not finished:
        answer = "it answers, but sends no report" if error.answered else "no answer"
        reason = f"{error.message} ({answer} for {silence:.0f} s)"
        if error.answered and error.hint:
            reason += f"; {error.hint}"
        # Silence is no evidence of an end; see `run.reconcile`.
        state = State.UNKNOWN if silence >= lost_after else State.RUNNING
        native = NativeState(state=state, reason=reason)
    elif not view.known:
        reason = f"nothing is left of the run on host {view.host}"
        native = NativeState(state=State.UNKNOWN, reason=reason)
    else:
        native = NativeState.of_process(files)
    node = judge_node(view.node, view.host, files, native)
    if view.write_error is not None:
        remark = f"its log here is incomplete: {view.write_error}"
        node = msgspec.structs.replace(node, remarks=(*node.remarks, remark))
    return node


class SshMonitor:
    """Follows the nodes of an attempt, with one stream per host.

    The supervisor polls ten times a second. The nodes are judged again only after news of one of
    them, or while a host is silent.
    """

    def __init__(self, handle: RunHandle, transport: Transport) -> None:
        self._handle = handle
        job = handle.plan.job
        self._watch = Watch(
            views(handle),
            lambda view: open_report(handle, view, transport, follow=True),
            back=job is not None and (job.shrinks or job.spares > 0),
        )
        self._judged_changes = -1
        self._last: Observation | None = None

    def status(self) -> Observation | None:
        views = self._watch.views
        # Counted before the nodes are judged: later news is for the next poll.
        changes = sum([view.changes for view in views])
        silent = any([view.silent_since is not None for view in views])
        if silent or changes != self._judged_changes:
            self._last = observation(self._handle, list(views), self._handle.plan.lost_after)
            self._judged_changes = changes
        return self._last

    def close(self) -> None:
        self._watch.close()
