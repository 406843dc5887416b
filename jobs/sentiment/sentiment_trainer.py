"""Classify reviews with the Hugging Face Trainer: DDP, or DeepSpeed ZeRO if the job has a config.

    clusterkit submit jobs/sentiment/sentiment-trainer.yaml      # DDP
    clusterkit submit jobs/sentiment/sentiment-zero2.yaml        # with ZeRO-2; -zero3: with ZeRO-3
    torchrun --nproc-per-node 2 jobs/sentiment/sentiment_trainer.py

Data, model and tokenizer are those of sentiment.py; the loop is the Trainer's. What it must be told
is here: batch sizes and clipping that agree with the DeepSpeed config, and, on CPUs, to use them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from classifier import choose_model, encode, import_transformers, join, report
from reviews import BadInput, learning_rate, make_parser, read_reviews, split

SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
AUTO = {"gradient_clipping": 1.0, "zero_optimization": {}, **dict.fromkeys(SIZES, "auto")}


def main() -> None:
    args = parse_args()
    reviews = read_reviews(args.data, separator=args.separator, encoding=args.encoding)
    parts = split(len(reviews.texts), args.validation, args.seed)
    config = read_deepspeed_config(args.deepspeed_config) if args.deepspeed_config else None
    texts = [reviews.texts[row] for row in parts[0]]
    tokenizer, make_model = choose_model(args.model, texts, reviews.classes, args.max_length)
    device = join()
    hf = import_trainer(device, config)
    if dist.get_rank() == 0:
        print(reviews.describe(*map(len, parts)), flush=True)
    sets = [encode(tokenizer, reviews, rows, args.max_length) for rows in parts]
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(args.seed)
        options = trainer_options(args, device, config)
        trainer = hf.Trainer(
            model=make_model(),
            args=hf.TrainingArguments(output_dir=folder, **options),
            train_dataset=sets[0],
            eval_dataset=sets[1],
            data_collator=hf.DataCollatorWithPadding(tokenizer),
            compute_metrics=count_right,
            callbacks=[make_callback(hf, len(sets[1]))],
        )
        trainer.remove_callback(hf.PrinterCallback)
        # The classifier takes any keyword, so transformers 5.23 believes that its loss is a sum
        # over all ranks' rows, and multiplies it by the ranks and the accumulation. It is a mean.
        trainer.model_accepts_loss_kwargs = False
        trainer.train()
        print(describe(trainer, config), flush=True)
        if args.output:
            trainer.save_model(args.output)  # with ZeRO-3 the ranks gather it: all must call
            tokenizer.save_pretrained(args.output)
    report("end", steps=trainer.state.global_step)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a process that used gloo sometimes aborts where the interpreter would end it


def trainer_options(
    args: argparse.Namespace, device: torch.device, config: dict[str, Any] | None
) -> dict[str, Any]:
    """TrainingArguments; what stands in the DeepSpeed config as well must be the same there."""
    on_cpu = device.type == "cpu"
    return {
        "per_device_train_batch_size": args.batch,
        "per_device_eval_batch_size": args.batch,
        "gradient_accumulation_steps": args.accumulation,
        "max_grad_norm": 1.0 if config is None else config["gradient_clipping"],
        "deepspeed": config,
        "num_train_epochs": args.epochs,
        "learning_rate": learning_rate(args),
        "seed": args.seed,
        # Without it the Trainer takes a batch per GPU for one per rank, and DeepSpeed refuses.
        "use_cpu": on_cpu,
        "dataloader_pin_memory": not on_cpu,
        "ddp_find_unused_parameters": False,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "report_to": "none",
    }


def count_right(prediction: Any) -> dict[str, float]:
    """For the Trainer, which has gathered the rows of all ranks: each of them once."""
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": float(right.mean()), "rows": len(right)}


def make_callback(hf: ModuleType, rows: int) -> Any:
    """What passes the Trainer's own logs on to clusterkit."""

    class Reports(hf.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            report("start", steps=state.max_steps, first_step=state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            if "loss" in logs:
                values = {"loss": logs["loss"], "gradient_norm": logs.get("grad_norm")}
                values["learning_rate"] = logs.get("learning_rate")
                report("metrics", step=state.global_step, **values)
            elif "eval_loss" in logs:
                if logs["eval_rows"] != rows:
                    raise RuntimeError(f"{logs['eval_rows']} of {rows} rows were evaluated")
                values = {name: logs[f"eval_{name}"] for name in ("loss", "accuracy")}
                if state.is_world_process_zero:
                    print(f"epoch {logs['epoch']:g}  validation loss {values['loss']:.4f}  "
                          f"accuracy {values['accuracy']:.4f}", flush=True)  # fmt: skip
                report("evaluation", step=state.global_step, **values)

    return Reports()


def describe(trainer: Any, config: dict[str, Any] | None) -> str:
    """One line of this rank. ZeRO-3 leaves it a part of each parameter, in ``ds_tensor``."""
    parameters = list(trainer.model.parameters())
    held = sum(getattr(p, "ds_tensor", p).numel() for p in parameters)
    whole = sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
    engine = type(trainer.model_wrapped).__name__
    stage = "" if config is None else f" ZeRO-{trainer.model_wrapped.zero_optimization_stage()}"
    return f"rank {dist.get_rank()} | {engine}{stage} | keeps {held} of {whole} parameters"


def import_trainer(device: torch.device, config: dict[str, Any] | None) -> ModuleType:
    """transformers, with what the Trainer needs beside it."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # accelerate looks at DeepSpeed anyway
    import accelerate  # noqa: F401 (the Trainer imports it, and explains less where it is missing)

    if config is not None:
        import deepspeed.ops

        # DeepSpeed calls collectives by names that torch 2.13 has renamed.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        if device.type == "cpu":
            # It would compile a collective at start, which takes a minute; gloo does without.
            deepspeed.ops.__compatible_ops__ = {}
        if "offload_optimizer" in config["zero_optimization"]:
            config.setdefault("zero_force_ds_cpu_optimizer", False)  # the Trainer brings its own
    return import_transformers()


def read_deepspeed_config(path: str) -> dict[str, Any]:
    """The DeepSpeed config; batch sizes that it leaves out are the Trainer's."""
    try:
        return AUTO | json.loads(Path(path).read_text())
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(f"DeepSpeed config {path}: {error}") from None


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add, passes = parser.add_argument, os.environ.get("CLUSTERKIT_ACCUMULATION") or 1
    add("--accumulation", type=int, default=passes, metavar="PASSES", help="in a step (default: 1)")
    config = os.environ.get("CLUSTERKIT_DEEPSPEED_CONFIG")
    add("--deepspeed-config", default=config, metavar="FILE",
        help="JSON (default: the job's deepspeed section)")  # fmt: skip
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
