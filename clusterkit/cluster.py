"""Where to run: the entries of ``clusters.yaml``, and the facts that probing one finds."""

# ruff: noqa: RUF012 (msgspec gives every struct an empty default of its own)

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from clusterkit.shell import NAME
from clusterkit.spec import Auto, Count, Duration, Spec

Port = Annotated[int, Meta(ge=1, le=65535)]
Amount = Annotated[int, Meta(ge=0)]
Word = Annotated[str, Meta(min_length=1)]
Absolute = Annotated[str, Meta(pattern="^/")]
Seconds = Annotated[float, Meta(gt=0, le=86400)]


class NotifySpec(Spec, frozen=True, kw_only=True):
    """Who is notified of a run: a command, or a web address."""

    command: tuple[Word, ...] = ()
    """Command that gets what happened as JSON on its standard input, where runs are submitted."""
    url_from: Annotated[str, Meta(pattern=f"^{NAME}$")] | None = None
    """Variable of the submitter's environment that holds the address which gets it in a POST."""
    on: tuple[Literal["ended", "failed", "restarted"], ...] = ("ended", "failed", "restarted")
    """What is notified of; `ended`: it succeeded, or was cancelled."""


class Entry(Spec, frozen=True, kw_only=True):
    """What every entry of the cluster file may say."""

    env: dict[str, str] = {}
    """Environment of every job here; a job's `env` goes first."""
    notify: NotifySpec | None = None
    """Who is notified when a run ends, fails or starts again."""
    stop_grace: Annotated[float, Meta(ge=0, le=86400)] = 10.0
    """Seconds between SIGTERM and SIGKILL when a run is ended; mpirun ends its ranks after 1 s of
    its own."""


class LocalCluster(Entry, frozen=True, kw_only=True):
    """This machine; several nodes are simulated on it."""

    backend: Literal["local"] = "local"
    """This machine."""
    gpus: Amount | Auto = "auto"
    """How many of the machine's GPUs to use; `auto`: all that are visible."""
    port: Port | Auto = "auto"
    """Rendezvous port; `auto`: a free one, chosen by probing."""
    python: str | None = None
    """Interpreter of the ranks; by default the active environment's, otherwise the one that runs
    clusterkit."""
    lost_after: ClassVar[float] = 30.0
    warm: Duration | None = None
    """How long what a run has imported stays in memory for the next one, such as `10m`; by default
    what `clusterkit warm on` says, or not at all."""


class Host(Spec, frozen=True, kw_only=True):
    """One machine that is reached over SSH; what is left out comes from the SSH configuration."""

    name: Word
    """What it is called everywhere."""
    address: str | None = None
    """Name or address for SSH; by default the name."""
    port: Port | None = None
    """SSH port."""
    user: str | None = None
    """SSH user."""
    identity: str | None = None
    """Private key file, relative to the cluster file."""
    known_hosts: str | None = None
    """Host keys, instead of `~/.ssh/known_hosts`; relative to the same file."""
    jump: str | None = None
    """`[user@]host[:port]` to go through."""
    ssh_config: str | None = None
    """SSH configuration, instead of `~/.ssh/config`; relative likewise."""
    slots: Count | None = None
    """Ranks that it takes at most."""
    devices: tuple[Amount, ...] | None = None
    """GPUs to use, by index; by default all."""
    python: str | None = None
    """Interpreter of the ranks on this host."""
    cluster_address: str | None = None
    """Address that the other hosts reach it at; by default the one of SSH."""


class SshCluster(Entry, frozen=True, kw_only=True):
    """Machines reached over SSH, one node each."""

    backend: Literal["ssh"] = "ssh"
    """Hosts over SSH."""
    inventory: str | None = None
    """Ansible inventory or DeepSpeed hostfile, relative to this file."""
    group: str = "all"
    """Group of the inventory to use."""
    hosts: tuple[Host, ...] = ()
    """The hosts themselves, instead of an inventory."""
    include: str | None = None
    """Only these hosts and GPUs: `host1@host2:0,1`."""
    exclude: str | None = None
    """All but these, in the same form."""
    interface: str | Auto = "auto"
    """Network interface of the ranks; `auto`: the one that carries the address under which the host
    was reached."""
    workdir: Word = "~/clusterkit"
    """Folder on the hosts for runs and projects."""
    shared: str | None = None
    """Folder that all hosts share (NFS); relative checkpoints lie there."""
    sync: bool = True
    """Copy the project to the hosts; `false` where they see it under the same path anyway."""
    port: Port | Auto = "auto"
    """Rendezvous port; `auto`: a free one on the first host."""
    python: Word = "python3"
    """Interpreter of the ranks on the hosts."""
    connect_timeout: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    """Seconds to reach a host."""
    lost_after: Seconds = 30.0
    """Seconds without an answer after which a host counts as lost."""


class ComposeCluster(Entry, frozen=True, kw_only=True):
    """Containers of one docker engine on this machine, one per node."""

    backend: Literal["compose"] = "compose"
    """Containers."""
    image: Word | None = None
    """Image of the nodes; by default `clusterkit:gpu` where the job gets GPUs, otherwise
    `clusterkit:cpu`. `make image` makes either."""
    context: Word | None = None
    """Docker context; by default what `docker` itself uses."""
    code: Literal["mounted", "baked"] = "mounted"
    """`mounted`: the project's folder, read-only at its own path, and this clusterkit; `baked`:
    what the image holds in its working folder."""
    gpus: Amount | Auto = "auto"
    """How many of the machine's GPUs to divide; `auto`: all visible ones."""
    subnet: str | Auto = "auto"
    """Network of the nodes, such as `10.99.0.0/24`; `auto`: docker chooses."""
    shm_size: str = "8g"
    """Size of `/dev/shm`: NCCL and data loaders live there."""
    memory: str | None = None
    """Memory limit of a node, such as `64g`; swap is not added."""
    cpus: Annotated[float, Meta(gt=0)] | None = None
    """Cores of a node, such as `1.5`."""
    ulimits: dict[str, int] = {}
    """Limits such as `{memlock: -1}`, which InfiniBand needs; -1: none."""
    volumes: tuple[str, ...] = ()
    """`SOURCE:TARGET` or `SOURCE:TARGET:ro`; the source is a folder (relative to this file) or a
    docker volume that exists."""
    port: Port | Auto = "auto"
    """Rendezvous port; `auto`: 29500, as every run has its own network."""
    python: Word = "python3"
    """Interpreter of the ranks in the image."""
    lost_after: Seconds = 30.0
    """Seconds without an answer after which a node counts as lost."""


class Claim(Spec, frozen=True, kw_only=True):
    """A volume claim that every pod of a run mounts."""

    claim: Word
    """Name of the PersistentVolumeClaim."""
    path: Absolute
    """Where the pods see it."""
    read_only: bool = False
    """Not to be written to."""


class KubernetesCluster(Entry, frozen=True, kw_only=True):
    """Pods of a Kubernetes cluster, one per node."""

    backend: Literal["kubernetes"] = "kubernetes"
    """Pods."""
    kubeconfig: str | None = None
    """Instead of `$KUBECONFIG`, or `~/.kube/config`."""
    context: str | None = None
    """Context of the kubeconfig; by default its current one."""
    namespace: str | None = None
    """By default the context's own, otherwise `default`."""
    flavor: Literal["auto", "pytorchjob", "mpijob", "trainjob", "jobset", "job"] = "auto"
    """What keeps the pods. `auto`: `mpijob` for launcher mpirun; otherwise `pytorchjob`,
    `trainjob` or `jobset`, the first that the cluster has, and `job`, which every cluster has."""
    image: Word | None = None
    """Image of the pods; by default `clusterkit:gpu` where the job gets GPUs, otherwise
    `clusterkit:cpu`."""
    image_pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    """When it is pulled."""
    image_pull_secrets: tuple[str, ...] = ()
    """Secrets with the registry's credentials."""
    code: Literal["baked", "copied"] = "baked"
    """`baked`: the project is in the image, or in a volume; `copied`: the working tree as it is, in
    a config map, which takes 1 MiB compressed."""
    workdir: Absolute = "/opt/clusterkit"
    """Folder of the project in the image, or in a volume."""
    python: Word = "python3"
    """Interpreter of the ranks in the image."""
    gpus: Amount | Auto = "auto"
    """GPUs of a pod; `auto`: all that one of the cluster's nodes has."""
    gpu_resource: Word = "nvidia.com/gpu"
    """What the cluster calls a GPU."""
    cpus: Annotated[float, Meta(gt=0)] | None = None
    """Cores that a pod asks for."""
    memory: str | None = None
    """Memory that a pod asks for and may use, such as `64Gi`."""
    resources: dict[str, str | int | float] = {}
    """Anything else that a pod asks for, such as `{rdma/hca: 1}`."""
    shm_size: str = "8Gi"
    """Size of `/dev/shm`: NCCL and data loaders live there."""
    volumes: tuple[Claim, ...] = ()
    """Volume claims that exist."""
    shared: Absolute | None = None
    """Folder in a volume of all pods; relative checkpoints lie there. Without it they are gone with
    their pod."""
    node_selector: dict[str, str] = {}
    """Labels of the nodes that may be used."""
    topology_key: Word | None = None
    """Label of nodes, such as `topology.kubernetes.io/rack`: all pods of a run go to nodes of one
    value of it."""
    tolerations: tuple[dict[str, Any], ...] = ()
    """Taints that do not matter."""
    priority_class: str | None = None
    """Priority class of the pods."""
    service_account: str | None = None
    """Service account of the pods; its token stays out of them."""
    queue: str | None = None
    """Queue of Kueue that the run waits in."""
    watcher: bool | Auto = "auto"
    """Whether a small pod of the run's own does what `replace_lost` says while nobody outside
    watches; `auto`: where you may create the role that it needs."""
    labels: dict[str, str] = {}
    """Further labels of all objects."""
    annotations: dict[str, str] = {}
    """Further annotations of all objects."""
    patch: dict[str, Any] = {}
    """Merged into every pod's `spec`, for what has no key here."""
    user: Count = 1000
    """User and group id of the ranks."""
    read_only_root: bool = True
    """Whether the image's own files cannot be written to."""
    interface: Word = "eth0"
    """Network interface of the ranks in a pod."""
    port: Port | Auto = "auto"
    """Rendezvous port; `auto`: 29500, as every pod has its own."""
    lost_after: Seconds = 30.0
    """Seconds without an answer after which a node counts as lost."""
    replace_lost: bool = True
    """Whether a pod whose node of the cluster does not answer for `lost_after` is removed by force,
    so that another can take its place. `false`: somebody has to."""


class SlurmCluster(Entry, frozen=True, kw_only=True):
    """Nodes of a Slurm cluster: one allocation a run."""

    backend: Literal["slurm"] = "slurm"
    """A partition of Slurm, from a login node."""
    ssh: Word | None = None
    """Login node to reach over SSH: `[user@]host[:port]`, the rest as `~/.ssh/config` says; by
    default this machine is one."""
    workdir: Word = "~/clusterkit"
    """With `ssh`: folder for runs and projects, on a disk that login node and nodes see."""
    sync: bool = True
    """With `ssh`: copy the project there; `false` where it has the same path there anyway."""
    partition: Word | None = None
    """Partition; by default Slurm's own default."""
    account: Word | None = None
    """Account that is charged."""
    qos: Word | None = None
    """Quality of service."""
    constraint: Word | None = None
    """Features that the nodes must have, such as `h100&ib`."""
    reservation: Word | None = None
    """Reservation to run in."""
    time: Word | None = None
    """Time limit as `sbatch` takes it, such as `2-00:00:00`; by default the job's `time_limit` and
    5 minutes more, or the partition's."""
    exclusive: bool = False
    """Whether no other job may share the nodes."""
    gres: Word | None = None
    """What a node gives, such as `gpu:h100:4`; by default `gpu:N` for N ranks on GPUs."""
    gpus: Amount | Auto = "auto"
    """GPUs of a node; `auto`: all that a node of the partition has."""
    cpus: Count | Auto = "auto"
    """CPUs of a node; `auto`: its share for the GPUs that are asked for, or all without GPUs."""
    memory: Word | None = None
    """Memory of a node, such as `64G`; `0`: all of it. By default what Slurm gives."""
    options: tuple[Word, ...] = ()
    """Further options of `sbatch`, such as `--mail-type=FAIL`."""
    modules: tuple[Word, ...] = ()
    """Modules to load on the first node; the ranks inherit the environment."""
    setup: tuple[Word, ...] = ()
    """Lines of shell before the nodes start, on the first node, likewise."""
    container: Word | None = None
    """Image in which agents and ranks run; by default in the nodes' own system."""
    container_with: Literal["pyxis", "apptainer"] = "pyxis"
    """What runs it: `srun --container-image` (pyxis and enroot), or `apptainer exec`."""
    container_mounts: tuple[Word, ...] = ()
    """Further folders in it, as `SOURCE:TARGET`; those of the run and the job are there."""
    requeue: bool = True
    """Whether Slurm starts the run again that it preempted, whose node failed, or that came to the
    end of its time: it goes on from its checkpoint."""
    notice: Annotated[float, Meta(ge=0, le=65535)] = 120.0
    """Seconds before the end of the time limit at which the ranks are asked to stop."""
    interface: Word | None = None
    """Network interface of the ranks, such as `ib0`; by default gloo and NCCL choose, and the first
    node has the address that Slurm knows."""
    port: Port | Auto = "auto"
    """Rendezvous port; `auto`: one at random that is free on the login node."""
    python: Word | None = None
    """Interpreter of the ranks, on a disk that all nodes see; by default the active environment's,
    otherwise the one that runs clusterkit; with `ssh` the login node's `python3`."""
    lost_after: Seconds = 30.0
    """Seconds without an answer after which a node counts as lost."""


ClusterSpec = LocalCluster | SshCluster | ComposeCluster | KubernetesCluster | SlurmCluster
"""Every kind of cluster entry; a new backend adds its own to this union."""

CLUSTER_TYPES: dict[str, type[ClusterSpec]] = {
    "local": LocalCluster,
    "ssh": SshCluster,
    "compose": ComposeCluster,
    "kubernetes": KubernetesCluster,
    "slurm": SlurmCluster,
}


class Gpu(Struct, frozen=True):
    """One GPU: the index CUDA_VISIBLE_DEVICES takes, its name, its memory in MiB."""

    index: str
    name: str
    memory_mib: int


class HostFacts(Struct, frozen=True, kw_only=True):
    """What probing found on one host."""

    host: str
    address: str
    """Address that the other hosts reach it at."""
    cpus: int
    memory_mib: int
    gpus: tuple[Gpu, ...] = ()
    python: str
    """Interpreter that the ranks use."""
    python_origin: str = "when probed"
    """Why this one, in words."""
    versions: dict[str, str] = {}
    """Package to version in that interpreter; what is missing there is missing here."""
    tools: dict[str, str] = {}
    """Command to path, of those a launcher may need."""
    interface: str | None = None
    """Network interface that carries the address; None: the same on all hosts."""
    slots: int | None = None
    """Ranks that it takes at most; None: as many as it has GPUs."""


class Project(Struct, frozen=True, kw_only=True):
    """The folder of the job's program, as it was when the cluster was probed."""

    root: str
    """Folder on the submitter's machine that is copied."""
    digest: str
    """Of every file's path, mode and contents."""
    files: int
    bytes: int
    how: str
    """Which files of it count, in words."""
    remark: str | None = None
    """What a person should know before it is copied."""


class Engine(Struct, frozen=True, kw_only=True):
    """The docker engine that runs the nodes, and the image that they are made of."""

    socket: str
    """Where it listens: ``unix:///var/run/docker.sock``."""
    version: str
    image: str
    image_id: str
    workdir: str
    """The image's working folder."""
    user: str
    """``UID:GID`` of the ranks: those that make a rank's file the submitter's own."""
    package: str
    """clusterkit's own package on this machine."""
    remapped: bool = False
    """Whether the engine gives containers other user ids than they see."""


class KubernetesFacts(Struct, frozen=True, kw_only=True):
    """The Kubernetes cluster that keeps the pods."""

    version: str
    context: str
    namespace: str
    kubeconfig: str | None = None
    """None: what the client finds by itself."""
    kinds: tuple[str, ...] = ()
    """Kinds of jobs that it serves besides the plain one, such as ``PyTorchJob``."""
    user: str = ""
    """Who submits, for a label of the run's objects."""
    root: str = "/run/clusterkit"
    """Folder in the pods that holds the run's own."""
    may_watch: bool = False
    """Whether the submitter may give the run a watcher in the cluster."""
    most_gpus: int | None = None
    """GPUs of the node that has most of them now; None: not looked at."""


class SlurmFacts(Struct, frozen=True, kw_only=True):
    """The partition that gives the nodes."""

    version: str
    partition: str
    nodes: int
    """How many could be given, were all of them free."""
    minutes: int | None = None
    """Longest time limit; None: there is none."""
    most_nodes: int | None = None
    """Nodes that a job gets at most; None: there is no such limit."""


class Facts(Struct, frozen=True, kw_only=True):
    """All that a plan needs to know of a cluster; saved with the run."""

    home: str
    """CLUSTERKIT_HOME on the nodes."""
    hosts: tuple[HostFacts, ...]
    port: int
    """Rendezvous port on the first host, free when probed."""
    port_origin: str
    """Why this port, in words."""
    interface: str
    """Network interface that the ranks talk over."""
    watch_port: int | None = None
    """Port on the first host where the nodes watch each other, if they do."""
    project: Project | None = None
    """What is copied to the hosts, where something is."""
    shipped: Project | None = None
    """clusterkit's own package, for hosts that do not have it."""
    engine: Engine | None = None
    """What starts the nodes, where they are containers."""
    kubernetes: KubernetesFacts | None = None
    """What keeps the nodes, where they are pods."""
    slurm: SlurmFacts | None = None
    """What gives the nodes, where Slurm does."""
