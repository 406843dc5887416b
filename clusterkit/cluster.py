"""`ClusterSpec`: one entry of ``clusters.yaml``; `Facts`: what probing that cluster found."""

# ruff: noqa: RUF012 (msgspec gives every struct an empty default of its own)

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from clusterkit.shell import NAME, VARIABLE
from clusterkit.spec import Auto, Count, Spec

Port = Annotated[int, Meta(ge=1, le=65535)]
Amount = Annotated[int, Meta(ge=0)]
Word = Annotated[str, Meta(min_length=1)]
Absolute = Annotated[str, Meta(pattern="^/", description="an absolute path")]
Seconds = Annotated[float, Meta(gt=0, le=86400)]


class NotifySpec(Spec, frozen=True, kw_only=True):
    """Who is notified of a run: a command, or a web address."""

    command: tuple[Word, ...] = ()
    """Command to run where runs are submitted; it gets the event as JSON on its standard input."""
    url_from: Annotated[str, Meta(pattern=f"^{NAME}$", description=VARIABLE)] | None = None
    """Variable of the submitter's environment with the URL to which the event is sent by POST."""
    on: tuple[Literal["ended", "failed", "restarted"], ...] = ("ended", "failed", "restarted")
    """Which events; `ended`: the run succeeded, or was cancelled."""


class Entry(Spec, frozen=True, kw_only=True):
    """Keys of every entry of the cluster file."""

    env: dict[str, str] = {}
    """Environment variables of every job on this cluster; a job's own `env` overrides them."""
    notify: NotifySpec | None = None
    """Who is notified when a run ends, fails or starts again."""
    stop_grace: Annotated[float, Meta(ge=0, le=86400)] = 10.0
    """Seconds between SIGTERM and SIGKILL when a run is ended; mpirun ends its ranks after 1 s of
    its own."""

    def starts_from_here(self, path: str) -> bool:
        """Return whether a command's file has to be on this machine: no host has one of its own."""
        return not path.startswith("/")


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

    def starts_from_here(self, path: str) -> bool:
        return True


class Host(Spec, frozen=True, kw_only=True):
    """One machine that is reached over SSH; missing values come from the SSH configuration."""

    name: Word
    """Name in output and logs."""
    address: str | None = None
    """Name or address for SSH; by default the name."""
    port: Port | None = None
    """SSH port."""
    user: str | None = None
    """SSH user."""
    identity: str | None = None
    """Private key file, relative to the cluster file."""
    known_hosts: str | None = None
    """File of host keys instead of `~/.ssh/known_hosts`; relative to the cluster file."""
    jump: str | None = None
    """Jump host, as `[user@]host[:port]`."""
    ssh_config: str | None = None
    """SSH configuration instead of `~/.ssh/config`; relative to the cluster file."""
    slots: Count | None = None
    """Most ranks on this host."""
    devices: tuple[Amount, ...] | None = None
    """GPUs to use, by index; by default all."""
    python: str | None = None
    """Interpreter of the ranks on this host."""
    cluster_address: str | None = None
    """Address at which the other hosts reach it; by default the address for SSH."""


class SshCluster(Entry, frozen=True, kw_only=True):
    """Machines reached over SSH, one node each."""

    backend: Literal["ssh"] = "ssh"
    """Hosts over SSH."""
    inventory: str | None = None
    """Ansible inventory or DeepSpeed hostfile, relative to this file."""
    group: str = "all"
    """Group of the inventory to use."""
    hosts: tuple[Host, ...] = ()
    """List of hosts, instead of an inventory."""
    include: str | None = None
    """Only these hosts and GPUs: `host1@host2:0,1`."""
    exclude: str | None = None
    """All but these hosts and GPUs, in the same form."""
    interface: str | Auto = "auto"
    """Network interface of the ranks; `auto`: the one with the address at which the host was
    reached."""
    workdir: Word = "~/clusterkit"
    """Folder on the hosts for runs and projects."""
    shared: str | None = None
    """Folder that all hosts share, such as NFS; relative checkpoint folders are created in it."""
    sync: bool = True
    """Copy the project to the hosts; `false` if they have it at the same path."""
    port: Port | Auto = "auto"
    """Rendezvous port; `auto`: a free one on the first host."""
    python: Word = "python3"
    """Interpreter of the ranks on the hosts."""
    connect_timeout: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    """Seconds to reach a host."""
    lost_after: Seconds = 30.0
    """Seconds without an answer after which a host counts as lost."""

    def starts_from_here(self, path: str) -> bool:
        return super().starts_from_here(path) and self.sync


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
    """`mounted`: the project's folder, read-only at its own path, and this clusterkit; `baked`: the
    code in the image's working folder."""
    gpus: Amount | Auto = "auto"
    """How many of the machine's GPUs to divide; `auto`: all visible ones."""
    subnet: str | Auto = "auto"
    """Network of the nodes, such as `10.99.0.0/24`; `auto`: docker chooses."""
    shm_size: str = "8g"
    """Size of `/dev/shm`, which NCCL and data loaders use."""
    memory: str | None = None
    """Memory limit of a node, such as `64g`; swap is not added."""
    cpus: Annotated[float, Meta(gt=0)] | None = None
    """Cores of a node, such as `1.5`."""
    infiniband: bool = False
    """Give the nodes `/dev/infiniband`, IPC_LOCK and unlimited locked memory."""
    ulimits: dict[str, int] = {}
    """Limits such as `{memlock: -1}`, which InfiniBand needs; -1: no limit."""
    volumes: tuple[str, ...] = ()
    """`SOURCE:TARGET` or `SOURCE:TARGET:ro`; the source is a folder (relative to this file) or a
    docker volume that exists."""
    port: Port | Auto = "auto"
    """Rendezvous port; `auto`: 29500, as every run has its own network."""
    python: Word = "python3"
    """Interpreter of the ranks in the image."""
    lost_after: Seconds = 30.0
    """Seconds without an answer after which a node counts as lost."""

    def starts_from_here(self, path: str) -> bool:
        return super().starts_from_here(path) and self.code == "mounted"


class Claim(Spec, frozen=True, kw_only=True):
    """A volume claim that every pod of a run mounts."""

    claim: Word
    """Name of the PersistentVolumeClaim."""
    path: Absolute
    """Folder at which the pods mount it."""
    read_only: bool = False
    """Whether pods may only read it."""


class KubernetesCluster(Entry, frozen=True, kw_only=True):
    """Pods of a Kubernetes cluster, one per node."""

    backend: Literal["kubernetes"] = "kubernetes"
    """Pods."""
    kubeconfig: str | None = None
    """Kubeconfig file instead of `$KUBECONFIG`, or `~/.kube/config`."""
    context: str | None = None
    """Context of the kubeconfig; by default its current one."""
    namespace: str | None = None
    """Namespace of the pods; by default the context's, otherwise `default`."""
    flavor: Literal["auto", "pytorchjob", "mpijob", "trainjob", "jobset", "job"] = "auto"
    """Kind of object that creates the pods. `auto`: `mpijob` for launcher mpirun; otherwise the
    first of `pytorchjob`, `trainjob` and `jobset` that the cluster has, or `job`, which all
    have."""
    image: Word | None = None
    """Image of the pods; by default `clusterkit:gpu` where the job gets GPUs, otherwise
    `clusterkit:cpu`."""
    image_pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    """When Kubernetes pulls the image."""
    image_pull_secrets: tuple[str, ...] = ()
    """Kubernetes secrets with the registry's credentials."""
    code: Literal["baked", "copied"] = "baked"
    """`baked`: the project is in the image, or in a volume; `copied`: the current working tree, in
    a config map, which can hold 1 MiB compressed."""
    workdir: Absolute = "/opt/clusterkit"
    """Folder of the project in the image, or in a volume."""
    python: Word = "python3"
    """Interpreter of the ranks in the image."""
    gpus: Amount | Auto = "auto"
    """GPUs of a pod; `auto`: all GPUs of one of the cluster's nodes."""
    gpu_resource: Word = "nvidia.com/gpu"
    """The cluster's resource name of GPUs."""
    cpus: Annotated[float, Meta(gt=0)] | None = None
    """Cores that a pod asks for. Without it a rank on a GPU has as many threads as are the share of
    its GPU in the node's cores, any other rank one."""
    memory: str | None = None
    """Memory that a pod asks for and may use, such as `64Gi`."""
    resources: dict[str, str | int | float] = {}
    """Other resources that a pod asks for, such as `{rdma/hca: 1}`."""
    shm_size: str = "8Gi"
    """Size of `/dev/shm`, which NCCL and data loaders use."""
    volumes: tuple[Claim, ...] = ()
    """Existing volume claims to mount."""
    shared: Absolute | None = None
    """Folder in a volume that all pods mount; relative checkpoint folders are created in it.
    Without it checkpoints are lost with their pod."""
    node_selector: dict[str, str] = {}
    """Labels that a node must have."""
    topology_key: Word | None = None
    """Label of nodes, such as `topology.kubernetes.io/rack`: all pods of a run are placed on nodes
    with the same value of it."""
    tolerations: tuple[dict[str, Any], ...] = ()
    """Tolerations of the pods, as Kubernetes writes them."""
    priority_class: str | None = None
    """Priority class of the pods."""
    service_account: str | None = None
    """Service account of the pods; its token is not mounted."""
    queue: str | None = None
    """Kueue queue in which the run waits."""
    watcher: bool | Auto = False
    """Whether each run has a small pod of its image that replaces lost pods (`replace_lost`) while
    neither `submit` nor `attach` runs, with the right to delete the run's pods; flavor `pytorchjob`
    only. `auto` is `false`."""
    labels: dict[str, str] = {}
    """Further labels of all objects."""
    annotations: dict[str, str] = {}
    """Further annotations of all objects."""
    patch: dict[str, Any] = {}
    """Fields to merge into every pod's `spec`, for settings that have no key here."""
    user: Count = 1000
    """User and group id of the ranks."""
    read_only_root: bool = True
    """Whether the image's own files are read-only."""
    interface: Word = "eth0"
    """Network interface of the ranks in a pod."""
    port: Port | Auto = "auto"
    """Rendezvous port; `auto`: 29500, as every pod has its own ports."""
    lost_after: Seconds = 30.0
    """Seconds without an answer after which a node counts as lost."""
    replace_lost: bool = True
    """Whether a pod is force-deleted, so that another can replace it, when its Kubernetes node has
    not answered for `lost_after`. `false`: you delete it yourself."""

    def starts_from_here(self, path: str) -> bool:
        return super().starts_from_here(path) and self.code == "copied"


class SlurmCluster(Entry, frozen=True, kw_only=True):
    """Nodes of a Slurm cluster, one allocation per run."""

    backend: Literal["slurm"] = "slurm"
    """A partition of Slurm, from a login node."""
    ssh: Word | None = None
    """Login node to reach over SSH, as `[user@]host[:port]`; `~/.ssh/config` applies. By default
    this machine is a login node."""
    workdir: Word = "~/clusterkit"
    """With `ssh`: folder for runs and projects, on a disk that login node and nodes share."""
    sync: bool = True
    """With `ssh`: copy the project to `workdir`; `false` if it has the same path on the cluster."""
    partition: Word | None = None
    """Partition; by default Slurm's."""
    account: Word | None = None
    """Account that is charged."""
    qos: Word | None = None
    """Quality of service."""
    constraint: Word | None = None
    """Features that the nodes must have, such as `h100&ib`."""
    reservation: Word | None = None
    """Reservation to run in."""
    time: Word | None = None
    """Time limit as `sbatch` takes it, such as `2-00:00:00`; by default the job's `time_limit` plus
    5 minutes, or the partition's."""
    exclusive: bool = False
    """Whether no other job may share the nodes."""
    gres: Word | None = None
    """Resources of a node, such as `gpu:h100:4`; by default `gpu:N` for N ranks on GPUs."""
    gpus: Amount | Auto = "auto"
    """GPUs of a node; `auto`: all GPUs of a node of the partition."""
    cpus: Count | Auto = "auto"
    """CPUs of a node; `auto`: in proportion to its GPUs, or all CPUs without GPUs."""
    memory: Word | None = None
    """Memory of a node, such as `64G`; `0`: all of it. By default Slurm's default."""
    options: tuple[Word, ...] = ()
    """Further options of `sbatch`, such as `--mail-type=FAIL`."""
    modules: tuple[Word, ...] = ()
    """Modules to load on the first node; the ranks inherit the environment."""
    setup: tuple[Word, ...] = ()
    """Shell lines to run on the first node, after `modules`, before the nodes start, in the ranks'
    working folder."""
    container: Word | None = None
    """Container image in which agents and ranks run; by default they run without a container."""
    container_with: Literal["pyxis", "apptainer"] = "pyxis"
    """How to run the image: `srun --container-image` (pyxis and enroot), or `apptainer exec`."""
    container_mounts: tuple[Word, ...] = ()
    """Folders to mount in it, as `SOURCE:TARGET`, besides those of the run and the job."""
    requeue: bool = True
    """Whether Slurm requeues a run that was preempted, lost a node or reached its time limit; it
    resumes from its checkpoint."""
    notice: Annotated[float, Meta(ge=0, le=65535)] = 120.0
    """Seconds before the end of the time limit at which the ranks are asked to stop."""
    interface: Word | None = None
    """Network interface of the ranks, such as `ib0`; by default gloo and NCCL choose, and the first
    node is reached at the address that Slurm has."""
    port: Port | Auto = "auto"
    """Rendezvous port; `auto`: a random one that is free on the login node."""
    python: Word | None = None
    """Interpreter of the ranks, on a disk that all nodes share; by default the active
    environment's, otherwise the one that runs clusterkit; with `ssh` the login node's `python3`."""
    lost_after: Seconds = 30.0
    """Seconds without an answer after which a node counts as lost."""

    def starts_from_here(self, path: str) -> bool:
        return super().starts_from_here(path) and not (
            self.container or self.setup or (self.ssh and not self.sync)
        )


ClusterSpec = LocalCluster | SshCluster | ComposeCluster | KubernetesCluster | SlurmCluster
"""An entry of any backend; a new backend adds its own type."""

CLUSTER_TYPES: dict[str, type[ClusterSpec]] = {
    "local": LocalCluster,
    "ssh": SshCluster,
    "compose": ComposeCluster,
    "kubernetes": KubernetesCluster,
    "slurm": SlurmCluster,
}


class Gpu(Struct, frozen=True):
    """One GPU: its index for CUDA_VISIBLE_DEVICES, its name, its memory in MiB."""

    index: str
    name: str
    memory_mib: int


class HostFacts(Struct, frozen=True, kw_only=True):
    """Facts of one host."""

    host: str
    address: str
    """Address at which the other hosts reach it."""
    cpus: int
    memory_mib: int
    gpus: tuple[Gpu, ...] = ()
    python: str
    """Interpreter of the ranks."""
    python_origin: str = "when probed"
    """Where the choice of the interpreter comes from, for people."""
    versions: dict[str, str] = {}
    """Versions of the packages that are installed in that interpreter."""
    tools: dict[str, str] = {}
    """Paths of the launchers' commands that are installed."""
    interface: str | None = None
    """Network interface with that address; None: the same on all hosts."""
    slots: int | None = None
    """Most ranks on this host; None: as many as it has GPUs."""
    omp_num_threads: str | None = None
    """OMP_NUM_THREADS of its environment; None: not set, or not known."""
    gpu_trouble: str = ""
    """Why a GPU of the host cannot be used; empty: nothing tells of such a GPU."""
    gpu_remark: str = ""
    """What nvidia-smi says of GPUs that can be used."""


class Project(Struct, frozen=True, kw_only=True):
    """A folder that is copied to the hosts, as it was when the cluster was probed."""

    root: str
    """The folder on the submitter's machine."""
    digest: str
    """Digest of every file's path, mode and contents."""
    files: int
    bytes: int
    how: str
    """Which of its files are copied, for people."""
    remark: str | None = None
    """A warning for people, such as about its size."""


class Engine(Struct, frozen=True, kw_only=True):
    """The docker engine that runs the nodes, and their image."""

    socket: str
    """Address of the engine, such as ``unix:///var/run/docker.sock``."""
    version: str
    image: str
    image_id: str
    workdir: str
    """The image's working folder."""
    user: str
    """``UID:GID`` of the ranks, so that files of a rank belong to the submitter."""
    package: str
    """Folder of the clusterkit package on this machine."""
    remapped: bool = False
    """Whether the engine maps user ids of containers to other ids of the host (userns-remap)."""
    cdi: bool = False
    """Whether it knows GPUs only by the Container Device Interface, without NVIDIA's runtime."""


class KubernetesFacts(Struct, frozen=True, kw_only=True):
    """The Kubernetes cluster that runs the nodes."""

    version: str
    context: str
    namespace: str
    kubeconfig: str | None = None
    """None: the client's default."""
    kinds: tuple[str, ...] = ()
    """Installed kinds of jobs besides ``Job``, such as ``PyTorchJob``."""
    user: str = ""
    """The submitter's name, for a label of the run's objects."""
    root: str = "/run/clusterkit"
    """Folder in the pods in which the run folder is created."""
    most_gpus: int | None = None
    """Most GPUs of any node at present; None: not probed."""
    gpu_cores: int = 0
    """Cores that fall to a pod's GPUs on such a node; 0: not known."""


class SlurmFacts(Struct, frozen=True, kw_only=True):
    """The Slurm partition in which the nodes are allocated."""

    version: str
    partition: str
    nodes: int
    """Usable nodes of the partition, free or not."""
    minutes: int | None = None
    """Longest time limit; None: unlimited."""
    most_nodes: int | None = None
    """Most nodes of one job; None: unlimited."""


class Facts(Struct, frozen=True, kw_only=True):
    """What probing found on a cluster: all that a plan needs of it. Saved with the run."""

    home: str
    """CLUSTERKIT_HOME on the nodes."""
    hosts: tuple[HostFacts, ...]
    port: int
    """Rendezvous port on the first host, free when probed."""
    port_origin: str
    """Where the choice of the port comes from, for people."""
    interface: str
    """Network interface of the ranks."""
    watch_port: int | None = None
    """Port of the coordinator on the first host; None: chosen when a plan is made."""
    project: Project | None = None
    """The job's project; None: it is not copied."""
    shipped: Project | None = None
    """The clusterkit package, for hosts that do not have it."""
    engine: Engine | None = None
    """Facts of backend compose."""
    kubernetes: KubernetesFacts | None = None
    """Facts of backend kubernetes."""
    slurm: SlurmFacts | None = None
    """Facts of backend slurm."""
