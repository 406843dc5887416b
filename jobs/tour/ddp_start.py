"""Two older ways to start the ranks of jobs/train/ddp.py, for scripts that use them.

    clusterkit submit jobs/tour/ddp-spawn.yaml        # torch.multiprocessing.spawn
    clusterkit submit jobs/tour/ddp-launch.yaml       # python -m torch.distributed.launch
    python jobs/tour/ddp_start.py spawn --ranks 2 -- --epochs 1

Both start all ranks of a node from one process. clusterkit starts one process per rank: the first
of each node does it, the others leave at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import runpy
import socket
import sys
from pathlib import Path

import torch
import torch.multiprocessing as mp

PROGRAM = Path(__file__).parents[1] / "train" / "ddp.py"


def main() -> int:
    args = parse_args()
    # Started by a launcher: as many ranks as it would start. By hand: one per GPU, or two.
    by_hand = torch.cuda.device_count() or 2
    here = int(os.environ.get("LOCAL_WORLD_SIZE", by_hand))
    nodes = int(os.environ.get("WORLD_SIZE", here)) // here
    node_rank = int(os.environ.get("NODE_RANK", "0"))
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return 0
    if "MASTER_PORT" not in os.environ:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if args.way == "launch":
        launch(args.ranks or here, nodes, node_rank, args.rest)
    return spawn(args.ranks or here, nodes, node_rank, args.rest)


def spawn(count: int, nodes: int, node_rank: int, rest: list[str]) -> int:
    """Start the ranks as children of this process and wait. Returns the exit code."""
    os.environ |= {
        "NODE_RANK": str(node_rank),
        "WORLD_SIZE": str(nodes * count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    # A rank that fails says why; that its neighbours are ended after it is no news.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    try:
        mp.spawn(child, (rest,), nprocs=count)
    except mp.ProcessExitedException as ended:
        # The child has said what was wrong; one that a signal killed has a negative code.
        return 128 - ended.exit_code if ended.exit_code < 0 else ended.exit_code
    return 0


def child(local_rank: int, rest: list[str]) -> None:
    """Be one rank: a new process that has the parent's environment and nothing else of it."""
    rank = int(os.environ["NODE_RANK"]) * int(os.environ["LOCAL_WORLD_SIZE"]) + local_rank
    os.environ |= {"LOCAL_RANK": str(local_rank), "RANK": str(rank)}
    sys.argv = [str(PROGRAM), *rest]
    runpy.run_path(str(PROGRAM), run_name="__main__")


def launch(count: int, nodes: int, node_rank: int, rest: list[str]) -> None:
    """Become the launcher that torchrun replaced."""
    words = [sys.executable, "-u", "-m", "torch.distributed.launch"]
    words += [f"--nnodes={nodes}", f"--node-rank={node_rank}", f"--nproc-per-node={count}"]
    words += [f"--master-addr={os.environ['MASTER_ADDR']}"]
    words += [f"--master-port={os.environ['MASTER_PORT']}"]
    if folder := os.environ.get("CLUSTERKIT_NODE_DIR"):
        words += [f"--log-dir={folder}/torchrun"]  # else its folder stays in /tmp
    os.execv(sys.executable, [*words, str(PROGRAM), *rest])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nOther arguments, and all after --, go to ddp.py.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("way", choices=["spawn", "launch"])
    parser.add_argument("--ranks", type=int, metavar="N", help="on this node")
    args, args.rest = parser.parse_known_args()
    if args.rest[:1] == ["--"]:
        del args.rest[0]
    return args


if __name__ == "__main__":
    sys.exit(main())
