"""The prediction of `clusterkit estimate` held against what training really allocates.

``make estimate-check`` runs every configuration of `CASES` on this machine's CPU, tracks the live
tensors of each rank (`tests/live/programs/tracked.py`), and writes the table of docs/estimate.md.
`tests/live/test_estimate.py` runs a few of them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from clusterkit import api
from clusterkit.cli.common import table
from clusterkit.estimate import jobs
from clusterkit.estimate.memory import Memory, predict
from clusterkit.run.status import State
from clusterkit.spec import JobSpec

ROOT = Path(__file__).parents[2]
GPT = ROOT / "jobs" / "train" / "gpt" / "train.py"
TRACKED = Path(__file__).parent / "programs" / "tracked.py"
PAGE = ROOT / "docs" / "estimate.md"
TOLERANCE = 0.10
STEPS = 3
"""The first makes the optimizer's states, DDP rebuilds its buckets in the second."""
SECONDS = 600.0
SMALL_BUCKETS = {"reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000}
"""DeepSpeed's own would be 2 GB, and hide everything else of a small model."""
_PART = re.compile(r"(<!-- measured: estimate -->\n).*?(<!-- /measured -->)", re.DOTALL)

QWEN2 = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 256,
    "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}  # fmt: skip

_TOKENIZER = {
    "version": "1.0",
    "pre_tokenizer": {
        "type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False,
    },
    "model": {
        "type": "WordLevel", "vocab": {chr(n): n for n in range(128)}, "unk_token": "?",
    },
}  # fmt: skip
"""A token for every character."""
_TOKENIZER_CONFIG = (
    ("tokenizer_config", {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "?"}),
)


@dataclass(frozen=True)
class Case:
    """One configuration: flags of train.py, and what the job file would say.

    ``QWEN2`` among the flags stands for a folder with that config.
    """

    name: str
    flags: str
    batch: tuple[int, int]
    """Global and micro."""
    ranks: int = 2
    zero: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = ""


def _zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"stage": stage, **SMALL_BUCKETS, **more}


_CPU = {"device": "cpu"}

CASES = (
    Case("ddp, 1 rank", "--strategy ddp --model small", (4, 4), ranks=1),
    Case("ddp", "--strategy ddp --model small", (8, 4)),
    Case("ddp, micro batch 1", "--strategy ddp --model small", (2, 1)),
    Case("ddp, accumulation 4", "--strategy ddp --model small", (16, 2)),
    Case("ddp, bf16", "--strategy ddp --model small --dtype bf16", (8, 4)),
    Case(
        "ddp, activation checkpointing",
        "--strategy ddp --model small --activation-checkpointing",
        (8, 4),
    ),
    Case("ddp, tiny", "--strategy ddp --model tiny", (32, 16)),
    Case("ddp, 124m", "--strategy ddp --model 124m --context 128", (2, 1)),
    Case("zero0", "--strategy deepspeed --model small", (8, 4), zero=_zero(0)),
    Case("zero0, context 16", "--strategy deepspeed --model small --context 16", (2, 1),
         zero=_zero(0)),
    Case("zero1", "--strategy deepspeed --model small", (8, 4), zero=_zero(1)),
    Case("zero1, bf16", "--strategy deepspeed --model small", (8, 4), zero=_zero(1), dtype="bf16"),
    Case("zero1, pipeline", "--strategy deepspeed --model small --mesh pp=2", (8, 2),
         zero=_zero(1)),
    Case("zero1, AutoTP", "--strategy deepspeed --model small --mesh tp=2", (4, 4), zero=_zero(1)),
    Case("zero1, 124m", "--strategy deepspeed --model 124m --context 128", (2, 1), zero=_zero(1)),
    Case("zero1, AutoTP, 124m", "--strategy deepspeed --model 124m --context 128 --mesh tp=2",
         (2, 2), zero=_zero(1)),
    Case("zero2", "--strategy deepspeed --model small", (8, 4), zero=_zero(2)),
    Case("zero2, accumulation 4", "--strategy deepspeed --model small", (16, 2), zero=_zero(2)),
    Case("zero2, default buckets", "--strategy deepspeed --model small", (8, 4), zero={"stage": 2}),
    Case("zero2, optimizer offloaded", "--strategy deepspeed --model small", (8, 4),
         zero=_zero(2, offload_optimizer=_CPU)),
    Case("zero3", "--strategy deepspeed --model small", (8, 4), zero=_zero(3)),
    Case("zero3, bf16", "--strategy deepspeed --model small", (8, 4), zero=_zero(3), dtype="bf16"),
    Case("zero3, few live parameters", "--strategy deepspeed --model small", (8, 4),
         zero=_zero(3, stage3_max_live_parameters=2_000_000, stage3_max_reuse_distance=2_000_000,
                    stage3_prefetch_bucket_size=500_000, stage3_param_persistence_threshold=1000)),
    Case("zero3, all offloaded", "--strategy deepspeed --model small", (8, 4),
         zero=_zero(3, offload_optimizer=_CPU, offload_param=_CPU)),
    Case("fsdp", "--strategy fsdp --model small", (8, 4)),
    Case("fsdp, no reshard", "--strategy fsdp --model small --no-reshard-after-forward", (8, 4)),
    Case("fsdp, accumulation 4", "--strategy fsdp --model small", (16, 2)),
    Case("fsdp, bf16", "--strategy fsdp --model small --dtype bf16", (8, 4)),
    Case("tp", "--strategy tp --model small", (4, 4)),
    Case("tp, sequence parallel", "--strategy tp --model small --sequence-parallel", (4, 4)),
    Case("pp, 1F1B", "--strategy pp --model small", (8, 2)),
    Case("pp, GPipe", "--strategy pp --model small --schedule gpipe", (8, 2)),
    Case("3d on 8 ranks", "--strategy 3d --model small --mesh pp=2,dp=2,tp=2", (8, 2), ranks=8),
    Case("qwen2 (Hugging Face), ddp", "--strategy ddp --model QWEN2 --context 256", (8, 4)),
    Case("qwen2 (Hugging Face), zero2", "--strategy deepspeed --model QWEN2 --context 256", (8, 4),
         zero=_zero(2)),
)  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """Bytes: predicted, and of the rank that allocated most."""

    case: Case
    predicted: Memory
    measured: int

    @property
    def difference(self) -> float:
        """Of the prediction from what was measured, as a part of it."""
        offloaded = self.predicted.host_per_node / self.case.ranks
        return (self.predicted.peak + offloaded) / self.measured - 1


def job_of(case: Case, folder: Path) -> JobSpec:
    """The job that a person would submit; its model's config and its text lie in ``folder``."""
    for name, document in (("config", QWEN2), ("tokenizer", _TOKENIZER), *_TOKENIZER_CONFIG):
        (folder / f"{name}.json").write_text(json.dumps(document))
    text = folder / "text"
    text.write_bytes(GPT.read_bytes() * 20)
    flags = case.flags.replace("QWEN2", str(folder)).split()
    deepspeed: dict[str, Any] | None = None
    if case.zero:
        deepspeed = {"zero_optimization": dict(case.zero), "gradient_clipping": 1.0}
        if case.dtype:
            deepspeed[case.dtype] = {"enabled": True}
    # As flags and not as the job's batch, which shares it between all ranks whatever the mesh.
    size, micro = case.batch
    flags += ["--global-batch", str(size), "--micro-batch", str(micro)]
    return JobSpec(
        name="estimate",
        program=str(GPT),
        estimate="gpt",
        args=(*flags, "--data", str(text), "--steps", str(STEPS)),
        gpus_per_node=case.ranks,
        device="cpu",
        threads_per_rank=1,
        deepspeed=deepspeed,
        workdir=str(ROOT),
    )


def predicted(job: JobSpec) -> Memory:
    """What `clusterkit estimate` says of a job on CPUs."""
    ranks = int(job.gpus_per_node)
    program = jobs.read_program(job, nodes=1, local_ranks=ranks)
    model = jobs.model_of(program, count=True)
    assert model is not None
    setup = jobs.setup_of(job, program, ranks=ranks, local_ranks=ranks, device="cpu", model=model)
    return predict(model, setup)


def measured(job: JobSpec) -> dict[str, int]:
    """The tracked bytes of the rank with the highest peak.

    Raises:
        RuntimeError: the run did not succeed, or a rank told nothing.
    """
    tracked = msgspec.structs.replace(job, program=str(TRACKED), args=(str(GPT), *job.args))
    run = api.submit(tracked)
    try:
        status = run.wait(SECONDS)
    finally:
        run.cancel()
    ranks = [mark for mark in run.reported_events() if mark["event"] == "memory"]
    if status.state is not State.SUCCEEDED or len(ranks) != job.gpus_per_node:
        raise RuntimeError(f"{' '.join(job.args)}: {status}")
    return max(ranks, key=lambda mark: int(mark["peak"]))


def compare(case: Case) -> Compared:
    """Predict a case, run it, and put both side by side."""
    with tempfile.TemporaryDirectory() as folder:
        job = job_of(case, Path(folder))
        return Compared(case, predicted(job), measured(job)["peak"])


def rows(results: Sequence[Compared]) -> list[list[str]]:
    """The table's lines: megabytes (10^6)."""
    return [
        [result.case.name, str(result.case.ranks),
         "x".join(map(str, (result.case.batch[1], result.case.batch[0]))),
         f"{result.predicted.peak / 1e6:.1f}", f"{result.measured / 1e6:.1f}",
         f"{100 * result.difference:+.1f} %", result.predicted.moment]
        for result in results
    ]  # fmt: skip


HEADER = ["Configuration", "Ranks", "Micro x global", "Predicted MB", "Measured MB", "Difference",
          "Peak predicted at"]  # fmt: skip


def markdown(results: Sequence[Compared]) -> str:
    """The table for docs/estimate.md, with the versions that were measured."""
    lines = [HEADER, ["---"] * len(HEADER), *rows(results)]
    versions = ", ".join(
        f"{name} {metadata.version(name)}" for name in ("torch", "deepspeed", "transformers")
    )
    worst = max(abs(result.difference) for result in results)
    return "\n".join([
        *(f"| {' | '.join(line)} |" for line in lines), "",
        f"Largest difference {100 * worst:.1f} %, of {len(results)} configurations; {versions}, "
        "CPU, gloo.",
    ])  # fmt: skip


def write_page(results: Sequence[Compared], page: Path = PAGE) -> None:
    """Put the table between its markers."""
    text = page.read_text()
    new, count = _PART.subn(lambda m: f"{m[1]}\n{markdown(results)}\n\n{m[2]}", text)
    if count != 1:
        raise ValueError(f"{page} has no place for the table")
    page.write_text(new)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.live.estimate", description=__doc__)
    parser.add_argument("names", nargs="*", help="run only cases with one of these in their name")
    parser.add_argument("--write", action="store_true", help="put the table into docs/estimate.md")
    options = parser.parse_args(arguments)
    chosen = [
        case for case in CASES if not options.names or any(n in case.name for n in options.names)
    ]
    if not chosen:
        parser.error("no such case")
    results = []
    for case in chosen:
        print(f"running {case.name}", file=sys.stderr)
        results.append(compare(case))
        print(" ".join(rows(results[-1:])[0]), file=sys.stderr)
    print(table(rows(results), HEADER))
    worst = max(abs(result.difference) for result in results)
    held = worst <= TOLERANCE
    print(f"\nlargest difference {100 * worst:.1f} %, {'within' if held else 'NOT within'} "
          f"{100 * TOLERANCE:.0f} %")  # fmt: skip
    if options.write:
        write_page(results)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
