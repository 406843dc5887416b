"""A plan: the files to write and the commands to run, as data.

`clusterkit plan` prints a plan, `clusterkit submit` executes the same one.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec
from msgspec import Struct, field

from clusterkit import shell
from clusterkit.spec import JobSpec


class PlanFile(Struct, frozen=True, omit_defaults=True):
    """A file on the nodes: its absolute path, and its text or a resource of this package."""

    path: str
    text: str | None = None
    resource: str | None = None
    mode: int = 0o644

    def content(self) -> bytes:
        """Return the bytes that are written."""
        from importlib import resources

        from clusterkit.agent import archive

        if self.resource == archive.ARCHIVE:
            return archive.build()
        if self.resource is not None:
            return (resources.files("clusterkit") / self.resource).read_bytes()
        return (self.text or "").encode()


class Tree(Struct, frozen=True):
    """A folder that is copied to every host, as it was when the cluster was probed."""

    source: str
    """Folder on the submitter's machine."""
    path: str
    """Folder on the hosts; it exists only with all its files."""
    digest: str
    """Digest of every file's path, mode and contents."""
    what: str
    """Which files, how many and how large, for people."""


class Step(Struct, frozen=True, omit_defaults=True):
    """A command on one host, or requests to an API server.

    ``start`` leaves a process running in a session of its own; ``run`` waits for its end, and
    anything but exit code 0 is an error; ``request`` has a method and paths, all asked at once.
    ``secrets`` names variables that are added to ``env``.
    """

    kind: Literal["start", "run", "request"]
    host: str
    argv: tuple[str, ...]
    node: int | None = None
    env: dict[str, str] = {}
    secrets: tuple[str, ...] = ()


class Note(Struct, frozen=True):
    """A value of the plan and where it comes from; with an empty name, a remark."""

    name: str
    value: str
    origin: str

    def __str__(self) -> str:
        return f"{self.name}={self.value} ({self.origin})" if self.name else self.value


class ComposeNative(Struct, frozen=True, tag="compose"):
    """Where the compose backend finds a run's containers."""

    socket: str
    """Address of the docker engine."""


class KubernetesNative(Struct, frozen=True, tag="kubernetes", kw_only=True):
    """Where the Kubernetes backend finds a run's objects."""

    kubeconfig: str | None
    context: str | None
    namespace: str
    name: str
    """Name of the run's objects."""
    flavor: str
    watched: bool
    """Whether the run has a watcher pod."""


Native = ComposeNative | KubernetesNative
"""What one backend needs later to find a run's nodes."""


class Plan(Struct, frozen=True, kw_only=True):
    """Everything that submitting a job does."""

    run_id: str
    run_dir: str
    backend: str
    summary: str
    notes: tuple[Note, ...] = ()
    trees: tuple[Tree, ...] = ()
    files: tuple[PlanFile, ...] = ()
    steps: tuple[Step, ...] = ()
    hosts: tuple[str, ...] = ()
    """Host of each node, by node rank, then of the spares; several nodes may have the same host."""
    nodes: int
    """Nodes that are started, including spares."""
    world_size: int
    topology: Mapping[str, int] = field(default_factory=dict)
    """``min_nodes``, ``nodes``, ``nproc_per_node``."""
    device: str = ""
    """``cuda`` or ``cpu``."""
    address: str = ""
    """Address of node 0 for the others; ``$NAME`` if only the nodes know it."""
    port: int = 0
    python: str = ""
    """Interpreter on the nodes."""
    shared: str = ""
    """The run's folder on the disk that its hosts share; empty if they share none."""
    stop_grace: float = 10.0
    """Seconds between SIGTERM and SIGKILL."""
    lost_after: float = 30.0
    """Seconds without an answer after which a host counts as lost."""
    restarts: int = 0
    """How often the nodes' agents restart all ranks, each time as another attempt."""
    rejoin: bool = False
    """Whether the run continues when a lost node returns."""
    replace_lost: bool = False
    """Whether a node whose host does not answer is removed, so that it can be replaced."""
    native: Native | None = None
    job: JobSpec | None = None
    """The job, with its program's folder, so that `clusterkit convert` can write it again."""

    @property
    def nodes_with_ranks(self) -> int:
        """Return how many nodes have ranks; 1 if mpirun starts the ranks of all nodes."""
        return min(self.nodes, self.topology.get("nodes", self.nodes))

    @property
    def min_nodes(self) -> int:
        """Return how many nodes have to succeed."""
        return min(self.nodes, self.topology.get("min_nodes", self.nodes))

    def node_of(self, rank: int) -> int | None:
        """Return the node whose log has a rank's lines; None if that is known only at run time."""
        shape = self.topology
        fixed = shape.get("min_nodes") == shape.get("nodes") == self.nodes
        return rank // shape["nproc_per_node"] if fixed else None

    def __repr__(self) -> str:
        return f"<Plan {self.run_id}: {self.backend}, {self.summary}>"

    def to_json(self) -> bytes:
        """Return the plan as an indented JSON document with a fixed order of keys."""
        return msgspec.json.format(msgspec.json.encode(self, order="deterministic"), indent=2)

    def to_text(self, *, files: bool = True) -> str:
        """Return the plan for people: notes, every file with its text, every command.

        Args:
            files: whether with the files' texts, or their names and a node's command alone.
        """
        parts = [f"plan {self.run_id}: {self.summary}\n\n"]
        parts += [f"  {note}\n" for note in self.notes]
        for tree in self.trees:
            parts.append(f"\ntree {tree.path}\n  | {tree.source}: {tree.what}\n")
            parts.append(f"  | digest {tree.digest}\n")
        if not files:
            parts += ["\nfiles\n", *(f"  {file.path}\n" for file in self.files)]
            scripts = [file.text or "" for file in self.files if file.path.endswith("/node.sh")]
            for script in scripts:
                lines = script[script.rfind("\nexec ") + 1 :].splitlines()
                parts += ["\non each node\n", *(f"  {line}\n" for line in lines)]
        for file in self.files if files else ():
            parts.append(f"\nfile {file.path} (mode {file.mode:04o})\n")
            if file.resource is not None:
                parts.append(f"  | clusterkit's own {file.resource}, copied as installed\n")
            else:
                parts += [
                    f"  | {line}\n" for line in (file.text or "").removesuffix("\n").split("\n")
                ]
        if self.job is not None and files:
            from clusterkit.jobfile import yaml_text

            text = yaml_text.documents([msgspec.to_builtins(self.job)])
            parts.append("\njob\n" + "".join(f"  | {line}\n" for line in text.splitlines()))
        parts.append("\nsteps\n")
        for number, step in enumerate(self.steps, 1):
            where = step.host if step.node is None else f"{step.host} node {step.node}"
            hidden = "".join(f"{name}=<secret> " for name in step.secrets)
            command = shell.assignments(step.env, step.argv)
            parts.append(f"  {number} {step.kind} on {where}: {hidden}{command}\n")
        return "".join(parts)


def unpacking(files: Iterable[PlanFile]) -> str:
    """Return shell lines that create files and their folders."""
    files = list(files)
    folders = dict.fromkeys(posixpath.dirname(file.path) for file in files)
    lines = [f"mkdir -p {shell.join(folders)} || exit\n"]
    lines += [shell.here_document(file.path, file.content(), file.mode) for file in files]
    return "".join(lines)
