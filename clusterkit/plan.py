"""A plan: the files to write and the commands to run, as data.

`clusterkit plan` prints one, `clusterkit submit` carries one out; there is nothing
that only one of them knows.
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
    """One file on the nodes: its absolute path, and its text or the resource that it copies."""

    path: str
    text: str | None = None
    resource: str | None = None
    mode: int = 0o644

    def content(self) -> bytes:
        """The bytes that are written."""
        from importlib import resources

        from clusterkit.agent import archive

        if self.resource == archive.ARCHIVE:
            return archive.build()
        if self.resource is not None:
            return (resources.files("clusterkit") / self.resource).read_bytes()
        return (self.text or "").encode()


class Tree(Struct, frozen=True):
    """A folder of the submitter's that every host gets as it was when it was probed."""

    source: str
    """Folder on the submitter's machine."""
    path: str
    """Folder on the hosts, made whole or not at all."""
    digest: str
    """Of every path, mode and content."""
    what: str
    """Which files, how many, how large, in words."""


class Step(Struct, frozen=True, omit_defaults=True):
    """One command on one host.

    ``start`` leaves a process running in a session of its own; ``run`` waits for the end
    and must exit with 0. ``secrets`` names variables that the transport adds to ``env``.
    """

    kind: Literal["start", "run"]
    host: str
    argv: tuple[str, ...]
    node: int | None = None
    env: dict[str, str] = {}
    secrets: tuple[str, ...] = ()


class Note(Struct, frozen=True):
    """A value that was worked out and where it came from; or, with no name, a remark."""

    name: str
    value: str
    origin: str

    def __str__(self) -> str:
        return f"{self.name}={self.value} ({self.origin})" if self.name else self.value


class ComposeNative(Struct, frozen=True, tag="compose"):
    """How the compose backend finds a run's containers again."""

    socket: str
    """Where the docker engine listens."""


class KubernetesNative(Struct, frozen=True, tag="kubernetes", kw_only=True):
    """How the Kubernetes backend finds a run's objects again."""

    kubeconfig: str | None
    context: str | None
    namespace: str
    name: str
    """Of the run's objects."""
    flavor: str
    watched: bool
    """Whether the run has a watcher in the cluster."""


Native = ComposeNative | KubernetesNative
"""What a backend must know of a run later, beyond the plan's common fields."""


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
    """By node rank, and then the spares; several may have the same."""
    nodes: int
    """Nodes that are started, spares among them."""
    world_size: int
    topology: Mapping[str, int] = field(default_factory=dict)
    """``min_nodes``, ``nodes``, ``nproc_per_node``."""
    device: str = ""
    """``cuda`` or ``cpu``."""
    address: str = ""
    """Of the first node, for its peers; ``$NAME`` where only the nodes know it."""
    port: int = 0
    python: str = ""
    """Interpreter on the nodes."""
    shared: str = ""
    """Folder of this run on the disk that its hosts share, if they do."""
    stop_grace: float = 10.0
    """Seconds between SIGTERM and SIGKILL."""
    lost_after: float = 30.0
    """Seconds without an answer after which a host counts as lost."""
    restarts: int = 0
    """How often the nodes' agents start all ranks again, each time as another attempt."""
    rejoin: bool = False
    """Whether a lost node may come back, and the run goes on."""
    replace_lost: bool = False
    """Whether one whose host does not answer is given up, so that another can take its place."""
    native: Native | None = None
    job: JobSpec | None = None
    """The job itself, with its program found, so that `clusterkit convert` gives it back."""

    @property
    def places(self) -> int:
        """How many of its nodes have ranks; of one launcher for all (mpirun), that one."""
        return min(self.nodes, self.topology.get("nodes", self.nodes))

    @property
    def least(self) -> int:
        """How many of them have to succeed."""
        return min(self.nodes, self.topology.get("min_nodes", self.nodes))

    def node_of(self, rank: int) -> int | None:
        """The node whose log has a rank's lines; None where only the run itself tells."""
        shape = self.topology
        fixed = shape.get("min_nodes") == shape.get("nodes") == self.nodes
        return rank // shape["nproc_per_node"] if fixed else None

    def __repr__(self) -> str:
        return f"<Plan {self.run_id}: {self.backend}, {self.summary}>"

    def to_json(self) -> bytes:
        """The plan as one indented JSON document, in a stable order."""
        return msgspec.json.format(msgspec.json.encode(self, order="deterministic"), indent=2)

    def to_text(self) -> str:
        """The plan for people: notes, every file with its text, every command."""
        parts = [f"plan {self.run_id}: {self.summary}\n\n"]
        parts += [f"  {note}\n" for note in self.notes]
        for tree in self.trees:
            parts.append(f"\ntree {tree.path}\n  | {tree.source}: {tree.what}\n")
            parts.append(f"  | digest {tree.digest}\n")
        for file in self.files:
            parts.append(f"\nfile {file.path} (mode {file.mode:04o})\n")
            if file.resource is not None:
                parts.append(f"  | clusterkit's own {file.resource}, copied as installed\n")
            else:
                parts += [
                    f"  | {line}\n" for line in (file.text or "").removesuffix("\n").split("\n")
                ]
        if self.job is not None:
            from clusterkit import yaml_text

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
    """Lines of shell that write files, and make their folders."""
    files = list(files)
    folders = dict.fromkeys(posixpath.dirname(file.path) for file in files)
    lines = [f"mkdir -p {shell.join(folders)} || exit\n"]
    lines += [shell.here_document(file.path, file.content(), file.mode) for file in files]
    return "".join(lines)
