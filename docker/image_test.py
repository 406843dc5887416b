"""The image's own checks: `make image-test`, or

    docker run --rm -i IMAGE python - [--slow | --light | --home] [--cuda] < docker/image_test.py

They run inside the image, as whoever the container runs as. Each prints one line; the exit code is
the number of those that failed.
"""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import importlib.metadata
import json
import os
import pwd
import re
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HOME = Path(os.environ["HOME"])
CODE = Path("/opt/clusterkit")
PORT = 2222

ALL_REDUCE = r"""
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
import os, sys
sys.stdout.write(f"sum {total.item()}\n")  # in one piece: the other rank writes too
dist.barrier()
os._exit(0)
"""
COMPILED = """
import torch
def function(x):
    return torch.sin(x) * 2 + 1
x = torch.linspace(0, 1, 64)
print("difference", (torch.compile(function)(x) - function(x)).abs().max().item())
"""
CPU_ADAM = """
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
ours = torch.nn.Parameter(torch.linspace(-1, 1, 1000))
theirs = torch.nn.Parameter(ours.detach().clone())
options = dict(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
pairs = [(ours, DeepSpeedCPUAdam([ours], **options)),
         (theirs, torch.optim.AdamW([theirs], **options))]
for step in range(3):
    for parameter, optimizer in pairs:
        parameter.grad = torch.cos(parameter.detach() * (step + 1))
        optimizer.step()
print("difference", (ours - theirs).abs().max().item())
"""
FUSED_ADAM = """
import torch
from deepspeed.ops.op_builder import FusedAdamBuilder
torch.cuda.is_available = lambda: True  # else it is built without its CUDA half
print("functions", [name for name in dir(FusedAdamBuilder().load(verbose=False)) if "adam" in name])
"""


def run(*words: str, timeout: float = 1800, **environment: str) -> str:
    """What a command prints on stdout.

    Raises:
        AssertionError: it failed; with the end of what it said.
    """
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=timeout, env=os.environ | environment
    )
    said = (done.stdout + done.stderr).strip()
    assert done.returncode == 0, (
        f"{words[0]} exits {done.returncode}: {said[:800]} ... {said[-800:]}"
    )
    return done.stdout


def versions_are_those_of_constraints() -> str:
    """Every package that constraints.txt pins and that is here."""
    pinned = dict(
        line.split("==")
        for line in (CODE / "constraints.txt").read_text("utf-8").split("\n")
        if "==" in line and not line.startswith("#")
    )
    pinned = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pinned.items()}
    checked = 0
    for package in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", package.metadata["Name"]).lower()
        if name in pinned:
            assert package.version.partition("+")[0] == pinned[name], (
                f"{name} is {package.version}, constraints.txt says {pinned[name]}"
            )
            checked += 1
    for name in ("torch", "deepspeed", "transformers", "msgspec"):
        assert name in pinned
        importlib.metadata.version(name)
    return f"{checked} packages"


def imports() -> str:
    names = ("torch", "deepspeed", "transformers", "clusterkit.api", "clusterkit.runtime")
    text = "; ".join(f"import {name}" for name in names)
    run(sys.executable, "-W", "error::SyntaxWarning", "-c", text)
    return ", ".join(names)


def home_and_user() -> str:
    """What torch's compiler and DeepSpeed ask for, also as a user that the image does not know."""
    (HOME / ".cache").mkdir(exist_ok=True)
    with tempfile.TemporaryFile(dir=HOME):
        pass
    for folder in (Path("/home/clusterkit"), *Path("/etc/clusterkit").rglob("*")):
        assert not folder.stat().st_mode & stat.S_IWOTH, f"anyone may write to {folder}"
    assert os.getuid() == 0 or not os.access("/etc/clusterkit", os.W_OK), "a user may add keys"
    if 0 in (os.getgid(), *os.getgroups()):
        assert Path("/home/clusterkit") == HOME, f"group 0 has {HOME} for a home"
    return f"uid {os.getuid()}, {getpass.getuser()}, {HOME}"


def all_reduce() -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".py") as program:
        program.write(ALL_REDUCE)
        program.flush()
        words = ("torchrun", "--standalone", "--nproc-per-node", "2", program.name)
        out = run(*words, OMP_NUM_THREADS="1")
    assert out.split("\n").count("sum 3.0") == 2, out
    return "2 ranks, gloo"


def trains() -> str:
    """Two steps of the program that is baked in, with ZeRO-3."""
    words = (
        "torchrun",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(CODE / "jobs/train/gpt/train.py"),
    )
    more = ("--strategy", "deepspeed", "--steps", "2", "--eval-every", "0")
    with tempfile.NamedTemporaryFile("w", suffix=".json") as config:
        config.write(json.dumps({"zero_optimization": {"stage": 3}, "gradient_clipping": 1.0}))
        config.flush()
        out = run(*words, *more, "--deepspeed-config", config.name, OMP_NUM_THREADS="1")
    assert '"event": "end", "steps": 2' in out, out[-1500:]
    return "2 steps of jobs/train/gpt/train.py"


def mpirun() -> str:
    # In one write: the ranks share a pipe, and print makes several when it is not buffered.
    text = "import os; os.write(1, b'rank %s\\n' % os.environb[b'OMPI_COMM_WORLD_RANK'])"
    words = ("mpirun", "-np", "2", "--oversubscribe", "--bind-to", "none")
    out = run(*words, sys.executable, "-c", text, OMPI_ALLOW_RUN_AS_ROOT="1",
              OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")  # fmt: skip
    assert sorted(out.split()) == ["0", "1", "rank", "rank"], out
    return "2 ranks"


def ssh_to_itself() -> str:
    """As Kubernetes' MPI jobs do: a plain user, a high port; mounted keys and no others."""
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        return "not as a user without a name: OpenSSH refuses it"
    folder = HOME / ".ssh"
    folder.mkdir(exist_ok=True)
    key = folder / "id_ed25519"
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
    keys = folder / "authorized_keys"
    keys.write_text(key.with_suffix(".pub").read_text())
    with sshd("-o", f"AuthorizedKeysFile={keys}"):
        text = "import sys, torch; print(sys.executable, torch.__version__)"
        out = run("ssh", "localhost", f'python -c "{text}"').split()
        assert out[0] == sys.executable, out
    with sshd():
        done = subprocess.run(["ssh", "localhost", "true"], capture_output=True, text=True)
        assert "Permission denied" in done.stderr, "a key that its user added lets in"
    return f"port {PORT}, {out[0]}; not with a key that its user added"


@contextlib.contextmanager
def sshd(*options: str) -> Iterator[None]:
    """Within, the image's sshd runs as whoever this is."""
    server = subprocess.Popen(["clusterkit-sshd", *options], stderr=subprocess.PIPE, text=True)
    with server:
        assert server.stderr is not None
        try:
            for line in server.stderr:
                if "Server listening" in line:
                    break
            yield
        finally:
            server.terminate()


def health() -> str:
    run("clusterkit-health")
    return "clusterkit-health agrees"


def compiles() -> str:
    """A module for this Python: what every operation that is compiled at first use needs. Where
    torch.compile puts it, and where C++ extensions go."""
    (cache := HOME / ".cache").mkdir(exist_ok=True)
    for place in (tempfile.gettempdir(), cache):
        with tempfile.TemporaryDirectory(dir=place) as folder:
            source, library = Path(folder, "module.cpp"), Path(folder, "module.so")
            source.write_text('#include <Python.h>\nextern "C" int answer() { return 42; }\n')
            include = f"-I{sysconfig.get_path('include')}"
            run("g++", "-shared", "-fPIC", include, str(source), "-o", str(library))
            assert ctypes.CDLL(str(library)).answer() == 42
    return f"g++, Python.h, ninja {run('ninja', '--version').strip()}"


def torch_compile() -> str:
    """It compiles torch's headers first: half a minute of a processor, so only with --slow."""
    difference = float(run(sys.executable, "-c", COMPILED).split("difference")[1])
    assert difference < 1e-5, difference
    return f"differs from eager by {difference:.0e}"


def cpu_adam() -> str:
    """DeepSpeed compiles it at first use: a minute or more, so only with --slow."""
    with tempfile.TemporaryDirectory() as folder:
        words = (sys.executable, "-W", "ignore", "-c", CPU_ADAM)
        out = run(*words, TORCH_EXTENSIONS_DIR=folder, DS_ACCELERATOR="cpu")
    difference = float(out.split("difference")[1])
    assert difference < 1e-5, difference
    return f"compiled; differs from torch's AdamW by {difference:.0e} after 3 steps"


def cuda_toolkit() -> str:
    """torch is a build for CUDA, and nvcc is of that release, where torch looks for it."""
    import torch

    out = run(f"{os.environ['CUDA_HOME']}/bin/nvcc", "--version")
    release = out.partition("release ")[2].partition(",")[0]
    assert release == torch.version.cuda, f"nvcc is of {release}, torch of {torch.version.cuda}"
    return f"torch and nvcc are of CUDA {release}"


def fused_adam() -> str:
    """DeepSpeed's Adam for GPUs compiles and links, for Hopper; no GPU is needed. Minutes."""
    with tempfile.TemporaryDirectory() as folder:
        words = (sys.executable, "-W", "ignore", "-c", FUSED_ADAM)
        more = {"TORCH_CUDA_ARCH_LIST": "9.0", "DS_ACCELERATOR": "cuda"}
        out = run(*words, TORCH_EXTENSIONS_DIR=folder, **more)
        library = next(Path(folder).rglob("fused_adam.so")).read_bytes()
    assert "multi_tensor_adam" in out, out
    assert b"sm_90" in library
    return "compiled for sm_90"


def gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        return f"none seen; torch {torch.__version__}"
    value = torch.ones(8, device="cuda").sum().item()
    assert value == 8
    return (
        f"{torch.cuda.device_count()} of {torch.cuda.get_device_name()}, torch {torch.version.cuda}"
    )


LIGHT: tuple[Callable[[], str], ...] = (
    home_and_user,
    versions_are_those_of_constraints,
    health,
    mpirun,
    ssh_to_itself,
    compiles,
    gpus,
)
ALL = (*LIGHT, imports, all_reduce, trains)


def main() -> int:
    failed = 0
    lists = {
        "--slow": (*ALL, torch_compile, cpu_adam),
        "--light": LIGHT,
        "--home": (home_and_user,),
    }
    kind = next(iter({*sys.argv[1:]} & {*lists}), "")
    checks = lists.get(kind, ALL)
    if "--cuda" in sys.argv and kind != "--home":
        checks += (cuda_toolkit, fused_adam) if kind == "--slow" else (cuda_toolkit,)
    for check in checks:
        began = time.monotonic()
        try:
            result, mark = check(), "ok"
        except Exception as error:
            result, mark = f"{type(error).__name__}: {error}", "FAILED"
            failed += 1
        seconds = time.monotonic() - began
        name = check.__name__.replace("_", " ")
        print(f"{mark:6}  {name:34} {seconds:6.1f} s  {result}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
