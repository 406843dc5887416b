"""Containers of one docker engine as a cluster: one compose project a run, one container a node.

A run's folder is mounted into its containers at its own path, so that everything the node agents
write is at once on this machine, where the supervisor reads it as it does for local runs. From the
engine come the states of the containers alone: they tell why an agent fell silent.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import math
import os
import posixpath
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

import clusterkit
from clusterkit import host_probe
from clusterkit.assemble import Peers, Places, assemble, require_packages
from clusterkit.backends.base import Backend, Handle, Observation
from clusterkit.backends.compose.compose_file import (
    OURS,
    checkpoint_folders,
    is_below,
    mounts_of,
    mpi_env,
    mpi_files,
    parse_volume,
    project_name,
    render,
    size_bytes,
)
from clusterkit.backends.compose.containers import (
    ENGINE_SECONDS,
    HOST,
    Watcher,
    inspect,
    known,
    observation,
    remove,
)
from clusterkit.backends.nodes import (
    CPU_IMAGE,
    GPU_IMAGE,
    GPU_QUERY,
    PACKAGES,
    TOOLS,
    check_version,
    device_of,
    divided_gpus,
    interpreter,
    own_ports,
    probe_gpus,
    threads_of,
)
from clusterkit.cluster import ClusterSpec, ComposeCluster, Engine, Facts, Gpu, HostFacts
from clusterkit.errors import BadInput, ClusterkitError, Unavailable, counted
from clusterkit.plan import Note, Plan, PlanFile, Step
from clusterkit.rendezvous import Endpoint, Topology
from clusterkit.runs import home
from clusterkit.spec import JobSpec
from clusterkit.transport import Completed, Transport

INTERFACE = "eth0"
OLDEST_COMPOSE = (2, 20)
SYSTEM = frozenset({
    "/", "/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/opt", "/proc", "/run", "/sbin",
    "/sys", "/tmp", "/usr", "/var",
})  # fmt: skip
"""Folders of an image that a project's folder would hide."""
_VOLUME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\Z")


class ComposeBackend(Backend):
    """Nodes are containers; see `clusterkit.agent` for what runs in each of them."""

    name = "compose"
    summary = "containers of a docker engine on this machine, one node each"
    managed: ClassVar[bool] = True
    own_network: ClassVar[bool] = True

    @classmethod
    def settled(
        cls, cluster: ClusterSpec, folder: Path, include: str | None, exclude: str | None
    ) -> ClusterSpec:
        super().settled(cluster, folder, include, exclude)
        assert isinstance(cluster, ComposeCluster)
        for key in ("shm_size", "memory"):
            if (size := getattr(cluster, key)) is not None:
                size_bytes(key, size)
        if cluster.subnet != "auto":
            try:
                ipaddress.IPv4Network(cluster.subnet)
            except ValueError as error:
                raise BadInput(
                    f"subnet: {error}", hint="such as 10.99.0.0/24, or auto", cluster="subnet"
                ) from None
        for name, value in cluster.ulimits.items():
            if not re.match(r"[a-z]+\Z", name) or value < -1:
                raise BadInput(
                    f"ulimits: {name}: {value} is not a limit",
                    hint="{memlock: -1}",
                    cluster="ulimits",
                )
        volumes = tuple(_settled_volume(text, folder) for text in cluster.volumes)
        return msgspec.structs.replace(cluster, volumes=volumes)

    # -- probing --------------------------------------------------------------

    def probe(
        self, cluster: ClusterSpec, transport: Transport, job: JobSpec | None = None
    ) -> Facts:
        assert isinstance(cluster, ComposeCluster)
        if shutil.which("docker") is None:
            raise Unavailable(
                "backend compose needs docker, which is not installed",
                hint="apt-get install docker.io, and Docker's compose plugin",
            )
        socket = _socket(cluster, transport)
        docker = ("docker", "--host", socket)
        info = _info(docker, transport)
        _check_subnet(cluster, docker, transport)
        _check_volumes(cluster, docker, transport)
        gpus = _gpus(cluster, job, info, transport)
        image = _image(cluster, bool(gpus), docker, transport)
        remapped = _secured(info, "userns")
        # In a rootless engine, root is the submitter, and every other id is nobody's.
        user = "0:0" if _secured(info, "rootless") else f"{os.getuid()}:{os.getgid()}"
        port, watch_port = own_ports(cluster.port)
        python, origin = interpreter(job, (cluster.python, "cluster: python"))
        told = _inside(cluster, python, docker, info, image, user, remapped, bool(gpus), transport)
        return Facts(
            home=str(home()),
            hosts=(
                HostFacts(
                    host=HOST,
                    address="node-0",
                    cpus=int(info["NCPU"]),
                    memory_mib=int(info["MemTotal"]) >> 20,
                    gpus=gpus,
                    python=python if "/" in python else told["python"],
                    python_origin=origin,
                    versions=told["versions"],
                    tools=told["tools"],
                ),
            ),
            port=port,
            port_origin="the run's own network" if cluster.port == "auto" else "cluster: port",
            interface=INTERFACE,
            watch_port=watch_port,
            engine=Engine(
                socket=socket,
                version=str(info.get("ServerVersion", "?")),
                image=image["name"],
                image_id=image["Id"],
                workdir=image["Config"].get("WorkingDir") or "/",
                user=user,
                package=str(Path(clusterkit.__file__).parent),
                remapped=remapped,
            ),
        )

    # -- planning -------------------------------------------------------------

    def plan(self, job: JobSpec, cluster: ClusterSpec, facts: Facts, run_id: str) -> Plan:
        assert isinstance(cluster, ComposeCluster)
        engine, host = facts.engine, facts.hosts[0]
        if engine is None:
            raise BadInput("facts: no docker engine is named", hint="use those of a compose run")
        least, most = job.node_range
        device, device_origin = device_of(job, [host])
        nproc, nproc_origin = divided_gpus(
            job, host, most, device, place="this machine", flag="--gpus {0}"
        )
        topology = Topology(least, most, nproc)
        _check_room(cluster, most)
        cores = math.floor(cluster.cpus) if cluster.cpus else host.cpus // most
        threads, threads_origin = threads_of(job, max(1, cores), nproc)
        _require(job, host, engine)
        run_dir = posixpath.join(facts.home, "runs", run_id)
        workdir, program = _workdir(job, cluster, engine, run_dir)
        mpirun = job.launcher == "mpirun"
        peers = Peers("node-0", facts.watch_port or own_ports(facts.port)[1], cluster.lost_after)
        assembly = assemble(
            program,
            topology=topology,
            endpoint=Endpoint("node-0", facts.port, run_id),
            places=Places(run_dir, workdir, host.python, python_origin=host.python_origin),
            device=device,
            threads=threads,
            hosts=[f"node-{node}" for node in range(most)],
            cluster_env=cluster.env,
            network_env={
                "GLOO_SOCKET_IFNAME": facts.interface,
                "NCCL_SOCKET_IFNAME": facts.interface,
                **({"PYTHONPATH": f"{OURS}/python"} if cluster.code == "mounted" else {}),
                **(mpi_env(facts.interface) if mpirun else {}),
            },
            stop_grace=cluster.stop_grace,
            peers=None if mpirun else peers,
        )
        mounts = mounts_of(job, cluster, engine, run_dir)
        text = render(
            job, cluster, facts, engine, topology, device, run_dir, mounts,
            assembly.command, assembly.secrets,
        )  # fmt: skip
        files = [*assembly.files, PlanFile(posixpath.join(run_dir, "files", "compose.yaml"), text)]
        if mpirun:
            files += mpi_files(run_dir)
        notes = [
            Note("device", device, device_origin),
            Note("nproc_per_node", str(nproc), nproc_origin),
            Note("image", engine.image, f"{engine.image_id[:19]}, {_image_origin(cluster)}"),
            Note("workdir", workdir, _code_origin(cluster)),
            Note("user", engine.user, "you, as the engine sees you"),
            Note("master_addr", "node-0", "name of the first container"),
            Note("master_port", str(facts.port), facts.port_origin),
            Note("threads_per_rank", str(threads), threads_origin),
            *assembly.notes,
        ]
        return Plan(
            run_id=run_id,
            run_dir=run_dir,
            backend=self.name,
            summary=f"{topology} in containers of docker {engine.version}, started by "
            f"{job.launcher}; world size {topology.world_size}",
            notes=tuple(notes),
            files=tuple(files),
            steps=(
                *_folders(job, cluster, run_dir),
                _up(engine, run_id, run_dir, assembly.secrets),
            ),
            hosts=(HOST,) * most,
            nodes=1 if mpirun else most,
            world_size=topology.world_size,
            topology={"min_nodes": least, "nodes": most, "nproc_per_node": nproc},
            address="node-0",
            port=facts.port,
            python=host.python,
            stop_grace=cluster.stop_grace,
            lost_after=cluster.lost_after,
        )

    # -- carrying out ---------------------------------------------------------

    def status(self, handle: Handle, transport: Transport) -> Observation | None:
        if not known(handle.plan, transport):
            return None
        try:
            live = inspect(handle, transport)
        except ClusterkitError as error:
            return observation(handle, {}, transport, silent=error.message)
        return observation(handle, live, transport)

    def watch(self, handle: Handle, transport: Transport) -> Watcher:
        return Watcher(handle, transport)

    def cancel(self, handle: Handle, transport: Transport, reason: str = "cancelled") -> None:
        remove(handle, transport)


# ---------------------------------------------------------------- probing


def _socket(cluster: ComposeCluster, transport: Transport) -> str:
    """Where the engine listens; fixed for the run, whatever DOCKER_HOST is later."""
    named = [cluster.context] if cluster.context else []
    words = ["docker", "context", "inspect", *named, "--format", "{{.Endpoints.docker.Host}}"]
    done = transport.run(HOST, words, timeout=ENGINE_SECONDS)
    socket = done.stdout.strip()
    if done.exit_code or not socket:
        raise BadInput(
            f"context: docker has no context {cluster.context!r}"
            if cluster.context
            else f"context: docker says: {_last(done)}",
            hint="`docker context ls` lists them",
            cluster="context",
        )
    if not socket.startswith("unix://"):
        raise BadInput(
            f"context: the engine at {socket} is on another machine, without the run's folder",
            hint="`context:` names an engine of this machine; backend ssh runs on other machines",
            cluster="context",
        )
    return socket


def _info(docker: Sequence[str], transport: Transport) -> dict[str, Any]:
    """What the engine and the client tell of themselves, if they will do."""
    done = transport.run(HOST, [*docker, "info", "--format", "{{json .}}"], timeout=ENGINE_SECONDS)
    try:
        info: dict[str, Any] = json.loads(done.stdout)
        said = "\n".join(info.get("ServerErrors") or ())
    except (ValueError, AttributeError, TypeError):
        info, said = {}, ""
    if not info.get("ServerVersion"):
        said = said or done.stderr.strip()
        if "permission denied" in said.lower():
            raise Unavailable(
                f"you may not use the docker engine at {docker[-1]}",
                hint="sudo usermod --append --groups docker $USER, then log in again",
            )
        if re.search(r"Cannot connect|connection refused|no such file", said, re.IGNORECASE):
            raise Unavailable(
                f"no docker engine answers at {docker[-1]}",
                hint="sudo systemctl start docker, or `context:` in the cluster entry",
            )
        raise Unavailable(
            f"the docker engine at {docker[-1]} says: {_one_line(said) or 'nothing'}",
            hint="`docker info` tells more",
        )
    plugins = (info.get("ClientInfo") or {}).get("Plugins") or ()
    version = next((str(p.get("Version", "")) for p in plugins if p.get("Name") == "compose"), None)
    numbers = tuple(map(int, re.findall(r"\d+", version or "")[:2]))
    if version is None or numbers < OLDEST_COMPOSE:
        what = "has no compose plugin" if version is None else f"has compose {version}"
        raise Unavailable(
            f"docker {what}; {'.'.join(map(str, OLDEST_COMPOSE))} or newer is needed",
            hint="apt-get install docker-compose-plugin (Docker's own packages), or "
            "docker-compose-v2 (Ubuntu's)",
        )
    if info.get("OSType", "linux") != "linux":
        raise Unavailable(
            f"the docker engine runs {info['OSType']} containers, not Linux's",
            hint="`context:` in the cluster entry names another engine",
        )
    return info


def _secured(info: Mapping[str, Any], how: str) -> bool:
    return any(str(o).startswith(f"name={how}") for o in info.get("SecurityOptions") or ())


def _gpus(
    cluster: ComposeCluster, job: JobSpec | None, info: Mapping[str, Any], transport: Transport
) -> tuple[Gpu, ...]:
    if cluster.gpus == 0 or (job is not None and job.device == "cpu"):
        return ()
    gpus = probe_gpus(transport, HOST)
    if cluster.gpus != "auto":
        if cluster.gpus > len(gpus):
            raise BadInput(
                f"gpus: {cluster.gpus} wanted, but this machine has {len(gpus)}",
                hint="auto: all that are visible",
                cluster="gpus",
            )
        gpus = gpus[: cluster.gpus]
    if gpus and "nvidia" not in (info.get("Runtimes") or {}):
        raise Unavailable(
            f"this machine has {counted(len(gpus), 'GPU')}, but the docker engine lacks NVIDIA's "
            "runtime",
            hint="apt-get install nvidia-container-toolkit, nvidia-ctk runtime configure "
            "--runtime=docker, systemctl restart docker; or --set device=cpu",
        )
    return gpus


def _image(
    cluster: ComposeCluster, gpus: bool, docker: Sequence[str], transport: Transport
) -> dict[str, Any]:
    """What the engine says of the image, and the ``name`` it was found under."""
    names = [cluster.image] if cluster.image else [GPU_IMAGE] if gpus else [CPU_IMAGE, GPU_IMAGE]
    said = ""
    for name in names:
        words = [*docker, "image", "inspect", name]
        done = transport.run(HOST, words, timeout=ENGINE_SECONDS)
        if not done.exit_code:
            found: dict[str, Any] = json.loads(done.stdout)[0]
            return found | {"name": name}
        said = _last(done)
    missing = "no such image" in said.lower()
    raise Unavailable(
        f"image: the docker engine has no {names[0]}" if missing else f"image: {said}",
        hint=f"docker pull {names[0]}, or leave `image` out and run `make image`"
        if cluster.image
        else "`make image` builds it",
    )


def _inside(
    cluster: ComposeCluster,
    python: str,
    docker: Sequence[str],
    info: Mapping[str, Any],
    image: Mapping[str, Any],
    user: str,
    remapped: bool,
    gpus: bool,
    transport: Transport,
) -> dict[str, Any]:
    """What Python in a container of this image finds; asked once for each image and engine."""
    place = home()
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"CLUSTERKIT_HOME: {place}: {error.strerror}") from None
    options = ["--user", user, "--network", "none"]
    options += ["--userns", "host"] if remapped else []
    options += ["--gpus", "all"] if gpus else []
    for name, value in cluster.ulimits.items():
        options += ["--ulimit", f"{name}={value}"]
    quoted = str(place).replace('"', '""')
    options += ["--mount", f'type=bind,"source={quoted}","target={quoted}"']
    asked = {
        "workdir": str(place), "packages": PACKAGES, "tools": TOOLS, "gpu_query": GPU_QUERY,
    }  # fmt: skip
    key = [image["Id"], info.get("ID"), info.get("ServerVersion"), python, *options]
    digest = hashlib.sha256(json.dumps([key, asked]).encode()).hexdigest()[:32]
    saved = place / "cache" / "images" / f"{digest}.json"
    with contextlib.suppress(OSError, ValueError):
        known: dict[str, Any] = json.loads(saved.read_bytes())
        if known["writable"]:
            return known
    done = transport.run(
        HOST,
        [*docker, "run", "--rm", "--interactive", "--pull", "never", *options,
         "--entrypoint", python, image["Id"], "-", json.dumps(asked)],
        stdin=Path(host_probe.__file__).read_bytes(),
        timeout=2 * ENGINE_SECONDS,
    )  # fmt: skip
    try:
        told: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise _unfit(cluster, python, str(image["name"]), place, done) from None
    check_version(told["python_version"], python, f"image {image['name']}")
    if not told["writable"]:
        raise Unavailable(
            f"containers cannot write into {place} as user {user}",
            hint="set CLUSTERKIT_HOME to a folder of your own, on a disk of this machine",
        )
    transport.put(HOST, str(saved), json.dumps(told).encode())
    return told


def _unfit(
    cluster: ComposeCluster, python: str, image: str, place: Path, done: Completed
) -> ClusterkitError:
    """Why no container could be had, in words and with the remedy."""
    said = done.stderr
    if "rlimit" in said:
        return Unavailable(
            f"ulimits: the docker engine may not set {cluster.ulimits}: {_last(done)}",
            hint="give the engine that limit itself (LimitMEMLOCK=infinity in docker.service), or "
            "leave it out of `ulimits`",
        )
    if "could not select device driver" in said or "nvidia-container" in said:
        return Unavailable(
            f"the docker engine cannot give GPUs to containers: {_last(done)}",
            hint="nvidia-ctk runtime configure --runtime=docker, systemctl restart docker; or "
            "--set device=cpu",
        )
    if "executable file not found" in said or "no such file or directory" in said:
        return Unavailable(
            f"python: image {image} has no {python}",
            hint="`python` in the job, or in the cluster entry, names the interpreter of the ranks",
        )
    if "bind source path does not exist" in said:
        return Unavailable(
            f"the docker engine does not see this machine's {place}",
            hint="share that folder with the engine's own machine, or set CLUSTERKIT_HOME",
        )
    if "exec format error" in said:
        return Unavailable(
            f"image: {image} was built for another kind of processor",
            hint="`make image` builds one for this machine",
        )
    return Unavailable(
        f"image: no container of {image} could be run: {_last(done)}",
        hint=f"docker run --rm --entrypoint {python} {image} --version",
    )


def _check_subnet(cluster: ComposeCluster, docker: Sequence[str], transport: Transport) -> None:
    """Refuse a network that is somebody's already.

    Raises:
        BadInput: names whose it is.
    """
    if cluster.subnet == "auto":
        return
    wanted = ipaddress.IPv4Network(cluster.subnet)
    words = [*docker, "network", "ls", "--format", "{{.ID}}"]
    ids = transport.run(HOST, words, timeout=ENGINE_SECONDS).stdout.split()
    shape = "{{.Name}}{{range .IPAM.Config}} {{.Subnet}}{{end}}"
    listed = transport.run(
        HOST, [*docker, "network", "inspect", *ids, "--format", shape], timeout=ENGINE_SECONDS
    ).stdout
    taken = [
        (subnet, f"docker's network {name}")
        for name, *subnets in map(str.split, listed.splitlines())
        for subnet in subnets
    ]
    taken += _routes((transport.get(HOST, "/proc/net/route") or b"").decode())
    for subnet, whose in taken:
        network = ipaddress.ip_network(subnet, strict=False)
        if isinstance(network, ipaddress.IPv4Network) and network.overlaps(wanted):
            raise BadInput(
                f"subnet: {wanted} is taken: {whose} has {subnet}",
                hint="subnet: auto, or one that is not in `ip route`",
                cluster="subnet",
            )


def _routes(table: str) -> list[tuple[str, str]]:
    """Networks that this machine has routes to, from ``/proc/net/route``."""
    found = []
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 8 or fields[7] == "00000000":
            continue
        address, mask = (int.from_bytes(bytes.fromhex(fields[n]), "little") for n in (1, 7))
        network = ipaddress.IPv4Network((address, mask.bit_count()), strict=False)
        found.append((str(network), f"interface {fields[0]}"))
    return found


def _check_volumes(cluster: ComposeCluster, docker: Sequence[str], transport: Transport) -> None:
    for text in cluster.volumes:
        source, _, _ = parse_volume(text)
        if source.startswith("/"):
            if not os.path.exists(source):
                raise BadInput(
                    f"volumes: {source} does not exist",
                    hint=f"mkdir -p {source}",
                    cluster="volumes",
                )
            continue
        words = [*docker, "volume", "inspect", source]
        if transport.run(HOST, words, timeout=ENGINE_SECONDS).exit_code:
            raise BadInput(
                f"volumes: docker has no volume {source}",
                hint=f"docker volume create {source}; a folder is written /{source} or ./{source}",
                cluster="volumes",
            )


def _settled_volume(text: str, folder: Path) -> str:
    source, target, readonly = parse_volume(text)
    if source.startswith(("/", ".", "~")):
        source = os.path.normpath(folder / Path(source).expanduser())
    elif not _VOLUME.match(source):
        raise BadInput(
            f"volumes: {source!r} is not a valid name of a volume",
            hint=f"a folder: ./{source}",
            cluster="volumes",
        )
    return f"{source}:{target}{':ro' if readonly else ''}"


def _last(done: Completed) -> str:
    """What a docker command said last, without its advice."""
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    telling = [line for line in lines if line.strip() and "--help'" not in line]
    said = telling[-1] if telling else f"exit code {done.exit_code}"
    return _one_line(said.removeprefix("docker: "))


def _one_line(text: str) -> str:
    return " ".join(text.split())


# ---------------------------------------------------------------- planning


def _check_room(cluster: ComposeCluster, nodes: int) -> None:
    if cluster.subnet != "auto":
        # Three are the network's own: its first, its last, and the engine's.
        room = ipaddress.IPv4Network(cluster.subnet).num_addresses - 3
        if nodes > room:
            has = counted(max(0, room), "node")
            raise BadInput(
                f"subnet: {cluster.subnet} has room for {has}, not {nodes}",
                hint="a larger one, or auto",
                cluster="subnet",
            )


def _require(job: JobSpec, host: HostFacts, engine: Engine) -> None:
    try:
        require_packages(job, msgspec.structs.replace(host, host=engine.image))
    except Unavailable as error:
        raise Unavailable(
            error.message, hint="install it in the image; `make image` makes one with everything"
        ) from None


def _workdir(
    job: JobSpec, cluster: ComposeCluster, engine: Engine, run_dir: str
) -> tuple[str, JobSpec]:
    """Where the ranks start, and the job with its program as it is called there."""
    workdir = job.workdir or run_dir
    if cluster.code == "mounted":
        if posixpath.normpath(workdir) in SYSTEM or re.match(r"/(proc|sys|dev)/", workdir):
            raise BadInput(
                f"workdir: {workdir} would hide the image's own",
                hint="start from the project's folder, or `code: baked` in the cluster entry",
                job="workdir",
            )
        return workdir, job
    if job.program is not None and is_below(job.program, workdir):
        job = msgspec.structs.replace(job, program=posixpath.relpath(job.program, workdir))
    return engine.workdir, job


def _folders(job: JobSpec, cluster: ComposeCluster, run_dir: str) -> list[Step]:
    covered = [parse_volume(text)[1] for text in cluster.volumes]
    return [
        Step(kind="run", host=HOST, argv=("mkdir", "-p", "--", folder))
        for folder in checkpoint_folders(job, run_dir)
        if folder not in covered and not any(is_below(folder, target) for target in covered)
    ]


def _up(engine: Engine, run_id: str, run_dir: str, secrets: tuple[str, ...]) -> Step:
    return Step(
        kind="run",
        host=HOST,
        argv=(
            "docker", "--host", engine.socket, "compose", "--progress", "quiet",
            "--project-name", project_name(run_id),
            "--file", posixpath.join(run_dir, "files", "compose.yaml"),
            "up", "--detach", "--no-build", "--force-recreate",
        ),
        secrets=secrets,
    )  # fmt: skip


def _image_origin(cluster: ComposeCluster) -> str:
    return "cluster: image" if cluster.image else "by what this machine has"


def _code_origin(cluster: ComposeCluster) -> str:
    if cluster.code == "mounted":
        return "this machine's, read-only (cluster: code)"
    return "the image's own (cluster: code)"
