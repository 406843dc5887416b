"""The agent's command line.

python -I agent.pyz run --nproc 2 --workdir DIR -- torchrun ...
python -I agent.pyz stop RUN_DIR
python -I agent.pyz report NODE_DIR
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Do what the arguments say; the exit code."""
    parser = argparse.ArgumentParser(
        prog="agent.pyz", description="Start one node's launcher, keep its log, end all of it."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="run this node's launcher to its end")
    run.add_argument("--nproc", type=int, required=True, help="ranks that get a log of their own")
    run.add_argument("--workdir", required=True, help="folder the ranks start in")
    run.add_argument("--grace", type=float, default=10.0, help="seconds from TERM to KILL")
    run.add_argument("--spawn", action="store_true", help="start the command once per rank")
    run.add_argument("--fork", type=int, default=0, metavar="N",
                     help="fork the ranks: N words are Python and its options")  # fmt: skip
    run.add_argument("--warm", type=float, default=0.0, metavar="SECONDS",
                     help="of a server that stays so long after its last run")  # fmt: skip
    run.add_argument("--tagged", action="store_true", help="the launcher tags lines with ranks")
    run.add_argument("--coordinator", metavar="ADDRESS:PORT", help="where node 0 watches the rest")
    run.add_argument("--nodes", type=int, default=1, help="how many agents the run has")
    run.add_argument("--lost-after", type=float, default=30.0, help="seconds without a sign")
    run.add_argument("--rejoin", type=float, default=0.0, help="seconds to wait for lost nodes")
    run.add_argument("--min-nodes", type=int, help="with how many the run may go on")
    run.add_argument("--spares", type=int, default=0, help="how many more agents there are")
    run.add_argument("--restarts", type=int, default=0, help="how often all ranks start again")
    run.add_argument("--hang-timeout", type=float, help="seconds; 0: never; else by the steps")
    run.add_argument(
        "--retry-on",
        type=lambda text: [int(code) for code in text.split(",")],
        default=[],
        metavar="CODES",
        help="only after a rank's exit with one of these",
    )
    run.add_argument("--time-limit", type=float, help="seconds from this node's first start on")
    run.add_argument("--echo", action="store_true", help="print the log's lines as well")
    run.add_argument("--last-words", type=Path, metavar="FILE", help="exit.json goes there, too")
    run.add_argument("argv", nargs="+", help="the command, after --")
    stop = verbs.add_parser("stop", help="end every process of a run on this host")
    stop.add_argument("run_dir")
    stop.add_argument("--grace", type=float, default=10.0, help="seconds from TERM to KILL")
    stop.add_argument("--reason", help="why; the agents write it down")
    report = verbs.add_parser("report", help="write what a node's folder holds")
    report.add_argument("folder", type=Path)
    report.add_argument("--log", type=int, default=0, help="bytes of the log that are known")
    report.add_argument("--ranks", type=int, default=0, help="bytes of ranks.jsonl that are known")
    report.add_argument("--follow", action="store_true", help="until the node has ended")
    options = parser.parse_args(arguments)
    # Each verb imports what it needs: nothing of an archive is kept compiled.
    if options.verb == "run":
        from clusterkit.agent.node import run_node

        return run_node(options)
    if options.verb == "stop":
        from clusterkit.agent import processes

        print(json.dumps(processes.stop(options.run_dir, options.grace)))
        return 0
    from clusterkit.agent.report import report as write_report

    with contextlib.suppress(BrokenPipeError):
        write_report(
            options.folder, sys.stdout.buffer, log=options.log, ranks=options.ranks,
            follow=options.follow,
        )  # fmt: skip
    # Whoever listened may be gone: nothing is left to flush.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
