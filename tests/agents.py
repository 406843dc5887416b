"""Agents of several nodes on this machine, for the tests of how they watch each other."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from clusterkit.run import folder as run_folder
from clusterkit.run.logs import parse_lines

RUN = (
    "import os, sys; from clusterkit.agent import __main__, limits; "
    "from clusterkit.agent.peer import Peer; "
    # Each node leaves a file when it hears of node 0.
    "Peer.receive = lambda self, *given, do=Peer.receive: (open("
    "f\"{os.environ['DIR']}/met-{os.environ['NODE_RANK']}\", 'w').close(), do(self, *given)); "
    "limits.RANKS_GRACE = limits.PEER_GONE_SECONDS = 0.3; "
    "limits.PEER_AGAIN_SECONDS = 0.05; limits.PEER_SECONDS = 0.2; "
    "sys.exit(__main__.main(sys.argv[1:]))"
)
# Each start of a rank says who it is, and takes its exit code from its node's pipe; one that was
# ended while it read has left the end of a line there.
RANK = (
    'echo "$NODE_RANK $$" >"$DIR/up"; '
    'until [ "$code" ]; do read code <"$DIR/code-$NODE_RANK"; done; exit "$code"'
)


class Nodes:
    def __init__(self, folder):
        self.folder = folder
        self.agents = {}
        self.started = []
        with socket.create_server(("127.0.0.1", 0)) as found:
            self.port = found.getsockname()[1]
        self.up = self._pipe("up")
        self.codes = {node: self._pipe(f"code-{node}") for node in range(3)}

    def start(
        self,
        node,
        nodes=2,
        wait=60.0,
        lost_after=30.0,
        argv=("sh", "-c", RANK),
        run=RUN,
        restarts=0,
        limit=None,
        least=None,
        spares=0,
    ):
        options = ["--nproc", "1", "--workdir", "/", "--grace", "5", "--spawn",
                   "--nodes", str(nodes), "--lost-after", str(lost_after)]  # fmt: skip
        if restarts:
            options += ["--restarts", str(restarts)]
        if limit is not None:
            options += ["--time-limit", str(limit)]
        if least is not None:
            options += ["--min-nodes", str(least)]
        if spares:
            options += ["--spares", str(spares)]
        if wait:
            options += ["--rejoin", str(wait)]
        others = {}
        if nodes > 1:
            others["CLUSTERKIT_COORDINATOR"] = f"127.0.0.1:{self.port}"
            others["CLUSTERKIT_PEER_TOKEN"] = "0123456789abcdef"
        self.agents[node] = subprocess.Popen(
            [sys.executable, "-c", run, "run", *options, "--", *argv],
            env={"PATH": os.environ["PATH"], "CLUSTERKIT_RUN_DIR": str(self.folder),
                 "CLUSTERKIT_NODE_DIR": self.path(node), "CLUSTERKIT_RUN_ID": "r",
                 "CLUSTERKIT_ATTEMPT": "1", "NODE_RANK": str(node), "DIR": str(self.folder),
                 **others},
        )  # fmt: skip
        self.started.append(self.agents[node])

    def begin(self, count, **options):
        """Start them all; each has met node 0 when its rank runs."""
        ranks = {}
        for node in range(count):
            self.start(node, count, **options)
            ranks |= self.running(node)
        return ranks

    def all_met(self, count):
        """Return when each has heard of node 0."""
        deadline = time.monotonic() + 240
        while not all((self.folder / f"met-{node}").exists() for node in range(count)):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def _pipe(self, name):
        # Open at both ends: nothing is missed between two readers.
        os.mkfifo(self.folder / name)
        return os.fdopen(os.open(self.folder / name, os.O_RDWR), "r+b", buffering=0)

    def path(self, node, attempt=1):
        return run_folder.node_dir(str(self.folder), attempt, node)

    def running(self, *nodes):
        """The ranks of these nodes, once they have started."""
        found = {}
        while found.keys() != set(nodes):
            node, pid = self.up.readline().split()
            found[int(node)] = int(pid)
        return found

    def end(self, node, code):
        """Have the rank that runs there, or is about to, exit with this code."""
        self.codes[node].write(b"%d\n" % code)

    def end_all(self):
        """Have all ranks exit with 0, however often they are started from now on: after node 0 was
        lost, ranks that were started around another one start once more."""
        for pipe in self.codes.values():
            pipe.write(b"0\n" * 9)

    def exit_of(self, node, attempt=1):
        return json.loads((Path(self.path(node, attempt)) / "exit.json").read_bytes())

    def log_of(self, node, attempt=1):
        raw = (Path(self.path(node, attempt)) / "log").read_bytes().splitlines()
        return [x.text for line in raw for x in parse_lines(line, 0) if x.rank is None]

    def close(self):
        for process in self.started:
            process.terminate()
        for process in self.started:
            process.wait()
        for pipe in (self.up, *self.codes.values()):
            pipe.close()
