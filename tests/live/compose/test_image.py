"""The image from outside: its own checks, rebuilds, health, signals, what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

import clusterkit
from tests.live.compose.engine import Engine
from tests.live.compose.image import ROOT, build

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
INPUTS = ("LICENSE", "README.md", "pyproject.toml", "constraints.txt", ".dockerignore")
FOLDERS = ("clusterkit", "docker", "jobs", "wheelhouse")
WAITS = "import signal; signal.pause()"


def script(name: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """One of docker/'s scripts, as `make` calls it."""
    return subprocess.run(
        [sys.executable, ROOT / "docker" / name, *words],
        env=environment or None,
        capture_output=True,
        text=True,
    )


@pytest.mark.thorough
@pytest.mark.parametrize("options", [["--quick"], []], ids=["quick", "all"])
def test_image_checks_pass_as_image_user_and_as_unknown_uid(
    engine: Engine, image: str, options: list[str]
) -> None:
    done = script("check.py", *options, image, **engine.env)
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert sum(line.startswith("ok ") for line in lines) == len(lines) - 3 >= 18
    assert "uid 1000" in done.stdout
    assert "uid 4242, clusterkit, /tmp" in done.stdout
    assert "uid 4242, clusterkit, /home/clusterkit" in done.stdout


def test_image_has_labels_user_entrypoint_and_healthcheck(engine: Engine, image: str) -> None:
    config = json.loads(engine.out("image", "inspect", "--format", "{{json .Config}}", image))
    label = {key.rpartition(".")[2]: value for key, value in config["Labels"].items()}
    assert label["title"] == "clusterkit"
    assert label["version"] == clusterkit.__version__
    assert re.match(r"[0-9a-f]{40}(-dirty)?$|unknown$", label["revision"])
    assert config["User"] == "1000:1000"
    assert config["Entrypoint"][0] == "tini"
    assert config["Healthcheck"]["Test"] == ["CMD", "clusterkit-health"]


@pytest.mark.parametrize(
    ("edited", "layers"),
    [
        ("jobs/train/gpt/train.py", ["COPY jobs jobs"]),
        ("clusterkit/errors.py", [
            "COPY clusterkit clusterkit", "RUN python -m compileall -q -j 0 clusterkit",
            "COPY jobs jobs",
        ]),
    ],
)  # fmt: skip
def test_image_rebuild_after_source_change_builds_only_last_layers(
    engine: Engine, base: str, image: str, tmp_path: Path, edited: str, layers: list[str]
) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in INPUTS:
        shutil.copy(ROOT / name, checkout / name)
    for name in FOLDERS:
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, checkout / name, copy_function=os.link, ignore=skip)
    tag = "clusterkit:edited"
    try:
        build(engine, base, checkout, tag)
        program = checkout / edited
        text = program.read_text()
        program.unlink()  # it is a link to the checkout's own
        edit = f"# {uuid.uuid4()}"  # the engine remembers the layers of an earlier run
        program.write_text(f"{text}{edit}\n")
        said = build(engine, base, checkout, tag)
        steps = dict(re.findall(r"^#(\d+) \[stage-0 +\d+/\d+\] (.+)$", said, re.MULTILINE))
        cached = set(re.findall(r"^#(\d+) CACHED$", said, re.MULTILINE))
        built = [
            words
            for number, words in steps.items()
            if number not in cached and not words.startswith("FROM ")
        ]
        assert built == layers
        assert len(steps) > 8
        shown = engine.out("run", "--rm", tag, "pip", "show", "clusterkit")
        assert f"Version: {clusterkit.__version__}\n" in shown
        anywhere = ("run", "--rm", "--workdir", "/tmp", tag)
        assert clusterkit.__version__ in engine.out(*anywhere, "clusterkit", "--version")
        assert "ddp" in engine.out(*anywhere, "clusterkit", "plan", "/opt/clusterkit/jobs/ddp.yaml")
        last = engine.out("run", "--rm", tag, "tail", "-1", edited)
        assert last == edit
    finally:
        engine.run("image", "rm", "--force", tag)


def test_health_check_fails_when_container_command_is_stopped(engine: Engine, image: str) -> None:
    name = engine.out("run", "--detach", image, "python", "-c", WAITS)
    try:
        assert engine.run("exec", name, "clusterkit-health").returncode == 0
        child = engine.out("exec", name, "cat", "/proc/1/task/1/children").split()[0]
        engine.run("exec", name, "sh", "-c", f"kill -STOP {child}")
        done = engine.run("exec", name, "clusterkit-health", check=False)
        assert done.returncode == 1
        assert "stopped" in done.stdout
    finally:
        engine.run("rm", "--force", name)


def test_health_check_of_sshd_passes_once_port_listens(engine: Engine, image: str) -> None:
    name = engine.out("run", "--detach", "-e", "CLUSTERKIT_SSH_PORT=2345", image, "clusterkit-sshd")
    try:
        listening = "for n in $(seq 200); do clusterkit-health && exit; sleep 0.05; done; exit 1"
        engine.run("exec", name, "sh", "-c", listening)
        engine.run("exec", name, "grep", "--quiet", f":{2345:04X} ", "/proc/net/tcp")
    finally:
        engine.run("rm", "--force", name)


def test_sshd_accepts_mounted_keys_for_non_root_user(
    engine: Engine, image: str, tmp_path: Path
) -> None:
    """The keys lie where Kubernetes mounts them, root's and with other modes than sshd likes."""
    keys = tmp_path / "ssh"
    keys.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-N", "", "-f", keys / "id_rsa"], check=True)
    shutil.copy(keys / "id_rsa.pub", keys / "authorized_keys")
    (keys / "id_rsa").chmod(0o644)
    keys.chmod(0o1777)
    name = engine.out("create", image, "clusterkit-sshd")
    try:
        engine.run("cp", str(keys), f"{name}:/etc/clusterkit/ssh")
        engine.run("start", name)
        listening = "for n in $(seq 200); do clusterkit-health && exit; sleep 0.05; done; exit 1"
        engine.run("exec", name, "sh", "-c", listening)
        assert engine.out("exec", name, "ssh", "localhost", "id", "-u") == "1000"
    finally:
        engine.run("rm", "--force", name)


def test_docker_stop_sends_sigterm_to_container_command(engine: Engine, image: str) -> None:
    name = engine.out("run", "--detach", image, "python", "-c", WAITS)
    try:
        engine.run("stop", "--time", "30", name)
        code = engine.out("inspect", "--format", "{{.State.ExitCode}}", name)
        assert code == "143"  # SIGTERM; 137 would be the SIGKILL of an engine that gave up
    finally:
        engine.run("rm", "--force", name)


def test_new_checkpoints_volume_is_writable_by_any_user(engine: Engine, image: str) -> None:
    volume = engine.out("volume", "create")
    mount = f"{volume}:/checkpoints"
    try:
        for user in ("1000:1000", "4242:4242"):
            command = ("sh", "-c", "echo x >/checkpoints/$(id -u)")
            engine.run("run", "--rm", "--user", user, "--volume", mount, image, *command)
    finally:
        engine.run("volume", "rm", volume)


@pytest.mark.parametrize(
    ("words", "environment", "message", "hint"),
    [
        ((), {"DOCKER_HOST": "unix:///nowhere.sock"}, "no docker engine answers", "make engine"),
        ((), {"PATH": "/nowhere"}, "docker is not installed", "docs.docker.com"),
        (
            ("--base", "nowhere.invalid/base:1", "--tag", "clusterkit:never"),
            {},
            "the base image nowhere.invalid/base:1 is not found locally",
            "BASE=",
        ),
    ],
    ids=["no engine", "no client", "no base image"],
)
def test_build_script_names_missing_docker_or_base_image_with_hint(
    engine: Engine, words: tuple[str, ...], environment: dict[str, str], message: str, hint: str
) -> None:
    done = script("build.py", *words, **{**engine.env, **environment})
    assert done.returncode == 3
    error, remedy = done.stderr.splitlines()[-2:]
    assert error.startswith(f"error: {message}")
    assert remedy.startswith("hint: ")
    assert hint in remedy
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_engine_check_reports_missing_permission_for_docker_socket(engine: Engine) -> None:
    words = ["setpriv", "--reuid", "4242", "--regid", "4242", "--clear-groups"]
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    first = "from __future__ import annotations\n"
    program = (ROOT / "docker" / "common.py").read_text().replace(first, "")
    program = f"{first}__file__ = '/x/y/z'\n{program}"
    program += "\nsys.exit(told(lambda: require_engine() or 0))\n"
    env = {**engine.env, "DOCKER_CONFIG": "/nowhere", "HOME": "/"}
    done = subprocess.run(
        [*words, python or "python3", "-c", program],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3, done.stderr
    assert done.stderr.splitlines()[0] == "error: you may not use the docker engine's socket"
