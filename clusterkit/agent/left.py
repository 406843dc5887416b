"""Say which ranks neither run nor end although others have ended.

Native code may keep a process at its end: a model that is freed while gloo's thread drops its last
work waits for that thread for ever. Such a rank waits in no collective, so `hangs` does not see it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from clusterkit.agent.member import node_names
from clusterkit.agent.protocol import LEFT_NOTE, Document
from clusterkit.agent.standstill import names_of, places


def describe(
    idle: Mapping[int, Sequence[Document]],
    ended: Mapping[int, Sequence[int]],
    nodes_ended: Sequence[int],
    now: float,
    *,
    many: bool = False,
) -> str:
    """Return the message; empty: there is nothing to say.

    Args:
        idle: by node, its ranks whose main threads have not run for long: ``rank``, ``since``
            (Unix time), and ``at`` and ``state`` as of a rank's record (`standstill`).
        ended: by node, its ranks that have ended.
        nodes_ended: nodes all of whose ranks have ended.
        now: Unix time.
        many: whether ranks are named with their nodes.
    """
    ranks = {int(each["rank"]): each for some in idle.values() for each in some}
    if not ranks or not (nodes_ended or any(ended.values())):
        return ""
    node_of = {int(each["rank"]): node for node, some in idle.items() for each in some}
    node_of.update((rank, node) for node, some in ended.items() for rank in some)

    def named(some: Iterable[int]) -> str:
        numbers = [*some]
        on = {node_of[rank] for rank in numbers}
        where = f" on node {min(on)}" if many and len(on) == 1 else ""
        return f"{names_of(numbers, 1, ())}{where}"

    gone = [rank for some in ended.values() for rank in some]
    others = [named(gone)] if gone else []
    others += [node_names([*nodes_ended])] if nodes_ended else []
    seconds = now - max(float(each["since"]) for each in ranks.values())
    thread, has = ("thread", "has") if len(ranks) == 1 else ("threads", "have")
    have = "has" if len(gone) + len(nodes_ended) == 1 else "have"
    return (
        f"{LEFT_NOTE}the main {thread} of {named(ranks)} {has} not run for {seconds:.0f} s, and "
        f"{' and '.join(others)} {have} ended{places(ranks, ranks, named)}"
    )
