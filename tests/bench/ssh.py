"""``python -m tests.bench.ssh``: hosts over SSH, against the tools that people use for them.

Hosts are the lab's (`tests.lab`): their sshds share this machine's cores, so that all sides pay
for both ends. Whole processes are timed, start of Python included.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from clusterkit import api
from clusterkit.cli.common import table
from clusterkit.errors import pluralize
from clusterkit.lifecycle.launch import send_trees
from clusterkit.run.find import find_run
from clusterkit.run.folder import StepRecord, Submission
from tests.bench.__main__ import BIN, SECONDS, Program, Row, compare
from tests.lab import Lab, machine

FILES, MEGABYTES = 2000, 50
ROOT = Path(__file__).parents[2]

OURS = """
import sys, json
from clusterkit.backends.ssh import inventory
from clusterkit.backends.ssh.transport import SshTransport
from clusterkit.transport import fan_out, in_order
from pathlib import Path
hosts = inventory.read_hosts(Path(sys.argv[1]), "nodes")
transport = SshTransport(hosts)
in_order(fan_out([host.name for host in hosts], lambda name: transport.run(name, ["true"])))
import os; os._exit(0)
"""
PSSH = """
import sys
from pssh.clients import ParallelSSHClient
hosts = sys.argv[2].split(",")
client = ParallelSSHClient(hosts, user="root", pkey=sys.argv[1], pool_size=len(hosts))
for output in client.run_command("true"): list(output.stdout)
client.join()
"""


def seconds(argv: Sequence[str], env: dict[str, str] | None = None) -> float:
    begun = time.perf_counter()
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=SECONDS, env={**os.environ, **(env or {})}
    )
    if done.returncode:
        raise RuntimeError(f"{argv}: {done.stderr[-2000:]}")
    return time.perf_counter() - begun


def peers(lab: Lab) -> dict[str, Callable[[], float]]:
    """What is installed here of the tools that run one command on many hosts."""
    names = [host.name for host in lab.hosts]
    addresses = ",".join(host.address for host in lab.hosts)
    many = str(len(names))
    config = str(lab.ssh_config)
    parallel = f"for h in {' '.join(names)}; do ssh -F {config} $h true & done; wait"
    found: dict[str, Callable[[], float]] = {
        "OpenSSH, all at once": lambda: seconds(["sh", "-c", parallel])
    }
    if shutil.which("pdsh"):
        found["pdsh"] = lambda: seconds(
            ["pdsh", "-R", "ssh", "-f", many, "-w", ",".join(names), "true"],
            {"PDSH_SSH_ARGS_APPEND": f"-F {config}"},
        )
    if shutil.which("clush"):
        found["clustershell"] = lambda: seconds(
            ["clush", "-f", many, "-o", f"-F {config}", "-w", ",".join(names), "true"]
        )
    try:
        import pssh  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        print("parallel-ssh is not installed: left out", file=sys.stderr)
    else:
        found["parallel-ssh"] = lambda: seconds(
            [sys.executable, "-c", PSSH, str(lab.key), addresses]
        )
    found["ansible -m raw"] = lambda: seconds(
        [str(BIN / "ansible"), "-i", str(lab.inventory), "nodes", "-m", "raw", "-a", "true",
         "-f", many]
    )  # fmt: skip
    return found


def fan_out(rounds: int, sizes: Sequence[int]) -> list[Row]:
    rows = []
    for size in sizes:
        with (
            tempfile.TemporaryDirectory(prefix="bench-lab-") as folder,
            Lab(Path(folder, "lab"), size) as lab,
        ):
            ours = lambda lab=lab: seconds([sys.executable, "-c", OURS, str(lab.inventory)])  # noqa: E731
            for name, peer in peers(lab).items():
                slow = name.startswith("ansible")
                rows.append(
                    compare(f"true on {size} hosts / {name}", ours, peer, 2 if slow else rounds)
                )
    return rows


def project(folder: Path) -> None:
    """50 MB in 2,000 files, half of it random, half text."""
    maker = random.Random(0)
    size = MEGABYTES * 1_000_000 // FILES
    words = [str(number) for number in range(1000)]
    for number in range(FILES):
        path = folder / f"package{number % 40}" / f"file{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = " ".join(maker.choices(words, k=size // 4)).encode()[:size]
        path.write_bytes(text if number % 2 else maker.randbytes(size))
    (folder / "train.py").write_text("print('trained')\n")


def sync(rounds: int, sizes: Sequence[int]) -> list[Row]:
    """A project to so many hosts: the first time, and after a change of one file."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-sync-") as place:
        source = Path(place, "project")
        source.mkdir()
        project(source)
        with Lab(Path(place, "lab"), max(sizes)) as lab:
            entry = {"backend": "ssh", "inventory": str(lab.inventory)}
            clusters = Path(place, "clusters.yaml")
            clusters.write_text(json.dumps({"lab": entry}))
            number = 0

            def send(fresh: bool, size: int) -> float:
                nonlocal number
                number += 1
                if fresh:
                    for host in lab.hosts[:size]:
                        lab.ssh(host.name, "rm", "-rf", "/root/clusterkit/projects")
                else:
                    (source / "package0" / "file0").write_text(f"change {number}\n")
                ready = api.prepare(
                    ["python", "train.py"], cluster="lab", clusters_file=clusters, nodes=size,
                    doctor=False,
                )  # fmt: skip
                begun = time.perf_counter()
                send_trees(ready)
                spent = time.perf_counter() - begun
                ready.transport.close()
                return spent

            def rsync(fresh: bool, size: int) -> float:
                nonlocal number
                number += 1
                if fresh:
                    for host in lab.hosts[:size]:
                        lab.ssh(host.name, "rm", "-rf", "/root/rsynced")
                else:
                    (source / "package0" / "file0").write_text(f"change {number}\n")
                names = " ".join(host.name for host in lab.hosts[:size])
                line = (
                    f"for h in {names}; do rsync -a -e 'ssh -F {lab.ssh_config}' "
                    f"{source}/ $h:/root/rsynced & done; wait"
                )
                return seconds(["sh", "-c", line])

            here = os.getcwd()
            os.chdir(source)
            try:
                for size in sizes:
                    hosts = pluralize(size, "host")
                    for fresh, what in (
                        (True, f"50 MB, 2,000 files to {hosts} / rsync -a in parallel"),
                        (False, f"the same after a change of one file, {hosts} / rsync -a"),
                    ):
                        ours = partial(send, fresh, size)
                        rows.append(compare(what, ours, partial(rsync, fresh, size), rounds))
                # As from a laptop: hosts are near to each other, and far from the submitter.
                limit = f"qdisc add dev {lab.name} root tbf rate 100mbit burst 128k latency 100ms"
                machine.call("tc", *limit.split())
                what = f"50 MB to {pluralize(max(sizes), 'host')} / to 1, uplink of 100 Mbit/s"
                all_of, one = partial(send, True, max(sizes)), partial(send, True, 1)
                rows.append(compare(what, all_of, one, rounds))
                return rows
            finally:
                os.chdir(here)


PHASES = (
    "hosts looked at, plan made", "project copied, supervisor up, nodes started", "agents up",
    "ranks' first line", "first step",
)  # fmt: skip


def times_of(run: api.Run, begun: float) -> list[float]:
    """When each of `PHASES` ended, in seconds since ``begun``."""
    folder = find_run(run.id)
    lines = list(run.logs(rank=0))
    nodes = [folder.node_dir(1, node) / "started.json" for node in range(folder.plan().nodes)]
    return [
        ended - begun
        for ended in (
            folder.read_json("run.json", Submission).created_at,
            max(step.at for step in folder.records("steps.jsonl", StepRecord)),
            max(json.loads(path.read_bytes())["at"] for path in nodes),
            lines[0].time,
            next(each.time for each in lines if (each.event or {}).get("event") == "metrics"),
        )
    ]


def phases(measured: Sequence[Sequence[float]]) -> str:
    """The seconds of every phase, medians; the first, uncounted round is left out."""
    ends = [statistics.median(times) for times in zip(*measured[1:], strict=True)]
    return table(
        [
            [name, f"{end - before:.3f}", f"{end:.3f}"]
            for name, before, end in zip(PHASES, [0.0, *ends], ends, strict=False)
        ],
        ("SUBMIT OVER SSH, 2 HOSTS", "SECONDS", "SINCE ENTER"),
    )


def first_step(rounds: int) -> Row:
    """Submit to the first step on 2 hosts, against ssh and torchrun by hand."""
    program = Program("ddp", 3)
    measured: list[list[float]] = []
    with (
        tempfile.TemporaryDirectory(prefix="bench-lab-") as place,
        Lab(Path(place, "lab"), 2) as lab,
    ):
        clusters = Path(place, "clusters.yaml")
        clusters.write_text(
            json.dumps({"lab": {"backend": "ssh", "inventory": str(lab.inventory)}})
        )
        for host in lab.hosts:
            line = f"rsync -a -e 'ssh -F {lab.ssh_config}' {ROOT}/jobs {host.name}:/root/byhand/"
            lab.ssh(host.name, "mkdir", "-p", "/root/byhand")
            seconds(["sh", "-c", line])

        def ours() -> float:
            argv = [str(BIN / "clusterkit"), "submit", "jobs/ddp.yaml", "--cluster", "lab",
                    "--cluster-file", str(clusters), "--nodes", "2",
                    "--set", "threads_per_rank=1", "--set", "checkpoint=",
                    "--set", f"args={json.dumps(program.args)}"]  # fmt: skip
            begun = time.time()
            done = subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS)
            if done.returncode:
                raise RuntimeError(done.stderr)
            run = api.get(done.stdout.strip())
            measured.append(times_of(run, begun))
            run.delete()
            return measured[-1][-1]

        def by_hand() -> float:
            port = 20000 + random.randrange(10000)
            words = " ".join(program.args)
            command = (
                "cd /root/byhand && OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 CLUSTERKIT_DEVICE=cpu "
                f"CLUSTERKIT_GLOBAL_BATCH={program.spec.batch.global_size} GLOO_SOCKET_IFNAME=eth0 "
                f"{BIN}/torchrun --nnodes 2 --nproc-per-node 1 --node-rank %d "
                f"--master-addr {lab.hosts[0].address} --master-port {port} "
                f"jobs/train/gpt/train.py {words}"
            )
            begun = time.time()
            nodes = [
                subprocess.Popen(
                    ["ssh", "-F", str(lab.ssh_config), host.name, command % rank],
                    stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                )
                for rank, host in enumerate(lab.hosts)
            ]  # fmt: skip
            assert nodes[0].stdout is not None
            spent = next(
                time.time() - begun for line in nodes[0].stdout if '"event": "metrics"' in line
            )
            for node in nodes:
                node.communicate(timeout=SECONDS)
            return spent

        row = compare("submit to first step, ddp, 2 hosts / ssh and torchrun by hand",
                      ours, by_hand, rounds)  # fmt: skip
        print(phases(measured), end="\n\n")
        return row


def main() -> int:
    # As Ctrl-C: what was set up is taken down.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(prog="python -m tests.bench.ssh", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds of each comparison")
    parser.add_argument("--hosts", type=int, nargs="+", default=[8, 32, 64], help="for `true`")
    parser.add_argument("--copies", type=int, nargs="+", default=[1, 8, 64], help="for the copy")
    options = parser.parse_args()
    if (problem := machine.problem()) is not None:
        print(f"no lab: {problem.message}; {problem.hint}", file=sys.stderr)
        return 3
    with tempfile.TemporaryDirectory(prefix="bench-home-") as home:
        os.environ["CLUSTERKIT_HOME"] = home
        rows = [first_step(options.rounds), *sync(options.rounds, options.copies)]
        rows += fan_out(options.rounds, options.hosts)
    print(table([row.cells() for row in rows], ("WHAT", "OURS s", "PEER s", "RATIO", "SPREAD")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
