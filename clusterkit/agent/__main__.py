"""The agent's command line.

python -I agent.pyz run --nproc 2 --workdir DIR -- torchrun ...
python -I agent.pyz stop RUN_DIR
python -I agent.pyz report NODE_DIR
python -I agent.pyz inside
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="agent.pyz", description="Start one node's launcher, keep its log, end all of it."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="run this node's launcher to its end")
    add = run.add_argument
    add("--nproc", type=int, required=True, help="ranks that get a log of their own")
    add("--workdir", required=True, help="folder the ranks start in")
    add("--grace", type=float, default=10.0, help="seconds from TERM to KILL")
    add("--spawn", action="store_true", help="start the command once per rank")
    add("--fork", type=int, default=0, metavar="N",
        help="fork the ranks: N words of the command are Python and its options")  # fmt: skip
    add("--preload", type=lambda text: text.split(",") if text else [], metavar="NAMES",
        help="with --fork: what to preload")  # fmt: skip
    add("--bind", choices=("auto", "none"), default="auto",
        help="with --fork: whether ranks are bound to the NUMA nodes of their GPUs")  # fmt: skip
    add("--tagged", action="store_true", help="the launcher tags lines with ranks")
    add("--nodes", type=int, default=1, help="how many nodes the run has")
    add("--lost-after", type=float, default=30.0, help="seconds of silence of a lost node")
    add("--rejoin", type=float, default=0.0, help="seconds to wait for lost nodes")
    add("--min-nodes", type=int, help="with how many nodes the run may continue")
    add("--spares", type=int, default=0, help="how many spare nodes there are")
    add("--restarts", type=int, default=0, help="how often all ranks are started again")
    add("--hang-timeout", type=float, help="seconds; 0: never; by default by torch's own timeout")
    add("--retry-on", default=[], metavar="CODES", help="exit codes of ranks that are retried",
        type=lambda text: [int(code) for code in text.split(",")])  # fmt: skip
    add("--time-limit", type=float, help="seconds from this node's first start on")
    add("--echo", action="store_true", help="print the log's lines as well")
    add("--last-words", type=Path, metavar="FILE", help="write exit.json there as well")
    add("argv", nargs="+", help="the command, after --")
    stop = verbs.add_parser("stop", help="end every process of a run on this host")
    stop.add_argument("run_dir")
    stop.add_argument("--grace", type=float, default=10.0, help="seconds from TERM to KILL")
    stop.add_argument("--reason", help="why; the agents record it")
    verbs.add_parser("inside", help="run a command beside the ranks; standard input says which")
    report = verbs.add_parser("report", help="write what a node's folder holds")
    report.add_argument("folder", type=Path)
    report.add_argument("--log", type=int, default=0, help="bytes of the log that are known")
    report.add_argument("--ranks", type=int, default=0, help="bytes of ranks.jsonl that are known")
    report.add_argument("--follow", action="store_true", help="until the node has ended")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the agent's command line; return the exit code."""
    options = _parse(arguments)
    # Each verb imports what it needs: nothing of an archive is kept compiled.
    if options.verb == "run":
        from clusterkit.agent.start import run_node

        return run_node(options)
    if options.verb == "stop":
        from clusterkit.agent import ending

        print(json.dumps(ended := ending.stop(options.run_dir, options.grace)))
        print("\n".join(ended["left"]), end="", file=sys.stderr)
        return 1 if ended["left"] else 0
    if options.verb == "inside":
        from clusterkit.agent.inside import inside

        return inside()
    from clusterkit.agent.report import report as write_report

    with contextlib.suppress(BrokenPipeError):
        write_report(
            options.folder, sys.stdout.buffer, log=options.log, ranks=options.ranks,
            follow=options.follow,
        )  # fmt: skip
    # The reader may be gone: flush nothing.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
