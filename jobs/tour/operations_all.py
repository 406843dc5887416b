"""The operations in which all ranks give and all get, and waiting, for collectives.py.

As in operations.py: what this rank held before, what it holds after, what it must hold after.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from operations import Outcome, World, operation, own, owns, zeros
from torch import Tensor
from torch.distributed import ReduceOp


def all_reduce(name: str, op: Any, fold: Callable[[Tensor, Tensor], Tensor]) -> None:
    @operation(f"all_reduce {name}")
    def _(w: World) -> Outcome:
        box = own(w) if name[0] == "B" else own(w).double()  # bits are of whole numbers
        dist.all_reduce(box, op)
        return own(w), box, reduce(fold, owns(w)) / (w.size if name == "AVG" else 1)


all_reduce("SUM", ReduceOp.SUM, torch.add)
all_reduce("AVG", ReduceOp.AVG, torch.add)
all_reduce("MIN", ReduceOp.MIN, torch.minimum)
all_reduce("MAX", ReduceOp.MAX, torch.maximum)
all_reduce("PRODUCT", ReduceOp.PRODUCT, torch.mul)
all_reduce("BAND", ReduceOp.BAND, torch.bitwise_and)
all_reduce("BOR", ReduceOp.BOR, torch.bitwise_or)
all_reduce("BXOR", ReduceOp.BXOR, torch.bitwise_xor)


@operation("all_reduce PREMUL_SUM")
def _(w: World) -> Outcome:
    """Each rank's numbers times a factor, here 2, then the sum."""
    box = own(w).double()
    dist.all_reduce(box, dist._make_nccl_premul_sum(2.0))
    return own(w), box, 2 * sum(owns(w))


@operation("all_gather")
def _(w: World) -> Outcome:
    box = zeros(w)
    dist.all_gather(box, own(w))
    return own(w), box, owns(w)


@operation("all_gather, uneven")
def _(w: World) -> Outcome:
    """Rank r brings r + 1 numbers."""
    parts = [torch.full((rank + 1,), rank, device=w.device) for rank in range(w.size)]
    box = [torch.zeros_like(part) for part in parts]
    dist.all_gather(box, parts[w.rank])
    return parts[w.rank], box, parts


@operation("all_gather_single")  # until torch 2.12: all_gather_into_tensor
def _(w: World) -> Outcome:
    box = torch.cat(zeros(w))
    dist.all_gather_single(box, own(w))
    return own(w), box, torch.cat(owns(w))


@operation("all_gather_object")
def _(w: World) -> Outcome:
    box: list[Any] = [None] * w.size
    dist.all_gather_object(box, f"of {w.rank}")
    return f"of {w.rank}", box, [f"of {rank}" for rank in range(w.size)]


@operation("reduce_scatter SUM")
def _(w: World) -> Outcome:
    box = torch.zeros(1, dtype=torch.int64, device=w.device)
    dist.reduce_scatter(box, list(own(w).split(1)))
    return own(w), box, sum(owns(w))[w.rank : w.rank + 1]


@operation("reduce_scatter_single AVG")  # until torch 2.12: reduce_scatter_tensor
def _(w: World) -> Outcome:
    box = torch.zeros(1, device=w.device)
    dist.reduce_scatter_single(box, own(w).float(), ReduceOp.AVG)
    return own(w), box, sum(owns(w))[w.rank : w.rank + 1] / w.size


@operation("all_to_all")
def _(w: World) -> Outcome:
    """A transposition: part i of rank j goes to place j of rank i."""
    box = list(torch.zeros_like(own(w)).split(1))
    dist.all_to_all(box, list(own(w).split(1)))
    return own(w), torch.cat(box), torch.stack(owns(w))[:, w.rank]


@operation("all_to_all_single")
def _(w: World) -> Outcome:
    box = torch.zeros_like(own(w))
    dist.all_to_all_single(box, own(w))
    return own(w), box, torch.stack(owns(w))[:, w.rank]


@operation("all_to_all_single, uneven")
def _(w: World) -> Outcome:
    """Rank 0 gets two numbers of everyone, the others one."""
    ends = [2, *[1] * (w.size - 1)]
    mine = ends[w.rank]
    brought = [torch.cat([one, one[:1]]) for one in owns(w)]
    box = torch.zeros(mine * w.size, dtype=torch.int64, device=w.device)
    dist.all_to_all_single(box, brought[w.rank], [mine] * w.size, ends)
    return brought[w.rank], box, torch.cat([one.split(ends)[w.rank] for one in brought])


# --------------------------------------------------------------------------- waiting


@operation("barrier")
def _(w: World) -> Outcome:
    """Before it some have arrived, after it all have: counted in the store, not by clocks."""
    before, after = arrive(w, "barrier", dist.barrier)
    return before, after, f"{w.size} arrived"


@operation("monitored_barrier")
def _(w: World) -> Outcome:
    """A barrier that names the rank which does not come."""
    wait = timedelta(seconds=60)
    before, after = arrive(w, "monitored", lambda: dist.monitored_barrier(timeout=wait))
    return before, after, f"{w.size} arrived"


def arrive(w: World, name: str, barrier: Callable[[], object]) -> tuple[str, str]:
    store = dist.distributed_c10d._get_default_store()
    before = store.add(name, 1)
    barrier()
    return f"{before} arrived", f"{store.add(name, 0)} arrived"
