"""Try a schedule, and find a smaller one that fails in the same way."""

from dataclasses import replace

from tests.simulation.agents import Broken


def attempted(world):
    """It after its run, and what is wrong there, if anything is."""
    try:
        world.run()
    except Broken as error:
        return world, str(error)
    return world, None


def shrunk(schedule, fails, simpler):
    """A smaller schedule that fails in the same way.

    ``simpler``: gives what to try besides the schedules with one fault less.
    """
    what = (fails(schedule) or "")[:12]
    while True:
        faults = schedule.faults
        fewer = [replace(schedule, faults=faults[:i] + faults[i + 1 :]) for i in range(len(faults))]
        for smaller in (*fewer, *simpler(schedule)):
            if (fails(smaller) or "").startswith(what):
                schedule = smaller
                break
        else:
            return schedule
