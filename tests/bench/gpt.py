"""``python -m tests.bench.gpt``: a step of jobs/train/gpt against nanoGPT's loop by hand.

Both train the same model on one rank of this CPU, and the sides take turns. ``--against FOLDER``
adds another copy of jobs/train/gpt, such as an older one: ``git archive REF jobs | tar -x -C DIR``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from clusterkit.cli.common import table
from clusterkit.run.logs import parse_mark
from tests.bench.__main__ import SECONDS, compare

GPT = Path(__file__).parents[2] / "jobs" / "train" / "gpt"
BATCH = 16
LOOP = """
import sys, time
sys.path.insert(0, sys.argv[1])
import torch
from gpt_data import as_tokens, read_text
from gpt_model import GPT, PRESETS

model_name, batch, steps = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
shape = PRESETS[model_name]
torch.manual_seed(0)
data = as_tokens(read_text())
model = GPT(shape)
decay = [p for p in model.parameters() if p.dim() >= 2]
plain = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)

def get_batch():
    starts = torch.randint(len(data) - shape.context, (batch,))
    x = torch.stack([data[i : i + shape.context].long() for i in starts])
    y = torch.stack([data[i + 1 : i + 1 + shape.context].long() for i in starts])
    return x, y

for step in range(1, steps + 1):
    started = time.perf_counter()
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * min(1.0, step / 20)
    loss = model(*get_batch())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    value = loss.item()
    seconds = time.perf_counter() - started
    print(f'@clusterkit {{"event": "metrics", "loss": {value}, "step_seconds": {seconds}}}')
"""
"""After nanoGPT's train.py: the same things in the same order, written for this model."""
READER = """
import sys, time
sys.path.insert(0, sys.argv[1])
import torch
from gpt_data import Batches, read
from gpt_model import GPT, PRESETS
from gpt_settings import Batch

shape, size, steps = PRESETS[sys.argv[2]], int(sys.argv[3]), int(sys.argv[4])
ahead, sampling = sys.argv[5] == "ahead", sys.argv[6]
gpt, text = GPT(shape), read(None, shape.context)
batches = Batches(text, 0, Batch(size, size, 1, 1), torch.device("cpu"), 0, sampling, ahead=ahead)
for step in range(1, steps + 1):
    started = time.perf_counter()
    (samples,) = batches.of_step(step)
    seconds = time.perf_counter() - started
    gpt(*samples).backward()
    print(f'@clusterkit {{"event": "metrics", "step_seconds": {seconds}}}')
"""
"""How long a step waits for its samples."""


def median_step(program: list[str]) -> float:
    """Seconds; the first steps, which allocate memory, are left out."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("CLUSTERKIT_")}
    env |= {"OMP_NUM_THREADS": "1", "CLUSTERKIT_DEVICE": "cpu"}
    done = subprocess.run(
        [sys.executable, *program], env=env, capture_output=True, text=True, timeout=SECONDS
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    events = [event for line in done.stdout.splitlines() if (event := parse_mark(line))]
    steps = [event["step_seconds"] for event in events if event["event"] == "metrics"]
    return statistics.median(steps[5:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="an older jobs/train/gpt")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    words = ["--model", args.model, "--global-batch", str(BATCH), "--steps", str(args.steps)]

    def ours(folder: Path = GPT) -> float:
        return median_step([str(folder / "train.py"), *words])

    with tempfile.TemporaryDirectory() as folder:
        loop = Path(folder, "loop.py")
        loop.write_text(LOOP)
        by_hand = [str(loop), str(GPT), args.model, str(BATCH), str(args.steps)]
        reader = Path(folder, "reader.py")
        reader.write_text(READER)
        waits = {
            (ahead, sampling): median_step(
                [str(reader), str(GPT), args.model, str(BATCH), str(args.steps), ahead, sampling]
            )
            for sampling in ("random", "epochs")
            for ahead in ("now", "ahead")
        }
        rows = [compare("ddp / nanoGPT's loop by hand", ours, lambda: median_step(by_hand),
                        args.rounds)]  # fmt: skip
        if args.against:
            old: Path = args.against
            rows.append(compare(f"ddp / {old}", ours, lambda: ours(old), args.rounds))
    need = ours()
    for (ahead, sampling), wait in waits.items():
        print(f"samples of a step, {sampling}, {ahead}: {wait * 1e3:.2f} of {need * 1e3:.1f} ms")
    print(table([row.cells() for row in rows], ["step", "ours s", "peer s", "ratio", "spread"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
