"""A run's folder, written by those who write a real one, without their processes."""

import json

import msgspec

from clusterkit.agent.node_log import NodeLog
from clusterkit.plan import Plan
from clusterkit.run.folder import RunFolder, Submission
from clusterkit.run.status import NodeStatus, RunStatus, State


class Recorded:
    """One run: what happens to it is a method."""

    def __init__(self, base, nodes=2, nproc=2, run="demo-1"):
        self.folder = RunFolder.create(run, base)
        self.nodes, self.nproc = nodes, nproc
        about = dict(run=run, job="demo", cluster="local", backend="local")
        self.folder.write_json("run.json", Submission(**about, created_at=1.0, clusterkit="0"))
        self.plan = Plan(
            run_id=run, run_dir=str(self.folder.path), backend="local", summary="", nodes=nodes,
            world_size=nodes * nproc,
            topology={"min_nodes": nodes, "nodes": nodes, "nproc_per_node": nproc},
        )  # fmt: skip
        self.folder.write("plan.json", self.plan.to_json())
        self.lock = self.folder.acquire_supervisor_lock()
        self.logs = {}
        self.status = RunStatus(**about, state=State.RUNNING, started_at=1.0)
        self.attempt(1)

    def attempt(self, number):
        for node in range(self.nodes):
            path = self.folder.node_dir(number, node)
            path.mkdir(parents=True)
            self.logs[node] = NodeLog(path)
        self.state(attempt=number)

    def state(self, state=State.RUNNING, hang=None, **fields):
        nodes = tuple(
            NodeStatus(node=node, host=f"h{node}", state=state, hang=hang if node == 0 else None)
            for node in range(self.nodes)
        )
        given = {"state": state, "nodes": nodes} | fields
        self.status = msgspec.structs.replace(self.status, **given)
        self.folder.write_json("state.json", self.status)

    def says(self, rank, *texts, node=None):
        node = rank // self.nproc if node is None else node
        self.logs[node].lines(str(rank), [text.encode() for text in texts])

    def step(self, number, rank=0, **more):
        event = {"event": "metrics", "step": number, **more}
        self.says(rank, f"@clusterkit {json.dumps(event)}")

    def close(self):
        """Nobody watches over it any more."""
        self.lock.close()
