"""The operations between two ranks, and between one and all, for collectives.py.

Each function gives three things of this rank: what it held before, what it holds after, and what it
must hold after. None: nothing. Those between all and all are in operations_all.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class World(NamedTuple):
    """This rank among all."""

    rank: int
    size: int
    device: torch.device


Outcome = tuple[Any, Any, Any]
OPERATIONS: dict[str, Callable[[World], Outcome]] = {}


def operation(name: str) -> Callable[[Callable[[World], Outcome]], None]:
    """Put a function into OPERATIONS under this name."""
    return lambda function: OPERATIONS.update({name: function})


def own(w: World, rank: int | None = None) -> Tensor:
    """What a rank brings, by default this one: as many numbers as there are ranks."""
    return torch.arange(1, w.size + 1, device=w.device) + 10 * (w.rank if rank is None else rank)


def owns(w: World) -> list[Tensor]:
    return [own(w, rank) for rank in range(w.size)]


def zeros(w: World) -> list[Tensor]:
    return [torch.zeros_like(own(w)) for _ in range(w.size)]


def around(w: World, step: int) -> int:
    """The rank ``step`` places on, in a ring."""
    return (w.rank + step) % w.size


# --------------------------------------------------------------------------- one to one


@operation("send, recv: 0 to 1")
def _(w: World) -> Outcome:
    box = own(w)
    if w.rank == 0:
        dist.send(box, dst=1)
    elif w.rank == 1:
        dist.recv(box, src=0)
    return own(w), box, own(w, 0 if w.rank == 1 else w.rank)


@operation("isend, irecv: a ring")
def _(w: World) -> Outcome:
    box = torch.zeros_like(own(w))
    for work in [dist.isend(own(w), around(w, 1)), dist.irecv(box, around(w, -1))]:
        work.wait()  # both are under way; no rank waits for another to begin
    return own(w), box, own(w, around(w, -1))


@operation("batch_isend_irecv: back")
def _(w: World) -> Outcome:
    box = torch.zeros_like(own(w))
    to, back = around(w, -1), around(w, 1)
    ring = [dist.P2POp(dist.isend, own(w), to), dist.P2POp(dist.irecv, box, back)]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    return own(w), box, own(w, back)


@operation("send_object_list: 0 to 1")
def _(w: World) -> Outcome:
    box: list[Any] = [f"of {w.rank}"]  # or anything else that pickle takes
    if w.rank == 0:
        dist.send_object_list(box, dst=1, device=w.device)
    elif w.rank == 1:
        dist.recv_object_list(box, src=0, device=w.device)
    return f"of {w.rank}", box[0], f"of {0 if w.rank == 1 else w.rank}"


# --------------------------------------------------------------------------- one and all


@operation("broadcast from 0")
def _(w: World) -> Outcome:
    box = own(w)
    dist.broadcast(box, src=0)
    return own(w), box, own(w, 0)


@operation("scatter from 0")
def _(w: World) -> Outcome:
    box = torch.zeros(1, dtype=torch.int64, device=w.device)
    dist.scatter(box, list(own(w).split(1)) if w.rank == 0 else None, src=0)
    return own(w) if w.rank == 0 else None, box, own(w, 0)[w.rank : w.rank + 1]


@operation("gather to 0")
def _(w: World) -> Outcome:
    box = zeros(w) if w.rank == 0 else None
    dist.gather(own(w), box, dst=0)
    return own(w), box, owns(w) if w.rank == 0 else None


@operation("reduce SUM to 0")
def _(w: World) -> Outcome:
    box = own(w)
    dist.reduce(box, dst=0)  # on the other ranks it may hold anything afterwards
    return (own(w), box, sum(owns(w))) if w.rank == 0 else (own(w), None, None)


@operation("broadcast_object_list")
def _(w: World) -> Outcome:
    box = [f"of {w.rank}"]
    dist.broadcast_object_list(box, src=0, device=w.device)
    return f"of {w.rank}", box[0], "of 0"


@operation("scatter_object_list")
def _(w: World) -> Outcome:
    parts = [f"for {rank}" for rank in range(w.size)] if w.rank == 0 else None
    box: list[Any] = [None]
    dist.scatter_object_list(box, parts, src=0)
    return parts, box[0], f"for {w.rank}"


@operation("gather_object to 0")
def _(w: World) -> Outcome:
    box: list[Any] | None = [None] * w.size if w.rank == 0 else None
    dist.gather_object(f"of {w.rank}", box, dst=0)
    return f"of {w.rank}", box, [f"of {r}" for r in range(w.size)] if w.rank == 0 else None
