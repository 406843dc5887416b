"""Where the ranks of some nodes are now, for `clusterkit stack`: the records of hang reports."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from clusterkit.agent import host, limits, locate, rank_state
from clusterkit.agent.files import read_lines
from clusterkit.agent.processes import command_line, is_alive
from clusterkit.agent.protocol import Document


def records(request: Document) -> list[Document]:
    """Return the record of each rank, with its node, process and the trace of its threads.

    Args:
        request: ``run_dir``; ``nodes`` whose agents run here; ``rank``: only this one, or None.

    Raises:
        locate.Refused: none of these nodes runs.
    """
    found, refusals = [], []
    for node in request["nodes"]:
        try:
            folder = locate.node_folder(request["run_dir"], node)
            started = locate.agent_of(folder)
            found += [(node, folder, rank) for rank in _ranks(folder, int(started["pid"]))]
            os.chdir(os.readlink(f"/proc/{started['pid']}/cwd"))  # places are relative to it
        except (locate.Refused, OSError) as error:
            refusals.append(locate.Refused(str(error)))
    if refusals and len(refusals) == len(request["nodes"]):
        raise refusals[0]
    wanted = [each for each in found if request["rank"] in (None, each[2]["rank"])]
    before = {}
    if host.has_gpus():
        before = {pid: progress for pid, progress in map(_progress, wanted) if progress}
        time.sleep(limits.STILL_LOOK_SECONDS / 2 if before else 0.0)

    def look(each: tuple[int, Path, Document]) -> Document:
        node, folder, rank = each
        known = before.get(rank["pid"])
        now = rank_state.nccl_progress(rank, folder) if known else {}
        moves = rank_state.has_pending(now) and now != known
        record = rank_state.record(rank, folder, moves=moves, traces=True)
        return {**record, "node": node, "pid": rank["pid"]}

    with ThreadPoolExecutor(limits.STACK_THREADS) as pool:
        return list(pool.map(look, wanted))


def _progress(each: tuple[int, Path, Document]) -> tuple[int, Document]:
    _, folder, rank = each
    return rank["pid"], rank_state.nccl_progress(rank, folder)


def _ranks(folder: Path, agent: int) -> list[Document]:
    """Return the newest line of ``ranks.jsonl`` of each rank of this round."""
    words = command_line(agent)
    if "--tagged" in words:  # those on other hosts are not seen from here
        return [rank for rank in locate.newest_ranks(folder).values() if is_alive(rank)]
    nproc = int(words[words.index("--nproc") + 1])
    return rank_state.newest_of_each(read_lines(folder / "ranks.jsonl"), nproc)
