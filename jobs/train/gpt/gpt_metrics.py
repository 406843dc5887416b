"""Tell the outside what a rank is doing: one line of JSON each, behind the mark ``@clusterkit``.

Whatever reads the log can take them from there; clusterkit shows progress, metrics and plots from
``{"event": "metrics", "step": 3, "loss": 1.2, ...}``. Where something else has started the program
and people read its log as it is, each step has a line for them as well.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gpt_ranks import Explained, World


def report(event: str, **fields: object) -> None:
    """Write one line, in one system call so that ranks sharing a pipe cannot mix lines.

    JSON has no NaN or infinity: they are written as null.
    """
    record = {"event": event} | {key: _finite(value) for key, value in fields.items()}
    sys.stdout.flush()
    os.write(1, f"@clusterkit {json.dumps(record, allow_nan=False)}\n".encode())


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Reporter:
    """What rank 0 tells about the run; on the other ranks it keeps silent.

    It also times the phases of the run: one ends, and is reported, where the next begins.
    """

    def __init__(self, *, speaks: bool) -> None:
        self._speaks = speaks
        self._by_hand = "CLUSTERKIT_RUN_ID" not in os.environ
        self._phase: str | None = "imports"
        self._started_at = _process_started_at()

    def event(self, event: str, **fields: object) -> None:
        if self._speaks:
            if self._by_hand and event == "metrics":
                print(_readable(fields))
            report(event, **fields)

    def phase(self, name: str | None) -> None:
        """End the running phase and begin the next; None begins none."""
        now = time.time()
        if self._phase is not None:
            seconds = now - self._started_at
            self.event("phase", name=self._phase, started_at=self._started_at, seconds=seconds)
        self._phase, self._started_at = name, now


def _readable(fields: dict[str, object]) -> str:
    shown = (f"{value:.6g}" if isinstance(value, float) else value for value in fields.values())
    return "  ".join(f"{key} {value}" for key, value in zip(fields, shown, strict=True))


def _process_started_at() -> float:
    """In seconds since the epoch (to 10 ms); now, where it cannot be told."""
    now = time.time()
    try:
        with open("/proc/self/stat") as file:
            # The second field is the program's name, which may hold spaces and brackets.
            fields = file.read().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return now - max(time.clock_gettime(time.CLOCK_BOOTTIME) - started, 0.0)
    except (OSError, ValueError, IndexError, AttributeError):
        return now


class Progress:
    """The numbers of each step, reported once they are there; whether the ranks must stop."""

    def __init__(
        self, reporter: Reporter, meter: Meter, args: argparse.Namespace, tokens_per_step: int,
        first: int, notes: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.reporter, self._meter, self._args = reporter, meter, args
        self._tokens, self._first = tokens_per_step, first
        self.notes = dict(notes)  # what a checkpoint keeps: the first loss and the last
        self.stop = False  # whether any rank was asked to
        self.written = False  # whether all have written a checkpoint that waits for it
        self._unread: Callable[..., None] | None = None

    def begin(self, step: int) -> None:
        self._step, self._started = step, time.perf_counter()

    def end(self, rate: float, numbers: Callable[[], list[float]], *, now: bool) -> None:
        """Keep the step for ``report``; ``now``: wait until the GPU has done it."""
        if now:
            numbers()
        seconds = time.perf_counter() - self._started
        self._unread = partial(self._tell, self._step, rate, seconds, numbers)

    def report(self, **more: float) -> None:
        """Report the step that has ended, if it has not been."""
        self.written = False
        if self._unread is not None:
            tell, self._unread = self._unread, None
            tell(**more)

    def _tell(
        self, step: int, rate: float, seconds: float, numbers: Callable[[], list[float]],
        **more: float,
    ) -> None:  # fmt: skip
        loss, norm, stop, written = numbers()
        self.stop, self.written = self.stop or stop > 0, written == 1.0
        self.notes.update(loss=loss, first_loss=self.notes.get("first_loss", loss))
        at_ends = step in (self._first, self._args.steps) or stop > 0
        if more or at_ends or step % self._args.log_every == 0:
            pace = self._tokens / seconds
            self.reporter.event(
                "metrics", step=step, loss=loss, tokens_per_second=pace, step_seconds=seconds,
                learning_rate=rate, gradient_norm=norm, **self._meter.measured(pace), **more,
            )  # fmt: skip
        if self._args.stop_at_nan and not math.isfinite(loss):
            hint = "lower --learning-rate, or resume from a checkpoint before that step"
            raise Explained(f"the loss is {loss} at step {step}", hint)


PEAKS = {
    # GB300 and GB200 NVL72, HGX B200: 5, 5 and 4.5 petaFLOPS of a GPU with sparsity
    "NVIDIA GB300": 2500e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA B200": 2250e12,
    # H200, H100, GH200: 1,979 (SXM, Grace Hopper), 1,671 (NVL) and 1,513 (PCIe) with sparsity
    "NVIDIA H200": 989.4e12,
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 NVL": 835.5e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA GH200 120GB": 989.4e12,
    "NVIDIA GH200 480GB": 989.4e12,
    "NVIDIA GH200 144G HBM3e": 989.4e12,
    # A100, A800, A30, A40, A10: these print the dense figure first
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A800-SXM4-80GB": 312e12,
    "NVIDIA A800 80GB PCIe": 312e12,
    "NVIDIA A30": 165e12,
    "NVIDIA A40": 149.7e12,
    "NVIDIA A10": 125e12,
    # L40S and L40 (dense first), L4 (242 with sparsity)
    "NVIDIA L40S": 362.05e12,
    "NVIDIA L40": 181.05e12,
    "NVIDIA L4": 121e12,
    # Whitepapers of RTX Blackwell, Ada and GA102: "BF16 Tensor TFLOPS with FP32 Accumulate"
    "NVIDIA GeForce RTX 5090": 209.5e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA RTX A6000": 154.8e12,
}
"""Dense bf16 and fp16 FLOP/s by the whole name that torch and nvidia-smi give a GPU: of a part of
it, "L4" would be an L40S, and a MIG slice or a laptop's chip a whole card. The names are those of
NVIDIA's driver (github.com/NVIDIA/open-gpu-kernel-modules, README.md), the figures those of
NVIDIA's data sheets, most of which print twice as much, "with sparsity"."""


class Meter:
    """What the GPUs did of what they could: nothing on CPUs. Made by all ranks together."""

    def __init__(
        self, facts: Mapping[str, Any], parameters: int, context: int, dtype: str, world: World
    ) -> None:
        self._gpu = world.device.type == "cuda"
        self._most = None  # tokens per second
        if self._gpu and dtype != "fp32":
            names = world.gather(torch.cuda.get_device_name(world.device))
            if all(name in PEAKS for name in names):
                most = sum(PEAKS[name] for name in names)
                self._most = most / flops_per_token(facts, parameters, context)

    def measured(self, tokens_per_second: float) -> dict[str, float]:
        """For the metrics line: MFU, of 1, and the most memory that was ever allocated on this
        rank's GPU, in bytes."""
        if not self._gpu:
            return {}
        memory = {"peak_memory": torch.cuda.max_memory_allocated()}
        return memory if self._most is None else {"mfu": tokens_per_second / self._most, **memory}


def flops_per_token(facts: Mapping[str, Any], parameters: int, context: int) -> float:
    """Of the forward and the backward pass: 6 N + 12 L H Q T.

    Chowdhery et al. 2022 (PaLM), https://arxiv.org/abs/2204.02311, appendix B. N: parameters,
    without position embeddings, which multiply nothing; L layers of H Q = width over T tokens. What
    is computed twice (activation checkpointing) counts once. Where the layers are not known: 6 N.
    """
    layers, width = facts.get("layers", 0), facts.get("width", 0)
    places = 0 if facts.get("llama") else facts.get("context", 0)
    return 6.0 * (parameters - places * width) + 12.0 * layers * width * context


def comms_table(summary: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> str:
    """What a comms logger has counted, one line for each operation and message size."""
    lines = [f"{'operation':<24}{'bytes':>12}{'count':>8}{'total ms':>12}{'mean ms':>10}"]
    for operation, sizes in sorted(summary.items()):
        for size, entry in sorted(sizes.items()):
            lines.append(
                f"{operation:<24}{size:>12}{entry['count']:>8}"
                f"{entry['total_latency_ms']:>12.2f}{entry['avg_latency_ms']:>10.3f}"
            )
    return "\n".join(lines)


def profiler(folder: str | None, rank: int) -> Any:
    """A context whose ``step`` ends a step: traces the fourth to the sixth into ``folder``.

    Open the files in https://ui.perfetto.dev or chrome://tracing.
    """
    if folder is None:
        return nullcontext(SimpleNamespace(step=lambda: None))
    Path(folder).mkdir(parents=True, exist_ok=True)
    file = str(Path(folder, f"rank-{rank}.json"))
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=2, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda trace: trace.export_chrome_trace(file),
    )
