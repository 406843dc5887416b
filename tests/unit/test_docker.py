"""The image's files as text: pinned, in step with each other, and bent for nobody."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from clusterkit.backends.kubernetes.flavors import SSH_KEYS

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text("utf-8")


def instructions(name: str) -> list[str]:
    """What follows each instruction of this name, continued lines joined."""
    joined = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE))
    return re.findall(rf"^{name} (.+)$", joined, re.MULTILINE)


def copied() -> set[str]:
    """First parts of the paths that go from the checkout into the image."""
    words = [word for line in instructions("COPY") for word in line.split()[:-1]]
    mounted = re.findall(r"type=bind,source=([^,\s]+)", DOCKERFILE)
    return {word.split("/")[0] for word in (*words, *mounted)}


def test_dockerfile_passes_hadolint() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, DOCKER / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_dockerfile_base_is_argument_and_compiler_matches_torch_cuda() -> None:
    assert instructions("FROM") == ["${BASE_IMAGE}"]
    assert "BASE_IMAGE=python:3.11-slim-bookworm" in instructions("ARG")
    assert "'cuda-toolkit[nvcc,cccl,profiler]'" in DOCKERFILE  # the version is torch's choice
    (environment,) = instructions("ENV")
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility " in environment
    assert "CUDA_HOME=/usr/local/cuda " in environment


def test_dockerfile_installs_libraries_for_deepspeed_and_nccl() -> None:
    (install,) = (line for line in instructions("RUN") if "apt-get install" in line)
    assert {"libaio-dev", "numactl", "ibverbs-providers", "libibverbs1"} <= {*install.split()}


def test_dockerfile_builds_on_old_engines_without_registry() -> None:
    """Docker 20.10 knows neither; a syntax line is fetched from a registry."""
    assert not re.search(r"^# *syntax *=", DOCKERFILE, re.MULTILINE)
    assert "<<" not in DOCKERFILE
    assert "--link" not in DOCKERFILE


def test_image_runs_as_plain_user_under_init() -> None:
    assert instructions("USER") == ["1000:1000"]
    assert instructions("ENTRYPOINT")[0].startswith('["tini", "--",')
    assert len(instructions("HEALTHCHECK")) == 1


def test_only_root_can_add_ssh_key_in_container() -> None:
    """sshd runs without strict modes there: where its keys lie is what keeps others out."""
    settings = dict(
        line.split(maxsplit=1)
        for line in (DOCKER / "sshd_config").read_text("utf-8").splitlines()
        if line and not line.startswith("#")
    )
    assert settings["AuthorizedKeysFile"] == f"{SSH_KEYS}/authorized_keys"
    assert SSH_KEYS.startswith("/etc/clusterkit/")
    client = (DOCKER / "ssh_config").read_text("utf-8")
    assert f"IdentityFile {SSH_KEYS}/id_rsa\n" in client
    open_to_all = re.findall(r"(?:chmod|-m) 0?7?77[67]\S* (\S+)", DOCKERFILE)
    assert open_to_all == ["/checkpoints"]
    assert "chown 1000:0 /home/clusterkit" in DOCKERFILE
    assert "chmod 0770 /home/clusterkit" in DOCKERFILE


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh: apt-get install openssh-client")
def test_image_ssh_config_leaves_other_hosts_alone() -> None:
    def port(host: str) -> str:
        argv = ["ssh", "-G", "-F", str(DOCKER / "ssh_config"), host]
        said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
        settings = dict(line.split(" ", 1) for line in said.splitlines())
        strict = settings["stricthostkeychecking"]
        assert (settings["port"] == "2222") == (strict in ("no", "false")), said
        return settings["port"]

    pods = ("zero3-worker-0", "zero3-worker-11.zero3.default.svc", "zero3-launcher.zero3.ns.svc")
    assert {port(host) for host in (*pods, "node0", "node15", "localhost")} == {"2222"}
    assert {port(host) for host in ("github.com", "git", "gitea.tools.svc", "10.0.0.7")} == {"22"}


def test_dockerfile_orders_layers_by_change_frequency() -> None:
    order = [DOCKERFILE.index(text) for text in (
        "apt-get install", "--requirement /tmp/requirements.txt", "COPY clusterkit clusterkit",
        "COPY jobs jobs", "ARG REVISION",
    )]  # fmt: skip
    assert order == sorted(order)


@pytest.mark.parametrize(
    "label", ["title", "description", "licenses", "source", "version", "revision"]
)
def test_dockerfile_sets_image_labels(label: str) -> None:
    assert f"org.opencontainers.image.{label}=" in DOCKERFILE


def test_dockerignore_admits_exactly_what_dockerfile_copies() -> None:
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == copied()
    assert "**/__pycache__" in rules


def test_requirements_layer_installs_what_train_extra_needs() -> None:
    words = [sys.executable, DOCKER / "requirements.py", "train"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found = {re.split(r"[<>=~!\[; ]", line)[0].lower() for line in done.stdout.split("\n") if line}
    expected = {"setuptools"}  # builds clusterkit itself
    pending = ["train", "plot", "s3"]
    for line in metadata.requires("clusterkit") or []:
        name = re.split(r"[<>=~!\[; ]", line)[0].lower()
        extra = re.search(r"extra == ['\"](\w+)['\"]", line)
        if name != "clusterkit" and (extra is None or extra[1] in pending):
            expected.add(name)
    assert found == expected
    text = (ROOT / "constraints.txt").read_text("utf-8").lower()
    pinned = {line.split("==")[0] for line in text.splitlines()}
    assert found - pinned == {"setuptools"}


def test_ci_override_changes_only_memlock_limit() -> None:
    override = yaml.safe_load((ROOT / "tests/live/compose/ci.yaml").read_text("utf-8"))
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text("utf-8"))["services"]
    assert override == {"services": {name: {"ulimits": {"memlock": 8388608}} for name in services}}


def test_compose_nodes_differ_only_in_rank_and_name() -> None:
    nodes = yaml.safe_load((DOCKER / "compose.yaml").read_text("utf-8"))["services"]
    ranks = [node["environment"].pop("PET_NODE_RANK") for node in nodes.values()]
    assert [node.pop("hostname") for node in nodes.values()] == list(nodes)
    assert ranks == ["0", "1"]
    first, second = nodes.values()
    assert second.pop("depends_on") == ["node0"]
    assert first == second
    assert first["environment"]["PET_MASTER_ADDR"] == "node0"
    assert first["environment"]["PET_NNODES"] == str(len(nodes))


@pytest.mark.parametrize("name", ["clusterkit-entry", "clusterkit-health", "clusterkit-sshd"])
def test_image_scripts_are_executable(name: str) -> None:
    assert (DOCKER / "bin" / name).stat().st_mode & 0o111 == 0o111


def test_entry_point_sets_tmp_as_home_when_home_is_missing(tmp_path: Path) -> None:
    entry = ["sh", DOCKER / "bin" / "clusterkit-entry", "sh", "-c", 'printf %s "$HOME"']
    for home, expected in ((tmp_path, str(tmp_path)), (tmp_path / "gone", "/tmp")):
        env = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(entry, env=env, capture_output=True, text=True, check=True)
        assert done.stdout == expected


def test_compose_tmpfs_mounts_allow_exec_for_compiled_code() -> None:
    """From /tmp and the home: a tmpfs is noexec unless it is told otherwise."""
    node = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["node0"]
    assert len(node["tmpfs"]) == 2
    for each in node["tmpfs"]:
        assert "exec" in each.partition(":")[2].split(",")
