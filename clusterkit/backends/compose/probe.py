"""Probing a docker engine, and the ranks' Python in a container of the image."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

import clusterkit
from clusterkit.backends.base import OWN_IMAGE
from clusterkit.backends.compose.compose_file import INFINIBAND, parse_volume, ulimits_of
from clusterkit.backends.compose.engine import CDI_KIND, ENGINE_SECONDS, HOST, Docker, error_line
from clusterkit.backends.placing import CPU_IMAGE, GPU_IMAGE
from clusterkit.backends.ports import default_ports
from clusterkit.backends.probing import (
    NAMES_PYTHON,
    HostReport,
    gpu_facts,
    interpreter,
    probe_python,
    probe_request,
)
from clusterkit.cluster import ComposeCluster, Engine, Facts, HostFacts
from clusterkit.errors import BadInput, ClusterkitError, Unavailable, pluralize
from clusterkit.files import write_atomic
from clusterkit.hosts import host_probe
from clusterkit.hosts.gpus import GPU_QUERY, read_gpus
from clusterkit.run.folder import home
from clusterkit.spec import JobSpec
from clusterkit.transport import Completed, Transport

INTERFACE = "eth0"
OLDEST_COMPOSE = (2, 20)


def probe(cluster: ComposeCluster, transport: Transport, job: JobSpec | None) -> Facts:
    """Implement `clusterkit.backends.base.Backend.probe`."""
    if shutil.which("docker") is None:
        raise Unavailable(
            "backend compose needs docker, which is not installed",
            hint="apt-get install docker.io, and Docker's compose plugin",
        )
    socket = _socket(cluster, transport)
    docker = Docker(socket, transport)
    info = _info(docker)
    _check_subnet(cluster, docker)
    _check_volumes(cluster, docker)
    gpus = _gpus(cluster, job, info)
    image = _image(cluster, bool(gpus["gpus"]), docker)
    remapped = _has_security_option(info, "userns")
    # A rootless engine maps root to the submitter, and other ids to no user of this machine.
    user = "0:0" if _has_security_option(info, "rootless") else f"{os.getuid()}:{os.getgid()}"
    python, origin = interpreter(job, (cluster.python, "cluster: python"))
    options = ["--user", user, "--network", "none"]
    options += ["--userns", "host"] if remapped else []
    cdi = bool(gpus["gpus"]) and not _has_nvidia_runtime(info)
    if gpus["gpus"]:
        options += ["--device", f"{CDI_KIND}=all"] if cdi else ["--gpus", "all"]
    report = _probe_image(cluster, python, docker, info, image, options)
    host = report.facts(
        HOST, "node-0", cpus=int(info["NCPU"]), memory_mib=int(info["MemTotal"]) >> 20,
        python=python if "/" in python else report.python, python_origin=origin, **gpus,
    )  # fmt: skip
    engine = Engine(
        socket=socket, version=str(info.get("ServerVersion", "?")), image=image["name"],
        image_id=image["Id"], workdir=image["Config"].get("WorkingDir") or "/", user=user,
        package=str(Path(clusterkit.__file__).parent), remapped=remapped, cdi=cdi,
    )  # fmt: skip
    return _facts(cluster, host, engine)


def _facts(cluster: ComposeCluster, host: HostFacts, engine: Engine) -> Facts:
    port, watch_port = default_ports(cluster.port)
    return Facts(
        home=str(home()), hosts=(host,), port=port, watch_port=watch_port, interface=INTERFACE,
        port_origin="the run's own network" if cluster.port == "auto" else "cluster: port",
        engine=engine,
    )  # fmt: skip


def _socket(cluster: ComposeCluster, transport: Transport) -> str:
    """Return the engine's socket: a later change of DOCKER_HOST must not affect the run."""
    context = [cluster.context] if cluster.context else []
    format_ = "{{.Endpoints.docker.Host}}"
    done = Docker(None, transport).run("context", "inspect", *context, "--format", format_)
    socket = done.stdout.strip()
    if done.exit_code or not socket:
        raise BadInput(
            f"context: docker has no context {cluster.context!r}"
            if cluster.context
            else f"context: docker says: {error_line(done)}",
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


def _info(docker: Docker) -> dict[str, Any]:
    """Return the document of ``docker info``.

    Raises:
        Unavailable: the engine does not answer, or engine or client cannot be used.
    """
    done = docker.run("info", "--format", "{{json .}}")
    try:
        info: dict[str, Any] = json.loads(done.stdout)
        error = "\n".join(info.get("ServerErrors") or ())
    except (ValueError, AttributeError, TypeError):
        info, error = {}, ""
    if not info.get("ServerVersion"):
        error = error or done.stderr.strip()
        if "permission denied" in error.lower():
            raise Unavailable(
                f"permission denied: you may not use the docker engine at {docker.socket}",
                hint="sudo usermod --append --groups docker $USER, then log in again",
            )
        if re.search(r"Cannot connect|connection refused|no such file", error, re.IGNORECASE):
            raise Unavailable(
                f"no docker engine answers at {docker.socket}",
                hint="sudo systemctl start docker, or `context:` in the cluster entry",
            )
        raise Unavailable(
            f"the docker engine at {docker.socket} failed: {' '.join(error.split()) or 'nothing'}",
            hint="`docker info` shows more",
        )
    plugins = (info.get("ClientInfo") or {}).get("Plugins") or ()
    version = next((str(p.get("Version", "")) for p in plugins if p.get("Name") == "compose"), None)
    numbers = tuple(map(int, re.findall(r"\d+", version or "")[:2]))
    if version is None or numbers < OLDEST_COMPOSE:
        found = "no compose plugin" if version is None else f"compose {version}"
        raise Unavailable(
            f"docker has {found}; {'.'.join(map(str, OLDEST_COMPOSE))} or newer is needed",
            hint="apt-get install docker-compose-plugin (Docker's own packages), or "
            "docker-compose-v2 (Ubuntu's)",
        )
    if info.get("OSType", "linux") != "linux":
        raise Unavailable(
            f"the docker engine runs {info['OSType']} containers, not Linux's",
            hint="`context:` in the cluster entry names another engine",
        )
    return info


def _has_security_option(info: Mapping[str, Any], name: str) -> bool:
    options = info.get("SecurityOptions") or ()
    return any(str(option).startswith(f"name={name}") for option in options)


def _gpus(cluster: ComposeCluster, job: JobSpec | None, info: Mapping[str, Any]) -> dict[str, Any]:
    """As `gpu_facts`."""
    if cluster.gpus == 0 or (job is not None and job.device == "cpu"):
        return {"gpus": ()}
    listed, complaint = host_probe.gpus(GPU_QUERY)
    found = read_gpus(listed, complaint, os.environ.get("CUDA_VISIBLE_DEVICES"))
    facts = gpu_facts(found, cluster.gpus)
    if facts["gpus"] and not _has_nvidia_runtime(info) and not _has_cdi_gpus(info):
        number = pluralize(len(facts["gpus"]), "GPU")
        raise Unavailable(
            f"this machine has {number}, but the docker engine lacks NVIDIA's runtime, and "
            "has no GPU of the Container Device Interface",
            hint="apt-get install nvidia-container-toolkit, nvidia-ctk runtime configure "
            "--runtime=docker, systemctl restart docker; or --set device=cpu",
        )
    return facts


def _has_nvidia_runtime(info: Mapping[str, Any]) -> bool:
    return "nvidia" in (info.get("Runtimes") or {})


def _has_cdi_gpus(info: Mapping[str, Any]) -> bool:
    """Whether the engine found a GPU in files of `nvidia-ctk cdi generate`; Docker 28.2 says so."""
    found = info.get("DiscoveredDevices") or ()
    return any(str(device.get("ID")).startswith(f"{CDI_KIND}=") for device in found)


def _image(cluster: ComposeCluster, gpus: bool, docker: Docker) -> dict[str, Any]:
    """Return the document of ``docker image inspect``, with the image's ``name`` added."""
    names = [cluster.image] if cluster.image else [GPU_IMAGE] if gpus else [CPU_IMAGE, GPU_IMAGE]
    error = ""
    for name in names:
        done = docker.run("image", "inspect", name)
        if not done.exit_code:
            image: dict[str, Any] = json.loads(done.stdout)[0]
            return image | {"name": name}
        error = error_line(done)
    missing = "no such image" in error.lower()
    raise Unavailable(
        f"image: the docker engine has no {names[0]}" if missing else f"image: {error}",
        hint=f"docker pull {names[0]}, or docker build --tag {names[0]} . ({OWN_IMAGE})"
        if cluster.image
        else f"`image: NAME` in the cluster entry ({OWN_IMAGE}), or in a checkout of clusterkit: "
        "make image",
    )


def _probe_image(
    cluster: ComposeCluster,
    python: str,
    docker: Docker,
    info: Mapping[str, Any],
    image: Mapping[str, Any],
    options: list[str],
) -> HostReport:
    """Return the report of Python in a container; cached by image, engine, options and request.

    Raises:
        Unavailable: no such container can be run, or it cannot write into `home`.
    """
    folder = home()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"CLUSTERKIT_HOME: {folder}: {error.strerror}") from None
    options += ["--device", INFINIBAND, "--cap-add", "IPC_LOCK"] if cluster.infiniband else []
    for name, value in ulimits_of(cluster).items():
        options += ["--ulimit", f"{name}={value}"]
    quoted = str(folder).replace('"', '""')
    options += ["--mount", f'type=bind,"source={quoted}","target={quoted}"']
    key = [image["Id"], info.get("ID"), info.get("ServerVersion"), python, *options]
    request = json.dumps([key, probe_request(str(folder))])
    digest = hashlib.sha256(request.encode()).hexdigest()[:32]
    saved = folder / "cache" / "images" / f"{digest}.json"
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        report = msgspec.json.decode(saved.read_bytes(), type=HostReport)
        if report.writable:
            return report
    container = [
        *docker.command, "run", "--rm", "--interactive", "--pull", "never", *options,
        "--entrypoint", python, str(image["Id"]),
    ]  # fmt: skip
    report = probe_python(
        docker.transport,
        HOST,
        container,
        python=python,
        where=f"image {image['name']}",
        workdir=str(folder),
        seconds=2 * ENGINE_SECONDS,
        refusal=lambda done: _refusal(cluster, python, str(image["name"]), folder, done),
    )
    if not report.writable:
        user = options[options.index("--user") + 1]
        raise Unavailable(
            f"containers cannot write into {folder} as user {user}",
            hint="set CLUSTERKIT_HOME to a folder of your own, on a disk of this machine",
        )
    write_atomic(saved, msgspec.json.encode(report))
    return report


def _refusal(
    cluster: ComposeCluster, python: str, image: str, folder: Path, done: Completed
) -> ClusterkitError:
    """Return the error for a container that could not be run, with its remedy."""
    last = error_line(done)
    errors = (
        (
            f'custom device "{INFINIBAND}"',
            f"infiniband: this machine has no {INFINIBAND}",
            "modprobe ib_uverbs (package rdma-core does so), or leave out `infiniband`",
        ),
        (
            "rlimit",
            f"ulimits: the docker engine may not set {ulimits_of(cluster)}: {last}",
            "give the engine that limit itself (LimitMEMLOCK=infinity in docker.service), or "
            "set another in `ulimits`",
        ),
        (
            "could not select device driver|nvidia-container",
            f"the docker engine cannot give GPUs to containers: {last}",
            "nvidia-ctk runtime configure --runtime=docker, systemctl restart docker; or "
            "--set device=cpu",
        ),
        (
            "executable file not found|no such file or directory",
            f"python: image {image} has no {python}",
            NAMES_PYTHON,
        ),
        (
            "bind source path does not exist",
            f"the docker engine does not see this machine's {folder}",
            "share that folder with the engine's own machine, or set CLUSTERKIT_HOME",
        ),
        (
            "exec format error",
            f"exec format error: image {image} was built for another CPU architecture",
            "build it on this machine or with docker build --platform",
        ),
        (
            "",
            f"image: no container of {image} could be run: {last}",
            f"docker run --rm --entrypoint {python} {image} --version",
        ),
    )
    return next(
        Unavailable(message, hint)
        for pattern, message, hint in errors
        if re.search(pattern, done.stderr)
    )


def _check_subnet(cluster: ComposeCluster, docker: Docker) -> None:
    """Raise BadInput if the subnet overlaps one that this machine uses."""
    if cluster.subnet == "auto":
        return
    wanted = ipaddress.IPv4Network(cluster.subnet)
    ids = docker.run("network", "ls", "--format", "{{.ID}}").stdout.split()
    format_ = "{{.Name}}{{range .IPAM.Config}} {{.Subnet}}{{end}}"
    listed = docker.run("network", "inspect", *ids, "--format", format_).stdout
    taken = [
        (subnet, f"docker's network {name}")
        for name, *subnets in map(str.split, listed.splitlines())
        for subnet in subnets
    ]
    with contextlib.suppress(FileNotFoundError):
        taken += _routes(Path("/proc/net/route").read_text())
    for subnet, owner in taken:
        network = ipaddress.ip_network(subnet, strict=False)
        if isinstance(network, ipaddress.IPv4Network) and network.overlaps(wanted):
            raise BadInput(
                f"subnet: {wanted} is taken: {owner} has {subnet}",
                hint="subnet: auto, or one that is not in `ip route`",
                cluster="subnet",
            )


def _routes(table: str) -> list[tuple[str, str]]:
    """Return the networks in the text of ``/proc/net/route``, each with its interface."""
    routes = []
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 8 or fields[7] == "00000000":
            continue
        address, mask = (int.from_bytes(bytes.fromhex(fields[n]), "little") for n in (1, 7))
        network = ipaddress.IPv4Network((address, mask.bit_count()), strict=False)
        routes.append((str(network), f"interface {fields[0]}"))
    return routes


def _check_volumes(cluster: ComposeCluster, docker: Docker) -> None:
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
        if docker.run("volume", "inspect", source).exit_code:
            raise BadInput(
                f"volumes: docker has no volume {source}",
                hint=f"docker volume create {source}; a folder is written /{source} or ./{source}",
                cluster="volumes",
            )
