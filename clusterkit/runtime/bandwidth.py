"""Measures the collectives between the ranks of a run; rank 0 reports them in marked lines.

One file, standard library and torch only, so that it runs on a node where clusterkit is not
installed. `clusterkit bench` starts it like any program; by hand it is

    torchrun --nproc-per-node 2 bandwidth.py --collectives all_reduce --sizes 1024,65536

It reports times; `clusterkit.bench.bandwidth` computes bandwidths and judges them:

    bench_setup    once: ranks, nodes, backend, number of measurements
    bench_doing    before each measurement: its subject
    bench_row      one collective at one size
    bench_pair     one direction between two nodes (``--pairwise``)

"Size" is nccl-tests' (doc/PERFORMANCE.md): the bytes of the whole array, that is of all ranks'
parts together for all_gather and reduce_scatter, and of one rank's message for the others.

Operations are issued and timed one after the other, without a barrier between them. The time of
an operation is the mean over all ranks, as in nccl-tests: each rank's times add up to the wall
time, and so does their mean, while their maximum would count waiting twice.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

MARK = "@clusterkit "
EXIT_FAILURE = 1

WARMUP = 5
CONNECTING = 2
"""Least number of warm-up operations: one connects, the next shows the duration."""
ITERATIONS = 20
FEWEST_ITERATIONS = 3
SECONDS_PER_MEASUREMENT = 5.0
"""Limits the repetitions of a slow operation, unless their number is an option."""
PING_PONGS = 100
GROWTH = 4
"""Factor between the sizes that are added on GPUs."""
SHARE_OF_MEMORY = 0.8
"""Of a GPU's free memory, what buffers of added sizes may take; NCCL needs some as well."""
PASSES = 3
"""Number of times at which a pair is measured, so that a short disturbance is no slow link."""
_TIMEOUT_SECONDS = 600.0
_CHUNK = 1 << 20
"""Elements that are filled or checked at once; limits the memory beside the buffers."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8,
        torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2,
    )
}  # fmt: skip


class Refused(Exception):
    """An error of the user, reported in one line, without a traceback."""


@dataclass(frozen=True)
class Options:
    """The command line; a number that is None depends on `SECONDS_PER_MEASUREMENT`."""

    collectives: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    iterations: int | None
    warmup: int | None
    pairwise: bool
    sequential: bool
    most: int

    def counts(
        self, seconds: float, most: int = ITERATIONS, number: int = 0, passes: int = 1
    ) -> tuple[int, int]:
        """Return the numbers of warm-ups and iterations of an operation that takes ``seconds``, in
        pass ``number`` of the passes; ``most``: iterations in all passes together."""
        affordable = int(min(most, SECONDS_PER_MEASUREMENT / max(seconds, 1e-9)) / passes)
        warmup = min(WARMUP - CONNECTING, affordable)
        if self.warmup is not None:
            warmup = max(0, self.warmup - CONNECTING)
        iterations = max(FEWEST_ITERATIONS // passes, affordable)
        if self.iterations is not None:
            iterations = (self.iterations + passes - 1 - number) // passes
        return warmup, iterations


@dataclass(frozen=True)
class World:
    """This rank, and what all ranks share."""

    rank: int
    size: int
    node: int
    device: torch.device
    backend: str

    def reduce(self, values: Sequence[float], how: Any = dist.ReduceOp.SUM) -> list[float]:
        """Return the sum (or another reduction) of each value over the ranks, on every rank."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, how)
        return [float(value) for value in total.tolist()]

    def gather(self, value: Any) -> list[Any]:
        """Return the ``value`` of every rank, in rank order, on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def report(self, event: str, **fields: object) -> None:
        """Write a marked line on rank 0, in one system call."""
        if self.rank == 0:
            sys.stdout.flush()
            os.write(1, f"{MARK}{json.dumps({'event': event} | fields)}\n".encode())


# ---------------------------------------------------------------- collectives


@dataclass(frozen=True)
class Operation:
    """One collective at one size on this rank.

    Attributes:
        run: issues operation number i and waits for its end; on a GPU only queues it.
        source: buffer to fill before the check, with ``given`` of each index.
        result: buffer that must hold ``expected`` of each index afterwards.
    """

    run: Callable[[int], object]
    source: Tensor
    given: Callable[[Tensor], Tensor]
    result: Tensor
    expected: Callable[[Tensor], Tensor]


def value(rank: int | Tensor, index: Tensor) -> Tensor:
    """Return what a rank sends: 1 to 112, exact in every type of 8 bits but float8."""
    return 1 + (index * 31 + rank * 17 + index // 7 * rank) % 112


def share(rank: int, size: int, index: Tensor) -> Tensor:
    """Return what a rank adds: at each index one rank a number, the others 0.

    So the sum is exact in every type for any number of ranks, and wrong if a rank is left out or
    counted twice.
    """
    return torch.where(index % size == rank, total(size, index), 0)


def total(size: int, index: Tensor) -> Tensor:
    """Return the sum of `share` over the ranks."""
    return 1 + index // size % 7


def all_reduce(world: World, elements: int, empty: Callable[[int], Tensor]) -> Operation:
    data = empty(elements)
    return Operation(
        lambda i: dist.all_reduce(data),
        data, lambda index: share(world.rank, world.size, index),
        data, lambda index: total(world.size, index),
    )  # fmt: skip


def reduce_scatter(world: World, elements: int, empty: Callable[[int], Tensor]) -> Operation:
    part = elements // world.size
    whole, mine = empty(elements), empty(part)
    # The newer name; the older one warns if both exist.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return Operation(
        lambda i: scatter(mine, whole),
        whole, lambda index: share(world.rank, world.size, index),
        mine, lambda index: total(world.size, index + world.rank * part),
    )  # fmt: skip


def all_gather(world: World, elements: int, empty: Callable[[int], Tensor]) -> Operation:
    part = elements // world.size
    whole, mine = empty(elements), empty(part)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return Operation(
        lambda i: gather(whole, mine),
        mine, lambda index: value(world.rank, index),
        whole, lambda index: value(index // part, index % part),
    )  # fmt: skip


def broadcast(world: World, elements: int, empty: Callable[[int], Tensor]) -> Operation:
    data = empty(elements)
    return Operation(
        # Each rank is the root in turn: a fixed root would run ahead of the others, and the
        # time of a small message would be that of copying it into a buffer.
        lambda i: dist.broadcast(data, i % world.size),
        data, lambda index: value(0, index) if world.rank == 0 else torch.zeros_like(index),
        data, lambda index: value(0, index),
    )  # fmt: skip


def sendrecv(world: World, elements: int, empty: Callable[[int], Tensor]) -> Operation:
    out, into = empty(elements), empty(elements)
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size

    def run(i: int) -> None:
        ops = [dist.P2POp(dist.isend, out, after), dist.P2POp(dist.irecv, into, before)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return Operation(
        run,
        out, lambda index: value(world.rank, index),
        into, lambda index: value(before, index),
    )  # fmt: skip


COLLECTIVES: dict[str, Callable[[World, int, Callable[[int], Tensor]], Operation]] = {
    make.__name__: make for make in (all_reduce, all_gather, reduce_scatter, broadcast, sendrecv)
}
_DIVIDED = ("all_gather", "reduce_scatter")
"""Collectives in which every rank has a part of the array."""


def whole_elements(collective: str, size: int, itemsize: int, ranks: int) -> int:
    """Return the elements of ``size`` bytes: a multiple of the ranks for those with parts."""
    unit = ranks if collective in _DIVIDED else 1
    return max(1, size // itemsize // unit) * unit


def allocator(world: World, dtype: torch.dtype) -> Callable[[int], Tensor]:
    """Return a function that makes buffers of zeros, written so that their pages exist."""
    return lambda elements: torch.empty(elements, dtype=dtype, device=world.device).zero_()


# ---------------------------------------------------------------- measuring


def timed(world: World, run: Callable[[int], object], times: int) -> list[float]:
    """Return the seconds of each of ``times`` operations, issued one after the other."""
    if world.device.type == "cuda":
        new_event: Any = torch.cuda.Event  # without type annotations
        events = [new_event(enable_timing=True) for _ in range(times + 1)]
        events[0].record()
        for i, event in enumerate(events[1:]):
            run(i)
            event.record()
        torch.cuda.synchronize(world.device)
        return [start.elapsed_time(end) / 1000 for start, end in itertools.pairwise(events)]
    clock = [time.perf_counter()]
    for i in range(times):
        run(i)
        clock.append(time.perf_counter())
    return [end - start for start, end in itertools.pairwise(clock)]


def measure(world: World, operation: Operation, options: Options) -> dict[str, object]:
    """Warm up, measure and check one collective at one size."""
    connecting = timed(world, operation.run, CONNECTING)
    (seconds,) = world.reduce(connecting[-1:], dist.ReduceOp.MAX)
    warmup, iterations = options.counts(seconds)
    timed(world, operation.run, warmup)
    dist.barrier()
    sums = world.reduce(timed(world, operation.run, iterations))
    # Once more, on numbers that differ between ranks and indices.
    fill(operation.source, operation.given)
    operation.run(0)
    (wrong,) = world.reduce([count_wrong(operation.result, operation.expected)])
    return summary([each / world.size for each in sums]) | {"wrong": int(wrong)}


def summary(seconds: Sequence[float]) -> dict[str, object]:
    return {
        "iterations": len(seconds),
        "median_us": statistics.median(seconds) * 1e6,
        "min_us": min(seconds) * 1e6,
        "max_us": max(seconds) * 1e6,
    }


def fill(tensor: Tensor, formula: Callable[[Tensor], Tensor]) -> None:
    for piece, index in _pieces(tensor):
        piece.copy_(formula(index))


def count_wrong(tensor: Tensor, formula: Callable[[Tensor], Tensor]) -> int:
    wrong = 0
    for piece, index in _pieces(tensor):
        # Rounded to the type, as the sender did; float8 cannot hold every value.
        wrong += int((piece.double() != formula(index).to(piece.dtype).double()).sum())
    return wrong


def _pieces(tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts of the tensor, with the indices of their elements."""
    for start in range(0, tensor.numel(), _CHUNK):
        piece = tensor[start : start + _CHUNK]
        yield piece, torch.arange(start, start + piece.numel(), device=tensor.device)


def collectives(world: World, options: Options) -> None:
    """Measure every collective at every size."""
    options = grown(world, options)
    itemsize = options.dtype.itemsize
    todo = list(
        dict.fromkeys(
            (name, whole_elements(name, size, itemsize, world.size))
            for name in options.collectives
            for size in options.sizes
        )
    )
    setup(world, options, len(todo))
    for number, (name, elements) in enumerate(todo, 1):
        size = elements * itemsize
        world.report("bench_doing", collective=name, size=size, number=number, of=len(todo))
        # Without a name: the next one's buffers take the place of these.
        make = COLLECTIVES[name]
        found = measure(world, make(world, elements, allocator(world, options.dtype)), options)
        world.report("bench_row", collective=name, size=size, elements=elements, **found)


def grown(world: World, options: Options) -> Options:
    """Return the options with further sizes up to ``most``, on GPUs, as far as memory allows.

    Several GPUs of 400 Gbit/s and more are not half as fast with 64 MiB as with gigabytes.
    """
    if world.device.type != "cuda" or options.sizes[-1] >= options.most:
        return options
    (free,) = world.reduce([torch.cuda.mem_get_info(world.device)[0]], dist.ReduceOp.MIN)
    sizes = [*options.sizes]
    while sizes[-1] < options.most:
        bigger = replace(options, sizes=(min(sizes[-1] * GROWTH, options.most),))
        if needed_bytes(bigger, world.size) > free * SHARE_OF_MEMORY:
            break
        sizes += bigger.sizes
    return replace(options, sizes=tuple(sizes))


# ---------------------------------------------------------------- pairs


def messages(world: World) -> tuple[Callable[..., object], Callable[..., object]]:
    """Return the functions that send a tensor to a rank and receive one from it.

    Of a message by itself, NCCL would make a communicator for its two ranks, unless torch has
    connected all at the start, and keep it: memory on every GPU for each of its pairs.
    A batch uses the communicator of all ranks (torch, ProcessGroupNCCL::pointToPoint).
    """
    if world.backend != "nccl":
        return dist.send, dist.recv

    def batch(operation: Any) -> Callable[..., object]:
        def run(tensor: Tensor, peer: int) -> None:
            for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer)]):
                work.wait()

        return run

    return batch(dist.isend), batch(dist.irecv)


def tournament(players: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs in which each meets each once (circle method)."""
    circle: list[int | None] = [*range(players), *([None] if players % 2 else [])]
    half = len(circle) // 2
    rounds = []
    for _ in range(len(circle) - 1):
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([
            (min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None
        ])  # fmt: skip
        circle.insert(1, circle.pop())
    return rounds


@dataclass
class OneWay:
    """Measurements of one pass in one direction, in seconds."""

    seconds: list[float]
    latencies: list[float]
    wrong: int


def pairs(world: World, options: Options) -> None:
    """Measure every pair of nodes, between the first ranks of each, both ways."""
    leaders: dict[int, int] = {}
    for rank, node in enumerate(world.gather(world.node)):
        leaders.setdefault(node, rank)
    if len(leaders) < 2:
        raise Refused("--pairwise measures between nodes, and this run has one")
    nodes = sorted(leaders)
    rounds = [[(nodes[a], nodes[b]) for a, b in each] for each in tournament(len(nodes))]
    if options.sequential:
        rounds = [[pair] for pair in itertools.chain.from_iterable(rounds)]
    setup(world, options, len(nodes) * (len(nodes) - 1))
    passes = min(PASSES, options.iterations or PASSES)
    found: dict[tuple[int, int], list[OneWay]] = {}
    for number, together in enumerate(rounds * passes):
        world.report("bench_doing", pairs=together, number=number + 1, of=len(rounds) * passes)
        part = number // len(rounds), passes
        for pair in together:
            ranks = [leaders[node] for node in pair]
            if world.rank not in ranks:
                continue
            peer = sum(ranks) - world.rank
            for sender, way in zip(ranks, (pair, pair[::-1]), strict=True):
                measured = one_way(world, options, part, peer, leads=world.rank == sender)
                if measured is not None:
                    found.setdefault(way, []).append(measured)
        dist.barrier()
    small, large = (elements * options.dtype.itemsize for elements in pair_elements(options))
    for results in world.gather(found):
        for (source, target), parts in results.items():
            seconds = [each for part in parts for each in part.seconds]
            # Busy hosts delay any answer, and no answer is quicker than the link.
            latency = min(min(part.latencies) for part in parts)
            ends = {"from": source, "to": target, "size": large, "latency_size": small}
            ends |= {"latency_us": latency * 1e6, "wrong": sum(part.wrong for part in parts)}
            world.report("bench_pair", **ends, **summary(seconds))


def pair_elements(options: Options) -> tuple[int, int]:
    """Return the elements of messages between pairs: for latency, and for bandwidth."""
    itemsize = options.dtype.itemsize
    return max(1, min(options.sizes) // itemsize), max(1, max(options.sizes) // itemsize)


def one_way(
    world: World, options: Options, part: tuple[int, int], peer: int, *, leads: bool
) -> OneWay | None:
    """Measure messages from the rank that leads to its peer; return None on the peer.

    A round trip is a message and an answer of one element, since one clock can time nothing less.
    The latency is half the quickest round trip of the smallest size.

    Args:
        part: number of this pass, number of passes.
    """
    send, receive = messages(world)

    def trip(message: Tensor, answer: Tensor) -> None:
        (send if leads else receive)(message, peer)
        (receive if leads else send)(answer, peer)

    def trips(message: Tensor, answer: Tensor, most: int) -> list[float]:
        """Return the seconds of each; the rank that leads decides on their number."""

        def run(i: int) -> None:
            trip(message, answer)

        seconds = timed(world, run, CONNECTING)[-1]
        counts = torch.tensor(options.counts(seconds, most, *part), device=world.device)
        (send if leads else receive)(counts, peer)
        warmup, iterations = counts.tolist()
        timed(world, run, warmup)
        return timed(world, run, iterations)

    empty = allocator(world, options.dtype)
    small, large = map(empty, pair_elements(options))
    answer = empty(1)
    latencies = trips(small, torch.zeros_like(small), PING_PONGS)
    seconds = trips(large, answer, ITERATIONS)
    fill(large, (lambda index: value(world.rank, index)) if leads else torch.zeros_like)
    trip(large, answer)
    wrong = torch.zeros(1, dtype=torch.int64, device=world.device)
    if not leads:
        wrong += count_wrong(large, lambda index: value(peer, index))
        send(wrong, peer)
        return None
    receive(wrong, peer)
    return OneWay(seconds, [each / 2 for each in latencies], int(wrong.item()))


# ---------------------------------------------------------------- start and end


def setup(world: World, options: Options, measurements: int) -> None:
    """Report the ranks and nodes; refuse what cannot work before anything is measured."""
    everyone = world.gather((world.node, socket.gethostname()))
    check_memory(world, options, [host for _, host in everyone].count(socket.gethostname()))
    check_dtype(world, options)
    nodes: dict[int, dict[str, Any]] = {}
    for rank, (node, host) in enumerate(everyone):
        nodes.setdefault(node, {"node": node, "host": host, "ranks": []})["ranks"].append(rank)
    cuda = world.device.type == "cuda"
    world.report(
        "bench_setup",
        world_size=world.size,
        nodes=[nodes[node] for node in sorted(nodes)],
        backend=world.backend,
        device=torch.cuda.get_device_name(world.device) if cuda else "cpu",
        dtype=str(options.dtype).removeprefix("torch."),
        torch=str(torch.__version__),
        measurements=measurements,
    )


def check_memory(world: World, options: Options, sharing: int) -> None:
    """Refuse a size whose buffers, of all ranks that share this host, exceed its free memory.

    Linux promises more memory than it has and kills a process that uses what it was promised.
    """
    needed = needed_bytes(options, world.size)
    if world.device.type == "cuda":
        free: int | None = torch.cuda.mem_get_info(world.device)[0]
    else:
        free = available_memory()
        needed *= sharing
    if free is not None and needed > free:
        raise Refused(
            f"not enough memory on {socket.gethostname()} for {max(options.sizes)} bytes: the "
            f"buffers take {needed >> 20} MiB, {free >> 20} MiB are free (smaller --sizes)"
        )


def needed_bytes(options: Options, ranks: int) -> int:
    """Return the bytes of the largest buffers that one rank has at a time."""
    largest = max(options.sizes)
    if options.pairwise:
        return largest + 2 * min(options.sizes)
    second = {"sendrecv": 1.0, "all_gather": 1 / ranks, "reduce_scatter": 1 / ranks}
    return int(largest * (1 + max(second.get(name, 0.0) for name in options.collectives)))


def available_memory() -> int | None:
    """Return bytes that processes can allocate (proc(5), MemAvailable); None: unknown."""
    try:
        with open("/proc/meminfo") as file:
            match = re.search(r"^MemAvailable:\s+(\d+) kB", file.read(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) << 10 if match else None


def check_dtype(world: World, options: Options) -> None:
    """Refuse a type that the backend does not take; all ranks get the same error."""
    for name in ("sendrecv",) if options.pairwise else options.collectives:
        elements = whole_elements(name, 1, options.dtype.itemsize, world.size)
        try:
            COLLECTIVES[name](world, elements, allocator(world, options.dtype)).run(0)
        except (RuntimeError, TypeError, ValueError) as error:
            first = (str(error).splitlines() or [""])[0]
            if not re.search(r"(?i)scalar type|data ?type|dtype|float8", first):
                raise
            dtype = str(options.dtype).removeprefix("torch.")
            raise Refused(
                f"dtype {dtype}: {world.backend} does not take it in {name} ({first})"
            ) from error


def parse(arguments: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(prog="bandwidth.py", description=__doc__)
    parser.add_argument("--collectives", default=",".join(COLLECTIVES), type=_collectives)
    parser.add_argument("--sizes", required=True, type=_sizes, help="bytes, comma-separated")
    parser.add_argument("--most", type=int, default=0, help="bytes, to which sizes grow on GPUs")
    parser.add_argument("--dtype", default="float32", choices=list(DTYPES))
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--warmup", type=int)
    parser.add_argument("--pairwise", action="store_true")
    parser.add_argument("--sequential", action="store_true")
    given = vars(parser.parse_args(arguments))
    return Options(**given | {"dtype": DTYPES[given["dtype"]]})


def _collectives(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in COLLECTIVES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(COLLECTIVES)}")
    return names


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(size) for size in text.split(","))
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError("a size is 1 byte or more")
    return sizes


def join() -> World:
    """Join the process group that the environment describes."""
    number = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        text = os.environ.get(name, "")
        if not text.isdecimal():
            state = f"is {text!r}" if text else "is not set"
            raise Refused(f"{name} {state}: start the ranks with a launcher, torchrun for one")
        number[name] = int(text)
    rank, size = number["RANK"], number["WORLD_SIZE"]
    if size < 2:
        raise Refused(f"between {size} rank there is nothing to measure: start 2 or more")
    own = os.environ.get("NODE_RANK") or os.environ.get("GROUP_RANK")
    node = int(own or rank // number["LOCAL_WORLD_SIZE"])
    device = choose_device(number["LOCAL_RANK"], number["LOCAL_WORLD_SIZE"])
    backend = "nccl" if device.type == "cuda" else "gloo"
    options: dict[str, Any] = {}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options["device_id"] = device
    seconds = float(os.environ.get("CLUSTERKIT_TIMEOUT") or _TIMEOUT_SECONDS)
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=seconds), **options)
    except dist.DistError as error:
        if "Duplicate GPU detected" in str(error):  # NCCL, of two ranks that see the same one
            raise too_few_gpus(number["LOCAL_WORLD_SIZE"]) from error
        raise
    return World(rank, size, node, device, backend)


def choose_device(local_rank: int, local_size: int) -> torch.device:
    """Return the device by CLUSTERKIT_DEVICE (cpu or cuda), by default a GPU if there is one."""
    kind = os.environ.get("CLUSTERKIT_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind != "cuda":
        return torch.device(kind)
    count = torch.cuda.device_count()
    # CUDA_VISIBLE_DEVICES may name one GPU per rank.
    own = local_size == 1 or "," not in os.environ.get("CUDA_VISIBLE_DEVICES", ",")
    index = 0 if count == 1 and own else local_rank
    if index >= count or (count == 1 and not own):
        raise too_few_gpus(local_size)
    return torch.device("cuda", index)


def too_few_gpus(local_size: int) -> Refused:
    count = torch.cuda.device_count()
    return Refused(
        f"{local_size} rank{'s' * (local_size != 1)} on this node, but torch sees "
        f"{count} GPU{'s' * (count != 1)}: fewer ranks per node (--gpus)"
    )


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    world = join()
    try:
        (pairs if options.pairwise else collectives)(world, options)
    except (MemoryError, RuntimeError) as error:
        if not re.search(r"can't allocate memory|out of memory", str(error) or "out of memory"):
            raise
        raise Refused(
            f"not enough memory on {socket.gethostname()} for {max(options.sizes)} bytes "
            "(smaller --sizes)"
        ) from error
    dist.barrier()
    if world.backend == "nccl":
        dist.destroy_process_group()
    return 0


def run(arguments: Sequence[str]) -> NoReturn:
    """Run `main` and end the process with its exit code."""
    try:
        code = main(arguments)
    except Refused as refused:
        sys.stderr.write(f"error: {refused}\n")
        code = EXIT_FAILURE
    except Exception:
        traceback.print_exc()
        code = EXIT_FAILURE
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit(): ranks sometimes abort when the interpreter ends after gloo was used.
    os._exit(code)


if __name__ == "__main__":
    run(sys.argv[1:])
