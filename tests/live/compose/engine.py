"""A docker engine for tests, and for trying things on a Debian that has none running.

    python -m tests.live.compose.engine up      (make engine; root)
    python -m tests.live.compose.engine down

An engine that answers already is used as it is. Otherwise a dockerd is started that shares nothing
with another: socket, data, containerd and bridge are its own, below one folder, and go with it.
Debian 12 packages no compose plugin that reads today's files; where the client has none, Debian
13's packages are unpacked, not installed, into ~/.cache/clusterkit/engine.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterkit import agent

ROOT = Path(__file__).parents[3]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "clusterkit", "engine").expanduser()
HOLD = ROOT / ".make" / "engine"
"""What `up` made, for `down`."""
SUITE, PLUGIN_SUITE = "bookworm", "trixie"
BASE = f"clusterkit-base:{SUITE}"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
START_SECONDS, STOP_SECONDS = 60.0, 30.0
_children: dict[Path, subprocess.Popen[bytes]] = {}
"""Engines that this process has started, by their folder."""
CHAINS = ("DOCKER", "DOCKER-ISOLATION-STAGE-1", "DOCKER-ISOLATION-STAGE-2", "DOCKER-USER")
_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"))


class NoEngine(Exception):
    """Why there is none and none can be started."""


@dataclass(frozen=True)
class Engine:
    """An engine that answers, and how to reach it."""

    env: Mapping[str, str]
    """Environment for every docker command."""

    def run(
        self, *words: str, check: bool = True, timeout: float = 600, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run ``docker WORDS``; an assertion fails with what it said if it does."""
        done = subprocess.run(
            ["docker", *words],
            env=self.env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check:
            said = (done.stdout + done.stderr)[-3000:]
            assert done.returncode == 0, f"docker {shlex.join(words)}: {said}"
        return done

    def out(self, *words: str) -> str:
        return self.run(*words).stdout.strip()


@contextlib.contextmanager
def engine() -> Iterator[Engine]:
    """The engine that answers, or a private one while the block lasts.

    Raises:
        NoEngine: neither is to be had; the message says why.
    """
    found = running()
    if found is not None:
        yield found
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        # Two engines would take each other's iptables chains away.
        fcntl.flock(lock, fcntl.LOCK_EX)
        _end_left_behind()
        with tempfile.TemporaryDirectory(prefix="clusterkit-engine-") as made:
            private = start(Path(made))
            try:
                yield private
            finally:
                stop(Path(made))


def running() -> Engine | None:
    """The engine of this environment, or the one that `up` made; None if neither answers.

    Its client has the plugins.
    """
    if shutil.which("docker", path=_PATH) is None:
        return None
    env = {**os.environ, "DOCKER_BUILDKIT": "1"}
    for variables in (env, env | {"DOCKER_HOST": f"unix://{HOLD}/docker.sock"}):
        if _answers(variables):
            return Engine(_with_plugins(variables))
    return None


def _answers(env: Mapping[str, str]) -> bool:
    return subprocess.run(["docker", "info"], env=env, capture_output=True).returncode == 0


def start(folder: Path) -> Engine:
    """Start a dockerd that keeps everything in ``folder``.

    Raises:
        NoEngine: not root, not installed, or it does not come up; with its own last words.
    """
    dockerd = shutil.which("dockerd", path=_PATH)
    if os.geteuid() != 0:
        raise NoEngine("no docker engine answers, and starting one needs root")
    if dockerd is None:
        raise NoEngine("no docker engine answers and dockerd is missing: apt-get install docker.io")
    folder.mkdir(parents=True, exist_ok=True)
    bridge, subnet = _make_bridge()
    state: dict[str, Any] = {
        "bridge": bridge,
        "folder": str(folder),
        "had_chains": _has_chains(),
        "forward": _forward_policy(),
    }
    _note(folder, state)
    (folder / "daemon.json").write_text("{}")  # not this machine's /etc/docker/daemon.json
    words = [dockerd, "--bridge", bridge, "--config-file", f"{folder}/daemon.json"]
    words += ["--host", f"unix://{folder}/docker.sock", "--data-root", f"{folder}/data"]
    words += ["--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/docker.pid"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    _children[folder] = process
    state["process"] = agent.identity(process.pid)
    _note(folder, state)
    env = {
        **os.environ,
        "DOCKER_HOST": f"unix://{folder}/docker.sock",
        "DOCKER_BUILDKIT": "1",
    }
    deadline = time.monotonic() + START_SECONDS
    while not _answers(env):
        if process.poll() is not None or time.monotonic() > deadline:
            said = (folder / "log").read_text(errors="replace").strip().splitlines()
            stop(folder)
            raise NoEngine(f"dockerd does not start ({subnet}): {said[-1] if said else 'silent'}")
        time.sleep(0.1)
    try:
        return Engine(_with_plugins(env))
    except BaseException:
        stop(folder)
        raise


def stop(folder: Path) -> None:
    """End the engine that lives in ``folder`` with all it holds; may be repeated."""
    try:
        state = json.loads((folder / "engine.json").read_text())
    except FileNotFoundError:
        return
    recorded = state.get("process")
    if recorded is not None and agent.is_alive(recorded):
        env = {**os.environ, "DOCKER_HOST": f"unix://{folder}/docker.sock"}
        listed = subprocess.run(["docker", "ps", "-aq"], env=env, capture_output=True, text=True)
        if containers := listed.stdout.split():
            words = ["docker", "rm", "--force", "--volumes", *containers]
            subprocess.run(words, env=env, capture_output=True)
        # A network's bridge would stay on this machine.
        words = ["docker", "network", "prune", "--force"]
        subprocess.run(words, env=env, capture_output=True)
        _end(recorded["pid"])
    if (child := _children.pop(folder, None)) is not None:
        child.wait()
    for pid in _processes_in(folder):
        _end(pid)
    for mount in _mounts_below(folder):
        subprocess.run(["umount", "--lazy", mount], capture_output=True)
    subprocess.run(["ip", "link", "delete", state["bridge"]], capture_output=True)
    _remove_rules({state["bridge"]})
    if not state["had_chains"]:
        _remove_rules({*CHAINS})
        _remove_chains(state["forward"])
    for name in ("data", "exec"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "engine.json").unlink()
    with contextlib.suppress(FileNotFoundError):
        _pointer(folder).unlink()


def base_image(engine: Engine) -> str:
    """A minimal Debian, made by debootstrap and imported; stands in for a registry's.

    The file system is kept for a month, for making it takes half a minute.

    Raises:
        NoEngine: it cannot be made here.
    """
    if engine.out("images", "--quiet", BASE):
        return BASE
    CACHE.mkdir(parents=True, exist_ok=True)
    month = datetime.datetime.now(datetime.UTC).strftime("%Y-%m")
    tar = CACHE / f"{SUITE}-{month}.tar"
    with (CACHE / "base-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not tar.exists():
            for old in CACHE.glob(f"{SUITE}-*.tar"):
                old.unlink()
            _debootstrap(tar)
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    changes = ("--change", 'CMD ["bash"]', "--change", f"ENV PATH={path}")
    engine.run("import", *changes, str(tar), BASE)
    return BASE


def _debootstrap(tar: Path) -> None:
    if os.geteuid() != 0 or shutil.which("debootstrap", path=_PATH) is None:
        raise NoEngine("a base image needs root and debootstrap: apt-get install debootstrap")
    with tempfile.TemporaryDirectory(prefix="clusterkit-base-") as name:
        root = Path(name, "root")
        words = ["debootstrap", "--variant=minbase", SUITE, str(root), _mirror()]
        _must(words)
        for folder in ("var/cache/apt/archives", "var/lib/apt/lists"):
            for file in (root / folder).glob("*"):
                if file.is_file():
                    file.unlink()
        for folder in ("doc", "info", "locale", "man"):
            shutil.rmtree(root / "usr/share" / folder)
            (root / "usr/share" / folder).mkdir()
        draft = tar.with_suffix(".draft")
        _must(["tar", "-C", str(root), "--numeric-owner", "-cf", str(draft), "."])
        draft.rename(tar)


def _with_plugins(env: dict[str, str]) -> dict[str, str]:
    """The environment with which `docker compose` and `docker build` work."""
    env = env | {"PATH": _PATH}
    if all(_works(env, plugin) for plugin in ("compose", "buildx")):
        return env
    config = CACHE / "docker-config"
    plugins = config / "cli-plugins"
    with contextlib.ExitStack() as stack:
        CACHE.mkdir(parents=True, exist_ok=True)
        lock = stack.enter_context((CACHE / "plugins-lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (plugins / "docker-compose").exists():
            _unpack_plugins(plugins)
    env["DOCKER_CONFIG"] = str(config)
    for plugin in ("compose", "buildx"):
        if not _works(env, plugin):
            raise NoEngine(f"docker {plugin} does not work with Debian {PLUGIN_SUITE}'s plugin")
    return env


def _works(env: Mapping[str, str], plugin: str) -> bool:
    return (
        subprocess.run(["docker", plugin, "version"], env=env, capture_output=True).returncode == 0
    )


def _unpack_plugins(target: Path) -> None:
    """Fetch the two packages with apt, which checks their signatures, and take the programs out."""
    if shutil.which("apt-get") is None:
        raise NoEngine("docker has no compose plugin, and this is no Debian to get it from")
    with tempfile.TemporaryDirectory(prefix="clusterkit-plugins-") as name:
        folder = Path(name)
        for part in ("lists/partial", "cache/archives/partial"):
            (folder / part).mkdir(parents=True)
        sources = folder / "sources.list"
        sources.write_text(f"deb [signed-by={KEYRING}] {_mirror()} {PLUGIN_SUITE} main\n")
        options = [
            f"Dir::Etc::SourceList={sources}",
            "Dir::Etc::SourceParts=/dev/null",
            f"Dir::State::Lists={folder}/lists",
            f"Dir::Cache={folder}/cache",
            "APT::Sandbox::User=root",
            "Acquire::Languages=none",
            "APT::Update::Error-Mode=any",
        ]
        apt = ["apt-get", "-qq", *(word for option in options for word in ("-o", option))]
        _must([*apt, "update"])
        _must([*apt, "download", "docker-compose", "docker-buildx"], cwd=folder)
        for package in folder.glob("*.deb"):
            _must(["dpkg", "-x", str(package), str(folder / "x")])
        target.mkdir(parents=True, exist_ok=True)
        for plugin in ("docker-buildx", "docker-compose"):
            found = folder / "x/usr/libexec/docker/cli-plugins" / plugin
            shutil.copy2(found, target / f".{plugin}")
            (target / f".{plugin}").rename(target / plugin)


def _mirror() -> str:
    """Where this Debian gets its packages from."""
    for file in (Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list")):
        with contextlib.suppress(FileNotFoundError):
            for word in file.read_text().split():
                if word.startswith("http") and word.rstrip("/").endswith("/debian"):
                    return word
    return "http://deb.debian.org/debian"


def _must(words: list[str], cwd: Path | None = None) -> None:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, env=_quiet())
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise NoEngine(f"{shlex.join(words[:3])} ...: {lines[-1] if lines else done.returncode}")


def _quiet() -> dict[str, str]:
    return {**os.environ, "PATH": _PATH, "DEBIAN_FRONTEND": "noninteractive"}


def _make_bridge() -> tuple[str, str]:
    """A bridge of the engine's own, on a network that no route knows.

    With --bridge=none a dockerd removes docker0, which may be another's.
    """
    routes = subprocess.run(["ip", "route"], capture_output=True, text=True).stdout
    number = next(n for n in range(200, 255) if f"10.{n}." not in routes)
    name = f"ckbr{os.getpid() % 100000}"
    address = f"10.{number}.0.1/24"
    for words in (
        ["ip", "link", "add", name, "type", "bridge"],
        ["ip", "address", "add", address, "dev", name],
        ["ip", "link", "set", name, "up"],
    ):
        _must(words)
    return name, address


def _has_chains() -> bool:
    return _iptables("-n", "-L", "DOCKER-USER") == 0


def _forward_policy() -> str:
    words = ["iptables", "-w", "-S", "FORWARD"]
    done = subprocess.run(words, capture_output=True, text=True, env=_quiet())
    return "DROP" if "-P FORWARD DROP" in done.stdout else "ACCEPT"


def _remove_rules(ours: set[str]) -> None:
    """Take away the rules of iptables that name one of these."""
    for table in ("filter", "nat"):
        words = ["iptables", "-w", "-t", table, "-S"]
        rules = subprocess.run(words, capture_output=True, text=True, env=_quiet()).stdout
        for rule in rules.splitlines():
            words = shlex.split(rule)
            if words[0] == "-A" and ours.intersection(words[2:]):
                _iptables("-t", table, "-D", *words[1:])


def _remove_chains(forward: str) -> None:
    """Take away what dockerd leaves in iptables, where none ran before."""
    for table in ("filter", "nat"):
        for action in ("-F", "-X"):
            for chain in CHAINS:
                _iptables("-t", table, action, chain)
    _iptables("-P", "FORWARD", forward)


def _iptables(*words: str) -> int:
    command = ["iptables", "-w", *words]
    try:
        return subprocess.run(command, capture_output=True, env=_quiet()).returncode
    except FileNotFoundError:
        return 127


def _end(pid: int) -> None:
    """SIGTERM, then SIGKILL, to one process that was recorded."""
    agent.send([pid], signal.SIGTERM)
    with contextlib.suppress(ChildProcessError):
        _wait_child(pid)
        return
    agent.wait_gone([pid], STOP_SECONDS)
    agent.send([pid], signal.SIGKILL)
    agent.wait_gone([pid], 5)


def _wait_child(pid: int) -> None:
    """Wait for a child of this process, and reap it."""
    deadline = time.monotonic() + STOP_SECONDS
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            agent.send([pid], signal.SIGKILL)
            os.waitpid(pid, 0)
            return
        time.sleep(0.05)


def _processes_in(folder: Path) -> list[int]:
    """containerd and its shims whose recorded ids lie in the engine's folder."""
    found = []
    for file in folder.glob("exec/**/*.pid"):
        with contextlib.suppress(OSError, ValueError):
            pid = int(file.read_text())
            if str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def _mounts_below(folder: Path) -> list[str]:
    """Innermost first."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return [mount for mount in reversed(mounts) if mount.startswith(f"{folder}/")]


def _note(folder: Path, state: dict[str, Any]) -> None:
    """Record what would be left behind if this process were killed now."""
    agent.write_json(folder / "engine.json", state)
    _pointer(folder).parent.mkdir(parents=True, exist_ok=True)
    _pointer(folder).write_text(str(folder))


def _pointer(folder: Path) -> Path:
    return CACHE / "started" / folder.name


def _end_left_behind() -> None:
    """End what a killed session left; its lock is free, so nobody uses it."""
    for pointer in (CACHE / "started").glob("clusterkit-engine-*"):
        folder = Path(pointer.read_text())
        stop(folder)
        shutil.rmtree(folder, ignore_errors=True)
        pointer.unlink(missing_ok=True)


def main(arguments: list[str]) -> int:
    if arguments == ["down"]:
        stop(HOLD)
        shutil.rmtree(HOLD, ignore_errors=True)
        return 0
    if arguments != ["up"]:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        found = running() or start(HOLD)
        base = base_image(found)
    except NoEngine as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 3
    print(f"the engine answers and has {base}; in your shell:", file=sys.stderr)
    for name in ("DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_BUILDKIT"):
        if name in found.env:
            print(f"export {name}={shlex.quote(found.env[name])}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
