"""The job of `clusterkit bench`, and the report of its run. Pure.

`choose` checks the options, `job_of` makes a job of them, `report` reads the marked lines of its
run: algorithm and bus bandwidth as nccl-tests define them, and, between pairs of nodes, which link
or host is slow (`clusterkit.bench.slow_links`). The ranks run `clusterkit.runtime.bandwidth`.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, field

from clusterkit.bench.slow_links import Finding, judge
from clusterkit.cluster import Facts
from clusterkit.errors import BadInput, ClusterkitError, choices, pluralize
from clusterkit.plan import Plan
from clusterkit.spec import JobSpec

FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1.0,
    "sendrecv": lambda ranks: 1.0,
}
"""Bus bandwidth / algorithm bandwidth for n ranks, as nccl-tests has it:
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md, "Bus bandwidth".

With array size S and time t, algbw = S / t; of all_reduce, busbw = algbw * 2 (n - 1) / n. That is
the least that a rank's link has to carry in one direction, in units of the array's size.
all_reduce: every element is added n-1 times and its sum copied n-1 times, each time over a link;
that is 2(n-1) arrays, divided between n links. reduce_scatter only adds, all_gather only copies.
broadcast and sendrecv: the whole array leaves one rank.
"""

ITEMSIZES = {
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1,
    "int32": 4, "int64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
"""Name of a torch type to its bytes."""
ONLY_NCCL = ("float8_e4m3fn", "float8_e5m2")
"""Types that gloo does not take (torch 2.13: "Invalid scalar type")."""

SIZES = "1K:64M:x4"
MOST_ON_GPUS = 8 << 30
"""Where they end on GPUs with the memory for it; the ranks find out."""
PAIR_SIZES = "1K,16M"
"""Of pairs: the smallest size gives the latency, the largest the bandwidth."""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"([0-9]{1,12})([KMG]?)(?:iB)?\Z", re.IGNORECASE)
_FACTOR = re.compile(r"x([0-9]{1,4})\Z")
_SIZE_HINT = "a size (4096, 64K, 1M; 1K is 1024), several (1K,1M) or a range (1K:64M, 1K:64M:x2)"


T = TypeVar("T")


class Options(Struct, frozen=True, kw_only=True):
    """What to measure; see `choose`."""

    collectives: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: str = "float32"
    iterations: int | None = None
    warmup: int | None = None
    pairwise: bool = False
    sequential: bool = False
    most: int | None = None
    """Size to which the ranks go on if they have GPUs."""


class Node(Struct, frozen=True):
    """One node: number, name, ranks."""

    node: int
    host: str
    ranks: tuple[int, ...]


class Ranks(Struct, frozen=True, kw_only=True):
    """Ranks between which it was measured, and the software."""

    world_size: int
    nodes: tuple[Node, ...]
    backend: str
    device: str
    dtype: str
    torch: str


class Setup(Ranks, frozen=True, kw_only=True):
    """The mark ``bench_setup``."""

    measurements: int


class Measured(Struct, frozen=True, kw_only=True):
    """The mark ``bench_row``."""

    collective: str
    size: int
    elements: int
    iterations: int
    median_us: float
    min_us: float
    max_us: float
    wrong: int


class MeasuredPair(Struct, frozen=True, kw_only=True):
    """The mark ``bench_pair``: messages of ``size`` from one node to another."""

    source: int = field(name="from")
    target: int = field(name="to")
    size: int
    median_us: float
    """Of a round trip: the message, and one element back."""
    latency_us: float
    """Half of the quickest round trip of ``latency_size``."""
    latency_size: int
    wrong: int


class Row(Measured, frozen=True, kw_only=True):
    """One collective at one size. Bandwidths are in 1e9 bytes per second, from the median."""

    algorithm_gb_per_s: float
    bus_gb_per_s: float


class Pairs(Struct, frozen=True, kw_only=True):
    """All pairs of nodes; rows of the matrices are senders, columns receivers."""

    hosts: tuple[str, ...]
    size: int
    latency_size: int
    gb_per_s: tuple[tuple[float | None, ...], ...]
    latency_us: tuple[tuple[float | None, ...], ...]
    findings: tuple[Finding, ...]
    judgement: str


class Report(Ranks, frozen=True, kw_only=True):
    """The document that ``clusterkit bench --json`` prints."""

    def __repr__(self) -> str:
        return f"<Report of {self.run}: {self.world_size} ranks, {self.backend}>"

    run: str
    wrong: int
    """Number of wrong elements, of all measurements."""
    rows: tuple[Row, ...] = ()
    latency_us: dict[str, float] = {}
    """Collective to its median time at its smallest size."""
    pairs: Pairs | None = None


# ---------------------------------------------------------------- the job


def choose(
    *,
    collectives: str | Sequence[str] | None = None,
    sizes: str | None = None,
    pairwise: bool = False,
    **others: Any,
) -> Options:
    """Check the options of a measurement.

    Args:
        collectives: names, in a list or separated by commas; None: all of `FACTORS`.
        sizes: see `parse_sizes`; None: `SIZES`, on GPUs further to `MOST_ON_GPUS` as memory
            allows, or `PAIR_SIZES` between pairs.
        pairwise: messages between all pairs of nodes instead of collectives.
        others: of `Options`, as follows.
        dtype: type of the elements, one of `ITEMSIZES`.
        iterations: timed operations per measurement; None: 20, fewer of slow ones.
        warmup: operations before them, at least 2 (one connects, the next shows the duration);
            None: 5, fewer of slow ones.
        sequential: one pair at a time; otherwise disjoint pairs measure at once.

    Raises:
        BadInput: the message names the option.
    """
    if pairwise and collectives:
        raise BadInput("collectives: pairs of nodes exchange messages, not collectives",
                       hint="leave out --collectives, or --pairwise")  # fmt: skip
    if others.get("sequential") and not pairwise:
        raise BadInput("sequential: without --pairwise there are no pairs", hint="--pairwise")
    if isinstance(collectives, str):
        collectives = [name.strip() for name in collectives.split(",")]
    names = tuple(dict.fromkeys(FACTORS if collectives is None else collectives))
    if not names:
        raise BadInput("collectives: none given", hint=f"some of {', '.join(FACTORS)}")
    for name in names:
        _one_of("collectives", name, FACTORS)
    known = [name for name in Options.__struct_fields__ if name != "most"]
    for name in others.keys() - set(known):
        raise BadInput(f"{name}: unknown argument", choices(known, name, "known"))
    options = Options(
        collectives=("sendrecv",) if pairwise else names,
        sizes=parse_sizes(sizes or (PAIR_SIZES if pairwise else SIZES)),
        most=None if sizes or pairwise else MOST_ON_GPUS,
        pairwise=pairwise,
        **others,
    )
    _one_of("dtype", options.dtype, ITEMSIZES)
    for key, least in (("iterations", 1), ("warmup", 2)):
        if (number := getattr(options, key)) is not None and number < least:
            raise BadInput(f"{key}: {number}: at least {least}")
    return options


def _one_of(key: str, word: str, known: Collection[str]) -> None:
    if word not in known:
        raise BadInput(f"{key}: {word!r} is unknown", hint=choices(known, word))


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse ``64K``, ``1K,1M`` or ``1K:64M:x4``; return bytes, ascending; 1K is 1024.

    A range multiplies its first size by the factor (by default 4) up to the last.

    Raises:
        BadInput: not of that form, 0 bytes, or a range that goes down.
    """
    if ":" not in text:
        return tuple(sorted({_size(word.strip(), text) for word in text.split(",")}))
    first, last, *rest = (part.strip() for part in text.split(":"))
    low, high = _size(first, text), _size(last, text)
    if high < low:
        raise BadInput(f"sizes: {text}: the smallest size comes first", hint=f"{last}:{first}")
    match = _FACTOR.match(rest[0] if rest else "x4")
    if match is None or int(match[1]) < 2 or len(rest) > 1:
        raise BadInput(
            f"sizes: {text}: {':'.join(rest)!r} is not a factor", hint="x2, or a larger one"
        )
    sizes = [low]
    while sizes[-1] * int(match[1]) <= high:
        sizes.append(sizes[-1] * int(match[1]))
    return tuple(sizes)


def _size(word: str, text: str) -> int:
    match = _SIZE.match(word)
    if match is None:
        raise BadInput(f"sizes: {word!r} in {text!r} is not a size", hint=_SIZE_HINT)
    size = int(match[1]) * _UNITS[match[2].upper()]
    if size < 1:
        raise BadInput(f"sizes: {word!r} in {text!r}: a message has 1 byte or more")
    return size


def job_of(options: Options) -> JobSpec:
    """Return the job that measures; any backend can run it."""
    program = Path(__file__).parents[1] / "runtime" / "bandwidth.py"
    args = ["--sizes", ",".join(map(str, options.sizes)), "--dtype", options.dtype]
    if options.pairwise:
        args += ["--pairwise", *(["--sequential"] if options.sequential else [])]
    else:
        args += ["--collectives", ",".join(options.collectives)]
    numbers = {"iterations": options.iterations, "warmup": options.warmup, "most": options.most}
    for name, number in numbers.items():
        args += [] if number is None else [f"--{name}", str(number)]
    return JobSpec(
        name="bench",
        description="Bandwidth and latency of the collectives",
        program=str(program),
        args=tuple(args),
        workdir=str(program.parent),
        # The program's neighbours have names such as `deepspeed` and must not be found by them.
        env={"PYTHONSAFEPATH": "1"},
    )


def check(options: Options, plan: Plan, facts: Facts) -> None:
    """Refuse what would fail after the start.

    Raises:
        BadInput: too few ranks or nodes, a type that gloo does not take, or buffers larger than
            a host's or a GPU's whole memory.
    """
    nodes, nproc = plan.topology["nodes"], plan.topology["nproc_per_node"]
    shape = f"{pluralize(nodes, 'node')} x {pluralize(nproc, 'rank')}"
    if plan.world_size < 2:
        raise BadInput(f"bench: {shape}: there is nothing to measure between", hint="--nodes 2")
    if options.pairwise and nodes < 2:
        raise BadInput(
            f"pairwise: {shape}: it measures between nodes, not between ranks of one",
            hint="--nodes 2, or leave out --pairwise",
        )
    device = plan.device
    if device == "cpu" and options.dtype in ONLY_NCCL:
        raise BadInput(
            f"dtype: {options.dtype}: gloo, which ranks without GPUs use, does not support it",
            hint="it supports float16 and bfloat16",
        )
    needed = needed_bytes(options, plan.world_size)
    # Simulated nodes share a host.
    ranks = Counter(step.host for step in plan.steps if step.kind == "start")
    for host in facts.hosts:
        if host.host not in ranks:
            continue
        if device == "cuda" and host.gpus:
            memory = min(gpu.memory_mib for gpu in host.gpus) << 20
            _check_memory(options, needed, memory, f"a GPU of {host.host}")
        elif device == "cpu":
            together = ranks[host.host] * nproc * needed
            _check_memory(options, together, host.memory_mib << 20, host.host)


def _check_memory(options: Options, needed: int, memory: int, place: str) -> None:
    if needed > memory:
        raise BadInput(
            f"sizes: {size_text(max(options.sizes))} needs {size_text(needed >> 20 << 20)} of "
            f"buffers, {place} has {size_text(memory)}",
            hint="smaller --sizes",
        )


def needed_bytes(options: Options, ranks: int) -> int:
    """Return the bytes of the largest buffers that one rank has at a time."""
    largest = max(options.sizes)
    if options.pairwise:
        return largest + 2 * min(options.sizes)
    second = {"sendrecv": 1.0, "all_gather": 1 / ranks, "reduce_scatter": 1 / ranks}
    return int(largest * (1 + max(second.get(name, 0.0) for name in options.collectives)))


# ---------------------------------------------------------------- the report


def report(run: str, marks: Sequence[Mapping[str, Any]], hosts: Sequence[str] = ()) -> Report:
    """Return the report of a finished run.

    Args:
        run: its id.
        marks: the objects of its marked lines.
        hosts: the cluster's names of the nodes; if they are not unique, the nodes' own names are
            used.

    Raises:
        ClusterkitError: measurements are missing.
    """
    begins = [at for at, mark in enumerate(marks) if mark["event"] == "bench_setup"]
    last_attempt = marks[begins[-1] :] if begins else []
    setup = next(iter(_read_all(last_attempt, "bench_setup", Setup)), None)
    if setup is None:
        raise ClusterkitError(f"run {run} measured nothing", hint=f"clusterkit logs {run}")
    measured = _read_all(last_attempt, "bench_row", Measured)
    exchanged = _read_all(last_attempt, "bench_pair", MeasuredPair)
    found = len(measured) + len(exchanged)
    if found != setup.measurements:
        raise ClusterkitError(
            f"run {run} reported {found} of {setup.measurements} measurements",
            hint=f"clusterkit logs {run}",
        )
    own = [node.host for node in setup.nodes]
    names = distinct(hosts if len(set(hosts)) == len(own) else own)
    nodes = tuple(
        Node(node.node, name, node.ranks) for node, name in zip(setup.nodes, names, strict=True)
    )
    rows = tuple(_row(one, setup.world_size) for one in measured)
    smallest: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: row.size):
        smallest.setdefault(row.collective, row)
    return Report(
        **{name: getattr(setup, name) for name in Ranks.__struct_fields__} | {"nodes": nodes},
        run=run,
        wrong=sum(one.wrong for one in measured) + sum(one.wrong for one in exchanged),
        rows=rows,
        # In the order in which they were measured.
        latency_us={row.collective: smallest[row.collective].median_us for row in rows},
        pairs=_pairs(names, [node.node for node in setup.nodes], exchanged) if exchanged else None,
    )


def _read_all(marks: Iterable[Mapping[str, Any]], event: str, kind: type[T]) -> list[T]:
    """Return the marks of this event as structs, without those of another form."""
    found = []
    for mark in marks:
        if mark["event"] == event:
            with contextlib.suppress(msgspec.ValidationError):
                found.append(msgspec.convert(dict(mark), kind))
    return found


def _row(measured: Measured, ranks: int) -> Row:
    algorithm = _gb_per_s(measured.size, measured.median_us)
    return Row(
        **msgspec.structs.asdict(measured),
        algorithm_gb_per_s=algorithm,
        bus_gb_per_s=algorithm * FACTORS[measured.collective](ranks),
    )


def _gb_per_s(size: int, microseconds: float) -> float:
    # A GPU's clock can measure 0 for less than its tick.
    return size / max(microseconds, 1e-3) / 1e3


def distinct(names: Sequence[str]) -> list[str]:
    """Return the names; add the number of the node to those that are not unique."""
    times = Counter(names)
    return [f"{name} node {node}" if times[name] > 1 else name for node, name in enumerate(names)]


def _pairs(names: Sequence[str], nodes: Sequence[int], links: Sequence[MeasuredPair]) -> Pairs:
    by_ends = {(link.source, link.target): link for link in links}

    def matrix(value: Callable[[MeasuredPair], float]) -> tuple[tuple[float | None, ...], ...]:
        return tuple(
            tuple(value(by_ends[a, b]) if (a, b) in by_ends else None for b in nodes) for a in nodes
        )

    bandwidth, latency = matrix(pair_bandwidth), matrix(lambda link: link.latency_us)
    findings, judgement = judge(names, bandwidth, latency)
    return Pairs(
        hosts=tuple(names),
        size=links[0].size,
        latency_size=links[0].latency_size,
        gb_per_s=bandwidth,
        latency_us=latency,
        findings=tuple(findings),
        judgement=judgement,
    )


def pair_bandwidth(link: MeasuredPair) -> float:
    """Return GB/s one way: of the round trip without the way back of one element.

    That way back takes the latency, measured separately, and at most half of the round trip.
    """
    one_way = max(link.median_us - link.latency_us, link.median_us / 2)
    return _gb_per_s(link.size, one_way)


# ---------------------------------------------------------------- texts


def size_text(size: int) -> str:
    """Format bytes: ``4 KiB``, or ``12 bytes`` if it is no whole number of KiB."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power and size % (1 << power) == 0:
            return f"{size >> power} {unit}"
    return pluralize(size, "byte")


def doing_text(mark: Mapping[str, Any]) -> str:
    """Describe the current measurement, by a mark ``bench_doing``."""
    if "pairs" in mark:
        pairs = ", ".join(f"{a} and {b}" for a, b in mark["pairs"][:4])
        more = ", ..." if len(mark["pairs"]) > 4 else ""
        return f"nodes {pairs}{more}"
    return f"{mark['collective']} of {size_text(mark['size'])}"
