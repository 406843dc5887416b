"""Run schedules by number: python -m tests.simulation [COUNT] [FIRST].

Those of the submitter's side: submitter [COUNT] [FIRST]; 1,000 nodes: scale.
"""

import sys
import time
from collections import Counter
from dataclasses import dataclass

from tests.simulation import submitter
from tests.simulation.schedule import Fault, Schedule, make
from tests.simulation.world import World, fails, shrink, tried


@dataclass
class Scale:
    """What a round takes: from a rank's failure to the last node's start."""

    nodes: int
    messages_of_a_round: int
    seconds_of_a_round: float
    coordinator_seconds: float
    """Of processor time, for the whole run: two rounds of 20 s."""


def at_scale(nodes):
    """A rank fails among so many nodes, and all start again."""
    failure = 20.0
    faults = (Fault("rank", nodes // 2, at=failure),)
    found = World(Schedule(1, nodes, back=False, restarts=1, work=20.0, faults=faults))
    found.after(failure, lambda: found.started_at.append((found.now, found.messages)))
    found.run()
    assert found.rulings[0].action == "exit"
    (began, before), (ended, after) = found.started_at[nodes], found.started_at[-1]
    return Scale(nodes, after - before, round(ended - began, 2), round(found.thinking, 3))


def submitters(count="2000", first="0"):
    """Run schedules of the submitter's side."""
    began, ends, attempts, bad = time.process_time(), Counter(), Counter(), 0
    for seed in range(int(first), int(first) + int(count)):
        schedule = submitter.make(seed)
        world, why = submitter.tried(schedule)
        ends[str(world.end)] += 1
        attempts[min(3, len(world.groups))] += 1
        if why:
            bad += 1
            print(f"seed {seed}: {why}\n  {submitter.shrink(schedule)!r}", flush=True)
    print(f"{count} schedules of the submitter's side; {bad} broken; {dict(ends)}; by attempts "
          f"{dict(attempts)}; {time.process_time() - began:.0f} s of processor time")  # fmt: skip
    return bool(bad)


def main(count="2000", first="0"):
    if count == "scale":
        for nodes in (10, 100, 1000):
            print(at_scale(nodes))
        return False
    began, first, kind, grown, well, bad = time.process_time(), int(first), 0, 0, 0, 0
    for seed in range(first, first + int(count)):
        schedule = make(seed)
        kind += schedule.kind
        world, why = tried(schedule)
        grown += bool(world.grown)
        well += bool(world.grown and world.rulings and world.rulings[0].action == "exit")
        if why:
            small = shrink(schedule)
            print(f"seed {seed}: {why}\n  {fails(small)}\n  {small!r}", flush=True)
            bad += 1
    print(f"{count} schedules, {kind} of which must succeed; {bad} broken; "
          f"in {grown} nodes joined, and {well} of these succeeded; "
          f"{time.process_time() - began:.0f} s of processor time")  # fmt: skip
    return bool(bad)


if __name__ == "__main__":
    _, *given = sys.argv
    sys.exit(submitters(*given[1:]) if given[:1] == ["submitter"] else main(*given))
