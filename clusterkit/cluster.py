"""Where to run: the entries of ``clusters.yaml``, and the facts that probing one finds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from clusterkit.spec import Auto

Port = Annotated[int, Meta(ge=1, le=65535)]

# Keys that mean the same in several kinds of entries.
JobEnv = Annotated[
    dict[str, str], Meta(description="Environment of every job here; a job's `env` goes first.")
]
Silence = Annotated[
    Annotated[float, Meta(gt=0, le=86400)],
    Meta(description="Seconds without a sign of life after which a node counts as lost."),
]
StopGrace = Annotated[
    float,
    Meta(ge=0, le=86400, description="Seconds between SIGTERM and SIGKILL when a run is ended."),
]


class LocalCluster(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """This machine; several nodes are simulated on it."""

    backend: Annotated[Literal["local"], Meta(description="This machine.")] = "local"
    gpus: Annotated[
        Annotated[int, Meta(ge=0)] | Auto,
        Meta(description="How many of the machine's GPUs to use; `auto`: all that are visible."),
    ] = "auto"
    port: Annotated[
        Port | Auto, Meta(description="Rendezvous port; `auto`: a free one, chosen by probing.")
    ] = "auto"
    python: Annotated[
        str | None,
        Meta(
            description="Interpreter of the ranks; by default the active environment's, otherwise "
            "the one that runs clusterkit."
        ),
    ] = None
    env: JobEnv = {}
    stop_grace: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description="Seconds between SIGTERM and SIGKILL when a run is ended; "
            "mpirun ends its ranks after 1 s of its own.",
        ),
    ] = 10.0


class Host(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One machine that is reached over SSH; what is left out comes from the SSH configuration."""

    name: Annotated[str, Meta(min_length=1, description="What it is called everywhere.")]
    address: Annotated[
        str | None, Meta(description="Name or address for SSH; by default the name.")
    ] = None
    port: Annotated[Port | None, Meta(description="SSH port.")] = None
    user: Annotated[str | None, Meta(description="SSH user.")] = None
    identity: Annotated[
        str | None, Meta(description="Private key file, relative to the cluster file.")
    ] = None
    known_hosts: Annotated[
        str | None,
        Meta(description="Host keys, instead of `~/.ssh/known_hosts`; relative to the same file."),
    ] = None
    jump: Annotated[str | None, Meta(description="`[user@]host[:port]` to go through.")] = None
    ssh_config: Annotated[
        str | None,
        Meta(description="SSH configuration, instead of `~/.ssh/config`; relative likewise."),
    ] = None
    slots: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Ranks that it takes at most.")
    ] = None
    devices: Annotated[
        tuple[Annotated[int, Meta(ge=0)], ...] | None,
        Meta(description="GPUs to use, by index; by default all."),
    ] = None
    python: Annotated[str | None, Meta(description="Interpreter of the ranks on this host.")] = None
    cluster_address: Annotated[
        str | None,
        Meta(description="Address that the other hosts reach it at; by default the one of SSH."),
    ] = None


class SshCluster(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Machines reached over SSH, one node each."""

    backend: Annotated[Literal["ssh"], Meta(description="Hosts over SSH.")] = "ssh"
    inventory: Annotated[
        str | None,
        Meta(description="Ansible inventory or DeepSpeed hostfile, relative to this file."),
    ] = None
    group: Annotated[str, Meta(description="Group of the inventory to use.")] = "all"
    hosts: Annotated[
        tuple[Host, ...], Meta(description="The hosts themselves, instead of an inventory.")
    ] = ()
    include: Annotated[
        str | None, Meta(description="Only these hosts and GPUs: `host1@host2:0,1`.")
    ] = None
    exclude: Annotated[str | None, Meta(description="All but these, in the same form.")] = None
    interface: Annotated[
        str | Auto,
        Meta(
            description="Network interface of the ranks; `auto`: the one that carries the "
            "address under which the host was reached."
        ),
    ] = "auto"
    workdir: Annotated[
        str, Meta(min_length=1, description="Folder on the hosts for runs and projects.")
    ] = "~/clusterkit"
    shared: Annotated[
        str | None,
        Meta(description="Folder that all hosts share (NFS); relative checkpoints lie there."),
    ] = None
    sync: Annotated[
        bool,
        Meta(
            description="Copy the project to the hosts; `false` where they see it under the "
            "same path anyway."
        ),
    ] = True
    port: Annotated[
        Port | Auto, Meta(description="Rendezvous port; `auto`: a free one on the first host.")
    ] = "auto"
    python: Annotated[
        str, Meta(min_length=1, description="Interpreter of the ranks on the hosts.")
    ] = "python3"
    env: JobEnv = {}
    connect_timeout: Annotated[
        Annotated[float, Meta(gt=0, le=3600)], Meta(description="Seconds to reach a host.")
    ] = 10.0
    lost_after: Annotated[
        Annotated[float, Meta(gt=0, le=86400)],
        Meta(description="Seconds without an answer after which a host counts as lost."),
    ] = 30.0
    stop_grace: StopGrace = 10.0


class ComposeCluster(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Containers of one docker engine on this machine, one per node."""

    backend: Annotated[Literal["compose"], Meta(description="Containers.")] = "compose"
    image: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="Image of the nodes; by default `clusterkit:gpu` where the job gets GPUs, "
            "otherwise `clusterkit:cpu`. `make image` makes either.",
        ),
    ] = None
    context: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="Docker context; by default what `docker` itself uses."),
    ] = None
    code: Annotated[
        Literal["mounted", "baked"],
        Meta(
            description="`mounted`: the project's folder, read-only at its own path, and this "
            "clusterkit; `baked`: what the image holds in its working folder."
        ),
    ] = "mounted"
    gpus: Annotated[
        Annotated[int, Meta(ge=0)] | Auto,
        Meta(description="How many of the machine's GPUs to divide; `auto`: all visible ones."),
    ] = "auto"
    subnet: Annotated[
        str | Auto,
        Meta(description="Network of the nodes, such as `10.99.0.0/24`; `auto`: docker chooses."),
    ] = "auto"
    shm_size: Annotated[
        str, Meta(description="Size of `/dev/shm`: NCCL and data loaders live there.")
    ] = "8g"
    memory: Annotated[
        str | None, Meta(description="Memory limit of a node, such as `64g`; swap is not added.")
    ] = None
    cpus: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="Cores of a node, such as `1.5`.")
    ] = None
    ulimits: Annotated[
        dict[str, int],
        Meta(description="Limits such as `{memlock: -1}`, which InfiniBand needs; -1: none."),
    ] = {}
    volumes: Annotated[
        tuple[str, ...],
        Meta(
            description="`SOURCE:TARGET` or `SOURCE:TARGET:ro`; the source is a folder (relative "
            "to this file) or a docker volume that exists."
        ),
    ] = ()
    port: Annotated[
        Port | Auto,
        Meta(description="Rendezvous port; `auto`: 29500, as every run has its own network."),
    ] = "auto"
    python: Annotated[
        str, Meta(min_length=1, description="Interpreter of the ranks in the image.")
    ] = "python3"
    env: JobEnv = {}
    lost_after: Silence = 30.0
    stop_grace: StopGrace = 10.0


class Claim(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A volume claim that every pod of a run mounts."""

    claim: Annotated[str, Meta(min_length=1, description="Name of the PersistentVolumeClaim.")]
    path: Annotated[str, Meta(pattern="^/", description="Where the pods see it.")]
    read_only: Annotated[bool, Meta(description="Not to be written to.")] = False


class KubernetesCluster(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Pods of a Kubernetes cluster, one per node."""

    backend: Annotated[Literal["kubernetes"], Meta(description="Pods.")] = "kubernetes"
    kubeconfig: Annotated[
        str | None, Meta(description="Instead of `$KUBECONFIG`, or `~/.kube/config`.")
    ] = None
    context: Annotated[
        str | None, Meta(description="Context of the kubeconfig; by default its current one.")
    ] = None
    namespace: Annotated[
        str | None, Meta(description="By default the context's own, otherwise `default`.")
    ] = None
    flavor: Annotated[
        Literal["auto", "pytorchjob", "mpijob", "trainjob", "job"],
        Meta(
            description="What keeps the pods. `auto`: `mpijob` for launcher mpirun; otherwise "
            "`pytorchjob` or `trainjob` where the cluster has one, and `job`, which every "
            "cluster has."
        ),
    ] = "auto"
    image: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="Image of the pods; by default `clusterkit:gpu` where the job gets GPUs, "
            "otherwise `clusterkit:cpu`."
        ),
    ] = None
    image_pull_policy: Annotated[
        Literal["IfNotPresent", "Always", "Never"], Meta(description="When it is pulled.")
    ] = "IfNotPresent"
    image_pull_secrets: Annotated[
        tuple[str, ...], Meta(description="Secrets with the registry's credentials.")
    ] = ()
    code: Annotated[
        Literal["baked", "copied"],
        Meta(
            description="`baked`: the project is in the image, or in a volume; `copied`: the "
            "working tree as it is, in a config map, which takes 1 MiB compressed."
        ),
    ] = "baked"
    workdir: Annotated[
        str, Meta(pattern="^/", description="Folder of the project in the image, or in a volume.")
    ] = "/opt/clusterkit"
    python: Annotated[
        str, Meta(min_length=1, description="Interpreter of the ranks in the image.")
    ] = "python3"
    gpus: Annotated[
        Annotated[int, Meta(ge=0)] | Auto,
        Meta(description="GPUs of a pod; `auto`: all that one of the cluster's nodes has."),
    ] = "auto"
    gpu_resource: Annotated[
        str, Meta(min_length=1, description="What the cluster calls a GPU.")
    ] = "nvidia.com/gpu"
    cpus: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="Cores that a pod asks for.")
    ] = None
    memory: Annotated[
        str | None, Meta(description="Memory that a pod asks for and may use, such as `64Gi`.")
    ] = None
    resources: Annotated[
        dict[str, str],
        Meta(description="Anything else that a pod asks for, such as `{rdma/hca: 1}`."),
    ] = {}
    shm_size: Annotated[
        str, Meta(description="Size of `/dev/shm`: NCCL and data loaders live there.")
    ] = "8Gi"
    volumes: Annotated[tuple[Claim, ...], Meta(description="Volume claims that exist.")] = ()
    shared: Annotated[
        Annotated[str, Meta(pattern="^/")] | None,
        Meta(
            description="Folder in a volume of all pods; relative checkpoints lie there. Without "
            "it they are gone with their pod.",
        ),
    ] = None
    node_selector: Annotated[
        dict[str, str], Meta(description="Labels of the nodes that may be used.")
    ] = {}
    tolerations: Annotated[
        tuple[dict[str, Any], ...], Meta(description="Taints that do not matter.")
    ] = ()
    priority_class: Annotated[str | None, Meta(description="Priority class of the pods.")] = None
    service_account: Annotated[
        str | None, Meta(description="Service account of the pods; its token stays out of them.")
    ] = None
    queue: Annotated[str | None, Meta(description="Queue of Kueue that the run waits in.")] = None
    watcher: Annotated[
        bool | Auto,
        Meta(
            description="Whether a small pod of the run's own goes on with it (restarts, time "
            "limit, lost nodes) while nobody outside watches; `auto`: where you may create the "
            "role that it needs."
        ),
    ] = "auto"
    labels: Annotated[dict[str, str], Meta(description="Further labels of all objects.")] = {}
    annotations: Annotated[
        dict[str, str], Meta(description="Further annotations of all objects.")
    ] = {}
    patch: Annotated[
        dict[str, Any],
        Meta(description="Merged into every pod's `spec`, for what has no key here."),
    ] = {}
    user: Annotated[
        Annotated[int, Meta(ge=1)], Meta(description="User and group id of the ranks.")
    ] = 1000
    read_only_root: Annotated[
        bool, Meta(description="Whether the image's own files cannot be written to.")
    ] = True
    interface: Annotated[
        str, Meta(min_length=1, description="Network interface of the ranks in a pod.")
    ] = "eth0"
    port: Annotated[
        Port | Auto, Meta(description="Rendezvous port; `auto`: 29500, as every pod has its own.")
    ] = "auto"
    env: JobEnv = {}
    lost_after: Silence = 30.0
    replace_lost: Annotated[
        bool,
        Meta(
            description="Whether a pod whose node of the cluster does not answer for `lost_after` "
            "is removed by force, so that another can take its place. `false`: somebody has to."
        ),
    ] = True
    stop_grace: StopGrace = 10.0


ClusterSpec = LocalCluster | SshCluster | ComposeCluster | KubernetesCluster
"""Every kind of cluster entry; a new backend adds its own to this union."""

CLUSTER_TYPES: dict[
    str,
    type[LocalCluster] | type[SshCluster] | type[ComposeCluster] | type[KubernetesCluster],
] = {
    "local": LocalCluster,
    "ssh": SshCluster,
    "compose": ComposeCluster,
    "kubernetes": KubernetesCluster,
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
